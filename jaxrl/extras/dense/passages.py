"""Exact inner-product search over passages that are split over devices.

A device computes the scores of its passages block by block and keeps the best of every `GROUP`. The
best groups hold the best passages, also where scores are equal: a passage outside of them has as
many others before it as are asked for. So no list of all scores is sorted or kept. What the devices
find is merged on the host: they exchange nothing, and no other program has to wait for them.

The devices only choose candidates. Their scores are computed again from the vectors in the file, in
float64, so that what is found depends neither on the dtype on the devices nor on their number. The
rounding of the devices is bounded; where the bound cannot tell that no other passage belongs among
the best, more candidates are looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

DTYPES = ("float32", "bfloat16", "int8")

GROUP = 32
"""Passages of which the best score stands for all."""

MAX_BLOCK = 65_536
"""Passages whose scores a device has in memory at a time."""

CPU_BLOCK = 2_048
"""Passages at a time on a CPU, which has a block in its cache."""

LOAD_ROWS = 4_096
"""Passages of each device that are read from the file at a time."""

MAX_CANDIDATES = 1_600
"""Candidates at most; where these do not tell the best apart, the first of them are taken."""

_DEVIATIONS = 6.0
"""Deviations of the rounding to int8 beyond which no error is expected in a whole corpus."""


@dataclass(frozen=True)
class Layout:
    """Division of N passages over devices and blocks.

    Attributes:
        num_blocks: of a device.
        block: passages of each.
    """

    num_blocks: int
    block: int

    @classmethod
    def of(cls, num_passages: int, num_devices: int, platform: str) -> Layout:
        """Blocks of equal size, whole groups each, as few as there may be on such devices."""
        of_device = -(-num_passages // num_devices)
        num_blocks = -(-of_device // (CPU_BLOCK if platform == "cpu" else MAX_BLOCK))
        block = -(-of_device // (num_blocks * GROUP)) * GROUP
        return cls(num_blocks, block)

    @property
    def passages(self) -> int:
        """Passages of a device, with those that fill it up."""
        return self.num_blocks * self.block


def device_bytes(
    num_passages: int,
    width: int,
    dtype: str,
    num_devices: int,
    *,
    platform: str,
    candidates: int,
    query_rows: int,
) -> dict[str, int]:
    """Bytes of one device: what lies there, and what a search needs beside it.

    Args:
        num_passages: of the corpus.
        width: of a vector.
        dtype: out of `DTYPES`.
        num_devices: over which they are split.
        platform: of these: cpu, gpu or tpu.
        candidates: that are computed again.
        query_rows: queries that are searched for at once.
    """
    layout, itemsize = Layout.of(num_passages, num_devices, platform), jnp.dtype(dtype).itemsize
    groups = layout.passages // GROUP
    return {
        "passages": layout.passages * (width * itemsize + 4 * (dtype == "int8")),
        "search": query_rows * 4 * (layout.block + 2 * groups)
        + layout.block * width * itemsize
        + min(max(candidates, MAX_CANDIDATES), groups) * GROUP * width * (itemsize + 4),
    }


@partial(jax.jit, static_argnames="mesh", donate_argnums=(0, 1))
def _put(
    passages: jax.Array, scales: jax.Array, rows: jax.Array, start: jax.Array, *, mesh: Mesh
) -> tuple[jax.Array, ...]:
    """Writes rows into every device's passages; also the largest norms and scales among them."""

    def put(
        passages: jax.Array, scales: jax.Array, rows: jax.Array, start: jax.Array
    ) -> tuple[jax.Array, ...]:
        values = rows.astype(jnp.float32)
        norm = jnp.sqrt(jnp.max(jnp.sum(values * values, axis=1)))
        top = jnp.float32(0)
        if passages.dtype == jnp.int8:
            largest = jnp.max(jnp.abs(values), axis=1)
            new_scales = jnp.where(largest > 0, largest / 127, 1.0)
            scales = jax.lax.dynamic_update_slice(scales, new_scales, (start,))
            values = jnp.round(values / new_scales[:, None])
            top = jnp.max(jnp.where(largest > 0, new_scales, 0.0))
        if passages.dtype == jnp.uint16:
            values = jax.lax.bitcast_convert_type(values.astype(jnp.bfloat16), jnp.uint16)
        values = values.astype(passages.dtype)
        passages = jax.lax.dynamic_update_slice(passages, values, (start, 0))
        return passages, scales, norm[None], top[None]

    each = P(*mesh.axis_names)
    specs = each, each, each, P()
    split = jax.shard_map(put, mesh=mesh, in_specs=specs, out_specs=(each,) * 4, check_vma=False)
    return split(passages, scales, rows, start)


def _scores(
    queries: jax.Array, passages: jax.Array, scales: jax.Array | None, *, is_cpu: bool
) -> jax.Array:
    """Scores `[Q, n]` of passages `[n, D]`, float32, without the scales of the queries.

    Of int8 they are exact: whole numbers, in int32, or on a CPU, which multiplies these slowly, in
    float32, where they are exact below 2^24.
    """
    if passages.dtype == jnp.uint16:
        passages = jax.lax.bitcast_convert_type(passages, jnp.bfloat16)
    is_whole = passages.dtype == jnp.int8
    if is_cpu and not (is_whole and passages.shape[1] * 127**2 >= 2**24):
        passages, queries = passages.astype(jnp.float32), queries.astype(jnp.float32)
    kind = jnp.int32 if passages.dtype == jnp.int8 else jnp.float32
    products = jnp.einsum(
        "qd,nd->qn",
        queries,
        passages,
        preferred_element_type=kind,
        precision=jax.lax.Precision.HIGHEST,
    ).astype(jnp.float32)
    return products if scales is None else products * scales


def _first(values: jax.Array, count: int) -> jax.Array:
    """Indices of the `count` largest values `[Q, n]` of each row, the first of equal ones."""
    n = values.shape[1]
    if n < 64 * count or n < 2 * GROUP:
        return jax.lax.top_k(values, count)[1]
    # The largest values are in the groups with the largest maxima: both lists are short to sort.
    padded = jnp.pad(values, ((0, 0), (0, -n % GROUP)), constant_values=-jnp.inf)
    groups = padded.reshape(len(values), -1, GROUP)
    best = jnp.sort(_first(groups.max(axis=2), count), axis=1)
    inside = jnp.take_along_axis(groups, best[:, :, None], axis=1).reshape(len(values), -1)
    where = jax.lax.top_k(inside, count)[1]
    return jnp.take_along_axis(best, where // GROUP, axis=1) * GROUP + where % GROUP


def _search_device(
    passages: jax.Array,
    scales: jax.Array,
    count: jax.Array,
    queries: jax.Array,
    *,
    block: int,
    num: int,
    is_cpu: bool,
) -> tuple[jax.Array, jax.Array]:
    """The best `num` of one device's passages: scores and places, `[1, Q, num]`.

    Args:
        passages: `[num_blocks * block, D]`; those in uint16 are the bits of bfloat16.
        scales: of passages in int8, `[num_blocks * block]`; else not read.
        count: `[1]`, passages that are there; the rest fills up.
        queries: `[Q, D]`, in the passages' dtype.
        block: passages whose scores are computed at a time.
        num: of candidates.
        is_cpu: whether the device is one.
    """
    Q, D = queries.shape
    blocks = passages.reshape(-1, block, D)
    has_scales = passages.dtype == jnp.int8
    of_blocks = scales.reshape(len(blocks), -1)

    def maxima(_: None, numbered: tuple[jax.Array, ...]) -> tuple[None, jax.Array]:
        index, rows, row_scales = numbered
        is_there = index * block + jnp.arange(block) < count[0]
        scores = _scores(queries, rows, row_scales if has_scales else None, is_cpu=is_cpu)
        scores = jnp.where(is_there, scores, -jnp.inf)
        return None, scores.reshape(Q, -1, GROUP).max(axis=2)

    _, best = jax.lax.scan(maxima, None, (jnp.arange(len(blocks)), blocks, of_blocks))
    groups = best.transpose(1, 0, 2).reshape(Q, -1)
    # In the order of their places, so that of equal scores the first ones are taken.
    chosen = jnp.sort(_first(groups, min(num, groups.shape[1])), axis=1)

    def again(one: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        query, own_groups = one
        places = (own_groups[:, None] * GROUP + jnp.arange(GROUP)).reshape(-1)
        row_scales = scales[places] if has_scales else None
        scores = _scores(query[None], passages[places], row_scales, is_cpu=is_cpu)[0]
        scores = jnp.where(places < count[0], scores, -jnp.inf)
        largest, where = jax.lax.top_k(scores, min(num, len(places)))
        return largest, places[where]

    scores, places = jax.lax.map(again, (queries, chosen))
    return scores[None], places[None]


@partial(jax.jit, static_argnames=("mesh", "block", "num"))
def _search(
    passages: jax.Array,
    scales: jax.Array,
    counts: jax.Array,
    queries: jax.Array,
    *,
    mesh: Mesh,
    block: int,
    num: int,
) -> tuple[jax.Array, jax.Array]:
    """Candidates of every device, `[devices, Q, num]`: scores, and places among its passages."""
    each = P(*mesh.axis_names)
    return jax.shard_map(
        partial(
            _search_device, block=block, num=num, is_cpu=mesh.devices.flat[0].platform == "cpu"
        ),
        mesh=mesh,
        in_specs=(each, each, each, P()),
        out_specs=(each, each),
        check_vma=False,
    )(passages, scales, counts, queries)


class Passages:
    """The vectors of a corpus on devices, and the search among them.

    Attributes:
        vectors: as they lie in the file.
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
        """Reads all vectors once and puts them on the devices, a part at a time.

        Args:
            vectors: float [N, D], mapped from a file or in memory; candidates are read from it
                again in every search.
            devices: over which the passages are split, in their order; of this process.
            dtype: on the devices, out of `DTYPES`; int8 has a scale for every vector.
            candidates: passages whose scores are computed again from `vectors`, at least.
            query_rows: queries that are searched for at once.

        Raises:
            ValueError: there are no vectors, or one holds what is no finite number.
        """
        if vectors.ndim != 2 or not len(vectors):
            raise ValueError(
                f"expected the vectors of passages, [N, D]; got an array of {vectors.shape}."
            )
        self.vectors = vectors
        self._dtype, self._candidates, self._query_rows = dtype, candidates, query_rows
        self._layout = Layout.of(len(vectors), len(devices), devices[0].platform)
        self._mesh = Mesh(np.array(devices), ("passages",))
        starts = np.arange(len(devices)) * self._layout.passages
        counts = np.clip(len(vectors) - starts, 0, self._layout.passages).astype(np.int32)
        split, size = NamedSharding(self._mesh, P("passages")), self._layout.passages
        self._counts = jax.device_put(counts, split)
        num_scales = size if dtype == "int8" else self._layout.num_blocks
        # Bfloat16 as bits on a CPU, whose compiler would convert all of it to float32 to take some.
        is_in_bits = devices[0].platform == "cpu" and dtype == "bfloat16"
        kind = "uint16" if is_in_bits else dtype
        self._passages = jnp.zeros((len(devices) * size, vectors.shape[1]), kind, device=split)
        self._scales = jnp.ones(len(devices) * num_scales, jnp.float32, device=split)
        step = min(LOAD_ROWS, size)
        largest = np.zeros(2)
        for start in range(0, min(size, len(vectors)), step):
            start = min(start, size - step)  # the last part begins within the one before
            parts = []
            for index in range(len(devices)):
                begin = index * size + start
                rows = np.asarray(vectors[begin : begin + step])
                if rows.dtype not in (np.float32, jnp.bfloat16):
                    rows = rows.astype(np.float32)
                parts.append(np.pad(rows, ((0, step - len(rows)), (0, 0))))  # behind its end
            self._passages, self._scales, *tops = _put(
                self._passages,
                self._scales,
                jax.device_put(np.concatenate(parts), split),
                np.int32(start),
                mesh=self._mesh,
            )
            maxima = np.array([np.asarray(top).max() for top in tops])
            if not np.isfinite(maxima).all():
                raise ValueError(
                    "among the vectors of the passages is one with a value that is no finite "
                    "number."
                )
            largest = np.maximum(largest, maxima)
        self._max_norm, self._max_scale = map(float, largest)

    def search(self, queries: np.ndarray, topk: int) -> tuple[np.ndarray, np.ndarray]:
        """The passages with the largest inner products, best first; the first of equal ones.

        Args:
            queries: float32 [Q, D].
            topk: passages of a query.

        Returns:
            Places of the passages in the corpus, int64 [Q, k], and the inner products with them,
            float64 [Q, k], where k is `topk` or as many as there are.

        Raises:
            ValueError: a query holds what is no finite number.
        """
        if not np.isfinite(queries).all():
            raise ValueError("the vector of a query has a value that is no finite number.")
        topk = min(topk, len(self.vectors))
        places = np.zeros((len(queries), topk), np.int64)
        scores = np.zeros((len(queries), topk))
        left, num = np.arange(len(queries)), max(self._candidates, 4 * topk)
        while len(left):
            num = min(num, len(self.vectors))
            is_last = num >= min(len(self.vectors), max(MAX_CANDIDATES, topk))
            unsure = []
            for start in range(0, len(left), self._query_rows):
                block = left[start : start + self._query_rows]
                chosen = self._candidates_of(queries[block], num)
                for row, candidates, weakest in zip(block, *chosen, strict=True):
                    query, ordered = queries[row].astype(np.float64), np.sort(candidates)
                    # From the vectors in the file, which is read forwards. Each row is summed by
                    # itself and in one order: equal vectors have equal scores.
                    exact = (self.vectors[ordered].astype(np.float64) * query).sum(axis=1)
                    best = np.lexsort((ordered, -exact))[:topk]
                    places[row], scores[row] = ordered[best], exact[best]
                    bound = weakest + self._rounding(query)
                    if not is_last and scores[row, -1] <= bound:
                        unsure.append(row)
            # What rounding may have left out is found among more candidates.
            left, num = np.array(unsure, np.int64), 4 * num
        return places, scores

    def _candidates_of(self, queries: np.ndarray, num: int) -> tuple[list[np.ndarray], list[float]]:
        """Places of each query's `num` candidates, and the score that no other passage exceeds."""
        # A query that comes alone is spared the work of many; the scores that count are the file's.
        num_rows = 1 if len(queries) == 1 else self._query_rows
        rows = np.zeros((num_rows, queries.shape[1]), np.float32)
        rows[: len(queries)] = queries
        query_scales = np.ones(len(rows), np.float32)
        if self._dtype == "int8":
            query_scales = _query_scales(rows)
            rows = np.round(rows / query_scales[:, None])
        by_device = _search(
            self._passages,
            self._scales,
            self._counts,
            jax.device_put(rows.astype(jnp.dtype(self._dtype)), NamedSharding(self._mesh, P())),
            mesh=self._mesh,
            block=self._layout.block,
            num=num,
        )
        device_scores, device_places = map(np.asarray, jax.device_get(by_device))
        starts = np.arange(len(device_places))[:, None] * self._layout.passages
        places, weakest = [], []
        for row in range(len(queries)):
            scores = device_scores[:, row].ravel()
            all_places = (device_places[:, row] + starts).ravel()
            best = np.lexsort((all_places, -scores))[:num]
            best = best[scores[best] > -np.inf]
            places.append(all_places[best])
            weakest.append(float(scores[best[-1]]) * float(query_scales[row]))
        return places, weakest

    def _rounding(self, query: np.ndarray) -> float:
        """Bound on the amount by which the devices' score of a passage lies below the exact one."""
        norms = float(np.linalg.norm(query)) * self._max_norm
        summed = len(query) * float(np.finfo(np.float32).eps) * norms
        if self._dtype == "int8":
            # Roundings are spread evenly over a step of the scale: their variance is a twelfth of
            # its square.
            of_passages = float(np.linalg.norm(query)) * self._max_scale
            of_query = self._max_norm * float(_query_scales(query[None])[0])
            return summed + _DEVIATIONS * float(np.hypot(of_passages, of_query)) / 12**0.5
        return summed + (2**-8 * norms if self._dtype == "bfloat16" else 0.0)


def _query_scales(queries: np.ndarray) -> np.ndarray:
    largest = np.abs(queries).max(axis=1).astype(np.float32)
    return np.where(largest > 0, largest / 127, 1).astype(np.float32)
