"""Find the accepted answers that occur in a corpus, in one pass over its documents.

Texts are compared word by word after the normalization of exact match
(`jaxrl.envs.rewards.qa.normalize_answer`). In scripts without spaces, every letter is a word.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

import regex

from jaxrl.envs.base import Task
from jaxrl.envs.rewards.qa import EXACT_ANSWERS, normalize_answer
from jaxrl.envs.search.base import Document
from jaxrl.utils.text import UNSPACED

Phrase = tuple[str, ...]
"""The words of a normalized answer."""

_UNSPACED = regex.compile(UNSPACED, regex.V1)

# A superset of `UNSPACED` that `re` finds ten times as fast. It leaves out dashes and quotes.
_MAYBE_UNSPACED = re.compile("[\u0e00-\u1fff\u2e80-\U0010ffff]")


def split_words(text: str) -> list[str]:
    """Normalize a text as exact match does, and split it into words."""
    normalized = normalize_answer(text)
    if _MAYBE_UNSPACED.search(normalized):
        normalized = _UNSPACED.sub(r" \g<0> ", normalized)
    return normalized.split()


def make_phrases(task: Task) -> set[Phrase]:
    """Return the accepted answers to look for in documents.

    The set is empty if no document can tell whether the task is answerable: it has no accepted
    answer, or one that is yes, no or noanswer, or that is only articles and punctuation.
    """
    phrases = set()
    for answer in filter(str.strip, task.answers):
        # The first word keeps `normalize_answer` from preserving articles and punctuation, which
        # documents lose.
        phrase = tuple(split_words(f"x {answer}")[1:])
        if not phrase or " ".join(phrase) in EXACT_ANSWERS:
            return set()
        phrases.add(phrase)
    return phrases


def find_phrases(phrases: Iterable[Phrase], documents: Iterable[Document]) -> set[Phrase]:
    """Return the phrases that occur in the title or the text of at least one document.

    Phrases are indexed by first word and length. Each word of a document costs one lookup, and one
    more for each length at which phrases that start with it are still missing; found phrases leave
    the index. Memory is proportional to the words in all phrases. The pass ends early if nothing
    is missing.
    """
    missing: dict[str, dict[int, set[Phrase]]] = {}
    for phrase in phrases:
        missing.setdefault(phrase[0], {}).setdefault(len(phrase), set()).add(phrase)
    found: set[Phrase] = set()
    for document in documents:
        if not missing:
            break
        hits = set()
        for text in (document.title, document.text):
            words = split_words(text)
            for start, word in enumerate(words):
                if word in missing:
                    for length, group in missing[word].items():
                        if (phrase := tuple(words[start : start + length])) in group:
                            hits.add(phrase)
        for phrase in hits:
            by_length = missing[phrase[0]]
            by_length[len(phrase)].remove(phrase)
            if not by_length[len(phrase)]:
                del by_length[len(phrase)]
            if not by_length:
                del missing[phrase[0]]
        found |= hits
    return found


def find_unanswerable(
    tasks: Iterable[Task], documents: Iterable[Document]
) -> tuple[list[bool], int]:
    """Find the tasks of which no accepted answer occurs in a document.

    Returns:
        True for each task without an occurrence, and the number of tasks that were looked for;
        others (see `make_phrases`) are never unanswerable.
    """
    phrases = [make_phrases(task) for task in tasks]
    found = find_phrases(set().union(*phrases), documents)
    return [is_missing(group, found) for group in phrases], sum(map(bool, phrases))


def is_missing(phrases: Collection[Phrase], found: Collection[Phrase]) -> bool:
    """Return True if there are phrases, and none of them was found."""
    return bool(phrases) and not any(phrase in found for phrase in phrases)
