"""Trajectories of several contexts: sampled, packed and trained as one rollout."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs import debug_tiny
from jaxrl.builders.validation import validate
from jaxrl.data.serialization import deserialize_trajectory, serialize_trajectory
from jaxrl.envs.base import Observation, Outcome, StepResult
from jaxrl.envs.protocol import SEARCH_R1
from jaxrl.logs.records import build_trajectory_record
from jaxrl.models.attention.choice import select_kernels
from jaxrl.models.attention.kernels import compute_key_ranges
from jaxrl.models.policy import Model
from jaxrl.objectives.advantages import ESTIMATORS
from jaxrl.objectives.aggregation import AGGREGATIONS
from jaxrl.sampling.contexts import ContextRule, TurnIds, drop_observations, keep_last_turns
from jaxrl.sampling.demonstrations import encode_demonstration
from jaxrl.sampling.episodes import TokenLimits
from jaxrl.sampling.observations import encode_observation
from jaxrl.training.minibatches import with_loss_mask
from jaxrl.training.packing import BatchShape, compute_sequence_sizes, pack_sequences, select_tokens
from jaxrl.training.reference_kl import unpack_sequences
from jaxrl.types import Columns
from tests.choices import (
    LOSSES,
    WHOLE,
    estimator,
    flat,
    loss_gradient,
    loss_of,
    mode_of,
    sequences,
    whole_gradient,
)
from tests.episodes import grouped, make_trajectory
from tests.helpers import (
    method_with,
    pack_all,
    random_sequences,
    relative_distance,
    scatter,
    sharing_prompts,
    tiny_params,
)
from tests.toys import (
    SMALL,
    Player,
    ScriptedEnv,
    one_device_mesh,
    script,
    showing,
    toy_tokenizer,
)

pytestmark = pytest.mark.usefixtures("quick_compilation", "one_size")

# The beginning of a further context.

TURNS = [
    TurnIds(sampled=[10 * n, 10 * n + 1], observation=[10 * n + 2, 10 * n + 3], placeholder=[n])
    for n in range(1, 4)
]


def test_context_beginnings_by_hand():
    one, two, three = [10, 11, 12, 13], [20, 21, 22, 23], [30, 31, 32, 33]
    assert drop_observations(TURNS, 1) == [10, 11, 1, 20, 21, 2, *three]
    assert drop_observations(TURNS, 2) == [10, 11, 1, *two, *three]
    assert drop_observations(TURNS, 9) == [*one, *two, *three]
    assert keep_last_turns(TURNS, 1) == three
    assert keep_last_turns(TURNS, 2) == [*two, *three]
    assert keep_last_turns(TURNS, 9) == [*one, *two, *three]


def test_as_many_turns_as_fit_are_repeated():
    def next_context(max_tokens, name="last_turns"):
        rule = ContextRule(name=name, max_tokens=max_tokens, keep=2, turn_tokens=3)
        return rule.build_next_context([7, 8], TURNS)

    assert next_context(13) == ([7, 8, 20, 21, 22, 23, 30, 31, 32, 33], 8)
    assert next_context(12) == ([7, 8, 30, 31, 32, 33], 4)
    assert next_context(9) == ([7, 8, 30, 31, 32, 33], 4)
    assert next_context(8) is None
    shortened = [7, 8, 10, 11, 1, 20, 21, 2, 30, 31, 32, 33]
    assert next_context(15, "drop_observations") == (shortened, 10)
    assert next_context(14, "drop_observations") is None
    many = ContextRule(name="last_turns", max_tokens=12, keep=10**9, turn_tokens=3)
    assert many.build_next_context([7, 8], TURNS) == ([7, 8, 30, 31, 32, 33], 4)


# Rollouts.

STOPS = tuple("abcdefghijklmnopqrstuvwxyzABCDEF")  # a turn of a random policy has some ten tokens
PLACES = [
    "Rome, as all the world knows, and nowhere else",
    "a town by the sea",
    "x",
    "the old harbor " * 4,
]


def observation(turn):
    return Observation(prefix="\n<i>", body=PLACES[turn % 4], suffix="</i>\n")


@pytest.fixture(scope="module")
def player():
    sizes = {"num_rows": 3, "max_total_tokens": 160}
    player = Player(SMALL, toy_tokenizer(), STOPS, **sizes)
    player.engine.set_weights(tiny_params(SMALL))
    return player


def limits(name, *, keep=2, max_tokens=160, max_total=1024):
    return TokenLimits(
        max_prompt_tokens=32,
        max_response_tokens=256,
        max_total_tokens=max_total,
        max_observation_tokens=40,
        context=ContextRule(name=name, max_tokens=max_tokens, keep=keep, turn_tokens=30),
    )


def play(player, limits):
    replies = [StepResult(observation=observation(turn)) for turn in range(7)]
    env = ScriptedEnv(STOPS, script(*replies, StepResult(outcome=Outcome.ANSWERED)))
    return player.play(env, ["Where?", "Who was it?"], limits=limits, group_size=3)


@pytest.fixture(scope="module")
def rollouts(player):
    """Trajectories under each rule."""
    names = ("drop_observations", "last_turns")
    return {name: play(player, limits(name)) for name in names}


def sampled_ids(trajectory):
    """Return the ids sampled in each turn, from the mask."""
    turns = []
    for start in trajectory.turn_starts:
        mask = trajectory.loss_mask[start:]
        count = len(mask) if mask.all() else int(mask.argmin())
        turns.append(trajectory.token_ids[start : start + count].tolist())
    return turns


def expected(trajectory, tokenizer, limits):
    """Return all ids and the starts of contexts, from prompt, turns and observations alone."""
    rule = limits.context
    prompt = trajectory.token_ids[: trajectory.prompt_length].tolist()
    done, current, starts, history = [], list(prompt), [], []
    for number, ids in enumerate(sampled_ids(trajectory)):
        current += ids
        if trajectory.turns[number].observation is None:
            break
        shown = observation(number)
        complete, _ = encode_observation(tokenizer, shown, max_body_tokens=40)
        omitted = dataclasses.replace(shown, body="…")
        placeholder, _ = encode_observation(tokenizer, omitted, max_body_tokens=40)
        history.append((ids, complete, placeholder))
        if len(current) + len(complete) + rule.turn_tokens <= rule.max_tokens:
            current += complete
            continue
        for keep in range(rule.keep, 0, -1):
            following = list(prompt)
            for age, (sampled, full, short) in enumerate(reversed(history)):
                if rule.name == "last_turns":
                    added = [*sampled, *full] if age < keep else []
                else:
                    added = [*sampled, *(full if age < keep else short)]
                following[len(prompt) : len(prompt)] = added
            if len(following) + rule.turn_tokens <= rule.max_tokens:
                break
        done += current
        starts.append((len(done), len(following) - len(complete)))
        current = following
    return [*done, *current], starts


@pytest.mark.parametrize("name", ["drop_observations", "last_turns"])
def test_a_rollout_goes_through_contexts(player, rollouts, name):
    rule, trajectories = limits(name), rollouts[name]
    assert any(len(t.contexts) > 1 for t in trajectories)
    assert any(t.outcome == Outcome.ANSWERED for t in trajectories)
    for trajectory in trajectories:
        ids, starts = expected(trajectory, player.tokenizer, rule)
        assert trajectory.token_ids.tolist() == ids
        assert list(trajectory.contexts) == starts
        ends = [*(start for start, _ in starts), len(ids)]
        assert max(np.diff([0, *ends])) <= rule.context.max_tokens
        assert not trajectory.loss_mask[trajectory.is_repeated].any()
        # All that was sampled and inserted, each once.
        fresh = trajectory.token_ids[trajectory.prompt_length :]
        fresh = fresh[~trajectory.is_repeated[trajectory.prompt_length :]]
        assert trajectory.response_length == len(fresh)
        text = "".join(turn.text for turn in trajectory.turns)
        assert trajectory.generated_text.startswith(trajectory.turns[0].text)
        assert len(text) <= len(player.tokenizer.decode(fresh.tolist()))
    for trajectory, repeated in zip(trajectories, play(player, rule), strict=True):
        np.testing.assert_array_equal(trajectory.token_ids, repeated.token_ids)
        np.testing.assert_array_equal(trajectory.rollout_logprobs, repeated.rollout_logprobs)


def test_a_trajectory_that_fits_one_context_equals_one_without_a_rule(player):
    roomy = dataclasses.replace(limits("last_turns"), max_response_tokens=20)
    plain = dataclasses.replace(roomy, context=None, max_total_tokens=160)
    pairs = [*zip(play(player, roomy), play(player, plain), strict=True)]
    fitting = [pair for pair in pairs if not pair[0].contexts]
    assert len(fitting) > 2
    for with_rule, without in fitting:
        np.testing.assert_array_equal(with_rule.token_ids, without.token_ids)


def test_the_total_counts_all_contexts_and_an_episode_without_room_ends(player):
    for trajectory in play(player, limits("drop_observations", max_total=300)):
        assert len(trajectory.token_ids) <= 300
    # Every turn stays, so that some day nothing is left to drop.
    small = play(player, limits("drop_observations", max_tokens=110, keep=1))
    ended = [t for t in small if t.outcome == Outcome.OUT_OF_BUDGET]
    assert ended
    assert all(t.turns[-1].observation is None for t in ended)


def test_each_context_has_draws_of_its_own(player):
    # A position repeats in each context; with one key its draws would, too.
    trajectories = play(player, limits("last_turns", keep=1))
    long = [tuple(ids) for t in trajectories for ids in sampled_ids(t) if len(ids) > 4]
    assert sum(len(t.contexts) for t in trajectories) > 4
    assert len(set(long)) == len(long) > 12


@pytest.mark.parametrize("shares_prompts", [False, True])
def test_the_trainer_reads_what_the_sampler_read(player, rollouts, shares_prompts):
    trajectories = rollouts["drop_observations"]
    advantages = np.ones(len(trajectories), np.float32)
    shape = BatchShape(num_micro=6, micro_rows=1, row_tokens=1024, shares_prompts=shares_prompts)
    packed = pack_sequences(trajectories, advantages, shape)
    assert (packed.num_shared > 0) == shares_prompts
    mesh = one_device_mesh()
    kernels, num_tokens = select_kernels("xla", mesh, SMALL), player.tokenizer.num_tokens
    model = Model(SMALL, mesh, kernels, num_tokens=num_tokens, remat="none")
    params = jax.tree.map(jnp.asarray, tiny_params(SMALL))
    batch = jax.tree.map(jnp.asarray, packed.batch)
    micros = [jax.tree.map(lambda x, i=i: x[i], batch) for i in range(packed.num_micro)]
    score = jax.jit(
        lambda params, batch: model.compute_token_logprobs(params, batch, temperature=1.0)[0]
    )
    values = np.stack([score(params, micro) for micro in micros])
    values = np.pad(values, ((0, 6 - len(values)), (0, 0), (0, 0)))
    for trajectory, scored in zip(
        trajectories, unpack_sequences(packed, values, trajectories), strict=True
    ):
        mask = trajectory.loss_mask
        np.testing.assert_allclose(scored[mask], trajectory.rollout_logprobs[mask], atol=2e-4)
        assert not scored[~mask].any()


# One rollout, many contexts: its weight, its ratio and its advantage are the rollout's.

# What is repeated has no loss, whatever its log-probabilities are; entropies are always 0 there.
REPEATED = {"rollout_logprobs": -3, "old_logprobs": -3, "ref_logprobs": -3, "rollout_entropies": 0}


def cut(rollout, starts):
    """Return the same rollout in contexts that begin with all that was before these tokens."""
    order, contexts, is_new = list(range(starts[0])), [], [True] * starts[0]
    for start, end in itertools.pairwise([*starts, len(rollout.token_ids)]):
        contexts.append((len(order), start))
        order += range(end)
        is_new += [False] * start + [True] * (end - start)
    fields = {"token_ids": rollout.token_ids[order], "contexts": tuple(contexts)}
    fields["loss_mask"] = rollout.loss_mask[order] & np.array(is_new)
    for name, repeated in REPEATED.items():
        values = getattr(rollout, name, None)
        if values is not None:
            fields[name] = np.where(is_new, values[order], np.float32(repeated))
    return dataclasses.replace(rollout, **fields)


def cut_at_random(members, rng, *, between_turns=False):
    """Cut rollouts into one to four contexts each; `between_turns` cuts no turn in two."""
    cuts = []
    for member in members:
        mask = member.loss_mask
        possible = np.arange(int(mask.argmax()) + 1, len(mask) if mask.any() else 0)
        if between_turns:
            possible = possible[~(mask[possible - 1] & mask[possible])]
        count = min(int(rng.integers(0, 4)), len(possible))
        starts = sorted(rng.choice(possible, count, replace=False).tolist())
        cuts.append(cut(member, starts) if starts else member)
    return cuts


LONG = BatchShape(num_micro=1, micro_rows=8, row_tokens=128)
TERMS = ("weighed k3", "k3 to old", "no KL")
CORRECTED = ("sequence truncate", "geometric reject", "token mask")


@pytest.mark.parametrize(("number", "loss"), list(enumerate(LOSSES)))
def test_contexts_change_neither_loss_nor_gradient(number, loss):
    """In float64, of what the loss makes of given log-probabilities, each sampled token once."""
    members, rng = sequences(), np.random.default_rng(3)
    # LLDS looks at actions, which end where what was sampled does.
    split = cut_at_random(members, rng, between_turns="llds" in loss)
    assert any(member.contexts for member in split)
    logprobs_of = [
        member.old_logprobs + 0.3 * rng.standard_normal(len(member.token_ids)) for member in members
    ]
    token_loss = loss_of(loss, TERMS[number % 3], CORRECTED[number % 3])
    aggregation = list(AGGREGATIONS)[number % len(AGGREGATIONS)]
    totals, gradients = [], []
    with jax.enable_x64(True):
        gradient = loss_gradient(token_loss)
        for rollouts in (members, split):
            batch = pack_all(rollouts, LONG, aggregation=aggregation, scale=40).batch
            weights = scatter(batch, [np.full(len(each.token_ids), 0.2) for each in rollouts])
            batch = dataclasses.replace(batch, kl_weights=weights)
            batch = flat(jax.tree.map(as_float64, batch))
            logprobs = np.full(batch.token_ids.shape, -7.0)
            sampled = []  # positions of each rollout's sampled tokens, in order
            for i, (member, values) in enumerate(zip(members, logprobs_of, strict=True)):
                sampled.append((batch.segment_ids == i + 1) & np.asarray(batch.loss_mask))
                logprobs[sampled[-1]] = values[member.loss_mask]
            values, _ = token_loss(jnp.asarray(logprobs), jnp.ones_like(logprobs), batch)
            totals.append(float((values * batch.token_weights).sum()))
            by_logprob, _ = gradient(logprobs, np.ones_like(logprobs), batch)
            gradients.append(np.concatenate([np.asarray(by_logprob)[mask] for mask in sampled]))
    assert gradients[0].dtype == np.float64
    assert totals[1] == pytest.approx(totals[0], rel=1e-6)
    assert relative_distance(gradients[1], gradients[0]) < 1e-6


def as_float64(x):
    return np.float64(x) if np.asarray(x).dtype == np.float32 else x


@pytest.mark.minutes
def test_contexts_change_no_gradient_of_the_update():
    """Of the model's parameters, in float32; with prompts shared and without."""
    loss, kl, correction = WHOLE[1]
    members = sharing_prompts(sequences(), [6, 5])
    members = [member for member in members if member.loss_mask.any()]
    split = cut_at_random(members, np.random.default_rng(4))
    assert any(member.contexts for member in split)
    gradient = whole_gradient(one_device_mesh(), loss, kl, correction)
    gradients = []
    for rollouts, shares in ((members, False), (split, False), (split, True)):
        shape = BatchShape(num_micro=8, micro_rows=1, row_tokens=160, shares_prompts=shares)
        packed = pack_all(rollouts, shape, aggregation=mode_of(loss))
        kl_weights = packed.batch.loss_mask * np.float32(0.2)
        batch = dataclasses.replace(packed.batch, kl_weights=kl_weights)
        assert (packed.num_shared > 0) == shares
        gradients.append(gradient(tiny_params(), batch, packed.num_micro)[0])
    assert relative_distance(gradients[1], gradients[0]) < 1e-5
    assert relative_distance(gradients[2], gradients[0]) < 1e-5


@pytest.mark.parametrize("name", ESTIMATORS)
def test_contexts_change_no_advantage(name):
    rng = np.random.default_rng(0)
    plain = [
        dataclasses.replace(
            make_trajectory(task_number=i // 4, sample_index=i, reward=float(i % 3), length=14),
            is_correct=i % 3 == 2,
        )
        for i in range(12)
    ]
    split = [cut(member, sorted({*rng.integers(4, 13, 2).tolist()})) for member in plain]
    assert np.array_equal(estimator(name)(plain, 0), estimator(name)(split, 0))
    columns = [Columns(grouped(trajectories)) for trajectories in (plain, split)]
    assert columns[0].token_counts.tolist() == columns[1].token_counts.tolist()
    np.testing.assert_allclose(*(each.mean_entropies for each in columns), rtol=1e-6)


# Packing and saving.


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31), shares_prompts=st.booleans())
def test_every_token_is_packed_with_what_it_read(seed, shares_prompts):
    rng = np.random.default_rng(seed)
    members = random_sequences(rng.integers(8, 30, 6).tolist(), seed=seed)
    members = cut_at_random(sharing_prompts(members, [6, 4]), rng)
    shape = BatchShape(num_micro=8, micro_rows=1, row_tokens=128, shares_prompts=shares_prompts)
    packed = pack_sequences(members, np.ones(len(members), np.float32), shape)
    batch = packed.batch
    key_ranges = np.asarray(
        compute_key_ranges(*(jnp.asarray(x[:, 0]) for x in (batch.segment_ids, batch.positions)))
    )
    num_seen = [np.zeros(len(member.token_ids), int) for member in members]
    for row in range(packed.num_micro):
        for t in np.flatnonzero(batch.segment_ids[row, 0]):
            start, shared, end = key_ranges[row, :, t]
            indices = [*range(shared, end), *range(start, t + 1)]
            read = batch.token_ids[row, 0, indices].tolist()
            number = batch.segment_ids[row, 0, t] - 1
            member = members[number]
            # The context whose beginning was read.
            starts = [0, *(begin for begin, _ in member.contexts), len(member.token_ids)]
            matching = [
                begin
                for begin, until in itertools.pairwise(starts)
                if begin + len(read) <= until
                and member.token_ids[begin : begin + len(read)].tolist() == read
            ]
            assert matching
            num_seen[number][[begin + len(read) - 1 for begin in matching]] += 1
            assert batch.positions[row, 0, t] == len(read) - 1
    for member, count, item in zip(
        members, num_seen, compute_sequence_sizes(members, shape), strict=True
    ):
        assert (count[member.loss_mask] > 0).all()
        selected, _ = select_tokens(member, item, 0)
        assert member.loss_mask.sum() == member.loss_mask[selected].sum()
    assert batch.loss_mask.sum() == sum(int(member.loss_mask.sum()) for member in members)
    for values, member in zip(
        unpack_sequences(packed, batch.rollout_logprobs, members), members, strict=True
    ):
        mask = member.loss_mask
        np.testing.assert_array_equal(values[mask], member.rollout_logprobs[mask])


def test_contexts_are_saved_and_logged(rollouts):
    trajectory = max(rollouts["last_turns"], key=lambda t: len(t.contexts))
    assert deserialize_trajectory(serialize_trajectory(trajectory)).contexts == trajectory.contexts
    logged = build_trajectory_record(trajectory)["contexts"]
    assert [tuple(context) for context in logged] == [*trajectory.contexts]
    loss = method_with(**{"loss.mask_observations": False}).loss
    trained = with_loss_mask(trajectory, loss)
    assert trained.loss_mask.sum() == trajectory.response_length
    assert trajectory.loss_mask.sum() < trajectory.response_length


def test_demonstrations_go_through_the_contexts_of_a_rollout():
    tokenizer = toy_tokenizer()
    chat = [{"role": "user", "content": "Who?"}]
    for number in range(4):
        chat.append({"role": "assistant", "content": f"<search>who is {number}</search>"})
        chat.append({"role": "tool", "content": f"it is {number + 1}"})
    chat.append({"role": "assistant", "content": "<answer>4</answer>"})
    rule = ContextRule(name="last_turns", max_tokens=150, keep=1, turn_tokens=40)
    whole = encode_demonstration(chat, tokenizer, showing(30))
    split = encode_demonstration(chat, tokenizer, showing(30, rule))
    assert whole.contexts == ()
    assert len(split.contexts) > 1
    starts = [0, *(start for start, _ in split.contexts), len(split.token_ids)]
    assert max(np.diff(starts)) <= 150
    parts = [tokenizer.decode(split.token_ids[a:b].tolist()) for a, b in itertools.pairwise(starts)]
    assert all(part.startswith("<|im_start|>Who?") for part in parts)
    shown = SEARCH_R1.render_observation("it is 4")
    assert shown.prefix + shown.body + shown.suffix in parts[-1]
    assert "who is 0" not in parts[-1]
    np.testing.assert_array_equal(
        split.token_ids[split.loss_mask], whole.token_ids[whole.loss_mask]
    )
    # A long result is cut to what a context has room for, as in a rollout.
    chat[-4]["content"] = "it is 3 " + "and on " * 20
    long = encode_demonstration(chat, tokenizer, showing(200, rule))
    starts = [0, *(start for start, _ in long.contexts), len(long.token_ids)]
    assert max(np.diff(starts)) <= 150
    assert "and on and on" in tokenizer.decode(long.token_ids.tolist())
    tight = dataclasses.replace(rule, max_tokens=100)
    with pytest.raises(ValueError, match=r"config\.rollout\.context\.max_tokens=100"):
        encode_demonstration(chat, tokenizer, showing(30, tight))


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"rollout.context.max_tokens": 60}, "rollout.context.max_tokens"),
        ({"shaping.overlong_buffer": 8}, "shaping.overlong_max_tokens"),
        (
            {
                **{"policy.name": "openai", "policy.openai.model": "m", "stages": ("evaluate",)},
                "policy.openai.url": "http://127.0.0.1:1/v1",
            },
            "rollout.context.name",
        ),
    ],
)
def test_settings_that_contexts_exclude_are_refused(changes, key):
    config = debug_tiny.get_config("data/x")
    config.rollout.context.update({"name": "last_turns", "max_tokens": 150})
    validate(config, needs_data=False)
    config.update_from_flattened_dict(changes)
    with pytest.raises(ValueError, match=rf"^config\.{key} is "):
        validate(config, needs_data=False)


def test_a_model_that_reads_images_has_one_context():
    tower = object.__new__(type("Tower", (), {"token_id": 3}))
    shape = BatchShape(num_micro=1, micro_rows=1, row_tokens=64, tower=tower)
    [sequence] = random_sequences([40])
    with pytest.raises(ValueError, match=r"config\.rollout\.context\.name to 'none'"):
        compute_sequence_sizes([cut(sequence, [20])], shape)
