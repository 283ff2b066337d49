"""Generate a world of trails, whose episodes are longer than the context.

    python -m examples.trail_world --out=data/trail --seed=0

Each person's document names the next person of the trail; the last document states a word. A
question asks for the word at the end of a trail of `--length` people. It takes `--length` searches,
each of which needs only the result of the previous one. Documents are long: with eight people, an
episode has four times the tokens of `rollout.context.max_tokens` in configs/trail.py.

People, words and model are like the quickstart's (examples/quickstart_world.py). Demonstrations
come from other worlds. At each person, some search for only the surname or give up and guess. The
same seed generates the same bytes.
"""

import argparse
import itertools
import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples import quickstart_world as quickstart
from jaxrl.envs.search.bm25 import LocalSearch

OMITTED = "…"  # one token, which replaces omitted results
QUESTION = "Which word ends the trail of {name}?"
FILLER_WORDS = "rain road mill river bridge market winter harvest lantern orchard".split()  # noqa: SIM905
"""Filler words. Each document starts with `NUM_FILLER_WORDS` of them."""
NUM_FILLER_WORDS = 30
POOR_QUERY_RATE = 0.05
"""Probability of a search for only the surname, which usually finds other people."""
ABSTENTION_RATE = 0.05
"""Probability, per person, that a demonstration stops and guesses a word."""


@dataclass(frozen=True, kw_only=True)
class Trail:
    """A chain of people, as first and last names, and the word at its end."""

    names: Sequence[tuple[str, str]]
    word: str
    is_held_out: bool

    def documents(self) -> Iterator[dict[str, str]]:
        """Yield the document of each person."""
        for name, next_name in itertools.zip_longest(self.names, self.names[1:]):
            title = " ".join(name)
            clue = f"the word {self.word}" if next_name is None else f"see {' '.join(next_name)}"
            rng = random.Random(title)
            filler = " ".join(rng.choice(FILLER_WORDS) for _ in range(NUM_FILLER_WORDS))
            yield {"id": title, "title": title, "text": f"{filler}. {title} says {clue}."}

    def question(self) -> dict[str, Any]:
        """Return the question record, which names the first person."""
        first = " ".join(self.names[0])
        return {
            "id": first,
            "question": QUESTION.format(name=first),
            "answers": [self.word],
            "data_source": "trail",
        }


def make_trails(
    count: int, num_held_out: int, length: int, rng: random.Random, excluded: Collection[Any] = ()
) -> list[Trail]:
    """Generate trails of distinct people outside `excluded`. The first trails are held out."""
    possible = itertools.product(quickstart.FIRST_NAMES, quickstart.LAST_NAMES)
    names = rng.sample([name for name in possible if name not in excluded], count * length)
    return [
        Trail(
            names=names[i * length : (i + 1) * length],
            word=rng.choice(quickstart.CITIES),
            is_held_out=i < num_held_out,
        )
        for i in range(count)
    ]


def make_documents(trails: Sequence[Trail], rng: random.Random) -> list[dict[str, str]]:
    """Return all documents with random ids, by which a search breaks ties."""
    results = [document for trail in trails for document in trail.documents()]
    rng.shuffle(results)
    return [{**document, "id": f"{i:05d}"} for i, document in enumerate(results)]


def demonstrate(trail: Trail, engine: LocalSearch, rng: random.Random) -> dict[str, Any]:
    """Generate a demonstration. The answer is correct only if it reaches the end."""
    question = trail.question()
    messages = [{"role": "user", "content": question["question"]}]
    answer = rng.choice(quickstart.CITIES)
    for position, (first, last) in enumerate(trail.names):
        if rng.random() < ABSTENTION_RATE:
            break
        query = last if rng.random() < POOR_QUERY_RATE else f"{first} {last}"
        messages.append({"role": "assistant", "content": f"<search> {query} </search>"})
        messages.append({"role": "tool", "content": engine.run(query)})
        if f"{first} {last}" not in quickstart.parse_titles(messages[-1]["content"]):
            break
        if position == len(trail.names) - 1:
            answer = trail.word
    messages.append({"role": "assistant", "content": f"<answer> {answer} </answer>"})
    return {"messages": messages, "data_source": "trail"}


def make_demonstrations(
    args: argparse.Namespace, rng: random.Random, excluded: Collection[Any]
) -> Any:
    """Generate demonstrations from `args.num_worlds` worlds with other people."""
    results = []
    for _ in range(args.num_worlds):
        trails = make_trails(args.num_trails // 2, 0, args.length, rng, excluded)
        with quickstart.open_search(make_documents(trails, rng), topk=args.topk) as engine:
            sampled = quickstart.cycle_questions(
                trails, args.num_demonstrations // args.num_worlds, rng
            )
            results += [demonstrate(trail, engine, rng) for trail in sampled]
    return results


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--length", type=int, default=8, help="people per trail")
    parser.add_argument("--num_trails", type=int, default=240)
    parser.add_argument(
        "--num_held_out", type=int, default=100, help="trails held out for evaluation"
    )
    parser.add_argument("--num_demonstrations", type=int, default=4000)
    parser.add_argument("--num_worlds", type=int, default=10, help="worlds for demonstrations")
    parser.add_argument("--topk", type=int, default=2, help="documents in a search result")
    args = parser.parse_args(argv)
    max_people = len(quickstart.FIRST_NAMES) * len(quickstart.LAST_NAMES)
    if not 1 <= args.num_trails * args.length <= max_people:
        parser.error(
            f"--num_trails times --length must be from 1 to {max_people}, the number of names"
        )
    num_other_trails = args.num_held_out + args.num_trails // 2  # with those of the demonstrations
    if not 1 <= args.num_held_out < args.num_trails or num_other_trails * args.length > max_people:
        parser.error(
            "--num_held_out must be at least 1, less than --num_trails, and leave names for "
            "demonstrations"
        )
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    rngs = {part: random.Random(f"{args.seed} {part}") for part in ("trails", "order", "demos")}
    trails = make_trails(args.num_trails, args.num_held_out, args.length, rngs["trails"])
    held_out = {name for trail in trails if trail.is_held_out for name in trail.names}
    files = {
        "corpus": make_documents(trails, rngs["order"]),
        "questions_train": [trail.question() for trail in trails if not trail.is_held_out],
        "questions_eval": [trail.question() for trail in trails if trail.is_held_out],
        "demonstrations": make_demonstrations(args, rngs["demos"], held_out),
    }
    words = [*quickstart.POOL, OMITTED]
    texts = quickstart.iter_training_texts(files["demonstrations"], words)
    tokenizer = quickstart.train_tokenizer(itertools.chain(texts, [OMITTED] * 100))
    quickstart.write_model(args.out / "model", tokenizer, seed=args.seed)
    quickstart.write_files(args.out, files)
    lengths = {
        "prompt": [quickstart.render_prompt(q["question"]) for q in files["questions_eval"]],
        "demonstration": [quickstart.render_chat(d) for d in files["demonstrations"][:2000]],
    }
    quickstart.print_lengths(tokenizer, lengths)
    print(f"\nwrote {args.out}: " + ", ".join(f"{len(files[name])} {name}" for name in files))


if __name__ == "__main__":
    main()
