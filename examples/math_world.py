"""Generate a world of arithmetic word problems that are solved line by line.

    python -m examples.math_world --out=data/math --seed=0

A problem states how many coins a box holds and how many people add or take, in two to six moves,
and asks for the final count. A response has one line per move with the running total, then an
`Answer:` line. The more moves, the more consecutive sums must be correct. No training problem or
demonstration has the numbers of a held-out problem in the same order.

Demonstrations are deliberately poor, in ways that reinforcement learning can fix: some guess, some
stop after three lines, some make arithmetic errors, and some repeat the entire solution, once or
several times, before they answer. The first word of a line is arbitrary.

The same seed generates the same bytes. Model and tokenizer are the quickstart's, with one token for
every number and every name.
"""

import argparse
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from examples import quickstart_world as quickstart

NAMES = quickstart.FIRST_NAMES
OPENERS = ("So", "Then", "Next", "Now")
VERBS = {1: "adds", -1: "takes"}
SIGNS = {1: "+", -1: "-"}
MAX_COINS = 30  # maximum number of coins in the box
AMOUNTS = range(2, 10)  # coins per move
NUM_MOVES = (2, 3, 4, 5, 6)
SPLITS = ("train", "dev", "eval")
"""Splits for training, for choosing settings, and for reported results."""


@dataclass(frozen=True, kw_only=True)
class Move:
    """A move: a person adds or takes coins."""

    name: str
    change: int  # coins; negative if taken

    @property
    def text(self) -> str:
        """Return a sentence that states the move."""
        sign = 1 if self.change > 0 else -1
        return f"{self.name} {VERBS[sign]} {abs(self.change)} coins."


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A box of coins and the moves that follow."""

    start: int  # coins
    moves: tuple[Move, ...]

    @property
    def numbers(self) -> tuple[int, ...]:
        """Return the numbers that determine the answer."""
        return (self.start, *(move.change for move in self.moves))

    @property
    def question(self) -> str:
        """Return the text for the model."""
        moves_text = " ".join(move.text for move in self.moves)
        return f"A box holds {self.start} coins. {moves_text} How many are in it now?"


@dataclass(frozen=True, kw_only=True)
class Habits:
    """Probabilities of a demonstrator's choices. At most one of the first three applies."""

    guess: float  # answers immediately
    hasty: float  # answers after `PATIENCE` lines, even if moves are left
    careless: float  # makes arithmetic errors
    slip: float  # probability of a wrong sum, if careless
    repeats: float  # probability of another pass, unless hasty or out of lines


MIXED = Habits(guess=0.1, hasty=0.35, careless=0.15, slip=0.2, repeats=0.45)
PATIENCE = 3


def sample_problem(num_moves: int, rng: random.Random) -> Problem:
    """Sample a problem with distinct names and totals from 0 to `MAX_COINS`."""
    start = total = rng.randint(2, MAX_COINS)
    moves = []
    for name in rng.sample(NAMES, num_moves):
        changes = [sign * amount for sign in SIGNS for amount in AMOUNTS]
        possible = [change for change in changes if 0 <= total + change <= MAX_COINS]
        moves.append(Move(name=name, change=rng.choice(possible)))
        total += moves[-1].change
    return Problem(start=start, moves=tuple(moves))


def make_problems(
    sizes: Mapping[str, int], shares: Sequence[float], rng: random.Random
) -> dict[str, list[Problem]]:
    """Generate the problems of each split, without repeated sequences of numbers.

    Args:
        sizes: Number of problems, by split.
        shares: Sampling weights of `NUM_MOVES` for training; other splits are uniform.
        rng: Random number generator.
    """
    seen: set[tuple[int, ...]] = set()
    problems: dict[str, list[Problem]] = {split: [] for split in sizes}
    for split in reversed(SPLITS):  # held-out splits first, since two-move problems are scarce
        for number in range(sizes[split]):
            num_moves = NUM_MOVES[number % len(NUM_MOVES)]
            if split == "train":
                [num_moves] = rng.choices(NUM_MOVES, shares)
            problem = sample_problem(num_moves, rng)
            while problem.numbers in seen:
                problem = sample_problem(num_moves, rng)
            seen.add(problem.numbers)
            problems[split].append(problem)
    return problems


def make_record(problem: Problem) -> dict[str, Any]:
    """Convert a problem to a question record."""
    return {
        "id": " ".join(map(str, problem.numbers)),
        "question": problem.question,
        "answers": [str(sum(problem.numbers))],
        "data_source": f"{len(problem.moves)}_moves",
        "metadata": {"numbers": list(problem.numbers)},
    }


def demonstrate(
    problem: Problem, habits: Habits, rng: random.Random, *, max_lines: int
) -> dict[str, Any]:
    """Generate a demonstration whose quality depends on the habits.

    Args:
        problem: Problem to solve.
        habits: Probabilities of the demonstrator's choices.
        rng: Random number generator.
        max_lines: Maximum number of lines, over all passes.
    """
    chances = {"guess": habits.guess, "hasty": habits.hasty, "careless": habits.careless}
    styles = [*chances, "good"]
    [style] = rng.choices(styles, [*chances.values(), 1 - sum(chances.values())])
    text, answer = "", rng.randint(0, MAX_COINS)
    num_passes = 0
    is_done = style == "guess"
    while not is_done:
        text += "Again:\n" * (num_passes > 0)
        moves = problem.moves[: PATIENCE if style == "hasty" else None]
        lines, answer = solve(problem.start, moves, rng, slip=habits.slip * (style == "careless"))
        text += lines
        num_passes += 1
        is_full = (num_passes + 1) * (len(moves) + 1) > max_lines
        is_done = style == "hasty" or is_full or rng.random() >= habits.repeats
    return {
        "messages": [
            {"role": "user", "content": problem.question},
            {"role": "assistant", "content": f"{text}Answer: {answer}{quickstart.END_OF_TURN}"},
        ],
        "data_source": f"{len(problem.moves)}_moves",
        "metadata": {
            "style": style,
            "num_passes": num_passes,
            "is_correct": answer == sum(problem.numbers),
        },
    }


def solve(start: int, moves: Sequence[Move], rng: random.Random, *, slip: float) -> tuple[str, int]:
    """Generate the lines of a solution; return them with the result."""
    text, total = "", start
    for move in moves:
        new = total + move.change
        if rng.random() < slip:
            new += rng.choice([-2, -1, 1, 2])
        new = min(max(new, 0), MAX_COINS)
        sign = SIGNS[1 if move.change > 0 else -1]
        opener = rng.choice(OPENERS)
        text += f"{opener} {move.name}: {total} {sign} {abs(move.change)} = {new}\n"
        total = new
    return text, total


def check_words_are_whole(tokenizer: tokenizers.Tokenizer, texts: Iterable[str]) -> None:
    """Assert that every number and name is a single token everywhere in `texts`."""
    words = {*NAMES, *map(str, range(MAX_COINS + 1))}
    ids = {word: tokenizer.encode(f" {word}").ids for word in words}
    assert all(len(values) == 1 for values in ids.values())
    token_ids = {values[0] for values in ids.values()}
    for text in texts:
        expected = [ids[word][0] for word in re.findall(r"\w+", text) if word in words]
        actual = [id for id in tokenizer.encode(text).ids if id in token_ids]
        assert actual == expected, f"a split number or name in {text!r}"


def check_nothing_leaks(files: Mapping[str, Sequence[dict[str, Any]]]) -> None:
    """Assert that the splits and the demonstrations share no held-out problem."""

    def extract_numbers(question: str) -> tuple[str, ...]:
        return tuple(re.findall(r"adds|takes|\d+", question))

    numbers_by_split = {
        split: {extract_numbers(q["question"]) for q in files[f"questions_{split}"]}
        for split in SPLITS
    }
    numbers_by_split["train"] |= {
        extract_numbers(c["messages"][0]["content"]) for c in files["demonstrations"]
    }
    for split, other in (("train", "dev"), ("train", "eval"), ("dev", "eval")):
        leaks = numbers_by_split[split] & numbers_by_split[other]
        assert not leaks, f"in both {split} and {other}: {leaks}"


def print_quality(chats: Sequence[Mapping[str, Any]]) -> None:
    """Print the fraction and accuracy of demonstrations by style and number of passes."""
    print(f"\n{'demonstrations':24}{'share':>8}{'right':>8}")
    for key in ("style", "num_passes"):
        for value in sorted({chat["metadata"][key] for chat in chats}):
            values = [c["metadata"]["is_correct"] for c in chats if c["metadata"][key] == value]
            name = value if key == "style" else f"passes: {value}"
            print(f"{name:24}{len(values) / len(chats):8.1%}{np.mean(values):8.1%}")


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num_train", type=int, default=4000)
    parser.add_argument(
        "--num_held_out", type=int, default=200, help="problems in each held-out split"
    )
    parser.add_argument("--num_demonstrations", type=int, default=20_000)
    parser.add_argument("--max_lines", type=int, default=16, help="lines of a demonstration")
    parser.add_argument(
        "--shares",
        type=lambda text: tuple(map(float, text.split(","))),
        default=(1.0,) * len(NUM_MOVES),
        help=f"weights of training problems with {NUM_MOVES} moves, separated by commas",
    )
    args = parser.parse_args(argv)
    if len(args.shares) != len(NUM_MOVES):
        parser.error(f"--shares has {len(args.shares)} numbers; expected {len(NUM_MOVES)}")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    rngs = {part: random.Random(f"{args.seed} {part}") for part in ("problems", "demos")}
    sizes = {split: args.num_held_out for split in SPLITS} | {"train": args.num_train}
    problems = make_problems(sizes, args.shares, rngs["problems"])
    # Demonstrations skip the held-out problems.
    held_out = {p.numbers for split in SPLITS[1:] for p in problems[split]}
    chats: list[dict[str, Any]] = []
    while len(chats) < args.num_demonstrations:
        problem = sample_problem(NUM_MOVES[len(chats) % len(NUM_MOVES)], rngs["demos"])
        if problem.numbers not in held_out:
            chats.append(demonstrate(problem, MIXED, rngs["demos"], max_lines=args.max_lines))
    files = {f"questions_{split}": [make_record(p) for p in problems[split]] for split in SPLITS}
    files["demonstrations"] = chats
    tokenizer = quickstart.train_tokenizer(quickstart.iter_training_texts(chats, words=()))
    # Check the texts before writing anything.
    texts = {
        source: [quickstart.render_chat(chat) for chat in chats if chat["data_source"] == source]
        for source in sorted({chat["data_source"] for chat in chats})
    }
    check_nothing_leaks(files)
    for group in texts.values():
        check_words_are_whole(tokenizer, group[: quickstart.SAMPLE])
    quickstart.write_model(args.out / "model", tokenizer, seed=args.seed)
    for name, records in files.items():
        quickstart.write_jsonl(args.out / f"{name}.jsonl", records)
    quickstart.print_lengths(tokenizer, texts)
    print_quality(chats)
    print(f"\nwrote {args.out}: " + ", ".join(f"{len(files[name])} {name}" for name in files))


if __name__ == "__main__":
    main()
