"""Pages that the TPU attention kernel fetches, counted from the kernel's grid.

The tests use the kernel's grids and block maps; only one test simulates the kernel.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from jaxrl.extras.kernels import attention_tpu as tpu
from jaxrl.models.attention.choice import choose_prefill_block_tokens
from jaxrl.models.attention.kernels import PAGE_TOKENS
from tests.models.attention.brute import brute_force_pages, random_pages

PAGE = PAGE_TOKENS["mosaic"]
NUM_ROWS = 256


class Heads(NamedTuple):
    """Sizes of a model that determine the cost of attention; the cache is bfloat16."""

    num_heads: int
    num_kv_heads: int
    head_dim: int = 128


MODELS = {
    "Qwen3-0.6B": Heads(16, 8),
    "Qwen3-4B": Heads(32, 8),
    "Qwen2.5-7B": Heads(28, 4),
    "Qwen3-30B-A3B": Heads(32, 4),
}


def long_tailed_lengths(rng):
    """Return row lengths of a batch, about 1,000 tokens on average; some rows have stopped."""
    lengths = np.clip(rng.lognormal(np.log(700), 0.85, NUM_ROWS), 64, 8192).astype(int)
    lengths[rng.integers(NUM_ROWS)] = 8192
    lengths[rng.choice(NUM_ROWS, 8, replace=False)] = 0
    return lengths


def random_tables(lengths, rng):
    """Return random block tables for rows of these lengths, with "no page" after each row's last
    page."""
    counts = -(-lengths // PAGE)
    tables = np.full((len(lengths), max(counts.max(), 1)), counts.sum(), np.int32)
    pages = rng.permutation(counts.sum())
    for row, (end, count) in enumerate(zip(np.cumsum(counts), counts, strict=True)):
        tables[row, :count] = pages[end - count : end]
    return tables


def make_spec(heads, tables, limits):
    """Return the kernel's grid for queries with `limits` `[B, Q]`."""
    q = jax.ShapeDtypeStruct((*limits.shape, heads.num_heads, heads.head_dim), jnp.bfloat16)
    pages_shape = int(tables.max()) + 1, heads.num_kv_heads, PAGE, heads.head_dim
    pages = jax.ShapeDtypeStruct(pages_shape, jnp.bfloat16)
    spec = tpu.make_kernel_spec(q, pages, jnp.asarray(tables), jnp.asarray(limits))
    return jax.tree.map(lambda x: np.asarray(x) if isinstance(x, jax.Array) else x, spec)


def list_copied_pages(spec):
    """Return the pages that each step copies."""
    copied = []
    for step in range(int(spec.grid[0])):
        pages = [spec.steps.locate_page(step, index, spec.width) for index in range(spec.width)]
        copied.append([int(spec.steps.tables[index]) for index, is_live in pages if is_live])
    return copied


def test_decoding_on_a_tpu_copies_live_pages_alone():
    heads, lengths = MODELS["Qwen2.5-7B"], long_tailed_lengths(np.random.default_rng(0))
    tables = random_tables(lengths, np.random.default_rng(1))
    spec = make_spec(heads, tables, lengths[:, None])
    counts = -(-lengths // PAGE)
    copied = list_copied_pages(spec)
    assert len(copied) == (-(-counts // spec.width)).sum() <= counts.sum()
    expected = [tables[row, :count] for row, count in enumerate(counts)]
    np.testing.assert_array_equal(np.concatenate(copied), np.concatenate(expected))


def test_where_nothing_is_live_there_is_one_step_that_copies_nothing():
    spec = make_spec(MODELS["Qwen3-0.6B"], np.zeros((4, 3), np.int32), np.zeros((4, 1), np.int32))
    assert list_copied_pages(spec) == [[]]


@pytest.mark.parametrize("model", ["Qwen3-0.6B", "Qwen2.5-7B"])
def test_prefill_on_a_tpu_fetches_the_past_of_each_block_once(model):
    heads = MODELS[model]
    block = find_block_tokens("tpu", heads)
    prompts = [(700, 500), (0, 300)]  # tokens before, and tokens to read
    pieces = [(past + i, min(block, n - i)) for past, n in prompts for i in range(0, n, block)]
    starts, counts = np.transpose(pieces)
    index = np.arange(block)
    limits = np.where(index < counts[:, None], starts[:, None] + index + 1, 0)
    tables = np.arange(10 * len(pieces)).reshape(-1, 10)
    copied = list_copied_pages(make_spec(heads, tables, limits))
    assert sum(map(len, copied)) == (-(-(starts + counts) // PAGE)).sum()


@pytest.mark.parametrize("copies", ["eager", "on_wait"])
def test_a_kernel_multiplies_no_page_but_live_ones_whenever_copies_come(copies, monkeypatch):
    """In Pallas' TPU simulator, unused pages and uninitialized memory are NaN."""
    monkeypatch.setattr(tpu, "STEP_PAGES", 2)
    arrays = random_pages(np.random.default_rng(0), 4, 1, 4, 2, 16, 8, 5)
    _, keys, values, tables, limits = arrays
    limits[2] = 0
    counts = -(-limits[:, 0] // 8)
    live = np.concatenate([tables[row, :count] for row, count in enumerate(counts)])
    expected, _ = brute_force_pages(*arrays)
    dead = np.setdiff1d(np.arange(len(keys)), live)
    keys[dead] = values[dead] = np.nan
    simulator = pltpu.InterpretParams(dma_execution_mode=copies, uninitialized_memory="nan")
    outputs, _ = tpu.attend_pages(*map(jnp.asarray, arrays), interpret=simulator)
    np.testing.assert_allclose(outputs, expected, atol=2e-6)


def find_block_tokens(platform, heads):
    return choose_prefill_block_tokens(platform, heads.num_heads, heads.num_kv_heads)


def test_a_block_is_larger_where_a_tpu_would_wait_and_its_queries_fit():
    blocks = {name: find_block_tokens("tpu", heads) for name, heads in MODELS.items()}
    assert blocks == {"Qwen3-0.6B": 128, "Qwen3-4B": 64, "Qwen2.5-7B": 64, "Qwen3-30B-A3B": 64}
    assert choose_prefill_block_tokens("tpu", 32, 32) == 64  # 16 MiB of a v4 would not hold them
    assert {find_block_tokens("gpu", heads) for heads in MODELS.values()} == {64}
    assert choose_prefill_block_tokens("cpu", 16, 8) == 16
