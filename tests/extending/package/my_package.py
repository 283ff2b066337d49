"""One of each kind that an entry point can bring to jaxrl."""

from dataclasses import dataclass, replace
from pathlib import Path

from jaxrl.envs.retrieval import SearchEngine
from jaxrl.envs.search import SearchEnv
from jaxrl.envs.tools import Tool
from jaxrl.models.qwen import QwenConfig


@dataclass(frozen=True, kw_only=True)
class Fixed(QwenConfig):
    """Qwen3 with a base of rotary positions of its own."""

    @classmethod
    def from_dict(cls, fields, *, source="config.json"):
        return super().from_dict({**fields, "rope_theta": 5_000.0}, source=source)


class Notes(SearchEngine):
    """Finds the first line of a file that has a word of the query."""

    def __init__(self, *, path: str):
        self._lines = Path(path).read_text(encoding="utf-8").splitlines()

    def run(self, query: str) -> str:
        words = set(query.split())
        return next((line for line in self._lines if words & {*line.split()}), "nothing")


class Curt(SearchEnv):
    """Asks for a word."""

    def start(self, tasks):
        return super().start([replace(task, question=f"{task.question} A word.") for task in tasks])


class Dice(Tool):
    """Throws as many dice as it is told, all of which show four."""

    name = "dice"
    blank = "no number given"

    def run(self, call: str) -> str:
        return " ".join(["4"] * int(call)) if call.isdecimal() else "error: expected a number"


def brevity(response, answers, *, most=40):
    """1 for a response of no more characters."""
    return float(len(response) <= most)
