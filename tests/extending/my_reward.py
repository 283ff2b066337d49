from collections.abc import Sequence


def brevity(response: str, answers: Sequence[str]) -> float:
    """Return 1 for an empty response, 0.5 for 100 words, and less for longer ones."""
    return 100 / (100 + len(response.split()))
