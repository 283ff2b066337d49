"""Four groups and two policies, and the log-probabilities of the groups under both."""

import dataclasses
from functools import cache

import jax
import numpy as np

from jaxrl.models.attention.reference import XLA
from jaxrl.models.policy import Model
from jaxrl.runtime.sharding import make_mesh, make_param_shardings
from jaxrl.training.packing import BatchShape
from jaxrl.training.update import ScoreStep
from tests.episodes import make_failure, make_trajectory
from tests.helpers import NUM_TOKENS, TINY, dense_logprobs, tiny_params

SHAPE = BatchShape(num_micro=3, micro_rows=2, row_tokens=32)
MESH = make_mesh(data=1, fsdp=1, tensor=1, devices=jax.devices()[:1])
LENGTHS = [9, 14, 32, 20, 5, 17, 11, 30]


def trajectories():
    """Return four groups of two; the second member of the third is an environment error."""
    members = []
    for index, length in enumerate(LENGTHS):
        make = make_failure if index == 5 else make_trajectory
        member = make(task_number=index // 2, sample_index=index % 2, length=length)
        # An observation in the middle, so that masks have gaps.
        mask = member.loss_mask & (np.arange(length) % 9 != 6)
        logprobs = np.where(mask, member.rollout_logprobs, 0).astype(np.float32)
        members.append(dataclasses.replace(member, loss_mask=mask, rollout_logprobs=logprobs))
    return members


@cache
def policies():
    """Return the parameters of the policy and of its reference."""
    return [
        jax.device_put(tiny_params(seed=seed), make_param_shardings(MESH, TINY)) for seed in (0, 2)
    ]


@cache
def score():
    return ScoreStep(Model(TINY, MESH, XLA, num_tokens=NUM_TOKENS, remat="none"), temperature=1.0)


@cache
def dense():
    """Return the logprobs of each trajectory under both policies, from all its logits."""
    longest = max(LENGTHS)
    compute = jax.jit(lambda params, ids: dense_logprobs(params, TINY, ids)[0])
    by_policy = []
    for params in policies():
        rows = [np.pad(t.token_ids, (0, longest - len(t.token_ids))) for t in trajectories()]
        by_policy.append([np.asarray(compute(params, row)) for row in rows])
    return [[row[:length] for row, length in zip(rows, LENGTHS, strict=True)] for rows in by_policy]
