"""Reader for reasoning-gym datasets, which generate each task from its index."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxrl.data.readers.base import Reader, Record, shorten_error, to_record


def open_reasoning_gym(
    source: str, config_key: str, *, seed: int = 0, size: int = 1000, **settings: Any
) -> Reader:
    """Return a reader for a reasoning-gym dataset.

    Args:
        source: Name of the dataset, such as `chain_sum`.
        config_key: Config key that holds the name, for error messages.
        seed: Random seed for the tasks; held-out tasks need a different seed.
        size: Number of tasks.
        settings: Additional settings of the dataset, such as `min_terms`.

    Raises:
        ValueError: The extra is not installed, or the dataset or a setting is unknown.
    """
    try:
        import reasoning_gym as gym
    except ImportError as error:
        raise ValueError(
            f"{config_key} is {source!r}, a dataset of reasoning-gym: {error}; install the "
            "extra: pip install 'jaxrl[reasoning-gym]'."
        ) from error
    try:
        tasks = gym.create_dataset(source, seed=seed, size=size, **settings)
    except (ValueError, TypeError, AssertionError) as error:
        raise ValueError(
            f"{config_key} is {source!r} of reasoning-gym, with seed={seed}, size={size} and "
            f"{settings!r}: {shorten_error(error) or type(error).__name__}."
        ) from error
    return _ReasoningGymReader(tasks, source)


class _ReasoningGymReader(Reader):
    """Reader that generates tasks when they are read."""

    def __init__(self, tasks: Any, name: str):
        self._tasks, self._name = tasks, name

    def __len__(self) -> int:
        return len(self._tasks)

    def read(self, indices: Sequence[int]) -> list[Record]:
        records = []
        for index in indices:
            location, entry = self.location(index), self._tasks[index]
            record = to_record(
                {"question": entry["question"], "metadata": entry["metadata"]}, location
            )
            # Puzzles with many solutions have no answer; a verifier checks them by the metadata.
            answer = str(entry["answer"] or "any that the verifier accepts")
            records.append(record | {"answers": answer, "id": location, "data_source": self._name})
        return records

    def location(self, index: int) -> str:
        return f"{self._name}:{self._tasks.seed}:{index + 1}"
