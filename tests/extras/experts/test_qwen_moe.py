"""Mixtures of experts against `transformers`: logits, gradients, losses, and weights on disk."""

import json
import shutil
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxrl.models import kv_cache
from jaxrl.models.hf_weights import load_hf, save_hf
from jaxrl.models.registry import read_architecture
from tests.extras.experts.golden import check_golden
from tests.helpers import full_pass, read_tokens
from tests.toys import one_device_mesh

GOLDEN = Path(__file__).parents[2] / "golden"
NAMES = ["qwen3_moe", "qwen3_moe_mixed", "qwen3_moe_sparse_step"]

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(
    params=[
        *NAMES[:2],
        pytest.param(
            NAMES[2],
            marks=pytest.mark.slow(
                instead="extras/experts/test_qwen_moe.py"
                "::test_logits_losses_and_gradients_are_those_of_torch"
            ),
        ),
    ]
)
def golden(request):
    folder = GOLDEN / request.param
    return read_architecture(folder), load_hf(folder), dict(np.load(folder / "golden.npz"))


def test_the_layers_are_those_of_transformers():
    mixed, stepped = (read_architecture(GOLDEN / name) for name in NAMES[1:])
    assert (mixed.expert_layers, mixed.renormalize) == ((0, 2, 3, 4), True)
    assert stepped.expert_layers == (1,)
    uniform = read_architecture(GOLDEN / NAMES[0])
    assert (uniform.partial_layer_indices, uniform.renormalize) == ({}, False)
    for config in (mixed, stepped, uniform):
        assert type(config).from_dict(config.to_hf_config()) == config


def test_logits_losses_and_gradients_are_those_of_torch(golden):
    check_golden(*golden)


@pytest.fixture
def mixed():
    folder = GOLDEN / "qwen3_moe_mixed"
    return read_architecture(folder), load_hf(folder), dict(np.load(folder / "golden.npz"))


def test_the_sampler_computes_the_same(mixed):
    config, params, expected = mixed
    token_ids = jnp.asarray(expected["token_ids"])
    B, T = token_ids.shape
    weights = config.prepare_decoding_weights(params, jnp.float32)
    cache = kv_cache.allocate_pages(config, B * 5, 4, jnp.float32)
    tables = jnp.arange(B * 5)[::-1].reshape(B, 5)
    read = jax.jit(read_tokens, static_argnums=0)
    for start, end in ((0, 16), (16, 20)):
        chunk = jnp.pad(token_ids[:, start:end], ((0, 0), (0, 16 - end + start)))
        counts = jnp.full(B, end - start)
        hidden, cache = read(config, weights, cache, tables, jnp.full(B, start), counts, chunk)
        last = hidden[:, end - start - 1]
        logits = config.unembed(weights, last, num_tokens=config.vocab_size)
        np.testing.assert_allclose(logits, expected["logits"][:, end - 1], atol=1e-4, rtol=0)
    assert T == 20


def test_packed_rows(mixed):
    config, params, expected = mixed
    token_ids = jnp.asarray(expected["token_ids"])
    positions = jnp.broadcast_to(jnp.arange(token_ids.shape[1]), token_ids.shape)
    ids = jnp.array([[1], [2]]) * jnp.ones_like(token_ids)
    row = (x.reshape(1, -1) for x in (token_ids, positions, ids))
    hidden = jax.jit(partial(full_pass, config))(params, *row)
    logits = config.unembed(params, hidden, num_tokens=config.vocab_size)
    logits = logits.reshape(expected["logits"].shape)
    np.testing.assert_allclose(logits, expected["logits"], atol=1e-4, rtol=0)


def fuse(folder):
    """Rewrites a folder with each layer's experts as transformers 5 has them in memory."""
    tensors = load_file(folder / "model.safetensors")
    config = read_architecture(folder)
    for layer in config.expert_layers:
        base = f"model.layers.{layer}.mlp.experts."
        parts = {
            name: np.stack(
                [tensors.pop(f"{base}{e}.{name}_proj.weight") for e in range(config.num_experts)]
            )
            for name in ("gate", "up", "down")
        }
        both = np.concatenate([parts["gate"], parts["up"]], axis=1)
        tensors |= {base + "gate_up_proj": both, base + "down_proj": parts["down"]}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_an_export_stores_experts_as_its_source_does(tmp_path):
    source = GOLDEN / "qwen3_moe_mixed"
    fused = Path(shutil.copytree(source, tmp_path / "fused"))
    fuse(fused)
    params = load_hf(fused)
    jax.tree.map(np.testing.assert_array_equal, params, load_hf(source))
    on_mesh = read_architecture(fused).with_kernels(
        one_device_mesh(), experts="auto"
    )  # the same model
    assert on_mesh.experts.mesh is not None
    save_hf(params, on_mesh, tmp_path / "export", source=fused)
    expected, actual = (load_file(f / "model.safetensors") for f in (fused, tmp_path / "export"))
    assert expected.keys() == actual.keys()
    for name, value in expected.items():
        assert value.tobytes() == actual[name].tobytes()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_experts_per_tok": 9}, "'num_experts_per_tok' is 9, but there are 6 experts"),
        ({"moe_intermediate_size": "16"}, "moe_intermediate_size"),
        ({"mlp_only_layers": [0, 1]}, "leave no layer with experts"),
        ({"model_type": "qwen3"}, "model_type 'qwen3' is not supported; expected 'qwen3_moe'"),
    ],
)
def test_refused_by_name(tmp_path, changes, named):
    fields = json.loads((GOLDEN / "qwen3_moe" / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=named) as error:
        read_architecture(tmp_path, "qwen3_moe")
    assert str(tmp_path / "config.json") in str(error.value)
