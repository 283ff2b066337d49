"""Exact inner-product search over passages sharded across devices.

Each device scores its passages block by block and keeps the best score of each group of
`GROUP_SIZE` passages. The best groups contain the best passages, even if scores are tied, so a
device rescores and ranks only the passages of these groups. The host merges the candidates of all
devices.

The host rescores the candidates in float64 from the vectors in the file, so results depend neither
on the dtype nor on the number of devices. The search repeats with more candidates if another
passage could be among the best, given the bound on the devices' rounding error.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

DTYPES = ("float32", "bfloat16", "int8")

GROUP_SIZE = 32
"""Number of consecutive passages in a group. Devices keep only the best score of a group."""

MAX_BLOCK = 65_536
"""Maximum number of passages that a device scores in one block."""

MAX_CPU_BLOCK = 2_048
"""Maximum block size on a CPU, with which a block fits in the cache."""

LOAD_ROWS = 4_096
"""Number of passages read from the file at a time."""

MAX_CANDIDATES = 1_600
"""Maximum number of candidates. At this number, a result may not be exact."""

_NUM_STDDEVS = 6.0
"""Assumed maximum of int8 rounding errors, in standard deviations."""


def compute_block_layout(num_passages: int, num_devices: int, platform: str) -> tuple[int, int]:
    """Return the smallest number of blocks per device, and the number of passages per block.

    All blocks have the same size, a multiple of `GROUP_SIZE`.
    """
    per_device = -(-num_passages // num_devices)
    num_blocks = -(-per_device // (MAX_CPU_BLOCK if platform == "cpu" else MAX_BLOCK))
    return num_blocks, -(-per_device // (num_blocks * GROUP_SIZE)) * GROUP_SIZE


def count_device_bytes(
    num_passages: int,
    width: int,
    dtype: str,
    num_devices: int,
    *,
    platform: str,
    candidates: int,
    query_rows: int,
) -> dict[str, int]:
    """Return the permanent (`passages`) and temporary (`search`) bytes on one device.

    Args:
        num_passages: Number of passages in the corpus.
        width: Embedding dimension.
        dtype: One of `DTYPES`.
        num_devices: Number of devices over which passages are sharded.
        platform: Platform of the devices: cpu, gpu or tpu.
        candidates: Minimum number of candidates per query.
        query_rows: Number of queries per batch.
    """
    num_blocks, block = compute_block_layout(num_passages, num_devices, platform)
    size, itemsize = num_blocks * block, jnp.dtype(dtype).itemsize
    groups = size // GROUP_SIZE
    return {
        "passages": size * (width * itemsize + 4 * (dtype == "int8")),
        "search": query_rows * 4 * (block + 2 * groups)
        + block * width * itemsize
        + min(max(candidates, MAX_CANDIDATES), groups) * GROUP_SIZE * width * (itemsize + 4),
    }


def _compute_int8_scales(rows: np.ndarray) -> np.ndarray:
    """Compute float32 scales [N]. Rows [N, D] divided by them are in the range -127..127."""
    largest = np.abs(rows).max(axis=1).astype(np.float32)
    return np.where(largest > 0, largest / np.float32(127), np.float32(1))


def _compute_scores(
    queries: jax.Array, passages: jax.Array, scales: jax.Array | None, *, is_cpu: bool
) -> jax.Array:
    """Compute float32 scores [Q, n] of passages [n, D], without the scales of the queries.

    Int8 products are exact: they are summed in int32, or in float32 on a CPU (where int32 is slow)
    if the sums stay below 2^24.
    """
    if passages.dtype == jnp.uint16:
        passages = jax.lax.bitcast_convert_type(passages, jnp.bfloat16)
    is_int8 = passages.dtype == jnp.int8
    if is_cpu and not (is_int8 and passages.shape[1] * 127**2 >= 2**24):
        passages, queries = passages.astype(jnp.float32), queries.astype(jnp.float32)
    products = jnp.einsum(
        "qd,nd->qn",
        queries,
        passages,
        preferred_element_type=jnp.int32 if passages.dtype == jnp.int8 else jnp.float32,
        precision=jax.lax.Precision.HIGHEST,
    ).astype(jnp.float32)
    return products if scales is None else products * scales


@partial(jax.jit, static_argnames=("mesh", "block", "num_candidates"))
def _select_candidates(
    passages: jax.Array,
    scales: jax.Array | None,
    counts: jax.Array,
    queries: jax.Array,
    *,
    mesh: Mesh,
    block: int,
    num_candidates: int,
) -> tuple[jax.Array, jax.Array]:
    """Select candidates on every device; return scores and positions [devices, Q, num].

    Args:
        passages: Passages [devices * num_blocks * block, D]; uint16 holds the bits of bfloat16.
        scales: Scales of int8 passages; None for other dtypes.
        counts: Number of passages on each device, without padding, int32 [devices].
        queries: Queries [Q, D] in the dtype of the passages.
        mesh: Mesh with one axis.
        block: Number of passages scored at a time.
        num_candidates: Number of candidates per query and device.
    """
    score = partial(_compute_scores, is_cpu=mesh.devices.flat[0].platform == "cpu")

    def select_on_device(
        passages: jax.Array, scales: jax.Array | None, count: jax.Array, queries: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        Q, D = queries.shape

        def score_block(_: None, block_inputs: Any) -> tuple[None, jax.Array]:
            index, rows, row_scales = block_inputs
            is_padding = index * block + jnp.arange(block) >= count[0]
            scores = jnp.where(is_padding, -jnp.inf, score(queries, rows, row_scales))
            return None, scores.reshape(Q, -1, GROUP_SIZE).max(axis=2)

        blocks = passages.reshape(-1, block, D)
        block_scales = None if scales is None else scales.reshape(-1, block)
        block_inputs = jnp.arange(len(blocks)), blocks, block_scales
        best = jax.lax.scan(score_block, None, block_inputs)[1].swapaxes(0, 1).reshape(Q, -1)
        # Sort by position, so that ties go to the first passage.
        groups = jnp.sort(jax.lax.top_k(best, min(num_candidates, best.shape[1]))[1], axis=1)

        def score_groups(query: jax.Array, groups: jax.Array) -> tuple[jax.Array, jax.Array]:
            positions = (groups[:, None] * GROUP_SIZE + jnp.arange(GROUP_SIZE)).reshape(-1)
            row_scales = None if scales is None else scales[positions]
            scores = score(query[None], passages[positions], row_scales)[0]
            scores = jnp.where(positions < count[0], scores, -jnp.inf)
            largest, top_indices = jax.lax.top_k(scores, min(num_candidates, len(positions)))
            return largest, positions[top_indices]

        results = jax.lax.map(lambda args: score_groups(*args), (queries, groups))
        return jax.tree.map(lambda array: array[None], results)

    sharding = P(*mesh.axis_names)
    specs = (sharding, sharding, sharding, P())
    search = jax.shard_map(
        select_on_device, mesh=mesh, in_specs=specs, out_specs=sharding, check_vma=False
    )
    return search(passages, scales, counts, queries)


_write_rows = jax.jit(jax.lax.dynamic_update_slice_in_dim, static_argnums=3, donate_argnums=0)


class PassageIndex:
    """Nearest-neighbor search on devices over the vectors of a corpus.

    Attributes:
        vectors: Vectors [N, D] in the dtype of the file.
    """

    def __init__(
        self,
        vectors: np.ndarray,
        devices: Sequence[Any],
        *,
        dtype: str = "float32",
        candidates: int = 100,
        query_rows: int = 16,
    ) -> None:
        """Read all vectors once and copy them to the devices in parts.

        Args:
            vectors: Floats [N, D], in memory or memory-mapped. Searches read candidates from this
                array.
            devices: Devices of this process, which hold consecutive shards of the passages.
            dtype: Dtype on the devices, one of `DTYPES`; int8 has one scale per vector.
            candidates: Minimum number of candidates per query to rescore from `vectors`.
            query_rows: Number of queries per batch.

        Raises:
            ValueError: There are no vectors, or a value is not finite.
        """
        if vectors.ndim != 2 or not len(vectors):
            raise ValueError(f"passage vectors have the shape {vectors.shape}; expected [N, D].")
        self.vectors = vectors
        self._dtype, self._candidates, self._query_rows = dtype, candidates, query_rows
        num_blocks, self._block = compute_block_layout(
            len(vectors), len(devices), devices[0].platform
        )
        self._size = num_blocks * self._block
        self._mesh = Mesh(np.array(devices), ("passages",))
        self._max_norm = self._max_scale = 0.0
        counts, passages, scales = [], [], []
        for start in range(0, len(devices) * self._size, self._size):
            rows = vectors[start : start + self._size]
            shard_arrays = self._load_shard(rows, devices[start // self._size])
            counts.append(len(rows))
            passages.append(shard_arrays[0])
            scales.append(shard_arrays[1])
        if not np.isfinite(self._max_norm):
            raise ValueError("a passage's vector has a value that is not finite.")
        sharding = NamedSharding(self._mesh, P("passages"))
        self._counts = jax.device_put(np.array(counts, np.int32), sharding)
        shape = (len(devices) * self._size,)
        make_global_array = jax.make_array_from_single_device_arrays
        self._passages = make_global_array((*shape, vectors.shape[1]), sharding, passages)
        self._scales = make_global_array(shape, sharding, scales) if dtype == "int8" else None

    def _load_shard(self, vectors: np.ndarray, device: Any) -> tuple[jax.Array, jax.Array]:
        """Copy vectors to a device in parts; return the device array and its int8 scales."""
        # On a CPU, XLA would convert all bfloat16 passages to float32 to gather a few of them.
        stores_bits = device.platform == "cpu" and self._dtype == "bfloat16"
        dtype = np.dtype(np.uint16) if stores_bits else jnp.dtype(self._dtype)
        step = min(LOAD_ROWS, self._size)
        passages = jnp.zeros((self._size, vectors.shape[1]), dtype, device=device)
        scales = jnp.ones(self._size if self._dtype == "int8" else 0, jnp.float32, device=device)
        for start in range(0, len(vectors), step):
            start = min(start, self._size - step)  # the last part overlaps the previous one
            rows = np.asarray(vectors[start : start + step], np.float32)
            norm = np.linalg.norm(rows, axis=1).max()
            self._max_norm = float(np.maximum(self._max_norm, norm))  # propagates NaN
            rows = np.pad(rows, ((0, step - len(rows)), (0, 0)))
            if self._dtype == "int8":
                row_scales = _compute_int8_scales(rows)
                self._max_scale = max(self._max_scale, float(np.abs(rows).max()) / 127)
                rows = np.round(rows / row_scales[:, None])
                scales = _write_rows(scales, row_scales, start, 0)
            rows = rows.astype(ml_dtypes.bfloat16).view(np.uint16) if stores_bits else rows
            passages = _write_rows(passages, rows.astype(dtype), start, 0)
        return passages, scales

    def search(self, queries: np.ndarray, topk: int) -> tuple[np.ndarray, np.ndarray]:
        """Find the passages with the largest inner products, best first. Ties are in corpus order.

        Args:
            queries: Queries, float32 [Q, D].
            topk: Number of passages per query.

        Returns:
            Positions of the passages in the corpus, int64 [Q, k], and inner products, float64
            [Q, k], where k is the smaller of `topk` and the size of the corpus.

        Raises:
            ValueError: A query has a non-finite value.
        """
        if not np.isfinite(queries).all():
            raise ValueError("a query's vector has a value that is not finite.")
        topk = min(topk, len(self.vectors))
        positions = np.zeros((len(queries), topk), np.int64)
        scores = np.zeros((len(queries), topk))
        # For queries with a possibly inexact result, search again with four times the candidates.
        remaining, num_candidates = np.arange(len(queries)), max(self._candidates, 4 * topk)
        while len(remaining):
            num_candidates = min(num_candidates, len(self.vectors))
            is_final = num_candidates >= min(len(self.vectors), max(MAX_CANDIDATES, topk))
            unproven = []
            for start in range(0, len(remaining), self._query_rows):
                block = remaining[start : start + self._query_rows]
                results = self._find_candidates(queries[block], num_candidates)
                for row, candidates, score_bound in zip(block, *results, strict=True):
                    query, ordered = queries[row].astype(np.float64), np.sort(candidates)
                    # Sum each row in the same order, so that equal vectors have equal scores.
                    # Candidates are sorted, so that file reads are sequential.
                    exact_scores = (self.vectors[ordered].astype(np.float64) * query).sum(axis=1)
                    best = np.lexsort((ordered, -exact_scores))[:topk]
                    positions[row], scores[row] = ordered[best], exact_scores[best]
                    bound = score_bound + self._bound_rounding_error(query)
                    if not is_final and scores[row, -1] <= bound:
                        unproven.append(row)
            remaining, num_candidates = np.array(unproven, np.int64), 4 * num_candidates
        return positions, scores

    def _find_candidates(
        self, queries: np.ndarray, num_candidates: int
    ) -> tuple[list[np.ndarray], list[float]]:
        """Return each query's candidates and an upper bound on the scores of all other passages."""
        # A single query is not padded. This may change scores on the devices, but not the results,
        # which depend on scores computed from the file.
        rows = np.zeros(
            (1 if len(queries) == 1 else self._query_rows, queries.shape[1]), np.float32
        )
        rows[: len(queries)] = queries
        query_scales = np.ones(len(rows), np.float32)
        if self._dtype == "int8":
            query_scales = _compute_int8_scales(rows)
            rows = np.round(rows / query_scales[:, None])
        device_results = _select_candidates(
            self._passages,
            self._scales,
            self._counts,
            jax.device_put(rows.astype(jnp.dtype(self._dtype)), NamedSharding(self._mesh, P())),
            mesh=self._mesh,
            block=self._block,
            num_candidates=num_candidates,
        )
        device_scores, device_positions = jax.device_get(device_results)
        first_positions = self._size * np.arange(len(device_scores))
        device_positions = device_positions + first_positions[:, None, None]
        candidates, score_bound = [], []
        for row in range(len(queries)):
            scores, positions = device_scores[:, row].ravel(), device_positions[:, row].ravel()
            best = np.lexsort((positions, -scores))[:num_candidates]
            best = best[scores[best] > -np.inf]
            candidates.append(positions[best])
            score_bound.append(float(scores[best[-1]]) * float(query_scales[row]))
        return candidates, score_bound

    def _bound_rounding_error(self, query: np.ndarray) -> float:
        """Return a bound on the rounding error of the scores that devices compute for a query."""
        norms = float(np.linalg.norm(query)) * self._max_norm
        summation_error = len(query) * float(np.finfo(np.float32).eps) * norms
        if self._dtype == "int8":
            # Rounding errors are uniform over a quantization step, with variance step^2 / 12.
            passage_error = float(np.linalg.norm(query)) * self._max_scale
            query_error = self._max_norm * float(_compute_int8_scales(query[None])[0])
            return (
                summation_error
                + _NUM_STDDEVS * float(np.hypot(passage_error, query_error)) / 12**0.5
            )
        return summation_error + (2**-8 * norms if self._dtype == "bfloat16" else 0.0)
