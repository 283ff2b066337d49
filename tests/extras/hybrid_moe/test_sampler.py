"""The sampler of a hybrid with experts: states and recorded experts agree with the trainer."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.envs.base import Observation, Outcome, StepResult
from jaxrl.extras.experts.routing import ROUTED_EXPERTS
from jaxrl.models.attention.reference import XLA
from jaxrl.models.aux_arrays import AuxArrays
from jaxrl.models.policy import Model
from jaxrl.training.packing import BatchShape, pack_sequences
from tests.extras.delta_net.models import random_params
from tests.extras.hybrid_moe.models import TINY_NEXT
from tests.helpers import full_pass
from tests.toys import ROOMY, Player, ScriptedEnv, one_device_mesh, script, toy_tokenizer

pytestmark = [pytest.mark.minutes, pytest.mark.usefixtures("quick_compilation", "one_size")]

PARAMS = jax.tree.map(jnp.asarray, random_params(TINY_NEXT, seed=0))
MOVED = jax.tree.map(lambda a, b: a + 0.05 * b, PARAMS, random_params(TINY_NEXT, seed=1))
"""Parameters after updates that the sampler does not know."""

STOPS = tuple("abcdefghijklmnop")  # a random policy stops about every tenth token
TOKENIZER = toy_tokenizer()
LIMITS = dataclasses.replace(
    ROOMY, max_total_tokens=150, max_response_tokens=120, max_observation_tokens=80
)


@pytest.fixture(scope="module")
def sampled():
    """Groups of three with an observation; rows beyond the pages are preempted."""
    player = Player(
        TINY_NEXT, TOKENIZER, STOPS, num_rows=4, num_pages=12, records=True,
        max_total_tokens=LIMITS.max_total_tokens,
    )  # fmt: skip
    player.engine.set_weights(PARAMS)
    note = StepResult(observation=Observation(prefix="[", body="ok!" * 9, suffix="]"))
    env = ScriptedEnv(STOPS, script(note, StepResult(), StepResult(outcome=Outcome.ANSWERED)))
    questions = ["where was it?", "who", "when?"]
    trajectories = player.play(env, questions, limits=LIMITS, group_size=3, keeps_arrays=True)
    assert player.engine.counts.preemptions > 0
    assert max(len(t.token_ids) for t in trajectories) > 64  # more than a chunk
    return trajectories


def score(params, trajectories, token_arrays):
    """Return the trainer's log-probabilities of sampled tokens, with those of the sampler."""
    shape = BatchShape(num_micro=1, micro_rows=4, row_tokens=400, token_arrays=token_arrays)
    packed = pack_sequences(trajectories, np.zeros(len(trajectories)), shape)
    micro = jax.tree.map(lambda x: x[0], packed.batch)
    model = Model(TINY_NEXT, one_device_mesh(), XLA, num_tokens=TOKENIZER.num_tokens)
    logprobs = jax.jit(model.compute_token_logprobs)(params, micro, temperature=1.0)[0]
    is_sampled = micro.loss_mask & (micro.positions > 0)
    return np.asarray(logprobs)[is_sampled], micro.rollout_logprobs[is_sampled]


def test_sampler_and_trainer_agree(sampled):
    for token_arrays in (TINY_NEXT.recorded_specs, {}):
        np.testing.assert_allclose(*score(PARAMS, sampled, token_arrays), atol=1e-4, rtol=0)


def test_recorded_experts_are_those_of_a_full_pass_and_are_replayed(sampled):
    longest = max(sampled, key=lambda t: len(t.token_ids))
    token_ids = jnp.asarray(longest.token_ids)[None]

    @jax.jit
    def choose(params):
        aux, positions = AuxArrays(records=True), jnp.arange(token_ids.shape[1])[None]
        full_pass(TINY_NEXT, params, token_ids, positions, jnp.ones_like(token_ids), aux=aux)
        return aux.recorded[ROUTED_EXPERTS]

    # The last token was sampled and never read.
    np.testing.assert_array_equal(
        longest.token_arrays[ROUTED_EXPERTS][:-1], np.asarray(choose(PARAMS))[:-1]
    )
    gaps = [
        np.abs(np.subtract(*score(MOVED, sampled, arrays))).mean()
        for arrays in (TINY_NEXT.recorded_specs, {})
    ]
    assert 0 < gaps[0] < gaps[1]
