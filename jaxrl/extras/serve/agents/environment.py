"""Environment for external agents that call the model over HTTP."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxrl.envs.base import Env, Episode, Message, Reward, StepResult, Task
from jaxrl.extras.serve.agents.processes import AgentSettings
from jaxrl.extras.serve.agents.sessions import RewardRequest
from jaxrl.extras.serve.engine import ServedEngine


class AgentEngine(ServedEngine):
    """Engine that compiles only the sampling methods that the run uses."""

    compiles_all_kinds = False


@dataclass(kw_only=True)
class AgentEpisode(Episode):
    """Episode with the reward that the agent reported."""

    reward: RewardRequest | None = None


class AgentEnv(Env):
    """Environment whose tasks are run by external agents.

    An agent is a function or a program that implements the agent loop and its tools. The agent's
    reward becomes the reward part `reward`, and its `is_correct` the part `exact_match`.
    """

    stop_strings = ()
    reward_parts = ("reward", "exact_match")
    engine_kind = AgentEngine

    def __init__(self, *, agents: Mapping[str, Any], max_turns: int, correct_by: str) -> None:
        """Validate the settings.

        Args:
            agents: Settings in the config section `env.agents`.
            max_turns: Maximum number of completions per episode.
            correct_by: Criterion for a correct answer: `exact_match` for the agent's `is_correct`,
                `reward` for a positive reward.

        Raises:
            ValueError: A setting is invalid.
        """
        self.settings = settings = AgentSettings(**agents)
        self.max_turns, self._correct_by = max_turns, correct_by
        has_function = bool(settings.function or settings.python or settings.settings)
        if has_function == bool(settings.command):
            raise ValueError(
                f"config.env.agents.function is {settings.function!r} and command "
                f"{settings.command!r}; expected one of them, and python and settings only with "
                "a function."
            )
        self._rollout: Any = None

    def start(self, tasks: Sequence[Task]) -> list[list[Message]]:
        """Return each task's messages. Agents may build their own prompts instead."""
        return [
            list(task.messages or [{"role": "user", "content": task.question or ""}])
            for task in tasks
        ]

    def step(self, episodes: Sequence[Episode], texts: Sequence[str]) -> list[StepResult]:
        """Raise an error, since agents respond to the model themselves."""
        raise RuntimeError("agents reply to the model themselves. This is a bug in jaxrl.")

    def score(self, group: Sequence[Episode]) -> list[Reward]:
        """Return the rewards that the agents reported."""
        rewards = []
        for episode in group:
            assert isinstance(episode, AgentEpisode)
            result = episode.reward
            assert result is not None
            by_reward = self._correct_by == "reward"
            reward = Reward(
                parts={"reward": result.reward, "exact_match": float(result.is_correct)},
                final_answer=result.final_answer,
                is_correct=result.reward > 0 if by_reward else result.is_correct,
                is_abstention=result.is_abstention,
            )
            rewards.append(reward)
        return rewards

    def make_rollout(self, *arguments: Any, log: Callable[[str], None]) -> Any:
        """Return the environment's only `AgentRollout`; the first call creates it."""
        if self._rollout is None:  # evaluations share its port and processes
            from jaxrl.extras.serve.agents.rollout import AgentRollout

            self._rollout = AgentRollout(self, *arguments, log=log)
        return self._rollout
