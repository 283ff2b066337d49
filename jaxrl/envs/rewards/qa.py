"""Short answers compared as SQuAD does: what is the same answer, and how much of it is right."""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Sequence

_ARTICLE = re.compile(r"\b(?:a|an|the)\b")
_VERDICTS = frozenset({"yes", "no", "noanswer"})
NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(text: str) -> str:
    """Lowercases, drops ASCII punctuation and the words a, an, the, and collapses blanks.

    SQuAD's normalisation (https://arxiv.org/abs/1606.05250), but for a text that it leaves nothing
    of: `A` keeps its articles, `+` its punctuation too. "" for a blank text alone. Characters are
    composed first (NFC), so `e` with a combining accent is `é`.
    """
    lowered = unicodedata.normalize("NFC", text).lower()
    plain = lowered.translate(NO_PUNCTUATION)
    return " ".join(_ARTICLE.sub(" ", plain).split() or plain.split() or lowered.split())


def exact_match(answer: str, truths: str | Sequence[str]) -> float:
    """1.0 if the normalised answer equals any normalised truth, else 0.0, as a blank one is."""
    truths = (truths,) if isinstance(truths, str) else truths
    return float(normalize_answer(answer) in {*map(normalize_answer, truths)} - {""})


def f1(answer: str, truths: str | Sequence[str]) -> float:
    """Harmonic mean of the precision and recall of the answer's words; the best of the truths.

    SQuAD's measure (https://arxiv.org/abs/1606.05250): both texts are normalised, their words are
    bags, and a word shared several times counts several times. As in HotpotQA
    (https://arxiv.org/abs/1809.09600), `yes`, `no` and `noanswer` are right or wrong as a whole: a
    text that merely contains one of them shares nothing with it. A blank answer earns 0.
    """
    truths = (truths,) if isinstance(truths, str) else truths
    answer, best = normalize_answer(answer), 0.0
    for truth in map(normalize_answer, truths):
        if answer == truth or not {answer, truth} & _VERDICTS:
            words, wanted = Counter(answer.split()), Counter(truth.split())
            # 2PR / (P + R) is twice the shared words over all of them.
            shared = (words & wanted).total()
            best = max(best, 2 * shared / (words.total() + wanted.total()) if shared else 0.0)
    return best
