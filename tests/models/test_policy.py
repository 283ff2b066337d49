"""`compute_token_logprobs` compared with dense arithmetic, one sequence at a time."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.models.attention.reference import XLA
from jaxrl.models.output import assign_slots, gather_tokens, scatter_tokens
from jaxrl.models.policy import Model
from jaxrl.training.packing import BatchShape
from tests.helpers import (
    NUM_TOKENS,
    TINY,
    dense_logprobs,
    gather,
    pack_all,
    random_sequences,
    tiny_params,
)
from tests.toys import one_device_mesh

pytestmark = pytest.mark.usefixtures("quick_compilation")

LENGTHS = [9, 20, 31, 14, 25, 6, 12, 17]
SEQUENCES = random_sequences(LENGTHS)
PARAMS = jax.tree.map(jnp.asarray, tiny_params())


def tiny_model():
    return Model(TINY, one_device_mesh(), XLA, num_tokens=NUM_TOKENS, logits_chunk_tokens=12)


def make_micro_batch():
    packed = pack_all(SEQUENCES, BatchShape(num_micro=1, micro_rows=2, row_tokens=96))
    micro = jax.tree.map(lambda x: jnp.asarray(x[0]), packed.batch)
    return replace(micro, loss_mask=micro.segment_ids > 0)


@jax.jit
def dense(token_ids, temperature):
    return jax.vmap(lambda ids: dense_logprobs(PARAMS, TINY, ids, temperature=temperature))(
        token_ids
    )


def test_logprobs_and_entropies_are_those_of_a_dense_softmax():
    micro = make_micro_batch()
    compute = jax.jit(lambda t: tiny_model().compute_token_logprobs(PARAMS, micro, temperature=t))
    token_ids = np.zeros((len(LENGTHS), max(LENGTHS)), np.int32)
    for row, sequence in zip(token_ids, SEQUENCES, strict=True):
        row[: len(sequence.token_ids)] = sequence.token_ids
    for temperature in (1.0, 0.5):
        logprobs, entropies = compute(temperature)
        expected = dense(token_ids, temperature)
        for index, length in enumerate(LENGTHS):
            for actual, want in zip((logprobs, entropies), expected, strict=True):
                values = gather(micro, actual, index)
                assert values[0] == 0
                np.testing.assert_allclose(values, want[index, :length], atol=2e-5, rtol=1e-5)
        assert (np.asarray(entropies)[micro.positions > 0] > 1e-3).all()
        for padding in (logprobs, entropies):
            assert not np.asarray(padding)[micro.segment_ids == 0].any()


@pytest.mark.parametrize("num_shards", [1, 2])
def test_gathered_tokens_are_scattered_back_to_their_places(num_shards):
    is_selected = jnp.asarray(np.random.default_rng(0).random((4, 9)) < 0.6)
    most = int(is_selected.reshape(num_shards, -1).sum(axis=1).max())
    numbers = jnp.arange(36.0).reshape(num_shards, -1)
    for room in (most, most + 3, 36 // num_shards):
        slots = assign_slots(is_selected, num_shards, room)
        side_by_side = gather_tokens(numbers, slots)
        assert side_by_side.shape == (num_shards, room)
        for shard, row in enumerate(side_by_side):
            mine = np.flatnonzero(is_selected.reshape(num_shards, -1)[shard])
            assert list(row[: len(mine)]) == list(numbers[shard][mine])
        back = scatter_tokens(side_by_side + 1, slots).reshape(4, 9)
        np.testing.assert_array_equal(back, jnp.where(is_selected, numbers.reshape(4, 9) + 1, 0))
        gradient = jax.grad(
            lambda x, p=slots: (scatter_tokens(gather_tokens(x, p), p) * numbers).sum()
        )(numbers)
        np.testing.assert_array_equal(gradient, numbers * is_selected.reshape(num_shards, -1))


def test_only_tokens_with_loss_are_measured():
    whole = make_micro_batch()
    micro = replace(whole, loss_mask=whole.loss_mask & (whole.token_ids % 3 == 0))
    share = float(micro.loss_mask.mean())
    assert 0.2 < share < 0.5
    expected = jax.jit(tiny_model().compute_token_logprobs)(PARAMS, whole, temperature=1.0)
    compute = partial(tiny_model().compute_token_logprobs, temperature=1.0, logit_capacity=2)
    for actual, want in zip(jax.jit(compute)(PARAMS, micro), expected, strict=True):
        np.testing.assert_allclose(actual, want * micro.loss_mask, atol=2e-6, rtol=1e-6)


def test_entropies_have_no_gradient_when_disabled():
    micro = make_micro_batch()

    def total(params):  # the tests of the update check the gradient that entropies can have
        _, entropies = tiny_model().compute_token_logprobs(
            params, micro, temperature=1.0, entropy_gradient=False
        )
        return (entropies * micro.loss_mask).sum()

    gradient = jax.jit(jax.grad(total))(PARAMS)
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(gradient))
