"""Our arithmetic against `transformers`: embeddings, first layer, logits of the stored models."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.models import kv_cache
from jaxrl.models.attention.reference import MASK_VALUE
from jaxrl.models.hf_weights import load_hf
from jaxrl.models.llama import LlamaConfig
from jaxrl.models.qwen import QwenConfig
from jaxrl.models.registry import read_architecture, resolve_architecture
from tests.helpers import full_pass, read_tokens

pytestmark = pytest.mark.usefixtures("quick_compilation")

GOLDEN = Path(__file__).parents[1] / "golden"
NAMES = [
    *("qwen2_old_spelling", "qwen2_tied", "qwen3_biased_bf16", "qwen3_untied"),
    *("qwen2_yarn_old_spelling", "qwen3_yarn"),
    *("llama_tied", "llama3_biased", "mistral_old_spelling"),
]


@pytest.fixture(params=NAMES)
def golden(request):
    folder = GOLDEN / request.param
    return read_architecture(folder), load_hf(folder), dict(np.load(folder / "golden.npz"))


def packed(token_ids):
    positions = jnp.broadcast_to(jnp.arange(token_ids.shape[1]), token_ids.shape)
    return jnp.asarray(token_ids), positions, jnp.ones_like(positions)


def test_embeddings_first_layer_then_logits(golden):
    config, params, wanted = golden
    token_ids, positions, segment_ids = packed(wanted["token_ids"])
    embeddings = params["embed"]["embedding"][token_ids]
    np.testing.assert_array_equal(embeddings, wanted["embeddings"])

    # One layer and a final norm of scale 1: the reference's hidden state is from before the norm.
    one_layer = {**params, "blocks": jax.tree.map(lambda leaf: leaf[:1], params["blocks"])}
    one_layer["norm"] = {"scale": jnp.ones(config.width)}
    first = full_pass(config, one_layer, token_ids, positions, segment_ids)
    x = wanted["first_layer"]
    normed = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + config.rms_norm_eps)
    np.testing.assert_allclose(first, normed, atol=1e-5)

    hidden = full_pass(config, params, token_ids, positions, segment_ids)
    logits = config.unembed(params, hidden, num_tokens=config.vocab_size)
    np.testing.assert_allclose(logits, wanted["logits"], atol=1e-4, rtol=0)
    assert logits.dtype == jnp.float32


def test_two_sequences_packed_in_one_row(golden):
    config, params, wanted = golden
    token_ids, positions, _ = packed(wanted["token_ids"])
    segment_ids = jnp.array([[1], [2]]) * jnp.ones_like(token_ids)
    row = (x.reshape(1, -1) for x in (token_ids, positions, segment_ids))
    hidden = full_pass(config, params, *row)
    logits = config.unembed(params, hidden, num_tokens=config.vocab_size)
    np.testing.assert_allclose(
        logits.reshape(wanted["logits"].shape), wanted["logits"], atol=1e-4, rtol=0
    )


def test_two_chunks_then_one_by_one(golden):
    # 7 tokens, 5 more behind them (padded to 8), and the last 8 one by one, over shuffled pages.
    config, params, wanted = golden
    token_ids = jnp.asarray(wanted["token_ids"])
    B, T = token_ids.shape
    weights = config.weights_for_decoding(params, jnp.float32)
    tables = jnp.arange(B * 5)[::-1].reshape(B, 5)
    cache = kv_cache.allocate(config, B * 5, 4, jnp.float32)
    read = jax.jit(read_tokens, static_argnums=0)

    for start, end, width in [(0, 7, 7), (7, 12, 8), *((at, at + 1, 1) for at in range(12, T))]:
        chunk = jnp.pad(token_ids[:, start:end], ((0, 0), (0, width - end + start)))
        counts = jnp.full(B, end - start)
        hidden, cache = read(config, weights, cache, tables, jnp.full(B, start), counts, chunk)
        last = hidden[:, end - start - 1]
        logits = config.unembed(weights, last, num_tokens=config.vocab_size)
        np.testing.assert_allclose(logits, wanted["logits"][:, end - 1], atol=1e-4, rtol=0)


def test_padded_vocabulary_is_masked():
    folder = GOLDEN / "qwen2_old_spelling"
    config, params = read_architecture(folder), load_hf(folder)
    wanted = np.load(folder / "golden.npz")
    hidden = full_pass(config, params, *packed(wanted["token_ids"]))
    logits = config.unembed(params, hidden, num_tokens=300)
    np.testing.assert_allclose(logits[..., :300], wanted["logits"][..., :300], atol=1e-4, rtol=0)
    assert (logits[..., 300:] == MASK_VALUE).all()


def test_bfloat16_weights_are_computed_in_float32():
    params = load_hf(GOLDEN / "qwen3_biased_bf16")
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(jnp.float32)}


def fields_of(name, **changes):
    fields = json.loads((GOLDEN / name / "config.json").read_text())
    return {key: value for key, value in (fields | changes).items() if value is not None}


def test_config_in_old_and_new_spelling():
    old = fields_of("qwen2_old_spelling")
    assert old["rope_theta"] == 50_000.0
    assert "rope_parameters" not in old
    new = fields_of(
        "qwen2_old_spelling",
        rope_theta=None,
        torch_dtype=None,
        dtype="float32",
        rope_parameters={"rope_type": "default", "rope_theta": 50_000.0},
    )
    assert QwenConfig.from_dict(old) == QwenConfig.from_dict(new)
    assert QwenConfig.from_dict(old).rope_theta == 50_000.0


def test_frequencies_of_scaled_rope():
    # One bit of a float32 is a difference of 1.2e-7; 32768 positions turn by up to as many radians.
    for case in json.loads((GOLDEN / "rope_scaling.json").read_text()):
        config = QwenConfig.from_dict(
            fields_of(
                "qwen3_untied",
                head_dim=case["head_dim"],
                max_position_embeddings=40960,
                rope_parameters=case["rope_parameters"],
            )
        )
        scaling = config.rope_scaling
        got = scaling.compute_frequencies(config.head_dim, config.rope_theta)
        np.testing.assert_allclose(got, case["frequencies"], rtol=3e-7)
        assert scaling.attention_factor == pytest.approx(case["attention_factor"], rel=1e-12)
        assert QwenConfig.from_dict(config.hf_config()) == config
        only_old = {k: v for k, v in config.hf_config().items() if k != "rope_parameters"}
        assert QwenConfig.from_dict(only_old) == config


@pytest.mark.parametrize(
    ("rope", "wanted"),
    [
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1000}, 4096),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}, 16384),
        ({"rope_type": "yarn", "factor": 4.0}, 16384),
        ({"rope_type": "linear", "factor": 4.0}, 4096),  # files name the scaled length
    ],
)
def test_longest_sequence_of_scaled_rope(rope, wanted):
    fields = fields_of("qwen3_untied", max_position_embeddings=4096, rope_parameters=rope)
    config = QwenConfig.from_dict(fields)
    assert config.max_positions == wanted
    assert QwenConfig.from_dict(config.hf_config()).max_positions == wanted


def test_null_is_as_absent():
    fields = fields_of("qwen2_old_spelling")
    names = ["rope_theta", "quantization_config", "rope_scaling", "rms_norm_eps", "head_dim"]
    absent = {name: value for name, value in fields.items() if name not in names}
    found = QwenConfig.from_dict(absent | dict.fromkeys(names))
    assert found == QwenConfig.from_dict(absent)
    assert found.rope_theta == 10_000.0
    scaled = absent | {"rope_scaling": {"rope_theta": None, "partial_rotary_factor": None}}
    assert QwenConfig.from_dict(scaled) == found


@pytest.mark.parametrize("name", ["qwen2_tied", "qwen3_moe", "llama_tied", "mistral_old_spelling"])
def test_swish_is_silu(name):
    fields = fields_of(name)
    family = resolve_architecture(fields, "", name)
    assert family.from_dict(fields | {"hidden_act": "swish"}) == family.from_dict(fields)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "gemma"}, "model_type 'gemma'"),
        ({"model_type": None}, "model_type None"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "dynamic"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "longrope"),
        ({"rope_scaling": {"type": "yarn"}}, "factor"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "'linear' has .* 0.5.* at least 1"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2, "truncate": "no"}},
            "'truncate': 'no'.* true or false for 'truncate'",
        ),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    **{"factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0},
                }
            },
            "'high_freq_factor': 1.0.* a 'low_freq_factor' below",
        ),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "RoPE by layer type"),
        ({"use_sliding_window": True}, "sliding-window attention"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window attention"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"rms_norm_eps": []}, "rms_norm_eps"),
        ({"rope_scaling": "yarn"}, "yarn"),
    ],
)
def test_refused_by_name(tmp_path, changes, named):
    (tmp_path / "config.json").write_text(json.dumps(fields_of("qwen3_untied", **changes)))
    with pytest.raises(ValueError, match=named) as error:
        read_architecture(tmp_path)
    assert str(tmp_path / "config.json") in str(error.value)


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("llama_tied", {"mlp_bias": True}, "mlp_bias is not supported"),
        ("llama_tied", {"pretraining_tp": 2}, "pretraining_tp 2 is not supported"),
        ("llama_tied", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ("llama_tied", {"rope_parameters": {"rope_type": "dynamic"}}, "dynamic"),
        ("llama_tied", {"hidden_size": 34, "head_dim": 6}, "hidden size"),
        ("llama_tied", {"mlp_bias": "no"}, "mlp_bias"),
        ("mistral_old_spelling", {"sliding_window": 4095}, "a sliding window of 4095 tokens"),
        ("mistral_old_spelling", {"sliding_window": 0}, "a sliding window of 0 tokens"),
    ],
)
def test_what_llama_refuses(name, changes, named):
    fields = json.loads((GOLDEN / name / "config.json").read_text())
    with pytest.raises(ValueError, match=named):
        LlamaConfig.from_dict(fields | changes, source="here")


def test_a_window_that_hides_nothing():
    # The longest sequence has 4096 tokens. transformers' default is a window of 4096.
    fields = json.loads((GOLDEN / "mistral_old_spelling" / "config.json").read_text())
    assert fields["sliding_window"] is None
    without = {name: value for name, value in fields.items() if name != "sliding_window"}
    model = LlamaConfig.from_dict(fields)
    assert LlamaConfig.from_dict(without) == model
    assert LlamaConfig.from_dict(fields | {"sliding_window": 4096}) == model
    longer = {"max_position_embeddings": 8192}
    assert LlamaConfig.from_dict(fields | longer).max_positions == 8192
    with pytest.raises(ValueError, match="a sliding window of 4096 tokens"):
        LlamaConfig.from_dict(without | longer)


@pytest.mark.parametrize("absent", [None, "missing"])
def test_sizes_that_llama_makes_of_others(absent):
    # transformers' fresh LlamaConfig has 32 heads of 128 values, which is no default for others.
    fields = json.loads((GOLDEN / "llama_tied" / "config.json").read_text())
    names = ("head_dim", "num_key_value_heads")
    found = {name: value for name, value in fields.items() if name not in names}
    model = LlamaConfig.from_dict(found | (dict.fromkeys(names) if absent is None else {}))
    assert (model.num_heads, model.num_kv_heads, model.head_dim) == (6, 6, 6)


def test_biases_of_llama_are_on_all_of_attention():
    fields = json.loads((GOLDEN / "llama3_biased" / "config.json").read_text())
    biased = {f"model.layers.{{}}.self_attn.{name}_proj.bias" for name in "qkvo"}
    assert biased <= set(LlamaConfig.from_dict(fields).hf_names().values())
    none = LlamaConfig.from_dict(fields | {"attention_bias": False}).hf_names().values()
    assert not [name for name in none if name.endswith("bias")]
    # Mistral's class has no such field.
    mistral = fields | {"model_type": "mistral", "sliding_window": None}
    assert not LlamaConfig.from_dict(mistral).qkv_bias


def test_missing_folder():
    with pytest.raises(FileNotFoundError, match="nowhere/model"):
        read_architecture("nowhere/model")


def test_missing_config(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        read_architecture(tmp_path)


@pytest.mark.parametrize("text", ['{"model_type": "qwen3",', "", "[]", "\x00"])
def test_config_that_is_not_a_json_object(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json"):
        read_architecture(tmp_path)
