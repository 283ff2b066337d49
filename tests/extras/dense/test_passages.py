"""Search over vectors: the results equal numpy's for every dtype on the devices."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.extras.dense import passages as module
from jaxrl.extras.dense.passages import DTYPES, PassageIndex, compute_block_layout
from tests.extras.dense.mesh_search import brute_force, corpus_and_queries, unit
from tests.helpers import ROOT, with_devices

pytestmark = pytest.mark.usefixtures("quick_compilation")

ONE = jax.devices()[:1]


def test_every_mesh_finds_what_numpy_finds(tmp_path):
    file = tmp_path / "done"
    command = [sys.executable, "-m", "tests.extras.dense.mesh_search", str(file)]
    subprocess.run(command, cwd=ROOT, env={**os.environ, **with_devices(8)}, check=True)
    assert file.read_text().startswith("10 meshes")


@pytest.mark.parametrize("dtype", DTYPES)
def test_by_hand(dtype):
    vectors = np.array([[0.0, 2.0], [1.0, 0.0], [0.5, 0.5], [0.0, 2.0]], np.float32)
    found = PassageIndex(vectors, ONE, dtype=dtype).search(np.array([[1.0, 1.0]], np.float32), 3)
    # Products 2, 1, 1 and 2: equal ones in the order of the corpus.
    np.testing.assert_array_equal(found[0], [[0, 3, 1]])
    np.testing.assert_array_equal(found[1], [[2.0, 2.0, 1.0]])


def test_no_more_than_there_are_and_none_of_what_fills_up():
    vectors, queries = corpus_and_queries(num_passages=5)
    # All products are below the 0 of what fills the block up.
    vectors, queries = -np.abs(vectors), np.abs(queries[:3])
    places, scores = PassageIndex(vectors, ONE, dtype="int8").search(queries, topk=9)
    assert [sorted(row) for row in places.tolist()] == [[0, 1, 2, 3, 4]] * 3
    assert (scores < 0).all()
    assert (np.diff(scores) <= 0).all()


def test_several_blocks_and_parts_of_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MAX_CPU_BLOCK", 64)
    monkeypatch.setattr(module, "LOAD_ROWS", 100)
    vectors, queries = corpus_and_queries(num_passages=700)
    file = np.memmap(tmp_path / "vectors", jnp.bfloat16, "w+", shape=vectors.shape)
    file[:] = vectors
    assert compute_block_layout(700, 1, "cpu") == (11, 64)
    expected = brute_force(np.asarray(file).astype(np.float32), queries, topk=4)
    for dtype in DTYPES:
        found = PassageIndex(file, ONE, dtype=dtype, candidates=8).search(queries, topk=4)
        np.testing.assert_array_equal(found[0], expected[0])
        np.testing.assert_array_equal(found[1], expected[1])


def test_candidates_that_cannot_tell_are_not_the_last_word():
    """Int8 cannot distinguish these vectors, so 4 candidates would miss the best."""
    vectors = unit(np.random.default_rng(1), 1, 64).repeat(400, axis=0)
    vectors += 1e-4 * np.random.default_rng(2).standard_normal(vectors.shape).astype(np.float32)
    queries = vectors[[3, 390]]
    expected, _ = brute_force(vectors, queries, topk=1)
    passages = PassageIndex(vectors, ONE, dtype="int8", candidates=4)
    [first], _ = passages._find_candidates(queries[1:], 4)
    assert expected[1, 0] not in first
    np.testing.assert_array_equal(passages.search(queries, topk=1)[0], expected)


def test_int8_finds_what_float32_finds_among_clustered_vectors():
    rng = np.random.default_rng(0)
    centers = unit(rng, 100, 128)
    vectors = centers[rng.integers(100, size=20_000)]
    vectors += 0.03 * rng.standard_normal(vectors.shape, np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    queries = vectors[rng.integers(20_000, size=96)]
    queries = queries + 0.03 * rng.standard_normal(queries.shape, np.float32)
    expected = np.argsort(-(queries @ vectors.T), axis=1)[:, :3]
    passages = PassageIndex(vectors, ONE, dtype="int8")

    def recall(places):
        return np.mean([len({*a} & {*b}) / 3 for a, b in zip(places, expected, strict=False)])

    assert recall(passages.search(queries, topk=3)[0]) >= 0.99
    # By int8 alone it would be less: the candidates are worth scoring again.
    assert recall([row[:3] for row in passages._find_candidates(queries[:16], 3)[0]]) < 0.99


@pytest.mark.parametrize(("dtype", "most"), [("float32", 1e-4), ("bfloat16", 0.02), ("int8", 0.1)])
def test_the_bound_holds_of_every_rounding(dtype, most):
    """The error of the devices' scores stays within the bound, for vectors of any length."""
    rng = np.random.default_rng(3)
    vectors = unit(rng, 900, 48) * rng.uniform(0.1, 3, size=(900, 1)).astype(np.float32)
    queries = unit(rng, 16, 48) * np.float32(1.5)
    passages = PassageIndex(vectors, ONE, dtype=dtype)
    for num in (1, 20, 300):
        found, weakest = passages._find_candidates(queries, num)
        for query, places, score in zip(queries.astype(np.float64), found, weakest, strict=True):
            bound = passages._bound_rounding_error(query)
            assert abs(vectors[places[-1]].astype(np.float64) @ query - score) <= bound < most


def test_values_that_are_not_finite_are_refused():
    vectors, queries = corpus_and_queries(100)
    queries[1, 3] = np.nan
    with pytest.raises(ValueError, match="a query's vector has a value that is not"):
        PassageIndex(vectors, ONE, dtype="int8").search(queries[:3], topk=2)
    vectors[70, 3] = np.inf
    with pytest.raises(ValueError, match="a passage's vector has a value that is not"):
        PassageIndex(vectors, ONE)
