r"""Times of the attention kernels alone, beside what the device could do.

    python -m benchmarks.attention [--models qwen3-0.6b qwen2.5-7b] [--cases update decoding]
        [--kernels mosaic_gpu triton xla cudnn] [--repetitions=10] [--json=FILE]

One layer's attention of each kernel, with bfloat16 heads of published models:

- `update`: two rows of 4,096 tokens, forward, and forward with backward: one segment a row
  ("whole"; `cudnn` is JAX's, for this case alone), segments of 1,024 ("cut"), and one of 1,024
  with six of 512 that continue its first 512 ("shared"). TFLOP/s count the pairs of tokens that are
  read, two products forward and five more backward; the scores that a backward kernel computes
  again are one of these.
- `decoding`: the loads of `kernel_cost`, a query a row; the preset `cpu` has a twentieth of their
  lengths. GB/s count the live pages.
- `reading`: 2,048 tokens in blocks of 64, of 32 observations behind 2,000 tokens each, and of a
  prompt behind 6,144.

Calls follow one another without waiting, `layers` of them in one program where one is short, each
with pages of its own, so that nothing comes from a cache.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import common
from benchmarks.claims_report import table
from benchmarks.kernel_cost import LOADS, tables_of
from jaxrl.models.attention.choice import TRAIN, choose
from jaxrl.models.attention.kernels import PAGE_TOKENS, find_reads

HEADS = {
    "qwen3-0.6b": (16, 8, 128),
    "qwen3-4b": (32, 8, 128),
    "qwen2.5-7b": (28, 4, 128),
    "small": (4, 2, 64),
}
"""Query heads, key heads and head size by model."""

CASES = ("update", "decoding", "reading")

NUM_LAYERS = 4
"""Calls of a program where one takes a fraction of a millisecond."""


class Sizes(NamedTuple):
    """Sizes of the cases."""

    row_tokens: int
    rows: int  # of those of a load
    past: int
    blocks: int


SIZES = {"h200": Sizes(4096, 256, 2000, 32), "cpu": Sizes(256, 8, 100, 2)}


def segments(row_tokens: int) -> dict[str, list[tuple[int, int]]]:
    """Lengths of a row's segments, each with how much of the prompt before it continues."""
    eighth = row_tokens // 8
    return {
        "whole": [(row_tokens, 0)],
        "cut": [(2 * eighth, 0)] * 4,
        "shared": [(2 * eighth, 0), *[(eighth, eighth)] * 6],
    }


def packed(lengths: Sequence[tuple[int, int]], num_rows: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Segment ids and positions `[R, T]`, and how many pairs of tokens are read."""
    ids = np.concatenate([np.full(length, i + 1) for i, (length, _) in enumerate(lengths)])
    positions = np.concatenate([first + np.arange(length) for length, first in lengths])
    pairs = num_rows * int((positions + 1).sum())
    ids, positions = (np.tile(x.astype(np.int32), (num_rows, 1)) for x in (ids, positions))
    return ids, positions, pairs


class Case(NamedTuple):
    """A program to be timed."""

    model: str
    case: str
    load: str
    kernel: str
    work: float  # operations or bytes of a call
    run: Callable[..., Any]
    arrays: Callable[[], Sequence[Any]]  # makes what it is called with

    def compiled(self) -> Any:
        """The program for the shapes of its arrays; an exception where it does not compile."""
        try:
            return jax.jit(self.run).lower(*jax.eval_shape(self.arrays)).compile()
        except Exception as error:
            return error


def seconds_of(run: Callable[..., Any], arrays: Sequence[Any], repetitions: int) -> float:
    """Median of the seconds of a call, over rounds of several that wait only for the last."""
    jax.block_until_ready(run(*arrays))
    times = []
    for _ in range(5):
        started = time.perf_counter()
        for _ in range(repetitions):
            out = run(*arrays)
        jax.block_until_ready(out)
        times.append((time.perf_counter() - started) / repetitions)
    return statistics.median(times)


def cudnn(q: jax.Array, k: jax.Array, v: jax.Array, reads: jax.Array) -> jax.Array:
    """JAX's attention by cuDNN, of rows that are one segment."""
    del reads
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")


@partial(jax.jit, static_argnames="shape")
def normal(key: int, shape: tuple[int, ...]) -> jax.Array:
    """Standard normal numbers in bfloat16, made on the device by one program a shape."""
    return jax.random.normal(jax.random.key(key), shape, jnp.bfloat16)


reads_of = jax.jit(find_reads)


def update_cases(kernel: str, model: str, sizes: Sizes) -> Iterator[Case]:
    """Cases of the update."""
    N, K, H = HEADS[model]
    T = sizes.row_tokens
    if kernel == "cudnn":
        train = cudnn
    else:
        train = choose(kernel, common.one_device(), common.MODELS["small"].architecture).train
    for load, lengths in segments(T).items():
        if kernel == "cudnn" and load != "whole":
            continue
        ids, positions, pairs = packed(lengths, 2)

        def arrays(ids: Any = ids, positions: Any = positions) -> Sequence[Any]:
            q, k, v, gradient = (normal(i, (2, T, n, H)) for i, n in enumerate((N, K, K, N)))
            return q, k, v, reads_of(jnp.asarray(ids), jnp.asarray(positions)), gradient

        def forward(q: Any, k: Any, v: Any, reads: Any, gradient: Any) -> Any:
            del gradient
            return train(q, k, v, reads)

        def both(q: Any, k: Any, v: Any, reads: Any, gradient: Any) -> Any:
            out, back = jax.vjp(lambda q, k, v: train(q, k, v, reads), q, k, v)
            return out, back(gradient)

        product = 2 * pairs * N * H
        make = partial(Case, model, "update")
        yield make(f"{load}, forward", kernel, 2 * product, forward, arrays)
        yield make(f"{load}, both", kernel, 7 * product, both, arrays)


def page_cases(case: str, kernel: str, model: str, sizes: Sizes) -> Iterator[Case]:
    """Cases of `NUM_LAYERS` layers of decoding or reading."""
    N, K, H = HEADS[model]
    page = PAGE_TOKENS[kernel]
    kernels = choose(kernel, common.one_device(), common.MODELS["small"].architecture)
    loads: dict[str, np.ndarray] = {}  # limits [B, Q]
    if case == "decoding":
        for load, lengths_of in LOADS.items():
            lengths = np.sort(lengths_of(np.random.default_rng(0)))[::-1]
            lengths = np.maximum(lengths * sizes.past // SIZES["h200"].past, 1)
            loads[load] = lengths[: sizes.rows, None]
        loads["tail alone"] = loads["tail end"][:16]
    else:
        ends = np.arange(1, 65)
        loads["observations"] = np.tile(sizes.past + ends, (sizes.blocks, 1))
        loads["a prompt"] = 3 * sizes.past + np.arange(1, 64 * sizes.blocks + 1).reshape(-1, 64)
    for load, limits in loads.items():
        tables = tables_of(limits.max(axis=1), page, np.random.default_rng(1))
        if load == "a prompt":  # all blocks are of one row
            tables = np.tile(tables[-1:] - tables[-1].min(), (len(tables), 1))
        num_pages = int(tables.max()) + 1

        def arrays(
            tables: Any = tables, limits: Any = limits, num_pages: Any = num_pages
        ) -> Sequence[Any]:
            caches = [normal(1 + i, (2, num_pages, K, page, H)) for i in range(NUM_LAYERS)]
            q = normal(0, (*limits.shape, N, H))
            return q, caches, jnp.asarray(tables), jnp.asarray(limits, jnp.int32)

        def layers(q: Any, caches: Any, tables: Any, limits: Any) -> Any:
            for keys, values in caches:
                q = kernels.attend_pages(q, keys, values, tables, limits)[0].astype(q.dtype)
            return q

        pages = tables.shape[1] if load == "a prompt" else (-(-limits.max(axis=1) // page)).sum()
        moved = NUM_LAYERS * int(pages) * page * 2 * K * H * 2
        yield Case(model, case, load, kernel, moved, layers, arrays)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Prints the table; the record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    platform = jax.devices()[0].platform
    own = [*TRAIN.get(platform, {}), "xla", *(["cudnn"] if platform == "gpu" else [])]
    parser.add_argument("--preset", choices=sorted(SIZES), default="cpu", help="sizes")
    parser.add_argument("--models", nargs="+", choices=sorted(HEADS), default=["small"])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    names = dict.fromkeys([*own, *(name for line in TRAIN.values() for name in line), "cudnn"])
    parser.add_argument("--kernels", nargs="+", choices=names, default=own, help="those here")
    parser.add_argument("--repetitions", type=int, default=10, help="calls of a timed round")
    parser.add_argument("--json", type=Path, help="file for the figures")
    flags = parser.parse_args(argv)
    sizes, cases = SIZES[flags.preset], list[Case]()
    for model in flags.models:
        for name in flags.cases:
            for kernel in (one for one in flags.kernels if one in own):
                if name == "update":
                    cases += update_cases(kernel, model, sizes)
                elif kernel != "cudnn":
                    cases += page_cases(name, kernel, model, sizes)
    if not cases:
        parser.error(f"none of these kernels is for {platform}s; there are {', '.join(own)}")
    with ThreadPoolExecutor(8) as pool:
        programs = list(pool.map(Case.compiled, cases))
    rows: list[list[str]] = []
    figures: list[dict[str, Any]] = []
    for case, program in zip(cases, programs, strict=True):
        *names, work, _, arrays = case
        try:
            if isinstance(program, Exception):
                raise program
            seconds = seconds_of(program, arrays(), flags.repetitions)
        except Exception as error:  # the other kernels are timed nevertheless
            text = " ".join(str(error).split())[:300]
            print(f"{', '.join(names)}: {type(error).__name__}: {text}")
            continue
        is_update = case.case == "update"
        us = 1e6 * seconds / (1 if is_update else NUM_LAYERS)
        rate, unit = (
            work / seconds / (1e12 if is_update else 1e9),
            "TFLOP/s" if is_update else "GB/s",
        )
        rows.append([*names, f"{us:,.0f}", f"{rate:,.{0 if rate >= 10 else 3}f} {unit}"])
        labels = dict(zip(("model", "case", "load", "kernel"), names, strict=True))
        figures.append(labels | {"us": us, "rate": rate, "unit": unit})
        print(" | ".join(rows[-1]), flush=True)
    print(table(["model", "case", "load", "kernel", "us a layer", "rate"], rows))
    if not figures:
        raise SystemExit("nothing ran")
    record = {"benchmark": "attention", "preset": flags.preset, "figures": figures}
    if flags.json:
        common.write_json(flags.json, record)
    return record


if __name__ == "__main__":
    main()
