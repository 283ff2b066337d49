"""Adapters against PEFT and against plain torch; needs torch and peft: `make parity`."""

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
from jaxrl.models.attention.reference import XLA
from jaxrl.models.params import merge_params
from jaxrl.models.policy import Model
from jaxrl.models.registry import read_architecture
from jaxrl.types import Batch
from tests.extras.lora.adapters import GOLDEN, MESH, logits_of
from tests.helpers import relative_distance

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.torch,
    # PEFT reads it.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
]

VOCAB = 80
"""Ids that every model has, and that stand for no image."""

CASES = [
    ("qwen3_untied", ["all-linear"], False),
    ("qwen2_tied", ["q", "mlp/down"], True),
    ("qwen2_old_spelling", ["attention/o", "gate_proj"], False),
    ("qwen3_moe", ["all-linear"], False),
    ("qwen2_5_vl", ["all-linear"], True),  # whose tower has modules of the same names
]


def transformers_model(folder):
    name = read_architecture(folder)
    kind = "AutoModelForCausalLM" if name.tower is None else "AutoModelForImageTextToText"
    load = getattr(transformers, kind).from_pretrained
    return load(folder, dtype="float32", attn_implementation="eager")


def some_adapter(source, names, use_rslora, rng):
    """Return an adapter that changes the model substantially, and its parameters."""
    model = read_architecture(source)
    adapter = Adapter(
        model=model,
        rank=5,
        alpha=7.0,
        targets=find_targets(model, names),
        use_rslora=use_rslora,
    )
    params = {
        path: jnp.asarray(0.3 * rng.standard_normal(leaf.shape), jnp.float32)
        for path, leaf in flatten_dict(adapter.make_param_specs()[0].make_abstract_params()).items()
    }
    return adapter, unflatten_dict(params)


@pytest.mark.parametrize(("source", "names", "use_rslora"), CASES)
def test_peft_computes_what_is_computed_here(source, names, use_rslora, tmp_path):
    source, rng = GOLDEN / source, np.random.default_rng(0)
    adapter, params = some_adapter(source, names, use_rslora, rng)
    save_adapter(params, adapter, tmp_path / "adapter", source=source)
    save_merged(params, adapter, tmp_path / "merged", source=source)
    token_ids = rng.integers(0, VOCAB, (2, 17))
    policy = merge_params(load_base(source, MESH, adapter), params)
    ours = np.asarray(logits_of(adapter, policy, jnp.asarray(token_ids)))
    written = ours[0, 0] > -1e30  # no token that stands for an image is
    ours = ours[..., written]

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*(missing|unexpected) adapter keys")
        theirs = peft.PeftModel.from_pretrained(transformers_model(source), tmp_path / "adapter")
    merged = transformers_model(tmp_path / "merged")
    with torch.no_grad():
        found = [one(torch.tensor(token_ids)).logits.numpy() for one in (theirs, merged)]
        found.append(theirs.merge_and_unload()(torch.tensor(token_ids)).logits.numpy())
        plain = transformers_model(source)(torch.tensor(token_ids)).logits.numpy()
    for logits in found:
        np.testing.assert_allclose(ours, logits[..., written], atol=1e-4)
    assert np.abs(ours - plain[..., written]).max() > 0.1


@pytest.mark.parametrize(("source", "names", "use_rslora"), CASES)
def test_gradients_are_those_of_plain_torch(source, names, use_rslora):
    """Without PEFT, s (x A) B is added explicitly to each linear module of transformers."""
    source, rng = GOLDEN / source, np.random.default_rng(1)
    adapter, params = some_adapter(source, names, use_rslora, rng)
    token_ids = rng.integers(0, VOCAB, (2, 17))
    weights = rng.standard_normal(token_ids.shape).astype(np.float32)

    torch_model = transformers_model(source)
    modules, s = dict(torch_model.named_modules()), 7.0 / (5**0.5 if use_rslora else 5)
    matrices = {}
    for layer in adapter.targets:
        _, part, name = layer.split("/")[-3:]
        for place, module in enumerate(list_hf_module_names(adapter.model, layer)):
            pair = [
                torch.tensor(
                    np.asarray(params["blocks"][part][name][matrix][place])
                ).requires_grad_()
                for matrix in ("kernel_a", "kernel_b")
            ]
            matrices[layer, place] = pair
            modules[_to_transformers_name(adapter.model, module)].register_forward_hook(
                lambda _, inputs, out, pair=pair: out + s * (inputs[0] @ pair[0]) @ pair[1]
            )
    ids = torch.tensor(token_ids)
    logits = torch_model(ids).logits[:, :-1]
    if adapter.model.tower is not None:
        logits[..., [adapter.model.tower.token_id, adapter.model.tower.video_id]] = -torch.inf
    table = logits.log_softmax(-1)
    expected = table.gather(-1, ids[:, 1:, None])[..., 0]
    (expected * torch.tensor(weights[:, 1:])).sum().backward()

    model = Model(adapter, MESH, XLA, num_tokens=adapter.model.vocab_size)
    ones = np.ones(token_ids.shape, np.int32)
    batch = Batch(
        token_ids=token_ids.astype(np.int32),
        segment_ids=ones,
        positions=np.broadcast_to(np.arange(token_ids.shape[1], dtype=np.int32), ones.shape),
        loss_mask=ones > 0,
        token_weights=weights,
        advantages=weights,
        rollout_logprobs=weights,
    )
    batch = jax.tree.map(jnp.asarray, batch)
    base = load_base(source, MESH, adapter)

    def summed(params):
        logprobs, _ = model.compute_token_logprobs(
            merge_params(base, params), batch, temperature=1.0
        )
        return (logprobs * weights).sum(), logprobs

    gradients, logprobs = jax.jit(jax.grad(summed, has_aux=True))(params)
    np.testing.assert_allclose(logprobs[:, 1:], expected.detach().numpy(), atol=1e-4)
    found = flatten_dict(gradients, sep="/")
    assert len(found) == 2 * len(adapter.targets)
    for (layer, place), pair in matrices.items():
        for name, matrix in zip(("kernel_a", "kernel_b"), pair, strict=True):
            own = found[f"{layer}/{name}"][place]
            assert relative_distance(own, matrix.grad.numpy()) < 1e-4, (layer, place, name)
