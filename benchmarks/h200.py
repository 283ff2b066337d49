r"""Run all benchmarks on one H200 in nine minutes, including compilation.

    python -m benchmarks.h200 --out=DIR [--preset=h200|cpu] [--only=kernels,update_4b]
        [--budget_s=540]

Correctness is checked first, then speed. Each part is a process with a time limit, so that a part
that fails or hangs does not affect the others; unused time goes to later parts. Untimed parts run
concurrently, since they mostly use the host; timed parts run alone. `DIR/results.json` and
`DIR/table.md` are rewritten after each part; `DIR/log.txt` contains the output of all parts.

Required packages: jax, flax, optax, transformers, jaxtyping, ml_collections, rich, PyYAML, absl-py,
tokenizers, jinja2 and matplotlib; also tantivy for `first_step`. No part needs torch.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import format_table
from jaxrl.utils.files import open_atomic

TINY_FLAGS = (
    "--num_layers=1 --width=32 --num_heads=2 --num_kv_heads=1 --head_dim=16 --mlp_width=48 "
    "--vocab_size=300 --prompt_tokens=8"
)
EVEN_FLAGS = (
    "--new_tokens=8 --num_prompts=2 --group_size=2 --num_rows=4 --chunk_tokens=4 --tail_rows=1"
)
TRAIN_FLAGS = "--new_tokens=8 --num_groups=2 --group_size=2 --row_tokens=32"
EPISODE_FLAGS = "--num_questions=2 --group_size=2 --num_rows=4 --chunk_tokens=4 --turn_tokens=8"


@dataclass(frozen=True, kw_only=True)
class Part:
    """A benchmark that runs in a separate process."""

    name: str
    module: str
    flags: str
    tiny: str  # flags for the preset `cpu`, instead of `flags`
    share_s: float  # seconds of the nine-minute budget
    is_timed: bool = True  # True if it needs exclusive use of the device


PARTS = (
    Part(
        name="checks", module="agreement", flags="--part=checks", tiny="--part=checks",
        share_s=45, is_timed=False,
    ),
    Part(
        name="kernels", module="agreement", flags="--part=kernels --shapes=4",
        tiny="--part=kernels --shapes=2", share_s=45, is_timed=False,
    ),
    Part(
        name="experts", module="agreement", flags="--part=experts --shapes=4",
        tiny="--part=experts --shapes=2", share_s=45, is_timed=False,
    ),
    Part(
        name="model", module="agreement", flags="--part=model", tiny="--part=model",
        share_s=45, is_timed=False,
    ),
    Part(
        name="rollout_0.6b", module="rollout",
        flags="--preset=h200 --model=qwen3-0.6b --warm_up=1 --repetitions=2",
        tiny=f"{TINY_FLAGS} {EVEN_FLAGS} --warm_up=1 --repetitions=1", share_s=70,
    ),
    Part(
        name="update_4b", module="update",
        flags="--preset=h200 --model=qwen3-4b --spread=0 --new_tokens=1536 --row_tokens=2048 "
        "--micro_rows=4 --warm_up=1 --repetitions=3",
        tiny=f"{TINY_FLAGS} {TRAIN_FLAGS} --warm_up=1 --repetitions=1", share_s=80,
    ),
    Part(
        name="rollout_4b", module="rollout",
        flags="--preset=h200 --model=qwen3-4b --warm_up=1 --repetitions=1",
        tiny=f"{TINY_FLAGS} {EVEN_FLAGS} --warm_up=1 --repetitions=1", share_s=85,
    ),
    Part(
        name="first_step", module="step",
        flags="--preset=h200 --model=qwen3-0.6b --warm_up=0 --repetitions=1",
        tiny=f"{TINY_FLAGS} {EPISODE_FLAGS} --observation_tokens=8 --latency_ms=1 --warm_up=0 "
        "--repetitions=1",
        share_s=85,
    ),
)  # fmt: skip
"""Parts in order. The untimed parts at the start run concurrently."""


def build_command(part: Part, preset: str, record: Path) -> list[str]:
    """Return the command that runs a part and writes its JSON record."""
    flags = part.flags if preset == "h200" else part.tiny
    module = f"benchmarks.{part.module}"
    return [sys.executable, "-m", module, *flags.split(), f"--json={record}"]


@dataclass(kw_only=True)
class Run:
    """Process of a part, in its own session so that its children can be killed too."""

    arguments: list[str]
    process: subprocess.Popen[bytes]
    record: Path
    started: float

    def end(self, code: int | None) -> dict[str, Any]:
        """Kill the process and return its result; `code` is None if it timed out."""
        self.kill()
        seconds = time.monotonic() - self.started
        result: dict[str, Any] = {"ending": f"ended with {code}", "seconds": seconds}
        result["command"] = "python " + shlex.join(self.arguments[1:-1])
        result["printed"] = self.record.with_suffix(".log").read_text("utf-8", "replace")
        try:
            figures = json.loads(self.record.read_text(encoding="utf-8"))
            result["record"], result["shown"] = figures, format_figures(figures)
        except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
            result |= {"said_last": result["printed"][-2000:], "no_record": repr(error)}
            result.pop("record", None)
        if code is None:
            result["ending"] = f"stopped after {seconds:.0f} s"
        elif code == 0:
            result["ending"] = "done" if "record" in result else "ended without a record"
        return result

    def kill(self) -> None:
        """Kill the process and its children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def start(part: Part, preset: str, record: Path) -> Run:
    """Start the process of a part."""
    environment = os.environ | {
        "JAX_PLATFORMS": {"h200": "cuda,cpu", "cpu": "cpu"}[preset],
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92",
        "XLA_PYTHON_CLIENT_PREALLOCATE": str(part.is_timed).lower(),
        "PYTHONUNBUFFERED": "1",
    }
    arguments, started = build_command(part, preset, record), time.monotonic()
    with record.with_suffix(".log").open("wb") as file:
        process = subprocess.Popen(
            arguments,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Run(arguments=arguments, process=process, record=record, started=started)


FIGURES = {
    "is_near": "{}",
    "same_greedy_tokens": "{:.3f}",
    "logprob_gap": "{:.2g}",
    "gradient_float32": "{:.2g}",
    "gradient_bfloat16": "{:.2g}",
    "tokens_per_s": "{:,.0f}",
    "floor_tokens_per_s": "{:,.0f}",
    "ms_per_decode_step": "{:.2f}",
    "floor_ms_per_decode_step": "{:.2f}",
    "share_of_floor": "{:.1%}",
    "tail_ms_per_decode_step": "{:.2f}",
    "tail_share_of_floor": "{:.1%}",
    "ms_per_update": "{:,.0f}",
    "mfu": "{:.1%}",
    "mfu_computed": "{:.1%}",
    "first_step_s": "{:.1f}",
    "step_s": "{:.2f}",
    "rollout_s": "{:.2f}",
    "tools_s": "{:.2f}",
    "scoring_s": "{:.2f}",
    "update_s": "{:.2f}",
    "weights_s": "{:.3f}",
    "compile_s": "{:.0f}",
    "num_recompilations": "{}",
    "peak_bytes": "{:,.0f}",
}
"""Figures to show in the table, with their formats."""


def format_figures(record: dict[str, Any]) -> str:
    """Format the figures of a record, as medians over repetitions."""
    texts = []
    for name, form in FIGURES.items():
        value = record.get(name)
        value = value["median"] if isinstance(value, dict) else value
        if value is not None:
            texts.append(f"{name} {form.format(value)}")
    return ", ".join(texts)


def format_report(results: dict[str, Any]) -> str:
    """Format the results as Markdown."""
    records = [
        part_result["record"]
        for part_result in results.values()
        if "versions" in part_result.get("record", {})
    ]
    about = ""
    if records:
        versions = ", ".join(f"{name} {text}" for name, text in records[0]["versions"].items())
        about = f"{records[0]['device']}, {records[0]['processor']}, {versions}.\n\n"
    rows = [
        [
            name,
            part_result["ending"],
            f"{part_result['seconds']:.0f}",
            format_figures(part_result.get("record", {})),
        ]
        for name, part_result in results.items()
    ]
    commands = "\n".join(part_result["command"] for part_result in results.values())
    head = ["part", "ending", "seconds", "figures, medians"]
    return f"{about}{format_table(head, rows)}\n\n```sh\n{commands}\n```\n"


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the selected parts; return their results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [part.name for part in PARTS]
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--preset", choices=("h200", "cpu"), default="h200")
    parser.add_argument("--only", default=",".join(names), help="parts to run")
    parser.add_argument(
        "--budget_s", type=float, default=540.0, help="seconds for all parts together"
    )
    flags = parser.parse_args(argv)
    only = flags.only.split(",")
    if unknown := set(only) - set(names):
        parser.error(f"--only names {', '.join(sorted(unknown))}; expected some of {names}")
    # Scale each part's share to the budget.
    selected = [part for part in PARTS if part.name in only]
    flags.out.mkdir(parents=True, exist_ok=True)
    (flags.out / "log.txt").unlink(missing_ok=True)
    results: dict[str, Any] = {}
    deadline = time.monotonic() + flags.budget_s
    unit_s = flags.budget_s / sum(part.share_s for part in selected)
    untimed = [part for part in selected if not part.is_timed]
    batches = [untimed] * bool(untimed) + [[part] for part in selected if part.is_timed]

    def save_result(name: str, result: dict[str, Any]) -> None:
        with (flags.out / "log.txt").open("a", encoding="utf-8") as file:
            file.write(f"\n$ {result['command']}\n{result.pop('printed')}")
        about = result.pop("shown", None) or result.get("said_last", "")
        results[name] = result
        files = {
            "results.json": json.dumps(results, indent=2) + "\n",
            "table.md": format_report(results),
        }
        for file_name, text in files.items():
            with open_atomic(flags.out / file_name) as file:
                file.write(text)
        print(f"{name}: {result['ending']}, {result['seconds']:.0f} s: {about}", flush=True)

    # Each round may use what remains after reserving the later rounds' shares.
    running: dict[str, Run] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            while batches:
                parts = batches.pop(0)
                later_s = sum(part.share_s for later in batches for part in later) * unit_s
                limit = max(deadline - later_s, time.monotonic() + 1.0)
                for part in parts:
                    running[part.name] = start(
                        part, flags.preset, Path(folder) / f"{part.name}.json"
                    )
                while running:
                    for name, run in list(running.items()):
                        code = run.process.poll()
                        if code is not None or time.monotonic() > limit:
                            save_result(name, running.pop(name).end(code))
                    time.sleep(0.05)
        finally:
            for run in running.values():
                run.kill()
    return results


if __name__ == "__main__":
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(143)
    )  # raises SystemExit, so that the parts are killed too
    results = main()
    sys.exit(any(part_result["ending"] != "done" for part_result in results.values()))
