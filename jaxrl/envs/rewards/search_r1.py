"""Search-R1's format check and answer reward."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from difflib import SequenceMatcher

SPECIAL_TOKENS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<end_of_turn>", "<eos>", "</s>")
"""End-of-text markers that may follow a response."""

NOT_FOUND = "未找到相关内容"
"""The answer "no relevant content found", which earns part of the reward."""

_THINK_BLOCK = re.compile(r"<think>(?:(?!<think>).)*?</think>", re.DOTALL)


def follows_search_r1_format(text: str, *, tools: Sequence[str] = ("search",)) -> bool:
    """Return True if a response follows Search-R1's protocol.

    Outside closed think blocks, the tags must form any number of closed calls, each followed by a
    closed information block, and then one answer that ends the text. Other text may appear in
    between.

    Args:
        text: Response, including observations but not the prompt.
        tools: Names of the tools, which are also their tags.
    """
    text = remove_think_blocks(text)
    names = "|".join(tools)
    tags = "".join(re.findall(rf"</?(?:think|{names}|information|answer)>", text))
    pattern = rf"(?:<({names})></\1><information></information>)*<answer></answer>"
    return text.endswith("</answer>") and re.fullmatch(pattern, tags) is not None


def remove_think_blocks(text: str) -> str:
    """Remove closed think blocks and the end-of-turn `SPECIAL_TOKENS` from a response."""
    end = len(text.rstrip())
    while marker := next((t for t in SPECIAL_TOKENS if text.endswith(t, 0, end)), None):
        end -= len(marker)
        while end > 0 and text[end - 1].isspace():
            end -= 1
    return _THINK_BLOCK.sub("", text[:end])


def compute_search_r1_reward(
    answer: str,
    truth: str,
    *,
    reward: float = 1.0,
    exact_match_bonus: float = 2.0,
    not_found: float = 0.5,
) -> float:
    """Compute the reward for an answer; 0 if it is wrong.

    Args:
        answer: The model's answer.
        truth: One accepted answer. If a task has several, the caller takes the maximum reward.
        reward: Reward for an answer that is close to `truth`; see `is_close_answer`.
        exact_match_bonus: Reward for an exact match, instead of `reward`.
        not_found: Reward for `NOT_FOUND`, unless that is the truth.
    """
    answer, truth = _normalize(answer), _normalize(truth)
    if answer and answer == truth:
        return exact_match_bonus
    if answer == NOT_FOUND:
        return not_found
    return reward if is_close_answer(answer, truth) else 0.0


MAX_SIMILAR_CHARS = 400
"""Maximum length of texts compared by similarity, in characters without whitespace."""


def is_close_answer(answer: str, truth: str) -> bool:
    """Return True if an answer is close to the truth; `NOT_FOUND` requires an exact match.

    Close means a `SequenceMatcher` ratio of at least 0.5, ignoring whitespace and case. The ratio
    is not symmetric. Computing it takes cubic time, so texts longer than `MAX_SIMILAR_CHARS` must
    be equal.
    """
    answer, truth = _normalize(answer), _normalize(truth)
    if answer in ("", truth, NOT_FOUND):
        return answer != "" and answer == truth
    answer, truth = _normalize_for_similarity(answer), _normalize_for_similarity(truth)
    if max(len(answer), len(truth)) > MAX_SIMILAR_CHARS:
        return answer == truth
    return SequenceMatcher(None, answer, truth, autojunk=False).ratio() >= 0.5


def _normalize(text: str) -> str:
    """Strip a text and compose its characters (NFC)."""
    return unicodedata.normalize("NFC", text.strip())


def _normalize_for_similarity(text: str) -> str:
    return "".join(text.split()).lower()
