"""Searches on every mesh of eight virtual devices, and on parts of them; run as a program.

    python -m tests.extras.dense.mesh_search FILE

Writes to FILE how many searches there were. Each is compared with `brute_force`.
"""

import itertools
import sys
from pathlib import Path

import jax
import numpy as np

from jaxrl.extras.dense.passages import DTYPES, PassageIndex
from jaxrl.runtime.sharding import make_mesh


def brute_force(vectors, queries, topk):
    """Compute positions and scores by definition, in float64; ties are in order of position."""
    vectors, queries = vectors.astype(np.float64), queries.astype(np.float64)
    scores = np.stack([(vectors * query).sum(axis=1) for query in queries])
    places = np.stack([np.lexsort((np.arange(len(row)), -row))[:topk] for row in scores])
    return places, np.take_along_axis(scores, places, axis=1)


def unit(rng, *shape):
    vectors = rng.standard_normal(shape).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def corpus_and_queries(num_passages=1_003, width=24):
    """Return random vectors, some of them equal and on several devices, and similar queries."""
    rng = np.random.default_rng(0)
    vectors = unit(rng, num_passages, width)
    vectors[num_passages // 3 :: 40] = vectors[2]
    queries = unit(rng, 21, width)
    queries[4] = vectors[2]
    return vectors, queries


def main():
    vectors, queries = corpus_and_queries()
    expected_places, expected_scores = brute_force(vectors, queries, topk=7)
    sizes = (1, 2, 4, 8)
    meshes = [
        make_mesh(data=data, fsdp=fsdp, tensor=tensor)
        for data, fsdp, tensor in itertools.product(sizes, repeat=3)
        if data * fsdp * tensor == 8
    ]
    assert len(meshes) == 10
    orders = {tuple(mesh.devices.flat) for mesh in meshes}
    orders |= {tuple(jax.devices()[:count]) for count in (1, 3)}
    groups = sorted(orders, key=repr)
    cases = [(devices, "int8") for devices in groups] + [(groups[-1], dtype) for dtype in DTYPES]
    for devices, dtype in cases:
        passages = PassageIndex(vectors, devices, dtype=dtype, candidates=30, query_rows=16)
        places, scores = passages.search(queries, topk=7)
        np.testing.assert_array_equal(places, expected_places, err_msg=f"{dtype}, {devices}")
        np.testing.assert_array_equal(scores, expected_scores)
    Path(sys.argv[1]).write_text(f"{len(meshes)} meshes, {len(groups)} orders of devices")


if __name__ == "__main__":
    main()
