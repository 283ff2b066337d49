"""LocalSearch at size: the time and memory of building its index, and of searching it.

Passages of about 100 words are drawn from a vocabulary in which word k occurs as often as 1/k, as
in natural text; a query is eight words of a passage. Prints a Markdown table.

python -m benchmarks.local_search --passages=1000000 --folder=runs/bench_search
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxrl.envs.local_search import LocalSearch

NUM_WORDS, PASSAGE_WORDS, QUERY_WORDS, NUM_QUERIES = 500_000, 100, 8, 400
SHARE_ADDED = 100  # one passage of so many is appended afterwards


def words(rng: np.random.Generator, count: int) -> np.ndarray:
    """Numbers of words, the k-th with a probability of about 1/k."""
    return np.exp(rng.uniform(0.0, np.log(NUM_WORDS), count)).astype(int)


def spell(numbers: np.ndarray) -> list[str]:
    """Words of letters, short where they are frequent."""
    return [np.base_repr(number + 10, 36).lower() + "a" for number in numbers]


def write_passages(path: Path, start: int, count: int) -> None:
    """Appends passages with these ids."""
    rng = np.random.default_rng(start)
    with path.open("a", encoding="utf-8") as file:
        for number in range(start, start + count):
            drawn = spell(words(rng, PASSAGE_WORDS + 2))
            title, text = " ".join(drawn[:2]), " ".join(drawn[2:])
            file.write(json.dumps({"id": str(number), "title": title, "text": text}) + "\n")


def queries(path: Path) -> list[str]:
    """Words of passages from the beginning of the corpus."""
    rng, texts = np.random.default_rng(1), []
    with path.open(encoding="utf-8") as lines:
        for line, _ in zip(lines, range(NUM_QUERIES), strict=False):
            texts.append(" ".join(rng.choice(json.loads(line)["text"].split(), QUERY_WORDS)))
    return texts


HOSTILE = {
    "100,000 characters": " ".join(spell(np.arange(17_000)))[:100_000],
    "100,000 times `title:x AND (`": ("title:x AND (" * 8_000)[:100_000],
    "100,000 punctuation marks": '"(~^*' * 20_000,
}


def measured(corpus: Path) -> dict[str, float]:
    """Seconds of opening and searching; what the process held at most, in GiB."""
    start = time.perf_counter()
    engine = LocalSearch(corpus)
    figures = {"open_s": time.perf_counter() - start}
    figures["peak_gib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    asked = queries(corpus)
    engine.run_batch(asked[:50])
    latencies = []
    for query in asked:
        start = time.perf_counter()
        engine.run(query)
        latencies.append(time.perf_counter() - start)
    figures["median_s"] = statistics.median(latencies)
    figures["p99_s"] = sorted(latencies)[int(0.99 * len(latencies))]
    start = time.perf_counter()
    engine.run_batch(asked)
    figures["batch_s"] = time.perf_counter() - start
    for name, query in HOSTILE.items():
        start = time.perf_counter()
        engine.run(query)
        figures[name] = time.perf_counter() - start
    figures["searching_gib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return figures


def in_process(corpus: Path) -> dict[str, float]:
    """`measured` in a process of its own, whose memory is only that."""
    command = [sys.executable, "-m", "benchmarks.local_search", f"--measure={corpus}"]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--passages", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, default=Path("runs/bench_search"))
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.measure:
        print(json.dumps(measured(arguments.measure)))
        return
    arguments.folder.mkdir(parents=True, exist_ok=True)
    corpus, count = arguments.folder / f"passages_{arguments.passages}.jsonl", arguments.passages
    if not corpus.exists():
        write_passages(corpus, 0, count)
    size = corpus.stat().st_size / 2**30
    built = in_process(corpus)
    index = sum(p.stat().st_size for p in (arguments.folder / "index").rglob("*")) / 2**30
    again = in_process(corpus)
    write_passages(corpus, count, count // SHARE_ADDED)
    added = in_process(corpus)
    rows = {
        "corpus, index": f"{size:.2f} GiB, {index:.2f} GiB",
        "building the index": f"{built['open_s']:.0f} s, {built['peak_gib']:.2f} GiB at most",
        "opening it again": f"{again['open_s']:.2f} s, {again['peak_gib']:.2f} GiB",
        f"adding {count // SHARE_ADDED:,} passages": (
            f"{added['open_s']:.1f} s, {added['peak_gib']:.2f} GiB at most"
        ),
        "a query of 8 words": (
            f"median {again['median_s'] * 1e3:.1f} ms, 99% within {again['p99_s'] * 1e3:.1f} ms"
        ),
        f"{NUM_QUERIES} of them at once": f"{again['batch_s']:.2f} s",
        **{f"a query of {name}": f"{again[name] * 1e3:.0f} ms" for name in HOSTILE},
        "held while searching": f"{again['searching_gib']:.2f} GiB",
    }
    print(f"| {count:,} passages | |\n|---|---|")
    for name, value in rows.items():
        print(f"| {name} | {value} |")


if __name__ == "__main__":
    main()
