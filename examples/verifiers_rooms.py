"""A taskset of verifiers 0.4 with a tool: a key lies in a room, in which a note says where.

The tool runs in a process of its own, one for all episodes. In a Python with verifiers,

    python jaxrl/extras/serve/agents/verifiers.py examples/verifiers_rooms.py > rooms.jsonl

writes the tasks; docs/agents.md shows a run.
"""

import random
from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["RoomsTaskset"]

ROOMS = ("attic", "cellar", "hall", "kitchen", "study", "tower")
PLACES = ("box", "clock", "drawer", "jar", "lamp", "vase")
SYSTEM = (
    "Find the key. The tool says what is seen in a room. When you know the place, answer with its "
    "name alone."
)


def house(seed: int) -> dict[str, str]:
    """Text seen in each room: one tells of the key, all others of that room."""
    random_state = random.Random(seed)
    room, place = random_state.choice(ROOMS), random_state.choice(PLACES)
    return {
        one: f"The key is in the {place}." if one == room else f"Ask in the {room}."
        for one in ROOMS
    }


class RoomsData(vf.TaskData):
    """A house, and where its key is."""

    seed: int
    answer: str


class RoomsToolsConfig(vf.SharedToolsetConfig):
    """Place where the tool runs."""


class RoomsTools(vf.Toolset[RoomsToolsConfig]):
    """The tool."""

    TOOL_PREFIX = None

    @vf.tool
    def look(self, house_number: int, room: str) -> str:
        """Says what is seen in a room of a house."""
        return house(house_number).get(room, f"There is no room {room!r}.")


class RoomsTask(vf.Task[RoomsData]):
    """A search for a key."""

    @vf.reward
    async def found(self, task: RoomsData, trace: vf.Trace) -> float:
        """1 for the place, and 0.2 for each look in a room, up to two."""
        if trace.last_reply == task.answer:
            return 1.0
        return min(0.4, 0.2 * len(trace.tool_messages))


class RoomsConfig(vf.TasksetConfig):
    """Number of houses, and their tool."""

    num_tasks: int = 100
    tools: RoomsToolsConfig = RoomsToolsConfig()


class RoomsTaskset(vf.Taskset[RoomsTask, RoomsConfig]):
    """Houses."""

    def load(self) -> Iterator[RoomsTask]:
        """Yields a task for each."""
        for seed in range(self.config.num_tasks):
            seen = next(text for text in house(seed).values() if "key" in text)
            yield RoomsTask(
                RoomsData(
                    prompt=f"Where is the key of house {seed}? Begin in the {ROOMS[seed % 6]}.",
                    system_prompt=SYSTEM,
                    seed=seed,
                    answer=seen.split()[-1].rstrip("."),
                ),
                self.config.task,
            )

    @classmethod
    def toolsets(cls, config: RoomsConfig) -> list[vf.Toolset]:
        """The one tool, which all episodes share."""
        return [RoomsTools(config.tools)]


if __name__ == "__main__":
    RoomsTools.run()
