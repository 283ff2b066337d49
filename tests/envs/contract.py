"""What every environment keeps, ours and a user's: `check_env` tries it, without a model."""

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
"""What models write that nobody thought of; each also before every stop string."""


def check_env(env, tasks, turns):
    """Puts an environment through what the rollout relies on.

    Args:
        env: any `Env`.
        tasks: two or more, with accepted answers.
        turns: what a model may write in a turn; among them some that end an episode and some,
            where there are tools, that go on.
    """
    check_declarations(env)
    check_start(env, tasks)
    texts = [*turns, *HOSTILE, *(h + s for h in HOSTILE for s in env.stop_strings)]
    episodes = played(env, tasks, turns)
    for episode in [*episodes, *(Episode(task=task) for task in tasks)]:
        check_step(env, episode, texts)
    ended = [episode for episode in played(env, tasks, texts) if episode.outcome is not None]
    assert ended, "none of these turns ends an episode"
    check_score(env, ended)


def check_declarations(env):
    """Stop strings and reward parts are tuples of different names."""
    for name in ("stop_strings", "reward_parts"):
        declared = getattr(env, name)
        assert isinstance(declared, tuple), f"{name} is {declared!r}; expected a tuple"
        assert all(isinstance(text, str) and text for text in declared), name
        assert len(set(declared)) == len(declared), name
    assert env.reward_parts, "an environment that measures nothing can pay nothing"


def check_start(env, tasks):
    """Each task has its chat, whatever it is asked with, and the same one again."""
    before = copy.deepcopy(tasks)
    together = env.start(tasks)
    assert len(together) == len(tasks)
    assert together == [chat for task in tasks for chat in env.start([task])] == env.start(tasks)
    assert tasks == before, "start changed a task"
    for message in itertools.chain(*together):
        assert all(isinstance(message[key], str) for key in ("role", "content")), message


def check_step(env, episode, texts):
    """Replies do not hang on who else is asked, on how often, or on threads; nothing changes."""
    before = copy.deepcopy(episode)
    together = env.step([episode] * len(texts), texts)
    assert len(together) == len(texts)
    alone = [result for text in texts for result in env.step([episode], [text])]
    with ThreadPoolExecutor(4) as pool:
        threads = list(pool.map(lambda text: env.step([episode], [text])[0], texts))
    assert timeless(together) == timeless(alone) == timeless(threads)
    assert episode == before, "step changed an episode"
    for text, result in zip(texts, together, strict=True):
        check_reply(result)
        if not env.stop_strings:  # but the chat template does, behind results of tools
            assert result.outcome is not None or isinstance(result.observation, ToolResults), (
                f"after {text!r} nothing would ask the model to go on"
            )


def check_reply(result):
    """A reply of the right types: it ends the episode, or goes on after an observation."""
    assert isinstance(result, StepResult)
    assert isinstance(result.outcome, Outcome | None)
    assert isinstance(result.observation, Observation | ToolResults | None)
    assert result.outcome is None or result.observation is None, "who would read it?"
    assert (result.outcome == Outcome.ENVIRONMENT_ERROR) == bool(result.error)
    assert math.isfinite(result.latency_s)
    if result.tool is not None:
        assert result.tool_call is not None


def check_score(env, episodes):
    """Rewards have the declared parts, finite, without weights; verdicts fit to each other."""
    before = copy.deepcopy(episodes)
    rewards = env.score(episodes)
    assert len(rewards) == len(episodes)
    assert rewards == env.score(episodes)
    assert episodes == before, "score changed an episode"
    for episode, reward in zip(episodes, rewards, strict=True):
        assert isinstance(reward, Reward)
        assert set(reward.parts) == set(env.reward_parts), "of each reward, the declared parts"
        assert all(math.isfinite(value) for value in reward.parts.values())
        assert reward.total == 0, "what is paid is the configuration's"
        assert isinstance(reward.final_answer, str)
        for verdict in (reward.is_correct, reward.is_abstention, reward.is_well_formed):
            assert isinstance(verdict, bool)
        assert not (reward.is_correct and reward.is_abstention)
        assert reward.is_abstention or episode.outcome != Outcome.ABSTAINED
        assert not reward.is_well_formed or episode.outcome != Outcome.MALFORMED


def played(env, tasks, turns):
    """Episodes of each task after one turn and, of those that go on, after two."""
    first = [grown for task in tasks for text in turns if (grown := after(env, task, [], text))]
    going_on = [episode for episode in first if episode.outcome is None]
    second = [after(env, e.task, e.turns, text) for e in going_on[:8] for text in turns]
    return [*first, *second]


def after(env, task, turns, text):
    """An episode with one turn more, filled in as the rollout does."""
    episode = Episode(task=task, turns=[*turns])
    [result] = env.step([episode], [text])
    turn = Turn(
        text=text,
        tool_call=result.tool_call,
        tool=result.tool,
        records=result.records,
        observation=shown(result.observation),
        results=getattr(result.observation, "bodies", ()),
    )
    episode.turns.append(turn)
    episode.outcome = result.outcome
    return episode


def shown(observation):
    """An observation as it is inserted; results of tools as Qwen's chat template shows them."""
    if not isinstance(observation, ToolResults):
        return observation and observation.text
    blocks = [f"\n<tool_response>\n{body}\n</tool_response>" for body in observation.bodies]
    return f"\n<|im_start|>user{''.join(blocks)}<|im_end|>\n<|im_start|>assistant\n"


def timeless(results):
    """Replies without how long they took, and what that was spent on."""
    return [dataclasses.replace(result, latency_s=0.0, records=()) for result in results]
