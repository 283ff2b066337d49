from collections.abc import Sequence


def brevity(response: str, answers: Sequence[str]) -> float:
    """1 for an empty response, a half for one of a hundred words, toward 0 for long ones."""
    return 100 / (100 + len(response.split()))
