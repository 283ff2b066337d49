"""Questions that follow each other, each played as an episode that begins with what was said."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxrl.builders.components import RunComponents
from jaxrl.builders.resolved import ResolvedConfig
from jaxrl.data.records import parse_task
from jaxrl.envs.base import Message, Prompt
from jaxrl.sampling.interfaces import Sampling, Seeds
from jaxrl.types import Draw, Trajectory
from jaxrl.utils.text import writable


class Conversation:
    """A model, its tools and what has been said so far.

    The first question is put as in training (`config.prompt`). Those that follow are the user's
    next messages, behind what the model wrote. Where the protocol has tags, what tools returned
    stands there too; where the chat template shows it, only the last turn of each answer does.
    """

    def __init__(self, components: RunComponents, config: ResolvedConfig, temperature: float = 0.0):
        """Begins with nothing said.

        Args:
            components: of `opening.open_run`.
            config: likewise.
            temperature: 0 is greedy.
        """
        self._components, self._config = components, config
        self._temperature = temperature
        self._prompt = Prompt(
            **{key: config.prompt[key] for key in ("system", "template", "examples")}
        )
        self._shows_tools = not config.protocol(()).in_template
        self._exchanges: list[tuple[str, str]] = []  # questions and what was written to each
        self._number = 0  # of questions, also of those that were refused

    def begin_anew(self) -> None:
        """Forgets what was said."""
        self._exchanges = []

    def ask(self, question: str, images: Sequence[str] = ()) -> tuple[Trajectory, int]:
        """Plays the episode of a question.

        What was said first is left out while the prompt has no room for all of it.

        Args:
            question: of the user.
            images: their files, for the marks in the question, or before it.

        Returns:
            The episode, and how many questions were left out before it.

        Raises:
            ValueError: the question leaves no room for an answer, or has other marks than images;
                what was said before stays.
            OutageError: what the environment asks answers nobody.
        """
        number, self._number = self._number, self._number + 1
        question, said = writable(question), self._exchanges
        for num_forgotten in range(len(said) + 1):
            self._exchanges = said[num_forgotten:]
            try:
                trajectory = self._play(question, images, number)
                break
            except ValueError:  # too long, as a rule; what else is wrong shows without history too
                self._exchanges = said
                if num_forgotten == len(said):
                    raise
        text = trajectory.generated_text if self._shows_tools else trajectory.turns[-1].text
        self._exchanges = [*self._exchanges, (question, text)]
        return trajectory, num_forgotten

    def _messages(self, question: str) -> list[Message]:
        """The chat up to a question; the first one that is left stands as in training."""
        system = self._prompt.system
        begin = [{"role": "system", "content": system}] if system else []
        chat: list[Message] = [*begin, *self._prompt.examples]
        questions = [asked for asked, _ in self._exchanges] + [question]
        questions[0] = self._prompt.template.replace("{question}", questions[0])
        for asked, answer in itertools.zip_longest(questions, [a for _, a in self._exchanges]):
            chat.append({"role": "user", "content": asked})
            if answer is not None:
                chat.append({"role": "assistant", "content": answer})
        return chat

    def _play(self, question: str, images: Sequence[str], number: int) -> Trajectory:
        # Environments score every episode; this one's score is nobody's.
        fields: dict[str, Any] = {"answers": ["?"], "images": list(images)}
        if self._exchanges:
            fields |= {"messages": self._messages(question)}
        else:
            fields |= {"question": question}
        task = parse_task(fields, f"question {number}", folder=Path())
        sampling = Sampling(
            group_size=1,
            temperature=self._temperature,
            top_p=self._config.eval.top_p,
            seeds=Seeds(seed=self._config.seed, stage=0, step=0),
        )
        draw = Draw(task=task, stream_index=number)  # on which its draws depend
        [group] = self._components.rollout([draw], sampling)
        assert group is not None  # `sampling` leaves none unfinished
        return group.trajectories[0]
