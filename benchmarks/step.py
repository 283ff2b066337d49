r"""Measure the time of a complete training step and of its parts.

    python -m benchmarks.step --preset=cpu|h200 [--model=qwen3-4b] [--num_questions=...]

The parts are those of `jaxrl.train`, in order, on one device: episodes that search a real index
(`searching.RandomSearches`), advantages and packing, log-probabilities before the update (needed if
`num_minibatches` is above 1), the update, and the transfer of the weights to the sampler. The
benchmark waits for the device between parts; the trainer does not. `tools` is the time spent in
calls to the environment. It is part of `rollout` and mostly overlaps with sampling.

With `--ahead=1`, each step runs twice: first with its parts in sequence, then as with
`rollout.async_level=1`, with the rollout concurrent with an update on the same number of tokens.
`step` is the second variant; `step over longer half` divides it by the longer of two times, that of
the rollout alone and that of scoring and update alone. `--rollout_devices=1` runs the rollout on a
separate device, the second:

    JAX_PLATFORMS=cpu \
      XLA_FLAGS="--xla_force_host_platform_device_count=2 --xla_cpu_multi_thread_eigen=false" \
      python -m benchmarks.step --ahead=1 --rollout_devices=1

The first steps compile and are not counted; `first_step_s` is the time until the first step ends,
including random weights, the index, and ahead-of-time compilation.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from benchmarks import common
from benchmarks.rollout import Episodes, Search, make_episodes
from benchmarks.update import make_model
from jaxrl.builders.method import build_method, compute_batch_shape
from jaxrl.builders.resolved import ResolvedConfig, resolve_names
from jaxrl.config import default_config
from jaxrl.training.controllers import Controllers
from jaxrl.training.estimators import AdvantageEstimator
from jaxrl.training.minibatches import (
    divide_into_minibatches,
    make_minibatch,
    shard_minibatch,
)
from jaxrl.training.optimizer import make_optimizer
from jaxrl.training.packing import PackedBatch
from jaxrl.training.policy_loss import make_policy_loss
from jaxrl.training.update import ScoreStep, UpdateStep, init_state
from jaxrl.types import Batch, Group, flatten_groups


@dataclass(frozen=True, kw_only=True)
class Work(Search):
    """Episodes with searches, and the updates that follow; every field is a flag."""

    num_minibatches: int  # updates per step
    micro_rows: int  # rows per micro-batch
    logits_chunk_tokens: int
    remat: str  # what the backward pass recomputes in a layer
    scan_layers: bool  # compile one layer and scan over layers
    ahead: int  # 1: the rollout of the next step runs during the update
    rollout_devices: int  # 1: the rollout runs on a separate device


WORK = {
    "cpu": Work(
        num_questions=16, group_size=4, prompt_tokens=64, turn_tokens=32, max_searches=3,
        observation_tokens=64, latency_ms=20.0, lag_chunks=2, num_rows=32, chunk_tokens=16,
        num_minibatches=2, micro_rows=2, logits_chunk_tokens=2048, remat="none",
        scan_layers=False, ahead=0, rollout_devices=0,
    ),
    "h200": Work(
        num_questions=64, group_size=8, prompt_tokens=512, turn_tokens=64, max_searches=3,
        observation_tokens=256, latency_ms=20.0, lag_chunks=2, num_rows=256, chunk_tokens=32,
        num_minibatches=2, micro_rows=2, logits_chunk_tokens=2048, remat="names",
        scan_layers=True, ahead=0, rollout_devices=0,
    ),
}  # fmt: skip


def make_config(work: Work, max_total_tokens: int, num_steps: int) -> ResolvedConfig:
    """Return the default configuration with the sizes of a step, without a KL term."""
    config = default_config()
    config.rollout.tasks_per_step, config.rollout.group_size = work.num_questions, work.group_size
    config.rollout.max_total_tokens = max_total_tokens
    config.optimizer.num_minibatches = work.num_minibatches
    config.optimizer.micro_rows = work.micro_rows
    config.kl.coef = 0.0
    config.num_steps = num_steps
    return resolve_names(config, needs_data=False)


ThreadTimes = dict[str, tuple[float, float]]
"""Seconds by thread, from `common.measure_thread_times`."""


class Steps:
    """Runner of training steps. Each step appends its seconds by part to `seconds`."""

    def __init__(self, model: common.ModelSizes, work: Work, folder: Path, num_steps: int):
        """Build the engine and the update without compiling them."""
        mesh = self._mesh = common.make_single_device_mesh()
        sampling = common.make_single_device_mesh(work.rollout_devices)
        self.episodes: Episodes = make_episodes(model, work, sampling, folder, train_mesh=mesh)
        self.episodes.env.latency_s = work.latency_ms / 1e3
        config = make_config(work, self.episodes.max_total_tokens, num_steps)
        method = self._method = build_method(config)
        policy = make_model(model, work, mesh)
        self._shape = compute_batch_shape(
            config, "train", policy.num_prompt_shards, policy.num_pieces
        )
        optimizer = make_optimizer(method.optimizer)
        self._update = UpdateStep(policy, make_policy_loss(method), optimizer)
        self._score = ScoreStep(policy, temperature=1.0)
        self._estimate = AdvantageEstimator(method.advantage, method.seed)
        params = common.init_random_params(model)
        self._state = init_state(params, mesh, model.architecture, optimizer)
        self.episodes.engine.set_weights(self._state.params)
        self._overlaps = work.ahead == 1
        is_pinned = work.rollout_devices and sys.platform == "linux"
        is_pinned = is_pinned and jax.default_backend() == "cpu"
        self._cores = sorted(os.sched_getaffinity(0)) if is_pinned else []
        self.num_tokens: list[int] = []  # per step, with prompts and observations
        self.seconds: list[dict[str, float]] = []
        self.cpu_seconds: list[dict[str, float]] = []  # CPU time by part
        self.waited_s: list[float] = []  # time waiting for a core, per step with `ahead`

    @contextmanager
    def _time_part(self, name: str) -> Iterator[None]:
        started, cpu_started = time.perf_counter(), time.process_time()
        yield
        self.seconds[-1][name] = time.perf_counter() - started
        self.cpu_seconds[-1][name] = time.process_time() - cpu_started

    def __call__(self, number: int) -> None:
        """Run a step, from questions to new weights; with `ahead`, run both variants."""
        self.seconds.append({})
        self.cpu_seconds.append({})
        if self._overlaps:
            with self._pin_to_one_core(number), self._time_part("one_after_another"):
                groups = self._run_in_sequence(number)
            before = common.measure_thread_times()
            with self._time_part("step"):
                self._run_overlapped(number, groups)
            self.waited_s.append(compute_waited_s(before, common.measure_thread_times()))
        else:
            with self._time_part("step"):
                groups = self._run_in_sequence(number)
        self.num_tokens.append(sum(len(t.token_ids) for t in flatten_groups(groups)))

    @contextmanager
    def _pin_to_one_core(self, number: int) -> Iterator[None]:
        """Pin the process to one core, alternating between cores, if it has two CPU devices."""
        if self._cores:
            common.use_cores([self._cores[number % len(self._cores)]])
        yield
        if self._cores:
            common.use_cores(self._cores)

    def _run_in_sequence(self, number: int) -> list[Group]:
        """Run the parts of a step in sequence; return the groups."""
        engine, env = self.episodes.engine, self.episodes.env
        busy_s = env.busy_s
        with self._time_part("rollout"):
            groups = self.episodes.run_episodes(number)
        self.seconds[-1]["tools"] = env.busy_s - busy_s
        if not self._overlaps:
            engine.release()
        with self._time_part("packing"):
            minibatches = self._pack(groups, number)
        with self._time_part("scoring"):
            batches = jax.block_until_ready(self._shard(minibatches))
        with self._time_part("update"):
            self._start_update(minibatches, batches)
            jax.block_until_ready(self._state)
        with self._time_part("weights"):
            self._update_sampler()
        return groups

    def _run_overlapped(self, number: int, groups: Sequence[Group]) -> None:
        """Update on the groups and concurrently sample groups with the same seeds again."""
        minibatches = self._pack(groups, number)
        self._start_update(minibatches, self._shard(minibatches))
        self.episodes.run_episodes(number)
        self.episodes.engine.clear()
        jax.block_until_ready(self._state)
        self._update_sampler()

    def _pack(self, groups: Sequence[Group], number: int) -> list[PackedBatch]:
        method = self._method
        groups = self._estimate(groups, number, number)
        return [
            make_minibatch(part, self._shape, method, controllers=Controllers.init(method))
            for part in divide_into_minibatches(groups, method.optimizer.num_minibatches)
        ]

    def _shard(self, minibatches: Sequence[PackedBatch]) -> list[Batch]:
        params = self._state.params
        return [
            shard_minibatch(packed, self._mesh, self._score, params, None, self._method)
            for packed in minibatches
        ]

    def _start_update(self, minibatches: Sequence[PackedBatch], batches: Sequence[Batch]) -> None:
        for packed, batch in zip(minibatches, batches, strict=True):
            self._state, _ = self._update(self._state, batch, packed)

    def _update_sampler(self) -> None:
        engine = self.episodes.engine
        engine.set_weights(self._state.params)
        jax.block_until_ready(engine._weights)


def compute_waited_s(before: ThreadTimes, after: ThreadTimes) -> float:
    """Return the seconds that the busiest thread waited for a core between two measurements."""
    spent = {
        name: (on_core - before.get(name, (0, 0))[0], waited - before.get(name, (0, 0))[1])
        for name, (on_core, waited) in after.items()
    }
    return max(spent.values(), default=(0.0, 0.0))[1]


def compute_overlap_figures(steps: Steps, count: int) -> dict[str, Any]:
    """Compare the last `count` steps with the longer half: the rollout, or scoring and update.

    If other programs use the cores, wall time is misleading, so CPU time is reported too: `on idle
    cores` subtracts the time that the busiest thread waited for a core and divides by the CPU time
    of the longer half. `work side by side` is the ratio of the CPU times of both variants.
    """
    seconds, cpu = steps.seconds[-count:], steps.cpu_seconds[-count:]

    def get_longer_half(times: dict[str, float]) -> float:
        return max(times["rollout"], times["scoring"] + times["update"])

    figures = {
        "step over longer half": [times["step"] / get_longer_half(times) for times in seconds]
    }
    if jax.default_backend() == "cpu":
        figures["on idle cores"] = [
            (times["step"] - waited) / get_longer_half(used)
            for times, used, waited in zip(seconds, cpu, steps.waited_s[-count:], strict=True)
        ]
        figures["work side by side"] = [times["step"] / times["one_after_another"] for times in cpu]
    return {name: common.summarize(values) for name, values in figures.items()}


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the benchmark; return its record."""
    flags, model, work, hardware = common.parse_flags(__doc__ or "", WORK, argv)
    num_steps = 1 + flags.warm_up + flags.repetitions
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        steps = Steps(model, work, Path(folder), num_steps)
        steps.episodes.engine.compile()
        steps(0)
        first_step_s = time.perf_counter() - started
        timing = common.repeat(steps, warm_up=flags.warm_up, repetitions=flags.repetitions)
    measured = steps.seconds[-flags.repetitions :]
    timing = dataclasses.replace(
        timing,
        seconds=[times["step"] for times in measured],
        cpu_seconds=[times["step"] for times in steps.cpu_seconds[-flags.repetitions :]],
    )
    medians = {part: statistics.median(times[part] for times in measured) for part in measured[0]}
    figures = timing.figures(round(statistics.mean(steps.num_tokens[-flags.repetitions :])))
    figures["first_step_s"] = first_step_s
    figures |= {f"{part}_s": seconds for part, seconds in medians.items()}
    figures |= compute_overlap_figures(steps, flags.repetitions) if work.ahead else {}
    return common.report_figures("step", flags, model, work, hardware, figures)


if __name__ == "__main__":
    main()
