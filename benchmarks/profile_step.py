r"""Time of a training step by program, layer, pass and operator, of any run.

    python -m benchmarks.profile_step --config=configs/real.py [--stage=sft] [--steps=2] [...]

Runs the first steps of a stage, by the configuration and flags of `jaxrl.launch`, and records the
last of them with JAX's profiler. The first step compiles, so at least two are needed. Each event
is an operation of a compiled program; the program's text says which layer it belongs to, by the
named scopes of the model, and how many operations its matrix products take. On a CPU, where other
programs may want the core too, seconds are scaled down so that they add up to the processor time of
the step. One thread:

    JAX_PLATFORMS=cpu XLA_FLAGS=--xla_cpu_multi_thread_eigen=false taskset -c 0 \
      python -m benchmarks.profile_step --config=configs/real.py

`recomputed` is what the backward pass computes again of the forward pass (`config.model.remat`).
"""

from __future__ import annotations

import argparse
import math
import os
import re
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import jax
from jax.profiler import ProfileData
from ml_collections import ConfigDict

from benchmarks import common
from benchmarks.claims_report import table
from jaxrl import api, launch
from jaxrl.logs.display import Display

LAYERS = {
    "embed": "embedding", "norm": "norms", "rope": "rotation", "linear": "attention's products",
    "attention": "attention", "mlp": "MLP", "head": "output layer", "draw": "drawing",
    "cache": "cache", "sum": "sum of gradients",
}  # fmt: skip
"""Named scopes of the model and of sampling, and what the table calls them."""

OUTER = ("mlp", "head", "draw", "cache", "attention")
"""Scopes that name a layer also where another one is inside."""

PASSES = ("forward", "recomputed", "backward")

MOVES = {
    "bitcast", "broadcast", "concatenate", "constant", "copy", "dynamic-slice",
    "dynamic-update-slice", "get-tuple-element", "iota", "pad", "parameter", "reshape", "reverse",
    "slice", "transpose", "tuple",
}  # fmt: skip
"""Operations that compute nothing."""

CONTROL = {"call", "conditional", "while"}


@dataclass(frozen=True, kw_only=True)
class Operation:
    """Operation as the text of a program describes it."""

    operator: str
    path: str  # of scopes and transformations, as JAX names operations
    flops: float = 0.0  # of its matrix products

    @property
    def layer(self) -> str:
        """The layer that it belongs to."""
        scopes = re.findall(r"\w+", self.path)
        outer = [name for name in OUTER if name in scopes]
        inner = [name for name in scopes if name in LAYERS]
        return LAYERS[(outer or inner[-1:])[0]] if inner else "other"

    @property
    def pass_(self) -> str:
        """One of `PASSES`."""
        if "rematted_computation" in self.path:
            return "recomputed"
        return "backward" if "transpose(" in self.path else "forward"


_COMPUTATION = re.compile(r"^(?:ENTRY )?%([\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%([\w.\-]+) = (.+?) ([a-z][\w\-]*)\((.*)$")


def read_program(text: str) -> dict[str, Operation]:
    """The operations of a compiled program by name, from its HLO text."""
    shapes: dict[str, list[int]] = {}
    parts: dict[str, list[Operation]] = defaultdict(list)  # of each computation
    operations: dict[str, tuple[str, Operation]] = {}
    computation = ""
    for line in text.splitlines():
        if match := _COMPUTATION.match(line):
            computation = match[1]
        if not (match := _INSTRUCTION.match(line)):
            continue
        name, kind, opcode, rest = match.groups()
        sizes = re.search(r"\w+\[([\d,]*)\]", kind)
        shapes[name] = [int(n) for n in sizes[1].split(",") if n] if sizes else []
        path = re.search(r'op_name="([^"]*)"', rest)
        one = Operation(operator=opcode, path=path[1] if path else "", flops=0.0)
        if opcode == "dot":
            one = Operation(operator="product", path=one.path, flops=_flops(shapes, name, rest))
        elif opcode in ("fusion", "call") and (
            called := re.search(r"(?:calls|to_apply)=%([\w.\-]+)", rest)
        ):
            one = _joined(one, parts[called[1]])
        elif opcode in MOVES:
            one = Operation(operator="moves", path=one.path)
        parts[computation].append(one)
        operations[name] = computation, one
    # XLA names none of the operations that it makes of others: then the scopes that all others of
    # a loop's body have in common.
    common_paths = {name: _common(one.path for one in ones) for name, ones in parts.items()}
    return {
        name: one if one.path else replace(one, path=common_paths[computation])
        for name, (computation, one) in operations.items()
    }


def _common(paths: Iterable[str]) -> str:
    """The scopes with which all paths begin that there are."""
    named = [path for path in paths if path]
    return os.path.commonpath(named) if named else ""


def _flops(shapes: Mapping[str, list[int]], name: str, rest: str) -> float:
    """Operations of a product, from the shape of its result and the axes that it sums over."""
    first = re.search(r"%([\w.\-]+)", rest)
    axes = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", rest)
    assert first is not None
    assert axes is not None
    summed = [shapes[first[1]][int(axis)] for axis in axes[1].split(",") if axis]
    return 2.0 * math.prod(shapes[name]) * math.prod(summed)


def _joined(outer: Operation, inner: Sequence[Operation]) -> Operation:
    """A fusion: named as its products are, or else as it is itself, or as what it ends with."""
    products = [one for one in inner if one.operator == "product"]
    named = [one.path for one in (*products, outer, *reversed(inner)) if one.path]
    kinds = [one.operator for one in inner]
    order = ("product", "sort", "scatter", "gather", "reduce")
    operator = next((kind for kind in order if kind in kinds), "elementwise")
    if set(kinds) == {"moves"}:
        operator = "moves"
    flops = sum(one.flops for one in products)
    return Operation(operator=operator, path=named[0] if named else "", flops=flops)


@dataclass(frozen=True, kw_only=True)
class Event:
    """An operation that ran, and for how long without those inside."""

    program: str
    number: int  # of the program, among those of one name
    name: str
    seconds: float


def read_events(profile: ProfileData) -> Iterator[Event]:
    """The operations of all programs."""
    for plane in profile.planes:
        for line in plane.lines:
            events = []
            for event in line.events:
                stats = dict(event.stats)
                if "hlo_op" in stats:
                    events.append((event.start_ns, -event.duration_ns, stats))
            yield from _without_inner(sorted(events, key=lambda one: one[:2]))


def _without_inner(events: Iterable[tuple[float, float, dict[str, Any]]]) -> Iterator[Event]:
    """The events of a thread, sorted by their start, the outer of two first."""
    under_way: list[list[Any]] = []  # end, what is left of it, stats

    def ended(before: float) -> Iterator[Event]:
        while under_way and under_way[-1][0] <= before:
            _, left, stats = under_way.pop()
            yield Event(
                program=stats["hlo_module"].removeprefix("jit_"),
                number=int(stats.get("program_id", 0)),
                name=stats["hlo_op"],
                seconds=left / 1e9,
            )

    for start, negative, stats in events:
        yield from ended(start)
        if under_way:
            under_way[-1][1] += negative
        under_way.append([start - negative, -negative, stats])
    yield from ended(math.inf)


def live_programs() -> dict[str, list[dict[str, Operation]]]:
    """The operations of every compiled program of this process, by the program's name."""
    programs: dict[str, list[dict[str, Operation]]] = defaultdict(list)
    for executable in jax.devices()[0].client.live_executables():
        for module in executable.hlo_modules():
            programs[module.name.removeprefix("jit_")].append(read_program(module.to_string()))
    return programs


Times = dict[tuple[str, str, str, str], list[float]]
"""Seconds and operations of matrix products, by program, layer, operator and pass."""


def add_up(
    events: Iterable[Event], programs: Mapping[str, Sequence[Mapping[str, Operation]]]
) -> Times:
    """Add up seconds; programs of one name are told apart by their operations."""
    by_program: dict[tuple[str, int], list[Event]] = defaultdict(list)
    for event in events:
        by_program[event.program, event.number].append(event)
    times: Times = defaultdict(lambda: [0.0, 0.0])
    unknown = Operation(operator="unknown", path="")
    for (program, _), ran in by_program.items():
        names = {event.name for event in ran}
        texts = programs.get(program, [{}])
        operations = max(texts, key=lambda text: len(names & text.keys()))
        for event in ran:
            one = operations.get(event.name, unknown)
            total = times[program, one.layer, one.operator, one.pass_]
            total[0] += event.seconds
            total[1] += one.flops
    return times


def show(times: Times, *, by: str, least: float = 0.002) -> str:
    """A table of seconds by program and `layer` or `operator`; rows below a share are one."""
    column = ("program", "layer", "operator").index(by)
    whole = sum(seconds for seconds, _ in times.values())
    rows: dict[tuple[str, str], dict[str, list[float]]] = {}
    for key, (seconds, flops) in times.items():
        row = rows.setdefault((key[0], key[column]), {})
        for name in (key[3], "all"):
            total = row.setdefault(name, [0.0, 0.0, 0.0])
            total[0] += seconds
            if key[2] == "product":
                total[1] += flops
                total[2] += seconds
    cells, rest = [], 0.0
    for (program, what), row in sorted(rows.items(), key=lambda one: -one[1]["all"][0]):
        seconds, flops, of_products = row["all"]
        if seconds < least * whole:
            rest += seconds
            continue
        passes = [f"{row[name][0]:.2f}" if name in row else "" for name in PASSES]
        rate = f"{flops / of_products / 1e9:.0f}" if flops else ""
        cells.append([program, what, *passes, f"{seconds:.2f}", f"{seconds / whole:.1%}", rate])
    cells.append(["", "all others", "", "", "", f"{rest:.2f}", f"{rest / whole:.1%}", ""])
    heads = ["program", by, *PASSES, "seconds", "share", "GFLOP/s of products"]
    return table(heads, cells)


class Recorder(Display):
    """The display of a run, which records the last step of a stage."""

    folder: Path
    last: int
    started: tuple[float, float]

    def step(self, step: int, numbers: Mapping[str, float]) -> None:
        """Steps are told at their end."""
        super().step(step, numbers)
        if step == self.last - 1:
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0
            jax.profiler.start_trace(self.folder, profiler_options=options)
            Recorder.started = time.perf_counter(), time.process_time()
        if step == self.last:
            took = time.perf_counter() - self.started[0], time.process_time() - self.started[1]
            jax.profiler.stop_trace()
            [file] = self.folder.rglob("*.xplane.pb")
            times = add_up(read_events(ProfileData.from_file(str(file))), live_programs())
            print(report(times, *took), flush=True)


def report(times: Times, step_s: float, cpu_s: float) -> str:
    """Describe a step: tables, with its seconds on the clock and of processor time."""
    device = jax.devices()[0]
    busy = sum(seconds for seconds, _ in times.values())
    scale = min(cpu_s / busy, 1.0) if device.platform == "cpu" else 1.0
    times = {key: [seconds * scale, flops] for key, (seconds, flops) in times.items()}
    place = f"{device.platform}: {device.device_kind}, {common.processor()}"
    took = f"step {step_s:.2f} s, processor time {cpu_s:.2f} s, operations {busy:.2f} s"
    heads = f"\n{place}, jax {jax.__version__}\n{took}"
    return "\n\n".join([heads, show(times, by="layer"), show(times, by="operator")])


def settings(config: ConfigDict, stage: str, steps: int) -> ConfigDict:
    """The configuration of a run of a few steps of one stage, and nothing else."""
    config = config.copy_and_resolve_references()
    config.stages = (stage,)
    config.num_steps = config.sft.num_steps = steps
    config.eval.every_steps, config.eval.suites, config.eval.final_suites = 0, (), ()
    config.eval.patience = 0
    config.optimizer.skip_signal_free = False  # an untrained model may get no reward at all
    config.checkpoint.every_steps, config.checkpoint.keep_best = steps, 0
    return config


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stage", choices=("sft", "train"), default="train")
    parser.add_argument("--steps", type=int, default=2, help="of which the last is recorded")
    flags, others = parser.parse_known_args(argv)
    if flags.steps < 2:
        parser.error(f"--steps={flags.steps}; expected at least 2, as the first one compiles")
    # A program that was kept may have been compiled before its scopes had these names.
    jax.config.update("jax_compilation_cache_include_metadata_in_key", True)
    launch.parse_flags(["profile_step", *others])
    with tempfile.TemporaryDirectory() as folder:
        Recorder.folder, Recorder.last = Path(folder) / "profile", flags.steps
        with mock.patch.object(api, "Display", Recorder):
            config = settings(launch._CONFIG.value, flags.stage, flags.steps)
            api.train(config, Path(folder) / "run")


if __name__ == "__main__":
    main()
