"""Generate a world of puzzles: paths through a street grid with some crossings closed.

    python -m examples.puzzle_world --out=data/puzzles --seed=0

A path leads from the lower left crossing, `1a`, to the upper right crossing, `5e`, and only goes
right or up. A puzzle lists the closed crossings. Every path that avoids them is an accepted answer,
written as a list of crossings in an `Answer:` line. Usually a few of the 70 paths are open. No
training question or demonstration closes the same crossings as a held-out puzzle.

Most demonstrations have the habit of following the lower edge and then going up, which fails on
most puzzles. Others take a random path, and a few take an open one. A policy that imitates them
rarely solves a puzzle on the first try, but often within several tries unless it only follows the
habit. This makes the world suitable for training on pass@k.

The same seed generates the same bytes. Model and tokenizer are the quickstart's, with one token for
every crossing.
"""

import argparse
import itertools
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from examples import quickstart_world as quickstart

COLUMNS, ROWS = "12345", "abcde"
START, GOAL = COLUMNS[0] + ROWS[0], COLUMNS[-1] + ROWS[-1]
CROSSINGS = tuple(column + row for row in ROWS for column in COLUMNS)
QUESTION = "Find a way from {start} to {goal} around {closed}"

Way = tuple[str, ...]


def find_all_paths() -> tuple[Way, ...]:
    """Return all shortest paths from start to goal. The first follows the lower edge."""
    num_right, num_up = len(COLUMNS) - 1, len(ROWS) - 1
    paths = []
    for rights in itertools.combinations(range(num_right + num_up), num_right):
        column = row = 0
        way = [START]
        for step in range(num_right + num_up):
            column, row = (column + 1, row) if step in rights else (column, row + 1)
            way.append(COLUMNS[column] + ROWS[row])
        paths.append(tuple(way))
    return tuple(paths)


PATHS = find_all_paths()
HABIT = PATHS[0]


@dataclass(frozen=True, kw_only=True)
class Puzzle:
    """Closed crossings and the paths that remain open."""

    closed: tuple[str, ...]  # in the order of CROSSINGS
    paths: tuple[Way, ...]

    @property
    def question(self) -> str:
        """Return the text for the model."""
        return QUESTION.format(start=START, goal=GOAL, closed=" ".join(self.closed))

    @property
    def kind(self) -> str:
        """Return "edge" if the habit solves the puzzle, else "detour"."""
        return "edge" if HABIT in self.paths else "detour"


@dataclass(frozen=True, kw_only=True)
class Habits:
    """Probabilities of a demonstrator's choices. Otherwise it takes a random path."""

    edge: float  # follows the lower edge and then goes up, even if it is closed
    look: float  # takes an open path


MIXED = Habits(edge=0.6, look=0.15)


def make_puzzles(num: int, num_closed: int, rng: random.Random) -> list[Puzzle]:
    """Generate distinct puzzles with at least one open path."""
    puzzles: dict[tuple[str, ...], Puzzle] = {}
    open_crossings = [crossing for crossing in CROSSINGS if crossing not in (START, GOAL)]
    while len(puzzles) < num:
        sampled = set(rng.sample(open_crossings, num_closed))
        closed = tuple(crossing for crossing in CROSSINGS if crossing in sampled)
        paths = tuple(way for way in PATHS if sampled.isdisjoint(way))
        if paths:
            puzzles[closed] = Puzzle(closed=closed, paths=paths)
    return list(puzzles.values())


def make_record(puzzle: Puzzle) -> dict[str, Any]:
    """Convert a puzzle to a question record. `metadata` has the number of open paths."""
    return {
        "id": "-".join(puzzle.closed),
        "question": puzzle.question,
        "answers": [" ".join(way) for way in puzzle.paths],
        "data_source": puzzle.kind,
        "metadata": {"num_ways": len(puzzle.paths)},
    }


def demonstrate(puzzle: Puzzle, habits: Habits, rng: random.Random) -> dict[str, Any]:
    """Generate a demonstration whose quality depends on the habits."""
    chance = rng.random()
    if chance < habits.edge:
        style, way = "edge", HABIT
    elif chance < habits.edge + habits.look:
        style, way = "look", rng.choice(puzzle.paths)
    else:
        style, way = "any", rng.choice(PATHS)
    return {
        "messages": [
            {"role": "user", "content": puzzle.question},
            {"role": "assistant", "content": f"Answer: {' '.join(way)}{quickstart.END_OF_TURN}"},
        ],
        "data_source": puzzle.kind,
        "metadata": {"style": style, "is_correct": way in puzzle.paths},
    }


def check_crossings_are_whole(
    tokenizer: tokenizers.Tokenizer, chats: Sequence[Mapping[str, Any]]
) -> None:
    """Assert that every crossing is a single token everywhere in a sample of chats."""
    ids = {crossing: tokenizer.encode(f" {crossing}").ids for crossing in CROSSINGS}
    assert all(len(values) == 1 for values in ids.values())
    token_ids = {values[0] for values in ids.values()}
    for chat in chats[: quickstart.SAMPLE]:
        text = quickstart.render_chat(chat)
        expected = [ids[word][0] for word in re.findall(r"\w+", text) if word in ids]
        actual = [id for id in tokenizer.encode(text).ids if id in token_ids]
        assert actual == expected, f"a split crossing in {text!r}"


def check_nothing_leaks(files: Mapping[str, Sequence[dict[str, Any]]]) -> None:
    """Assert that training data contains no held-out puzzle."""
    trained = {chat["messages"][0]["content"] for chat in files["demonstrations"]}
    trained |= {record["question"] for record in files["questions_train"]}
    leaks = trained & {record["question"] for record in files["questions_eval"]}
    assert not leaks, f"held out, but trained on: {leaks}"


def print_quality(files: Mapping[str, Sequence[dict[str, Any]]]) -> None:
    """Print the fraction and accuracy of demonstrations by style, and numbers of open paths."""
    chats = [chat["metadata"] for chat in files["demonstrations"]]
    print(f"\n{'demonstrations':24}{'share':>8}{'right':>8}")
    for style in ("edge", "any", "look"):
        values = [chat["is_correct"] for chat in chats if chat["style"] == style]
        print(f"{style:24}{len(values) / len(chats):8.1%}{np.mean(values):8.1%}")
    nums = [record["metadata"]["num_ways"] for record in files["questions_eval"]]
    p5, p50, p95 = np.percentile(nums, [5, 50, 95])
    print(f"\nopen ways, held out: p5 {p5:.0f}, p50 {p50:.0f}, p95 {p95:.0f} of {len(PATHS)}")


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num_closed", type=int, default=7, help="closed crossings per puzzle")
    parser.add_argument("--num_train", type=int, default=4000)
    parser.add_argument("--num_held_out", type=int, default=200)
    parser.add_argument("--num_demonstrations", type=int, default=16_000)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    rngs = {part: random.Random(f"{args.seed} {part}") for part in ("puzzles", "demos")}
    total = args.num_train + args.num_held_out
    puzzles = make_puzzles(total, args.num_closed, rngs["puzzles"])
    train, held_out = puzzles[: args.num_train], puzzles[args.num_train :]
    files = {
        "questions_train": [make_record(puzzle) for puzzle in train],
        "questions_eval": [make_record(puzzle) for puzzle in held_out],
        "demonstrations": [
            demonstrate(puzzle, MIXED, rngs["demos"])
            for puzzle in quickstart.cycle_questions(train, args.num_demonstrations, rngs["demos"])
        ],
    }
    texts = quickstart.iter_training_texts(files["demonstrations"], CROSSINGS)
    tokenizer = quickstart.train_tokenizer(texts)
    check_nothing_leaks(files)
    check_crossings_are_whole(tokenizer, files["demonstrations"])
    quickstart.write_model(args.out / "model", tokenizer, seed=args.seed)
    for name, records in files.items():
        quickstart.write_jsonl(args.out / f"{name}.jsonl", records)
    chats = [quickstart.render_chat(chat) for chat in files["demonstrations"]]
    quickstart.print_lengths(tokenizer, {"demonstrations": chats})
    print_quality(files)
    print(f"\nwrote {args.out}: " + ", ".join(f"{len(files[name])} {name}" for name in files))


if __name__ == "__main__":
    main()
