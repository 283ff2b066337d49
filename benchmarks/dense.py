"""Dense retrieval at size: memory on a device, and time for a query alone and among others.

Vectors are made up: passages around centres, as those of encoders are, and queries near passages;
recall is that of the first three documents against float32. Weights of the encoder, of which only
the config.json is read, are random. Prints Markdown tables.

python -m benchmarks.dense --passages=1000,10000,100000 --encoder=configs/models/e5-base-v2
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import common
from jaxrl.extras.dense.encoders import EmbeddingModel, encode_rows, needed_params, read_encoder
from jaxrl.extras.dense.passages import DTYPES, Passages, device_bytes

NUM_QUERIES, QUERY_TOKENS, TOPK = 64, 32, 3
CANDIDATES, QUERY_ROWS = 100, 16
SPREAD = 0.7  # of a passage around its centre, of which one in a hundred is one


def seconds(work: Callable[[], Any], repetitions: int) -> float:
    """Times the fastest of so many calls after a first one: what else a machine does only adds."""
    work()
    taken = []
    for _ in range(repetitions):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return min(taken)


def made_up(count: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Vectors of passages and of queries, of length 1."""
    rng = np.random.default_rng(0)

    def near(places: np.ndarray) -> np.ndarray:
        noise = rng.standard_normal(places.shape, np.float32)
        vectors = places + SPREAD / width**0.5 * noise
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)

    centres = rng.standard_normal((max(count // 100, 1), width), np.float32)
    centres /= np.linalg.norm(centres, axis=1, keepdims=True)
    passages = near(centres[rng.integers(len(centres), size=count)])
    return passages, near(passages[rng.integers(count, size=NUM_QUERIES)])


def searched(count: int, width: int, dtype: str, repetitions: int) -> dict[str, Any]:
    """One line of the table of searches."""
    vectors, queries = made_up(count, width)
    devices = jax.local_devices()
    start = time.perf_counter()
    passages = Passages(vectors, devices, dtype=dtype, candidates=CANDIDATES, query_rows=QUERY_ROWS)
    load_s = time.perf_counter() - start
    planned = device_bytes(
        count,
        width,
        dtype,
        len(devices),
        platform=devices[0].platform,
        candidates=CANDIDATES,
        query_rows=QUERY_ROWS,
    )
    exact = np.argsort(-(queries @ vectors.T), axis=1)[:, :TOPK]
    best, _ = passages.search(queries, TOPK)
    hits = [len({*a} & {*b}) / TOPK for a, b in zip(best, exact, strict=True)]
    alone = seconds(lambda: passages.search(queries[:1], TOPK), repetitions)
    together = seconds(lambda: passages.search(queries, TOPK), repetitions)
    return {
        "passages": count, "dtype": dtype, "device_bytes": planned["passages"],
        "search_bytes": planned["search"], "load_s": load_s, "alone_s": alone,
        "together_s": together / NUM_QUERIES, "recall": float(np.mean(hits)),
    }  # fmt: skip


def encoded(folder: Path, dtype: str, repetitions: int) -> dict[str, float]:
    """Seconds of a query, encoded in batches of so many rows, by the number of rows."""
    model = EmbeddingModel(
        model=read_encoder(folder), pooling="mean", normalize=True, query_prefix="",
        passage_prefix="", max_tokens=QUERY_TOKENS,
    )  # fmt: skip
    mesh, rng = Mesh(np.array(jax.local_devices()[:1]), ("rows",)), np.random.default_rng(0)
    weights = {
        name: jnp.asarray(0.02 * rng.standard_normal(shape, np.float32), dtype)
        for name, shape in needed_params(model.model).items()
    }
    params = jax.device_put(unflatten_dict(weights, sep="/"), NamedSharding(mesh, P()))
    by_rows = {}
    for rows in (1, 8, NUM_QUERIES):
        ids = jnp.ones((rows, QUERY_TOKENS), jnp.int32)
        lengths = jnp.full(rows, QUERY_TOKENS, jnp.int32)

        def work(ids: jax.Array = ids, lengths: jax.Array = lengths) -> None:
            encode_rows(params, ids, lengths, model=model, mesh=mesh).block_until_ready()

        by_rows[str(rows)] = seconds(work, repetitions) / rows
    return by_rows


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    numbers = lambda text: [int(one) for one in text.split(",")]  # noqa: E731
    parser.add_argument("--passages", type=numbers, default=[1_000, 10_000, 100_000])
    parser.add_argument("--width", type=int, default=768, help="values of a vector")
    parser.add_argument("--dtypes", type=lambda text: text.split(","), default=[*DTYPES])
    parser.add_argument("--encoder", type=Path, help="folder with a config.json; none: left out")
    parser.add_argument("--encoder_dtype", default="float32")
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--json", type=Path, help="file for the same numbers")
    given = parser.parse_args(argv)
    record: dict[str, Any] = {"device": jax.local_devices()[0].device_kind, "width": given.width}
    record["searches"] = [
        searched(count, given.width, dtype, given.repetitions)
        for count in given.passages
        for dtype in given.dtypes
    ]
    print("| passages | dtype | device | searching | a query alone | of 64 at once | recall@3 |")
    print("|---|---|---|---|---|---|---|")
    for row in record["searches"]:
        print(
            f"| {row['passages']:,} | {row['dtype']} | {row['device_bytes'] / 1e6:,.1f} MB | "
            f"{row['search_bytes'] / 1e6:,.0f} MB | {1e3 * row['alone_s']:.2f} ms | "
            f"{1e3 * row['together_s']:.2f} ms | {row['recall']:.3f} |"
        )
    if given.encoder:
        record["encoder"] = encoded(given.encoder, given.encoder_dtype, given.repetitions)
        print(f"\n| queries of {QUERY_TOKENS} tokens at once | each |\n|---|---|")
        for rows, taken in record["encoder"].items():
            print(f"| {rows} | {1e3 * taken:.1f} ms |")
    if given.json:
        common.write_json(given.json, record)
    return record


if __name__ == "__main__":
    main()
