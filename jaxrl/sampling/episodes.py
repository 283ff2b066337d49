"""Episodes in an environment (prompts, replies, rewards), independent of how turns are sampled.

Rollouts derive from `BaseRollout`, which converts between tokens and text; `demonstrations.py` uses
the same functions. Environment output is encoded once, when it is appended.

Any failure of the environment (an exception, an invalid reply or no reply) ends the affected
episodes with an environment error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from jaxrl.data.tokenizer import Tokenizer
from jaxrl.envs.base import (
    Env,
    Episode,
    Message,
    Observation,
    OutageError,
    Outcome,
    Reward,
    ScoredEpisode,
    StepResult,
    Task,
    ToolResults,
    Turn,
)
from jaxrl.envs.images import Picture, UnreadableImageError, split_at_tags
from jaxrl.models.aux_arrays import TokenArraySpec
from jaxrl.sampling.contexts import ContextRule, TurnIds
from jaxrl.sampling.interfaces import ImageProcessor, SamplingConfig
from jaxrl.sampling.observations import (
    encode_observation,
    encode_omitted_observation,
    encode_results,
)
from jaxrl.sampling.step_results import (
    check_chat,
    get_images,
    make_failed_step,
    sanitize_record,
    validate_reward,
    validate_step_result,
    without_images,
)
from jaxrl.sampling.trajectory import Sample, to_trajectory
from jaxrl.types import Attachment, Draw, Group
from jaxrl.utils.concurrency import format_error, parallel_map


@dataclass(frozen=True, kw_only=True)
class TokenLimits:
    """Token budgets of one trajectory.

    Attributes:
        max_prompt_tokens: Maximum prompt length. `overlong_prompts` decides what happens to longer
            prompts.
        max_response_tokens: Maximum number of sampled tokens, over all turns.
        max_total_tokens: Maximum combined length of the prompt, sampled tokens and observations.
        max_observation_tokens: Maximum length of one observation's body, which is truncated inside
            its tags.
        overlong_prompts: Handling of longer prompts: `refuse`, `drop` (the task stream skips
            the task) or `truncate_left` (the first tokens are removed).
        max_image_tokens: Maximum number of image and video tokens in the prompt and observations;
            0 for `max_total_tokens`. A prompt that exceeds it is overlong; an observation that
            exceeds it ends the trajectory.
        context: Rule for episodes with several contexts, all of which count toward
            `max_total_tokens`; None for a single context.
    """

    max_prompt_tokens: int
    max_response_tokens: int
    max_total_tokens: int
    max_observation_tokens: int
    overlong_prompts: str = "refuse"
    max_image_tokens: int = 0
    context: ContextRule | None = None

    def compute_context_observation_limit(self, prompt_length: int, num_sampled: int) -> int | None:
        """Return the maximum observation length in a new context; None without a context rule.

        The context must also have room for the prompt, the preceding turn and another turn.
        """
        if self.context is None:
            return None
        return self.context.max_tokens - self.context.turn_tokens - prompt_length - num_sampled


@dataclass(frozen=True, kw_only=True)
class ReplySchedule:
    """Schedule for adding the environment's replies, shared by all rollouts of a run.

    Attributes:
        deterministic: True to add replies by chunk number, waiting for the environment if
            necessary, so that results do not depend on timing. False to add them at the first chunk
            after they arrive.
        lag_chunks: Lag of the deterministic schedule: replies to rows that stopped in chunk i are
            added before chunk i + lag_chunks. With 1, the device waits for the host and the
            environment between chunks; with more, it decodes in the meantime.
        deadline_s: Timeout of an `Env.step` call in seconds; 0 for none.
    """

    deterministic: bool = True
    lag_chunks: int = 2
    deadline_s: float = 600.0


_MAX_SINGLE_STEP_THREADS = 32  # threads that step one episode each after a batched call failed

_IMAGE_THREADS = 8  # threads that decode prompt images


RewardFn = Callable[[Sequence[Sequence[ScoredEpisode]]], list[list[Reward | BaseException]]]
"""Function from the scored episodes of each task to their rewards, or to errors."""


class EpisodeStartError(ValueError):
    """Error raised when the environment cannot start an episode for a task."""


class BaseRollout:
    """Base class of rollouts, which run episodes in an environment."""

    def __init__(
        self,
        env: Env | Mapping[str, Env],
        tokenizer: Tokenizer,
        limits: TokenLimits,
        schedule: ReplySchedule | None = None,
        reward_fn: RewardFn | None = None,
        processor: ImageProcessor | None = None,
    ):
        """Store the components; `schedule` defaults to `ReplySchedule()`.

        `env` may be a mapping: an episode runs in the environment that its task names.
        `reward_fn` computes rewards from scored episodes; None uses the environment's rewards.
        `processor` preprocesses images; None for a text-only model.
        """
        self._processor = processor
        self._envs = env if isinstance(env, Mapping) else {"": env}
        self._tools = {name: getattr(env, "chat_tools", ()) for name, env in self._envs.items()}
        self._tokenizer = tokenizer
        self._openers = {
            name: tokenizer.get_response_prefix(tools) for name, tools in self._tools.items()
        }
        self._limits = limits
        self._schedule = schedule or ReplySchedule()
        self._reward_fn = reward_fn or (
            lambda groups: [[item.reward for item in group] for group in groups]
        )

    @property
    def _recorded_specs(self) -> Mapping[str, TokenArraySpec]:
        """Return the specs of recorded per-token arrays, by name; {} without an engine."""
        return {}

    def _make_samples(self, draws: Sequence[Draw], group_size: int) -> list[Sample]:
        """Create the samples of all draws; mark those of tasks that cannot start as failed."""
        samples = []
        images_by_task = self._preprocess_task_images([draw.task for draw in draws])
        for draw, images in zip(draws, images_by_task, strict=True):
            prompt: list[int] = []
            failure: str | None = None
            try:
                prompt = self._encode_prompt(draw.task)
                if isinstance(images, UnreadableImageError):
                    raise EpisodeStartError(f"task {draw.task.id!r}: {images}")
            except EpisodeStartError as error:
                failure, images = str(error), ()
            for sample_index in range(group_size):
                sample = Sample(
                    episode=Episode(task=draw.task, opener=self._openers[draw.task.environment]),
                    sample_index=sample_index,
                    attempt=draw.attempt,
                    max_response_tokens=draw.max_response_tokens,
                    token_ids=list(prompt),
                    prompt_length=len(prompt),
                    attachments=list(images),
                )
                sample.begin_first_turn()
                if failure is not None:
                    sample.episode.turns.append(Turn(text="", error=failure))
                    sample.episode.outcome = Outcome.ENVIRONMENT_ERROR
                samples.append(sample)
        return samples

    def prompt_fits(self, task: Task) -> bool:
        """Return True if the prompt of a task is within the limits.

        Raises:
            ValueError: The prompt is empty, or it is too long and may not be dropped or truncated
                (images are never truncated).
            UnreadableImageError: An image cannot be read.
            EpisodeStartError: The environment has no prompt for the task.
        """
        prompt = self.render_prompt(task)
        fits = len(prompt) <= self.prompt_limit and not self._exceeds_image_limit(prompt)
        must_reject = self._limits.overlong_prompts == "refuse"
        if self._limits.overlong_prompts == "truncate_left":
            must_reject = bool(task.images)  # an image cannot be truncated
        if not prompt or (not fits and must_reject):
            raise self._make_prompt_error(task, prompt)
        return fits

    def _preprocess_task_images(
        self, tasks: Sequence[Task]
    ) -> list[tuple[Attachment, ...] | UnreadableImageError]:
        """Preprocess each task's images; return them, or the error if they cannot be read."""

        def preprocess(task: Task) -> tuple[Attachment, ...] | UnreadableImageError:
            try:
                return tuple(self._preprocess_images(task.images))
            except UnreadableImageError as error:
                return error

        if not any(task.images for task in tasks):
            return [()] * len(tasks)
        return parallel_map(preprocess, tasks, max_threads=_IMAGE_THREADS)

    def _preprocess_images(self, pictures: Sequence[Picture]) -> list[Attachment]:
        return [self._image_processor(picture) for picture in pictures]

    @property
    def _image_processor(self) -> ImageProcessor:
        if self._processor is None:
            raise UnreadableImageError(
                "there is an image, but the model does not support images: its config.json has no "
                "image_token_id. Set config.model.path to a model that does, such as Qwen2.5-VL "
                "(its folder also counts for endpoints), or drop images with columns={'images': ''}"
            )
        return self._processor

    def _encode_prompt(self, task: Task) -> list[int]:
        """Return the prompt ids of a task, truncated if configured."""
        prompt, limit = self.render_prompt(task), self.prompt_limit
        if self._limits.overlong_prompts == "truncate_left" and not task.images:
            prompt = prompt[-limit:]
        if not 0 < len(prompt) <= limit or self._exceeds_image_limit(prompt):
            raise self._make_prompt_error(task, prompt)
        return prompt

    def _count_image_placeholders(self, token_ids: Sequence[int]) -> int:
        """Return the number of image and video tokens in `token_ids`."""
        ids = self._tokenizer.image_id, self._tokenizer.video_id
        return sum(token_ids.count(id) for id in ids if id is not None)

    def _exceeds_image_limit(self, *parts: Sequence[int]) -> bool:
        """Return True if `parts` contain more image tokens than a trajectory may have."""
        limit = self._limits.max_image_tokens
        return 0 < limit < sum(map(self._count_image_placeholders, parts))

    @property
    def prompt_limit(self) -> int:
        """Maximum length of a prompt in tokens."""
        return min(self._limits.max_prompt_tokens, self._limits.max_total_tokens - 1)

    def render_prompt(self, task: Task) -> list[int]:
        """Render the prompt of a task; return its ids without truncation.

        Raises:
            UnreadableImageError: An image cannot be read.
            EpisodeStartError: The environment has no prompt for the task, or the prompt omits an
                image.
        """
        messages = self._start_episode(task)
        tools = self._tools[task.environment]
        if not task.images:
            return self._tokenizer.render_prompt(messages, tools)
        try:
            counts = [self._image_processor.count_tokens(picture) for picture in task.images]
        except UnreadableImageError as error:
            raise UnreadableImageError(f"task {task.id!r}: {error}") from error
        return self._tokenizer.render_prompt(messages, tools, counts)

    def _make_prompt_error(self, task: Task, prompt: Sequence[int]) -> ValueError:
        if self._exceeds_image_limit(prompt):
            return ValueError(
                f"the images of the prompt of task {task.id!r} take "
                f"{self._count_image_placeholders(prompt)} tokens; expected at most "
                f"{self._limits.max_image_tokens}. Raise config.rollout.max_image_tokens, lower "
                "config.images.max_pixels, or set config.rollout.overlong_prompts to 'drop'."
            )
        return ValueError(
            f"the prompt of task {task.id!r} has {len(prompt)} tokens; expected 1 to "
            f"{self.prompt_limit}. Raise config.rollout.max_prompt_tokens and max_total_tokens, "
            "or set config.rollout.overlong_prompts to 'drop' (skips such tasks) or "
            "'truncate_left' (removes their first tokens; not for prompts with images)."
        )

    def _start_episode(self, task: Task) -> Sequence[Message]:
        """Return an episode's first messages, with image placeholders.

        Raises:
            EpisodeStartError: The environment raised or returned an invalid prompt.
        """
        env = self._get_env(task)
        try:
            [messages] = env.start([task])
            check_chat(messages)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            where = f"{type(env).__name__}.start of task {task.id!r}"
            raise EpisodeStartError(f"{where}: {format_error(error)}") from error
        expected = [picture.tag for picture in task.images]
        parts = [p for m in messages for p in split_at_tags(m["content"], {*expected})]
        marks = [part for part in parts if part in expected]
        if expected != marks:
            raise EpisodeStartError(
                f"task {task.id!r} has {len(expected)} images, but its chat has {len(marks)} marks "
                f"{' '.join(sorted({*expected}))}; expected {' '.join(expected)}. See "
                f"config.prompt and {type(env).__name__}.start."
            )
        return messages

    def _get_env(self, task: Task) -> Env:
        """Return the environment of a task.

        Raises:
            ValueError: The task names none of the environments.
        """
        if task.environment not in self._envs:
            raise ValueError(
                f"task {task.id!r} has the environment {task.environment!r}; expected one of "
                f"{', '.join(map(repr, self._envs))}. Set the field `environment` of the task."
            )
        return self._envs[task.environment]

    def _compute_remaining_budget(
        self, sample: Sample, num_added: int = 0, context_length: int | None = None
    ) -> int:
        """Return the number of tokens that may be sampled after appending `num_added` tokens.

        `context_length` is the context length with these tokens; None for the current length.
        """
        limits = self._limits
        room = limits.max_total_tokens - len(sample.token_ids) - num_added
        if limits.context is not None:
            length = sample.context_length if context_length is None else context_length
            room = min(room, limits.context.max_tokens - length)
        max_tokens = limits.max_response_tokens
        if sample.max_response_tokens is not None:
            max_tokens = min(max_tokens, sample.max_response_tokens)
        return min(max_tokens - sample.num_sampled, room)

    def _step_episodes(self, episodes: Sequence[Episode], texts: Sequence[str]) -> list[StepResult]:
        """Step all episodes; if the batched call fails, step each episode separately."""
        replies = self._try_step(episodes, texts)
        if isinstance(replies, list):
            return replies

        def step_single_episode(index: int) -> StepResult:
            replies = self._try_step(episodes[index : index + 1], texts[index : index + 1])
            return replies[0] if isinstance(replies, list) else make_failed_step(replies)

        return parallel_map(
            step_single_episode, range(len(episodes)), max_threads=_MAX_SINGLE_STEP_THREADS
        )

    def _try_step(
        self, episodes: Sequence[Episode], texts: Sequence[str]
    ) -> list[StepResult] | str:
        """Call `Env.step` once for episodes of one environment, and validate the replies.

        Return the error message if the call fails.
        """
        try:
            env = self._get_env(episodes[0].task)
            replies = list(env.step(episodes, texts))
            _check_num_results(env, "step", len(replies), len(episodes))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit too: user code must not end the run this way
            if _is_fatal(error):
                raise
            return format_error(error)
        return [self._check_images(validate_step_result(reply)) for reply in replies]

    def _check_images(self, reply: StepResult) -> StepResult:
        """Check the images of a reply; return a failed step if they are unreadable or too large.

        For a text-only model, replace each image with the text `[image]`.
        """
        pictures = get_images(reply.observation)
        if not pictures:
            return reply
        if self._processor is None:
            return dataclasses.replace(reply, observation=without_images(reply.observation))
        try:
            # Decode here, in the environment's thread, so that the main loop hits the processor's
            # cache.
            count = sum(self._count_image_tokens(self._preprocess_images(pictures)))
        except UnreadableImageError as error:
            return make_failed_step(f"a tool returned an invalid image: {error}")
        if count > self._limits.max_observation_tokens:
            return make_failed_step(
                f"a tool returned images of {count} tokens, which cannot be truncated; raise "
                "config.rollout.max_observation_tokens, or lower config.images.max_pixels"
            )
        return reply

    def _count_image_tokens(self, images: Sequence[Attachment]) -> list[int]:
        """Return the number of tokens of each image."""
        return [self._image_processor.count_image_tokens(image) for image in images]

    def _make_timeout_result(self, task: Task) -> StepResult:
        """Create a failed step for a task whose reply missed the deadline."""
        deadline_s = self._schedule.deadline_s
        reason = f"no reply within {deadline_s:g} s (config.env.step_deadline_s)"
        result = make_failed_step(f"{type(self._get_env(task)).__name__}.step: {reason}")
        return dataclasses.replace(result, latency_s=deadline_s)

    def _apply_step_result(
        self, sample: Sample, text: str, result: StepResult
    ) -> Sequence[int] | None:
        """Append a turn and its reply; return the ids to prefill, or None if the episode ends.

        Args:
            sample: Sample that the turn belongs to; the sampled tokens are already appended.
            text: Text of the turn.
            result: Reply of the environment, validated.
        """
        make_turn = partial(
            Turn,
            text=text,
            tool_call=result.tool_call,
            tool=result.tool,
            latency_s=result.latency_s,
            error=result.error,
            records=result.records,
        )
        if result.outcome is not None:
            self._end_episode(sample, make_turn(), result.outcome)
            return None

        # If the next turn does not fit in this context, begin the next context.
        pictures = get_images(result.observation)
        token_ids, shown, results = self._encode_observation(sample, result.observation)
        context_length = sample.context_length + len(token_ids)
        num_repeated = 0
        if (contexts := self._limits.context) is not None:
            sampled = sample.token_ids[sample.turn_starts[-1] :]
            tools = self._tools[sample.episode.task.environment]
            without_body = encode_omitted_observation(self._tokenizer, result.observation, tools)
            sample.turn_ids.append(
                TurnIds(sampled=sampled, observation=token_ids, placeholder=without_body)
            )
            if not contexts.has_room(context_length):
                prompt = sample.token_ids[: sample.prompt_length]
                next_context = contexts.build_next_context(prompt, sample.turn_ids)
                if next_context is None:
                    self._end_episode(sample, make_turn(), Outcome.OUT_OF_BUDGET)
                    return None
                token_ids, num_repeated = next_context
                context_length = len(token_ids)

        # End the episode if nothing is left to sample after the observation.
        remaining = self._compute_remaining_budget(sample, len(token_ids), context_length)
        if remaining <= 0 or self._exceeds_image_limit(sample.token_ids, token_ids):
            self._end_episode(sample, make_turn(), Outcome.OUT_OF_BUDGET)
            return None
        if num_repeated:
            sample.begin_context(token_ids, num_repeated)
        else:
            sample.append_observation(token_ids)
        sample.attachments += self._preprocess_images(pictures)
        sample.episode.turns.append(
            make_turn(observation=shown, results=results, images=tuple(pictures))
        )
        return token_ids

    def _compute_max_observation_tokens(self, sample: Sample) -> int:
        """Return the maximum length of an observation that leaves room to sample one token."""
        room = self._limits.max_total_tokens - len(sample.token_ids) - 1
        turn_length = len(sample.token_ids) - sample.turn_starts[-1]
        in_context = self._limits.compute_context_observation_limit(
            sample.prompt_length, turn_length
        )
        return room if in_context is None else min(room, in_context)

    def _encode_observation(
        self, sample: Sample, observation: Observation | ToolResults | None
    ) -> tuple[list[int], str | None, tuple[str, ...]]:
        """Encode an observation, truncated to fit.

        Returns:
            The observation's ids, its text, and the truncated results of `ToolResults`.
        """
        if observation is None:
            return [], None, ()
        if isinstance(observation, ToolResults):
            return encode_results(
                self._tokenizer,
                observation,
                tools=self._tools[sample.episode.task.environment],
                max_result_tokens=self._limits.max_observation_tokens,
                max_tokens=self._compute_max_observation_tokens(sample),
                image_tokens=[
                    self._count_image_tokens(self._preprocess_images(images))
                    for images in observation.images
                ],
            )
        tokens = (
            self._count_image_tokens(self._preprocess_images(observation.images))
            if observation.images
            else []
        )
        ids, text = encode_observation(
            self._tokenizer,
            observation,
            max_body_tokens=self._limits.max_observation_tokens - sum(tokens),
            max_tokens=self._compute_max_observation_tokens(sample),
            image_tokens=tokens,
        )
        return ids, text, ()

    def _end_episode(self, sample: Sample, turn: Turn, outcome: Outcome) -> None:
        sample.episode.turns.append(turn)
        # An earlier turn may have failed without ending the episode.
        if any(turn.error for turn in sample.episode.turns):
            outcome = Outcome.ENVIRONMENT_ERROR
        sample.episode.outcome = outcome

    def _score_groups(self, samples: Sequence[Sample], sampling: SamplingConfig) -> list[Group]:
        size = sampling.group_size
        groups = [samples[start : start + size] for start in range(0, len(samples), size)]
        scored = [self._score_episodes([s for s in group if not s.has_failed]) for group in groups]
        rewards_by_group = self._reward_fn(
            [[scored_episode for _, scored_episode in scored_group] for scored_group in scored]
        )
        for scored_group, rewards in zip(scored, rewards_by_group, strict=True):
            for (sample, scored_episode), reward in zip(scored_group, rewards, strict=True):
                sample.reward_records = tuple(map(sanitize_record, scored_episode.records))
                if isinstance(reward, BaseException):
                    sample.fail(reward)
                    continue
                try:
                    sample.reward = validate_reward(reward)
                except (TypeError, ValueError) as error:
                    sample.fail(error)
        recorded = self._recorded_specs if sampling.keeps_arrays else {}
        return [
            Group(trajectories=tuple(to_trajectory(sample, recorded) for sample in group))
            for group in groups
        ]

    def _score_episodes(self, samples: Sequence[Sample]) -> list[tuple[Sample, ScoredEpisode]]:
        """Score samples with the environment, and mark samples whose scoring fails as failed."""
        if not samples:
            return []
        try:
            env = self._get_env(samples[0].episode.task)
            rewards = list(env.score([sample.episode for sample in samples]))
            _check_num_results(env, "score", len(rewards), len(samples))
            return [
                (s, s.to_scored_episode(validate_reward(reward)))
                for s, reward in zip(samples, rewards, strict=True)
            ]
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # scoring runs arbitrary user code
            if _is_fatal(error):
                raise
            if len(samples) > 1:  # perhaps only one of them fails
                return [item for sample in samples for item in self._score_episodes([sample])]
            samples[0].fail(error)
            return []


def _check_num_results(env: Env, method: str, count: int, expected: int) -> None:
    if count != expected:
        raise ValueError(
            f"{type(env).__name__}.{method} returned {count} results for {expected} episodes; "
            "expected one for each, in order."
        )


def _is_fatal(error: BaseException) -> bool:
    """Return True for an outage without a fallback, which stops the run."""
    return isinstance(error, OutageError) and error.fallback is None
