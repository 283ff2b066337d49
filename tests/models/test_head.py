"""A float32 output layer of a bfloat16 model: `config.model.head_dtype`."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.builders.method import build_policy_architecture
from jaxrl.extras.lora.adapter import Adapter, find_targets
from jaxrl.models.params import merge_params
from tests.extending.my_architecture import Pocket
from tests.helpers import (
    TINY,
    TINY_MOE,
    settings,
    tiny_params,
)
from tests.vision import golden

pytestmark = pytest.mark.usefixtures("quick_compilation")

BFLOAT16, FLOAT32 = jnp.dtype("bfloat16"), jnp.dtype("float32")
HIDDEN = jnp.asarray(np.random.default_rng(0).normal(size=(5, TINY.width)), jnp.bfloat16)


def build_config(*, tied, head="float32"):
    config = dataclasses.replace(TINY, tie_embeddings=tied)
    return config.with_head_dtype(head) if head else config


def draw_params(config):
    return jax.tree.map(jnp.asarray, tiny_params(config))


def output_table(config, params):
    """Return the output layer's trained table `[D, V]` in float64."""
    head = params["embed"]["embedding"].T if config.tie_embeddings else params["lm_head"]["kernel"]
    return np.asarray(head, np.float64)


def logits(config, weights, hidden=HIDDEN):
    out = config.unembed(weights, hidden, num_tokens=config.vocab_size)
    assert out.dtype == FLOAT32
    return np.asarray(out, np.float64)


@pytest.mark.parametrize(
    ("tied", "method"), [(False, "prepare_decoding_weights"), (True, "prepare_training_weights")]
)
def test_logits_are_products_with_the_float32_table(tied, method):
    distances = {}
    for head in ("", "float32"):
        config = build_config(tied=tied, head=head)
        params = draw_params(config)
        expected = np.asarray(HIDDEN, np.float64) @ output_table(config, params)
        actual = logits(config, getattr(config, method)(params, jnp.bfloat16))
        distances[head] = np.abs(actual - expected).max() / np.abs(expected).max()
    # A sum of 64 products in float32, or of a table rounded to 8 bits.
    assert distances["float32"] < 1e-6
    assert distances[""] > 1e-3


@pytest.mark.parametrize("tied", [False, True])
def test_only_the_output_table_of_the_sampler_is_float32(tied, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")  # where tied tables are shared
    config = build_config(tied=tied)
    params = draw_params(config)
    weights = config.prepare_decoding_weights(params, jnp.bfloat16)
    head = weights.pop("lm_head")["kernel"]
    assert head.dtype == FLOAT32
    np.testing.assert_array_equal(head, output_table(config, params))
    assert {leaf.dtype for leaf in jax.tree.leaves(weights)} == {BFLOAT16}
    assert config.get_decoding_axes()["lm_head"] == {"kernel": ("width", "vocab")}


@pytest.mark.parametrize("tied", [False, True])
def test_gradients_are_those_of_float32_products(tied):
    logits_gradient = np.random.default_rng(1).normal(size=(5, TINY.vocab_size)).astype(np.float32)
    distances = {}
    for head in ("", "float32"):
        config = build_config(tied=tied, head=head)
        params = draw_params(config)

        def products(params, hidden, config=config):
            weights = config.prepare_training_weights(params, jnp.bfloat16)
            return config.unembed(weights, hidden, num_tokens=config.vocab_size)

        params_gradient, hidden_gradient = jax.vjp(products, params, HIDDEN)[1](
            jnp.asarray(logits_gradient)
        )
        assert hidden_gradient.dtype == BFLOAT16
        expected = logits_gradient.astype(np.float64) @ output_table(config, params).T
        # Computed in float64 and rounded once to 8 bits: off by at most 2 ** -8.
        near = (
            np.abs(np.asarray(hidden_gradient, np.float64) - expected)
            <= np.abs(expected) * 2**-7.99
        )
        assert near.all() == bool(head)
        expected = np.asarray(HIDDEN, np.float64).T @ logits_gradient
        actual = output_table(config, params_gradient)
        distances[head] = np.abs(actual - expected).max() / np.abs(expected).max()
    assert distances["float32"] < 1e-6
    assert distances[""] > 1e-4


def test_head_dtype_changes_nothing_in_a_float32_model():
    hidden = HIDDEN.astype(jnp.float32)
    plain, wide = (build_config(tied=True, head=head) for head in ("", "float32"))
    params = draw_params(plain)
    for method in ("prepare_decoding_weights", "prepare_training_weights"):
        actual, expected = (
            logits(config, getattr(config, method)(params, jnp.float32), hidden)
            for config in (wide, plain)
        )
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize(
    ("base_dtype", "tied", "is_merged"),
    [("float32", True, True), ("bfloat16", False, False), ("int8", True, False)],
)
def test_the_frozen_table_below_an_adapter_is_multiplied_in_float32(base_dtype, tied, is_merged):
    config = build_config(tied=tied)
    adapter = Adapter(
        model=config,
        rank=2,
        alpha=4.0,
        targets=find_targets(config, ["q"]),
        base_dtype=base_dtype,
        other_dtype="bfloat16",
        is_merged=is_merged,
    )
    rng = np.random.default_rng(0)
    draw = lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype)  # noqa: E731
    trained, base = (
        jax.tree.map(draw, part.make_abstract_params()) for part in adapter.make_param_specs()
    )
    params = merge_params(base, trained)
    expected = np.asarray(HIDDEN, np.float64) @ output_table(config, params)
    for method in ("prepare_training_weights", "prepare_decoding_weights"):
        weights = getattr(adapter, method)(params, jnp.bfloat16)
        np.testing.assert_allclose(
            logits(adapter, weights), expected, atol=1e-5 * abs(expected).max()
        )
    assert weights["lm_head"]["kernel"].dtype == FLOAT32


@pytest.mark.parametrize("name", ["experts", "qwen2_5_vl", "qwen3_vl"])
def test_experts_and_vision_models_support_it(name):
    config, params = (TINY_MOE, draw_params(TINY_MOE)) if name == "experts" else golden(name)[:2]
    config = build_policy_architecture(
        settings(**{"model.dtype": "bfloat16", "model.head_dtype": "float32"}), config
    )
    hidden = jnp.asarray(np.random.default_rng(0).normal(size=(5, config.width)), jnp.bfloat16)
    expected = np.asarray(hidden, np.float64) @ output_table(config, params)
    for method in ("prepare_decoding_weights", "prepare_training_weights"):
        actual = logits(config, getattr(config, method)(params, jnp.bfloat16), hidden)
        is_allowed = actual > -1e30  # vision models mask some ids
        assert is_allowed.mean() > 0.9
        assert np.abs(actual - expected)[is_allowed].max() < 1e-5 * np.abs(expected).max()


def test_an_architecture_without_it_is_refused():
    pocket = Pocket(
        vocab_size=960, width=32, num_layers=2, num_heads=4, head_dim=8, max_positions=256
    )
    config = settings(**{"model.dtype": "bfloat16"})
    assert build_policy_architecture(config, pocket) is pocket
    config.model.head_dtype = "float32"
    with pytest.raises(
        ValueError, match=r"model\.head_dtype is 'float32', .* Pocket supports .*''"
    ):
        build_policy_architecture(config, pocket)
