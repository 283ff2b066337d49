"""Memory and product precision of the gradient of packed rows."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from jaxrl.models.attention.reference import XLA
from jaxrl.models.policy import Model
from tests.helpers import NUM_TOKENS, TINY
from tests.programs import CONFIG, make_batch, products, trainer_programs
from tests.toys import one_device_mesh

pytestmark = pytest.mark.usefixtures("quick_compilation")


def lower_gradient(row_tokens, **settings):
    """Return the gradient of a row's log-probabilities, and the shapes of its arguments."""
    model = Model(TINY, one_device_mesh(), XLA, num_tokens=NUM_TOKENS, **settings)
    batch = make_batch((1, row_tokens))

    def loss(params, batch):
        logprobs, entropies = model.compute_token_logprobs(
            params, batch, temperature=1.0, entropy_gradient=True
        )
        return (logprobs * batch.advantages + entropies).sum()

    return jax.jit(jax.grad(loss)), TINY.make_abstract_params(), batch


@pytest.mark.minutes
def test_update_memory_grows_with_tokens_and_with_the_logits_of_a_chunk():
    def temporaries(row_tokens, vocab_size=64):
        config = replace(CONFIG, vocab_size=vocab_size, max_positions=2**16)
        settings = {"row_tokens": row_tokens, "dtype": jnp.float32, "logits_chunk_tokens": 256}
        function, arguments = trainer_programs(config, rows=1, **settings)["update"]
        program = jax.jit(function, donate_argnums=1).lower(*arguments).compile()
        return program.memory_analysis().temp_size_in_bytes

    short, long = temporaries(4096), temporaries(32_768)
    assert long / 32_768 < 1.1 * short / 4096
    # More ids cost the same for any number of tokens: a chunk's logits, and the tables.
    assert temporaries(32_768, 8192) - long < 1.1 * (temporaries(4096, 8192) - short)


def test_no_product_of_the_bfloat16_gradient_takes_float32():
    # Where results are summed over many tokens, the product itself returns float32.
    gradient, *shapes = lower_gradient(200, dtype=jnp.bfloat16)
    equations = products(jax.make_jaxpr(gradient)(*shapes).jaxpr)
    assert len(equations) > 40
    for equation in equations:
        assert {operand.aval.dtype for operand in equation.invars} == {jnp.dtype("bfloat16")}, (
            equation
        )
    heads = [equation for equation in equations if equation.invars[0].aval.ndim == 4]
    assert len(heads) == 2 * (2 + 2) + 2 * 5  # forward, again for the gradient, and the gradient
    assert {str(equation.outvars[0].aval.dtype) for equation in heads} == {"float32"}
