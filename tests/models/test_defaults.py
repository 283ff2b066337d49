"""Defaults of missing config.json fields, compared with the configuration of transformers."""

import copy
import functools
import operator

import pytest
from transformers import CONFIG_MAPPING

from jaxrl.extras.dense.bert import BertConfig
from jaxrl.models.defaults import SIZE_FIELDS
from jaxrl.models.registry import resolve_architecture

TEXT = {
    "vocab_size": 300, "hidden_size": 768, "intermediate_size": 80, "num_hidden_layers": 30,
    "num_attention_heads": 32, "num_key_value_heads": 2, "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-3, "tie_word_embeddings": True, "hidden_act": "silu",
    "use_sliding_window": False, "rope_theta": 5000.0,
}  # fmt: skip
QWEN3 = {**TEXT, "head_dim": 48, "attention_bias": True}
TOWER = {
    "depth": 40, "hidden_size": 192, "intermediate_size": 90, "num_heads": 8, "in_channels": 1,
    "patch_size": 7, "spatial_merge_size": 4, "temporal_patch_size": 1, "out_hidden_size": 768,
}  # fmt: skip
ROPE = {"rope_theta": 5000.0, "rope_type": "default"}
FAMILIES = {
    "qwen2": TEXT,
    "qwen3": QWEN3,
    "llama": {**QWEN3, "pretraining_tp": 1, "mlp_bias": False},
    "mistral": {**TEXT, "head_dim": 48, "sliding_window": 131_072},
    "qwen3_moe": {
        **QWEN3, "num_experts": 12, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "norm_topk_prob": True, "decoder_sparse_step": 2, "mlp_only_layers": [3],
    },
    "qwen2_vl": {
        "text_config": {
            **TEXT, "rope_parameters": {**ROPE, "mrope_section": [4, 4, 4]}, "head_dim": 24,
        },
        "vision_config": {
            "depth": 40, "embed_dim": 192, "hidden_size": 768, "num_heads": 8, "in_channels": 1,
            "patch_size": 7, "spatial_merge_size": 4, "temporal_patch_size": 1, "mlp_ratio": 3,
        },
        "image_token_id": 11, "video_token_id": 12, "tie_word_embeddings": True,
    },
    "qwen2_5_vl": {
        "text_config": {
            **TEXT, "rope_parameters": {**ROPE, "mrope_section": [4, 4, 4]}, "head_dim": 24,
        },
        "vision_config": {**TOWER, "window_size": 56, "fullatt_block_indexes": [1, 2]},
        "image_token_id": 11, "video_token_id": 12, "tie_word_embeddings": True,
    },
    "qwen3_vl": {
        "text_config": {**QWEN3, "rope_parameters": {**ROPE, "mrope_section": [8, 8, 8]}},
        "vision_config": {
            **TOWER, "num_position_embeddings": 64, "deepstack_visual_indexes": [1, 5],
            "hidden_act": "gelu_pytorch_tanh",
        },
        "image_token_id": 11, "video_token_id": 12, "tie_word_embeddings": True,
    },
    "qwen3_5": {
        "text_config": {
            **QWEN3, "linear_num_key_heads": 2, "linear_num_value_heads": 48,
            "rope_parameters": {
                **ROPE, "mrope_section": [4, 4, 4], "partial_rotary_factor": 0.5,
            },
        },
        "vision_config": {
            **TOWER, "num_position_embeddings": 64, "hidden_act": "gelu_pytorch_tanh",
        },
        "image_token_id": 11, "video_token_id": 12, "tie_word_embeddings": True,
    },
    "bert": {
        "vocab_size": 300, "hidden_size": 96, "intermediate_size": 80, "num_hidden_layers": 3,
        "num_attention_heads": 4, "max_position_embeddings": 64, "type_vocab_size": 3,
        "layer_norm_eps": 1e-3, "hidden_act": "gelu_new",
    },
}  # fmt: skip
for part in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5"):
    del FAMILIES[part]["text_config"]["rope_theta"]
# Without these, sizes do not fit together: the defaults of transformers are for a large model.
REFUSED = {
    ("text_config", "head_dim"): "'mrope_section' is",
    ("text_config", "rope_parameters"): "'mrope_section' is",
    ("text_config", "rope_parameters", "mrope_section"): "'mrope_section' is",
    ("text_config", "rope_parameters", "partial_rotary_factor"): "rotary pairs of a head, 6",
}


def read(family, fields):
    fields = {"model_type": family, **copy.deepcopy(fields)}
    kind = BertConfig if family == "bert" else resolve_architecture(fields, "", "config.json")
    return kind.from_dict(fields)


def wanted(family, fields):
    """Return the values that transformers loads, under jaxrl's names."""
    theirs = CONFIG_MAPPING[family](**copy.deepcopy(fields))
    if family == "bert":
        names = {
            "width": "hidden_size", "mlp_width": "intermediate_size", "epsilon": "layer_norm_eps",
            "num_layers": "num_hidden_layers", "num_heads": "num_attention_heads",
            "max_positions": "max_position_embeddings", "num_token_types": "type_vocab_size",
            "vocab_size": "vocab_size", "activation": "hidden_act",
        }  # fmt: skip
        return {name: getattr(theirs, their_name) for name, their_name in names.items()}
    text = getattr(theirs, "text_config", theirs)
    expected = {
        "vocab_size": text.vocab_size,
        "width": text.hidden_size,
        "mlp_width": text.intermediate_size,
        "num_layers": text.num_hidden_layers,
        "num_heads": text.num_attention_heads,
        "num_kv_heads": text.num_key_value_heads,
        "head_dim": getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
        "rope_theta": text.rope_parameters["rope_theta"],
        "rms_norm_eps": text.rms_norm_eps,
        "tie_embeddings": theirs.tie_word_embeddings,
        "max_positions": text.max_position_embeddings,
        "output_bias": getattr(text, "attention_bias", False),
    }
    if family == "qwen3_moe":
        experts = range(theirs.decoder_sparse_step - 1, text.num_hidden_layers)
        experts = experts[:: theirs.decoder_sparse_step]
        expected |= {
            "num_experts": theirs.num_experts,
            "top_k": theirs.num_experts_per_tok,
            "expert_width": theirs.moe_intermediate_size,
            "renormalize": theirs.norm_topk_prob,
            "expert_layers": tuple(i for i in experts if i not in theirs.mlp_only_layers),
        }
    return expected | (expected_tower(theirs) if hasattr(theirs, "vision_config") else {})


def expected_tower(theirs):
    tower = theirs.vision_config
    if hasattr(tower, "embed_dim"):
        sizes = tower.embed_dim, tower.embed_dim * tower.mlp_ratio, tower.hidden_size
    else:
        sizes = tower.hidden_size, tower.intermediate_size, tower.out_hidden_size
    if hasattr(tower, "fullatt_block_indexes"):
        others = {"tower.full_layers": tuple(tower.fullatt_block_indexes)}
    elif hasattr(tower, "num_position_embeddings"):
        others = {
            "tower.side": round(tower.num_position_embeddings**0.5),
            "tower.deepstack_layers": tuple(getattr(tower, "deepstack_visual_indexes", ())),
        }
    else:
        others = {}
    return {
        "tower.video_id": theirs.video_token_id,
        "tower.token_id": theirs.image_token_id,
        **dict(zip(("tower.width", "tower.mlp_width", "tower.out_width"), sizes, strict=True)),
        "tower.num_layers": tower.depth,
        "tower.num_heads": tower.num_heads,
        "tower.channels": tower.in_channels,
        "tower.patch": tower.patch_size,
        "tower.temporal_patch": tower.temporal_patch_size,
        "tower.merge": tower.spatial_merge_size,
        "tower.rope_theta": tower.rope_parameters["rope_theta"],
        **others,
    }


def ours(model, names):
    return {name: operator.attrgetter(name)(model) for name in names}


def list_fields(family):
    """Yield the path of every field, including those of nested parts."""
    for name, value in FAMILIES[family].items():
        if name in ("text_config", "vision_config"):
            for inner, deeper in value.items():
                yield (name, inner)
                if inner == "rope_parameters":
                    yield from ((name, inner, key) for key in deeper)
        else:
            yield (name,)


@pytest.mark.parametrize("family", FAMILIES)
def test_missing_fields_have_the_defaults_of_transformers(family):
    for path in [(), *list_fields(family)]:
        fields, last = copy.deepcopy(FAMILIES[family]), path[-1] if path else ""
        if path:
            del functools.reduce(operator.getitem, path[:-1], fields)[last]
        if last in SIZE_FIELDS:  # these have no default
            with pytest.raises(ValueError, match=f"'{last}'"):
                read(family, fields)
        elif path in REFUSED and (last != "head_dim" or family[:5] == "qwen3"):
            with pytest.raises(ValueError, match=REFUSED[path]):
                read(family, fields)
        else:
            expected = wanted(family, fields)
            assert ours(read(family, fields), expected) == expected, path


def test_published_spelling_of_a_model_with_images():
    """The config.json of Qwen2.5-VL has the decoder's fields at the top level."""
    nested = FAMILIES["qwen2_5_vl"]
    flat = {**nested, **nested["text_config"]}
    del flat["text_config"]
    for name in ("rms_norm_eps", "max_position_embeddings", "num_key_value_heads"):
        fields = {key: value for key, value in flat.items() if key != name}
        expected = wanted("qwen2_5_vl", fields)
        assert ours(read("qwen2_5_vl", fields), expected) == expected
