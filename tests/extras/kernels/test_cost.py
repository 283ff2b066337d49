"""Accelerators' kernels fetch what rows have, counted from the kernels' own grids."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxrl.extras.kernels import attention_tpu as tpu
from jaxrl.models.attention.choice import prefill_block_tokens
from jaxrl.models.attention.kernels import PAGE_TOKENS
from tests.extras.kernels import cost
from tests.models.attention.brute import brute_force_pages, random_pages

PAGE = PAGE_TOKENS["mosaic"]


def block_of(platform, model):
    return prefill_block_tokens(platform, model.num_heads, model.num_kv_heads)


def test_a_block_that_stays_is_moved_once():
    # Blocks 0 0 1 1 2 2 over the rows of a grid of 3 x 2; over its columns 0 1 0 1 0 1.
    rows = pl.BlockSpec((8, 128), lambda i, j: (i, 0))
    columns = pl.BlockSpec((8, 128), lambda i, j: (j, 0))
    assert cost.moves((3, 2), rows) == 3
    assert cost.moves((3, 2), columns) == 6
    looked_up = pl.BlockSpec((8, 128), lambda i, table: (table[i], 0))
    assert cost.moves((4,), looked_up, [np.array([5, 5, 2, 5])]) == 3
    assert cost.block_bytes(pl.BlockSpec((None, 8, 64), None), 2) == 8 * 128 * 2


def shared(tables, lengths):
    """The tables of groups of 8 rows that have the pages of a prompt of 300 tokens in common."""
    tables = tables.copy()
    for row in range(len(tables)):
        common = min(300, lengths[row], lengths[row - row % 8]) // PAGE
        tables[row, :common] = tables[row - row % 8, :common]
    return tables


@pytest.mark.parametrize("kind", ["layers apart", "layers in a loop", "shared prompts"])
@pytest.mark.parametrize("model", ["Qwen3-0.6B", "Qwen2.5-7B", "Qwen3-30B-A3B"])
@pytest.mark.parametrize("load", cost.LOADS)
def test_decoding_on_a_tpu_costs_what_live_pages_do(load, model, kind):
    lengths = cost.LOADS[load](np.random.default_rng(0))
    tables = cost.tables_of(lengths, PAGE, np.random.default_rng(1))
    if kind == "layers in a loop":
        tables = tables * 28 + 5
    if kind == "shared prompts":
        tables = shared(tables, lengths)
    model = cost.MODELS[model]
    call = cost.tpu_call(model, tables, lengths[:, None])
    found = cost.tpu_cost(model, call)
    counts = -(-lengths // PAGE)
    assert found.steps == (-(-counts // call.width)).sum() <= counts.sum()
    live = cost.live_bytes(model, lengths, PAGE)
    assert live <= found.fetched <= found.fetched + found.moved <= 1.2 * live
    copied = [call.list_copied_pages(step) for step in range(found.steps)]
    wanted = [tables[row, :count] for row, count in enumerate(counts)]
    np.testing.assert_array_equal(np.concatenate(copied), np.concatenate(wanted))


def test_where_nothing_is_live_there_is_one_step_that_copies_nothing():
    model = cost.MODELS["Qwen3-0.6B"]
    tables = np.zeros((4, 3), np.int32)
    call = cost.tpu_call(model, tables, np.zeros((4, 1), np.int32))
    assert int(call.grid[0]) == 1
    assert call.list_copied_pages(0) == []


@pytest.mark.parametrize("name", cost.MODELS)
def test_reading_on_a_tpu_fetches_the_past_of_each_block_once(name):
    model = cost.MODELS[name]
    block = block_of("tpu", model)
    reads = [(700, 500), (0, 300)]  # tokens before, and tokens to read
    pieces = [(past + i, min(block, n - i)) for past, n in reads for i in range(0, n, block)]
    starts, counts = np.transpose(pieces)
    index = np.arange(block)
    limits = np.where(index < counts[:, None], starts[:, None] + index + 1, 0)
    tables = np.arange(10 * len(pieces)).reshape(-1, 10)
    found = cost.tpu_cost(model, cost.tpu_call(model, tables, limits))
    ends = -(-(starts + counts) // PAGE)
    assert found.fetched == ends.sum() * PAGE * model.cache_bytes // model.num_layers


@pytest.mark.parametrize("copies", ["eager", "on_wait"])
def test_a_kernel_multiplies_no_page_but_live_ones_whenever_copies_come(copies, monkeypatch):
    """Pages of no row and memory that nothing has written are NaN, in Pallas' simulator of TPUs."""
    monkeypatch.setattr(tpu, "STEP_PAGES", 2)
    arrays = random_pages(np.random.default_rng(0), 5, 1, 4, 2, 16, 8, 9)
    _, keys, values, tables, limits = arrays
    limits[2] = 0
    counts = -(-limits[:, 0] // 8)
    live = np.concatenate([tables[row, :count] for row, count in enumerate(counts)])
    wanted, _ = brute_force_pages(*arrays)
    dead = np.setdiff1d(np.arange(len(keys)), live)
    keys[dead] = values[dead] = np.nan
    simulator = pltpu.InterpretParams(dma_execution_mode=copies, uninitialized_memory="nan")
    got, _ = tpu.attend_pages(*map(jnp.asarray, arrays), interpret=simulator)
    np.testing.assert_allclose(got, wanted, atol=2e-6)


def test_a_block_is_larger_where_a_tpu_would_wait_and_its_queries_fit():
    found = {name: block_of("tpu", model) for name, model in cost.MODELS.items()}
    assert found == {"Qwen3-0.6B": 128} | dict.fromkeys(list(cost.MODELS)[1:], 64)
    assert prefill_block_tokens("tpu", 32, 32) == 64  # 16 MiB of a v4 would not hold them
    assert {block_of("gpu", model) for model in cost.MODELS.values()} == {64}
    assert prefill_block_tokens("cpu", 16, 8) == 16
