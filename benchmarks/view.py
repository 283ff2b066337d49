"""The page of `jaxrl view` at size: the time to index, to open and to filter, in Chromium too.

Trajectories are drawn with all lists by token that a record may have. Prints a Markdown table.

python -m benchmarks.view --trajectories=50000 --folder=runs/bench_view
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np

from tests.browser import Browser

GROUP, TASKS_PER_STEP, NUM_TASKS, NUM_TAILS, NUM_STEPS = 8, 8, 4_000, 200, 2_000
NAMES = ("Ada Kerr", "Selma Ashdown", "Ines Quist", "Zara Vantongeren", "Soren Marchetti")
PLACES = ("Avington", "Tarvik", "Ironpool", "Dunmarsh", "Solmere")
OUTCOMES = ("answered", "answered", "answered", "malformed", "out_of_budget")

FILTERS: Sequence[dict[str, str]] = (
    {},
    {"text": "vantongeren"},
    {"text": "no question has this"},
    {"correct": "right", "sort": "length", "order": "down"},
    {"reward_min": "0.5", "step_min": "100", "step_max": "300"},
    {"outcome": "malformed", "sort": "reward", "order": "down", "text": "TARVIK"},
    {"sort": "advantage", "order": "up", "page": "200"},
)
"""Parameters of lists that are asked for."""


def tail(rng: np.random.Generator, tokens: int) -> str:
    """The lists by token of a record, as JSON without the brace that begins it."""
    mask = (np.arange(tokens) >= tokens // 4).astype(int)
    mask[tokens // 2 : 3 * tokens // 4] = 0

    def drawn(scale: float) -> list[float]:
        return [round(float(x), 6) for x in scale * rng.normal(size=tokens) * mask]

    lists = {
        "prompt_length": tokens // 4,
        "token_ids": rng.integers(0, 150_000, tokens).tolist(),
        "loss_mask": mask.tolist(),
        "rollout_logprobs": drawn(1.0),
        "rollout_entropies": drawn(0.5),
        "policy_versions": mask.tolist(),
        "old_logprobs": drawn(1.0),
        "new_logprobs": drawn(1.0),
        "ref_logprobs": drawn(1.0),
        "kl_weights": drawn(0.01),
        "token_weights": drawn(0.001),
        "token_advantages": drawn(1.0),
        "accuracy": 1.0,
    }
    return json.dumps(lists).removeprefix("{")


def write_run(folder: Path, trajectories: int, tokens: int) -> None:
    """Writes a run's metrics and trajectories; a file a step."""
    rng = np.random.default_rng(0)
    (folder / "trajectories").mkdir(parents=True)
    tails = [tail(rng, tokens) for _ in range(NUM_TAILS)]
    names = [f"part/metric_{number}" for number in range(150)] + ["critic/rewards/mean"]
    with (folder / "metrics.jsonl").open("w", encoding="utf-8") as file:
        for step in range(1, NUM_STEPS + 1):
            values = dict(zip(names, rng.normal(size=len(names)).round(6).tolist(), strict=True))
            file.write(json.dumps({"step": step, "stage": "train"} | values) + "\n")
    for first in range(0, trajectories, GROUP * TASKS_PER_STEP):
        step = first // (GROUP * TASKS_PER_STEP) + 1
        path = folder / "trajectories" / f"step_{step:06d}.jsonl"
        with path.open("w", encoding="utf-8") as file:
            for number in range(first, min(first + GROUP * TASKS_PER_STEP, trajectories)):
                task = (number // GROUP) % NUM_TASKS
                place, name = PLACES[task % 5], NAMES[task // 5 % 5]
                is_right = bool(rng.random() < 0.3)
                search = "<search> " + name + " </search>"
                result = "<information>" + f"{name} was born in {place}. " * 20 + "</information>"
                record: dict[str, Any] = {
                    "task_id": f"task-{task:05d}",
                    "question": f"Where is number {task} of {name}, of {place}?",
                    "answers": [place],
                    "sample_index": number % GROUP,
                    "attempt": 0,
                    "outcome": OUTCOMES[rng.integers(5)],
                    "reward": round(float(is_right) - 0.2 * float(rng.random()), 4),
                    "reward_parts": {"exact_match": float(is_right)},
                    "final_answer": place if is_right else PLACES[rng.integers(5)],
                    "is_correct": is_right,
                    "advantage": round(float(rng.normal()), 4),
                    "generated_text": search + result,
                    "turns": [{"text": search, "tool_call": name, "observation": result}],
                }
                head = json.dumps(record, ensure_ascii=False).removesuffix("}")
                file.write(f"{head}, {tails[rng.integers(NUM_TAILS)]}\n")


@contextmanager
def serving(folder: Path) -> Iterator[tuple[str, float]]:
    """The address of a server of its own process, and the seconds until it had one."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "jaxrl.extras.view", str(folder), "--port=0"]
    env = os.environ | {"XDG_CACHE_HOME": str(folder / "cache")}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        address = process.stdout.readline().split()[0]
        try:
            yield address, time.perf_counter() - began
        finally:
            process.kill()


def get(address: str, **parameters: str) -> Any:
    """The answer to a request, parsed."""
    with urllib.request.urlopen(f"{address}?{urlencode(parameters)}") as answer:
        return json.load(answer)


def until_indexed(address: str) -> dict[str, Any]:
    """The state of the run once all its files are indexed."""
    while True:
        [run] = get(f"{address}api/state")["runs"]
        if run["files"] and run["indexed"] == run["files"]:
            return run
        time.sleep(0.02)


def seconds(values: Sequence[float]) -> str:
    return f"median {1000 * statistics.median(values):.0f} ms, at most {1000 * max(values):.0f} ms"


def filtered(address: str, rounds: int) -> list[float]:
    """Seconds of every list, from the request to the parsed answer."""
    taken = []
    for _ in range(rounds):
        for parameters in FILTERS:
            began = time.perf_counter()
            get(f"{address}api/trajectories", **parameters)
            taken.append(time.perf_counter() - began)
    return taken


def opened(browser: Browser, address: str, view: str, query: str = "") -> float:
    """Seconds from the navigation until a view is drawn."""
    browser.call("Page.navigate", url="about:blank")
    began = time.perf_counter()
    browser.open(f"{address}#{view}{query}", view)
    return time.perf_counter() - began


def filtered_in_page(browser: Browser, rounds: int) -> list[float]:
    """Seconds of every list in a page that is open, from the request until it is drawn."""
    taken = []
    for _ in range(rounds):
        for parameters in FILTERS:
            browser.go("curves")
            browser.go("trajectories", urlencode(parameters))
            taken.append(int(browser.evaluate("document.documentElement.dataset.filterMs")) / 1000)
    return taken


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trajectories", type=int, default=50_000)
    parser.add_argument("--tokens", type=int, default=400, help="of each trajectory")
    parser.add_argument("--rounds", type=int, default=5, help="of all filters")
    parser.add_argument("--folder", type=Path, default=Path("runs/bench_view"))
    flags = parser.parse_args(argv)
    folder = flags.folder / f"{flags.trajectories}_{flags.tokens}"
    if not (folder / "trajectories").exists():
        write_run(folder, flags.trajectories, flags.tokens)
    size = sum(path.stat().st_size for path in (folder / "trajectories").iterdir())
    shutil.rmtree(folder / "cache", ignore_errors=True)
    for path in (folder / "trajectories").iterdir():
        with path.open("rb") as file:  # so that the first indexing reads the disk
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    has_browser = shutil.which("chromium") is not None
    rows = {"files of trajectories": f"{size / 2**30:.2f} GiB"}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile, ExitStack() as stack:
        browser = stack.enter_context(Browser(profile)) if has_browser else None
        with serving(folder) as (address, started):
            rows["start until the address is there"] = f"{started:.2f} s"
            if browser:
                rows["opening curves while it is indexed"] = (
                    f"{opened(browser, address, 'curves'):.2f} s"
                )
                took = opened(browser, address, "trajectories")
                rows["opening the list while it is indexed"] = f"{took:.2f} s"
            run = until_indexed(address)
            rows["first indexing, from the disk"] = f"{run['indexing_s']:.1f} s"
            while not list((folder / "cache").rglob("*.npz")):
                time.sleep(0.02)
        with serving(folder) as (address, started):
            began = time.perf_counter()
            assert until_indexed(address)["indexing_s"] == 0
            took = started + time.perf_counter() - began
            rows["start until the kept index is there"] = f"{took:.2f} s"
            if browser:
                rows["opening curves"] = f"{opened(browser, address, 'curves'):.2f} s"
                rows["opening the list"] = f"{opened(browser, address, 'trajectories'):.2f} s"
            rows["a filter, over HTTP"] = seconds(filtered(address, flags.rounds))
            if browser:
                rows["a filter, in Chromium"] = seconds(filtered_in_page(browser, flags.rounds))
                took = opened(browser, address, "trajectory", "?run=0&step=1&line=0")
                rows["opening a trajectory"] = f"{took:.2f} s"
    print(f"| {flags.trajectories:,} trajectories of {flags.tokens} tokens | |\n|---|---|")
    for name, value in rows.items():
        print(f"| {name} | {value} |")


if __name__ == "__main__":
    main()
