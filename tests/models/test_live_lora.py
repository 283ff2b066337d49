"""Adapters written here, as PEFT reads and computes them; needs torch and peft: `make parity`."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxrl.models.adapters import check_adapter, load_adapter, load_base, save_adapter, save_merged
from jaxrl.models.architecture import read_model
from jaxrl.models.lora import Adapter, find_targets, join
from tests.models.adapters import GOLDEN, MESH, logits_of

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.torch

CASES = [
    ("qwen3_untied", ["all-linear"], False),
    ("qwen2_tied", ["q", "mlp/down"], True),
    ("qwen2_old_spelling", ["attention/o", "gate_proj"], False),
]


@pytest.mark.parametrize(("source", "names", "is_rank_stabilised"), CASES)
def test_peft_computes_what_is_computed_here(source, names, is_rank_stabilised, tmp_path):
    source, rng = GOLDEN / source, np.random.default_rng(0)
    model = read_model(source)
    adapter = Adapter(
        model=model,
        rank=5,
        alpha=7.0,
        targets=find_targets(model, names),
        is_rank_stabilised=is_rank_stabilised,
    )
    params = {
        path: jnp.asarray(0.3 * rng.standard_normal(leaf.shape), jnp.float32)
        for path, leaf in flatten_dict(adapter.trained.abstract_params()).items()
    }
    params = unflatten_dict(params)
    save_adapter(params, adapter, tmp_path / "adapter", source=source)
    save_merged(params, adapter, tmp_path / "merged", source=source)
    token_ids = rng.integers(0, model.vocab_size, (2, 17))
    policy = join(load_base(source, MESH, adapter), params)
    ours = np.asarray(logits_of(adapter, policy, jnp.asarray(token_ids)))

    load = transformers.AutoModelForCausalLM.from_pretrained
    theirs = peft.PeftModel.from_pretrained(
        load(source, dtype="float32", attn_implementation="eager"), tmp_path / "adapter"
    )
    merged = load(tmp_path / "merged", dtype="float32", attn_implementation="eager")
    with torch.no_grad():
        found = [one(torch.tensor(token_ids)).logits.numpy() for one in (theirs, merged)]
        found.append(theirs.merge_and_unload()(torch.tensor(token_ids)).logits.numpy())
        plain = load(source, dtype="float32")(torch.tensor(token_ids)).logits.numpy()
    for logits in found:
        np.testing.assert_allclose(ours, logits, atol=1e-4)
    assert np.abs(ours - plain).max() > 0.1


def test_an_adapter_that_peft_has_made_just_now_is_read(tmp_path):
    source = GOLDEN / "qwen3_untied"
    base = transformers.AutoModelForCausalLM.from_pretrained(source, dtype="float32")
    settings = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["k_proj", "up_proj"])
    made = peft.get_peft_model(base, settings)
    made.save_pretrained(tmp_path)
    model = read_model(source)
    targets = find_targets(model, ["k_proj", "up_proj"])
    adapter = Adapter(model=model, rank=2, alpha=4.0, targets=targets)
    check_adapter(tmp_path, adapter)
    params = load_adapter(tmp_path, adapter, MESH)
    own = made.base_model.model.model.layers[1].mlp.up_proj.lora_A["default"].weight
    found = params["blocks"]["mlp"]["up"]["lora_a"][1]
    np.testing.assert_array_equal(found, own.detach().numpy().T)
