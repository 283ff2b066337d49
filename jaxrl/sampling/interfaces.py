"""Interfaces of the sampler, and of rollouts that play episodes with it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax

from jaxrl.envs.images import Picture
from jaxrl.types import Attachment, Group, Params


@dataclass(frozen=True, kw_only=True)
class Seeds:
    """Seeds of the draws, beside task, sample and attempt."""

    seed: int
    stage: int
    step: int


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Settings by which the trajectories of a rollout are drawn.

    Attributes:
        group_size: trajectories of each task.
        temperature: tokens are drawn from softmax(logits / temperature); 0 is greedy.
        top_p: only the most likely tokens of this probability are drawn, in (0, 1]; 1: all.
        seeds: what the draws depend on.
        policy_version: updates that the engine's weights have seen, recorded with every sampled
            token.
        keeps_arrays: trajectories keep the arrays by token that the engine has recorded. An
            evaluation by the same engine does not: nothing trains on it.
        unfinished: groups that may come back as None, and go on where their draws are given again.
    """

    group_size: int
    temperature: float
    top_p: float
    seeds: Seeds
    policy_version: int = 0
    keeps_arrays: bool = False
    unfinished: int = 0


RolloutFunction = Callable[..., Sequence[Group | None]]
"""From draws and their `Sampling` to a group of each, called as `sampling.rollout.Rollout` is.

Where `Sampling.unfinished` is above 0 the list has None for each group left unfinished.
"""


@dataclass
class Counts:
    """Work done since the engine was made, in tokens unless named otherwise."""

    prefilled_prompt: int = (
        0  # prompts without their last tokens; those in pages are not read again
    )
    prefilled_resume: int = 0  # observations without their last tokens, each with the token before
    sampled: int = 0
    chunks: int = 0  # dispatched
    row_steps: int = 0  # steps times the rows they were computed for
    preemptions: int = 0  # requests whose pages were given to an older one
    swapped: int = 0  # tokens whose keys and values went to the host


WAITS = ("lag", "cache", "tasks")
"""Causes for which nothing is decoded while a reply is waited for: rows could be, but the reply is
due; others have no room in the cache; all trajectories wait."""


class Sampler(Protocol):
    """Samples from the run's own model, as `sampling.engine.Engine` does.

    Attributes:
        counts: work done so far.
        waits: seconds by cause, out of `WAITS`.
        num_pages: of the cache of each shard.
        most_pages: of these that were in use at once.
    """

    counts: Counts
    waits: dict[str, float]
    num_pages: int
    most_pages: int

    @property
    def num_compilations(self) -> int:
        """Compilations of its programs so far."""

    @property
    def device(self) -> jax.Device:
        """One of those that sample."""

    def shapes(self) -> str:
        """The set of shapes that may be compiled, for people."""

    def compile(self, show: Callable[[str], None]) -> None:
        """Compiles all programs that are not compiled yet; `show` is told how far."""

    def set_weights(self, params: Params) -> None:
        """Takes all parameters of the policy, once an update."""

    def clear(self) -> None:
        """Forgets every request, and gives back the cache's memory."""

    def release(self) -> None:
        """Gives back the memory of cache and weights."""


class Processor(Protocol):
    """Reads images as the model wants them; several threads may ask at once.

    Attributes:
        is_blank: every image is without content, as a control.
        patch_values: numbers of a patch.
        unit: patches to a token.
    """

    is_blank: bool
    patch_values: int
    unit: int

    def num_tokens(self, picture: Picture) -> int:
        """Tokens that an image takes in a prompt.

        Raises:
            UnreadableError: it is no image.
        """

    def num_units(self, image: Any) -> int:
        """Tokens of an image that was read."""

    def __call__(self, picture: Picture) -> Attachment:
        """Reads an image as the model wants it.

        Raises:
            UnreadableError: it is no image, or damaged.
        """

    def with_images(self, groups: Iterable[Group]) -> list[Group]:
        """Groups from another process or a checkpoint, with the images that they name."""

    def blank(self) -> Processor:
        """Makes a processor of images without content."""


PROCESSOR = "jaxrl.extras.vision.processor.Processor"
"""Makes a `Processor` of a model's folder and `config.images`."""


class External(Protocol):
    """A model elsewhere that writes the turns of episodes."""

    @property
    def shown(self) -> str:
        """Name and address, for people."""

    def rollout(self, *around: Any) -> Any:
        """A `RolloutFunction` that plays episodes with it; arguments as of `EpisodePlayer`."""


POLICIES = {"openai": "jaxrl.extras.endpoints.policy.ChatModel"}
"""Models elsewhere, by name in `policy.name`; the section of that name has their settings."""
