"""What the gradient of packed rows costs with this attention: memory, and precision of products."""

import jax
import jax.numpy as jnp
import pytest

from jaxrl.models.policy import Model
from jaxrl.types import Batch
from tests.helpers import NUM_TOKENS, TINY
from tests.toys import one_device_mesh

pytestmark = pytest.mark.usefixtures("quick_compilation")


def gradient_of(row_tokens, **settings):
    """The gradient of a row's log-probabilities, and the shapes of what it is taken of."""
    model = Model(TINY, one_device_mesh(), num_tokens=NUM_TOKENS, **settings)
    ints, floats = (
        jax.ShapeDtypeStruct((1, row_tokens), kind) for kind in (jnp.int32, jnp.float32)
    )
    batch = Batch(
        token_ids=ints,
        segment_ids=ints,
        positions=ints,
        loss_mask=jax.ShapeDtypeStruct((1, row_tokens), jnp.bool_),
        token_weights=floats,
        advantages=floats,
        rollout_logprobs=floats,
    )

    def loss(params, batch):
        logprobs, entropies = model.token_logprobs(
            params, batch, temperature=1.0, entropy_gradient=True
        )
        return (logprobs * batch.advantages + entropies).sum()

    return jax.jit(jax.grad(loss)), TINY.abstract_params(), batch


@pytest.mark.minutes
def test_temporaries_grow_with_the_tokens_of_a_row():
    def per_token(row_tokens):
        gradient, *shapes = gradient_of(row_tokens, logits_chunk_tokens=256)
        sizes = gradient.lower(*shapes).compile().memory_analysis()
        return sizes.temp_size_in_bytes / row_tokens

    assert per_token(32_768) < 1.1 * per_token(4096)


def products(jaxpr):
    """All products of a program, those of its loops and inner functions included."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield equation
        is_inner = lambda value: hasattr(value, "eqns") or hasattr(value, "jaxpr")  # noqa: E731
        for value in jax.tree.leaves(equation.params, is_leaf=is_inner):
            if is_inner(value):
                yield from products(getattr(value, "jaxpr", value))


def test_no_product_of_the_bfloat16_gradient_takes_float32():
    # Without exception: where results add up over many tokens, the product itself gives float32.
    gradient, *shapes = gradient_of(200, dtype=jnp.bfloat16)
    found = list(products(jax.make_jaxpr(gradient)(*shapes).jaxpr))
    assert len(found) > 40
    for equation in found:
        assert {operand.aval.dtype for operand in equation.invars} == {jnp.dtype("bfloat16")}, (
            equation
        )
    heads = [one for one in found if one.invars[0].aval.ndim == 4]
    assert len(heads) == 2 * (2 + 2) + 2 * 5  # forward, again for the gradient, and that
    assert {str(one.outvars[0].aval.dtype) for one in heads} == {"float32"}
