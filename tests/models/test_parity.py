"""Parity with `transformers` on stored models: embeddings, first layer, logits, config.json."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.models import kv_cache
from jaxrl.models.hf_weights import load_hf
from jaxrl.models.llama import LlamaConfig
from jaxrl.models.qwen import QwenConfig
from jaxrl.models.registry import read_architecture
from tests.helpers import full_pass, read_tokens

pytestmark = pytest.mark.usefixtures("quick_compilation")

GOLDEN = Path(__file__).parents[1] / "golden"
NAMES = [
    *("qwen2_old_spelling", "qwen2_tied", "qwen3_biased_bf16", "qwen3_untied"),
    *("qwen2_yarn_old_spelling", "qwen3_yarn"),
    *("llama_tied", "llama3_biased", "mistral_old_spelling"),
]


def load_golden(name):
    """Return a model, its parameters, and the values that transformers computes."""
    folder = GOLDEN / name
    return read_architecture(folder), load_hf(folder), dict(np.load(folder / "golden.npz"))


def as_rows(token_ids):
    positions = jnp.broadcast_to(jnp.arange(token_ids.shape[1]), token_ids.shape)
    return jnp.asarray(token_ids), positions, jnp.ones_like(positions)


@pytest.mark.parametrize("name", NAMES)
def test_packed_embeddings_first_layer_and_logits(name):
    config, params, expected = load_golden(name)
    token_ids, positions, _ = as_rows(expected["token_ids"])
    segment_ids = jnp.array([[1], [2]]) * jnp.ones_like(token_ids)
    row = [x.reshape(1, -1) for x in (token_ids, positions, segment_ids)]
    embeddings = params["embed"]["embedding"][token_ids]
    np.testing.assert_array_equal(embeddings, expected["embeddings"])

    # One layer and a final norm of scale 1, since the reference's hidden state precedes the norm.
    one_layer = {**params, "blocks": jax.tree.map(lambda leaf: leaf[:1], params["blocks"])}
    one_layer["norm"] = {"scale": jnp.ones(config.width)}
    first = full_pass(config, one_layer, *row)
    x = expected["first_layer"]
    normed = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + config.rms_norm_eps)
    np.testing.assert_allclose(first.reshape(normed.shape), normed, atol=1e-5)

    hidden = full_pass(config, params, *row)
    logits = config.unembed(params, hidden, num_tokens=config.vocab_size)
    assert logits.dtype == jnp.float32
    logits = logits.reshape(expected["logits"].shape)
    np.testing.assert_allclose(logits, expected["logits"], atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_prefill_in_two_chunks_then_decode(name):
    # 7 tokens, 5 more (padded to 8), and the last 8 one by one, over shuffled pages.
    config, params, expected = load_golden(name)
    token_ids = jnp.asarray(expected["token_ids"])
    B, T = token_ids.shape
    weights = config.prepare_decoding_weights(params, jnp.float32)
    tables = jnp.arange(B * 5)[::-1].reshape(B, 5)
    cache = kv_cache.allocate_pages(config, B * 5, 4, jnp.float32)
    read = jax.jit(read_tokens, static_argnums=0)

    for start, end, width in [(0, 7, 7), (7, 12, 8), *((at, at + 1, 1) for at in range(12, T))]:
        chunk = jnp.pad(token_ids[:, start:end], ((0, 0), (0, width - end + start)))
        counts = jnp.full(B, end - start)
        hidden, cache = read(config, weights, cache, tables, jnp.full(B, start), counts, chunk)
        last = hidden[:, end - start - 1]
        logits = config.unembed(weights, last, num_tokens=config.vocab_size)
        np.testing.assert_allclose(logits, expected["logits"][:, end - 1], atol=1e-4, rtol=0)


def test_bfloat16_weights_are_loaded_in_float32():
    params = load_hf(GOLDEN / "qwen3_biased_bf16")
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(jnp.float32)}


def read_fields(name, **changes):
    fields = json.loads((GOLDEN / name / "config.json").read_text())
    return {key: value for key, value in (fields | changes).items() if value is not None}


def test_frequencies_of_scaled_rope():
    # The last bit of a float32 is 1.2e-7; 32768 positions rotate by up to as many radians.
    for case in json.loads((GOLDEN / "rope_scaling.json").read_text()):
        config = QwenConfig.from_dict(
            read_fields(
                "qwen3_untied",
                head_dim=case["head_dim"],
                max_position_embeddings=40960,
                rope_parameters=case["rope_parameters"],
            )
        )
        scaling = config.rope_scaling
        actual = scaling.compute_frequencies(config.head_dim, config.rope_theta)
        np.testing.assert_allclose(actual, case["frequencies"], rtol=3e-7)
        assert scaling.attention_factor == pytest.approx(case["attention_factor"], rel=1e-12)
        assert QwenConfig.from_dict(config.to_hf_config()) == config
        only_old = {k: v for k, v in config.to_hf_config().items() if k != "rope_parameters"}
        assert QwenConfig.from_dict(only_old) == config


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1000}, 4096),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}, 16384),
        ({"rope_type": "yarn", "factor": 4.0}, 16384),
        (
            {"rope_type": "linear", "factor": 4.0},
            4096,
        ),  # max_position_embeddings is the scaled length
    ],
)
def test_longest_sequence_of_scaled_rope(rope, expected):
    fields = read_fields("qwen3_untied", max_position_embeddings=4096, rope_parameters=rope)
    config = QwenConfig.from_dict(fields)
    assert config.max_positions == expected
    assert QwenConfig.from_dict(config.to_hf_config()).max_positions == expected


def test_null_equals_absent():
    fields = read_fields("qwen2_old_spelling")
    names = ["rope_theta", "quantization_config", "rope_scaling", "rms_norm_eps", "head_dim"]
    absent = {name: value for name, value in fields.items() if name not in names}
    config = QwenConfig.from_dict(absent | dict.fromkeys(names))
    assert config == QwenConfig.from_dict(absent)
    assert config.rope_theta == 10_000.0
    scaled = absent | {"rope_scaling": {"rope_theta": None, "partial_rotary_factor": None}}
    assert QwenConfig.from_dict(scaled) == config


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "dynamic"),
        ({"rope_scaling": {"type": "yarn"}}, "factor"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "'linear' has .* 0.5.* at least 1"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "RoPE by layer type"),
        ({"use_sliding_window": True}, "sliding-window attention"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window attention"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": "64"}, "hidden_size"),
    ],
)
def test_unsupported_fields_are_refused(tmp_path, changes, field):
    (tmp_path / "config.json").write_text(json.dumps(read_fields("qwen3_untied", **changes)))
    with pytest.raises(ValueError, match=field) as error:
        read_architecture(tmp_path)
    assert str(tmp_path / "config.json") in str(error.value)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"mlp_bias": True}, "mlp_bias is not supported"),
        ({"pretraining_tp": 2}, "pretraining_tp 2 is not supported"),
        ({"hidden_size": 34, "head_dim": 6}, "hidden size"),
    ],
)
def test_unsupported_fields_of_llama_are_refused(changes, field):
    with pytest.raises(ValueError, match=field):
        LlamaConfig.from_dict(read_fields("llama_tied") | changes, source="here")


def test_only_a_sliding_window_of_the_longest_sequence_is_supported():
    # The longest sequence has 4096 tokens. The default of transformers is a window of 4096.
    without = read_fields("mistral_old_spelling")
    fields = {**without, "sliding_window": None}
    model = LlamaConfig.from_dict(fields)
    assert LlamaConfig.from_dict(without) == model
    assert LlamaConfig.from_dict(fields | {"sliding_window": 4096}) == model
    longer = {"max_position_embeddings": 8192}
    assert LlamaConfig.from_dict(fields | longer).max_positions == 8192
    for changes in (longer, {"sliding_window": 4095}):
        with pytest.raises(ValueError, match=r"a sliding window of 409\d tokens"):
            LlamaConfig.from_dict(without | changes)


def test_llama_derives_missing_head_sizes():
    # The default LlamaConfig of transformers has 32 heads of 128 values; other sizes differ.
    fields = read_fields("llama_tied", head_dim=None, num_key_value_heads=None)
    model = LlamaConfig.from_dict(fields)
    assert (model.num_heads, model.num_kv_heads, model.head_dim) == (6, 6, 6)


def test_biases_of_llama_are_on_all_of_attention():
    fields = read_fields("llama3_biased")
    biased = {f"model.layers.{{}}.self_attn.{name}_proj.bias" for name in "qkvo"}
    assert biased <= set(LlamaConfig.from_dict(fields).get_hf_names().values())
    none = LlamaConfig.from_dict(fields | {"attention_bias": False}).get_hf_names().values()
    assert not [name for name in none if name.endswith("bias")]
    # Mistral has no such field.
    mistral = fields | {"model_type": "mistral", "sliding_window": None}
    assert not LlamaConfig.from_dict(mistral).qkv_bias


def test_a_missing_or_damaged_config_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        read_architecture(tmp_path)
    for text in ('{"model_type": "qwen3",', "[]"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=r"config\.json"):
            read_architecture(tmp_path)
