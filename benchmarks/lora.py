"""The sampler's weights with an adapter, apart and merged: their rates, and handing them over.

    python -m benchmarks.lora --rank=16 --json=runs/bench/lora.json

The same samples are drawn with the weights of the base alone, with base and adapter apart, and with
their sum, in turn, so that what else the machine does falls on all. Of each the best repetition
counts, and the time of handing the weights over, which a run needs once a step.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import common
from benchmarks.rollout import Even, even_requests, sample_all
from jaxrl.extras.lora.adapter import Adapter, find_targets
from jaxrl.models.parts import join
from jaxrl.sampling import next_token
from jaxrl.sampling.decode import scans
from jaxrl.sampling.engine import Engine
from jaxrl.sampling.stop_strings import StopAutomaton
from jaxrl.types import Params

WORK = Even(
    num_prompts=4, group_size=8, prompt_tokens=64, new_tokens=64, num_rows=32, chunk_tokens=16,
    tail_rows=0,
)  # fmt: skip


def make_engine(model: common.ModelSizes, policy: Any, work: Even) -> Engine:
    """An engine whose programs are compiled."""
    mesh = common.one_device()
    engine = Engine(
        policy,
        mesh,
        StopAutomaton([b"a"] * model.vocab_size, ["</search>"]),
        num_tokens=model.vocab_size,
        eos_ids=(),
        num_rows=work.num_rows,
        max_prompt_tokens=work.prompt_tokens,
        max_total_tokens=work.prompt_tokens + work.new_tokens,
        chunk_tokens=work.chunk_tokens,
        dtype=jnp.dtype(model.dtype),
        kernels=common.kernels(model, mesh),
        scan_layers=scans(True, mesh.devices.flat[0].platform, has_adapter=True),
        kinds=(next_token.PLAIN,),
    )
    engine.row_sizes = engine.row_sizes[-1:]
    engine.compile()
    return engine


def hand_over(engine: Engine, params: Params) -> float:
    """Seconds until the sampler has the weights."""
    started = time.perf_counter()
    engine.set_weights(params)
    jax.block_until_ready(engine._weights)
    return time.perf_counter() - started


def measure(model: common.ModelSizes, work: Even, rank: int, repetitions: int) -> dict[str, Any]:
    """Tokens a second and milliseconds of handing over, of each kind of weights."""
    base = common.random_params(model)
    targets = find_targets(model.architecture, ["all-linear"])
    apart = Adapter(model=model.architecture, rank=rank, alpha=2.0 * rank, targets=targets)
    policy = join(base, apart.begin(common.one_device(), 0))
    kinds = {
        "base alone": (make_engine(model, model.architecture, work), base),
        "separate": (make_engine(model, apart, work), policy),
        "merged": (make_engine(model, replace(apart, is_merged=True), work), policy),
    }
    times_of: dict[str, list[tuple[float, float]]] = {name: [] for name in kinds}
    for number in range(repetitions + 1):
        for name, (engine, params) in kinds.items():
            handing = hand_over(engine, params)
            started = time.perf_counter()
            sample_all(engine, even_requests(model, work, number))
            if number:  # the first one warms up
                times_of[name].append((time.perf_counter() - started, handing))
    tokens = work.num_prompts * work.group_size * work.new_tokens
    return {
        name: {
            "tokens_per_s": tokens / min(seconds for seconds, _ in times),
            "hand_over_ms": 1e3 * min(handing for _, handing in times),
        }
        for name, times in times_of.items()
    }


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """The command; see the module."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lora")
    parser.add_argument("--model", default="small", choices=common.MODELS)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--num_rows", type=int, default=WORK.num_rows)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--json", default="", help="file for the figures")
    flags = parser.parse_args(arguments)
    work = replace(WORK, num_rows=flags.num_rows, num_prompts=flags.num_rows // WORK.group_size)
    by_kind = measure(common.MODELS[flags.model], work, flags.rank, flags.repetitions)
    for name, figures in by_kind.items():
        rate, handing = figures["tokens_per_s"], figures["hand_over_ms"]
        print(f"{name:12} {rate:10,.0f} tokens/s, {handing:8.1f} ms to hand over")
    if flags.json:
        common.write_json(Path(flags.json), {**vars(flags), "figures": by_kind})
    return by_kind


if __name__ == "__main__":
    main()
