"""`token_logprobs` against dense arithmetic over one sequence after another."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.models.policy import Model, chunk_width
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


def tiny_model(*, chunk_tokens=12):
    settings = {"num_tokens": NUM_TOKENS, "logits_chunk_tokens": chunk_tokens}
    return Model(TINY, one_device_mesh(), **settings)


def one_micro_batch():
    packed = pack_all(SEQUENCES, BatchShape(num_micro=1, micro_rows=2, row_tokens=96))
    return jax.tree.map(lambda x: jnp.asarray(x[0]), packed.batch)


@jax.jit
def dense(token_ids, temperature):
    return jax.vmap(lambda ids: dense_logprobs(PARAMS, TINY, ids, temperature=temperature))(
        token_ids
    )


def test_logprobs_and_entropies_are_those_of_a_dense_softmax():
    micro = one_micro_batch()
    compute = jax.jit(lambda t: tiny_model().token_logprobs(PARAMS, micro, temperature=t))
    token_ids = np.zeros((len(LENGTHS), max(LENGTHS)), np.int32)
    for row, sequence in zip(token_ids, SEQUENCES, strict=True):
        row[: len(sequence.token_ids)] = sequence.token_ids
    for temperature in (1.0, 0.5, 2.0):
        logprobs, entropies = compute(temperature)
        wanted = dense(token_ids, temperature)
        for index, length in enumerate(LENGTHS):
            for got, want in zip((logprobs, entropies), wanted, strict=True):
                own = gather(micro, got, index)
                assert own[0] == 0
                np.testing.assert_allclose(own, want[index, :length], atol=2e-5, rtol=1e-5)
        assert (np.asarray(entropies)[micro.positions > 0] > 1e-3).all()
        for padding in (logprobs, entropies):
            assert not np.asarray(padding)[micro.segment_ids == 0].any()


def test_chunk_width_changes_nothing():
    micro = one_micro_batch()
    results = []
    for chunk_tokens in (1, 10**6):
        model = tiny_model(chunk_tokens=chunk_tokens)
        results.append(jax.jit(model.token_logprobs)(PARAMS, micro, temperature=1.0))
    for one, other in zip(*results, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-6, rtol=1e-6)


def test_widest_chunk_that_fits():
    assert chunk_width(2, 96, 16) == 8
    assert chunk_width(2, 96, 17) == 8
    assert chunk_width(4, 96, 10**6) == 96
    assert chunk_width(3, 10, 16) == 5
    assert chunk_width(8, 96, 4) == 1  # never less than one token a row


def test_entropies_have_a_gradient_only_where_asked():
    micro = one_micro_batch()

    def total(params):  # the tests of the update compare the gradient that they have where asked
        _, entropies = tiny_model().token_logprobs(
            params, micro, temperature=1.0, entropy_gradient=False
        )
        return (entropies * micro.loss_mask).sum()

    gradient = jax.jit(jax.grad(total))(PARAMS)
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(gradient))
