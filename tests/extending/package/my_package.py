"""One of each kind that an entry point can bring to jaxrl."""

from dataclasses import dataclass, replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from jaxrl.envs.search.base import SearchEngine
from jaxrl.envs.search_env import SearchEnv
from jaxrl.envs.tools.base import Tool
from jaxrl.models.aux_arrays import TokenArraySpec
from jaxrl.models.qwen import QwenConfig


@dataclass(frozen=True, kw_only=True)
class Skipping(QwenConfig):
    """Qwen3 whose sampler leaves out the MLP of some tokens, which training is told.

    Which ones hangs on numbers that training has otherwise rounded: so each layer's choice is
    recorded, an array by token.
    """

    @property
    def recorded_specs(self):
        return {"skips": TokenArraySpec(shape=(self.num_layers,), dtype=np.dtype(np.uint8), fill=0)}

    def init_extra_state(self, aux, num_tokens):
        return jnp.zeros((), jnp.int32), jnp.zeros((num_tokens, self.num_layers), jnp.uint8)

    def apply_feed_forward_with_aux(self, layer, x, extra_state, aux):
        number, skips = extra_state
        if aux.records:
            own = (x[:, 0] > 0).astype(jnp.uint8)
        elif "skips" in aux.inputs:
            own = aux.inputs["skips"][:, number]
        else:
            own = jnp.zeros(len(x), jnp.uint8)
        added = jnp.where(own[:, None] > 0, 0, self.apply_feed_forward(layer, x))
        return added, (number + 1, skips.at[:, number].set(own))

    def store_extra_state(self, aux, extra_state):
        if aux.records:
            aux.recorded["skips"] = extra_state[1]


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
