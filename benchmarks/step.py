r"""A whole training step, and what of it is spent where.

    python -m benchmarks.step --preset=cpu|h200 [--model=qwen3-4b] [--num_questions=...]

The parts are those of `jaxrl.train`, in its order, on one device: episodes with searches of a real
index (`searching.RandomSearches`), advantages and packing, log-probabilities before the update
(`num_minibatches` above 1 asks for them), the update, and the weights for the sampler. Between two
parts the device is waited for, which the trainer does not do. `tools` is the time in which calls of
the environment ran, most of it hidden behind `rollout`, of which it is no further part.

The first steps compile and are not counted; `first_step_s` is what it takes to the end of the first
one, with random weights, the index, and compilation ahead.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from benchmarks import common
from benchmarks.rollout import Episodes, Search, make_episodes
from benchmarks.update import make_model
from jaxrl.config import default_config
from jaxrl.training.controllers import Controllers
from jaxrl.training.estimators import Estimator
from jaxrl.training.minibatches import make_minibatches, put_minibatches
from jaxrl.training.optimizer import make_optimizer
from jaxrl.training.packing import train_shape
from jaxrl.training.policy_loss import make_policy_loss
from jaxrl.training.update import ScoreStep, UpdateStep, init_state
from jaxrl.types import members


@dataclass(frozen=True, kw_only=True)
class Work(Search):
    """Episodes with searches, and the updates that follow; every field is a flag."""

    num_minibatches: int  # updates of a step
    micro_rows: int  # rows of a micro-batch
    logits_chunk_tokens: int
    remat: str  # what of a layer the backward pass computes again
    scan_layers: bool  # compile one layer for all


WORK = {
    "cpu": Work(
        num_questions=16, group_size=4, prompt_tokens=64, turn_tokens=32, max_searches=3,
        observation_tokens=64, latency_ms=20.0, lag_chunks=2, num_rows=32, chunk_tokens=16,
        num_minibatches=2, micro_rows=2, logits_chunk_tokens=2048, remat="none",
        scan_layers=False,
    ),
    "h200": Work(
        num_questions=64, group_size=8, prompt_tokens=512, turn_tokens=64, max_searches=3,
        observation_tokens=256, latency_ms=20.0, lag_chunks=2, num_rows=256, chunk_tokens=32,
        num_minibatches=2, micro_rows=2, logits_chunk_tokens=2048, remat="names",
        scan_layers=True,
    ),
}  # fmt: skip


def make_config(work: Work, max_total_tokens: int) -> ConfigDict:
    """The default configuration with the sizes of a step and no reference."""
    config = default_config()
    config.rollout.tasks_per_step, config.rollout.group_size = work.num_questions, work.group_size
    config.rollout.max_total_tokens = max_total_tokens
    config.optimizer.num_minibatches = work.num_minibatches
    config.optimizer.micro_rows = work.micro_rows
    config.kl.coef = 0.0
    return config


class Steps:
    """One training step after another; each adds its seconds by part to `seconds`."""

    def __init__(self, model: common.ModelSizes, work: Work, folder: Path, num_steps: int):
        """Compiles nothing yet."""
        mesh = self._mesh = common.one_device()
        self.episodes: Episodes = make_episodes(model, work, mesh, folder)
        self.episodes.env.latency_s = work.latency_ms / 1e3
        config = self._config = make_config(work, self.episodes.max_total_tokens)
        policy = make_model(model, work, mesh)
        optimizer = make_optimizer(config.optimizer, num_steps * work.num_minibatches)
        self._update = UpdateStep(policy, make_policy_loss(config), optimizer)
        self._score = ScoreStep(policy, temperature=1.0)
        self._estimate = Estimator(config)
        params = common.random_params(model)
        self._state = init_state(params, mesh, model.config, optimizer)
        self.episodes.engine.set_weights(self._state.params)
        self.num_tokens: list[int] = []  # of each step, prompts and observations too
        self.seconds: list[dict[str, float]] = []

    @contextmanager
    def _part(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[-1][name] = time.perf_counter() - started

    def __call__(self, number: int) -> None:
        """A step, from questions to new weights."""
        engine, env, config = self.episodes.engine, self.episodes.env, self._config
        self.seconds.append({})
        busy_s, started = env.busy_s, time.perf_counter()
        with self._part("rollout"):
            groups = self.episodes.play(number)
        self.seconds[-1]["tools"] = env.busy_s - busy_s
        engine.release()
        with self._part("packing"):
            groups = self._estimate(groups, number, number)
            minibatches = make_minibatches(
                groups, train_shape(config), config, controllers=Controllers.init(config)
            )
        with self._part("scoring"):
            params = self._state.params
            batches = put_minibatches(minibatches, self._mesh, self._score, params, None, config)
            jax.block_until_ready(batches)
        with self._part("update"):
            for packed, batch in zip(minibatches, batches, strict=True):
                self._state, _ = self._update(self._state, batch, packed)
            jax.block_until_ready(self._state)
        with self._part("weights"):
            engine.set_weights(self._state.params)
            jax.block_until_ready(engine._weights)
        self.seconds[-1]["step"] = time.perf_counter() - started
        self.num_tokens.append(sum(len(t.token_ids) for t in members(groups)))


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Runs the benchmark; the record that it writes."""
    flags, model, work, hardware = common.read_flags(__doc__ or "", WORK, argv)
    num_steps = 1 + flags.warm_up + flags.repetitions
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        steps = Steps(model, work, Path(folder), num_steps)
        steps.episodes.engine.compile()
        steps(0)
        first_step_s = time.perf_counter() - started
        timing = common.repeat(steps, warm_up=flags.warm_up, repetitions=flags.repetitions)
    measured = steps.seconds[-flags.repetitions :]
    medians = {part: statistics.median(one[part] for one in measured) for part in measured[0]}
    figures = timing.figures(round(statistics.mean(steps.num_tokens[-flags.repetitions :])))
    figures["first_step_s"] = first_step_s
    figures |= {f"{part}_s": seconds for part, seconds in medians.items()}
    return common.finish("step", flags, model, work, hardware, figures)


if __name__ == "__main__":
    main()
