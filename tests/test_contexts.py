"""Trajectories of several contexts: sampled, packed and trained as what they are, one rollout."""

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
from jaxrl.data.serialization import from_json, to_json
from jaxrl.envs.base import Observation, Outcome, StepResult
from jaxrl.envs.protocol import SEARCH_R1
from jaxrl.logs.records import trajectory_to_record
from jaxrl.models.attention.kernels import find_reads
from jaxrl.objectives.advantages import ESTIMATORS
from jaxrl.objectives.aggregation import AGGREGATIONS
from jaxrl.sampling.contexts import ContextRule, TurnIds, drop_observations, keep_last_turns
from jaxrl.sampling.demonstrations import encode_demonstration
from jaxrl.sampling.episodes import TokenLimits
from jaxrl.sampling.observations import encode_observation
from jaxrl.training.minibatches import with_loss_mask
from jaxrl.training.packing import BatchShape, make_items, pack, select_tokens
from jaxrl.training.reference_kl import unpack
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

# What a further context begins with.

TURNS = [
    TurnIds(sampled=[10 * n, 10 * n + 1], observation=[10 * n + 2, 10 * n + 3], placeholder=[n])
    for n in range(1, 4)
]


def test_what_is_kept_by_hand():
    one, two, three = [10, 11, 12, 13], [20, 21, 22, 23], [30, 31, 32, 33]
    assert drop_observations(TURNS, 1) == [10, 11, 1, 20, 21, 2, *three]
    assert drop_observations(TURNS, 2) == [10, 11, 1, *two, *three]
    assert drop_observations(TURNS, 9) == [*one, *two, *three]
    assert keep_last_turns(TURNS, 1) == three
    assert keep_last_turns(TURNS, 2) == [*two, *three]
    assert keep_last_turns(TURNS, 9) == [*one, *two, *three]


def test_as_many_as_there_is_room_for_are_kept():
    def following(max_tokens, name="last_turns"):
        contexts = ContextRule(name=name, max_tokens=max_tokens, keep=2, turn_tokens=3)
        return contexts.next_context([7, 8], TURNS)

    assert following(13) == ([7, 8, 20, 21, 22, 23, 30, 31, 32, 33], 8)
    assert following(12) == ([7, 8, 30, 31, 32, 33], 4)
    assert following(9) == ([7, 8, 30, 31, 32, 33], 4)
    assert following(8) is None
    assert following(15, "drop_observations") == ([7, 8, 10, 11, 1, 20, 21, 2, 30, 31, 32, 33], 10)
    assert following(14, "drop_observations") is None
    many = ContextRule(name="last_turns", max_tokens=12, keep=10**9, turn_tokens=3)
    assert many.next_context([7, 8], TURNS) == ([7, 8, 30, 31, 32, 33], 4)


# Rollouts.

STOPS = tuple("abcdefghijklmnopqrstuvwxyzABCDEF")  # a turn of a random policy has some ten tokens
PLACES = [
    "Rome, as all the world knows, and nowhere else",
    "a town by the sea",
    "x",
    "the old harbour " * 4,
]


def observation(turn):
    return Observation(prefix="\n<i>", body=PLACES[turn % 4], suffix="</i>\n")


@pytest.fixture(scope="module")
def player():
    made = Player(SMALL, toy_tokenizer(), STOPS, num_rows=3, max_total_tokens=160,
                  max_prompt_tokens=160)  # fmt: skip
    made.engine.set_weights(tiny_params(SMALL))
    return made


def limits(name, *, keep=2, max_tokens=160, max_total=1024):
    contexts = ContextRule(name=name, max_tokens=max_tokens, keep=keep, turn_tokens=30)
    return TokenLimits(
        max_prompt_tokens=32,
        max_response_tokens=256,
        max_total_tokens=max_total,
        max_observation_tokens=40,
        context=contexts,
    )


def play(player, limits, **settings):
    env = ScriptedEnv(
        STOPS,
        script(
            *[StepResult(observation=observation(turn)) for turn in range(7)],
            StepResult(outcome=Outcome.ANSWERED),
        ),
    )
    return player.play(env, ["Where?", "Who was it?"], limits=limits, group_size=3, **settings)


def ids_of_turns(trajectory):
    """What was sampled in each turn, from the mask."""
    found = []
    for start in trajectory.turn_starts:
        mask = trajectory.loss_mask[start:]
        count = len(mask) if mask.all() else int(mask.argmin())
        found.append(trajectory.token_ids[start : start + count].tolist())
    return found


def expected(trajectory, tokenizer, limits):
    """All ids and the starts of contexts, told again from prompt, turns and observations."""
    contexts, sampled = limits.context, ids_of_turns(trajectory)
    prompt = trajectory.token_ids[: trajectory.prompt_length].tolist()
    done, current, starts = [], list(prompt), []
    history = []
    for number, ids in enumerate(sampled):
        current += ids
        if trajectory.turns[number].observation is None:
            break
        shown = observation(number)
        whole, _ = encode_observation(tokenizer, shown, max_body_tokens=40)
        short = dataclasses.replace(shown, body="…")
        brief, _ = encode_observation(tokenizer, short, max_body_tokens=40)
        history.append((ids, whole, brief))
        if len(current) + len(whole) + contexts.turn_tokens <= contexts.max_tokens:
            current += whole
            continue
        for keep in range(contexts.keep, 0, -1):
            following = list(prompt)
            for age, (own, full, little) in enumerate(reversed(history)):
                if contexts.name == "last_turns":
                    added = [*own, *full] if age < keep else []
                else:
                    added = [*own, *(full if age < keep else little)]
                following[len(prompt) : len(prompt)] = added
            if len(following) + contexts.turn_tokens <= contexts.max_tokens:
                break
        done += current
        starts.append((len(done), len(following) - len(whole)))
        current = following
    return [*done, *current], starts


@pytest.mark.parametrize("name", ["drop_observations", "last_turns"])
def test_a_rollout_goes_through_contexts(player, name):
    own = limits(name)
    trajectories = play(player, own)
    assert any(len(t.contexts) > 1 for t in trajectories)
    assert any(t.outcome == Outcome.ANSWERED for t in trajectories)
    for trajectory in trajectories:
        ids, starts = expected(trajectory, player.tokenizer, own)
        assert trajectory.token_ids.tolist() == ids
        assert list(trajectory.contexts) == starts
        ends = [*(start for start, _ in starts), len(ids)]
        assert max(np.diff([0, *ends])) <= own.context.max_tokens
        assert not trajectory.loss_mask[trajectory.is_repeated].any()
        # All that was sampled and inserted, each once.
        fresh = trajectory.token_ids[trajectory.prompt_length :]
        fresh = fresh[~trajectory.is_repeated[trajectory.prompt_length :]]
        assert trajectory.response_length == len(fresh)
        text = "".join(turn.text for turn in trajectory.turns)
        assert trajectory.generated_text.startswith(trajectory.turns[0].text)
        assert len(text) <= len(player.tokenizer.decode(fresh.tolist()))
    again = play(player, own)
    for one, other in zip(trajectories, again, strict=True):
        np.testing.assert_array_equal(one.token_ids, other.token_ids)
        np.testing.assert_array_equal(one.rollout_logprobs, other.rollout_logprobs)


def test_one_that_fits_its_context_is_as_without(player):
    roomy = dataclasses.replace(limits("last_turns"), max_response_tokens=20)
    plain = dataclasses.replace(roomy, context=None, max_total_tokens=160)
    pairs = [*zip(play(player, roomy), play(player, plain), strict=True)]
    fitting = [(one, other) for one, other in pairs if not one.contexts]
    assert len(fitting) > 2
    for one, other in fitting:
        np.testing.assert_array_equal(one.token_ids, other.token_ids)


def test_contexts_count_together_and_an_episode_without_room_ends(player):
    for trajectory in play(player, limits("drop_observations", max_total=300)):
        assert len(trajectory.token_ids) <= 300
    # Every turn stays, so that some day nothing is left to drop.
    small = play(player, limits("drop_observations", max_tokens=110, keep=1))
    ended = [t for t in small if t.outcome == Outcome.OUT_OF_BUDGET]
    assert ended
    assert all(t.turns[-1].observation is None for t in ended)


def test_draws_of_a_context_are_not_those_of_another(player):
    # A place comes again in each context; with one key its draws would.
    found = play(player, limits("last_turns", keep=1))
    long = [tuple(ids) for t in found for ids in ids_of_turns(t) if len(ids) > 4]
    assert sum(len(t.contexts) for t in found) > 4
    assert len(set(long)) == len(long) > 12


@pytest.mark.parametrize("shares_prompts", [False, True])
def test_the_trainer_reads_what_the_sampler_read(player, shares_prompts):
    trajectories = play(player, limits("drop_observations"))
    advantages = np.ones(len(trajectories), np.float32)
    shape = BatchShape(num_micro=6, micro_rows=1, row_tokens=1024, shares_prompts=shares_prompts)
    packed = pack(trajectories, advantages, shape)
    assert (packed.num_shared > 0) == shares_prompts
    model = whole_model(SMALL, player.tokenizer.num_tokens)
    params = jax.tree.map(jnp.asarray, tiny_params(SMALL))
    batch = jax.tree.map(jnp.asarray, packed.batch)
    micros = [jax.tree.map(lambda x, i=i: x[i], batch) for i in range(packed.num_micro)]
    score = jax.jit(lambda params, batch: model.token_logprobs(params, batch, temperature=1.0)[0])
    values = np.stack([score(params, micro) for micro in micros])
    values = np.pad(values, ((0, 6 - len(values)), (0, 0), (0, 0)))
    for trajectory, own in zip(trajectories, unpack(packed, values, trajectories), strict=True):
        mask = trajectory.loss_mask
        np.testing.assert_allclose(own[mask], trajectory.rollout_logprobs[mask], atol=2e-4)
        assert not own[~mask].any()


def whole_model(config, num_tokens):
    from jaxrl.models.attention.choice import select_kernels
    from jaxrl.models.policy import Model

    mesh = one_device_mesh()
    kernels = select_kernels("xla", mesh, config)
    return Model(config, mesh, kernels, num_tokens=num_tokens, remat="none")


# One rollout, many contexts: its weight, its ratio and its advantage are the rollout's.


def cut(one, places):
    """The same rollout in contexts that begin with all that was before such places."""
    bounds = [*places, len(one.token_ids)]
    first = bounds[0]
    columns = {
        name: [getattr(one, name)[:first]]
        for name in ("token_ids", "loss_mask", "rollout_logprobs", "old_logprobs", "ref_logprobs")
    }
    contexts, length = [], first
    for start, end in itertools.pairwise(bounds):
        contexts.append((length, start))
        length += end
        for name, parts in columns.items():
            # What is repeated has no loss, whatever else is said of it.
            beginning = getattr(one, name)[:start]
            if name == "loss_mask":
                beginning = np.zeros(start, bool)
            elif name != "token_ids":
                beginning = np.full(start, -3.0, np.float32)
            parts += [beginning, getattr(one, name)[start:end]]
    joined = {name: np.concatenate(parts) for name, parts in columns.items()}
    return dataclasses.replace(one, **joined, contexts=tuple(contexts))


def cut_at_random(members, rng, *, between_turns=False):
    """Rollouts in one to four contexts each; `between_turns` cuts none within what was sampled."""
    made = []
    for one in members:
        mask, first = one.loss_mask, int(one.loss_mask.argmax()) + 1
        places = np.arange(first, len(mask))
        if between_turns:
            places = places[~(mask[places - 1] & mask[places])]
        count = min(int(rng.integers(0, 4)), len(places))
        made.append(sorted(rng.choice(places, count, replace=False)))
    cuts = [
        cut(one, [int(p) for p in own]) if own else one
        for one, own in zip(members, made, strict=True)
    ]
    assert any(one.contexts for one in cuts)
    return cuts


LONG = BatchShape(num_micro=1, micro_rows=8, row_tokens=128)
TERMS = ("weighed k3", "k3 to old", "no KL")
CORRECTED = ("sequence truncate", "geometric reject", "token mask")


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_contexts_change_neither_loss_nor_gradient(loss, aggregation):
    """In float64, of what the loss makes of given log-probabilities, each sampled token once."""
    members, rng = sequences(), np.random.default_rng(3)
    noise = [0.3 * rng.standard_normal(len(one.token_ids)) for one in members]
    for number in range(3):
        # LLDS looks at actions, which end where what was sampled does.
        split = cut_at_random(members, rng, between_turns="llds" in loss)
        token_loss = loss_of(loss, TERMS[number], CORRECTED[number])
        found = []
        with jax.enable_x64(True):
            gradient = loss_gradient(token_loss)
            for some in (members, split):
                batch = pack_all(some, LONG, aggregation=aggregation, scale=40).batch
                weights = scatter(batch, [np.full(len(one.token_ids), 0.2) for one in some])
                batch = dataclasses.replace(batch, kl_weights=weights)
                batch = flat(jax.tree.map(as_float64, batch))
                logprobs = np.zeros(batch.token_ids.shape)
                for i, one in enumerate(some):
                    own = np.full(len(one.token_ids), -7.0)
                    own[one.loss_mask] = (members[i].old_logprobs + noise[i])[members[i].loss_mask]
                    logprobs[batch.segment_ids == i + 1] = own
                values, _ = token_loss(jnp.asarray(logprobs), jnp.ones_like(logprobs), batch)
                by_logprob, _ = gradient(logprobs, np.ones_like(logprobs), batch)
                mask = np.asarray(batch.loss_mask)
                each = [
                    np.asarray(by_logprob)[(batch.segment_ids == i + 1) & mask]
                    for i in range(len(some))
                ]
                total = float((values * batch.token_weights).sum())
                found.append((total, np.concatenate(each)))
        assert found[0][1].dtype == np.float64
        assert found[1][0] == pytest.approx(found[0][0], rel=1e-6)
        assert relative_distance(found[1][1], found[0][1]) < 1e-6
        # Rows that were counted by themselves would not pass.
        apart = [piece for one in split for piece in in_pieces(one)]
        counted = pack_all(apart, dataclasses.replace(LONG, micro_rows=40), aggregation=aggregation,
                           scale=40)  # fmt: skip
        whole = pack_all(members, LONG, aggregation=aggregation, scale=40)
        sums = [np.sort(x.batch.token_weights[x.batch.loss_mask]) for x in (counted, whole)]
        if aggregation in BY_ROW:
            assert np.abs(sums[0] - sums[1]).max() > 0.1 * sums[1].max()


BY_ROW = ("seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")


def as_float64(x):
    return np.float64(x) if np.asarray(x).dtype == np.float32 else x


def in_pieces(one):
    """Each context as if it were a rollout."""
    starts = [0, *(start for start, _ in one.contexts), len(one.token_ids)]
    names = ("token_ids", "loss_mask", "rollout_logprobs", "old_logprobs", "ref_logprobs")
    for start, end in itertools.pairwise(starts):
        own = {name: getattr(one, name)[start:end] for name in names}
        if own["loss_mask"].any():
            yield dataclasses.replace(one, **own, contexts=())


@pytest.mark.minutes
@pytest.mark.parametrize("choice", WHOLE[:3], ids=" ".join)
def test_contexts_change_no_gradient_of_the_update(choice):
    """Of the model's parameters, in float32; with prompts shared and without."""
    mode, rng = mode_of(choice[0]), np.random.default_rng(4)
    members = sharing_prompts(sequences(), [6, 5])
    members = [one for one in members if one.loss_mask.any()]
    split = cut_at_random(members, rng)
    gradient = whole_gradient(one_device_mesh(), *choice)
    params = tiny_params()
    found = []
    for some, shares in ((members, False), (split, False), (split, True)):
        shape = BatchShape(num_micro=8, micro_rows=1, row_tokens=160, shares_prompts=shares)
        packed = pack_all(some, shape, aggregation=mode)
        if choice[1] == "weighed k3":
            fields = packed.batch.loss_mask * np.float32(0.2)
            batch = dataclasses.replace(packed.batch, kl_weights=fields)
            packed = dataclasses.replace(packed, batch=batch)
        assert (packed.num_shared > 0) == shares
        found.append(gradient(params, packed.batch, packed.num_micro)[0])
    assert relative_distance(found[1], found[0]) < 1e-5
    assert relative_distance(found[2], found[0]) < 1e-5


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
    split = [in_contexts(one, sorted({*rng.integers(4, 13, 2).tolist()})) for one in plain]
    assert np.array_equal(estimator(name)(plain, 0), estimator(name)(split, 0))
    columns = [Columns(grouped(some)) for some in (plain, split)]
    assert columns[0].token_counts.tolist() == columns[1].token_counts.tolist()
    np.testing.assert_allclose(*(one.mean_entropies for one in columns), rtol=1e-6)


def in_contexts(trajectory, places):
    """A trajectory cut at these places, all of whose contexts begin with what was before."""
    bounds = [*places, len(trajectory.token_ids)]
    order, contexts, fresh = list(range(bounds[0])), [], [True] * bounds[0]
    for start, end in itertools.pairwise(bounds):
        contexts.append((len(order), start))
        order += range(end)
        fresh += [False] * start + [True] * (end - start)
    fresh = np.array(fresh)
    mask = trajectory.loss_mask[order] & fresh
    return dataclasses.replace(
        trajectory,
        token_ids=trajectory.token_ids[order],
        loss_mask=mask,
        rollout_logprobs=np.where(mask, trajectory.rollout_logprobs[order], 0),
        rollout_entropies=np.where(mask, trajectory.rollout_entropies[order], 0),
        policy_versions=np.where(mask, trajectory.policy_versions[order], -1),
        contexts=tuple(contexts),
    )


# Packing, and what is kept of a trajectory.


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**31), shares_prompts=st.booleans())
def test_every_token_is_packed_with_what_it_read(seed, shares_prompts):
    rng = np.random.default_rng(seed)
    members = random_sequences(rng.integers(8, 30, 6).tolist(), seed=seed)
    members = cut_with_logprobs(sharing_prompts(members, [6, 4]), rng)
    shape = BatchShape(num_micro=8, micro_rows=1, row_tokens=128, shares_prompts=shares_prompts)
    packed = pack(members, np.ones(len(members), np.float32), shape)
    batch = packed.batch
    reads = np.asarray(
        find_reads(*(jnp.asarray(x[:, 0]) for x in (batch.segment_ids, batch.positions)))
    )
    items = make_items(members, shape)
    seen = [np.zeros(len(one.token_ids), int) for one in members]
    for row in range(packed.num_micro):
        for t in np.flatnonzero(batch.segment_ids[row, 0]):
            start, shared, end = reads[row, :, t]
            place = [*range(shared, end), *range(start, t + 1)]
            read = batch.token_ids[row, 0, place].tolist()
            number = batch.segment_ids[row, 0, t] - 1
            one = members[number]
            # The context whose beginning was read.
            starts = [0, *(begin for begin, _ in one.contexts), len(one.token_ids)]
            matching = [
                begin
                for begin, until in itertools.pairwise(starts)
                if begin + len(read) <= until
                and one.token_ids[begin : begin + len(read)].tolist() == read
            ]
            assert matching
            seen[number][[begin + len(read) - 1 for begin in matching]] += 1
            assert batch.positions[row, 0, t] == len(read) - 1
    for one, count, item in zip(members, seen, items, strict=True):
        assert (count[one.loss_mask] > 0).all()
        left_out, _ = select_tokens(one, item, 0)
        assert one.loss_mask.sum() == one.loss_mask[left_out].sum()
    assert batch.loss_mask.sum() == sum(int(one.loss_mask.sum()) for one in members)
    for values, one in zip(unpack(packed, batch.rollout_logprobs, members), members, strict=True):
        np.testing.assert_array_equal(values[one.loss_mask], one.rollout_logprobs[one.loss_mask])


def cut_with_logprobs(members, rng):
    members = [
        dataclasses.replace(
            one, old_logprobs=one.rollout_logprobs, ref_logprobs=one.rollout_logprobs
        )
        for one in members
    ]
    return [
        cut(
            one,
            sorted(
                {int(p) for p in rng.integers(len(one.token_ids) // 2 + 4, len(one.token_ids), 2)}
            ),
        )
        if one.loss_mask.any() and len(one.token_ids) > 12 and rng.random() < 0.7
        else one
        for one in members
    ]


def test_a_trajectory_of_contexts_is_kept(player):
    trajectory = max(play(player, limits("last_turns")), key=lambda t: len(t.contexts))
    assert from_json(to_json(trajectory)).contexts == trajectory.contexts
    record = trajectory_to_record(trajectory)
    assert record["contexts"] == [list(one) for one in trajectory.contexts] or record[
        "contexts"
    ] == list(trajectory.contexts)
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
    contexts = ContextRule(name="last_turns", max_tokens=150, keep=1, turn_tokens=40)
    whole = encode_demonstration(chat, tokenizer, showing(30))
    made = encode_demonstration(chat, tokenizer, showing(30, contexts))
    assert whole.contexts == ()
    assert len(made.contexts) > 1
    starts = [0, *(start for start, _ in made.contexts), len(made.token_ids)]
    parts = [tokenizer.decode(made.token_ids[a:b].tolist()) for a, b in itertools.pairwise(starts)]
    assert all(part.startswith("<|im_start|>Who?") for part in parts)
    assert all(b - a <= 150 for a, b in itertools.pairwise(starts))
    shown = SEARCH_R1.render_observation("it is 4")
    assert shown.prefix + shown.body + shown.suffix in parts[-1]
    assert "who is 0" not in parts[-1]
    np.testing.assert_array_equal(made.token_ids[made.loss_mask], whole.token_ids[whole.loss_mask])
    # A long result is cut to what a context has room for, as in a rollout.
    chat[-4]["content"] = "it is 3 " + "and on " * 20
    long = encode_demonstration(chat, tokenizer, showing(200, contexts))
    starts = [0, *(start for start, _ in long.contexts), len(long.token_ids)]
    assert max(np.diff(starts)) <= 150
    assert "and on and on" in tokenizer.decode(long.token_ids.tolist())
    tight = dataclasses.replace(contexts, max_tokens=100)
    with pytest.raises(ValueError, match=r"config\.rollout\.context\.max_tokens=100"):
        encode_demonstration(chat, tokenizer, showing(30, tight))


CONTEXT = "rollout.context.max_tokens"


def settings_with(**changes):
    config = debug_tiny.get_config("data/x")
    contexts = {"rollout.context.name": "last_turns", "rollout.context.max_tokens": 150}
    config.update_from_flattened_dict({**contexts, **changes})
    return config


@pytest.mark.parametrize(
    ("changes", "key", "expected"),
    [
        ({CONTEXT: 60}, CONTEXT, "at least rollout.max_prompt"),
        ({CONTEXT: 10**6}, CONTEXT, "which counts all contexts"),
        (
            {"shaping.overlong_buffer": 8},
            "shaping.overlong_max_tokens",
            "",
        ),
        ({"rollout.chunk_tokens": 151}, "rollout.chunk_tokens", f"at most {CONTEXT}=150"),
        (
            {**{"policy.name": "openai", "policy.openai.model": "m", "stages": ("evaluate",)},
             "policy.openai.url": "http://127.0.0.1:1/v1"},
            "rollout.context.name",
            "",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(changes, key, expected):
    validate(settings_with(), needs_data=False)
    with pytest.raises(ValueError, match=rf"^config\.{key} is .*{expected}"):
        validate(settings_with(**changes), needs_data=False)


def test_a_model_that_reads_images_has_one_context():
    tower = object.__new__(type("Tower", (), {"token_id": 3}))
    shape = BatchShape(num_micro=1, micro_rows=1, row_tokens=64, tower=tower)
    [one] = cut_with_logprobs(random_sequences([40]), np.random.default_rng(0)) * 1
    one = dataclasses.replace(one, contexts=((20, 10),))
    with pytest.raises(ValueError, match=r"config\.rollout\.context\.name to 'none'"):
        make_items([one], shape)
