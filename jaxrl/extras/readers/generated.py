"""Tasks that a program makes, each from its number: the data sets of reasoning-gym."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxrl.data.readers.base import Reader, Record, one_line, present


def reasoning_gym(
    source: str, config_key: str, *, seed: int = 0, size: int = 1000, **settings: Any
) -> Reader:
    """Return a reader of a data set of reasoning-gym.

    Args:
        source: Name of the data set, such as `chain_sum`.
        config_key: Configuration key of the name.
        seed: Seed of the tasks; held-out tasks need another one.
        size: Number of tasks.
        settings: Settings of the data set, such as `min_terms`.

    Raises:
        ValueError: The extra is missing, or there is no such data set or setting.
    """
    try:
        import reasoning_gym as gym
    except ImportError as error:
        raise ValueError(
            f"{config_key} is {source!r}, a data set of reasoning-gym: {error}; install the "
            "extra: pip install 'jaxrl[reasoning-gym]'."
        ) from error
    try:
        tasks = gym.create_dataset(source, seed=seed, size=size, **settings)
    except (ValueError, TypeError, AssertionError) as error:
        raise ValueError(
            f"{config_key} is {source!r} of reasoning-gym, with seed={seed}, size={size} and "
            f"{settings!r}: {one_line(error) or type(error).__name__}."
        ) from error
    return _Generated(tasks, source)


class _Generated(Reader):
    """Tasks that are generated when they are read."""

    def __init__(self, tasks: Any, name: str):
        self._tasks, self._name = tasks, name

    def __len__(self) -> int:
        return len(self._tasks)

    def read(self, indices: Sequence[int]) -> list[Record]:
        records = []
        for index in indices:
            place, entry = self.place(index), self._tasks[index]
            record = present({"question": entry["question"], "metadata": entry["metadata"]}, place)
            # Puzzles with many solutions have none to show; their own verifier reads the metadata.
            answer = str(entry["answer"] or "any that the verifier accepts")
            records.append(record | {"answers": answer, "id": place, "data_source": self._name})
        return records

    def place(self, index: int) -> str:
        return f"{self._name}:{self._tasks.seed}:{index + 1}"
