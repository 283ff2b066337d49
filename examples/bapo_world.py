r"""Generate a world for BAPO: searches, arithmetic, and questions that have no answer.

    python -m examples.bapo_world --out=data/bapo_small --seed=0

The people are the quickstart's (`examples/quickstart_world.py`). A document states a person's
mentor, birthplace, and years of birth and death. Questions are about a person or the person's
mentor, whose name requires a first search. Documents never state the age at death: it is the
difference of two years, computed with the Python tool. Many documents omit the birthplace or the
year of death, and some people have no document, so a search for them returns another person. The
accepted answer to a question about a missing fact occurs nowhere in the world, so every answer is
wrong.

Demonstrations are chats in BAPO's protocol, with its tags, the Python tool and answers in
`\boxed{..}`. They come from other worlds and are of mixed quality: they guess, search for part of
the name, stop at the first person, skip the tool, and say "I don't know" rightly or wrongly. They
never name a held-out person.

The same seed generates the same bytes.
"""

import argparse
import collections
import itertools
import random
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from examples import quickstart_world as quickstart
from examples.claims_world import UNTOLD as UNTOLD_WORDS
from jaxrl.envs.protocol import BAPO
from jaxrl.envs.search.base import Document, render_documents
from jaxrl.envs.search.bm25 import LocalSearch
from jaxrl.envs.tools.base import Tool
from jaxrl.envs.tools.monty import MontyTool

WORDS = frozenset((*quickstart.FIRST_NAMES, *quickstart.LAST_NAMES, *quickstart.CITIES))
BIRTHS = range(1900, 1930)
AGES = range(30, 60)
NUMBERS = (*AGES, *range(BIRTHS.start, BIRTHS.stop + AGES.stop - 1))
"""Every number that the model reads or writes, except in document labels."""

QUESTIONS = {
    ("birthplace",): "Where was {name} born?",
    ("age",): "At what age did {name} die?",
    ("mentor", "birthplace"): "Where was the mentor of {name} born?",
    ("mentor", "age"): "At what age did the mentor of {name} die?",
}
"""Question templates by the facts to look up, in order."""

VALUES: Mapping[str, Sequence[Any]] = {"birthplace": quickstart.CITIES, "age": AGES}
UNTOLD = {"birthplace": UNTOLD_WORDS["birthplace"], "age": ["101", "102", "103", "104"]}
"""Accepted answers to questions about missing facts; they occur nowhere else."""

UNANSWERABLE = ("untold", "unknown")
"""Data sources of questions about missing facts and about people without a document."""

I_DO_NOT_KNOW = "I don't know"  # the wording of BAPO's prompt
# Like the quickstart's pattern, but a number is a separate piece, so that it is the same token in
# text, code and tool results.
PIECES = r" ?\p{L}+|\p{N}+| ?[^\s\p{L}\p{N}]+\n?|\n+|\s+(?!\S)|\s+"

Question = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Person(quickstart.Person):
    """Facts about a person, and the fact that the document omits."""

    untold: str | None  # "birthplace" or "age": the fact that the document omits
    is_known: bool  # True if the person has a document

    @property
    def text(self) -> str:
        """Return the body of the document."""
        place = "" if self.untold == "birthplace" else f" in {self.facts['birthplace']}"
        death = "" if self.untold == "age" else f" and died in {self.facts['died']}"
        born = f"born{place} in {self.facts['born']}"
        return f"{self.name}, taught by {self.facts['mentor']}, was {born}{death}."


People = Mapping[str, Person]  # by full name, in order of id


@dataclass(frozen=True, kw_only=True)
class Habits(quickstart.Habits):
    """Probabilities of a demonstrator's choices, in addition to those of the quickstart."""

    compute: float  # computes an age with Python; otherwise guesses it
    abstain_if_lost: float  # says "I don't know" if no result contained the fact
    abstain_if_found: float  # says "I don't know" although a result contained it


HABITS = Habits(
    guess=0.05,
    good_query=0.60,
    second_search=0.85,
    compute=0.90,
    abstain_if_lost=0.08,
    abstain_if_found=0.03,
)


def make_people(
    num_people: int,
    num_held_out: int,
    shares: Mapping[str, float],
    rng: random.Random,
    excluded: Collection[str] = (),
) -> People:
    """Generate the people of the quickstart, with years of birth and death.

    `shares["untold"]` is the fraction of documents that omit a fact; `shares["unknown"]` is the
    fraction of people without a document.
    """
    people = {}
    for person in quickstart.make_people(num_people, num_held_out, rng, excluded).values():
        born, age = rng.choice(BIRTHS), rng.choice(AGES)
        years = {"born": str(born), "died": str(born + age), "age": str(age)}
        untold = rng.choice(list(UNTOLD)) if rng.random() < shares["untold"] else None
        is_known = rng.random() >= shares["unknown"]
        fields = vars(person) | {"facts": {**person.facts, **years}}
        people[person.name] = Person(**fields, untold=untold, is_known=is_known)
    return people


def select_documented(people: People) -> list[Person]:
    """Return the people who have a document."""
    return [person for person in people.values() if person.is_known]


def make_question(
    person: Person, hops: tuple[str, ...], people: People, rng: random.Random
) -> Question:
    """Generate a question record. `metadata` has the titles of the documents to look up."""
    titles = [person.name, person.facts["mentor"]][: len(hops)]
    last, fact = people[titles[-1]], hops[-1]
    if not all(people[title].is_known for title in titles):
        source = "unknown"
    else:
        source = "untold" if last.untold == fact else "_".join(hops).replace("birth", "")
    is_told = source not in UNANSWERABLE
    return {
        "id": "-".join((person.id, *hops)),
        "question": QUESTIONS[hops].format(name=person.name),
        "answers": [last.facts[fact] if is_told else rng.choice(UNTOLD[fact])],
        "data_source": source,
        "metadata": {"hops": list(hops), "titles": titles, "is_answerable": is_told},
    }


def make_train_questions(people: People, rng: random.Random) -> list[Question]:
    """Generate all kinds of questions about people who are not held out, in random order."""
    persons = [person for person in people.values() if not person.is_held_out]
    questions = [make_question(p, hops, people, rng) for p in persons for hops in QUESTIONS]
    rng.shuffle(questions)
    return questions


def make_eval_questions(people: People, rng: random.Random) -> list[Question]:
    """Generate one question about each held-out person, cycling through the kinds."""
    persons = [person for person in people.values() if person.is_held_out]
    kinds = itertools.cycle(QUESTIONS)
    return [make_question(p, hops, people, rng) for p, hops in zip(persons, kinds, strict=False)]


class Demonstrator(quickstart.Demonstrator):
    """Imperfect demonstrator that answers questions with a search engine and Python."""

    def __init__(
        self,
        people: People,
        engine: LocalSearch,
        python: Tool,
        habits: Habits,
        rng: random.Random,
    ):
        super().__init__(people, engine, habits, rng)
        self._python = python

    def demonstrate(self, question: Question) -> dict[str, Any]:
        """Generate a demonstration. The answer is correct only if all tool calls succeed."""
        chat = super().demonstrate(question)
        chat["metadata"] |= {
            "num_python_calls": quickstart.count_calls(chat["messages"], "python"),
            "is_abstention": I_DO_NOT_KNOW in chat["messages"][-1]["content"],
        }
        return chat

    def _format_final_turn(self, answer: str, messages: Sequence[Mapping[str, str]]) -> str:
        thought = "" if len(messages) > 1 else "<think> guess </think>"  # required by the format
        return rf"{thought}<answer> \boxed{{ {answer} }} </answer>"

    def _research(self, question: Question, messages: list[dict[str, str]]) -> str:
        """Append tool calls to `messages`; return the result, a guess, or "I don't know"."""
        hops, name = question["metadata"]["hops"], question["metadata"]["titles"][0]
        fact = hops[-1]
        guess = str(self._rng.choice(VALUES[fact]))
        if self._sample_event(self._habits.guess):
            return guess
        # A lookup that returned another person is lost: the answer will be wrong.
        source_person = self._look_up(name, hops[0], messages)
        is_lost = source_person is None or source_person.name != name
        if source_person is not None and len(hops) == 2:
            name = source_person.facts["mentor"]
            if self._sample_event(self._habits.second_search):
                source_person = self._look_up(name, fact, messages)
            is_lost = is_lost or source_person is None or source_person.name != name
        is_told = source_person is not None and source_person.untold != fact
        if self._sample_event(
            self._habits.abstain_if_found
            if is_told and not is_lost
            else self._habits.abstain_if_lost
        ):
            return I_DO_NOT_KNOW
        if source_person is None or not is_told:
            return guess
        if fact == "birthplace":
            return source_person.facts[fact]
        return (
            self._compute_age(source_person, messages)
            if self._sample_event(self._habits.compute)
            else guess
        )

    def _compute_age(self, person: Person, messages: list[dict[str, str]]) -> str:
        """Append a calculation in Python to `messages`; return its output."""
        difference = f"{person.facts['died']} - {person.facts['born']}"
        code = f"print({difference})"
        turn = f"<think> {difference} </think><python> {code} </python>"
        messages.append({"role": "assistant", "content": turn})
        messages.append({"role": "tool", "content": self._python.run(code)})
        return messages[-1]["content"]

    def _sample_event(self, chance: float) -> bool:
        return self._rng.random() < chance


def make_demonstrations(
    people: People, num: int, *, topk: int, python: Tool, rng: random.Random
) -> list[dict[str, Any]]:
    """Generate demonstrations about the people of one world."""
    questions = make_train_questions(people, rng)
    with quickstart.open_people_search(select_documented(people), topk=topk) as engine:
        demonstrator = Demonstrator(people, engine, python, HABITS, rng)
        sampled = quickstart.cycle_questions(questions, num, rng)
        return [demonstrator.demonstrate(question) for question in sampled]


def iter_training_texts(chats: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yield texts for training the tokenizer: all numbers, and the quickstart's texts."""
    yield from map(str, NUMBERS)
    yield from quickstart.iter_training_texts(chats, WORDS, BAPO)


def render_texts(files: Mapping[str, Sequence[dict[str, Any]]]) -> dict[str, list[str]]:
    """Render texts for the model, by kind, with a sample of the demonstrations."""
    texts = {"document": [render_documents([Document(**document)]) for document in files["corpus"]]}
    for name in ("questions_train", "questions_eval"):
        texts[name] = [quickstart.render_prompt(record["question"]) for record in files[name]]
    for chat in files["demonstrations"][: 5 * quickstart.SAMPLE]:
        name = f"chat, {chat['data_source']}"
        texts.setdefault(name, []).append(quickstart.render_chat(chat, BAPO))
    return texts


def check_numbers_are_whole(tokenizer: tokenizers.Tokenizer) -> None:
    """Assert that every number is one token."""
    for number in map(str, NUMBERS):
        assert len(tokenizer.encode(number).ids) == 1, f"{number} is split"


def print_quality(chats: Sequence[Mapping[str, Any]]) -> None:
    """Print the fraction and quality of demonstrations by data source."""
    titles = {"is_correct": "right", "is_abstention": "gives up", "num_python_calls": "computes"}
    print(f"\n{'demonstrations':24}{'share':>10}" + "".join(f"{h:>10}" for h in titles.values()))
    by_source = collections.defaultdict(list)
    for chat in chats:
        by_source[chat["data_source"]].append(chat["metadata"])
    for source, group in sorted(by_source.items()):
        shares = [np.mean([metadata[name] for metadata in group]) for name in titles]
        shares = [len(group) / len(chats), *shares]
        print(f"{source:24}" + "".join(f"{share:10.1%}" for share in shares))


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num_people", type=int, default=1000)
    parser.add_argument(
        "--num_held_out", type=int, default=160, help="people held out for evaluation"
    )
    parser.add_argument(
        "--untold", type=float, default=0.5, help="share of documents without a fact"
    )
    parser.add_argument(
        "--unknown", type=float, default=0.1, help="share of people without a document"
    )
    parser.add_argument("--num_demonstrations", type=int, default=16_000)
    parser.add_argument("--num_worlds", type=int, default=16, help="worlds for demonstrations")
    parser.add_argument("--topk", type=int, default=1, help="documents in a search result")
    args = parser.parse_args(argv)
    quickstart.check_sizes(parser, args)
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    # Separate generators, so that the number of questions does not affect the people.
    parts = ("people", "questions", "demos")
    rngs = {part: random.Random(f"{args.seed} {part}") for part in parts}
    shares = {"untold": args.untold, "unknown": args.unknown}
    people = make_people(args.num_people, args.num_held_out, shares, rngs["people"])
    held_out = [person.name for person in people.values() if person.is_held_out]
    num_others, python = args.num_people - len(held_out), MontyTool(max_workers=1)
    # Demonstrations come from other worlds, so that they teach no facts.
    files = {
        "corpus": list(quickstart.make_documents(select_documented(people))),
        "questions_train": make_train_questions(people, rngs["questions"]),
        "questions_eval": make_eval_questions(people, rngs["questions"]),
        "demonstrations": [
            chat
            for _ in range(args.num_worlds)
            for chat in make_demonstrations(
                make_people(num_others, 0, shares, rngs["demos"], excluded=held_out),
                args.num_demonstrations // args.num_worlds,
                topk=args.topk,
                python=python,
                rng=rngs["demos"],
            )
        ],
    }
    # Check the texts before writing anything.
    tokenizer = quickstart.train_tokenizer(
        iter_training_texts(files["demonstrations"]), BAPO, PIECES
    )
    texts = render_texts(files)
    quickstart.check_nothing_leaks(people, files)
    all_texts = itertools.chain.from_iterable(texts.values())
    quickstart.check_words_are_whole(tokenizer, all_texts, WORDS)
    check_numbers_are_whole(tokenizer)
    quickstart.write_model(args.out / "model", tokenizer, seed=args.seed)
    for name, records in files.items():
        quickstart.write_jsonl(args.out / f"{name}.jsonl", records)

    quickstart.print_lengths(tokenizer, texts)
    print_quality(files["demonstrations"])
    print(f"\nwrote {args.out}: " + ", ".join(f"{len(files[name])} {name}" for name in files))


if __name__ == "__main__":
    main()
