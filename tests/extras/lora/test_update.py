"""Updates of an adapter: gradients against merged weights, and frozen weights."""

import jax
import numpy as np
import optax
import pytest

from jaxrl.extras.lora.adapter import Adapter, find_targets
from jaxrl.models.attention.reference import XLA
from jaxrl.models.params import merge_params
from jaxrl.models.policy import Model
from jaxrl.runtime.sharding import make_mesh, make_param_shardings
from jaxrl.training.packing import BatchShape
from jaxrl.training.update import ScoreStep, UpdateStep, init_state, shard_batch
from tests.helpers import (
    NUM_TOKENS,
    TINY,
    gather,
    gradient_of,
    pack_all,
    policy_loss,
    random_sequences,
    relative_distance,
    tiny_params,
)

pytestmark = pytest.mark.usefixtures("quick_compilation", "one_size")

MESH = make_mesh(data=1, fsdp=1, tensor=1, devices=jax.devices()[:1])
ADAPTER = Adapter(
    model=TINY, rank=4, alpha=6.0, targets=find_targets(TINY, ["q", "o", "gate", "down"])
)
LENGTHS = [9, 20, 31, 14, 25, 6, 12, 17]
WHOLE = BatchShape(num_micro=2, micro_rows=4, row_tokens=32)
SETTINGS = {"num_tokens": NUM_TOKENS, "remat": "none", "logits_chunk_tokens": 12}


def some_adapter(seed=1):
    """Return an adapter that changes the model."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: 0.1 * rng.standard_normal(leaf.shape, np.float32),
        ADAPTER.make_param_specs()[0].make_abstract_params(),
    )


def adapted_model(base):
    model = Model(ADAPTER, MESH, XLA, **SETTINGS)
    model.base = base
    return model


def test_gradients_are_those_of_merged_weights_whatever_the_packing():
    """If W + s A B has the gradient G, then A has s G B' and B has s A' G."""
    base, params = tiny_params(), some_adapter()
    sequences = random_sequences(LENGTHS)
    loss = policy_loss(loss={"entropy_coef": 0.1}, kl={"coef": 0.2, "anchor": "ref"})
    settings = {"temperature": 0.8, "entropy_gradient": True}
    plain, s = jax.tree.map(np.copy, base), ADAPTER.scaling
    for layer in ADAPTER.targets:
        _, part, name = layer.split("/")
        pair = params["blocks"][part][name]
        kernel = plain["blocks"][part][name]["kernel"]
        kernel += s * np.einsum("lir,lro->lio", pair["kernel_a"], pair["kernel_b"])
    packed = pack_all(sequences, WHOLE)
    of_plain, _ = gradient_of(Model(TINY, MESH, XLA, **SETTINGS), loss, **settings)(
        plain, packed.batch, packed.num_micro
    )
    gradient = gradient_of(adapted_model(base), loss, **settings)
    found = []
    for shape, order in (
        (WHOLE, range(8)),
        (BatchShape(num_micro=4, micro_rows=2, row_tokens=36), [5, 2, 7, 0, 6, 3, 1, 4]),
    ):
        packed = pack_all([sequences[i] for i in order], shape)
        actual, _ = gradient(merge_params(base, params), packed.batch, packed.num_micro)
        found.append(actual)
        assert relative_distance(actual, found[0]) < 1e-5
    assert jax.tree.structure(found[0]) == jax.tree.structure(params)
    for layer in ADAPTER.targets:
        _, part, name = layer.split("/")
        pair, G = params["blocks"][part][name], of_plain["blocks"][part][name]["kernel"]
        a, b = pair["kernel_a"], pair["kernel_b"]
        expected = {
            "kernel_a": s * np.einsum("lio,lro->lir", G, b),
            "kernel_b": s * np.einsum("lir,lio->lro", a, G),
        }
        assert relative_distance(found[0]["blocks"][part][name], expected) < 1e-4, layer


def test_an_update_changes_the_adapter_alone():
    base = jax.device_put(tiny_params(), make_param_shardings(MESH, ADAPTER.make_param_specs()[1]))
    before = jax.tree.map(np.array, base)
    model, optimizer = adapted_model(base), optax.adamw(1e-2)
    start = some_adapter()
    params = jax.device_put(start, make_param_shardings(MESH, ADAPTER.make_param_specs()[0]))
    state = init_state(params, MESH, ADAPTER.make_param_specs()[0], optimizer)
    moments = optax.tree_utils.tree_get(state.opt_state, "mu")
    assert jax.tree.structure(moments) == jax.tree.structure(start)
    packed = pack_all(random_sequences(LENGTHS), WHOLE)
    batch, step = shard_batch(MESH, packed.batch), UpdateStep(model, policy_loss(), optimizer)
    for _ in range(2):
        state, metrics = step(state, batch, packed)
    assert float(metrics["grad_norm"].value) > 0
    changed = jax.tree.map(lambda new, old: not np.array_equal(new, old), state.params, start)
    assert all(jax.tree.leaves(changed))
    jax.tree.map(np.testing.assert_array_equal, model.base, before)


def test_with_the_adapter_off_scores_are_those_of_the_base():
    """In the scoring program, B = 0 gives the base's scores bit for bit."""
    base = tiny_params()
    packed = pack_all(random_sequences(LENGTHS), WHOLE)
    batch = shard_batch(MESH, packed.batch)
    score = ScoreStep(adapted_model(base), temperature=1.0)
    params = some_adapter()
    on = score(params, batch, packed)
    alone = ScoreStep(Model(TINY, MESH, XLA, **SETTINGS), temperature=1.0)(base, batch, packed)
    for leaf in (layer for part in params["blocks"].values() for layer in part.values()):
        leaf["kernel_b"] = np.zeros_like(leaf["kernel_b"])
    off = score(params, batch, packed)
    for index in range(len(LENGTHS)):
        expected = gather(packed.batch, alone, index)
        np.testing.assert_allclose(gather(packed.batch, off, index), expected, atol=1e-6)
    assert np.abs(np.asarray(on) - np.asarray(off)).max() > 1e-2
