"""The blocks that the backward kernels for Hopper go over: all that hold something, and few more.

The kernels themselves multiply what is in registers, which JAX's interpreter of Mosaic does not
know yet. They are lowered in `test_tokamax.py`.
"""

import heapq

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.extras.kernels import gradients_hopper as hopper
from jaxrl.models.attention import kernels, reference
from tests.models.attention.brute import random_rows

pytestmark = pytest.mark.usefixtures("quick_compilation")

BLOCK, TILE = hopper.BLOCK, hopper.TILE
find_reads = jax.jit(kernels.find_reads)
pad_to_blocks = jax.jit(reference.pad_to_blocks, static_argnums=4)
blocks_of_keys = jax.jit(hopper._find_key_blocks, static_argnums=1)
blocks_of_queries = jax.jit(hopper._find_query_blocks, static_argnums=1)


def packed(rng, num_queries, num_tokens, shares_prompts):
    """Rows padded to whole tiles: what each token reads, for kernels and by pairs, and how."""
    segment_ids, positions, reads = random_rows(rng, 2, num_tokens, shares_prompts=shares_prompts)
    given = find_reads(jnp.asarray(segment_ids), jnp.asarray(positions))
    x = jnp.zeros((2, num_tokens, 1, 1))
    q, k, _, given = pad_to_blocks(x[:, -num_queries:], x, x, given, TILE)
    behind = q.shape[1] - num_queries
    before = k.shape[1] - num_tokens - behind
    reads = np.pad(reads, ((0, 0), *[(before, behind)] * 2))
    np.einsum("rtt->rt", reads)[~reads.any(axis=2)] = True  # padding reads itself
    return given, reads[:, -q.shape[1] :], settings(q.shape[1], k.shape[1])


def settings(num_queries, num_tokens):
    first = num_tokens - num_queries
    return hopper.GradientConfig(scale=1.0, first=first, num_queries=num_queries, groups=1)


def by_block(reads, rows, columns):
    """Tells of each block of queries and one of keys if any pair is read, and if all are."""
    R = len(reads)
    blocks = reads.reshape(R, reads.shape[1] // rows, rows, -1, columns)
    return blocks.any(axis=(2, 4)), blocks.all(axis=(2, 4))


SIZES = [(512, 512), (256, 640), (128, 128), (300, 300), (140, 300)]


@pytest.mark.parametrize("shares_prompts", [True, False])
@pytest.mark.parametrize(("num_queries", "num_tokens"), SIZES)
def test_queries_go_once_over_each_key_block_that_they_read(
    num_queries, num_tokens, shares_prompts
):
    for seed in range(5):
        rng = np.random.default_rng(seed)
        given, reads, config = packed(rng, num_queries, num_tokens, shares_prompts)
        blocks, whole = (np.asarray(x) for x in blocks_of_keys(given, config))
        is_any, _ = by_block(reads, TILE, BLOCK)
        _, is_all = by_block(reads, BLOCK, BLOCK)
        for row, tile in np.ndindex(blocks.shape[:2]):
            shared, num_shared, own, count = blocks[row, tile]
            visited = [shared + i if i < num_shared else own - num_shared + i for i in range(count)]
            assert len({*visited}) == count > 0
            assert {*np.flatnonzero(is_any[row, tile])} <= {*visited}
            last = (config.first + tile * TILE) // BLOCK + TILE // BLOCK
            assert max(visited) == last - 1  # none behind the diagonal
            for block in range(tile * TILE // BLOCK, (tile + 1) * TILE // BLOCK):
                query = config.first + block * BLOCK
                for key_block in visited:
                    key = key_block * BLOCK
                    if key >= whole[row, block] and key + BLOCK <= query:
                        assert is_all[row, block, key_block]


@pytest.mark.parametrize("shares_prompts", [True, False])
@pytest.mark.parametrize(("num_queries", "num_tokens"), SIZES)
def test_keys_go_over_all_query_blocks_that_read_them(num_queries, num_tokens, shares_prompts):
    for seed in range(5):
        rng = np.random.default_rng(seed)
        given, reads, config = packed(rng, num_queries, num_tokens, shares_prompts)
        blocks, whole = (np.asarray(x) for x in blocks_of_queries(given, config))
        is_any, is_all = by_block(reads, BLOCK, BLOCK)
        for row, tile in np.ndindex(blocks.shape[:2]):
            first, count = blocks[row, tile]
            assert count > 0
            assert first + count <= config.num_queries // BLOCK
            for key_block in range(tile * TILE // BLOCK, (tile + 1) * TILE // BLOCK):
                readers = {*np.flatnonzero(is_any[row, :, key_block])}
                assert readers <= {*range(first, first + count)}
                for block in range(first, first + count):
                    query = config.first + block * BLOCK
                    is_behind = query >= (key_block + 1) * BLOCK
                    if is_behind and query + BLOCK <= whole[row, key_block]:
                        assert is_all[row, block, key_block]


def test_work_follows_the_segments_and_not_the_row():
    # 32 segments of 128 tokens in a row of 4,096: a tile goes over its own segment's two blocks,
    # where all before the diagonal are 32 times as many and more.
    segment_ids = jnp.repeat(jnp.arange(1, 33), 128)[None]
    given = find_reads(segment_ids, jnp.tile(jnp.arange(128), 32)[None])
    config = settings(4096, 4096)
    assert int(blocks_of_keys(given, config)[0][..., 3].sum()) == 32 * 2
    assert int(blocks_of_queries(given, config)[0][..., 1].sum()) == 32 * 2
    whole = find_reads(jnp.ones((1, 4096), jnp.int32), jnp.arange(4096)[None])
    assert int(blocks_of_keys(whole, config)[0][..., 3].sum()) == 2 * sum(range(1, 33))
    # Of one segment no block of queries needs a mask before the diagonal.
    assert int(blocks_of_keys(whole, config)[1].max()) == 0


def test_readers_of_a_shared_prompt_are_its_own():
    # A prompt of 128 with a response to 256, and two segments of 128 that share it.
    segment_ids = jnp.repeat(jnp.array([1, 2, 3]), jnp.array([256, 128, 128]))[None]
    positions = jnp.concatenate([jnp.arange(256), *[jnp.arange(128, 256)] * 2])[None]
    given = find_reads(segment_ids, positions)
    blocks, _ = blocks_of_queries(given, settings(512, 512))
    assert blocks[0].tolist() == [[0, 8], [2, 2], [4, 2], [6, 2]]
    blocks, _ = blocks_of_keys(given, settings(512, 512))
    # Of the third segment: two blocks of the prompt, from block 0 on, then two of its own.
    assert blocks[0, 3].tolist() == [0, 2, 6, 4]


def last_end(costs, num_processors=132):
    """When the last of the programs ends, which start in this order as processors become free."""
    ends = [0.0] * num_processors
    for cost in costs:
        heapq.heapreplace(ends, ends[0] + cost)
    return max(ends)


PACKED = {
    # Lengths of a row's segments, each with how much of the prompt before it continues.
    "one": [(4096, 0)],
    "a shared prompt": [(1536, 0), *[(1024, 512)] * 6],
}


@pytest.mark.parametrize("name", PACKED)
def test_programs_with_the_longest_loops_start_first(name):
    lengths = PACKED[name]
    assert hopper.GRID == ("tile", "row", "head")
    ids = np.concatenate([np.full(length, i + 1) for i, (length, _) in enumerate(lengths)])
    positions = np.concatenate([first + np.arange(length) for length, first in lengths])
    given = find_reads(*(jnp.tile(jnp.asarray(x), (2, 1)) for x in (ids, positions)))
    config = settings(len(ids), len(ids))
    heads, key_heads = 16, 8
    keys = 2 * np.asarray(blocks_of_queries(given, config)[0])[..., 1].T
    queries = np.asarray(blocks_of_keys(given, config)[0])[..., 3].T
    for costs, count, place in ((keys, key_heads, 1), (queries, heads, -1)):
        new, old = (
            np.repeat(costs[::place], count),
            np.tile(costs.T[:, None], (1, count, 1)).ravel(),
        )
        assert sorted(new) == sorted(old)
        least = max(new.sum() / 132, new.max())
        print(f"{name}: {last_end(old) / least:.2f} by heads, {last_end(new) / least:.2f} by tiles")
        assert last_end(new) <= 1.05 * least
