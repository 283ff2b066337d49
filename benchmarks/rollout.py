r"""Sampling speed: prompts to finished samples through the engine, nothing left out.

    python -m benchmarks.rollout --preset=cpu|qwen3-0.6b|qwen3-4b [--num_layers=... --width=...]

Every sample has exactly `new_tokens` tokens: no stop string can occur and there is no end-of-turn
id. The first repetitions compile and are not counted. For figures that can be compared between
machines, one thread on a core that has nothing else to do:

    JAX_PLATFORMS=cpu XLA_FLAGS=--xla_cpu_multi_thread_eigen=false taskset -c 0 \
      python -m benchmarks.rollout --repetitions=15

The `floor` figures say what the device's memory bandwidth and arithmetic allow (see
`common.decode_floor_s`): weights and cache are read once a step. They leave the prompts out.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import common
from jaxrl.sampling.engine import Engine, Request, sample_keys
from jaxrl.sampling.stop_strings import StopAutomaton


@dataclass(frozen=True, kw_only=True)
class Work:
    """What is sampled; every field is a flag."""

    num_prompts: int
    group_size: int  # samples of each prompt
    prompt_tokens: int
    new_tokens: int  # of each sample
    num_rows: int  # samples decoded side by side
    chunk_tokens: int  # decoding steps between two looks of the host


WORK = {
    "cpu": Work(
        num_prompts=8, group_size=4, prompt_tokens=64, new_tokens=128, num_rows=32,
        chunk_tokens=16,
    ),
    "qwen3-0.6b": Work(
        num_prompts=32, group_size=8, prompt_tokens=512, new_tokens=1024, num_rows=256,
        chunk_tokens=32,
    ),
    "qwen3-4b": Work(
        num_prompts=16, group_size=8, prompt_tokens=512, new_tokens=1024, num_rows=128,
        chunk_tokens=32,
    ),
}  # fmt: skip


def make_engine(model: common.ModelSizes, work: Work) -> Engine:
    """An engine with room for the work, whose stop string no token can spell."""
    automaton = StopAutomaton([b"a"] * model.vocab_size, ["</search>", "</answer>"])
    return Engine(
        model.config,
        common.one_device(),
        automaton,
        num_tokens=model.vocab_size,
        eos_ids=(),
        num_rows=work.num_rows,
        max_prompt_tokens=work.prompt_tokens,
        max_total_tokens=work.prompt_tokens + work.new_tokens,
        chunk_tokens=work.chunk_tokens,
        dtype=jnp.dtype(model.dtype),
    )


def make_requests(model: common.ModelSizes, work: Work, number: int) -> list[Request]:
    """The samples of repetition `number`: random prompts, the samples of each one together."""
    rng = np.random.default_rng(number)
    prompts = rng.integers(model.vocab_size, size=(work.num_prompts, work.prompt_tokens))
    positions = np.repeat(np.arange(work.num_prompts, dtype=np.int32), work.group_size)
    samples = np.tile(np.arange(work.group_size, dtype=np.int32), work.num_prompts)
    keys = sample_keys(0, 0, number, positions, samples, np.zeros_like(positions))
    return [
        Request(prompt_ids=tuple(prompts[position]), sample_key=key, budget=work.new_tokens)
        for position, key in zip(positions, keys, strict=True)
    ]


def sample_all(engine: Engine, requests: Sequence[Request]) -> list[float]:
    """Draws all samples; the seconds of each chunk before which no prompt was read."""
    engine.submit(requests)
    chunk_times = []
    while not engine.is_idle:
        read, started = engine.counts.prefilled_prompt, time.perf_counter()
        events = engine.step(ahead=1)
        if engine.counts.prefilled_prompt == read:
            chunk_times.append(time.perf_counter() - started)
        for event in events:
            if event.status:
                engine.finish(event.request)
    return chunk_times


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Runs the benchmark; the record that it writes."""
    flags, model, work, hardware = common.read_flags(__doc__ or "", WORK, argv)
    engine = make_engine(model, work)
    engine.set_weights(jax.block_until_ready(common.random_params(model)))
    chunk_times: list[float] = []

    def run(number: int) -> None:
        chunk_times.extend(sample_all(engine, make_requests(model, work, number)))
        if number < flags.warm_up:
            chunk_times.clear()

    timing = common.repeat(run, warm_up=flags.warm_up, repetitions=flags.repetitions)
    num_sampled = work.num_prompts * work.group_size * work.new_tokens
    total = engine.counts.sampled
    assert total == num_sampled * (flags.warm_up + flags.repetitions), "a sample ended early"
    num_rows = min(work.num_rows, work.num_prompts * work.group_size)
    floor_s = common.decode_floor_s(
        model, hardware, num_rows=num_rows, context=work.prompt_tokens + work.new_tokens / 2
    )
    figures = {
        **timing.figures(num_sampled),
        "floor_tokens_per_s": num_rows / floor_s if floor_s else None,
        "ms_per_decode_step": common.spread([1e3 * t / work.chunk_tokens for t in chunk_times]),
        "floor_ms_per_decode_step": 1e3 * floor_s if floor_s else None,
    }
    return common.finish("rollout", flags, model, work, hardware, figures)


if __name__ == "__main__":
    main()
