"""Interfaces of the sampler and of the rollouts that use it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from jaxrl.envs.images import Picture
from jaxrl.types import Attachment, Group


@dataclass(frozen=True, kw_only=True)
class Seeds:
    """Inputs to the random keys that are the same for all samples of a rollout."""

    seed: int
    stage: int
    step: int


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """Sampling settings of a rollout.

    Attributes:
        group_size: Number of trajectories per task.
        temperature: Tokens are sampled from softmax(logits / temperature); 0 is greedy.
        top_p: Nucleus sampling probability in (0, 1]; 1 samples from all tokens.
        seeds: Inputs to the random keys.
        policy_version: Number of optimizer steps taken to reach these weights; recorded with every
            sampled token.
        keeps_arrays: True if trajectories keep the per-token arrays that the engine records.
            Evaluations set it to False.
        max_unfinished: Maximum number of groups that may be returned as None. Such a group resumes
            when its draw is passed again.
    """

    group_size: int
    temperature: float
    top_p: float
    seeds: Seeds
    policy_version: int = 0
    keeps_arrays: bool = False
    max_unfinished: int = 0


RolloutFunction = Callable[..., Sequence[Group | None]]
"""Function from draws and `SamplingConfig` to groups, called like `sampling.rollout.Rollout`.

If `SamplingConfig.max_unfinished` is above 0, the list has None for each unfinished group.
"""


@dataclass
class EngineCounts:
    """Counters of the work done since the engine was created, in tokens unless noted."""

    prefilled_prompt: int = 0  # tokens of new prompts, except each prompt's last token
    prefilled_resume: int = 0  # tokens read when rows resume, as many as the observations have
    sampled: int = 0
    chunks: int = 0  # dispatched chunks
    row_steps: int = 0  # decoding steps times rows computed
    preemptions: int = 0  # requests preempted in favor of an older one
    swapped: int = 0  # tokens swapped out to the host


WAIT_REASONS = ("lag", "cache", "tasks")
"""Reasons why nothing is decoded while waiting for a reply.

`lag`: the schedule requires the reply, although rows could run. `cache`: the cache is full.
`tasks`: all rows wait for replies.
"""


class ImageProcessor(Protocol):
    """Image preprocessor of a model. Must be thread-safe.

    Attributes:
        is_blank: True if every image is replaced with a blank image, as a control.
        num_values_per_patch: Number of values per patch.
        num_patches_per_token: Number of patches per image token.
    """

    is_blank: bool
    num_values_per_patch: int
    num_patches_per_token: int

    def count_tokens(self, image: Picture) -> int:
        """Return the number of prompt tokens of an image.

        Raises:
            UnreadableImageError: The data is not an image.
        """

    def count_image_tokens(self, attachment: Any) -> int:
        """Return the number of tokens of a preprocessed image."""

    def __call__(self, image: Picture) -> Attachment:
        """Preprocess an image for the model.

        Raises:
            UnreadableImageError: The data is not an image, or it is damaged.
        """

    def reload_images(self, groups: Iterable[Group]) -> list[Group]:
        """Reload the images of groups that come from another process or a checkpoint."""

    def make_blank_processor(self) -> ImageProcessor:
        """Return a processor that replaces every image with a blank image of the same size."""


PROCESSOR = "jaxrl.extras.vision.processor.HFImageProcessor"
"""Dotted path of the `ImageProcessor` class; built from a model folder and `config.images`."""


class ExternalModel(Protocol):
    """Model that writes the turns of episodes and runs behind an endpoint."""

    @property
    def display_name(self) -> str:
        """Return the model's name and address for display."""

    def make_rollout(self, *args: Any) -> Any:
        """Create a `RolloutFunction` for this model; takes the arguments of `BaseRollout`."""


POLICIES = {"openai": "jaxrl.extras.endpoints.policy.ChatModel"}
"""External models by `policy.name`; `policy.<name>` in the config has their settings."""
