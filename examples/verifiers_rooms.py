"""A verifiers 0.4 taskset with a tool: find a key by reading the notes in the rooms of a house.

The tool runs in a separate process, shared by all episodes. In a Python with verifiers,

    python jaxrl/extras/serve/agents/verifiers.py examples/verifiers_rooms.py > rooms.jsonl

writes the tasks; docs/agents.md shows a run.
"""

import random
from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["RoomsTaskset"]

ROOMS = ("attic", "cellar", "hall", "kitchen", "study", "tower")
LOCATIONS = ("box", "clock", "drawer", "jar", "lamp", "vase")
SYSTEM = (
    "Find the key. The tool says what is seen in a room. When you know the place, answer with its "
    "name alone."
)


def make_notes(seed: int) -> dict[str, str]:
    """Return the note in each room. One gives the location of the key; the others name its room."""
    random_state = random.Random(seed)
    room, location = random_state.choice(ROOMS), random_state.choice(LOCATIONS)
    return {
        name: f"The key is in the {location}." if name == room else f"Ask in the {room}."
        for name in ROOMS
    }


class RoomsData(vf.TaskData):
    """Seed of a house, and the location of its key."""

    seed: int
    answer: str


class RoomsToolsConfig(vf.SharedToolsetConfig):
    """Settings of the tool process."""


class RoomsTools(vf.Toolset[RoomsToolsConfig]):
    """Toolset with a single tool, `look`."""

    TOOL_PREFIX = None

    @vf.tool
    def look(self, house_number: int, room: str) -> str:
        """Returns the note in a room of a house."""
        return make_notes(house_number).get(room, f"There is no room {room!r}.")


class RoomsTask(vf.Task[RoomsData]):
    """Task: find the key of a house."""

    @vf.reward
    async def found(self, task: RoomsData, trace: vf.Trace) -> float:
        """Return 1 for the correct location, else 0.2 per tool result, up to 0.4."""
        if trace.last_reply == task.answer:
            return 1.0
        return min(0.4, 0.2 * len(trace.tool_messages))


class RoomsConfig(vf.TasksetConfig):
    """Number of houses, and settings of the tool process."""

    num_tasks: int = 100
    tools: RoomsToolsConfig = RoomsToolsConfig()


class RoomsTaskset(vf.Taskset[RoomsTask, RoomsConfig]):
    """Taskset of `num_tasks` houses."""

    def load(self) -> Iterator[RoomsTask]:
        """Yield one task per house."""
        for seed in range(self.config.num_tasks):
            note = next(text for text in make_notes(seed).values() if "key" in text)
            yield RoomsTask(
                RoomsData(
                    prompt=f"Where is the key of house {seed}? Begin in the {ROOMS[seed % 6]}.",
                    system_prompt=SYSTEM,
                    seed=seed,
                    answer=note.split()[-1].rstrip("."),
                ),
                self.config.task,
            )

    @classmethod
    def toolsets(cls, config: RoomsConfig) -> list[vf.Toolset]:
        """Return the toolset that all episodes share."""
        return [RoomsTools(config.tools)]


if __name__ == "__main__":
    RoomsTools.run()
