r"""Measure how decoding and the backward pass grow with the context, in dense and hybrid models.

    JAX_PLATFORMS=cpu XLA_FLAGS=--xla_cpu_multi_thread_eigen=false taskset -c 0 \
      python -m benchmarks.contexts [--lengths=128,512,2048,8192] [--num_layers=...]

`dense` has attention in every layer, `hybrid` gated delta nets in three of four. `deeper`, with as
many delta nets again, gives the time of one; with dense and hybrid, it gives that of attention.
Times are CPU times, which other programs affect less. Every repetition measures all models, because
speed drifts. `backward_mib` is the compiler's temporary memory of the gradient for one row.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from benchmarks import common, rollout, update
from jaxrl.sampling.blocks import count_pages
from jaxrl.sampling.engine import Engine
from jaxrl.types import Params


@dataclass(frozen=True, kw_only=True)
class Work:
    """Sizes of the benchmark; every field is a flag."""

    lengths: str = "128,512,2048,8192"  # contexts, in tokens
    num_rows: int  # samples decoded concurrently, of one prompt
    chunk_tokens: int = 16  # decoding steps per chunk
    num_chunks: int = 6  # chunks per repetition


WORK = {"cpu": Work(num_rows=4), "h200": Work(num_rows=64)}


def make_engine(model: common.ModelSizes, work: Work, length: int) -> Engine:
    """Build an engine whose rows decode after a prompt of `length` tokens."""
    sizes = rollout.Even(
        num_prompts=1, group_size=work.num_rows, prompt_tokens=length, num_rows=work.num_rows,
        new_tokens=work.num_chunks * work.chunk_tokens, chunk_tokens=work.chunk_tokens, tail_rows=0,
    )  # fmt: skip
    total = length + sizes.new_tokens
    mesh = common.make_single_device_mesh()
    return rollout.make_engine(model, sizes, mesh, max_total_tokens=total)


def measure_step_ms(engine: Engine, params: Params, work: Work, length: int) -> float:
    """Return the CPU time of a decoding step, in milliseconds."""
    prompts = np.random.default_rng(0).integers(99, size=(1, length)).repeat(work.num_rows, axis=0)
    budgets = [work.num_chunks * work.chunk_tokens] * work.num_rows
    engine.set_weights(params)
    requests = rollout.make_requests(prompts, budgets, 0)
    times = rollout.sample_all(engine, requests, time.process_time)
    engine.release()
    return 1e3 * statistics.median(times) / work.chunk_tokens


def count_cache_bytes(engine: Engine, length: int) -> dict[str, int]:
    """Return the bytes of the pages and of the states of one row of `length` tokens."""
    pages = count_pages(length, engine.page_tokens)
    cache = jax.eval_shape(lambda: engine.programs.init_cache(pages, engine.page_tokens, 1))
    return {
        name: sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(part))
        for name, part in (("pages", cache.pages), ("states", cache.states))
    }


def backward_bytes(model: common.ModelSizes, params: Params, length: int) -> int:
    """Return the temporary memory of the gradient for one row of `length` tokens."""
    work = dataclasses.replace(
        update.WORK["cpu"], num_groups=1, group_size=1, new_tokens=length, spread=0.0,
        row_tokens=length, micro_rows=1, scan_layers=True, shares_prompts=False,
    )  # fmt: skip
    policy = update.make_model(model, work, common.make_single_device_mesh())
    micro_batches = update.make_batch(update.make_sequences(model, work), work).batch
    batch = jax.tree.map(lambda x: x[0], micro_batches)
    gradient = jax.grad(lambda w, batch: policy.token_logprobs(w, batch, temperature=1.0)[0].sum())
    return jax.jit(gradient).lower(params, batch).compile().memory_analysis().temp_size_in_bytes


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the benchmark; return its record."""
    flags, dense, work, hardware = common.parse_flags(__doc__ or "", WORK, argv)
    delta = dense.num_layers * 3 // 4
    hybrid = dataclasses.replace(dense, num_delta_layers=delta)
    more = {"num_layers": dense.num_layers + delta, "num_delta_layers": 2 * delta}
    models = {"dense": dense, "hybrid": hybrid, "deeper": dataclasses.replace(dense, **more)}
    params = {name: common.init_random_params(model) for name, model in models.items()}
    figures: dict[str, Any] = {}
    for length in map(int, work.lengths.split(",")):
        engines = {name: make_engine(model, work, length) for name, model in models.items()}
        runs = [
            {name: measure_step_ms(engines[name], params[name], work, length) for name in models}
            for _ in range(flags.warm_up + flags.repetitions)
        ][flags.warm_up :]
        delta_ms = statistics.median(r["deeper"] - r["hybrid"] for r in runs) / delta
        saved_ms = statistics.median(r["dense"] - r["hybrid"] for r in runs) / delta
        cache = {name: count_cache_bytes(engines[name], length) for name in ("dense", "hybrid")}
        figures[f"length {length}"] = {
            **{f"{name}_ms": common.summarize([r[name] for r in runs]) for name in cache},
            "dense_over_hybrid": statistics.median(r["dense"] / r["hybrid"] for r in runs),
            "delta_layer_ms": delta_ms,
            "attention_layer_ms": delta_ms + saved_ms,
            "cache_bytes": cache,
            "backward_mib": {
                n: backward_bytes(models[n], params[n], length) / 2**20 for n in cache
            },
        }
    return common.report_figures("contexts", flags, dense, work, hardware, figures)


if __name__ == "__main__":
    main()
