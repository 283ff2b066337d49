"""Rewards computed from text: Search-R1's format and answer rewards, exact match and F1."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from difflib import SequenceMatcher

SPECIAL_TOKENS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<end_of_turn>", "<eos>", "</s>")
"""End markers that may trail a response without spoiling its format."""

NOT_FOUND = "未找到相关内容"
"""The answer "no relevant content found": honest, so paid a little."""

_THINK_BLOCK = re.compile(r"<think>(?:(?!<think>).)*?</think>", re.DOTALL)
_TAG = re.compile(r"</?(?:think|search|information|answer)>")
_GOOD_TAGS = re.compile(r"(?:<search></search><information></information>)*<answer></answer>")
_ARTICLE = re.compile(r"\b(?:a|an|the)\b")
_VERDICTS = frozenset({"yes", "no", "noanswer"})
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def format_reward(text: str, *, special_tokens: Sequence[str] = SPECIAL_TOKENS) -> float:
    """+0.5 for a response that keeps to the protocol, else -1.0.

    Apart from closed think blocks, which may stand anywhere and are ignored with all they hold,
    the tags must read: any number of searches, each closed and followed by one closed
    information block, then exactly one answer, which ends the text. Other text may stand between
    the tags.

    Args:
        text: the response alone, inserted observations included, without the prompt.
        special_tokens: markers removed from the end first, with the blanks around them.
    """
    text = _THINK_BLOCK.sub("", _strip_end(text, special_tokens))
    tags = "".join(_TAG.findall(text))
    is_good = text.endswith("</answer>") and _GOOD_TAGS.fullmatch(tags)
    return 0.5 if is_good else -1.0


def _strip_end(text: str, special_tokens: Sequence[str]) -> str:
    text = text.rstrip()
    while marker := next((t for t in special_tokens if t and text.endswith(t)), None):
        text = text.removesuffix(marker).rstrip()
    return text


def answer_reward(answer: str, truth: str) -> float:
    """2.0 for the truth itself, 1.0 for something close to it, 0.5 for "not found", else 0.0.

    Close means a `SequenceMatcher` ratio of at least one half, blanks and case aside. The ratio
    is not symmetric, so the order of the arguments matters. With several accepted answers take
    the maximum over them.
    """
    answer, truth = answer.strip(), truth.strip()
    if not answer:
        return 0.0
    if answer == truth:
        return 2.0
    if answer == NOT_FOUND:
        return 0.5
    matcher = SequenceMatcher(None, _squeeze(answer), _squeeze(truth), autojunk=False)
    return 1.0 if matcher.ratio() >= 0.5 else 0.0


def _squeeze(text: str) -> str:
    return "".join(text.split()).lower()


def normalize_answer(text: str) -> str:
    """Lowercased, without ASCII punctuation or the words a, an, the, blanks collapsed.

    SQuAD's normalisation (https://arxiv.org/abs/1606.05250).
    """
    text = text.lower().translate(_NO_PUNCTUATION)
    return " ".join(_ARTICLE.sub(" ", text).split())


def exact_match(answer: str, truths: str | Sequence[str]) -> float:
    """1.0 if the normalised answer equals any normalised truth, else 0.0.

    An answer that normalises to nothing matches nothing.
    """
    truths = (truths,) if isinstance(truths, str) else truths
    normalized = normalize_answer(answer)
    return float(normalized != "" and any(normalized == normalize_answer(t) for t in truths))


def f1(answer: str, truths: str | Sequence[str]) -> float:
    """Harmonic mean of the precision and recall of the answer's words; the best of the truths.

    SQuAD's measure (https://arxiv.org/abs/1606.05250): both texts are normalised, their words are
    bags, and a word shared several times counts several times. As in HotpotQA
    (https://arxiv.org/abs/1809.09600), `yes`, `no` and `noanswer` are right or wrong as a whole: a
    text that merely contains one of them shares nothing with it. An answer that normalises to
    nothing earns 0, as it matches nothing.
    """
    truths = (truths,) if isinstance(truths, str) else truths
    normalized = normalize_answer(answer)
    return max((_overlap(normalized, normalize_answer(truth)) for truth in truths), default=0.0)


def _overlap(answer: str, truth: str) -> float:
    """F1 of two normalised texts; 2PR / (P + R) is twice the shared words over all of them."""
    if answer != truth and {answer, truth} & _VERDICTS:
        return 0.0
    words, wanted = Counter(answer.split()), Counter(truth.split())
    shared = (words & wanted).total()
    return 2 * shared / (words.total() + wanted.total()) if shared else 0.0
