"""Conversation in which each question is an episode of the environment."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxrl.builders.components import RunComponents
from jaxrl.builders.environment import build_prompt
from jaxrl.builders.resolved import ResolvedConfig
from jaxrl.data.records import parse_task
from jaxrl.envs.base import Message, Task
from jaxrl.sampling.interfaces import SamplingConfig, Seeds
from jaxrl.types import Draw, Trajectory
from jaxrl.utils.text import replace_surrogates


class Conversation:
    """Conversation with a run's model, which can use the run's tools.

    The first question uses the training prompt (`config.prompt`). Later questions are user messages
    after the earlier episodes. With a tag protocol, all turns and tool results of an episode stay
    in the chat; with a chat-template protocol, only the episode's last turn.
    """

    def __init__(self, components: RunComponents, config: ResolvedConfig, temperature: float = 0.0):
        """Create a conversation with an empty history.

        Args:
            components: Run components from `load_saved_run`.
            config: Run config from `load_saved_run`.
            temperature: Sampling temperature; 0 for greedy decoding.
        """
        self._components, self._config = components, config
        self._temperature = temperature
        self._prompt = build_prompt(config)
        self._shows_tools = not config.protocol(()).in_template
        self._exchanges: list[tuple[str, str]] = []  # questions and the model's text
        self._num_questions = 0  # including failed ones

    def reset(self) -> None:
        """Clear the history."""
        self._exchanges = []

    def ask(
        self, question: str, images: Sequence[str] = (), videos: Sequence[str] = ()
    ) -> tuple[Trajectory, int]:
        """Run an episode for a question, preceded by as many recent exchanges as fit.

        Args:
            question: User message.
            images: Image paths. The images replace the placeholders in the question, or precede it.
            videos: Video paths, which are placed like the images.

        Returns:
            The trajectory, and the number of earlier questions that were dropped.

        Raises:
            ValueError: The question leaves no tokens for a response, or its placeholders do not
                match the images and videos. The history is unchanged.
            OutageError: A server that the environment needs is down.
        """
        number, self._num_questions = self._num_questions, self._num_questions + 1
        question, history = replace_surrogates(question), self._exchanges
        for num_dropped in range(len(history) + 1):
            self._exchanges = history[num_dropped:]
            try:
                trajectory = self._run_episode(question, images, videos, number)
                break
            except ValueError:  # usually too long; other errors also occur without history
                self._exchanges = history
                if num_dropped == len(history):
                    raise
        text = trajectory.generated_text if self._shows_tools else trajectory.turns[-1].text
        self._exchanges = [*self._exchanges, (question, text)]
        return trajectory, num_dropped

    def _build_messages(self, question: str) -> list[Message]:
        """Build a chat that ends with the question. The first question uses the prompt template."""
        system = self._prompt.system
        system_messages = [{"role": "system", "content": system}] if system else []
        chat: list[Message] = [*system_messages, *self._prompt.examples]
        questions = [user_text for user_text, _ in self._exchanges] + [question]
        questions[0] = self._prompt.render_user_message(Task(id="", question=questions[0]))
        for user_text, answer in itertools.zip_longest(questions, [a for _, a in self._exchanges]):
            chat.append({"role": "user", "content": user_text})
            if answer is not None:
                chat.append({"role": "assistant", "content": answer})
        return chat

    def _run_episode(
        self, question: str, images: Sequence[str], videos: Sequence[str], number: int
    ) -> Trajectory:
        # Environments score an episode, for which they need an accepted answer. Ignore the score.
        fields: dict[str, Any] = {
            "answers": ["?"],
            "images": list(images),
            "videos": list(videos),
        }
        if self._exchanges:
            fields |= {"messages": self._build_messages(question)}
        else:
            fields |= {"question": question}
        task = parse_task(fields, f"question {number}", folder=Path())
        sampling = SamplingConfig(
            group_size=1,
            temperature=self._temperature,
            top_p=self._config.eval.top_p,
            seeds=Seeds(seed=self._config.seed, stage=0, step=0),
        )
        draw = Draw(task=task, stream_index=number)  # the index seeds sampling
        [group] = self._components.rollout([draw], sampling)
        assert group is not None  # `sampling` allows no unfinished groups
        return group.trajectories[0]
