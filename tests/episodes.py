"""Hand-made trajectories, with tasks and measurements."""

import dataclasses

import numpy as np

from jaxrl.envs.base import Outcome, Task, Turn
from jaxrl.types import Divergence, EntropyWindows, Group, Trajectory

COMPUTE = Turn(
    text="<python>print(6 * 7)</python>",
    tool_call="print(6 * 7)",
    tool="python",
    observation=" <result>\n42\n</result>",
)
SEARCH = Turn(text="<search>q</search>", tool_call="q", observation="\n\nfound\n\n", latency_s=0.5)
ANSWER = Turn(text="<answer>x</answer>")
FAILED = Turn(text="<search>q</search>", tool_call="q", error="the server is down")


def make_trajectory(
    *,
    reward=0.0,
    task_number=0,
    sample_index=0,
    outcome=Outcome.ANSWERED,
    length=6,
    parts=None,
    turns=(SEARCH, ANSWER),
    data_source="nq",
):
    """Return a trajectory of two prompt tokens followed by sampled tokens."""
    rng = np.random.default_rng([task_number, sample_index])
    mask = np.arange(length) >= 2
    return Trajectory(
        token_ids=rng.integers(1, 50, length).astype(np.int32),
        loss_mask=mask,
        rollout_logprobs=np.where(mask, -1.0, 0.0).astype(np.float32),
        rollout_entropies=np.where(mask, 0.5, 0.0).astype(np.float32),
        policy_versions=np.where(mask, 3, -1).astype(np.int32),
        prompt_length=2,
        sample_index=sample_index,
        task=Task(id=f"t{task_number}", question="Où ?", answers=("x",), data_source=data_source),
        turns=turns,
        outcome=outcome,
        reward=reward,
        reward_parts=parts or {},
        final_answer="x" if outcome == Outcome.ANSWERED else "",
        is_well_formed=(parts or {}).get("format", 0.0) >= 0,
    )


def in_turns(turn_rewards, rest, *, lengths, task=0, index=0):
    """Return a trajectory with turns of these lengths, each followed by an observation."""
    starts, mask = [], [False, False]
    for length in lengths:
        starts.append(len(mask))
        mask += [True] * length + [False]
    trajectory = make_trajectory(task_number=task, sample_index=index, length=len(mask))
    return dataclasses.replace(
        trajectory,
        loss_mask=np.array(mask),
        turns=trajectory.turns[:1] * len(lengths),
        turn_starts=tuple(starts),
        reward=rest + sum(turn_rewards),
        rest_reward=rest,
        turn_rewards=tuple(turn_rewards),
    )


def make_failure(**fields):
    """Return a trajectory that ended in an environment error, without a reward."""
    return make_trajectory(outcome=Outcome.ENVIRONMENT_ERROR, turns=(FAILED,), **fields)


def thinking(entropies, *, right=False, task_number=0, sample_index=0, tool=(), failed=False):
    """Return a trajectory with these entropies after a prompt of two tokens.

    Positions in `tool` are tool tokens, with entropy 0 and no loss.
    """
    length = 2 + len(entropies)
    make = make_failure if failed else make_trajectory
    trajectory = make(task_number=task_number, sample_index=sample_index, length=length)
    mask = np.arange(length) >= 2
    mask[[2 + index for index in tool]] = False
    values = np.concatenate([[0, 0], entropies]).astype(np.float32)
    return dataclasses.replace(
        trajectory, loss_mask=mask, rollout_entropies=np.where(mask, values, 0), is_correct=right
    )


def grouped(trajectories):
    """Group trajectories by task, in order of first occurrence."""
    by_task = {}
    for trajectory in trajectories:
        by_task.setdefault(trajectory.task_id, []).append(trajectory)
    return [Group(trajectories=tuple(of_task)) for of_task in by_task.values()]


class NumberedTasks:
    """Stream of the tasks q0, q1, …, repeated in this order."""

    def __init__(self, num_items=1000):
        self.num_items = num_items

    def get_items(self, position, count):
        indices = range(position, position + count)
        return [Task(id=f"q{index % self.num_items}", question="?") for index in indices]


def strayed(*values):
    """Return a divergence with these values per token, after two prompt tokens."""
    per_token = np.array([0, 0, *values], np.float32)
    return Divergence(
        old_logprobs=np.zeros_like(per_token),
        ref_logprobs=np.zeros_like(per_token),
        per_token=per_token,
        num_tokens=len(values),
    )


def wavering(count, *, length=40, percentile=1.5, excess=0.0):
    """Return windows with the first `count` high."""
    return EntropyWindows(
        values=np.zeros(length, np.float32),
        valid=np.ones(length, bool),
        is_high=np.arange(length) < count,
        percentile=percentile,
        excess=excess,
    )


def is_same(left, right):
    """Return True if two records have equal fields; arrays and NaN are compared by value."""
    if left is right:
        return True
    if dataclasses.is_dataclass(left):
        names = [field.name for field in dataclasses.fields(left) if field.compare]
        values = [(getattr(left, name), getattr(right, name)) for name in names]
        return type(left) is type(right) and all(is_same(*pair) for pair in values)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(is_same, left, right))
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and np.array_equal(left, right)
    return bool(left == right)
