"""The source of an answer: which results of an episode hold it, and which repeat others.

All of it is read from the observations as the model saw them, so after they were cut to
`rollout.max_observation_tokens`; what was cut off is no evidence.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from jaxrl.envs.answers import normalize_answer
from jaxrl.envs.base import NO_INFORMATION, Turn
from jaxrl.envs.costs import calls_of

_TAG = re.compile(r"</?[A-Za-z]\w*>")
_DOCUMENT = re.compile(r"^ *Doc \d+ ?\(Title: ", re.MULTILINE)
_NO_WORD = re.compile(r"[\W_]+")


@dataclass(frozen=True, kw_only=True)
class Attribution:
    """Relation of one episode's results to its answer.

    Attributes:
        has_evidence: an accepted answer occurs in a result.
        num_redundant: searches that ask what the episode has asked before, or that find nothing
            which it has not seen.
    """

    has_evidence: bool
    num_redundant: int


def attribute(turns: Sequence[Turn], answers: Sequence[str]) -> Attribution:
    """Looks for accepted answers in an episode's results, and counts redundant searches."""
    observations = [turn.observation for turn in turns if turn.observation]
    asked: set[str] = set()
    seen: list[str] = []
    num_redundant = 0
    for turn in turns:
        queries = [" ".join(c.call.lower().split()) for c in calls_of(turn) if c.tool is None]
        results = results_of(turn.observation or "") if queries else []
        # A result that was cut is the beginning of the whole one.
        is_known = bool(results) and all(
            any(old.startswith(new) for old in seen) for new in results
        )
        for query in queries:
            num_redundant += is_known or query in asked
            asked.add(query)
        seen += results
    return Attribution(
        has_evidence=any(occurs(one, text) for text in observations for one in answers),
        num_redundant=num_redundant,
    )


def occurs(answer: str, observation: str) -> bool:
    """Return True if an answer stands in an observation as whole words.

    Both are compared as `exact_match` does (case, articles, blanks and punctuation aside), once
    without their punctuation and once with blanks in its place: `U.S.` is `US`, and `1914-1918`
    holds `1914`. Tags and the numbers of documents are no text.
    """
    text = _DOCUMENT.sub(" ", _TAG.sub(" ", observation))
    return any(
        f" {read(answer)} " in f" {read(text)} "
        for read in (normalize_answer, lambda words: normalize_answer(_NO_WORD.sub(" ", words)))
        if read(answer)
    )


def results_of(observation: str) -> list[str]:
    """The results in an observation: its documents, or all of it where none are numbered."""
    text = _TAG.sub(" ", observation)
    parts = _DOCUMENT.split(text)
    pieces = [" ".join(part.split()) for part in (parts[1:] or parts)]
    return [piece for piece in pieces if piece and not piece.startswith(NO_INFORMATION)]
