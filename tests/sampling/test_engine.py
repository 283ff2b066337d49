import functools

import jax
import numpy as np
import pytest

from jaxrl.envs.base import Observation, Outcome, StepResult
from jaxrl.models.attention.reference import XLA
from jaxrl.models.policy import Model
from jaxrl.sampling.engine import Request
from jaxrl.sampling.next_token import KINDS, filter_top_p
from jaxrl.sampling.sample_keys import derive_sample_keys
from jaxrl.training.packing import BatchShape, pack_sequences
from tests.helpers import dense_table, tiny_params
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
dense_table_jit = jax.jit(
    functools.partial(dense_table, num_tokens=TOKENIZER.num_tokens),
    static_argnums=1,
    static_argnames="temperature",
)
QUESTIONS = ["where?", "who was it?", "when", "why", "how?"]


def note(body):
    return StepResult(observation=Observation(prefix="[", body=body, suffix="]"), tool_call=body)


def noting_env():
    """Return an environment that gives an observation, none, another observation, then the end."""
    over = StepResult(outcome=Outcome.ANSWERED)
    return ScriptedEnv(STOPS, script(note("ok"), StepResult(), note("ok!"), over))


@functools.cache
def player(num_rows):
    """Return a cached player, because compiling is slow. Tests set its weights."""
    shared = Player(SMALL, TOKENIZER, STOPS, num_rows=num_rows, kinds=KINDS)
    if num_rows > 4:
        shared.engine.row_sizes = shared.engine.row_sizes[-1:]
    return shared


def play(num_rows, *args, params=OLD, group_size=3, **kwargs):
    shared = player(num_rows)
    shared.engine.set_weights(params)
    return shared.play(*args, group_size=group_size, **kwargs)


@jax.jit
def score(params, micro, temperature):
    model = Model(SMALL, one_device_mesh(), XLA, num_tokens=TOKENIZER.num_tokens, remat="none")
    return model.compute_token_logprobs(params, micro, temperature=temperature)


def assert_scores_agree(trajectories, params, *, temperature):
    """Check that the trainer, with packed rows, computes the sampler's numbers."""
    shape = BatchShape(num_micro=1, micro_rows=16, row_tokens=128)
    packed = pack_sequences(trajectories, np.zeros(len(trajectories)), shape)
    micro = jax.tree.map(lambda x: x[0], packed.batch)
    logprobs, entropies = (np.asarray(x) for x in score(params, micro, temperature))
    for index, trajectory in enumerate(trajectories):
        places = micro.segment_ids == index + 1
        for actual, expected in [
            (trajectory.rollout_logprobs, logprobs[places]),
            (trajectory.rollout_entropies, entropies[places]),
        ]:
            expected = np.where(trajectory.loss_mask, expected, 0)
            np.testing.assert_allclose(actual, expected, atol=1e-4, rtol=0)


def same_samples(first, second, *, tolerance=0.0):
    """Return whether the tokens agree. If so, check that the logprobs agree."""
    for a, b in zip(first, second, strict=True):
        if a.token_ids.tolist() != b.token_ids.tolist():
            return False
        np.testing.assert_array_equal(a.loss_mask, b.loss_mask)
        np.testing.assert_allclose(a.rollout_logprobs, b.rollout_logprobs, atol=tolerance, rtol=0)
    return True


def completions(trajectories):
    return [tuple(t.token_ids.tolist()[t.prompt_length :]) for t in trajectories]


def test_sampler_and_trainer_agree_after_tool_turns():
    actual = play(16, noting_env(), QUESTIONS, temperature=0.7)
    turns = [len(trajectory.turns) for trajectory in actual]
    assert max(turns) == 4
    assert_scores_agree(actual, OLD, temperature=0.7)
    # The vocabulary is padded; ids unknown to the tokenizer are never drawn.
    assert max(t.token_ids.max() for t in actual) < TOKENIZER.num_tokens < SMALL.vocab_size


def test_every_token_is_read_once():
    engine = player(4).engine
    before = vars(engine.counts).copy()
    actual = play(4, noting_env(), QUESTIONS)
    counts = {name: value - before[name] for name, value in vars(engine.counts).items()}

    # The last token of a prompt is read by the decoding step that draws the next token; the last
    # token of a turn is read before its observation.
    prompts = [t.prompt_length for t in actual if t.sample_index == 0]
    assert counts["prefilled_prompt"] == sum(prompts) - len(prompts)
    observed = sum((~t.loss_mask[t.prompt_length :]).sum() for t in actual)
    assert counts["prefilled_resume"] == observed
    assert counts["sampled"] == sum(t.num_sampled for t in actual)
    assert counts["sampled"] <= counts["row_steps"]
    assert engine.is_idle
    assert engine.num_running == 0


def test_new_weights_invalidate_cached_prompts():
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


def request(length, budget=4):
    key = derive_sample_keys(0, 0, 0, np.arange(1), np.arange(1), np.arange(1))[0]
    return Request(prompt_ids=tuple(range(length)), sample_key=key, budget=budget)


def test_compile_makes_every_program_that_later_engines_and_rollouts_need():
    settings = {"num_rows": 2, "num_pages": 8, "max_total_tokens": 80}
    first = Player(SMALL, TOKENIZER, STOPS, **settings)
    messages = []
    first.engine.compile(messages.append)
    total = first.engine.num_compilations
    assert messages[-1] == f"compiling the sampler, {total} of {total} programs"
    first.engine.set_weights(OLD)
    with count_compilations() as compiled:
        samples = first.play(noting_env(), QUESTIONS, group_size=3)
        first.play(noting_env(), QUESTIONS, temperature=0.0)
    assert first.engine.counts.preemptions > 0
    assert len(compiled) <= 2  # the empty cache and rows
    assert same_samples(samples, play(4, noting_env(), QUESTIONS), tolerance=5e-5)

    second = Player(SMALL, TOKENIZER, STOPS, **settings)
    second.engine.set_weights(OLD)
    with count_compilations() as compiled:
        assert same_samples(second.play(noting_env(), QUESTIONS, group_size=3), samples)
    assert not compiled


def test_requests_beyond_the_limits_are_refused():
    engine = player(4).engine
    engine.set_weights(OLD)
    with pytest.raises(ValueError, match=r"30 tokens has a budget of 35; .* max_total_tokens=64"):
        engine.submit([request(5), request(30, budget=35)])
    assert engine.is_idle


def test_a_greedy_rollout_leaves_no_trace():
    expected = play(4, noting_env(), QUESTIONS[:1])
    greedy = play(4, noting_env(), QUESTIONS[:1], temperature=0.0)
    assert len(set(completions(greedy))) == 1
    # The same weights are set, so cached prompts could leak.
    assert same_samples(expected, player(4).play(noting_env(), QUESTIONS[:1], group_size=3))
    assert len(set(completions(expected))) == 3


def test_rows_and_schedule_do_not_change_samples():
    few, many = (play(num_rows, noting_env(), QUESTIONS) for num_rows in (4, 16))
    assert len({len(t.turns) for t in many}) > 1
    assert same_samples(few, many, tolerance=5e-5)
    assert len(set(completions(few))) == len(few)


def test_top_p_draws_from_the_nucleus_and_compiles_once():
    temperature, engine = 0.7, player(16).engine
    shared = {"group_size": 2, "temperature": temperature}
    play(16, noting_env(), QUESTIONS[:1], top_p=0.9, **shared)
    before = engine.num_compilations
    actual = play(16, noting_env(), QUESTIONS[:2], top_p=0.5, **shared)
    assert engine.num_compilations == before
    # The reported numbers are of the whole distribution.
    assert_scores_agree(actual, OLD, temperature=temperature)
    for trajectory in actual:
        padded = np.zeros(ROOMY.max_total_tokens, np.int32)
        padded[: len(trajectory.token_ids)] = trajectory.token_ids
        table = dense_table_jit(OLD, SMALL, padded, temperature=temperature)
        weights = np.exp(np.asarray(table)[np.flatnonzero(trajectory.loss_mask) - 1])
        is_kept = np.asarray(filter_top_p(weights, np.float32(0.5))) > 0
        sampled = trajectory.token_ids[trajectory.loss_mask]
        assert is_kept[np.arange(len(sampled)), sampled].all()
        assert not is_kept.all()


def test_samples_depend_on_seed_step_position_and_index():
    tasks = QUESTIONS[:2]
    base = play(16, noting_env(), tasks)
    assert same_samples(base, play(16, noting_env(), tasks))  # bit for bit
    assert len(set(completions(base))) == 6
    for changed in ({"seed": 1}, {"step": 1}, {"stream_indices": [2, 3]}):
        changed_samples = play(16, noting_env(), tasks, **changed)
        assert not set(completions(base)) & set(completions(changed_samples)), changed
    # A task's samples depend on its index in the stream, not on the tasks next to it.
    alone = play(16, noting_env(), [tasks[1]], stream_indices=[1])
    assert completions(alone) == completions(base)[3:]


def test_sample_keys_are_unique():
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
