"""Search for accepted answers in a corpus, in one pass over its documents.

Texts are normalized with `jaxrl.envs.rewards.qa.normalize_answer`, as for exact match, and compared
word by word. Dashes and brackets separate words. In languages written without spaces, every letter
is a word.
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
"""Words of a normalized answer."""

_UNSPACED = regex.compile(UNSPACED, regex.V1)

# A superset of `UNSPACED`, without dashes and quotes, that `re` searches ten times as fast.
_MAYBE_UNSPACED = re.compile("[\u0e00-\u1fff\u2e80-\U0010ffff]")

# `normalize_answer` deletes punctuation, which would join the words in "that?[1]" or "1899—he".
# Within a word, as in "U.S." or "AT&T", there is only one of the characters .,'’/&- at a time.
_SEPARATOR = regex.compile(r"[[\p{P}\p{S}]--[.,'’/&\-]]|[\p{P}\p{S}]{2,}", regex.V1)


def split_words(text: str) -> list[str]:
    """Normalize a text as for exact match, and split it into words."""
    normalized = normalize_answer(_SEPARATOR.sub(" ", text))
    if _MAYBE_UNSPACED.search(normalized):
        normalized = _UNSPACED.sub(r" \g<0> ", normalized)
    return normalized.split()


def get_searchable_answers(task: Task) -> set[Phrase]:
    """Return the accepted answers to search for in documents.

    The set is empty if documents cannot show that the task is answerable: the task has no accepted
    answer, or an answer is yes, no or noanswer, or an answer has only articles and punctuation.
    """
    phrases = set()
    for answer in filter(str.strip, task.answers):
        # The extra first word makes `normalize_answer` drop articles and punctuation, as it does
        # inside a document.
        phrase = tuple(split_words(f"x {answer}")[1:])
        if not phrase or " ".join(phrase) in EXACT_ANSWERS:
            return set()
        phrases.add(phrase)
    return phrases


def find_phrases(phrases: Iterable[Phrase], documents: Iterable[Document]) -> set[Phrase]:
    """Return the phrases that occur in the title or text of at least one document.

    An index by first word and length holds the phrases that have not been found yet. Each word of a
    document costs one lookup, and one more for each phrase length under that word. Memory grows
    with the number of words in all phrases. The pass ends once all phrases are found.
    """
    missing: dict[str, dict[int, set[Phrase]]] = {}
    for phrase in phrases:
        missing.setdefault(phrase[0], {}).setdefault(len(phrase), set()).add(phrase)
    present_phrases: set[Phrase] = set()
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
        present_phrases |= hits
    return present_phrases


def find_unanswerable_tasks(
    tasks: Iterable[Task], documents: Iterable[Document]
) -> tuple[list[bool], int]:
    """Find the tasks whose accepted answers occur in no document.

    Returns:
        A flag per task, True if none of its answers occurs, and the number of tasks that were
        checked. The flag is False for unchecked tasks (see `get_searchable_answers`).
    """
    phrases = [get_searchable_answers(task) for task in tasks]
    present_phrases = find_phrases(set().union(*phrases), documents)
    return [are_all_missing(group, present_phrases) for group in phrases], sum(map(bool, phrases))


def are_all_missing(phrases: Collection[Phrase], present_phrases: Collection[Phrase]) -> bool:
    """Return True if `phrases` is not empty and none of them is in `present_phrases`."""
    return bool(phrases) and not any(phrase in present_phrases for phrase in phrases)
