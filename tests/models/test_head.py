"""The output layer in float32 beside a model in bfloat16: `config.model.head_dtype`."""

import dataclasses
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.builders.method import build_policy_architecture
from jaxrl.extras.lora.adapter import Adapter, find_targets
from jaxrl.models.attention.reference import XLA
from jaxrl.models.params import merge_params
from jaxrl.models.policy import Model
from jaxrl.training.packing import BatchShape
from tests.extending.my_architecture import Pocket
from tests.helpers import (
    NUM_TOKENS,
    ROOT,
    TINY,
    TINY_MOE,
    full_pass,
    gather,
    pack_all,
    random_sequences,
    settings,
    tiny_params,
    with_devices,
)
from tests.toys import one_device_mesh
from tests.vision import golden

pytestmark = pytest.mark.usefixtures("quick_compilation")

BFLOAT16, FLOAT32 = jnp.dtype("bfloat16"), jnp.dtype("float32")
HIDDEN = jnp.asarray(np.random.default_rng(0).normal(size=(5, TINY.width)), jnp.bfloat16)


def model(*, tied, head="float32"):
    plain = dataclasses.replace(TINY, tie_embeddings=tied)
    return plain.with_head_dtype(head) if head else plain


def drawn(config):
    return jax.tree.map(jnp.asarray, tiny_params(config))


def table_of(config, params):
    """The output layer's table `[D, V]` as it is trained, float64."""
    head = params["embed"]["embedding"].T if config.tie_embeddings else params["lm_head"]["kernel"]
    return np.asarray(head, np.float64)


def logits(config, weights, hidden=HIDDEN):
    return np.asarray(config.unembed(weights, hidden, num_tokens=config.vocab_size), np.float64)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("how", ["weights_for_decoding", "weights_for_training"])
def test_logits_are_those_of_the_float32_table(tied, how):
    distances = {}
    for head in ("", "float32"):
        config = model(tied=tied, head=head)
        params = drawn(config)
        wanted = np.asarray(HIDDEN, np.float64) @ table_of(config, params)
        found = logits(config, getattr(config, how)(params, jnp.bfloat16))
        distances[head] = np.abs(found - wanted).max() / np.abs(wanted).max()
    # A sum of 64 products in float32; a table rounded to 8 bits.
    assert distances["float32"] < 1e-6
    assert distances[""] > 1e-3


@pytest.mark.parametrize("tied", [False, True])
def test_only_the_output_table_of_the_sampler_is_float32(tied):
    config = model(tied=tied)
    params = drawn(config)
    weights = config.weights_for_decoding(params, jnp.bfloat16)
    head = weights.pop("lm_head")["kernel"]
    assert head.dtype == FLOAT32
    np.testing.assert_array_equal(head, table_of(config, params))
    assert {leaf.dtype for leaf in jax.tree.leaves(weights)} == {BFLOAT16}
    # Its axes are known, so that a mesh can split it.
    assert config.decode_axes()["lm_head"] == {"kernel": ("width", "vocab")}


def test_a_tied_model_gets_its_own_table_on_accelerators_too(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    for head, names in (("", {"embed"}), ("float32", {"embed", "lm_head"})):
        config = model(tied=True, head=head)
        weights = config.weights_for_decoding(drawn(config), jnp.bfloat16)
        assert weights.keys() - {"blocks", "norm"} == names


@pytest.mark.parametrize("tied", [False, True])
def test_gradients_are_those_of_float32_products(tied):
    of_logits = np.random.default_rng(1).normal(size=(5, TINY.vocab_size)).astype(np.float32)
    distances = {}
    for head in ("", "float32"):
        config = model(tied=tied, head=head)
        params = drawn(config)

        def products(params, hidden, config=config):
            weights = config.weights_for_training(params, jnp.bfloat16)
            return config.unembed(weights, hidden, num_tokens=config.vocab_size)

        of_params, of_hidden = jax.vjp(products, params, HIDDEN)[1](jnp.asarray(of_logits))
        assert of_hidden.dtype == BFLOAT16
        wanted = of_logits.astype(np.float64) @ table_of(config, params).T
        # By hand in float64, and then rounded once to 8 bits: by at most 2 ** -8.
        near = np.abs(np.asarray(of_hidden, np.float64) - wanted) <= np.abs(wanted) * 2**-7.99
        assert near.all() == bool(head)
        wanted = np.asarray(HIDDEN, np.float64).T @ of_logits
        got = table_of(config, of_params)
        distances[head] = np.abs(got - wanted).max() / np.abs(wanted).max()
    assert distances["float32"] < 1e-6
    assert distances[""] > 1e-4


def test_log_probabilities_of_the_trainer_come_from_float32_logits():
    """Of hidden states in bfloat16, as the layers give them, by hand in float64."""
    sequences = random_sequences([9, 20, 14])
    packed = pack_all(sequences, BatchShape(num_micro=1, micro_rows=1, row_tokens=48))
    micro = jax.tree.map(lambda x: jnp.asarray(x[0]), packed.batch)
    distances = {}
    for head in ("", "float32"):
        config = model(tied=True, head=head)
        params = drawn(config)
        policy = Model(
            config,
            one_device_mesh(),
            XLA,
            num_tokens=NUM_TOKENS,
            dtype=jnp.bfloat16,
            remat="none",
            logits_chunk_tokens=12,
        )
        rows = micro.token_ids, micro.positions, micro.segment_ids
        weights = config.weights_for_training(params, jnp.bfloat16)
        hidden = np.asarray(jax.jit(full_pass, static_argnums=0)(config, weights, *rows))
        assert hidden.dtype == BFLOAT16
        scores = (hidden.astype(np.float64) @ table_of(config, params))[0, :, :NUM_TOKENS]
        scores -= np.log(np.exp(scores).sum(axis=-1, keepdims=True))
        targets = np.asarray(micro.token_ids)[0, 1:]
        wanted = (
            jnp.zeros(micro.token_ids.shape).at[0, 1:].set(scores[np.arange(len(targets)), targets])
        )
        got, _ = jax.jit(policy.token_logprobs)(params, micro, temperature=1.0)
        farthest = 0.0
        for index, sequence in enumerate(sequences):
            mask = sequence.loss_mask & (np.arange(len(sequence.token_ids)) > 0)
            gap = (gather(micro, got, index) - gather(micro, wanted, index))[mask]
            farthest = max(farthest, np.abs(gap).max())
        distances[head] = farthest
    assert distances["float32"] < 2e-5
    assert distances[""] > 1e-3


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_in_float32_computes_the_same_bit_for_bit(tied):
    hidden, found = HIDDEN.astype(jnp.float32), []
    for head in ("", "float32"):
        config = model(tied=tied, head=head)
        params = drawn(config)
        for weights in (
            config.weights_for_decoding(params, jnp.float32),
            config.weights_for_training(params, jnp.float32),
        ):
            found.append(logits(config, weights, hidden))
        loss = lambda p, c=config: (c.unembed(p, hidden, num_tokens=254) ** 3).sum()  # noqa: E731
        found.append(jax.tree.leaves(jax.grad(loss)(params)))
    for one, other in zip(found[:3], found[3:], strict=True):
        jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.parametrize("base_dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("is_merged", [False, True])
def test_with_an_adapter_the_frozen_table_is_multiplied_in_float32(base_dtype, tied, is_merged):
    inside = model(tied=tied)
    adapter = Adapter(
        model=inside,
        rank=2,
        alpha=4.0,
        targets=find_targets(inside, ["q"]),
        base_dtype=base_dtype,
        other_dtype="bfloat16",
        is_merged=is_merged,
    )
    own, base = adapter.param_specs()
    shapes, whole = base.abstract_params(), {}
    rng = np.random.default_rng(0)
    draw = lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype)  # noqa: E731
    whole = merge_params(jax.tree.map(draw, shapes), jax.tree.map(draw, own.abstract_params()))
    wanted = np.asarray(HIDDEN, np.float64) @ table_of(inside, whole)
    for weights in (
        adapter.weights_for_training(whole, jnp.bfloat16),
        adapter.weights_for_decoding(whole, jnp.bfloat16),
    ):
        np.testing.assert_allclose(logits(adapter, weights), wanted, atol=1e-5 * abs(wanted).max())
    assert weights["lm_head"]["kernel"].dtype == FLOAT32


@pytest.mark.parametrize("name", ["experts", "qwen2_5_vl", "qwen3_vl"])
def test_experts_and_vision_have_it(name):
    config = TINY_MOE if name == "experts" else golden(name)[0]
    params = drawn(config) if name == "experts" else golden(name)[1]
    config = build_policy_architecture(
        settings(**{"model.dtype": "bfloat16", "model.head_dtype": "float32"}), config
    )
    hidden = jnp.asarray(np.random.default_rng(0).normal(size=(5, config.width)), jnp.bfloat16)
    wanted = np.asarray(hidden, np.float64) @ table_of(config, params)
    for how in ("weights_for_decoding", "weights_for_training"):
        found = logits(config, getattr(config, how)(params, jnp.bfloat16), hidden)
        seen = found > -1e30  # vision has ids that cannot be written
        assert seen.mean() > 0.9
        assert np.abs(found - wanted)[seen].max() < 1e-5 * np.abs(wanted).max()


def test_an_architecture_without_it_is_refused_by_name():
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


@pytest.fixture(scope="module")
def on_two_devices(tmp_path_factory):
    """What `head_worker` measures, in its own process."""
    path = tmp_path_factory.mktemp("head") / "report.json"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", **with_devices(2)}
    environment["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    command = [sys.executable, "-m", "tests.models.head_worker", str(path)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return json.loads(path.read_text())


@pytest.mark.minutes
@pytest.mark.parametrize("axis", ["tensor", "fsdp"])
@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_two_devices_compute_what_one_does(on_two_devices, axis, kind):
    found = on_two_devices[f"{axis} {kind}"]
    # The sampler's table: over the vocabulary with `tensor`, else whole.
    assert found["head"] == {"dtype": "float32", "part": [64, 127 if axis == "tensor" else 254]}
    assert found["logits_gap"] < 2e-5
    assert found["logprobs_gap"] < 2e-5
    assert found["gradient_gap"] < 1e-5
