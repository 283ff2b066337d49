"""Turn-level reward for the first search that finds the answer."""

from collections.abc import Sequence

from jaxrl.envs.base import Turn
from jaxrl.envs.rewards.attribution import shows_answer


def first_occurrence(turns: Sequence[Turn], answers: Sequence[str]) -> list[float]:
    """Return a reward per turn: 1 for the first search that finds an accepted answer, else 0.

    TSPO's first-occurrence reward (https://arxiv.org/abs/2601.22776), which varies within a group
    even if all final answers are wrong. `attribution.shows_answer` defines a match. The paper uses
    a rule to choose between turn-level and trajectory-level advantages; here, `advantage.by_turn`
    chooses.
    """
    first = next((i for i, turn in enumerate(turns) if shows_answer(turn, answers)), None)
    return [float(index == first) for index in range(len(turns))]
