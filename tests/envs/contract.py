"""Contract of every environment, built-in or a user's. `check_env` checks it without a model."""

import copy
import dataclasses
import itertools
import math
from concurrent.futures import ThreadPoolExecutor

from jaxrl.envs.base import (
    Episode,
    Observation,
    Outcome,
    Reward,
    StepResult,
    ToolResults,
    Turn,
)

HOSTILE = ("", " ", "\0", "<", "</", "<answer>", "é\u2028\ud83d\ude00", "(" * 1000, "x" * 10_000)
"""Unexpected model output, tried alone and before every stop string."""


def check_env(env, tasks, turns):
    """Check everything that the rollout relies on.

    Args:
        env: Any `Env`.
        tasks: Two or more tasks with accepted answers.
        turns: Texts that a model may write in a turn. Some of them end an episode and, if there
            are tools, some continue it.
    """
    check_declarations(env)
    check_start(env, tasks)
    texts = [*turns, *HOSTILE, *(h + s for h in HOSTILE for s in env.stop_strings)]
    episodes = play_episodes(env, tasks, turns)
    for episode in [*episodes, *(Episode(task=task) for task in tasks)]:
        check_step(env, episode, texts)
    ended = [e for e in play_episodes(env, tasks, texts) if e.outcome is not None]
    assert ended, "none of these turns ends an episode"
    check_score(env, ended)


def check_declarations(env):
    """Stop strings and reward parts are tuples of different names."""
    for name in ("stop_strings", "reward_parts"):
        declared = getattr(env, name)
        assert isinstance(declared, tuple), f"{name} is {declared!r}; expected a tuple"
        assert all(isinstance(text, str) and text for text in declared), name
        assert len(set(declared)) == len(declared), name
    assert env.reward_parts, "an environment without reward parts cannot pay anything"


def check_start(env, tasks):
    """The chat of a task depends on nothing but the task."""
    before = copy.deepcopy(tasks)
    together = env.start(tasks)
    assert len(together) == len(tasks)
    assert together == [chat for task in tasks for chat in env.start([task])] == env.start(tasks)
    assert tasks == before, "start changed a task"
    for message in itertools.chain(*together):
        assert all(isinstance(message[key], str) for key in ("role", "content")), message


def check_step(env, episode, texts):
    """Results do not depend on the rest of the batch, on repetition or on threads."""
    before = copy.deepcopy(episode)
    together = env.step([episode] * len(texts), texts)
    assert len(together) == len(texts)
    alone = [result for text in texts for result in env.step([episode], [text])]
    with ThreadPoolExecutor(4) as pool:
        threads = list(pool.map(lambda text: env.step([episode], [text])[0], texts))
    assert without_timing(together) == without_timing(alone) == without_timing(threads)
    assert episode == before, "step changed an episode"
    for text, result in zip(texts, together, strict=True):
        check_result(result)
        if not env.stop_strings:  # the chat template asks for the next turn after tool results
            assert result.outcome is not None or isinstance(result.observation, ToolResults), (
                f"after {text!r} nothing would ask the model to continue"
            )


def check_result(result):
    """A result has the right types and either ends the episode or continues it."""
    assert isinstance(result, StepResult)
    assert isinstance(result.outcome, Outcome | None)
    assert isinstance(result.observation, Observation | ToolResults | None)
    assert result.outcome is None or result.observation is None, "no turn would read it"
    assert (result.outcome == Outcome.ENVIRONMENT_ERROR) == bool(result.error)
    assert math.isfinite(result.latency_s)
    if result.tool is not None:
        assert result.tool_call is not None


def check_score(env, episodes):
    """Rewards have the declared parts, finite and unweighted; verdicts are consistent."""
    before = copy.deepcopy(episodes)
    rewards = env.score(episodes)
    assert len(rewards) == len(episodes)
    assert rewards == env.score(episodes)
    assert episodes == before, "score changed an episode"
    for episode, reward in zip(episodes, rewards, strict=True):
        assert isinstance(reward, Reward)
        assert set(reward.parts) == set(env.reward_parts), "every reward has the declared parts"
        assert all(math.isfinite(value) for value in reward.parts.values())
        assert reward.total == 0, "the configuration decides what is paid"
        assert isinstance(reward.final_answer, str)
        for verdict in (reward.is_correct, reward.is_abstention, reward.is_well_formed):
            assert isinstance(verdict, bool)
        assert not (reward.is_correct and reward.is_abstention)
        assert reward.is_abstention or episode.outcome != Outcome.ABSTAINED
        assert not reward.is_well_formed or episode.outcome != Outcome.MALFORMED


def play_episodes(env, tasks, turns):
    """Return episodes of each task after one turn and, of those that continue, after two."""
    first = [append_turn(env, task, [], text) for task in tasks for text in turns]
    continuing = [episode for episode in first if episode.outcome is None]
    second = [append_turn(env, e.task, e.turns, text) for e in continuing[:8] for text in turns]
    return [*first, *second]


def append_turn(env, task, turns, text):
    """Return an episode with one more turn, filled in as the rollout does."""
    episode = Episode(task=task, turns=[*turns])
    [result] = env.step([episode], [text])
    turn = Turn(
        text=text,
        tool_call=result.tool_call,
        tool=result.tool,
        records=result.records,
        observation=render(result.observation),
        results=getattr(result.observation, "bodies", ()),
    )
    episode.turns.append(turn)
    episode.outcome = result.outcome
    return episode


def render(observation):
    """Return an observation as inserted; tool results as in Qwen's chat template."""
    if not isinstance(observation, ToolResults):
        return observation and observation.text
    blocks = [f"\n<tool_response>\n{body}\n</tool_response>" for body in observation.bodies]
    return f"\n<|im_start|>user{''.join(blocks)}<|im_end|>\n<|im_start|>assistant\n"


def without_timing(results):
    """Return step results without what depends on the clock."""
    return [dataclasses.replace(result, latency_s=0.0, records=()) for result in results]
