"""The sampler's states: agreement with the trainer, sharing of prompts and preemption."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from jaxrl.envs.base import Observation, Outcome, StepResult
from jaxrl.models.attention.reference import XLA
from jaxrl.models.policy import Model
from jaxrl.sampling.next_token import KINDS
from jaxrl.training.packing import BatchShape, pack_sequences
from tests.extras.delta_net.models import TINY_HYBRID, random_params
from tests.toys import ROOMY, Player, ScriptedEnv, chain, one_device_mesh, script, toy_tokenizer

pytestmark = pytest.mark.usefixtures("quick_compilation")

TOKENIZER = toy_tokenizer(*chain("</search>"), *chain("in"))
STOPS = tuple("abcdefghijklmnop")  # a random policy stops about every tenth token
PARAMS = random_params(TINY_HYBRID, seed=0)
LIMITS = dataclasses.replace(
    ROOMY, max_total_tokens=150, max_response_tokens=120, max_observation_tokens=80
)
QUESTIONS = ["where?", "who was it?", "when", "why", "how?"]


def noting_env():
    """An observation, a turn without one, a long observation, the end."""

    def note(body):
        return StepResult(
            observation=Observation(prefix="[", body=body, suffix="]"), tool_call=body
        )

    over = StepResult(outcome=Outcome.ANSWERED)
    return ScriptedEnv(STOPS, script(note("ok"), StepResult(), note("ok!" * 9), over))


@functools.cache
def player(num_rows, **settings):
    defaults = {"max_total_tokens": LIMITS.max_total_tokens, "kinds": KINDS}
    return Player(TINY_HYBRID, TOKENIZER, STOPS, num_rows=num_rows, **{**defaults, **settings})


def play(num_rows, *args, params=PARAMS, group_size=3, engine=(), **kwargs):
    shared = player(num_rows, **dict(engine))
    shared.engine.set_weights(params)
    return shared.play(*args, limits=LIMITS, group_size=group_size, **kwargs)


@jax.jit
def score(params, micro, temperature):
    mesh = one_device_mesh()
    model = Model(TINY_HYBRID, mesh, XLA, num_tokens=TOKENIZER.num_tokens, remat="none")
    return model.compute_token_logprobs(params, micro, temperature=temperature)


def assert_scores_agree(trajectories, params, *, temperature):
    """Check that the trainer, which packs trajectories in rows, has the sampler's numbers."""
    shape = BatchShape(num_micro=1, micro_rows=16, row_tokens=200)
    packed = pack_sequences(trajectories, np.zeros(len(trajectories)), shape)
    micro = jax.tree.map(lambda x: x[0], packed.batch)
    logprobs, entropies = (np.asarray(x) for x in score(params, micro, temperature))
    for index, trajectory in enumerate(trajectories):
        is_token = micro.segment_ids == index + 1
        for got, values in [
            (trajectory.rollout_logprobs, logprobs),
            (trajectory.rollout_entropies, entropies),
        ]:
            wanted = np.where(trajectory.loss_mask, values[is_token], 0)
            np.testing.assert_allclose(got, wanted, atol=1e-4, rtol=0)


def token_ids(trajectories):
    return [trajectory.token_ids.tolist() for trajectory in trajectories]


def test_sampler_and_trainer_agree_after_tool_turns():
    got = play(16, noting_env(), QUESTIONS, temperature=0.7)
    assert max(len(trajectory.turns) for trajectory in got) == 4
    assert max(len(trajectory.token_ids) for trajectory in got) > 64  # more than a chunk
    assert_scores_agree(got, PARAMS, temperature=0.7)


def test_other_rows_do_not_change_a_sample():
    full = play(16, noting_env(), QUESTIONS)
    few = play(4, noting_env(), QUESTIONS)
    assert token_ids(few) == token_ids(full)
    alone = play(4, noting_env(), QUESTIONS[2:3], stream_indices=[2])
    assert token_ids(alone) == token_ids(full)[6:9]
    assert len({tuple(ids) for ids in token_ids(full)}) == len(full)


def test_preempted_rows_continue_from_their_state():
    wanted = play(4, noting_env(), QUESTIONS)
    scarce = {"num_pages": 12}
    engine = player(4, **scarce).engine
    got = play(4, noting_env(), QUESTIONS, engine=scarce.items())
    assert engine.counts.preemptions > 0
    assert token_ids(got) == token_ids(wanted)
    assert_scores_agree(got, PARAMS, temperature=1.0)
    assert engine.is_idle


def test_few_states_delay_requests_but_do_not_change_them():
    wanted = play(4, noting_env(), QUESTIONS)
    for num_states in (2, 3):
        got = play(4, noting_env(), QUESTIONS, engine=[("num_states", num_states)])
        assert token_ids(got) == token_ids(wanted)


def test_new_weights_invalidate_the_states_of_cached_prompts():
    first = play(4, noting_env(), QUESTIONS)
    params = random_params(TINY_HYBRID, seed=1)
    second = play(4, noting_env(), [QUESTIONS[-1], *QUESTIONS], params=params)
    assert_scores_agree(first, PARAMS, temperature=1.0)
    assert_scores_agree(second, params, temperature=1.0)
