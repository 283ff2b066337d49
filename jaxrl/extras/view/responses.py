"""Split responses into segments by tag, and classify wrong answers."""

from __future__ import annotations

import re
from typing import Any

from jaxrl.envs.protocol import PROTOCOLS
from jaxrl.envs.rewards.qa import normalize_answer
from jaxrl.utils.json_io import to_finite_float

FAILURES = {
    "found": ("Wrong, evidence found", "A search returned an accepted answer."),
    "not_found": ("Wrong, evidence not found", "No search returned an accepted answer."),
    "no_search": ("Wrong, no search", "Answered without searching."),
    "abstained": ("Abstained", "Declined to answer."),
    "malformed": ("Malformed", "Ended a turn with neither a search nor an answer."),
    "out_of_budget": ("Out of budget", "No tokens or searches left for an answer."),
    "environment_error": ("Environment error", "The environment failed; not scored."),
}
"""Label and description of each kind of failure."""

_TAGS = "|".join(dict.fromkeys(tag for make in PROTOCOLS.values() for tag in make().tags))
_SEGMENT = re.compile(rf"<({_TAGS})>(.*?)(?:</\1>|(?=<(?:{_TAGS})>)|\Z)", re.DOTALL)
_CALL_ENDS = ("</search>", "</python>")


def split_response(response: str) -> list[tuple[str, str]]:
    """Split a response into (kind, text) by its tags.

    The kind is a tag, `text` outside all tags, or `forged`. A tool result that does not directly
    follow a call is forged, because the model must have written it. An unclosed segment ends at the
    next tag.
    """
    segments, end = [], 0
    for match in _SEGMENT.finditer(response):
        segments.append(("text", response[end : match.start()]))
        kind = match[1]
        if kind in ("information", "result"):
            follows_call = response[: match.start()].rstrip().endswith(_CALL_ENDS)
            kind = "information" if follows_call else "forged"
        segments.append((kind, match[2].strip()))
        end = match.end()
    segments.append(("text", response[end:]))
    return [(kind, text) for kind, text in segments if kind != "text" or text.strip()]


def is_correct(record: dict[str, Any]) -> bool | None:
    """Return True if an answer is an exact match; None if it was not scored."""
    score = to_finite_float(record.get("exact_match"))
    has_failed = record.get("outcome") == "environment_error"
    return None if has_failed or score is None else score >= 1


def classify_failure(record: dict[str, Any]) -> str | None:
    """Return the key of `FAILURES` for an answer; None if it is correct or was not scored."""
    outcome = record.get("outcome")
    if outcome == "environment_error":
        return "environment_error"
    if is_correct(record) is not False:
        return None
    if isinstance(outcome, str) and outcome in FAILURES:
        return outcome
    segments = split_response(str(record.get("response") or ""))
    results = [text for kind, text in segments if kind == "information"]
    if not results and not record.get("searches"):
        return "no_search"
    # Match complete words only: "Ann" does not match "Annapolis".
    text = f" {normalize_answer(' '.join(results))} "
    answers = record.get("answers")
    accepted = map(normalize_answer, map(str, answers if isinstance(answers, list) else ()))
    return "found" if any(a and f" {a} " in text for a in accepted) else "not_found"
