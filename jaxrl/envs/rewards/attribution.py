"""Attribution of an answer to the search results of an episode.

Evidence is the text that executed searches returned and the model saw. Errors and results of other
tools do not count. An answer whose words are all in the query does not count either, since the
result may merely repeat the query.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

import regex

from jaxrl.envs.base import NO_INFORMATION, Turn
from jaxrl.envs.rewards.qa import NO_PUNCTUATION, normalize_answer
from jaxrl.envs.tools.budget import get_call_records
from jaxrl.utils.text import UNSPACED, fold_case

_TAG = re.compile(r"</?[A-Za-z]\w*>")
_DOCUMENT = re.compile(r"^ *Doc \d+ ?\(Title: ", re.MULTILINE)
_NON_WORD = regex.compile(r"[^\p{L}\p{M}\p{N}]+")
_UNSPACED = regex.compile(rf"({UNSPACED}\p{{M}}*)", regex.V1)
_ESCAPE = re.compile(r"\\(?:[bfnrt]|u[0-9a-fA-F]{4})")
_MAX_JOINED = 8  # maximum number of query words that a result may write as one word


@dataclass(frozen=True, kw_only=True)
class Attribution:
    """Evidence for the accepted answers in an episode's search results.

    Attributes:
        has_evidence: True if any search result contains an accepted answer; see `shows_answer`.
        num_redundant: Number of searches that repeat a query or return nothing new.
    """

    has_evidence: bool
    num_redundant: int


def attribute_answers(turns: Sequence[Turn], answers: Sequence[str]) -> Attribution:
    """Find accepted answers in an episode's search results, and count redundant searches."""
    query_terms: set[str] = set()
    seen_results: list[str] = []
    num_redundant = 0
    for turn in turns:
        queries = [
            " ".join(c.call.lower().split()) for c in get_call_records(turn) if c.tool is None
        ]
        results = [
            piece for _, result in get_search_results(turn) for piece in split_documents(result)
        ]
        # A result may have been truncated, so a prefix of an earlier result is not new.
        is_known = bool(results) and all(
            any(old.startswith(new) for old in seen_results) for new in results
        )
        for query in queries:
            num_redundant += is_known or query in query_terms
            query_terms.add(query)
        seen_results += results
    return Attribution(
        has_evidence=any(shows_answer(turn, answers) for turn in turns),
        num_redundant=num_redundant,
    )


def get_search_results(turn: Turn) -> list[tuple[str, str]]:
    """Return the query and the displayed result of each executed search in a turn."""
    shown = turn.results or ((turn.observation,) if turn.observation else ())
    return [
        (record.call, shown[record.result_index])
        for record in get_call_records(turn)
        if record.tool is None and record.error is None and record.result_index < len(shown)
    ]


def shows_answer(turn: Turn, answers: Sequence[str]) -> bool:
    """Return True if a result contains an accepted answer that is not entirely in the query."""
    for query, result in get_search_results(turn):
        if not split_documents(result):
            continue
        query_terms = _split_query(query)
        for answer in answers:
            is_in_query = any(
                words and query_terms.issuperset(words.split())
                for words in _build_normalized_forms(answer)
            )
            if not is_in_query and occurs_in(answer, result):
                return True
    return False


def _split_query(query: str) -> set[str]:
    """Return a query's words and the concatenations of adjacent words.

    For example, `java script` also contains `javascript`.
    """
    words: set[str] = set()
    # A call with several arguments is JSON, which may escape whitespace.
    for text in (query, _ESCAPE.sub(" ", query)):
        plain = _fold_text(text)
        # The article "a" in the query may be a letter in the answer, so keep articles too.
        spellings = plain.translate(NO_PUNCTUATION), _NON_WORD.sub(" ", plain)
        for word_list in map(str.split, (*spellings, *_build_normalized_forms(text))):
            for start in range(len(word_list)):
                words.update(itertools.accumulate(word_list[start : start + _MAX_JOINED]))
    return words


def occurs_in(answer: str, observation: str) -> bool:
    """Return True if an observation contains an answer as complete words.

    Both are normalized as in `exact_match`, once with punctuation removed (`U.S.` equals `US`) and
    once with punctuation replaced by spaces (`1914-1918` contains `1914`). Text is NFKC-normalized,
    invisible characters are ignored, and each letter is a word in languages written without spaces.
    Tags and document numbers are ignored.
    """
    text = _DOCUMENT.sub(" ", _TAG.sub(" ", observation))
    form_pairs = zip(_build_normalized_forms(answer), _build_normalized_forms(text), strict=True)
    return any(f" {words} " in f" {others} " for words, others in form_pairs if words)


def _build_normalized_forms(text: str) -> tuple[str, str]:
    """Normalize a text twice: with punctuation removed and with punctuation as spaces."""
    text = _fold_text(text)
    return normalize_answer(text), normalize_answer(_NON_WORD.sub(" ", text))


def _fold_text(text: str) -> str:
    """Fold case, and put spaces around letters of languages that are written without spaces."""
    return _UNSPACED.sub(r" \1 ", fold_case(text))


def split_documents(observation: str) -> list[str]:
    """Return an observation's numbered documents, or its complete text if it has none."""
    text = _TAG.sub(" ", observation)
    parts = _DOCUMENT.split(text)
    pieces = [" ".join(part.split()) for part in (parts[1:] or parts)]
    return [piece for piece in pieces if piece and not piece.startswith(NO_INFORMATION)]
