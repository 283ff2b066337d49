"""A reward for the search that first shows the answer."""

from collections.abc import Sequence

from jaxrl.envs.attribution import occurs
from jaxrl.envs.base import Turn


def first_occurrence(turns: Sequence[Turn], answers: Sequence[str]) -> list[float]:
    """1 for the turn whose result first holds an accepted answer, 0 for all others.

    The first-occurrence reward of TSPO (https://arxiv.org/abs/2601.22776), which sets groups apart
    that are all wrong. A result holds an answer as `envs.attribution.occurs` has it. The paper's
    choice between advantages by turn and by trajectory is `advantage.by_turn` here, for the whole
    run.
    """
    shown = (
        index
        for index, turn in enumerate(turns)
        if turn.observation and any(occurs(answer, turn.observation) for answer in answers)
    )
    first = next(shown, None)
    return [float(index == first) for index in range(len(turns))]
