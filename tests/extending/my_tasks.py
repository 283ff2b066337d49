import random


class Sums:
    """Sums of two numbers, generated from their index."""

    def __init__(self, *, count: int = 1000, largest: int = 99, seed: int = 0):
        self._count, self._largest, self._seed = count, largest, seed

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict:
        draw = random.Random(f"{self._seed} {index}")
        a, b = draw.randint(0, self._largest), draw.randint(0, self._largest)
        return {"id": f"sum{index}", "question": f"What is {a}+{b}?", "answers": [str(a + b)]}
