"""The source of an answer: which results of an episode hold it, and which repeat others.

All of it is read from the results of searches that were executed, as the model saw them. Errors,
results of other tools and what `rollout.max_observation_tokens` cut off are no evidence. Neither is
an answer whose words all stand in the query: the model wrote them, and the result may repeat them.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

import regex

from jaxrl.envs.base import NO_INFORMATION, Turn
from jaxrl.envs.rewards.qa import NO_PUNCTUATION, normalize_answer
from jaxrl.envs.tools.budget import calls_of
from jaxrl.utils.text import UNSPACED, fold

_TAG = re.compile(r"</?[A-Za-z]\w*>")
_DOCUMENT = re.compile(r"^ *Doc \d+ ?\(Title: ", re.MULTILINE)
_NO_WORD = regex.compile(r"[^\p{L}\p{M}\p{N}]+")
_UNSPACED = regex.compile(rf"({UNSPACED}\p{{M}}*)", regex.V1)
_ESCAPE = re.compile(r"\\(?:[bfnrt]|u[0-9a-fA-F]{4})")
_MAX_JOINED = 8  # words of a query that a result may write as one


@dataclass(frozen=True, kw_only=True)
class Attribution:
    """Relation of one episode's results to its answer.

    Attributes:
        has_evidence: A search shows an accepted answer, see `shows_answer`.
        num_redundant: searches that ask what the episode has asked before, or that find nothing
            which it has not seen.
    """

    has_evidence: bool
    num_redundant: int


def attribute(turns: Sequence[Turn], answers: Sequence[str]) -> Attribution:
    """Looks for accepted answers in an episode's results, and counts redundant searches."""
    asked: set[str] = set()
    seen: list[str] = []
    num_redundant = 0
    for turn in turns:
        queries = [" ".join(c.call.lower().split()) for c in calls_of(turn) if c.tool is None]
        results = [piece for _, result in search_results(turn) for piece in results_of(result)]
        # A result that was cut is the beginning of the whole one.
        is_known = bool(results) and all(
            any(old.startswith(new) for old in seen) for new in results
        )
        for query in queries:
            num_redundant += is_known or query in asked
            asked.add(query)
        seen += results
    return Attribution(
        has_evidence=any(shows_answer(turn, answers) for turn in turns),
        num_redundant=num_redundant,
    )


def search_results(turn: Turn) -> list[tuple[str, str]]:
    """Return query and result of each search of a turn that was executed, as the model saw it."""
    shown = turn.results or ((turn.observation,) if turn.observation else ())
    return [
        (record.call, shown[record.result_index])
        for record in calls_of(turn)
        if record.tool is None and record.error is None and record.result_index < len(shown)
    ]


def shows_answer(turn: Turn, answers: Sequence[str]) -> bool:
    """Return True if a search of a turn shows an accepted answer that its query does not hold.

    A query holds an answer if all words of the answer are among its own, in any order.
    """
    for query, result in search_results(turn):
        if not results_of(result):
            continue
        asked = _words_of(query)
        for answer in answers:
            is_asked = any(words and asked.issuperset(words.split()) for words in _readings(answer))
            if not is_asked and occurs(answer, result):
                return True
    return False


def _words_of(query: str) -> set[str]:
    """Return the words of a query, and those that its words make without the blanks between them.

    The latter since a result may repeat `java script` as `java-script`.
    """
    words: set[str] = set()
    # A call of several arguments is JSON, which may escape the blanks between words.
    for text in (query, _ESCAPE.sub(" ", query)):
        plain = _plain(text)
        # What is an article in the query may be a letter of the answer.
        spellings = plain.translate(NO_PUNCTUATION), _NO_WORD.sub(" ", plain)
        for reading in map(str.split, (*spellings, *_readings(text))):
            for start in range(len(reading)):
                words.update(itertools.accumulate(reading[start : start + _MAX_JOINED]))
    return words


def occurs(answer: str, observation: str) -> bool:
    """Return True if an answer stands in an observation as whole words.

    Both are compared as `exact_match` does (case, articles, blanks and punctuation aside), once
    without their punctuation and once with blanks in its place: `U.S.` is `US`, and `1914-1918`
    holds `1914`. As in BM25, compatibility forms are equal, characters that nobody sees are none,
    and a letter of a script without blanks is a word. Tags and the numbers of documents are no
    text.
    """
    text = _DOCUMENT.sub(" ", _TAG.sub(" ", observation))
    readings = zip(_readings(answer), _readings(text), strict=True)
    return any(f" {words} " in f" {others} " for words, others in readings if words)


def _readings(text: str) -> tuple[str, str]:
    """Return a text normalised without its punctuation, and with blanks in its place."""
    text = _plain(text)
    return normalize_answer(text), normalize_answer(_NO_WORD.sub(" ", text))


def _plain(text: str) -> str:
    """Return a folded text with blanks around each letter of a script without blanks."""
    return _UNSPACED.sub(r" \1 ", fold(text))


def results_of(observation: str) -> list[str]:
    """The results in an observation: its documents, or all of it where none are numbered."""
    text = _TAG.sub(" ", observation)
    parts = _DOCUMENT.split(text)
    pieces = [" ".join(part.split()) for part in (parts[1:] or parts)]
    return [piece for piece in pieces if piece and not piece.startswith(NO_INFORMATION)]
