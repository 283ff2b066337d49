"""Qwen3.5 in training: packing, rematerialization, meshes, files and refusals."""

import dataclasses
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxrl.extras.delta_net.qwen3_5 import Qwen35Config
from jaxrl.models.attention.reference import XLA
from jaxrl.models.hf_weights import load_hf, save_hf
from jaxrl.models.policy import Model
from jaxrl.models.registry import TOWERS, read_architecture
from jaxrl.training.packing import BatchShape
from tests.extras.delta_net.models import TINY_HYBRID, random_params
from tests.helpers import (
    NUM_TOKENS,
    full_pass,
    gather,
    gradient_of,
    pack_all,
    policy_loss,
    random_sequences,
    relative_distance,
)
from tests.toys import one_device_mesh

pytestmark = pytest.mark.usefixtures("quick_compilation")

PARAMS = jax.tree.map(jnp.asarray, random_params(TINY_HYBRID, seed=0))
SEQUENCES = random_sequences([9, 70, 31, 64, 25, 130, 1, 17])


def test_logits_are_those_of_transformers():
    folder = Path(__file__).parents[2] / "golden" / "qwen3_5"
    config, params = read_architecture(folder), load_hf(folder)
    wanted = dict(np.load(folder / "golden.npz"))
    token_ids = jnp.asarray(wanted["token_ids"])
    positions = jnp.broadcast_to(jnp.arange(token_ids.shape[1]), token_ids.shape)
    segment_ids = jnp.array([[1], [2]]) * jnp.ones_like(token_ids)
    row = [x.reshape(1, -1) for x in (token_ids, positions, segment_ids)]
    hidden = full_pass(config, params, *row)
    logits = config.unembed(params, hidden, num_tokens=config.vocab_size)
    np.testing.assert_allclose(
        logits.reshape(wanted["logits"].shape), wanted["logits"], atol=1e-4, rtol=0
    )


def make_model(**settings):
    return Model(TINY_HYBRID, one_device_mesh(), XLA, num_tokens=NUM_TOKENS, **settings)


def compute_gradient(sequences, shape, **settings):
    packed = pack_all(sequences, shape, counted=SEQUENCES)
    gradient = gradient_of(make_model(**settings), policy_loss())
    return gradient(PARAMS, packed.batch, packed.num_micro)[0]


def test_packed_sequences_have_the_gradient_of_single_ones():
    shape = BatchShape(num_micro=1, micro_rows=2, row_tokens=200)
    gradient = gradient_of(make_model(), policy_loss())

    def compute(sequences):
        packed = pack_all(sequences, shape, counted=SEQUENCES)
        return gradient(PARAMS, packed.batch, packed.num_micro)[0]

    packed = compute(SEQUENCES)
    singles = [compute([sequence]) for sequence in SEQUENCES if sequence.loss_mask.any()]
    total = jax.tree.map(lambda *parts: sum(parts), *singles)
    assert relative_distance(packed, total) < 1e-5
    for path, leaf in jax.tree_util.tree_leaves_with_path(packed):
        assert np.abs(leaf).max() > 0, path


def test_a_sequence_has_the_same_logprobs_in_any_row():
    def compute(sequences, shape):
        packed = pack_all(sequences, shape, counted=SEQUENCES)
        micro = jax.tree.map(lambda x: jnp.asarray(x[0]), packed.batch)
        logprobs, _ = jax.jit(make_model().compute_token_logprobs)(PARAMS, micro, temperature=1.0)
        return [gather(micro, logprobs, index) for index in range(len(sequences))]

    shape = BatchShape(num_micro=1, micro_rows=2, row_tokens=200)
    wanted = compute(SEQUENCES, shape)
    reordered = compute(SEQUENCES[::-1], shape)[::-1]
    longer = compute(SEQUENCES, dataclasses.replace(shape, row_tokens=300))
    for one, *others in zip(wanted, reordered, longer, strict=True):
        for other in others:
            np.testing.assert_allclose(other, one, atol=2e-5)


@pytest.mark.parametrize(
    "settings", [{"remat": "none"}, {"remat": "names"}, {"remat": "dots", "scan_layers": False}]
)
def test_rematerialization_and_unrolling_do_not_change_the_gradient(settings):
    shape = BatchShape(num_micro=1, micro_rows=2, row_tokens=200)
    wanted = compute_gradient(SEQUENCES, shape, remat="full")
    assert relative_distance(compute_gradient(SEQUENCES, shape, **settings), wanted) < 1e-5


def test_a_checkpoint_beside_a_vision_tower_keeps_its_format(tmp_path, monkeypatch):
    """Import the text part of a vision-language checkpoint; export it with the other tensors."""
    monkeypatch.setitem(TOWERS, "qwen3_5", "jaxrl.extras.deleted:add_tower")
    text = tmp_path / "text"
    save_hf(PARAMS, TINY_HYBRID, text)
    assert read_architecture(text) == TINY_HYBRID
    jax.tree.map(np.testing.assert_array_equal, load_hf(text), PARAMS)

    whole = tmp_path / "whole"
    whole.mkdir()
    fields = json.loads((text / "config.json").read_text())
    config = {
        "model_type": "qwen3_5",
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "text_config": fields,
        "vision_config": {"depth": 2},
        "tie_word_embeddings": False,
    }
    (whole / "config.json").write_text(json.dumps(config))
    tensors = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in load_file(text / "model.safetensors").items()
    }
    others = {
        "model.visual.blocks.0.norm1.weight": np.arange(6, dtype=np.float16),
        "mtp.fc.weight": np.ones((2, 3), np.float32),
    }
    save_file(tensors | others, whole / "model.safetensors", metadata={"format": "pt"})
    messages = []
    assert read_architecture(whole) == read_architecture(whole, "qwen3_5_text")
    loaded = load_hf(whole, log=messages.append)
    assert not messages
    jax.tree.map(np.testing.assert_array_equal, loaded, PARAMS)

    trained = jax.tree.map(lambda leaf: leaf + 1, loaded)
    save_hf(trained, read_architecture(whole), tmp_path / "export", source=whole)
    exported = load_file(tmp_path / "export" / "model.safetensors")
    assert exported.keys() == (tensors | others).keys()
    for name, tensor in others.items():
        assert exported[name].dtype == tensor.dtype
        np.testing.assert_array_equal(exported[name], tensor)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(exported[name], tensor + 1)
    assert (tmp_path / "export" / "config.json").read_bytes() == (
        whole / "config.json"
    ).read_bytes()


ROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}


def change_config(**changes):
    return {**TINY_HYBRID.to_hf_config(), **changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["full_attention"] * 5}, "'layer_types'"),
        ({"layer_types": ["linear_attention"] * 4 + ["sliding_attention"]}, "layer_types"),
        ({"linear_num_value_heads": 3}, "'linear_num_value_heads' 3"),
        ({"linear_num_key_heads": 0}, "'linear_num_key_heads'"),
        ({"attn_output_gate": False}, "attn_output_gate"),
        ({"model_type": "qwen3_next"}, "qwen3_next"),
        ({"model_type": "qwen3_5"}, "'text_config'"),
        ({"model_type": "qwen3_5", "text_config": []}, "'text_config'"),
        ({"model_type": "qwen3_5", "text_config": {"hidden_size": 32}}, "'num_hidden_layers'"),
        ({"layer_types": "linear_attention"}, "layer_types"),
        ({"layer_types": [{}] * 5}, "layer_types"),
        ({"layer_types": None, "full_attention_interval": 0}, "full_attention_interval"),
        ({"layer_types": None, "full_attention_interval": "4"}, "full_attention_interval"),
        ({"linear_key_head_dim": 8.5}, "linear_key_head_dim"),
        ({"linear_conv_kernel_dim": 10**30}, "'linear_conv_kernel_dim'"),
        ({"num_key_value_heads": -1}, "'num_key_value_heads'"),
        ({"head_dim": -2}, "'head_dim'"),
        ({"num_key_value_heads": 0}, "'num_key_value_heads' is 0"),
        ({"head_dim": 0}, "'head_dim' is 0"),
        ({"rms_norm_eps": -1e-6}, "'rms_norm_eps' is -1e-06"),
        ({"rms_norm_eps": math.nan}, "'rms_norm_eps' is nan"),
        ({"attn_output_gate": 0}, "attn_output_gate"),
        ({"num_hidden_layers": 10**12, "layer_types": None}, "'num_hidden_layers' is 10{12};"),
        ({"rope_parameters": ROPE | {"partial_rotary_factor": -0.25}}, "'partial_rotary_factor'"),
        (
            {"rope_parameters": ROPE | {"partial_rotary_factor": math.inf}},
            "'partial_rotary_factor'",
        ),
        (
            {"rope_parameters": ROPE | {"partial_rotary_factor": math.nan}},
            "'partial_rotary_factor'",
        ),
        ({"rope_parameters": ROPE | {"rope_theta": math.nan}}, "'rope_theta'"),
    ],
)
def test_unsupported_configurations_are_refused(changes, message):
    with pytest.raises(ValueError, match=message) as error:
        Qwen35Config.from_dict(change_config(**changes))
    assert len(str(error.value).splitlines()) == 1


def test_published_sizes_are_read():
    """Sizes that a published `config.json` leaves out have the defaults of its class."""
    fields = {
        "model_type": "qwen3_5",
        "tie_word_embeddings": True,
        "text_config": {
            "hidden_size": 1024,
            "intermediate_size": 3584,
            "num_hidden_layers": 8,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "vocab_size": 248320,
            "full_attention_interval": 4,
            "linear_num_value_heads": 16,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000_000,
                "partial_rotary_factor": 0.25,
                "mrope_section": [11, 11, 10],
                "mrope_interleaved": True,
            },
        },
    }
    model = Qwen35Config.from_dict(fields)
    assert model.attention_layers == (3, 7)
    assert (model.head_dim, model.rotary_dim, model.rope_theta) == (256, 64, 1e7)
    assert (model.num_key_heads, model.num_value_heads) == (16, 16)
    assert (model.key_dim, model.value_dim, model.conv_width) == (128, 128, 4)
    assert model.tie_embeddings
    assert (model.num_attention_layers, model.num_recurrent_layers) == (2, 6)
