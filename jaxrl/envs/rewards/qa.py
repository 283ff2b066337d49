"""Exact match and F1 for short answers, as in SQuAD."""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Sequence

_ARTICLE = re.compile(r"\b(?:a|an|the)\b")
EXACT_ANSWERS = frozenset({"yes", "no", "noanswer"})
NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(text: str) -> str:
    """Lowercase a text, drop ASCII punctuation and the articles, and collapse whitespace.

    SQuAD's normalization (https://arxiv.org/abs/1606.05250), with two changes: characters are
    composed (NFC) first, and text that would become empty keeps its articles or, if it has none,
    its punctuation.
    """
    lowered = unicodedata.normalize("NFC", text).lower()
    plain = lowered.translate(NO_PUNCTUATION)
    return " ".join(_ARTICLE.sub(" ", plain).split() or plain.split() or lowered.split())


def exact_match(answer: str, truths: str | Sequence[str]) -> float:
    """Return 1.0 if the normalized answer equals any normalized accepted answer, else 0.0."""
    truths = (truths,) if isinstance(truths, str) else truths
    return float(normalize_answer(answer) in {*map(normalize_answer, truths)} - {""})


def f1(answer: str, truths: str | Sequence[str]) -> float:
    """Return the word-level F1 of the answer, maximized over the accepted answers.

    SQuAD's F1 (https://arxiv.org/abs/1606.05250) on bags of normalized words. As in HotpotQA
    (https://arxiv.org/abs/1809.09600), `yes`, `no` and `noanswer` must match exactly.
    """
    truths = (truths,) if isinstance(truths, str) else truths
    answer, best = normalize_answer(answer), 0.0
    for truth in map(normalize_answer, truths):
        if answer == truth or not {answer, truth} & EXACT_ANSWERS:
            words, truth_words = Counter(answer.split()), Counter(truth.split())
            # 2PR / (P + R) is twice the number of shared words over the total number of words.
            shared = (words & truth_words).total()
            best = max(best, 2 * shared / (words.total() + truth_words.total()) if shared else 0.0)
    return best
