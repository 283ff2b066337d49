"""Updates that replay the sampler's routing to experts."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl.data.serialization import deserialize_trajectory, serialize_trajectory
from jaxrl.envs.base import Observation, Outcome, StepResult
from jaxrl.extras.experts.qwen_moe import QwenMoeConfig
from jaxrl.extras.experts.routing import (
    ROUTED_EXPERTS,
    init_results,
    select_index_dtype,
    store_results,
)
from jaxrl.models.attention.reference import XLA
from jaxrl.models.aux_arrays import AuxArrays
from jaxrl.models.layers import LayerScan
from jaxrl.models.policy import Model
from jaxrl.training.minibatches import shard_minibatch
from jaxrl.training.packing import BatchShape, compute_sequence_sizes, pack_sequences
from jaxrl.training.update import ScoreStep, UpdateStep, init_state, shard_batch
from tests.helpers import (
    Sequence,
    method_with,
    pack_all,
    policy_loss,
    relative_distance,
    tiny_params,
)
from tests.toys import SMALL, Player, ScriptedEnv, one_device_mesh, script, toy_tokenizer

pytestmark = pytest.mark.usefixtures("quick_compilation", "one_size")

# Two layers with experts around a dense one, and shares that do not add up to 1.
MOE = QwenMoeConfig(
    **{**vars(SMALL), "num_layers": 3, "qkv_bias": False},
    expert_width=24,
    num_experts=8,
    top_k=2,
    renormalize=False,
    expert_layers=(0, 2),
)
PARAMS = jax.tree.map(jnp.asarray, tiny_params(MOE))
STOPS = tuple("abcdefghijklmnop")  # a random policy stops about every tenth token
TOKENIZER = toy_tokenizer()
UNKNOWN = 255
PAGE = 4


MOVED = jax.tree.map(lambda a, b: jnp.asarray(a + 0.05 * b), PARAMS, tiny_params(MOE, seed=1))
"""Parameters that are others, as after updates of the trainer alone."""


def with_routers_of(others):
    """Return the sampler's parameters with different routers."""
    moe = {**PARAMS["blocks"]["moe"], "router": others["blocks"]["moe"]["router"]}
    return {**PARAMS, "blocks": {**PARAMS["blocks"], "moe": moe}}


def two_turns():
    note = StepResult(observation=Observation(prefix="[", body="ok", suffix="]"))
    return ScriptedEnv(STOPS, script(note, StepResult(), StepResult(outcome=Outcome.ANSWERED)))


@pytest.fixture(scope="module")
def sampled():
    """Groups of three, each with two observations at most; rows beyond the pages are swapped."""
    player = Player(
        MOE, TOKENIZER, STOPS, num_rows=4, num_pages=32, chunk_tokens=5, records=True,
        kernels=dataclasses.replace(XLA, page_tokens=PAGE),
    )  # fmt: skip
    player.engine.row_sizes = player.engine.row_sizes[-1:]
    player.engine.set_weights(PARAMS)
    trajectories = player.play(
        two_turns(), ["where was it?", "who", "when?"], group_size=3, keeps_arrays=True
    )
    assert player.engine.counts.preemptions > 0
    assert max(len(trajectory.turns) for trajectory in trajectories) == 3
    assert player.engine.counts.prefilled_prompt < sum(t.prompt_length for t in trajectories) / 2
    return trajectories


def chosen_by_full_pass(trajectories, params):
    """Return the experts of each token, with one trajectory per row."""
    longest = max(len(t.token_ids) for t in trajectories)
    ids = [np.pad(t.token_ids, (0, longest - len(t.token_ids))) for t in trajectories]
    ids = jnp.stack(ids)
    positions = jnp.broadcast_to(jnp.arange(longest), ids.shape)

    @jax.jit
    def choose(params, ids):
        aux = AuxArrays(records=True)
        attend = XLA.make_attend(jnp.ones_like(ids), positions)
        MOE.compute_hidden_states(params, ids, positions, attend, LayerScan(scan=False, aux=aux))
        return aux.recorded[ROUTED_EXPERTS]

    chosen = np.asarray(choose(params, ids)).reshape(*ids.shape, 2, 2)
    return [row[: len(t.token_ids)] for row, t in zip(chosen, trajectories, strict=True)]


def test_what_is_recorded_is_what_a_full_pass_chooses(sampled):
    for trajectory, expected in zip(sampled, chosen_by_full_pass(sampled, PARAMS), strict=True):
        actual = trajectory.token_arrays[ROUTED_EXPERTS]
        assert (actual.dtype, actual.shape) == (np.uint8, (len(trajectory.token_ids), 2, 2))
        np.testing.assert_array_equal(actual[:-1], expected[:-1])
        # The last token was sampled and never read.
        assert trajectory.loss_mask[-1]
        assert (actual[-1] == UNKNOWN).all()


def test_recorded_experts_survive_json(sampled):
    saved = serialize_trajectory(sampled[0])
    actual = deserialize_trajectory(saved).token_arrays[ROUTED_EXPERTS]
    assert actual.dtype == np.uint8
    np.testing.assert_array_equal(actual, sampled[0].token_arrays[ROUTED_EXPERTS])
    assert serialize_trajectory(deserialize_trajectory(saved)) == saved
    without = dataclasses.replace(sampled[0], token_arrays={})
    assert "token_arrays" not in serialize_trajectory(without)
    assert deserialize_trajectory(serialize_trajectory(without)).token_arrays == {}


def test_the_smallest_dtype_has_a_number_that_is_no_experts():
    expected = {8: np.uint8, 255: np.uint8, 256: np.uint16, 512: np.uint16}
    assert {n: select_index_dtype(n).type for n in expected} == expected


def mix_every_expert(moe, x, given, renormalize):
    """Apply all experts to every token and mask the others: R3's equations, literally."""
    logits = x @ moe["router"]["kernel"]
    top_k = jnp.argsort(-logits, axis=-1)[:, : MOE.top_k]
    is_known = (given < MOE.num_experts).all(axis=-1)
    experts = jnp.where(is_known[:, None], given, top_k)
    mask = (experts[:, :, None] == jnp.arange(MOE.num_experts)).any(axis=1)
    exponentials = jnp.exp(logits)
    total = exponentials * mask if renormalize else exponentials
    shares = mask * exponentials / total.sum(axis=-1, keepdims=True)
    gate, up = (jnp.einsum("md,edf->mef", x, moe[name]["kernel"]) for name in ("gate", "up"))
    outputs = jnp.einsum("mef,efd->med", jax.nn.silu(gate) * up, moe["down"]["kernel"])
    return (shares[:, :, None] * outputs).sum(axis=1)


@pytest.mark.parametrize("renormalize", [False, True])
def test_training_computes_the_recorded_experts(renormalize):
    config, rng = dataclasses.replace(MOE, renormalize=renormalize), np.random.default_rng(0)
    moe = jax.tree.map(lambda leaf: leaf[0], PARAMS["blocks"]["moe"])
    x, weights = jnp.asarray(rng.standard_normal((2, 12, MOE.width)), jnp.float32)
    given = jnp.asarray(np.argsort(rng.random((12, 8)), axis=1)[:, :2]).at[-1].set(UNKNOWN)

    def replay(moe):
        aux = AuxArrays(inputs={ROUTED_EXPERTS: given[:, None]}, statistics_weights=jnp.ones(12))
        sizes = {"num_layers": 1, "num_tokens": 12, "top_k": 2, "num_experts": 8}
        state = jnp.int32(0), init_results(aux, **sizes)
        out, (_, results) = config.apply_feed_forward_with_aux({"moe": moe}, x, state, aux)
        store_results(aux, results)
        return (out * weights).sum(), (out, aux.statistics)

    def mask(moe):
        out = mix_every_expert(moe, x, given, renormalize)
        return (out * weights).sum(), (out, None)

    (gradient, (actual, usage)), (mask_gradient, (expected, _)) = (
        jax.jit(jax.grad(function, has_aux=True))(moe) for function in (replay, mask)
    )
    np.testing.assert_allclose(actual, expected, atol=2e-5, rtol=0)
    assert relative_distance(gradient, mask_gradient) < 1e-5
    assert relative_distance(gradient["router"], mask_gradient["router"]) < 1e-5
    top_k = np.argsort(-x @ moe["router"]["kernel"], axis=-1)[:, :2]
    differs = [{*a} != {*b} for a, b in zip(top_k.tolist(), given.tolist(), strict=True)]
    assert usage.num_replayed == 11
    assert usage.differences.tolist() == [sum(differs[:-1])]


def whole(trajectories, replayed=MOE.recorded_specs, **changes):
    """Return one packed micro-batch, without its first axis."""
    sizes = {"num_micro": 1, "micro_rows": len(trajectories), "row_tokens": 64} | changes
    shape = BatchShape(**sizes, token_arrays=replayed)
    return pack_sequences(trajectories, np.zeros(len(trajectories), np.float32), shape)


def first_micro(packed):
    return jax.tree.map(lambda x: jnp.asarray(x[0]), packed.batch)


@partial(jax.jit, static_argnames="dtype")
def score(params, micro, dtype=jnp.float32):
    model = Model(MOE, one_device_mesh(), XLA, num_tokens=TOKENIZER.num_tokens, dtype=dtype)
    return model.compute_token_logprobs(params, micro, temperature=1.0)[0]


@pytest.mark.parametrize(
    ("params", "dtype", "most"),
    [
        (with_routers_of(MOVED), jnp.float32, 0.5),
        pytest.param(
            PARAMS, jnp.bfloat16, 1.0, marks=pytest.mark.slow(instead="::[with_routers_of(MOVED)]")
        ),
    ],
    ids=["other routers", "bfloat16"],
)
def test_the_gap_to_the_sampler_is_smaller_with_replay(sampled, params, dtype, most):
    gaps = []
    for replayed in (MOE.recorded_specs, {}):
        micro = first_micro(whole(sampled, replayed))
        mask = micro.loss_mask & (micro.positions > 0)
        found = np.asarray(score(params, micro, dtype))
        gaps.append(np.abs(found - micro.rollout_logprobs)[mask].mean())
    assert 0 < gaps[0] < most * gaps[1]


def gradient(trajectories, shape, balance_coef=0.5):
    """Return the first gradient (ten times Adam's first moment) and metrics, at changed weights."""
    optimizer = optax.adamw(1e-3)
    model = Model(MOE, one_device_mesh(), XLA, num_tokens=TOKENIZER.num_tokens)
    step = UpdateStep(model, policy_loss(), optimizer, balance_coef=balance_coef)
    packed = pack_all(trajectories, shape)
    state = init_state(jax.tree.map(jnp.array, MOVED), model.mesh, MOE, optimizer)
    state, metrics = step(state, packed.batch, packed)
    moment = optax.tree_utils.tree_get(state.opt_state, "mu")
    return packed, moment, {name: float(metric.value) for name, metric in metrics.items()}


@pytest.fixture(scope="module")
def with_advantages(sampled):
    """Return the fields in the format of `pack_all`."""
    return [
        Sequence(
            token_ids=t.token_ids,
            loss_mask=t.loss_mask,
            rollout_logprobs=t.rollout_logprobs,
            token_arrays=t.token_arrays,
            advantage=float(np.cos(number)),
        )
        for number, t in enumerate(sampled)
    ]


@pytest.mark.slow(
    instead="extras/experts/test_router_replay.py"
    "::test_trajectories_without_a_record_choose_for_themselves"
)
@pytest.mark.parametrize("shares_prompts", [False, True])
def test_packing_and_micro_batches_change_nothing(with_advantages, shares_prompts):
    alone = BatchShape(num_micro=9, micro_rows=1, row_tokens=64, token_arrays=MOE.recorded_specs)
    other = BatchShape(
        num_micro=2,
        micro_rows=2,
        row_tokens=208,
        token_arrays=MOE.recorded_specs,
        shares_prompts=shares_prompts,
    )
    balance_coef = 0.0 if shares_prompts else 0.5  # a shared prompt counts once for the balance
    (_, expected, metrics), (packed, grad, packed_metrics) = (
        gradient(with_advantages, shape, balance_coef) for shape in (alone, other)
    )
    assert (packed.num_shared > 0) == shares_prompts
    assert relative_distance(grad, expected) < 1e-5
    _, without_replay, _ = gradient(
        with_advantages, dataclasses.replace(alone, token_arrays={}), balance_coef
    )
    assert relative_distance(without_replay, expected) > 1e-3  # so it does something
    assert metrics["router/replay_difference"] > 0.01
    for name, value in metrics.items():
        if shares_prompts and name.startswith("router/"):
            continue
        np.testing.assert_allclose(packed_metrics[name], value, rtol=1e-4, atol=1e-5, err_msg=name)


def test_prompts_of_other_experts_are_others(with_advantages):
    shape = BatchShape(
        num_micro=2,
        micro_rows=1,
        row_tokens=208,
        shares_prompts=True,
        token_arrays=MOE.recorded_specs,
    )
    first, second, third = with_advantages[:3]
    experts = second.token_arrays[ROUTED_EXPERTS].copy()
    experts[0, 0] = (experts[0, 0] + 1) % 8
    changed = [first, dataclasses.replace(second, token_arrays={ROUTED_EXPERTS: experts}), third]
    prompts = [item.prompt for item in compute_sequence_sizes(changed, shape)]
    assert prompts[0] == prompts[2] != prompts[1]
    blind = dataclasses.replace(shape, token_arrays={})
    assert len({item.prompt for item in compute_sequence_sizes(changed, blind)}) == 1


def test_the_old_policy_replays_and_the_reference_chooses_for_itself(sampled):
    model = Model(MOE, one_device_mesh(), XLA, num_tokens=TOKENIZER.num_tokens, scan_layers=False)
    step = ScoreStep(model, temperature=1.0)
    method = method_with(**{"kl.coef": 0.1, "kl.apply_to": "loss", "optimizer.num_epochs": 2})
    packed, plain = whole(sampled), whole(sampled, {})
    batch = shard_minibatch(packed, model.mesh, step, MOVED, MOVED, method)
    by_own_choice = np.asarray(step(MOVED, shard_batch(model.mesh, plain.batch), plain))
    np.testing.assert_array_equal(batch.ref_logprobs, by_own_choice)
    replayed = np.asarray(batch.old_logprobs)
    assert np.abs(replayed - by_own_choice).max() > 1e-3
    np.testing.assert_allclose(replayed[0], score(MOVED, first_micro(packed)), atol=1e-4)


def test_trajectories_without_a_record_choose_for_themselves(sampled):
    bare = [dataclasses.replace(t, token_arrays={}) for t in sampled]
    found = [score(MOVED, first_micro(packed)) for packed in (whole(bare), whole(bare, {}))]
    np.testing.assert_allclose(*found, atol=1e-5)
