"""The environment whose episodes agents play: programs that know no more than an address."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxrl.envs.base import Env, Episode, Message, Reward, StepResult, Task
from jaxrl.extras.serve.agents.plays import Earned
from jaxrl.extras.serve.engine import ServedEngine

SHIPPED = {"verifiers": "verifiers.py:play"}
"""Agents that are here, by the name in `function`: file of this folder, and function."""


@dataclass(frozen=True, kw_only=True)
class AgentSettings:
    """The section `env.agents`."""

    function: str
    command: tuple[str, ...]
    python: str
    settings: Mapping[str, Any]
    processes: int
    max_concurrent: int
    deadline_s: float
    host: str
    port: int

    @property
    def place(self) -> str:
        """The function as `runner.load` takes it; of an agent that is here, file and name."""
        file = SHIPPED.get(self.function)
        return str(Path(__file__).with_name(file)) if file else self.function


class PlayedEngine(ServedEngine):
    """An engine whose requests are all drawn as the run says."""

    draws_any = False


@dataclass(kw_only=True)
class AgentEpisode(Episode):
    """An episode that an agent played."""

    earned: Earned | None = None


class AgentEnv(Env):
    """Tasks that are given to agents, each with an address of its own at which the model answers.

    An agent is a function or a program. What it asks and when, with which tools, is its own
    business; at the end it says what it has earned, which is the reward part `reward`, and whether
    that is right, which is `exact_match`.
    """

    stop_strings = ()
    reward_parts = ("reward", "exact_match")
    engine_kind = PlayedEngine

    def __init__(self, *, agents: Mapping[str, Any], max_turns: int, correct_by: str) -> None:
        """Checks what plays.

        Args:
            agents: the keys of `config.env.agents`.
            max_turns: answers that an episode gets at most.
            correct_by: `exact_match`: right is what the agent calls so; `reward`: a reward above 0.

        Raises:
            ValueError: names the key.
        """
        self.settings = settings = AgentSettings(**agents)
        self.max_turns, self._correct_by = max_turns, correct_by
        if bool(settings.function) == bool(settings.command):
            raise ValueError(
                f"config.env.agents.function is {settings.function!r} and command "
                f"{settings.command!r}; expected one of them: what plays an episode."
            )
        for name in ("python", "settings"):
            if settings.command and (value := getattr(settings, name)):
                raise ValueError(
                    f"config.env.agents.{name} is {value!r}, and config.env.agents.command plays; "
                    "expected it beside a function."
                )
        if settings.host in ("0.0.0.0", "::", ""):
            raise ValueError(
                f"config.env.agents.host is {settings.host!r}; expected one address of this "
                "machine, by which agents can reach it."
            )
        self._rollout: Any = None

    def start(self, tasks: Sequence[Task]) -> list[list[Message]]:
        """Messages of the tasks as they stand; how an agent puts them is its own business."""
        return [
            list(task.messages or [{"role": "user", "content": task.question or ""}])
            for task in tasks
        ]

    def step(self, episodes: Sequence[Episode], texts: Sequence[str]) -> list[StepResult]:
        """Replies to nobody: agents do."""
        raise RuntimeError("agents reply to their models themselves. This is a bug in jaxrl.")

    def score(self, group: Sequence[Episode]) -> list[Reward]:
        """Returns what the agents said."""
        rewards = []
        for episode in group:
            assert isinstance(episode, AgentEpisode)
            earned = episode.earned
            assert earned is not None
            is_paid = self._correct_by == "reward"
            reward = Reward(
                parts={"reward": earned.reward, "exact_match": float(earned.is_correct)},
                final_answer=earned.final_answer,
                is_correct=earned.reward > 0 if is_paid else earned.is_correct,
                is_abstention=earned.is_abstention,
            )
            rewards.append(reward)
        return rewards

    def rollout(self, *around: Any, log: Callable[[str], None]) -> Any:
        """Returns the rollout that plays with agents; the arguments are those of `AgentRollout`."""
        if self._rollout is None:  # of evaluations too: they share address and processes
            from jaxrl.extras.serve.agents.rollout import AgentRollout

            self._rollout = AgentRollout(self, *around, log=log)
        return self._rollout
