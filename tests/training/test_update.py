"""The update step compared with plain arithmetic, and settings that must not change it."""

import gc
import math
import weakref
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl.models.attention.reference import XLA
from jaxrl.models.layers import HOST_MEMORY
from jaxrl.models.output import split_evenly
from jaxrl.models.policy import Model
from jaxrl.objectives.aggregation import AGGREGATIONS
from jaxrl.runtime.sharding import make_mesh, make_param_shardings
from jaxrl.training.packing import BatchShape, compute_logit_capacities
from jaxrl.training.reference_kl import unpack_sequences
from jaxrl.training.update import (
    ScoreStep,
    UpdateStep,
    init_state,
    move_moments,
    shard_batch,
)
from jaxrl.types import Batch
from tests.helpers import (
    NUM_TOKENS,
    TINY,
    UPDATE_PROGRAMS,
    compilations,
    dense_logprobs,
    gradient_of,
    method_with,
    pack_all,
    policy_loss,
    program_text,
    random_sequences,
    relative_distance,
    scatter,
    shapes_in,
    sharing_prompts,
    tiny_params,
)

pytestmark = pytest.mark.usefixtures("quick_compilation")

MESH = make_mesh(data=1, fsdp=1, tensor=1, devices=jax.devices()[:1])
LENGTHS = [9, 20, 31, 14, 25, 6, 12, 17]
SHAPE = BatchShape(num_micro=4, micro_rows=2, row_tokens=36)
LONGEST = 32
SCALE = 24
CHUNK_TOKENS = 12
OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.3, momentum=0.9))


def tiny_model(*, chunk_tokens=CHUNK_TOKENS, remat="full"):
    settings = {"num_tokens": NUM_TOKENS, "logits_chunk_tokens": chunk_tokens}
    return Model(TINY, MESH, XLA, remat=remat, **settings)


@pytest.fixture(scope="module")
def params():
    return put_params(tiny_params())


def put_params(params):
    return jax.device_put(params, make_param_shardings(MESH, TINY))


def fresh_state(params):
    """Return a state with a copy of the parameters, because updates donate them."""
    copies = put_params(jax.tree.map(np.array, params))
    return init_state(copies, MESH, TINY, OPTIMIZER)


def is_equal(first, second):
    pairs = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    return all(np.array_equal(np.asarray(x), np.asarray(y)) for x, y in pairs)


# Plain arithmetic: every trajectory alone, all its logits, the losses as papers write them.


@dataclass(frozen=True)
class Variant:
    """A loss and its sampling temperature."""

    dual_clip: float = 0.0
    kl_coef: float = 0.0
    kl_anchor: str = "ref"
    entropy_coef: float = 0.0
    temperature: float = 1.0

    @property
    def token_loss(self):
        loss = {"entropy_coef": self.entropy_coef, "clip": {"dual_clip": self.dual_clip}}
        return policy_loss(
            loss={"clip_low": 0.2, "clip_high": 0.28, **loss},
            kl={"coef": self.kl_coef, "anchor": self.kl_anchor},
        )

    @property
    def settings(self):
        return {"temperature": self.temperature, "entropy_gradient": self.entropy_coef != 0}


CLIP = "dual clip"
OLD_ANCHOR = "KL to old"
ALL_TERMS = "clip, KL to ref, entropy"
VARIANTS = {
    CLIP: Variant(dual_clip=1.5),
    OLD_ANCHOR: Variant(kl_coef=0.5, kl_anchor="old", temperature=1.3),
    ALL_TERMS: Variant(kl_coef=0.3, entropy_coef=0.2, temperature=0.7),
}


def padded(values, fill=0):
    out = np.full((len(values), LONGEST), fill, np.asarray(values[0]).dtype)
    for row, value in zip(out, values, strict=True):
        row[: len(value)] = value
    return out


def by_rows(sequences):
    """Return the sequences, one per row, for the plain arithmetic."""
    names = ("token_ids", "loss_mask", "old_logprobs", "ref_logprobs")
    arrays = {name: padded([getattr(s, name) for s in sequences]) for name in names}
    return {**arrays, "advantages": np.array([[s.advantage] for s in sequences], np.float32)}


def plain_weights(sequences, members, mode):
    """Return the weight of each token's loss when `members` are the mini-batch, `[N, L]`."""
    counts = [int(sequences[index].loss_mask.sum()) for index in members]
    num_valid = sum(count > 0 for count in counts)
    weights = np.zeros((len(sequences), LONGEST), np.float32)
    for index, count in zip(members, counts, strict=True):
        weights[index] = {
            "token-mean": 1 / sum(counts),
            "seq-mean-token-sum": 1 / num_valid,
            "seq-mean-token-mean": 1 / (num_valid * max(count, 1)),
            "seq-mean-token-sum-norm": 1 / (num_valid * SCALE),
        }[mode]
    return weights


def plain_gradient(variant):
    def loss(params, rows, weights):
        logprobs, entropies = jax.vmap(
            lambda ids: dense_logprobs(params, TINY, ids, temperature=variant.temperature)
        )(rows["token_ids"])
        old, ref, advantages = rows["old_logprobs"], rows["ref_logprobs"], rows["advantages"]
        ratio = jnp.exp(logprobs - old)
        clipped = jnp.clip(ratio, 0.8, 1.28)
        gain = jnp.minimum(ratio * advantages, clipped * advantages)
        if variant.dual_clip:
            lowest = variant.dual_clip * advantages
            gain = jnp.where(advantages < 0, jnp.maximum(gain, lowest), gain)
        anchor = ref if variant.kl_anchor == "ref" else old
        kl = jnp.clip(jnp.exp(anchor - logprobs) - (anchor - logprobs) - 1, -10, 10)
        values = -gain + variant.kl_coef * kl - variant.entropy_coef * entropies
        return (jnp.where(rows["loss_mask"], values, 0) * weights).sum()

    return jax.jit(jax.grad(loss))


@pytest.fixture(scope="module")
def plain():
    """Plain gradients by variant.

    Parameters stay on the host, so that each variant compiles once.
    """
    compiled = {name: plain_gradient(variant) for name, variant in VARIANTS.items()}

    def gradient(name, params, rows, weights):
        return jax.device_get(compiled[name](jax.device_get(params), rows, weights))

    return gradient


@pytest.fixture(scope="module")
def gradients():
    """Gradients by variant; the update step below recomputes layers too."""
    model = tiny_model(remat="none")
    return {
        name: gradient_of(model, variant.token_loss, **variant.settings)
        for name, variant in VARIANTS.items()
    }


@jax.jit
def plain_logprobs(params, token_ids):
    """Return the logprobs `[N, L]` of sequences, computed from all logits."""
    temperature = VARIANTS[ALL_TERMS].temperature
    score = lambda ids: dense_logprobs(params, TINY, ids, temperature=temperature)[0]  # noqa: E731
    return jax.vmap(score)(token_ids)


def plain_scores(params, sequences):
    return np.asarray(plain_logprobs(params, padded([s.token_ids for s in sequences])))


@pytest.fixture(scope="module")
def sequences(params):
    """Trajectories of old and reference policies near the current policy, some clipped."""
    rng = np.random.default_rng(3)
    sequences = random_sequences(LENGTHS)
    noisy = []
    for sequence, scores in zip(sequences, plain_scores(params, sequences), strict=True):
        length = len(sequence.token_ids)
        old, ref = scores[:length] + 0.3 * rng.standard_normal((2, length), np.float32)
        noisy.append(replace(sequence, old_logprobs=old, ref_logprobs=ref, rollout_logprobs=old))
    return noisy


@pytest.fixture(scope="module")
def packed(sequences):
    return pack_all(sequences, SHAPE)


@pytest.fixture(scope="module")
def batch(packed):
    return shard_batch(MESH, packed.batch)


ORDERS = {"": range(8), ", in another order": [5, 2, 7, 0, 6, 3, 1, 4]}


def packings(sequences, mode):
    """Yield the same trajectories cut up in different ways, each with a name."""
    for num_rows, row_tokens in ((2, 36), (4, 96)):
        shape = BatchShape(num_micro=8 // num_rows, micro_rows=num_rows, row_tokens=row_tokens)
        for name, order in ORDERS.items():
            packed = pack_all([sequences[i] for i in order], shape, aggregation=mode, scale=SCALE)
            yield f"{num_rows} rows of {row_tokens}{name}", packed
    halved = SHAPE.with_full_rows(SHAPE.num_full_rows // 2)
    yield "half the rows", pack_all(sequences, halved, aggregation=mode, scale=SCALE)


@pytest.mark.minutes
@pytest.mark.parametrize(
    "name",
    [
        ALL_TERMS,
        pytest.param(CLIP, marks=pytest.mark.slow(instead="::[ALL_TERMS]")),
        pytest.param(OLD_ANCHOR, marks=pytest.mark.slow(instead="::[ALL_TERMS]")),
    ],
)
def test_packing_and_micro_batches_and_order_change_no_gradient(
    name, params, gradients, plain, sequences
):
    for mode in AGGREGATIONS:
        weights = plain_weights(sequences, range(8), mode)
        expected = plain(name, params, by_rows(sequences), weights)
        metrics = []
        for packing, packed in packings(sequences, mode):
            actual, measured = gradients[name](params, packed.batch, packed.num_micro)
            assert relative_distance(actual, expected) < 1e-5, (mode, packing)
            metrics.append({key: float(metric.value) for key, metric in measured.items()})
        assert metrics[0]["actor/pg_clipfrac"] > 0.05
        assert (metrics[0]["actor/pg_clipfrac_lower"] > 0) == (name == CLIP)
        for measured in metrics[1:]:
            assert measured == pytest.approx(metrics[0], rel=1e-4, abs=1e-6)


@pytest.mark.minutes
def test_a_prompt_that_a_row_has_once_changes_no_gradient(params, gradients, plain, sequences):
    # Groups of four; in the first, prompts of 8 leave nothing of a sequence of 6 to learn from.
    members = sharing_prompts([sequences[i] for i in (2, 1, 3, 5, 0, 4, 6, 7)], [8, 5])
    weights = plain_weights(members, range(8), "token-mean")
    expected = plain(ALL_TERMS, params, by_rows(members), weights)
    shape = replace(SHAPE, shares_prompts=True)
    packed, whole = pack_all(members, shape), pack_all(members, SHAPE)
    assert packed.num_shared > 10
    actual, measured = gradients[ALL_TERMS](params, packed.batch, packed.num_micro)
    assert relative_distance(actual, expected) < 1e-5
    _, metrics = gradients[ALL_TERMS](params, whole.batch, whole.num_micro)
    for name, metric in measured.items():
        assert float(metric.value) == pytest.approx(float(metrics[name].value), rel=1e-4)


def test_scores_of_a_shared_prompt_are_those_of_whole_sequences(score, params, sequences):
    members = sharing_prompts(sequences, [7, 4])
    by_sharing = []
    for shares_prompts in (False, True):
        packed = pack_all(members, replace(SHAPE, shares_prompts=shares_prompts))
        values = np.asarray(score(params, shard_batch(MESH, packed.batch), packed))
        by_sharing.append(unpack_sequences(packed, values, members))
    for whole, shared in zip(*by_sharing, strict=True):
        np.testing.assert_allclose(shared, whole, rtol=2e-6)


def test_masked_tokens_have_no_gradient_whatever_stands_there(params, gradients, packed):
    for name in (CLIP, ALL_TERMS):
        expected = gradients[name](params, packed.batch, packed.num_micro)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(expected))
        for value in (np.inf, -np.inf, np.nan, 1e30, -1e30):
            fields = ("advantages", "rollout_logprobs", "old_logprobs", "ref_logprobs")
            changed = {
                field: np.where(packed.batch.loss_mask, getattr(packed.batch, field), value)
                for field in fields
            }
            actual = gradients[name](params, replace(packed.batch, **changed), packed.num_micro)
            assert is_equal(actual, expected), (name, value)


def test_improbable_masked_tokens_have_no_gradient(params, gradients, packed, sequences):
    # Logits a thousand times larger: tokens that were not sampled are impossible, to e**-1000s.
    rough = tiny_params()
    rough["lm_head"]["kernel"] *= 1000
    rough = put_params(rough)
    batch = packed.batch
    scores = [
        row[: len(s.token_ids)]
        for row, s in zip(plain_scores(rough, sequences), sequences, strict=True)
    ]
    logprobs = scatter(batch, scores)
    assert logprobs[~batch.loss_mask].min() < -1000
    nothing = replace(batch, loss_mask=np.zeros_like(batch.loss_mask))
    actual, _ = gradients[ALL_TERMS](rough, nothing, 4)
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(actual))
    actual, _ = gradients[ALL_TERMS](rough, batch, 4)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(actual))


def test_tokens_that_no_scored_position_reads_have_no_gradient(params, gradients, sequences):
    # Ids from 240 on are the last observation of some trajectories, the last sampled token of
    # others, and all of one without advantage: scored or not, nothing with a gradient reads them.
    special = range(240, 250)
    changed = []
    for index, sequence in enumerate(sequences):
        ids = np.where(sequence.token_ids >= 240, 7, sequence.token_ids)
        mask = sequence.loss_mask.copy()
        mask[-1], mask[-3:-1] = index % 2, index % 2
        ids[-1 if index % 2 else -3 :] = 240 + index
        changed.append(replace(sequence, token_ids=ids, loss_mask=mask))
    changed[0] = replace(changed[0], token_ids=np.full(LENGTHS[0], 249), advantage=0.0)
    packed = pack_all(changed, SHAPE)
    actual, _ = gradients[CLIP](params, packed.batch, packed.num_micro)
    rows = np.abs(np.asarray(actual["embed"]["embedding"])).max(axis=1)
    assert not rows[special].any()
    read = np.unique(np.concatenate([s.token_ids[:-3] for s in changed[1:]]))
    assert (rows[np.setdiff1d(read, special)] > 0).mean() > 0.5
    assert not rows[np.setdiff1d(np.arange(254), packed.batch.token_ids)].any()

    # Nor does it matter which they are, where they are not targets.
    swapped = np.where(packed.batch.loss_mask, packed.batch.token_ids, packed.batch.token_ids ^ 1)
    is_special = packed.batch.token_ids >= 240
    ids = np.where(is_special, swapped, packed.batch.token_ids)
    assert (ids != packed.batch.token_ids).sum() > 10
    again, _ = gradients[CLIP](params, replace(packed.batch, token_ids=ids), packed.num_micro)
    assert is_equal(actual, again)


def test_padded_vocabulary_has_no_gradient(params, gradients, packed):
    actual, _ = gradients[ALL_TERMS](params, packed.batch, packed.num_micro)
    columns = np.abs(np.asarray(actual["lm_head"]["kernel"])).max(axis=0)
    assert not columns[NUM_TOKENS:].any()
    assert columns[:NUM_TOKENS].all()


FREQUENT = {7: 4096, 11: 512}
"""Ids, and how often each occurs among the tokens below."""


def pack_frequent_tokens(*, row_tokens=256, num_rows=20):
    """Return a micro-batch where few ids are most of the text, rows of advantage 1 and -1."""
    rng = np.random.default_rng(0)
    ids = rng.integers(20, NUM_TOKENS, num_rows * row_tokens)
    positions = rng.permutation(len(ids))
    for token, count in FREQUENT.items():
        ids[positions[:count]], positions = token, positions[count:]
    shape = (1, num_rows, row_tokens)
    whole, position = np.ones(shape), np.broadcast_to(np.arange(row_tokens), shape)
    return Batch(
        token_ids=ids.reshape(shape).astype(np.int32),
        segment_ids=whole.astype(np.int32),
        positions=position.astype(np.int32),
        loss_mask=position > 0,
        token_weights=(whole / len(ids)).astype(np.float32),
        advantages=(whole * [[[1.0], [-1.0]] * (num_rows // 2)]).astype(np.float32),
        rollout_logprobs=np.zeros(shape, np.float32),
    )


def test_gradients_of_frequent_tokens_are_summed_in_float32():
    # In bfloat16 a sum of ones stands still at 256.
    config = replace(TINY, num_layers=1, qk_norm=False)
    params, batch = tiny_params(config, seed=0), pack_frequent_tokens()
    gradients = []
    for dtype in (jnp.bfloat16, jnp.float32):
        # 256 chunks, each of which adds to the output layer's gradient.
        settings = {"num_tokens": NUM_TOKENS, "dtype": dtype, "logits_chunk_tokens": 20}
        model = Model(config, MESH, XLA, remat="none", **settings)
        gradients.append(gradient_of(model, policy_loss())(params, batch, 1)[0])
    distances = jax.tree.map(relative_distance, *gradients)
    assert max(jax.tree.leaves(distances)) < 0.02, distances


# Whole steps.


@pytest.fixture(scope="module")
def update():
    variant = VARIANTS[ALL_TERMS]
    settings = {**variant.settings, "shares_programs": True}
    return UpdateStep(tiny_model(), variant.token_loss, OPTIMIZER, **settings)


@pytest.fixture(scope="module")
def score():
    return ScoreStep(tiny_model(), temperature=VARIANTS[ALL_TERMS].temperature)


@pytest.mark.minutes
def test_two_epochs_of_two_mini_batches_are_those_of_plain_arithmetic(
    update, score, params, plain, sequences
):
    halves = [(0, 1, 2, 3), (4, 5, 6, 7)]
    rows = by_rows(sequences)
    rows["old_logprobs"] = plain_scores(params, sequences)  # from before the first update
    batches = []
    for half in halves:
        packed = pack_all([sequences[i] for i in half], SHAPE, aggregation="seq-mean-token-mean")
        batch = shard_batch(MESH, packed.batch)
        old = score(params, batch, packed)
        batches.append((packed, replace(batch, old_logprobs=old)))

    state = fresh_state(params)
    expected = start = jax.device_get(params)
    momentum = jax.tree.map(np.zeros_like, expected)
    clipped = []
    for _ in range(2):
        for half, (packed, batch) in zip(halves, batches, strict=True):
            state, metrics = update(state, batch, packed)
            clipped.append(float(metrics["actor/pg_clipfrac"].value))

            weights = plain_weights(sequences, half, "seq-mean-token-mean")
            gradient = plain(ALL_TERMS, expected, rows, weights)
            norm = math.sqrt(sum(float((leaf**2).sum()) for leaf in jax.tree.leaves(gradient)))
            assert norm > 0.5  # so that it is cut to that
            assert float(metrics["grad_norm"].value) == pytest.approx(norm, rel=1e-4)
            momentum = jax.tree.map(
                lambda m, g, scale=0.5 / norm: 0.9 * m + np.float32(scale) * g, momentum, gradient
            )
            expected = jax.tree.map(lambda p, m: p - np.float32(0.3) * m, expected, momentum)
    assert clipped[0] == 0
    assert min(clipped[2:]) > 0.05
    actual = jax.device_get(state.params)
    assert relative_distance(actual, expected) < 1e-5
    moves = [jax.tree.map(np.subtract, after, start) for after in (actual, expected)]
    assert relative_distance(*moves) < 1e-4
    assert int(state.num_updates) == 4
    assert update.num_programs <= UPDATE_PROGRAMS


def logits_arrays(text):
    """Return the token counts of a program's arrays over the vocabulary, except weights."""
    return {
        shape: math.prod(shape) // TINY.vocab_size
        for shape in shapes_in(text)
        if math.prod(shape) % 127 == 0 and set(shape) - {1} != {TINY.vocab_size, TINY.width}
    }


def test_no_logits_beyond_a_chunk_are_in_memory(update, score, params, packed, batch):
    state = fresh_state(params)
    state, _ = update(state, batch, packed)
    score(params, batch, packed)
    span = np.int32(0), np.int32(1), (room := compute_logit_capacities(packed, 1)[0])
    sums = update.gradient.init_sums(state.params, batch)
    scores = jnp.zeros(batch.token_ids.shape, device=batch.token_ids.sharding)
    for text in (
        program_text(update.gradient.loop.program, state.params, sums, batch, *span),
        program_text(score.loop.program, params, scores, batch, *span),
    ):
        assert max(logits_arrays(text).values()) == split_evenly(72 * room // 4, CHUNK_TOKENS)[1]
    # The same look at a program whose chunk is a whole micro-batch finds it.
    careless = ScoreStep(tiny_model(chunk_tokens=72), temperature=1.0).loop.program
    text = careless.lower(params, scores, batch, *span).compile().as_text()
    assert max(logits_arrays(text).values()) == 72 * room // 4


def test_one_compilation_serves_any_number_of_micro_batches(update, params, sequences):
    state = fresh_state(params)
    seen = set()
    with compilations() as compiled:
        for members in (sequences[:2], sequences, sequences[:5], sequences[5:6], []):
            packed = pack_all(members, SHAPE)
            seen.add(packed.num_micro)
            batch = packed.batch
            if not members:
                extra = np.zeros(batch.token_ids.shape, np.float32)
                batch = replace(batch, old_logprobs=extra, ref_logprobs=extra)
            state, _ = update(state, shard_batch(MESH, batch), packed)
    assert seen == {0, 1, 2}
    assert update.num_programs <= UPDATE_PROGRAMS
    assert len(compiled) <= 5  # those not compiled by an earlier test
    assert int(state.num_updates) == 5


def update_once(params, sequences, variant):
    """Update with new objects; return the parameters and the number of compiled programs."""
    packed = pack_all(sequences[:2], SHAPE)
    batch, state = shard_batch(MESH, packed.batch), fresh_state(params)
    settings = {**variant.settings, "shares_programs": True}
    update = UpdateStep(tiny_model(), variant.token_loss, OPTIMIZER, **settings)
    with compilations() as compiled:
        state, _ = update(state, batch, packed)
        ScoreStep(tiny_model(), temperature=variant.temperature)(params, batch, packed)
    return jax.device_get(state.params), len(compiled)


def test_new_objects_of_equal_settings_compile_nothing(params, sequences):
    variant = VARIANTS[ALL_TERMS]
    first, _ = update_once(params, sequences, variant)
    again, count = update_once(params, sequences, replace(variant))
    assert count == 0
    assert is_equal(first, again)
    changed, count = update_once(params, sequences, replace(variant, entropy_coef=0.3))
    assert count > 0
    assert not is_equal(first, changed)


def test_a_user_loss_shares_no_programs():
    """Functions that the loss calls may change and be reloaded, while the loss stays the same."""
    assert method_with(
        **{"loss.name": "tests.training.test_signal_free.pulling_loss"}
    ).loss_has_user_code
    assert not method_with().loss_has_user_code


def test_shared_programs_hold_no_weights(params, packed):
    batch, model = shard_batch(MESH, packed.batch), tiny_model()
    model.base = {"beside": jnp.ones(3)}
    update = UpdateStep(model, policy_loss(), OPTIMIZER, shares_programs=True)
    score = ScoreStep(model, temperature=1.0)
    score.loop(params, jnp.zeros(batch.token_ids.shape), batch, packed)
    weights = weakref.ref(model.base["beside"])
    del update, score, model
    gc.collect()
    assert weights() is None


@pytest.mark.parametrize("bad", [np.nan, 3e38])
def test_a_gradient_that_is_not_finite_is_skipped_and_counted(bad, update, params, packed):
    good = shard_batch(MESH, packed.batch)
    advantages = packed.batch.advantages.copy()
    advantages[tuple(np.argwhere(packed.batch.loss_mask)[5])] = bad
    broken = shard_batch(MESH, replace(packed.batch, advantages=advantages))

    state = fresh_state(params)
    state, metrics = update(state, good, packed)
    assert (float(metrics["skipped"].value), int(state.num_skipped)) == (0, 0)
    before = jax.device_get(state)
    state, metrics = update(state, broken, packed)
    assert not np.isfinite(metrics["grad_norm"].value)
    assert float(metrics["skipped"].value) == 1
    assert is_equal((state.params, state.opt_state), (before.params, before.opt_state))
    assert (int(state.num_updates), int(state.num_skipped)) == (1, 1)

    # The next updates are those of a run without the broken batch.
    state, _ = update(state, good, packed)
    same = fresh_state(params)
    for _ in range(2):
        same, _ = update(same, good, packed)
    assert is_equal((state.params, state.opt_state), (same.params, same.opt_state))
    assert (int(state.num_updates), int(state.num_skipped)) == (2, 1)


def test_state_is_donated(update, params, packed, batch):
    before = fresh_state(params)
    after, _ = update(before, batch, packed)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((before.params, before.opt_state)))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((after, batch)))


def test_a_factor_of_the_learning_rate_scales_the_change(update, params, packed, batch):
    (whole, _), (half, _) = (
        update(fresh_state(params), batch, packed, scale) for scale in (None, 0.5)
    )

    def assert_halved(half, whole, before):
        half, whole, before = (np.asarray(x, np.float64) for x in (half, whole, before))
        np.testing.assert_allclose(half - before, (whole - before) / 2, rtol=0, atol=1e-7)

    jax.tree.map(assert_halved, half.params, whole.params, params)
    assert is_equal(whole.opt_state, half.opt_state)


def memories(state):
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(state.opt_state)}


def test_moments_are_in_host_memory_between_updates(update, params, packed, batch):
    variant = VARIANTS[ALL_TERMS]
    settings = {**variant.settings, "shares_programs": True, "offload": True}
    offloading = UpdateStep(tiny_model(), variant.token_loss, OPTIMIZER, **settings)
    state, offloaded = fresh_state(params), move_moments(fresh_state(params), HOST_MEMORY)
    assert (memories(state), memories(offloaded)) == ({"device"}, {HOST_MEMORY})
    for _ in range(2):
        state, _ = update(state, batch, packed)
        offloaded, _ = offloading(offloaded, batch, packed)
        assert (memories(state), memories(offloaded)) == ({"device"}, {HOST_MEMORY})
        assert is_equal(state, offloaded)
    assert offloading.num_programs <= UPDATE_PROGRAMS


def test_single_step_takes_its_own_logprobs_for_the_old(score, params, sequences, gradients):
    packed = pack_all(sequences[:4], SHAPE)
    batch = packed.batch
    scores = np.asarray(score(params, shard_batch(MESH, batch), packed))
    expected, _ = gradients[ALL_TERMS](
        params, replace(batch, old_logprobs=scores), packed.num_micro
    )
    alone = replace(batch, old_logprobs=None)
    actual, metrics = gradients[ALL_TERMS](params, alone, packed.num_micro)
    assert relative_distance(actual, expected) < 1e-5
    assert float(metrics["actor/ppo_kl"].value) == 0
    assert float(metrics["actor/pg_clipfrac"].value) == 0


@pytest.mark.parametrize("name", ["clip", "gspo", "cispo"])
def test_old_logprobs_of_the_sampler_are_those_of_the_rollout(name, packed):
    micro = jax.tree.map(lambda x: np.asarray(x[0]), packed.batch)
    rng, mask = np.random.default_rng(4), micro.loss_mask
    logprobs, rollout, scores = rng.normal(-3, 0.3, (3, *mask.shape)).astype(np.float32)
    micro = replace(micro, rollout_logprobs=np.where(mask, rollout, 0), old_logprobs=None)

    def compute_loss(source, old):
        loss = {"name": name, "old_logprobs": source}
        if name == "gspo":
            loss["aggregation"] = "seq-mean-token-mean"
        token_loss = policy_loss(loss=loss)
        return token_loss(logprobs, np.zeros_like(logprobs), replace(micro, old_logprobs=old))

    expected, _ = compute_loss("trainer", micro.rollout_logprobs)
    # The metric compares the sampler with the trainer, whose scores are current if not computed.
    for old, trainer in ((None, logprobs), (scores, scores)):
        actual, metrics = compute_loss("sampler", old)
        np.testing.assert_array_equal(actual, expected)
        gaps = np.abs(np.where(mask, trainer - rollout, 0))
        measured = metrics["rollout_corr/logprob_diff_max"].value
        np.testing.assert_allclose(measured, gaps, rtol=1e-5, atol=1e-6)
