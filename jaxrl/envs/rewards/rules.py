"""Rewards computed from text: format, correctness and abstention, by several papers' rules."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from difflib import SequenceMatcher, get_close_matches

from jaxrl.envs.rewards.qa import f1

SPECIAL_TOKENS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<end_of_turn>", "<eos>", "</s>")
"""End markers that may trail a response without spoiling its format."""

NOT_FOUND = "未找到相关内容"
"""The answer "no relevant content found": honest, so paid a little."""

_THINK_BLOCK = re.compile(r"<think>(?:(?!<think>).)*?</think>", re.DOTALL)
_BRACE = re.compile(r"\\[{}]|\\boxed\{|[{}]")  # escaped ones are only printed
_UNKNOWN = ("i don't know", "i do not know")


def search_r1_format(
    text: str,
    *,
    tools: Sequence[str] = ("search",),
    special_tokens: Sequence[str] = SPECIAL_TOKENS,
) -> bool:
    """Return True if a response keeps to Search-R1's protocol.

    Apart from closed think blocks, which may stand anywhere and are ignored with all they hold,
    the tags must read: any number of calls, each closed and followed by one closed information
    block, then exactly one answer, which ends the text. Other text may stand between the tags.

    Args:
        text: the response alone, inserted observations included, without the prompt.
        tools: tags that call one.
        special_tokens: markers removed from the end first, with the blanks around them.
    """
    text = _THINK_BLOCK.sub("", _strip_end(text, special_tokens))
    names = "|".join(tools)
    tags = "".join(re.findall(rf"</?(?:think|{names}|information|answer)>", text))
    good = rf"(?:<({names})></\1><information></information>)*<answer></answer>"
    return text.endswith("</answer>") and re.fullmatch(good, tags) is not None


def format_reward(
    text: str,
    *,
    tools: Sequence[str] = ("search",),
    special_tokens: Sequence[str] = SPECIAL_TOKENS,
    reward: float = 0.5,
    failure: float = -1.0,
) -> float:
    """`reward` for a response that keeps to Search-R1's protocol, else `failure`."""
    is_kept = search_r1_format(text, tools=tools, special_tokens=special_tokens)
    return reward if is_kept else failure


def _strip_end(text: str, special_tokens: Sequence[str]) -> str:
    end = len(text.rstrip())
    while marker := next((t for t in special_tokens if t and text.endswith(t, 0, end)), None):
        end -= len(marker)
        while end > 0 and text[end - 1].isspace():
            end -= 1
    return text[:end]


def without_thoughts(text: str) -> str:
    """A response without its closed think blocks and the markers that end it."""
    return _THINK_BLOCK.sub("", _strip_end(text, SPECIAL_TOKENS))


def answer_reward(
    answer: str,
    truth: str,
    *,
    reward: float = 1.0,
    exact_match_bonus: float = 2.0,
    not_found: float = 0.5,
) -> float:
    """The pay for an answer; 0 where it is wrong. Of several accepted answers take the maximum.

    Args:
        answer: the model's.
        truth: an accepted answer. The similarity of the two is not symmetric.
        reward: for something close to the truth, as `is_right_answer` has it.
        exact_match_bonus: for the truth itself, in place of `reward`.
        not_found: for `NOT_FOUND`, unless that is the truth.
    """
    answer, truth = _composed(answer), _composed(truth)
    if answer and answer == truth:
        return exact_match_bonus
    if answer == NOT_FOUND:
        return not_found
    return reward if is_right_answer(answer, truth) else 0.0


MAX_COMPARED = 400
"""Characters, without blanks, of an answer and a truth that may be close without being equal."""


def is_right_answer(answer: str, truth: str) -> bool:
    """Return True if an answer is the truth or close to it; `NOT_FOUND` only as the truth itself.

    Close means a `SequenceMatcher` ratio of at least one half, blanks and case aside. The ratio
    is not symmetric, so the order of the arguments matters. Where either has more than
    `MAX_COMPARED` characters, only the truth itself is close, since the time grows with the cube.
    """
    answer, truth = _composed(answer), _composed(truth)
    if answer in ("", truth, NOT_FOUND):
        return answer != "" and answer == truth
    answer, truth = _squeeze(answer), _squeeze(truth)
    if max(len(answer), len(truth)) > MAX_COMPARED:
        return answer == truth
    return SequenceMatcher(None, answer, truth, autojunk=False).ratio() >= 0.5


def _composed(text: str) -> str:
    """Return a text stripped and with its characters composed (NFC)."""
    return unicodedata.normalize("NFC", text.strip())


def _squeeze(text: str) -> str:
    return "".join(text.split()).lower()


def says_unknown(answer: str) -> bool:
    """Return True if an answer says "I don't know", typographic apostrophe or not."""
    lowered = answer.lower().replace("’", "'")
    return any(words in lowered for words in _UNKNOWN)


def is_abstention(response: str) -> bool:
    """Return True if the first closed answer of a response says "I don't know"."""
    span = _answer_span(response)
    return span is not None and says_unknown(span)


def _answer_span(response: str) -> str | None:
    _, _, rest = response.partition("<answer>")
    span, close, _ = rest.partition("</answer>")
    return span if close else None


def bapo_format(response: str, *, tools: Sequence[str] = ("search", "python")) -> bool:
    """Return True if a response keeps to BAPO's protocol.

    BAPO (https://arxiv.org/abs/2601.11037), as its code checks: at least one think block, as many
    closed as opened; one answer, closed after it is opened, with something boxed; each call of a
    tool closed and then followed by a closed result. A result that nobody asked for passes, and so
    does text after the answer.

    Args:
        response: the response alone, results included, without the prompt.
        tools: tags that call one.
    """
    num_thoughts = response.count("<think>")
    if num_thoughts == 0 or num_thoughts != response.count("</think>"):
        return False
    if not response.count("<answer>") == response.count("</answer>") == 1:
        return False
    span = _answer_span(response)
    if span is None or "\\boxed{" not in span or "}" not in span:
        return False
    for tool in tools:
        position = 0
        while (start := response.find(f"<{tool}>", position)) >= 0:
            marks = [response.find(tag, start) for tag in (f"</{tool}>", "<result>")]
            marks.append(response.find("</result>", marks[-1]))
            if -1 in marks or marks != sorted(marks):
                return False
            position = marks[-1]  # only behind its result is the next call looked for
    return True


def boxed_answer(response: str) -> str | None:
    r"""The last balanced `\boxed{..}` in the first closed answer, stripped; None without one."""
    span = _answer_span(response)
    return None if span is None else last_boxed(span)


def last_boxed(text: str) -> str | None:
    r"""The content of the last balanced `\boxed{..}`, stripped; None without one."""
    # Where the content of each open brace begins, negative where it is not boxed. Numbers, since
    # hundreds of thousands of pairs set off the garbage collector again and again.
    opened: list[int] = []
    last: tuple[int, int] | None = None
    for brace in _BRACE.finditer(text):
        if brace[0] in ("{", "\\boxed{"):
            opened.append(-brace.end() if brace[0] == "{" else brace.end())
        elif brace[0] == "}" and opened:
            start = opened.pop()
            if start > 0 and (last is None or start > last[0]):
                last = start, brace.start()
    return None if last is None else text[last[0] : last[1]].strip()


def bapo_correctness(
    response: str,
    answers: str | Sequence[str],
    *,
    tools: Sequence[str] = ("search", "python"),
    bad_format: float = -1.0,
    wrong: float = 0.0,
) -> float:
    """F1 of the boxed answer where it is above 0, else `wrong`; `bad_format` where there is none.

    An abstention is `wrong`, whatever its box holds. BAPO (https://arxiv.org/abs/2601.11037).
    ReCall (https://github.com/Agent-RL/ReCall) has 0 for a bad format and 0.1 for a wrong answer.
    """
    answer = boxed_answer(response)
    if answer is None or not bapo_format(response, tools=tools):
        return bad_format
    return wrong if is_abstention(response) else f1(answer, answers) or wrong


def check_weights(weights: Mapping[str, float], parts: Iterable[str]) -> None:
    """Refuses weights that would pay nothing, or something that is not measured.

    Raises:
        ValueError: says which part was probably meant.
    """
    parts = list(parts)
    known = f"Known parts are {', '.join(parts)}."
    for name in weights:
        if name not in parts:
            close = get_close_matches(name, parts, n=1)
            hint = f"; did you mean {close[0]!r}? " if close else ". "
            raise ValueError(
                f"there is no reward part {name!r}{hint}{known} A judge has an entry of its name "
                "in config.reward.judges; a function of your own a dotted name, as "
                "my_reward.brevity."
            )
    if not any(weights.values()):
        raise ValueError(f"these weights would pay nothing. {known}")
