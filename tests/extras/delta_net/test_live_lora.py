"""Adapters on Qwen3.5 compared with PEFT, in text and vision-language checkpoints."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxrl.extras.lora.adapter import Adapter, find_targets, list_hf_module_names
from jaxrl.extras.lora.files import (
    _to_transformers_name,
    load_base,
    save_adapter,
    save_merged,
)
from jaxrl.models.hf_weights import save_hf
from jaxrl.models.params import merge_params
from jaxrl.models.registry import read_architecture
from tests.extras.delta_net.models import TINY_HYBRID, random_params
from tests.extras.lora.adapters import MESH, logits_of

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
LoraLayer = pytest.importorskip("peft.tuners.lora").LoraLayer

pytestmark = [
    pytest.mark.torch,
    # PEFT reads it.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
]

IMAGE = 300


def write_source(folder, has_tower):
    """Write a checkpoint; return the class that loads it."""
    save_hf(jax.tree.map(jnp.asarray, random_params(TINY_HYBRID, seed=0)), TINY_HYBRID, folder)
    if not has_tower:
        return transformers.AutoModelForCausalLM
    text = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    fields = TINY_HYBRID.to_hf_config()
    fields["rope_parameters"]["mrope_section"] = [1, 1, 0]
    config = transformers.Qwen3_5Config(
        text_config=fields,
        vision_config={
            **{"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2},
            **{"out_hidden_size": TINY_HYBRID.width, "num_position_embeddings": 16},
        },
        **{"image_token_id": IMAGE, "video_token_id": IMAGE + 1, "tie_word_embeddings": False},
        **{"vision_start_token_id": IMAGE + 2, "vision_end_token_id": IMAGE + 3},
    )
    whole = transformers.Qwen3_5ForConditionalGeneration(config).float()
    whole.model.language_model.load_state_dict(text.model.state_dict())
    whole.lm_head.load_state_dict(text.lm_head.state_dict())
    whole.save_pretrained(folder)
    return transformers.AutoModelForImageTextToText


@pytest.mark.parametrize(
    ("has_tower", "names", "is_subset"),
    [
        (False, ["all-linear"], False),
        (False, ["in_proj_a", "in_proj_b", "delta/o"], True),
        (True, ["all-linear"], True),  # PEFT adapts the tower too
    ],
)
def test_peft_computes_the_same(tmp_path, has_tower, names, is_subset):
    source, rng = tmp_path / "source", np.random.default_rng(0)
    kind = write_source(source, has_tower)
    model = read_architecture(source)
    adapter = Adapter(model=model, rank=5, alpha=7.0, targets=find_targets(model, names))
    params = unflatten_dict(
        {
            path: jnp.asarray(0.1 * rng.standard_normal(leaf.shape), jnp.float32)
            for path, leaf in flatten_dict(
                adapter.make_param_specs()[0].make_abstract_params()
            ).items()
        }
    )
    save_adapter(params, adapter, tmp_path / "adapter", source=source)
    save_merged(params, adapter, tmp_path / "merged", source=source)
    token_ids = rng.integers(0, 250, (2, 70))
    policy = merge_params(load_base(source, MESH, adapter), params)
    ours = np.asarray(logits_of(adapter, policy, jnp.asarray(token_ids)))

    def load(folder):
        return kind.from_pretrained(folder, dtype="float32", attn_implementation="eager")

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*(missing|unexpected) adapter keys")
        theirs = peft.PeftModel.from_pretrained(load(source), tmp_path / "adapter")
    adapted = {name for name, module in theirs.named_modules() if isinstance(module, LoraLayer)}
    layers = {
        "base_model.model." + _to_transformers_name(model, name)
        for target in adapter.targets
        for name in list_hf_module_names(model, target)
    }
    assert adapted == layers
    with torch.no_grad():
        ids = torch.tensor(token_ids)
        others = theirs, load(tmp_path / "merged"), load(source)
        *results, plain = (other(ids).logits.numpy()[..., :IMAGE] for other in others)
    ours = ours[..., :IMAGE]
    for logits in results:
        np.testing.assert_allclose(ours, logits, atol=1e-4)
    assert np.abs(ours - plain).max() > 0.1

    # PEFT's own `all-linear`.
    config = peft.LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM")
    everything = peft.get_peft_model(load(source), config)
    linear = {name for name, module in everything.named_modules() if isinstance(module, LoraLayer)}
    assert layers <= linear if is_subset else layers == linear
