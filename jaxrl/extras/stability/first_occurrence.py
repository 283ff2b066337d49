"""A reward for the search that first shows the answer."""

from collections.abc import Sequence

from jaxrl.envs.base import Turn
from jaxrl.envs.rewards.attribution import shows_answer


def first_occurrence(turns: Sequence[Turn], answers: Sequence[str]) -> list[float]:
    """1 for the turn whose search first shows an accepted answer, 0 for all others.

    The first-occurrence reward of TSPO (https://arxiv.org/abs/2601.22776), which sets groups apart
    that are all wrong. `envs.attribution.shows_answer` says what counts. The paper's choice between
    advantages by turn and by trajectory is `advantage.by_turn` here, for the whole run.
    """
    first = next((i for i, turn in enumerate(turns) if shows_answer(turn, answers)), None)
    return [float(index == first) for index in range(len(turns))]
