"""Math environment: one turn of reasoning and a verifiable answer."""

from __future__ import annotations

from collections.abc import Sequence

from jaxrl.envs.base import Env, Episode, Message, Outcome, Prompt, Reward, StepResult, Task
from jaxrl.envs.rewards.math_answers import compute_math_correctness, extract_math_answer
from jaxrl.envs.rewards.rules import is_refusal


class MathEnv(Env):
    """Environment for questions answered in one turn, on the last `Answer:` line.

    There are no tools and no stop strings. A response without an `Answer:` line is malformed.
    """

    stop_strings = ()
    reward_parts = ("exact_match", "math")

    def __init__(self, *, prompt: Prompt) -> None:
        """Store the prompt, which should ask the model to end with an `Answer: ..` line."""
        self._prompt = prompt

    def start(self, tasks: Sequence[Task]) -> list[list[Message]]:
        """Return the prompt of each task."""
        return [self._prompt.render_messages(task) for task in tasks]

    def step(self, episodes: Sequence[Episode], texts: Sequence[str]) -> list[StepResult]:
        """End each episode as answered, abstained or malformed."""
        return [StepResult(outcome=_classify_answer(extract_math_answer(text))) for text in texts]

    def score(self, group: Sequence[Episode]) -> list[Reward]:
        """Score the answers: `math` is 1 or -1, `exact_match` is 1 or 0."""
        rewards = []
        for episode in group:
            task, answer = episode.task, extract_math_answer(episode.response)
            if not task.answers:
                raise ValueError(f"task {task.id!r} has no accepted answer; set its `answers`.")
            correctness = compute_math_correctness(episode.response, task.answers)
            reward = Reward(
                parts={"math": correctness, "exact_match": float(correctness > 0)},
                final_answer=answer or "",
                is_correct=correctness > 0,
                is_abstention=_classify_answer(answer) == Outcome.ABSTAINED,
                is_well_formed=_classify_answer(answer) != Outcome.MALFORMED,
            )
            rewards.append(reward)
        return rewards


def _classify_answer(answer: str | None) -> Outcome:
    if not answer:
        return Outcome.MALFORMED
    return Outcome.ABSTAINED if is_refusal(answer) else Outcome.ANSWERED
