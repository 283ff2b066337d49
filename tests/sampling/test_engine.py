import dataclasses
import functools

import jax
import numpy as np
import pytest

from jaxrl.envs.base import Observation, Outcome, StepResult
from jaxrl.models.attention.reference import XLA
from jaxrl.models.policy import Model
from jaxrl.sampling import decode
from jaxrl.sampling.engine import Engine, Request
from jaxrl.sampling.sample_keys import derive_sample_keys
from jaxrl.sampling.stop_strings import StopAutomaton
from jaxrl.training.packing import BatchShape, pack
from tests.helpers import tiny_params
from tests.toys import (
    ROOMY,
    SMALL,
    Player,
    ScriptedEnv,
    chain,
    count_compilations,
    one_device_mesh,
    script,
    toy_tokenizer,
)

pytestmark = pytest.mark.usefixtures("quick_compilation")

TOKENIZER = toy_tokenizer(*chain("</search>"), *chain("in"))
STOPS = tuple("abcdefghijklmnop")  # a random policy stops about every tenth token
NEW, OLD = tiny_params(SMALL, seed=1), tiny_params(SMALL, seed=0)
QUESTIONS = ["where?", "who was it?", "when", "why", "how?"]


def note(body):
    return StepResult(observation=Observation(prefix="[", body=body, suffix="]"), tool_call=body)


def noting_env(body="ok"):
    """An observation, a turn without one, another observation, the end."""
    over = StepResult(outcome=Outcome.ANSWERED)
    return ScriptedEnv(STOPS, script(note(body), StepResult(), note(body + "!"), over))


@functools.cache
def player(num_rows):
    """Compiling is slow, so engines are shared; each test sets the weights."""
    settings = {
        4: {},
        16: {},
        64: {"chunk_tokens": 5, "max_total_tokens": 128},
    }[num_rows]
    return Player(SMALL, TOKENIZER, STOPS, num_rows=num_rows, **settings)


def play(num_rows, *args, params=OLD, group_size=3, **kwargs):
    played = player(num_rows)
    played.engine.set_weights(params)
    return played.play(*args, group_size=group_size, **kwargs)


@jax.jit
def score(params, micro, temperature):
    model = Model(SMALL, one_device_mesh(), XLA, num_tokens=TOKENIZER.num_tokens, remat="none")
    return model.token_logprobs(params, micro, temperature=temperature)


def assert_scores_agree(trajectories, params, *, temperature):
    """The trainer, which reads the trajectories packed in rows, has the sampler's numbers."""
    shape = BatchShape(num_micro=1, micro_rows=16, row_tokens=128)
    packed = pack(trajectories, np.zeros(len(trajectories)), shape)
    micro = jax.tree.map(lambda x: x[0], packed.batch)
    logprobs, entropies = (np.asarray(x) for x in score(params, micro, temperature))
    for index, trajectory in enumerate(trajectories):
        own = micro.segment_ids == index + 1
        for got, wanted in [
            (trajectory.rollout_logprobs, logprobs[own]),
            (trajectory.rollout_entropies, entropies[own]),
        ]:
            wanted = np.where(trajectory.loss_mask, wanted, 0)
            np.testing.assert_allclose(got, wanted, atol=1e-4, rtol=0)


def same_samples(first, second, *, tolerance=0.0):
    """The trajectories agree in their tokens; where they do, their logprobs must too."""
    for a, b in zip(first, second, strict=True):
        if a.token_ids.tolist() != b.token_ids.tolist():
            return False
        np.testing.assert_array_equal(a.loss_mask, b.loss_mask)
        np.testing.assert_allclose(a.rollout_logprobs, b.rollout_logprobs, atol=tolerance, rtol=0)
    return True


def completions(trajectories):
    return [tuple(t.token_ids.tolist()[t.prompt_length :]) for t in trajectories]


LONG = dataclasses.replace(ROOMY, max_response_tokens=100, max_total_tokens=128)


@pytest.mark.parametrize(
    ("num_rows", "temperature", "limits"),
    [(16, 0.7, ROOMY), pytest.param(64, 1.0, LONG, marks=pytest.mark.slow(instead="::[16]"))],
)
def test_sampler_and_trainer_agree_also_after_tool_turns(num_rows, temperature, limits):
    got = play(num_rows, noting_env(), QUESTIONS, temperature=temperature, limits=limits)
    turns = [len(trajectory.turns) for trajectory in got]
    assert max(turns) == 4
    assert_scores_agree(got, OLD, temperature=temperature)
    # The vocabulary is padded; what the tokenizer does not know is never drawn.
    assert max(t.token_ids.max() for t in got) < TOKENIZER.num_tokens < SMALL.vocab_size


def test_ids_trained_on_are_the_ids_sampled(monkeypatch):
    engine = player(16).engine
    events, step = [], engine.step
    first_request = engine._next_request

    def recorded(**settings):
        new = step(**settings)
        events.extend(new)
        return new

    monkeypatch.setattr(engine, "step", recorded)
    env = noting_env()
    got = play(16, env, QUESTIONS)
    for index, trajectory in enumerate(got):
        own = [event for event in events if event.request == first_request + index]
        mask = trajectory.loss_mask
        for name, values in [
            ("token_ids", trajectory.token_ids),
            ("logprobs", trajectory.rollout_logprobs),
            ("entropies", trajectory.rollout_entropies),
        ]:
            sampled = np.concatenate([getattr(event, name) for event in own])
            np.testing.assert_array_equal(values[mask], sampled)
        assert not trajectory.rollout_logprobs[~mask].any()

        # Prompt and observations are what is not sampled, each appended once and in its place.
        prompt = TOKENIZER.render_prompt(env.start([trajectory.task])[0])
        shown = "".join(turn.observation or "" for turn in trajectory.turns)
        assert trajectory.prompt_length == len(prompt)
        assert trajectory.token_ids[~mask].tolist() == prompt + TOKENIZER.encode(shown)
        text = TOKENIZER.decode(trajectory.token_ids[len(prompt) :])
        assert text.count("[ok]") == sum(t.observation == "[ok]" for t in trajectory.turns)


@pytest.mark.parametrize("num_rows", [4, 16])
def test_every_token_is_read_once(num_rows):
    engine = player(num_rows).engine
    before = vars(engine.counts).copy()
    got = play(num_rows, noting_env(), QUESTIONS)
    counts = {name: value - before[name] for name, value in vars(engine.counts).items()}

    # The last token of what is read waits for the decoding step that draws the next; what a turn
    # ended with is read before its observation instead.
    prompts = [t.prompt_length for t in got if t.sample_index == 0]
    assert counts["prefilled_prompt"] == sum(prompts) - len(prompts)
    observed = sum((~t.loss_mask[t.prompt_length :]).sum() for t in got)
    assert counts["prefilled_resume"] == observed
    assert counts["sampled"] == sum(t.num_sampled for t in got)
    assert counts["sampled"] <= counts["row_steps"]
    assert engine.is_idle
    assert engine.num_running == 0


def test_budgets_are_never_exceeded():
    limits = dataclasses.replace(
        ROOMY, max_response_tokens=20, max_total_tokens=56, max_observation_tokens=8
    )
    never_over = ScriptedEnv(STOPS, script(note("a rather long observation")))
    got = play(16, never_over, QUESTIONS, limits=limits)
    for trajectory in got:
        assert trajectory.num_sampled <= 20
        assert len(trajectory.token_ids) <= 56
        assert trajectory.outcome == Outcome.OUT_OF_BUDGET
        shown = [turn.observation for turn in trajectory.turns if turn.observation is not None]
        assert all(text.startswith("[") and text.endswith("]") for text in shown)
        assert all(len(TOKENIZER.encode(text)) <= 10 for text in shown)
    # Either limit ends some of them.
    assert {t.num_sampled == 20 for t in got} == {True, False}
    assert_scores_agree(got, OLD, temperature=1.0)


def test_new_weights_forget_the_prompts_of_the_old():
    env = noting_env()
    first = play(16, env, QUESTIONS, params=OLD)
    assert_scores_agree(first, OLD, temperature=1.0)
    # The last prompt of the first rollout comes again, then prompts of the same length.
    others = [QUESTIONS[-1], "is he?", "was it"]
    second = play(16, env, others, params=NEW)
    for trajectory in second:
        prompt = TOKENIZER.render_prompt(env.start([trajectory.task])[0])
        assert trajectory.token_ids.tolist()[: trajectory.prompt_length] == prompt
    assert [t.task.question for t in second] == [q for q in others for _ in range(3)]
    assert_scores_agree(second, NEW, temperature=1.0)


def test_nothing_is_compiled_after_the_warm_up():
    engine = player(4).engine
    for seed in range(3):
        for body in ("ok", "a note of twenty char"):
            play(4, noting_env(body), QUESTIONS, seed=seed)
    before = engine.num_compilations
    assert before > 0
    with count_compilations() as compiled:
        play(4, noting_env("other"), [question + "?" for question in QUESTIONS], seed=9)
        tight = dataclasses.replace(
            ROOMY, max_response_tokens=31, max_total_tokens=50, max_observation_tokens=12
        )
        play(4, noting_env("a much longer note"), QUESTIONS[::-1], seed=10, limits=tight)
    assert engine.num_compilations == before
    assert compiled == []


def test_what_is_compiled_ahead_is_all_there_is():
    wanted = play(4, noting_env(), QUESTIONS)
    ready = Player(SMALL, TOKENIZER, STOPS, num_rows=6, num_pages=8, max_total_tokens=80)
    said = []
    ready.engine.compile(said.append)
    # Four sizes of rows for a way to draw, two for another, each for a past of up to 64 tokens and
    # of up to 80; two of what is read, copying, swapping.
    assert ready.engine.num_compilations == 16
    assert said[-1] == "compiling the sampler, 16 of 16 programs"
    ready.engine.set_weights(OLD)
    with count_compilations() as compiled:
        got = ready.play(noting_env(), QUESTIONS, group_size=3)
        ready.play(noting_env(), QUESTIONS, group_size=3, temperature=0.0)
    assert ready.engine.counts.preemptions > 0
    assert len(compiled) <= 2  # the empty cache and rows
    assert same_samples(got, wanted, tolerance=5e-5)


def test_a_second_engine_of_the_same_settings_compiles_nothing():
    settings = {"num_rows": 4, "num_pages": 9}
    made = [Player(SMALL, TOKENIZER, STOPS, **settings) for _ in range(2)]
    got = []
    for played in made:
        with count_compilations() as compiled:
            played.engine.set_weights(OLD)
            got.append(played.play(noting_env(), QUESTIONS, group_size=3))
    assert not compiled
    assert made[1].engine.num_compilations == made[0].engine.num_compilations > 0
    assert same_samples(*got)
    # Another chunk is another program.
    other = Player(SMALL, TOKENIZER, STOPS, chunk_tokens=5, **settings)
    with count_compilations() as compiled:
        other.engine.set_weights(OLD)
        other.play(noting_env(), QUESTIONS, group_size=3)
    assert compiled


def request(length, budget=4):
    key = derive_sample_keys(0, 0, 0, np.arange(1), np.arange(1), np.arange(1))[0]
    return Request(prompt_ids=tuple(range(length)), sample_key=key, budget=budget)


def test_shapes_outside_the_set_are_errors():
    engine = player(4).engine
    engine.set_weights(OLD)
    assert engine.row_sizes == [1, 2, 4]
    assert engine.prefill_sizes == [64]
    parts = (
        "8 steps of [1, 2, 4] rows (greedy), [1, 4] rows (full); prefill [64] tokens; cache",
        "16 pages x 16 tokens",
    )
    for part in parts:
        assert part in engine.describe_shapes()

    with pytest.raises(RuntimeError, match=r"append was called with the variant 40; expected"):
        engine._append(None, None, None, variant=40)
    with pytest.raises(ValueError, match=r"prompt has 33 tokens, but .* max_prompt_tokens=32"):
        engine.submit([request(5), request(33)])
    with pytest.raises(ValueError, match=r"30 tokens has a budget of 35; .* max_total_tokens=64"):
        engine.submit([request(5), request(30, budget=35)])
    assert engine.is_idle


def test_requests_of_other_settings_do_not_join_those_that_are_there():
    engine = player(4).engine
    engine.set_weights(OLD)
    [number] = engine.submit([request(5)], temperature=0.7)
    with pytest.raises(RuntimeError, match=r"temperature 1\.0 and top_p 1\.0 cannot join .* 0\.7"):
        engine.submit([request(6)])
    [other] = engine.submit([request(6)], temperature=0.7)
    while engine.num_running or not engine.is_stalled:
        engine.step()
    engine.finish(number)
    engine.finish(other)
    engine.submit([request(6)])
    engine.clear()


def test_a_rollout_brings_its_temperature():
    wanted = play(4, noting_env(), QUESTIONS[:1])
    greedy = play(4, noting_env(), QUESTIONS[:1], temperature=0.0)
    assert len(set(completions(greedy))) == 1
    # What was drawn greedily in between does not show, not even with the same weights.
    assert same_samples(wanted, player(4).play(noting_env(), QUESTIONS[:1], group_size=3))
    assert len(set(completions(wanted))) == 3


def test_a_request_step_by_step():
    engine = player(4).engine
    engine.set_weights(OLD)
    first, second = engine.submit([request(5, budget=3), request(6, budget=20)])
    assert not engine.is_idle
    assert engine.num_running == 0
    stopped = {}
    for _ in range(4):  # chunks of 8 tokens: enough for either
        for event in engine.step():
            assert event.request not in stopped
            assert 0 < len(event.token_ids) == len(event.logprobs) == len(event.entropies) <= 8
            if event.status != decode.RUNNING:
                stopped[event.request] = event
    # Who has stopped waits, until granted more or finished.
    assert stopped.keys() == {first, second}
    assert len(stopped[first].token_ids) <= 3
    assert engine.num_running == 0
    assert not engine.is_idle
    engine.resume([(first, [1, 2, 3], 2)])
    engine.finish(second)
    assert engine.num_running == 1
    (event,) = engine.step()
    assert event.request == first
    assert 0 < len(event.token_ids) <= 2
    assert event.status != decode.RUNNING
    engine.finish(first)
    assert engine.is_idle


def test_rows_and_schedule_do_not_change_samples():
    few, some, many = (play(num_rows, noting_env(), QUESTIONS) for num_rows in (4, 16, 64))
    assert len({len(t.turns) for t in some}) > 1
    assert same_samples(few, some, tolerance=5e-5)
    assert same_samples(few, many, tolerance=5e-5)
    assert len(set(completions(few))) == len(few)


def test_samples_depend_on_seed_step_position_and_index():
    tasks = QUESTIONS[:2]
    base = play(16, noting_env(), tasks)
    assert same_samples(base, play(16, noting_env(), tasks))  # bit for bit
    assert len(set(completions(base))) == 6
    for changed in ({"seed": 1}, {"step": 1}, {"stream_indices": [2, 3]}):
        other = play(16, noting_env(), tasks, **changed)
        assert not set(completions(base)) & set(completions(other)), changed
    # A task's samples depend on its place in the stream, not on what is drawn beside it.
    (alone,) = [play(16, noting_env(), [tasks[1]], stream_indices=[1])]
    assert completions(alone) == completions(base)[3:]


def test_keys_tell_everything_apart():
    positions, samples, attempts = (
        x.ravel().astype(np.int32)
        for x in np.meshgrid([0, 1, 2**31 - 1], [0, 1, 7], [0, 1], indexing="ij")
    )
    keys = [
        derive_sample_keys(seed, stage, step, positions, samples, attempts)
        for seed in (0, 1)
        for stage in (0, 1)
        for step in (0, 1, 1000)
    ]
    keys = np.concatenate(keys)
    assert keys.dtype == np.uint32
    assert len(np.unique(keys, axis=0)) == len(keys)
    part = derive_sample_keys(0, 0, 0, positions[3:5], samples[3:5], attempts[3:5])
    np.testing.assert_array_equal(part, keys[3:5])


@pytest.mark.parametrize(
    ("num_rows", "num_pages", "message"),
    [
        (6, 0, r"max_num_seqs=6 is not a multiple of data \* fsdp \* expert \* context = 4"),
        (4, 3, r"3 pages of 16 tokens does not hold .*max_total_tokens=64, which fills 4"),
    ],
)
def test_rows_must_divide_over_the_devices_and_a_trajectory_fit(num_rows, num_pages, message):
    sizes = {"data": 2, "fsdp": 2, "context": 1, "expert": 1, "tensor": 1}
    mesh = jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes))
    with pytest.raises(ValueError, match=message):
        Engine(
            SMALL,
            mesh,
            StopAutomaton(TOKENIZER.vocab_bytes, STOPS),
            num_tokens=TOKENIZER.num_tokens,
            eos_ids=TOKENIZER.eos_ids,
            num_rows=num_rows,
            num_pages=num_pages,
            max_prompt_tokens=32,
            max_total_tokens=64,
            chunk_tokens=8,
        )
