"""Generate worlds that test the published claims about the algorithms.

    python -m examples.claims_world --world=hops --out=data/claims/hops --seed=0

They use the people, words and search engine of the quickstart (`examples/quickstart_world.py`):

- `hops`: chains of one to four mentors, where each hop needs the result of the previous search.
  Thoughts are short, or long because of filler words; reinforcement learning determines how many
  are long. Training questions are mostly short chains, since many training sets are mostly easy;
  held-out questions have all lengths equally often.
- `ambiguous`: half of the questions ask for a pupil of a person with three pupils. One search
  returns all three, and nothing indicates which one is meant; it is the first in half of the
  cases. The other half are plain one-hop questions.
- `unanswerable`: a third of the questions are about people without a document, whose names share
  no word with any document, or about facts that a document omits. Some demonstrations answer "I
  don't know".

Each person belongs to one of three splits: training, development (for choosing settings) and
evaluation. Mentors are in the same split as their pupils. Demonstrations come from other worlds and
name nobody in the two held-out splits. The same seed generates the same bytes.
"""

import argparse
import collections
import itertools
import json
import random
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from examples import quickstart_world as quickstart
from jaxrl.envs.search.base import Document, render_documents
from jaxrl.envs.search.bm25 import LocalSearch

SPLITS = ("train", "dev", "eval")
HELD_OUT = SPLITS[1:]
HOP_NAMES = ("one_hop", "two_hop", "three_hop", "four_hop")
ATTRIBUTES = ("birthplace", "job")
ENDINGS = {"birthplace": "Where was {of} born?", "job": "What is the job of {of}?"}
FILLER_WORDS = """
    hmm well okay maybe perhaps indeed right then surely fine anyway actually
""".split()  # noqa: SIM905
UNTOLD = {
    "birthplace": ["Quarrowmere", "Silvantide", "Umberfold", "Wrenhollow"],
    "job": ["falconer", "chandler", "cooper", "thatcher"],
}
"""Accepted answers to questions that the corpus cannot answer; they occur nowhere else."""

I_DO_NOT_KNOW = "I don't know"
NAMES = (quickstart.FIRST_NAMES, quickstart.LAST_NAMES)
UNKNOWN_WORDS = 14  # first names, and last names, reserved for unknown people
PUPILS = 3  # per mentor
PUPIL_PROBABILITIES = (0.5, 0.3, 0.2)
"""Probabilities that the intended pupil is the first, second or third search result."""

Question = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Person:
    """Facts about a person, and the fact that the document omits."""

    id: str
    first: str
    last: str
    facts: Mapping[str, str]  # birthplace, job and mentor
    split: str
    is_documented: bool = True  # True if the person has a document
    is_master: bool = False  # True for a mentor of three people who has no document
    omitted_fact: str | None = None  # fact that the document omits

    @property
    def name(self) -> str:
        """Return the full name, which is the title of the document."""
        return f"{self.first} {self.last}"

    @property
    def text(self) -> str:
        """Return the body of the document."""
        told = {name for name in self.facts if name != self.omitted_fact}
        what = f"is a {self.facts['job']}" if "job" in told else "was"
        where = f"born in {self.facts['birthplace']} and " if "birthplace" in told else ""
        return f"{self.name} {what} {where}taught by {self.facts['mentor']}."


People = Mapping[str, Person]  # by full name, in order of id


@dataclass(frozen=True, kw_only=True)
class Habits:
    """Probabilities of the choices that a demonstrator makes."""

    guess: float  # answers without a search
    good_query: float  # searches for the full name; otherwise for part of it
    continue_search: float  # continues if the question needs another hop
    filler_thought: float  # writes filler words before its thought
    abstain_if_lost: float = 0.0  # says "I don't know" if no result contained the answer
    abstain_if_found: float = 0.0  # says "I don't know" although a result contained the answer


@dataclass(frozen=True, kw_only=True)
class World:
    """Settings for the questions and the demonstrator of a world."""

    kinds: Mapping[tuple[str, ...], str]  # data source by facts to look up, in order
    habits: Habits
    topk: int  # documents in a search result
    # Fraction of training questions to keep, by data source; 1 if not listed.
    train_shares: Mapping[str, float] = field(default_factory=dict)
    has_masters: bool = False  # mentors have no mentor and no document
    unknown_people: float = 0.0  # fraction of people without a document
    omitted_facts: float = 0.0  # fraction of the other documents that omit a fact


def make_hop_kinds(num_hops: Collection[int]) -> dict[tuple[str, ...], str]:
    return {
        (*["mentor"] * (hops - 1), attribute): HOP_NAMES[hops - 1]
        for hops in num_hops
        for attribute in ATTRIBUTES
    }


WORLDS = {
    "hops": World(
        kinds=make_hop_kinds((1, 2, 3, 4)),
        habits=Habits(guess=0.08, good_query=0.60, continue_search=0.92, filler_thought=0.5),
        topk=1,
        train_shares={"two_hop": 0.1, "three_hop": 0.05, "four_hop": 0.05},
    ),
    "ambiguous": World(
        kinds={("pupil", "birthplace"): "ambiguous", ("pupil", "job"): "ambiguous"}
        | make_hop_kinds((1,)),
        habits=Habits(guess=0.03, good_query=0.85, continue_search=0.0, filler_thought=0.0),
        topk=PUPILS,
        has_masters=True,
    ),
    "unanswerable": World(
        kinds=make_hop_kinds((1, 2)),
        habits=Habits(
            guess=0.05,
            good_query=0.60,
            continue_search=0.90,
            filler_thought=0.0,
            abstain_if_lost=0.30,
            abstain_if_found=0.05,
        ),
        topk=2,
        unknown_people=0.15,
        omitted_facts=0.40,
    ),
}


def make_people(
    world: World, sizes: Mapping[str, int], rng: random.Random, excluded: Collection[str] = ()
) -> People:
    """Generate people with distinct names outside `excluded`; every mentor has three pupils.

    Splits are assigned to ids at random, because a search ranks equally good documents by id.
    """
    splits = [split for split, size in sizes.items() for _ in range(size)]
    rng.shuffle(splits)
    is_unknown = [rng.random() < world.unknown_people for _ in splits]
    names = draw_names(is_unknown, world, rng, excluded)
    mentors: dict[int, int] = {}
    for split in sizes:
        members = [i for i, group in enumerate(splits) if group == split]
        mentors |= assign_mentors(members, is_unknown, names, world, rng)
    people = {}
    for i, (first, last) in enumerate(names):
        person = Person(
            id=f"{i:04d}",
            first=first,
            last=last,
            facts={
                "birthplace": rng.choice(quickstart.CITIES),
                "job": rng.choice(quickstart.JOBS),
                **({"mentor": " ".join(names[mentors[i]])} if i in mentors else {}),
            },
            split=splits[i],
            is_documented=i in mentors and not is_unknown[i],
            is_master=i not in mentors,
            omitted_fact=rng.choice(ATTRIBUTES) if rng.random() < world.omitted_facts else None,
        )
        people[person.name] = person
    return people


def draw_names(
    is_unknown: Sequence[bool], world: World, rng: random.Random, excluded: Collection[str]
) -> list[tuple[str, str]]:
    """Sample first and last names. Unknown people get words that occur in no document."""
    num_words = UNKNOWN_WORDS if world.unknown_people else 0
    words = [(pool[num_words:], pool[:num_words]) for pool in NAMES]
    sampled = []
    for pools, is_reserved in zip(zip(*words, strict=True), (False, True), strict=True):
        free_names = [name for name in itertools.product(*pools) if " ".join(name) not in excluded]
        sampled.append(iter(rng.sample(free_names, is_unknown.count(is_reserved))))
    return [next(sampled[is_reserved]) for is_reserved in is_unknown]


def assign_mentors(
    members: Sequence[int],
    is_unknown: Sequence[bool],
    names: Sequence[tuple[str, str]],
    world: World,
    rng: random.Random,
) -> dict[int, int]:
    """Assign a mentor to each member; mentors have three pupils and do not mentor themselves.

    If the world has masters, they get no mentor and are not in the result.
    """
    known = [i for i in members if not is_unknown[i]]
    num_teachers = -(-len(members) // (PUPILS + world.has_masters))
    teachers = rng.sample(known, num_teachers)
    mentor_names = {names[i] for i in teachers} if world.has_masters else set()
    pupils = [i for i in members if not (world.has_masters and i in set(teachers))]
    mentors_of_pupils = [teacher for teacher in teachers for _ in range(PUPILS)][: len(pupils)]
    rng.shuffle(mentors_of_pupils)

    def is_good(pupil: int, teacher: int) -> bool:
        """Return True unless both are the same, or a search for another master finds the pupil."""
        (first, last), (teachers_first, teachers_last) = names[pupil], names[teacher]
        mixed = {(first, teachers_last), (teachers_first, last)}
        return pupil != teacher and not mixed & mentor_names

    bad = [i for i, pupil in enumerate(pupils) if not is_good(pupil, mentors_of_pupils[i])]
    while bad:  # swap mentors with a random pupil if both pairs become good
        i, j = rng.choice(bad), rng.randrange(len(pupils))
        if is_good(pupils[i], mentors_of_pupils[j]) and is_good(pupils[j], mentors_of_pupils[i]):
            mentors_of_pupils[i], mentors_of_pupils[j] = mentors_of_pupils[j], mentors_of_pupils[i]
            bad = [i for i in bad if not is_good(pupils[i], mentors_of_pupils[i])]
    return dict(zip(pupils, mentors_of_pupils, strict=True))


def make_documents(people: Iterable[Person]) -> Iterator[dict[str, str]]:
    """Yield the corpus records of people who have a document."""
    for person in people:
        if person.is_documented:
            yield {"id": person.id, "title": person.name, "text": person.text}


class QuestionGenerator:
    """Generator of questions about people, with their answers."""

    def __init__(self, people: People, engine: LocalSearch, rng: random.Random):
        self._people = people
        self._engine = engine
        self._rng = rng

    def make_question(
        self, person: Person, kind: tuple[str, ...], data_source: str
    ) -> Question | None:
        """Generate a question record, or return None if the kind does not fit the person.

        Questions about pupils need a master for whom a search returns all three pupils.
        `metadata` lists the people on the path to the answer.
        """
        if person.is_master != (kind[0] == "pupil"):
            return None
        if person.is_master:
            intended = self._sample_pupil(person)
            if intended is None:
                return None
            titles = [person.name, intended.name]
        else:
            titles = list_mentors(person.name, len(kind), self._people)
        attribute, last = kind[-1], self._people[titles[-1]]
        # People without a document mentor nobody, so only the first in a chain may lack one.
        is_unknown = not (person.is_documented or person.is_master)
        is_documented = not is_unknown and last.omitted_fact != attribute
        if not is_documented:
            data_source = "unknown_person" if is_unknown else "untold_fact"
            answer = self._rng.choice(UNTOLD[attribute])
        else:
            answer = last.facts[attribute]
        return {
            "id": "-".join((person.id, *kind)),
            "question": format_question(person.name, kind),
            "answers": [answer],
            "data_source": data_source,
            "metadata": {"hops": list(kind), "titles": titles, "is_answerable": is_documented},
        }

    def _sample_pupil(self, person: Person) -> Person | None:
        """Sample the intended pupil by `PUPIL_PROBABILITIES`, or return None."""
        titles = quickstart.parse_titles(self._engine.run(person.name))
        shown = [title for title in titles if self._people[title].facts["mentor"] == person.name]
        if len(shown) < PUPILS:
            return None
        [intended] = self._rng.choices(shown, PUPIL_PROBABILITIES)
        return self._people[intended]


def list_mentors(name: str, length: int, people: People) -> list[str]:
    """Return `length` names: `name`, the mentor, the mentor's mentor and so on."""
    names = [name]
    while len(names) < length:
        names.append(people[names[-1]].facts["mentor"])
    return names


def format_question(name: str, kind: tuple[str, ...]) -> str:
    """Format the question about the person at the end of the chain."""
    hops = len(kind) - 1
    if kind[0] == "pupil":
        of = f"a pupil of {name}"
    elif hops < 2:
        of = f"the mentor of {name}" if hops else name
    else:
        of = f"the mentor {hops} steps above {name}"
    return ENDINGS[kind[-1]].format(of=of)


def make_questions(
    world: World,
    persons: Collection[Person],
    generator: QuestionGenerator,
    rng: random.Random,
    limit: int | None = None,
) -> list[Question]:
    """Generate at most `limit` questions, the same number of each kind, in random order."""
    by_kind: list[list[Question]] = []
    for kind, source in world.kinds.items():
        candidates = (generator.make_question(person, kind, source) for person in persons)
        by_kind.append([question for question in candidates if question is not None])
        rng.shuffle(by_kind[-1])
    interleaved = list(itertools.chain.from_iterable(zip(*by_kind, strict=False)))
    questions = interleaved[:limit]
    rng.shuffle(questions)
    return questions


def thin_questions(questions: Sequence[Question], shares: Mapping[str, float]) -> list[Question]:
    """Keep a fraction of the questions of each data source, in order."""
    totals = collections.Counter(question["data_source"] for question in questions)
    num_remaining = {
        source: round(total * shares.get(source, 1.0)) for source, total in totals.items()
    }
    selected = []
    for question in questions:
        num_remaining[question["data_source"]] -= 1
        if num_remaining[question["data_source"]] >= 0:
            selected.append(question)
    return selected


class Demonstrator:
    """Imperfect demonstrator that answers questions with a search engine."""

    def __init__(self, people: People, engine: LocalSearch, habits: Habits, rng: random.Random):
        self._people = people
        self._engine = engine
        self._habits = habits
        self._rng = rng

    def demonstrate(self, question: Question) -> dict[str, Any]:
        """Generate a demonstration. The answer is correct only if the searches succeed."""
        messages = [{"role": "user", "content": question["question"]}]
        answer = self._research(question, messages)
        messages.append({"role": "assistant", "content": f"<answer> {answer} </answer>"})
        return {
            "messages": messages,
            "data_source": question["data_source"],
            "metadata": {
                "answers": question["answers"],
                "num_searches": sum(message["role"] == "tool" for message in messages),
                "is_correct": answer in question["answers"],
                "is_abstention": answer == I_DO_NOT_KNOW,
            },
        }

    def _research(self, question: Question, messages: list[dict[str, str]]) -> str:
        """Append searches to `messages`; return the result, a guess, or "I don't know"."""
        kind = question["metadata"]["hops"]
        attribute, lookups = kind[-1], kind[: 1 if kind[0] == "pupil" else len(kind)]
        guess = self._rng.choice(quickstart.VALUES[attribute])
        if self._sample_event(self._habits.guess):
            return guess
        name, source_person, is_lost = question["metadata"]["titles"][0], None, False
        for number, fact in enumerate(lookups, start=1):
            plan = f"{number} of {len(lookups)} find {fact} of {name}"
            titles = self._search(name, fact, plan, messages)
            source_person, is_answered = self._read(name, fact, titles)
            is_lost = is_lost or not is_answered
            if source_person is None:
                break
            name = source_person.facts["mentor"]
            if number < len(lookups) and not self._sample_event(self._habits.continue_search):
                is_lost = True
                break
        is_lost = is_lost or source_person is None or source_person.omitted_fact == attribute
        if self._sample_event(
            self._habits.abstain_if_lost if is_lost else self._habits.abstain_if_found
        ):
            return I_DO_NOT_KNOW
        return (
            guess
            if source_person is None or source_person.omitted_fact == attribute
            else source_person.facts[attribute]
        )

    def _read(self, name: str, fact: str, titles: Sequence[str]) -> tuple[Person | None, bool]:
        """Choose a document; return its person, or None, and whether it answers the lookup.

        For a pupil, this is any pupil in the results or, if there is none, any person. Otherwise
        it is the person with this name or, if missing, the first person in the results.
        """
        if not titles:
            return None, False
        if fact == "pupil":
            pupils = [t for t in titles if self._people[t].facts["mentor"] == name]
            return self._people[self._rng.choice(pupils or titles)], bool(pupils)
        return self._people[name if name in titles else titles[0]], name in titles

    def _search(self, name: str, fact: str, plan: str, messages: list[dict[str, str]]) -> list[str]:
        """Append a thought and a search to `messages`; return the titles in the result."""
        query = self._sample_query(self._people[name], fact)
        filler = ""
        if self._sample_event(self._habits.filler_thought):
            words = self._rng.choices(FILLER_WORDS, k=self._rng.randint(5, 12))
            filler = " ".join(words) + " "
        turn = f"<think> {filler}{plan} </think><search> {query} </search>"
        messages.append({"role": "assistant", "content": turn})
        messages.append({"role": "tool", "content": self._engine.run(query)})
        return quickstart.parse_titles(messages[-1]["content"])

    def _sample_query(self, person: Person, fact: str) -> str:
        is_good = self._sample_event(self._habits.good_query)
        styles = quickstart.GOOD_QUERIES if is_good else quickstart.POOR_QUERIES
        [style] = self._rng.choices(list(styles), list(styles.values()))
        return style.format(first=person.first, last=person.last, attribute=fact)

    def _sample_event(self, chance: float) -> bool:
        return self._rng.random() < chance


def make_demonstrations(
    world: World, people: People, num: int, rng: random.Random
) -> list[dict[str, Any]]:
    """Generate demonstrations about the people of one world."""
    with quickstart.open_people_search(select_documented(people), topk=world.topk) as engine:
        generator = QuestionGenerator(people, engine, rng)
        questions = make_questions(world, people.values(), generator, rng)
        demonstrator = Demonstrator(people, engine, world.habits, rng)
        sampled = quickstart.cycle_questions(questions, num, rng)
        return [demonstrator.demonstrate(question) for question in sampled]


def select_documented(people: People) -> list[Any]:
    """Return the people who have a document."""
    return [person for person in people.values() if person.is_documented]


def iter_training_texts(chats: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yield texts for training the tokenizer: filler words, and the quickstart's texts."""
    yield from (f" {word}" for word in FILLER_WORDS)
    yield from quickstart.iter_training_texts(chats)


def check_nothing_leaks(people: People, files: Mapping[str, Sequence[dict[str, Any]]]) -> None:
    """Assert that training data does not name a held-out person."""
    held_out = "|".join(person.name for person in people.values() if person.split in HELD_OUT)
    for name in files:
        if name == "corpus" or name.endswith(HELD_OUT):
            continue
        leak = re.search(held_out, json.dumps(files[name]))
        assert leak is None, f"{name} names {leak.group()}, who is held out"


def make_files(
    world: World, args: argparse.Namespace, rngs: Mapping[str, random.Random]
) -> tuple[People, dict[str, list[dict[str, Any]]]]:
    """Generate the people, and the records of every file."""
    # Corpus and questions: all three splits share one search index.
    sizes = {
        "train": args.num_people - 2 * args.num_held_out,
        **dict.fromkeys(HELD_OUT, args.num_held_out),
    }
    people = make_people(world, sizes, rngs["people"])
    files: dict[str, list[dict[str, Any]]] = {"corpus": list(make_documents(people.values()))}
    with quickstart.open_people_search(select_documented(people), topk=world.topk) as engine:
        generator = QuestionGenerator(people, engine, rngs["questions"])
        for split in SPLITS:
            files[f"questions_{split}"] = make_questions(
                world,
                [person for person in people.values() if person.split == split],
                generator,
                rngs["questions"],
                limit=args.num_questions if split in HELD_OUT else None,
            )
    # Demonstrations come from other worlds, so that they teach no facts.
    if world.train_shares:
        files["questions_train"] = thin_questions(files["questions_train"], world.train_shares)
    held_out = [person.name for person in people.values() if person.split in HELD_OUT]
    others = [
        make_people(world, {"train": sizes["train"]}, rngs["demos"], excluded=held_out)
        for _ in range(args.num_worlds)
    ]
    files["demonstrations"] = [
        chat
        for other in others
        for chat in make_demonstrations(
            world, other, args.num_demonstrations // args.num_worlds, rngs["demos"]
        )
    ]
    return people, files


def render_texts(files: Mapping[str, Sequence[dict[str, Any]]]) -> dict[str, list[str]]:
    """Render texts for the model, by kind, with a sample of the demonstrations."""
    texts = {"document": [render_documents([Document(**document)]) for document in files["corpus"]]}
    for split in SPLITS:
        for question in files[f"questions_{split}"]:
            prompt = quickstart.render_prompt(question["question"])
            texts.setdefault(f"prompt, {question['data_source']}", []).append(prompt)
    for chat in files["demonstrations"][: 8 * quickstart.SAMPLE]:
        name = f"chat, {chat['data_source']}"
        texts.setdefault(name, []).append(quickstart.render_chat(chat))
    return texts


def print_quality(chats: Sequence[dict[str, Any]]) -> None:
    """Print the fraction, accuracy and abstention rate of demonstrations by data source."""
    print(f"\n{'demonstrations':24}{'share':>8}{'right':>8}{'gives up':>10}")
    for source in sorted({chat["data_source"] for chat in chats}):
        group = [chat["metadata"] for chat in chats if chat["data_source"] == source]
        right, gives_up = (
            np.mean([metadata[name] for metadata in group])
            for name in ("is_correct", "is_abstention")
        )
        print(f"{source:24}{len(group) / len(chats):8.1%}{right:8.1%}{gives_up:10.1%}")


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--world", choices=WORLDS, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num_people", type=int, default=960)
    parser.add_argument(
        "--num_held_out", type=int, default=160, help="people in each held-out split"
    )
    parser.add_argument(
        "--num_questions", type=int, default=240, help="questions in each held-out split"
    )
    parser.add_argument("--num_demonstrations", type=int, default=16_000)
    parser.add_argument("--num_worlds", type=int, default=16, help="worlds for demonstrations")
    args = parser.parse_args(argv)
    limit = len(quickstart.FIRST_NAMES) * len(quickstart.LAST_NAMES)
    if not args.num_people <= limit:
        parser.error(f"--num_people is {args.num_people}; expected at most {limit}, one per name")
    if not 6 <= args.num_held_out <= (args.num_people - 6) // 2:
        parser.error("--num_held_out must leave at least six people in each of the three splits")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    world = WORLDS[args.world]
    rngs = {part: random.Random(f"{args.seed} {part}") for part in ("people", "questions", "demos")}
    people, files = make_files(world, args, rngs)
    tokenizer = quickstart.train_tokenizer(iter_training_texts(files["demonstrations"]))
    texts = render_texts(files)
    check_nothing_leaks(people, files)
    quickstart.check_words_are_whole(tokenizer, itertools.chain.from_iterable(texts.values()))
    quickstart.write_model(args.out / "model", tokenizer, seed=args.seed)
    for name, records in files.items():
        quickstart.write_jsonl(args.out / f"{name}.jsonl", records)
    quickstart.print_lengths(tokenizer, texts)
    print_quality(files["demonstrations"])
    print(f"\nwrote {args.out}: " + ", ".join(f"{len(files[name])} {name}" for name in files))


if __name__ == "__main__":
    main()
