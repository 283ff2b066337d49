from jaxrl.envs.rewards.attribution import shows_answer


def progress(turns, answers, *, cost=0.1):
    """Return 1 for the first search that shows an accepted answer, minus a cost per search."""
    earned, is_found = [], False
    for turn in turns:
        holds = shows_answer(turn, answers)
        earned.append(float(holds and not is_found) - cost * (turn.tool_call is not None))
        is_found = is_found or holds
    return earned
