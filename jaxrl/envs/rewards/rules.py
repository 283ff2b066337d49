"""BAPO's rewards, detection of abstentions, boxed answers and validation of reward weights."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches

from jaxrl.envs.rewards.qa import f1

_BRACE = re.compile(r"\\[{}]|\\boxed\{|[{}]")  # escaped braces do not nest
_UNKNOWN = ("i don't know", "i do not know")


def is_refusal(answer: str) -> bool:
    """Return True if an answer says "I don't know", with either apostrophe."""
    lowered = answer.lower().replace("’", "'")
    return any(words in lowered for words in _UNKNOWN)


def is_abstention(response: str) -> bool:
    """Return True if the first complete `<answer>` block says "I don't know"."""
    span = _extract_first_answer(response)
    return span is not None and is_refusal(span)


def _extract_first_answer(response: str) -> str | None:
    _, _, rest = response.partition("<answer>")
    span, close, _ = rest.partition("</answer>")
    return span if close else None


def follows_bapo_format(response: str, *, tools: Sequence[str] = ("search", "python")) -> bool:
    r"""Return True if a response follows BAPO's protocol.

    As in BAPO's code (https://arxiv.org/abs/2601.11037), it needs at least one think block, as many
    closing tags as opening tags, and one closed answer that contains `\boxed`. Each tool call must
    be closed and followed by a closed result. Other results, and text after the answer, are
    allowed.

    Args:
        response: Response, including tool results but not the prompt.
        tools: Names of the tools, which are also their tags.
    """
    num_thoughts = response.count("<think>")
    if num_thoughts == 0 or num_thoughts != response.count("</think>"):
        return False
    if not response.count("<answer>") == response.count("</answer>") == 1:
        return False
    span = _extract_first_answer(response)
    if span is None or "\\boxed{" not in span or "}" not in span:
        return False
    for tool in tools:
        position = 0
        while (start := response.find(f"<{tool}>", position)) >= 0:
            positions = [response.find(tag, start) for tag in (f"</{tool}>", "<result>")]
            positions.append(response.find("</result>", positions[-1]))
            if -1 in positions or positions != sorted(positions):
                return False
            position = positions[-1]  # the next call comes after the result
    return True


def extract_boxed_answer(response: str) -> str | None:
    r"""Return the last balanced `\boxed{..}` in the first complete `<answer>` block, or None."""
    span = _extract_first_answer(response)
    return None if span is None else extract_last_boxed(span)


def extract_last_boxed(text: str) -> str | None:
    r"""Return the content of the last balanced `\boxed{..}`, stripped; None if there is none."""
    # Start of the content of each open brace, negated if not boxed. Integers, because many tuples
    # would trigger the garbage collector.
    open_braces: list[int] = []
    last: tuple[int, int] | None = None
    for brace in _BRACE.finditer(text):
        if brace[0] in ("{", "\\boxed{"):
            open_braces.append(-brace.end() if brace[0] == "{" else brace.end())
        elif brace[0] == "}" and open_braces:
            start = open_braces.pop()
            if start > 0 and (last is None or start > last[0]):
                last = start, brace.start()
    return None if last is None else text[last[0] : last[1]].strip()


def compute_bapo_correctness(
    response: str, answers: str | Sequence[str], *, tools: Sequence[str] = ("search", "python")
) -> float:
    """Return the F1 of the boxed answer; -1.0 for a malformed response, 0.0 for an abstention.

    BAPO (https://arxiv.org/abs/2601.11037).
    """
    answer = extract_boxed_answer(response)
    if answer is None or not follows_bapo_format(response, tools=tools):
        return -1.0
    return 0.0 if is_abstention(response) else f1(answer, answers)


def check_weights(weights: Mapping[str, float], parts: Iterable[str]) -> None:
    """Check that weights name known reward parts and that at least one weight is not 0.

    Raises:
        ValueError: A part is unknown, or all weights are 0. The message suggests a similar name.
    """
    parts = list(parts)
    known = f"Known parts are {', '.join(parts)}."
    for name in weights:
        if name not in parts:
            close = get_close_matches(name, parts, n=1)
            hint = f"; did you mean {close[0]!r}? " if close else ". "
            raise ValueError(
                f"there is no reward part {name!r}{hint}{known} A judge needs an entry with that "
                "name in config.reward.judges; a custom function needs a dotted path such as "
                "my_reward.brevity."
            )
    if not any(weights.values()):
        raise ValueError(f"all weights are 0, so every reward would be 0. {known}")
