"""Episodes with an environment, whoever writes the turns: prompts, replies, rewards.

Tokens meet text here, in rollouts that derive from this, and in `demonstrations.py`, which calls
the same functions. What the environment says is encoded once, when it is appended.

Whatever goes wrong in the environment, an exception, a reply of another kind or none at all, ends
its episodes as environment errors.
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
from jaxrl.envs.images import MARK, Picture, UnreadableError
from jaxrl.models.aux_arrays import TokenArray
from jaxrl.sampling.contexts import Contexts, PlayedTurn
from jaxrl.sampling.interfaces import Processor, Sampling
from jaxrl.sampling.observations import encode_observation, encode_results, omitted
from jaxrl.sampling.step_results import (
    check_chat,
    checked_reward,
    failed_step,
    images_of,
    validate_step_result,
    without_images,
    writable_record,
)
from jaxrl.sampling.trajectory import Sample, trajectory_of
from jaxrl.types import Attachment, Draw, Group
from jaxrl.utils.concurrency import error_text, side_by_side


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Token budgets of one trajectory.

    Attributes:
        max_prompt_tokens: a longer prompt is refused, or cut.
        max_response_tokens: sampled tokens, over all turns.
        max_total_tokens: prompt, sampled tokens and observations together.
        max_observation_tokens: of the body of one observation; what is beyond is cut off inside
            the tags.
        overlong_prompts: what becomes of a longer prompt: `refuse`, `drop` (whoever draws tasks
            leaves it out) or `truncate_left` (its first tokens are cut off).
        max_image_tokens: of the images in prompt and observations; 0: `max_total_tokens`. A prompt
            with more is longer than it may be, an observation with more ends the trajectory.
        context: of an episode that goes through several contexts, which `max_total_tokens` counts
            together; None: it has one.
    """

    max_prompt_tokens: int
    max_response_tokens: int
    max_total_tokens: int
    max_observation_tokens: int
    overlong_prompts: str = "refuse"
    max_image_tokens: int = 0
    context: Contexts | None = None

    def room_in_context(self, prompt_length: int, num_sampled: int) -> int | None:
        """Tokens that an observation may have to begin a context; None: it has one context.

        Before it stand the prompt and the turn that it answers, behind it room for another turn.
        """
        if self.context is None:
            return None
        return self.context.max_tokens - self.context.turn_tokens - prompt_length - num_sampled


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Moments at which the environment's replies enter, the same in all rollouts of a run.

    Attributes:
        deterministic: by the number of chunks, waiting for the environment where need be, so that
            nothing depends on the clock; else at the first chunk after they have arrived.
        lag_chunks: of the deterministic schedule. The replies to rows that stopped in a chunk
            enter before the chunk so many after it. With 1 the device waits for host and
            environment between chunks; with more it decodes meanwhile.
        deadline_s: seconds after which a call of `Env.step` is given up; 0: never.
    """

    deterministic: bool = True
    lag_chunks: int = 2
    deadline_s: float = 600.0


_MAX_ASKED_ALONE = 32  # threads that ask for one episode each, after a call for all has failed

_DECODERS = 8  # threads that decode images of prompts


Pay = Callable[[Sequence[Sequence[ScoredEpisode]]], list[list[Reward | BaseException]]]
"""From the finished episodes of each task to their rewards, or to why they have none."""


class StartError(ValueError):
    """The environment could not open an episode of a task."""


class EpisodePlayer:
    """Plays episodes with an environment, whoever writes the turns: prompts, replies, rewards."""

    def __init__(
        self,
        env: Env,
        tokenizer: Tokenizer,
        limits: Limits,
        schedule: Schedule | None = None,
        pay: Pay | None = None,
        processor: Processor | None = None,
    ):
        """`schedule` defaults to `Schedule()`.

        `pay` adds up what episodes earned; without it, the total is what the environment says.
        `processor` reads images; None where the model reads none.
        """
        self._processor = processor
        self._env = env
        self._tools = getattr(env, "chat_tools", ())
        self._tokenizer = tokenizer
        self._opener = tokenizer.opener_with(self._tools)
        self._limits = limits
        self._schedule = schedule or Schedule()
        self._pay = pay or (lambda groups: [[one.reward for one in group] for group in groups])

    @property
    def _recorded(self) -> Mapping[str, TokenArray]:
        """Arrays that are recorded for each token, by name; none without an engine."""
        return {}

    def _make_samples(self, draws: Sequence[Draw], group_size: int) -> list[Sample]:
        """All samples with their prompts; those of a task that cannot be opened have ended."""
        samples = []
        seen = self._see_all([draw.task for draw in draws])
        for draw, images in zip(draws, seen, strict=True):
            prompt: list[int] = []
            failure: str | None = None
            try:
                prompt = self._prompt(draw.task)
                if isinstance(images, UnreadableError):
                    raise StartError(f"task {draw.task.id!r}: {images}")
            except StartError as error:
                failure, images = str(error), ()
            for sample_index in range(group_size):
                sample = Sample(
                    episode=Episode(task=draw.task, opener=self._opener),
                    sample_index=sample_index,
                    attempt=draw.attempt,
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
        """Returns True if the prompt of a task is within its limit.

        Raises:
            ValueError: it is longer, and that is refused, as is cutting images; or it is empty.
            UnreadableError: an image cannot be read.
            StartError: the environment has no prompt for it.
        """
        prompt = self._render_prompt(task)
        fits = len(prompt) <= self._prompt_limit and not self._has_too_many_units(prompt)
        refuses = self._limits.overlong_prompts == "refuse"
        if self._limits.overlong_prompts == "truncate_left":
            refuses = bool(task.images)  # half an image is none
        if not prompt or (not fits and refuses):
            raise self._unfit(task, prompt)
        return fits

    def _see_all(self, tasks: Sequence[Task]) -> list[tuple[Attachment, ...] | UnreadableError]:
        """The images of each task, or why they cannot be read."""

        def see(task: Task) -> tuple[Attachment, ...] | UnreadableError:
            try:
                return tuple(self._see(task.images))
            except UnreadableError as error:
                return error

        if not any(task.images for task in tasks):
            return [()] * len(tasks)
        return side_by_side(see, tasks, max_threads=_DECODERS)

    def _see(self, pictures: Sequence[Picture]) -> list[Attachment]:
        return [self._reader(picture) for picture in pictures]

    @property
    def _reader(self) -> Processor:
        if self._processor is None:
            raise UnreadableError(
                "there is an image, and the model reads none: its config.json has no "
                "image_token_id. Set config.model.path to a model that does, as Qwen2.5-VL (whose "
                "folder also counts for endpoints), or leave images out, by columns={'images': ''}"
            )
        return self._processor

    def _prompt(self, task: Task) -> list[int]:
        """The ids of a task's prompt, cut if that is wanted."""
        prompt, limit = self._render_prompt(task), self._prompt_limit
        if self._limits.overlong_prompts == "truncate_left" and not task.images:
            prompt = prompt[-limit:]
        if not 0 < len(prompt) <= limit or self._has_too_many_units(prompt):
            raise self._unfit(task, prompt)
        return prompt

    def _num_units(self, token_ids: Sequence[int]) -> int:
        """Counts tokens of images."""
        image_id = self._tokenizer.image_id
        return 0 if image_id is None else token_ids.count(image_id)

    def _has_too_many_units(self, *parts: Sequence[int]) -> bool:
        """Returns True if there are more tokens of images than a trajectory may have."""
        limit = self._limits.max_image_tokens
        return 0 < limit < sum(map(self._num_units, parts))

    @property
    def _prompt_limit(self) -> int:
        return min(self._limits.max_prompt_tokens, self._limits.max_total_tokens - 1)

    def _render_prompt(self, task: Task) -> list[int]:
        """The ids of a task's prompt.

        Raises:
            UnreadableError: an image cannot be read.
            StartError: the environment has no prompt for the task, or one without its images.
        """
        messages = self._start(task)
        if not task.images:
            return self._tokenizer.render_prompt(messages, self._tools)
        try:
            counts = [self._reader.num_tokens(picture) for picture in task.images]
        except UnreadableError as error:
            raise UnreadableError(f"task {task.id!r}: {error}") from error
        return self._tokenizer.render_prompt(messages, self._tools, counts)

    def _unfit(self, task: Task, prompt: Sequence[int]) -> ValueError:
        if self._has_too_many_units(prompt):
            return ValueError(
                f"the images of the prompt of task {task.id!r} take {self._num_units(prompt)} "
                f"tokens; expected at most {self._limits.max_image_tokens}. Raise "
                "config.rollout.max_image_tokens, lower config.images.max_pixels, or set "
                "config.rollout.overlong_prompts to 'drop' (leaves such tasks out)."
            )
        return ValueError(
            f"the prompt of task {task.id!r} has {len(prompt)} tokens; expected 1 to "
            f"{self._prompt_limit}. Raise config.rollout.max_prompt_tokens and max_total_tokens, "
            "or set config.rollout.overlong_prompts to 'drop' (leaves such tasks out) or "
            "'truncate_left' (cuts their first tokens off; not of prompts with images)."
        )

    def _start(self, task: Task) -> Sequence[Message]:
        """The chat that opens an episode, with a mark for each image; else a `StartError`."""
        try:
            [messages] = self._env.start([task])
            check_chat(messages)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            where = f"{type(self._env).__name__}.start of task {task.id!r}"
            raise StartError(f"{where}: {error_text(error)}") from error
        marks = sum(message["content"].count(MARK) for message in messages)
        if task.images and marks != len(task.images):
            raise StartError(
                f"task {task.id!r} has {len(task.images)} images, and its chat {marks} marks "
                f"{MARK}; expected one for each image. See config.prompt and "
                f"{type(self._env).__name__}.start."
            )
        return messages

    def _budget(self, sample: Sample, num_added: int = 0, context_length: int | None = None) -> int:
        """Return how many tokens are left to sample behind `num_added` more.

        `context_length` is that of the context with these tokens; None: that of the sample.
        """
        limits = self._limits
        room = limits.max_total_tokens - len(sample.token_ids) - num_added
        if limits.context is not None:
            length = sample.context_length if context_length is None else context_length
            room = min(room, limits.context.max_tokens - length)
        return min(limits.max_response_tokens - sample.num_sampled, room)

    def _step(self, episodes: Sequence[Episode], texts: Sequence[str]) -> list[StepResult]:
        """The environment's replies; where it fails, it is asked again for each episode alone."""
        replies = self._try_step(episodes, texts)
        if isinstance(replies, list):
            return replies

        def step_alone(index: int) -> StepResult:
            replies = self._try_step(episodes[index : index + 1], texts[index : index + 1])
            return replies[0] if isinstance(replies, list) else failed_step(replies)

        return side_by_side(step_alone, range(len(episodes)), max_threads=_MAX_ASKED_ALONE)

    def _try_step(
        self, episodes: Sequence[Episode], texts: Sequence[str]
    ) -> list[StepResult] | str:
        """The environment's replies, or why it has none."""
        try:
            replies = list(self._env.step(episodes, texts))
            self._check_count("step", len(replies), len(episodes))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit too: no code of the user's ends a run so
            if _ends_run(error):
                raise
            return error_text(error)
        return [self._looked_at(validate_step_result(reply)) for reply in replies]

    def _looked_at(self, reply: StepResult) -> StepResult:
        """A reply whose images, if it has any, can be shown; else the failure of the step.

        A model that reads none is told of an image as `[image]`.
        """
        pictures = images_of(reply.observation)
        if not pictures:
            return reply
        if self._processor is None:
            return dataclasses.replace(reply, observation=without_images(reply.observation))
        try:
            # Decoded here, in the environment's thread, so that the loop finds it in the
            # processor's cache.
            count = sum(self._tokens(self._see(pictures)))
        except UnreadableError as error:
            return failed_step(f"a tool shows an image: {error}")
        if count > self._limits.max_observation_tokens:
            return failed_step(
                f"a tool shows images of {count} tokens, which are not cut; raise "
                "config.rollout.max_observation_tokens, or lower config.images.max_pixels"
            )
        return reply

    def _tokens(self, images: Sequence[Attachment]) -> list[int]:
        """Number of tokens of each image."""
        return [self._reader.num_units(image) for image in images]

    def _give_up(self) -> StepResult:
        """Makes a failed step in place of a reply that did not come in time."""
        deadline_s = self._schedule.deadline_s
        why = f"no reply within {deadline_s:g} s (config.env.step_deadline_s)"
        late = failed_step(f"{type(self._env).__name__}.step: {why}")
        return dataclasses.replace(late, latency_s=deadline_s)

    def _check_count(self, method: str, count: int, expected: int) -> None:
        if count != expected:
            raise ValueError(
                f"{type(self._env).__name__}.{method} gave {count} results for {expected} "
                "episodes; expected one for each, in their order."
            )

    def _take(self, sample: Sample, text: str, result: StepResult) -> Sequence[int] | None:
        """Appends a turn and its reply; returns the observation's ids, None after the last turn.

        Args:
            sample: whose turn it is.
            text: of the turn.
            result: what the environment replies.
        """
        turn = partial(
            Turn,
            text=text,
            tool_call=result.tool_call,
            tool=result.tool,
            latency_s=result.latency_s,
            error=result.error,
            records=result.records,
        )
        if result.outcome is not None:
            self._end(sample, turn(), result.outcome)
            return None
        pictures = images_of(result.observation)
        token_ids, shown, results = self._fit_observation(sample, result.observation)
        context_length = sample.context_length + len(token_ids)
        num_repeated = 0
        if (contexts := self._limits.context) is not None:
            sampled = sample.token_ids[sample.turn_starts[-1] :]
            without_body = omitted(self._tokenizer, result.observation, self._tools)
            sample.played.append(
                PlayedTurn(sampled=sampled, observation=token_ids, omitted=without_body)
            )
            if not contexts.has_room(context_length):
                prompt = sample.token_ids[: sample.prompt_length]
                following = contexts.following(prompt, sample.played)
                if following is None:
                    self._end(sample, turn(), Outcome.OUT_OF_BUDGET)
                    return None
                token_ids, num_repeated = following
                context_length = len(token_ids)
        left = self._budget(sample, len(token_ids), context_length)
        if left <= 0 or self._has_too_many_units(sample.token_ids, token_ids):
            self._end(sample, turn(), Outcome.OUT_OF_BUDGET)
            return None
        if num_repeated:
            sample.begin_context(token_ids, num_repeated)
        else:
            sample.append_observation(token_ids)
        sample.attachments += self._see(pictures)
        sample.episode.turns.append(
            turn(observation=shown, results=results, images=tuple(pictures))
        )
        return token_ids

    def _room(self, sample: Sample) -> int:
        """Tokens that an observation may have, with one left to sample behind it."""
        room = self._limits.max_total_tokens - len(sample.token_ids) - 1
        turn = len(sample.token_ids) - sample.turn_starts[-1]
        in_context = self._limits.room_in_context(sample.prompt_length, turn)
        return room if in_context is None else min(room, in_context)

    def _fit_observation(
        self, sample: Sample, observation: Observation | ToolResults | None
    ) -> tuple[list[int], str | None, tuple[str, ...]]:
        """Ids and text of an observation, cut to its limit and to what the row has room for.

        The last item are the results of `ToolResults`, cut likewise.
        """
        if observation is None:
            return [], None, ()
        if isinstance(observation, ToolResults):
            return encode_results(
                self._tokenizer,
                observation,
                tools=self._tools,
                max_result_tokens=self._limits.max_observation_tokens,
                room=self._room(sample),
                image_tokens=[self._tokens(self._see(some)) for some in observation.images],
            )
        tokens = self._tokens(self._see(observation.images)) if observation.images else []
        ids, text = encode_observation(
            self._tokenizer,
            observation,
            max_body_tokens=self._limits.max_observation_tokens - sum(tokens),
            room=self._room(sample),
            image_tokens=tokens,
        )
        return ids, text, ()

    def _end(self, sample: Sample, turn: Turn, outcome: Outcome) -> None:
        sample.episode.turns.append(turn)
        if any(turn.error for turn in sample.episode.turns):  # one it went on after
            outcome = Outcome.ENVIRONMENT_ERROR
        sample.episode.outcome = outcome

    def _score(self, samples: Sequence[Sample], sampling: Sampling) -> list[Group]:
        size = sampling.group_size
        groups = [samples[start : start + size] for start in range(0, len(samples), size)]
        scored = [self._scored([s for s in group if not s.has_failed]) for group in groups]
        paid = self._pay([[finished for _, finished in of_task] for of_task in scored])
        for of_task, rewards in zip(scored, paid, strict=True):
            for (sample, finished), reward in zip(of_task, rewards, strict=True):
                sample.reward_records = tuple(map(writable_record, finished.records))
                if isinstance(reward, BaseException):
                    sample.fail(reward)
                    continue
                try:
                    sample.reward = checked_reward(reward)
                except (TypeError, ValueError) as error:
                    sample.fail(error)
        recorded = self._recorded if sampling.keeps_arrays else {}
        return [
            Group(trajectories=tuple(trajectory_of(sample, recorded) for sample in group))
            for group in groups
        ]

    def _scored(self, samples: Sequence[Sample]) -> list[tuple[Sample, ScoredEpisode]]:
        """Asks the environment for scores; a sample that it cannot score has failed instead."""
        if not samples:
            return []
        try:
            rewards = list(self._env.score([sample.episode for sample in samples]))
            self._check_count("score", len(rewards), len(samples))
            return [
                (s, s.finished(checked_reward(reward)))
                for s, reward in zip(samples, rewards, strict=True)
            ]
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # of whatever the environment scores with
            if _ends_run(error):
                raise
            if len(samples) > 1:  # one of them, maybe
                return [one for sample in samples for one in self._scored([sample])]
            samples[0].fail(error)
            return []


def _ends_run(error: BaseException) -> bool:
    return isinstance(error, OutageError) and error.fallback is None
