"""Reward for the search that first shows the answer."""

from collections.abc import Sequence

from jaxrl.envs.base import Turn
from jaxrl.envs.rewards.attribution import shows_answer


def first_occurrence(turns: Sequence[Turn], answers: Sequence[str]) -> list[float]:
    """Return 1 for the turn with the first search that shows an accepted answer, else 0.

    TSPO's first-occurrence reward (https://arxiv.org/abs/2601.22776). It gives groups a signal even
    if all answers are wrong. See `attribution.shows_answer` for what counts. The paper chooses
    between turn-level and trajectory-level advantages; here `advantage.by_turn` decides.
    """
    first = next((i for i, turn in enumerate(turns) if shows_answer(turn, answers)), None)
    return [float(index == first) for index in range(len(turns))]
