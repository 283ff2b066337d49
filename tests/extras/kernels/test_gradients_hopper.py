"""Blocks that the backward kernels for Hopper visit: all nonempty blocks, and few others.

JAX's interpreter of Mosaic cannot run these kernels, because they multiply values in registers.
`test_tokamax.py` lowers them.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.extras.kernels import gradients_hopper as hopper
from jaxrl.models.attention import kernels, reference
from tests.models.attention.brute import random_rows

pytestmark = pytest.mark.usefixtures("quick_compilation")

BLOCK, TILE = hopper.BLOCK, hopper.TILE
compute_key_ranges = jax.jit(kernels.compute_key_ranges)
pad_to_blocks = jax.jit(reference.pad_to_blocks, static_argnums=4)
blocks_of_keys = jax.jit(hopper._find_key_blocks, static_argnums=1)
blocks_of_queries = jax.jit(hopper._find_query_blocks, static_argnums=1)


def packed(num_queries, num_tokens, shares_prompts):
    """Return key ranges, attention mask and kernel config of four rows, padded to full tiles."""
    segment_ids, positions, attention_mask = random_rows(
        np.random.default_rng(0), 4, num_tokens, shares_prompts=shares_prompts
    )
    key_ranges = compute_key_ranges(jnp.asarray(segment_ids), jnp.asarray(positions))
    x = jnp.zeros((4, num_tokens, 1, 1))
    q, k, _, key_ranges = pad_to_blocks(x[:, -num_queries:], x, x, key_ranges, TILE)
    behind = q.shape[1] - num_queries
    before = k.shape[1] - num_tokens - behind
    attention_mask = np.pad(attention_mask, ((0, 0), *[(before, behind)] * 2))
    np.einsum("rtt->rt", attention_mask)[~attention_mask.any(axis=2)] = True  # padding reads itself
    return key_ranges, attention_mask[:, -q.shape[1] :], settings(q.shape[1], k.shape[1])


def settings(num_queries, num_tokens):
    first = num_tokens - num_queries
    return hopper.GradientConfig(scale=1.0, first=first, num_queries=num_queries, groups=1)


def by_block(attention_mask, rows, columns):
    """For each pair of a query block and a key block, return whether any and all pairs attend."""
    R = len(attention_mask)
    blocks = attention_mask.reshape(R, attention_mask.shape[1] // rows, rows, -1, columns)
    return blocks.any(axis=(2, 4)), blocks.all(axis=(2, 4))


SIZES = [(512, 512), (256, 640), (140, 300)]


@pytest.mark.parametrize("shares_prompts", [True, False])
@pytest.mark.parametrize(("num_queries", "num_tokens"), SIZES)
def test_queries_go_once_over_each_key_block_that_they_read(
    num_queries, num_tokens, shares_prompts
):
    key_ranges, attention_mask, config = packed(num_queries, num_tokens, shares_prompts)
    blocks, whole = (np.asarray(x) for x in blocks_of_keys(key_ranges, config))
    is_any, _ = by_block(attention_mask, TILE, BLOCK)
    _, is_all = by_block(attention_mask, BLOCK, BLOCK)
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
    key_ranges, attention_mask, config = packed(num_queries, num_tokens, shares_prompts)
    blocks, whole = (np.asarray(x) for x in blocks_of_queries(key_ranges, config))
    is_any, is_all = by_block(attention_mask, BLOCK, BLOCK)
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


def test_readers_of_a_shared_prompt_are_its_own():
    # A prompt of 128 with a response to 256, and two segments of 128 that share it.
    segment_ids = jnp.repeat(jnp.array([1, 2, 3]), jnp.array([256, 128, 128]))[None]
    positions = jnp.concatenate([jnp.arange(256), *[jnp.arange(128, 256)] * 2])[None]
    key_ranges = compute_key_ranges(segment_ids, positions)
    blocks, _ = blocks_of_queries(key_ranges, settings(512, 512))
    assert blocks[0].tolist() == [[0, 8], [2, 2], [4, 2], [6, 2]]
    blocks, _ = blocks_of_keys(key_ranges, settings(512, 512))
    # Of the third segment: two blocks of the prompt, from block 0 on, then two of its own.
    assert blocks[0, 3].tolist() == [0, 2, 6, 4]
