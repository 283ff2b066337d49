"""Agent rollouts with a tiny engine, for the tests of this folder."""

import contextlib
import functools
import itertools
import json
from pathlib import Path

from jaxrl.config import default_config
from jaxrl.envs.base import Task
from jaxrl.extras.serve.agents.environment import AgentEngine, AgentEnv
from jaxrl.sampling.episodes import ReplySchedule, TokenLimits
from jaxrl.sampling.interfaces import SamplingConfig, Seeds
from jaxrl.types import Draw
from tests.extras.serve.served import MAX_TOTAL, PARAMS, TOKENIZER, make_engine

TO_PLAY = Path(__file__).with_name("to_play.py")


def limits(**changes):
    settings = {
        "max_prompt_tokens": 64,
        "max_response_tokens": 200,
        "max_total_tokens": MAX_TOTAL,
        "max_observation_tokens": 64,
    }
    return TokenLimits(**(settings | changes))


@functools.cache
def played_engine():
    return make_engine(kind=AgentEngine, kinds=("full",))


@contextlib.contextmanager
def agents(function="", *, max_turns=16, within=None, engine=None, log=lambda _: None, **section):
    """Yield a rollout of agents; close it at the end."""
    if function:
        section["function"] = f"{TO_PLAY}:{function}"
    env = AgentEnv(
        agents=default_config().env.agents.to_dict() | section,
        max_turns=max_turns,
        correct_by="exact_match",
    )
    engine = engine or played_engine()
    engine.clear()
    engine.set_weights(PARAMS)
    pay = lambda groups: [[episode.reward for episode in group] for group in groups]  # noqa: E731
    rollout = env.make_rollout(engine, TOKENIZER, within or limits(), ReplySchedule(), pay, log=log)
    try:
        yield rollout
    finally:
        rollout.close()


def draws(*tasks):
    """Return draws of tasks, each an id or a pair of id and metadata."""
    pairs = [task if isinstance(task, tuple) else (task, {}) for task in tasks]
    return [
        Draw(task=Task(id=id, question=f"who is {id}", metadata=metadata), stream_index=index)
        for index, (id, metadata) in enumerate(pairs)
    ]


def sampling(group_size=2, *, step=0, **changes):
    settings = {"temperature": 1.0, "top_p": 1.0, "policy_version": step}
    settings["seeds"] = Seeds(seed=0, stage=1, step=step)
    return SamplingConfig(group_size=group_size, **(settings | changes))


def read_notes(folder):
    """Return the prompt and ids of each completion that agents noted, by task and episode."""
    notes = {}
    for file in sorted(Path(folder).iterdir()):
        if file.name != "go":
            value = json.loads(file.read_text())
            notes.setdefault(value["task"], []).append(value["seen"])
    return notes


def contexts(trajectory):
    """Return ids and loss mask of each context of a trajectory."""
    starts = [0, *(start for start, _ in trajectory.contexts), len(trajectory.token_ids)]
    return [
        (trajectory.token_ids[a:b].tolist(), trajectory.loss_mask[a:b].tolist())
        for a, b in itertools.pairwise(starts)
    ]
