"""Qwen2.5-Coder-1.5B-Instruct as published: three search engines, its own tool calls and tags.

    python -m benchmarks.real_coder --world=data/real
    python -m benchmarks.real_coder --world=data/real --recall

The first evaluates `configs/real_coder.py` with each protocol and engine, one after another, and
prints a table. What is done is kept; killed, the same command goes on. The second prints how often
each engine shows an accepted answer for a whole question, without the model. The world is that of
`python -m examples.real_world --out=data/real --with_coder`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.claims_report import table
from benchmarks.claims_runs import ROOT, Job
from benchmarks.real import cell
from examples.real_world import shows
from jaxrl.envs.local_search import LocalSearch
from jaxrl.extras.dense.engine import DenseSearch
from jaxrl.extras.dense.hybrid import HybridSearch

PROTOCOLS = {"qwen": "tool calls", "search_r1": "tags"}
ENGINES = {"local": "BM25", "dense": "all-MiniLM-L6-v2", "hybrid": "both fused"}
MEASURES = {
    "exact match": "exact_match",
    "F1": "f1",
    "searched": "searched",
    "answer shown": "answer_in_results",
    "malformed": "malformed",
    "out of budget": "out_of_budget",
}


def job(protocol: str, engine: str, world: Path, out: Path) -> Job:
    """The command of one row."""
    folder = out / f"{protocol}_{engine}"
    return Job(
        folder=folder,
        module="jaxrl.launch",
        arguments=(
            f"--config={ROOT / 'configs/real_coder.py'}:{protocol},{world}",
            f"--config.search.engine={engine}",
            f"--workdir={folder}",
        ),
    )


def read_row(folder: Path) -> list[str]:
    """Scores, sampled tokens a second and peak memory of a finished evaluation."""
    [path] = folder.glob("eval/evaluate_*.json")
    record = json.loads(path.read_text(encoding="utf-8"))
    [suite] = record["summary"]
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    metrics = json.loads(lines[-1])
    tokens = record["ledger"]["sampled_tokens"]
    return [
        *(cell(record, suite, measure) for measure in MEASURES.values()),
        f"{tokens:,}",
        f"{tokens / metrics['timing_s/testing']:.1f}",
        f"{metrics['perf/max_memory_gib']:.1f}",
    ]


def recall(world: Path, counts: Sequence[int] = (1, 3, 5)) -> str:
    """Shares of all questions of which one of the first documents shows an accepted answer."""
    lines = (world / "questions_all.jsonl").read_text(encoding="utf-8").splitlines()
    questions = [json.loads(line) for line in lines]
    local = {"corpus": world / "corpus.jsonl"}
    dense = {
        **local,
        "encoder": world / "all-MiniLM-L6-v2/model",
        "query_prefix": "",
        "passage_prefix": "",
    }
    engines = {
        "local": LocalSearch(**local),
        "dense": DenseSearch(**dense, progress=print),
        "hybrid": HybridSearch(local=local, dense=dense),
    }
    rows = []
    for name, head in ENGINES.items():
        engine = engines[name]
        rankings = engine.retrieve([question["question"] for question in questions], max(counts))
        shown = [
            [shows(question["answers"], hit.document.text) for hit in hits]
            for question, hits in zip(questions, rankings, strict=True)
        ]
        shares = (sum(any(one[:count]) for one in shown) / len(shown) for count in counts)
        rows.append([head, *(f"{share:.3f}" for share in shares)])
    return table(["search", *(f"first {count}" for count in counts)], rows)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--world", type=Path, default=Path("data/real"), help="its folder")
    parser.add_argument("--workdir", type=Path, default=Path("runs/real_coder"))
    parser.add_argument("--recall", action="store_true", help="of the search engines alone")
    args = parser.parse_args(argv)
    if args.recall:
        print(recall(args.world))
        return
    rows = []
    for protocol, engine in itertools.product(PROTOCOLS, ENGINES):
        one = job(protocol, engine, args.world.resolve(), args.workdir.resolve())
        if not one.is_finished():
            print(f"{sys.executable} -m {one.module} {' '.join(one.arguments)}", flush=True)
            one.run(None, None)
        rows.append([PROTOCOLS[protocol], ENGINES[engine], *read_row(one.folder)])
    heads = ["calls", "search", *MEASURES, "tokens sampled", "tokens/s", "peak GiB"]
    print(table(heads, rows))


if __name__ == "__main__":
    main()
