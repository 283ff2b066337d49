import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.runtime.compilation import CompiledFunction


def double(x):
    return x * 2


def test_each_variant_is_compiled_once():
    compiled = CompiledFunction(double, name="double", variants=[2, 3])
    for size in (2, 3, 2, 3, 2):
        np.testing.assert_array_equal(compiled(jnp.ones(size), variant=size), np.full(size, 2.0))
        assert compiled.num_traces <= 2
    assert compiled.num_traces == 2


def test_without_variants_there_is_one_shape():
    compiled = CompiledFunction(double, name="double")
    assert compiled.num_traces == 0
    compiled(jnp.ones(2))
    compiled(jnp.zeros(2))
    assert compiled.num_traces == 1
    with pytest.raises(
        RuntimeError, match=r"double was compiled for other arguments of the variant \(\)"
    ):
        compiled(jnp.ones(3))


def test_a_variant_outside_the_set_is_an_error():
    compiled = CompiledFunction(double, name="double", variants=[2, 3])
    with pytest.raises(RuntimeError, match=r"the shapes 4, outside its set \[2, 3\]"):
        compiled(jnp.ones(4), variant=4)
    with pytest.raises(RuntimeError, match=r"the shapes \(\), outside"):
        compiled(jnp.ones(2))
    assert compiled.num_traces == 0


@pytest.mark.parametrize("other", [jnp.ones(3), jnp.ones(2, jnp.int32), jnp.ones((2, 1))])
def test_arguments_that_change_within_a_variant_are_an_error(other):
    compiled = CompiledFunction(double, name="double", variants=["a", "b"])
    compiled(jnp.ones(2), variant="a")
    with pytest.raises(RuntimeError, match="compiled for other arguments of the variant a"):
        compiled(other, variant="a")
    # The shape it was compiled for still works.
    np.testing.assert_array_equal(compiled(jnp.ones(2), variant="a"), [2.0, 2.0])


def test_what_jax_takes_for_its_context_may_change_between_calls():
    """It does when a module with settings of its own is imported: JAX 0.12's Pallas is one."""
    compiled = CompiledFunction(double, name="double")
    compiled(jnp.ones(2))
    with jax.default_matmul_precision("float32"):
        np.testing.assert_array_equal(compiled(jnp.ones(2)), [2.0, 2.0])
    assert compiled.num_traces == 1


def test_donated_arguments_are_gone():
    compiled = CompiledFunction(double, name="double", donate_argnums=(0,))
    x = jnp.ones(2)
    compiled(x)
    assert x.is_deleted()


def test_lowering_counts_as_no_compilation():
    compiled = CompiledFunction(double, name="double")
    text = compiled.lower(jax.ShapeDtypeStruct((5,), jnp.float32)).as_text()
    assert "5xf32" in text
    assert compiled.num_traces == 0
    compiled(jnp.ones(2))
    assert compiled.num_traces == 1
