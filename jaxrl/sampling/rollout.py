"""Turns: the engine's tokens to the environment's text and back.

Tokens meet text here, in rollouts of `extras/` that derive from this one, and in
`demonstrations.py`, which calls the same functions.

What the policy sampled stays as the ids it sampled; it is decoded for the environment and never
encoded again. What the environment says is encoded once, when it is appended.

The environment is called from threads, one call for all rows that stopped in a chunk, and the
device decodes other rows meanwhile. `Schedule` says when its replies enter. Whatever goes wrong in
it, an exception, a reply of another kind or none at all, ends its episodes as environment errors.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from functools import lru_cache, partial
from numbers import Real
from typing import Any

import numpy as np

from jaxrl.envs.base import (
    CallRecord,
    Env,
    Episode,
    Finished,
    Message,
    Observation,
    OutageError,
    Outcome,
    Reward,
    StepResult,
    Task,
    ToolResults,
    Turn,
)
from jaxrl.envs.calls import MAX_ERROR, Threads, error_text, failure_report, side_by_side
from jaxrl.envs.images import MARK, Picture, UnreadableError
from jaxrl.envs.text import writable
from jaxrl.models.beside import TokenArray
from jaxrl.runtime.compilation import stopped_by
from jaxrl.runtime.stopping import Interrupted
from jaxrl.sampling import decode
from jaxrl.sampling.contexts import OMITTED, Contexts, PlayedTurn
from jaxrl.sampling.engine import Engine, Event, Request, context_key, sample_keys
from jaxrl.sampling.protocol import Processor, Sampling
from jaxrl.sampling.stop_strings import StopAutomaton
from jaxrl.tokenizer import Tokenizer
from jaxrl.types import Attachment, Draw, Group, Trajectory


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


@dataclass(kw_only=True)
class Schedule:
    """When the environment's replies enter; all rollouts of a run have the same.

    Attributes:
        deterministic: by the number of chunks, waiting for the environment where need be, so that
            nothing depends on the clock; else at the first chunk after they have arrived.
        lag_chunks: of the deterministic schedule. The replies to rows that stopped in a chunk
            enter before the chunk so many after it. With 1 the device waits for host and
            environment between chunks; with more it decodes meanwhile. Before the train stage it
            may be chosen anew.
        deadline_s: seconds after which a call of `Env.step` is given up; 0: never.
    """

    deterministic: bool = True
    lag_chunks: int = 2
    deadline_s: float = 600.0


_PATIENCE_S = 5.0
"""Seconds in which calls under way may end when a rollout is broken off."""

LOOK_S, GLANCE_S = 1.0, 0.005
"""Seconds between two looks whether to stop, while there is nothing to do but wait, and between two
whether the device is done, which is so long not seen to wait."""

_NOBODY = -1

_MAX_ASKED_ALONE = 32  # threads that ask for one episode each, after a call for all has failed

_DECODERS = 8  # threads that decode images of prompts


Pay = Callable[[Sequence[Sequence[Finished]]], list[list[Reward | BaseException]]]
"""From the finished episodes of each task to their rewards, or to why they have none."""


class StartError(ValueError):
    """The environment could not open an episode of a task."""


@dataclass(slots=True)
class Span:
    """Tokens that were sampled one after another; the arrays of each append, in their order."""

    start: int  # place of the first one
    end: int  # behind the last one
    versions: int | Sequence[int]  # of the weights, one for all or one for each
    logprobs: list[np.ndarray] = field(default_factory=list)  # float32, nats
    entropies: list[np.ndarray] = field(default_factory=list)  # float32, nats


@dataclass(kw_only=True, slots=True)
class Sample:
    """A trajectory while it grows."""

    episode: Episode
    sample_index: int
    attempt: int
    token_ids: list[int]
    prompt_length: int
    attachments: list[Attachment] = field(default_factory=list)  # shown so far
    sampled: list[Span] = field(default_factory=list)  # in their order
    num_sampled: int = 0  # tokens that the policy wrote
    # By context, of its tokens in order.
    recorded: list[list[Mapping[str, np.ndarray]]] = field(default_factory=lambda: [[]])
    contexts: list[tuple[int, int]] = field(default_factory=list)  # see `Trajectory.contexts`
    played: list[PlayedTurn] = field(default_factory=list)  # where there may be several contexts
    key: np.ndarray | None = None  # uint32 [2], of the first context; see `engine.sample_keys`
    turn_starts: list[int] = field(default_factory=list)  # of every turn and the one under way
    reward: Reward | None = None
    reward_records: tuple[CallRecord, ...] = ()
    usage: Mapping[str, float] = field(default_factory=dict)  # of a model behind an endpoint

    def append_prompt(self) -> None:
        """Begins the first turn, behind the prompt."""
        self.turn_starts = [self.prompt_length]

    def append_sampled(self, event: Event, version: int) -> None:
        """Appends what the engine sampled with weights of a version."""
        self.append(event.token_ids.tolist(), event.logprobs, event.entropies, version)
        if event.recorded:
            self.recorded[-1].append(event.recorded)

    def append_unknown(self, token_ids: Sequence[int], version: int) -> None:
        """Appends what a model wrote whose probabilities nobody knows."""
        unknown = np.full(len(token_ids), np.nan, np.float32)
        self.append(token_ids, unknown, unknown, version)

    def append(
        self,
        token_ids: Sequence[int],
        logprobs: np.ndarray,
        entropies: np.ndarray,
        versions: int | Sequence[int],
    ) -> None:
        """Appends what a model wrote.

        Args:
            token_ids: n of them.
            logprobs: float32 [n], nats.
            entropies: float32 [n], nats.
            versions: see `Span`.
        """
        if not token_ids:
            return
        start = len(self.token_ids)
        span = self.sampled[-1] if self.sampled else None
        follows = span is not None and span.end == start and span.versions == versions
        if span is None or not follows or not isinstance(versions, int):
            span = Span(start, start, versions)
            self.sampled.append(span)
        span.logprobs.append(logprobs)
        span.entropies.append(entropies)
        self.token_ids.extend(token_ids)
        span.end = len(self.token_ids)
        self.num_sampled += len(token_ids)

    def append_observation(self, token_ids: Sequence[int]) -> None:
        """Appends what the environment inserted, and begins the next turn."""
        self.token_ids.extend(token_ids)
        self.turn_starts.append(len(self.token_ids))

    def begin_context(self, token_ids: Sequence[int], num_repeated: int) -> None:
        """Goes on in another context, which begins with these ids, and begins the next turn there.

        Of the ids the first `num_repeated` stand in an earlier context too.
        """
        self.contexts.append((len(self.token_ids), num_repeated))
        self.recorded.append([])
        self.append_observation(token_ids)

    @property
    def context_length(self) -> int:
        """Tokens of the context that it is in."""
        return len(self.token_ids) - (self.contexts[-1][0] if self.contexts else 0)

    def token_arrays(self, declared: Mapping[str, TokenArray]) -> dict[str, np.ndarray]:
        """Recorded arrays `[L, ...]`; a context's last token, which is not read, has `fill`."""
        if not any(self.recorded):  # an episode that did not begin
            return {}
        starts = [0, *(start for start, _ in self.contexts), len(self.token_ids)]
        lengths = np.diff(starts).tolist()
        arrays = {}
        for name, array in declared.items():
            parts = []
            for events, length in zip(self.recorded, lengths, strict=True):
                read = [one[name] for one in events]
                parts += [*read, array.filled(length - sum(map(len, read)))]
            arrays[name] = np.concatenate(parts)
        return arrays

    @property
    def has_failed(self) -> bool:
        """True of an environment error."""
        return self.episode.outcome == Outcome.ENVIRONMENT_ERROR

    def finished(self, reward: Reward) -> Finished:
        """The trajectory with what the environment found in it."""
        ids, first = [], self.prompt_length
        for start, count in self.contexts:
            ids += self.token_ids[first:start]
            first = start + count
        ids += self.token_ids[first:]
        return Finished(episode=self.episode, reward=reward, completion_ids=ids)

    def fail(self, error: BaseException) -> None:
        """Ends as an environment error, since it could not be scored."""
        turns, message = self.episode.turns, writable(f"score: {failure_report(error)}")
        self.episode.outcome = Outcome.ENVIRONMENT_ERROR
        turns[-1] = dataclasses.replace(turns[-1], error=message)


@dataclass(frozen=True, eq=False, kw_only=True)
class _Call:
    """A call of the environment, made or under way."""

    due: int  # number of the chunk before which its replies enter
    # Each is a request (`_NOBODY` where the engine has forgotten it), its sample, its turn's text.
    members: list[tuple[int, Sample, str]]
    replies: Future[list[StepResult]]
    ends: float = math.inf  # on the monotonic clock, when it is given up


def encode_observation(
    tokenizer: Tokenizer,
    observation: Observation,
    *,
    max_body_tokens: int,
    room: int | None = None,
    image_tokens: Sequence[int] = (),
) -> tuple[list[int], str]:
    """Ids of an observation whose body is cut to fit inside its tags, and its text as inserted.

    Args:
        tokenizer: with the chat template, which writes images.
        observation: as it came.
        max_body_tokens: of its text.
        room: tokens of all of it; None: as many as it takes. Tags and images are written anyway.
        image_tokens: of each of its images, which stand between text and suffix.
    """
    before, after = _tag_ids(tokenizer, observation.prefix), _tag_ids(tokenizer, observation.suffix)
    images = [tokenizer.render_image(count) for count in image_tokens]
    if room is not None:
        room -= len(before) + len(after) + sum(len(ids) for ids, _ in images)
        max_body_tokens = max(min(max_body_tokens, room), 0)
    # One more than may stay: a body may be megabytes, of which no more is looked at.
    body = tokenizer.encode_start(observation.body, max_body_tokens + 1)
    shown = observation.body
    if len(body) > max_body_tokens:
        body = body[:max_body_tokens]
        shown = tokenizer.decode(body)
    return [
        *before,
        *body,
        *(id for ids, _ in images for id in ids),
        *after,
    ], "".join([observation.prefix, shown, *(text for _, text in images), observation.suffix])


@lru_cache(maxsize=64)
def _tag_ids(tokenizer: Tokenizer, tag: str) -> tuple[int, ...]:
    """Ids of what stands around an observation, nearly always the same."""
    return tuple(tokenizer.encode(tag))


def encode_results(
    tokenizer: Tokenizer,
    results: ToolResults,
    *,
    tools: Sequence[Mapping[str, Any]],
    max_result_tokens: int,
    room: int | None = None,
    image_tokens: Sequence[Sequence[int]] = (),
) -> tuple[list[int], str]:
    """Ids and text of a turn of results as the chat template writes it, each result cut to fit.

    Args:
        tokenizer: with the chat template.
        results: as they came.
        tools: what the template describes in this chat.
        max_result_tokens: of each.
        room: tokens of the whole turn, which the results share from the first to the last; None:
            as many as they take. The template's own and images are written in any case.
        image_tokens: of each result those of its images; () without any.
    """
    if room is not None:
        bare, _ = tokenizer.render_results([""] * len(results.bodies), tools, image_tokens)
        room -= len(bare)
    shown = []
    for body in results.bodies:
        limit = max_result_tokens if room is None else max(min(max_result_tokens, room), 0)
        ids = tokenizer.encode_start(body, limit + 1)
        shown.append(body if len(ids) <= limit else tokenizer.decode(ids[:limit]))
        room = None if room is None else room - min(len(ids), limit)
    return tokenizer.render_results(shown, tools, image_tokens)


def omitted(
    tokenizer: Tokenizer,
    observation: Observation | ToolResults | None,
    tools: Sequence[Mapping[str, Any]] = (),
) -> list[int]:
    """Ids of an observation whose body is left out of a later context."""
    if observation is None:
        return []
    if isinstance(observation, ToolResults):
        return tokenizer.render_results([OMITTED] * len(observation.bodies), tools)[0]
    parts = observation.prefix, OMITTED, observation.suffix
    return [token for part in parts for token in tokenizer.encode(part)]


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
        self._opener = tokenizer.opener
        self._limits = limits
        self._schedule = schedule or Schedule()
        self._pay = pay or (lambda groups: [[one.reward for one in group] for group in groups])

    @property
    def _recorded(self) -> Mapping[str, TokenArray]:
        """Arrays by token that who writes the turns records."""
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
                sample.append_prompt()
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
            _check_chat(messages)
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

    def _budget(self, length: int, *, num_sampled: int, context_length: int) -> int:
        """Tokens still to sample after `length`, of which `context_length` are in the context."""
        limits = self._limits
        room = limits.max_total_tokens - length
        if limits.context is not None:
            room = min(room, limits.context.max_tokens - context_length)
        return min(limits.max_response_tokens - num_sampled, room)

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
        return [self._looked_at(_checked_reply(reply)) for reply in replies]

    def _looked_at(self, reply: StepResult) -> StepResult:
        """A reply whose images, if it has any, can be shown; else the failure of the step.

        A model that reads none is told of an image as `[image]`.
        """
        pictures = images_of(reply.observation)
        if not pictures:
            return reply
        if self._processor is None:
            return dataclasses.replace(reply, observation=_told(reply.observation))
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
        """Tokens of each."""
        return [self._reader.num_units(image) for image in images]

    def _give_up(self) -> StepResult:
        """Makes a failed step in place of a reply that did not come in time."""
        deadline_s = self._schedule.deadline_s
        why = f"no reply within {deadline_s:g} s (config.env.step_deadline_s)"
        late = failed_step(f"{type(self._env).__name__}.step: {why}")
        return dataclasses.replace(late, latency_s=deadline_s)

    def _check_count(self, method: str, found: int, expected: int) -> None:
        if found != expected:
            raise ValueError(
                f"{type(self._env).__name__}.{method} gave {found} results for {expected} "
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
        token_ids, shown = self._fit_observation(sample, result.observation)
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
        length = len(sample.token_ids) + len(token_ids)
        left = self._budget(length, num_sampled=sample.num_sampled, context_length=context_length)
        if left <= 0 or self._has_too_many_units(sample.token_ids, token_ids):
            self._end(sample, turn(), Outcome.OUT_OF_BUDGET)
            return None
        if num_repeated:
            sample.begin_context(token_ids, num_repeated)
        else:
            sample.append_observation(token_ids)
        sample.attachments += self._see(pictures)
        sample.episode.turns.append(turn(observation=shown, images=tuple(pictures)))
        return token_ids

    def _room(self, sample: Sample) -> int:
        """Tokens that an observation may have, with one left to sample behind it."""
        room = self._limits.max_total_tokens - len(sample.token_ids) - 1
        turn = len(sample.token_ids) - sample.turn_starts[-1]
        in_context = self._limits.room_in_context(sample.prompt_length, turn)
        return room if in_context is None else min(room, in_context)

    def _fit_observation(
        self, sample: Sample, observation: Observation | ToolResults | None
    ) -> tuple[list[int], str | None]:
        """Ids and text of an observation, cut to its limit and to what the row has room for."""
        if observation is None:
            return [], None
        if isinstance(observation, ToolResults):
            return encode_results(
                self._tokenizer,
                observation,
                tools=self._tools,
                max_result_tokens=self._limits.max_observation_tokens,
                room=self._room(sample),
                image_tokens=[self._tokens(self._see(some)) for some in observation.images],
            )
        tokens = self._tokens(self._see(observation.images))
        return encode_observation(
            self._tokenizer,
            observation,
            max_body_tokens=self._limits.max_observation_tokens - sum(tokens),
            room=self._room(sample),
            image_tokens=tokens,
        )

    def _end(self, sample: Sample, turn: Turn, outcome: Outcome) -> None:
        sample.episode.turns.append(turn)
        if any(turn.error for turn in sample.episode.turns):  # one it went on after
            outcome = Outcome.ENVIRONMENT_ERROR
        sample.episode.outcome = outcome

    def _score(self, samples: Sequence[Sample], sampling: Sampling) -> list[Group]:
        size = sampling.group_size
        groups = [samples[start : start + size] for start in range(0, len(samples), size)]
        found = [self._found([s for s in group if not s.has_failed]) for group in groups]
        paid = self._pay([[finished for _, finished in of_task] for of_task in found])
        for of_task, rewards in zip(found, paid, strict=True):
            for (sample, finished), reward in zip(of_task, rewards, strict=True):
                sample.reward_records = tuple(map(_writable_record, finished.records))
                if isinstance(reward, BaseException):
                    sample.fail(reward)
                    continue
                try:
                    sample.reward = _checked_reward(reward)
                except (TypeError, ValueError) as error:
                    sample.fail(error)
        recorded = self._recorded if sampling.keeps_arrays else {}
        return [
            Group(trajectories=tuple(trajectory_of(sample, recorded) for sample in group))
            for group in groups
        ]

    def _found(self, samples: Sequence[Sample]) -> list[tuple[Sample, Finished]]:
        """Asks the environment for scores; a sample that it cannot score has failed instead."""
        if not samples:
            return []
        try:
            rewards = list(self._env.score([sample.episode for sample in samples]))
            self._check_count("score", len(rewards), len(samples))
            return [
                (s, s.finished(_checked_reward(reward)))
                for s, reward in zip(samples, rewards, strict=True)
            ]
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # of whatever the environment scores with
            if _ends_run(error):
                raise
            if len(samples) > 1:  # one of them, maybe
                return [one for sample in samples for one in self._found([sample])]
            samples[0].fail(error)
            return []


class Rollout(EpisodePlayer):
    """Plays groups of episodes of tasks through an engine and an environment."""

    def __init__(
        self,
        engine: Engine,
        env: Env,
        tokenizer: Tokenizer,
        automaton: StopAutomaton,
        limits: Limits,
        schedule: Schedule | None = None,
        pay: Pay | None = None,
        processor: Processor | None = None,
    ):
        """`automaton` must be the one the engine stops by; the others as of `EpisodePlayer`."""
        super().__init__(env, tokenizer, limits, schedule, pay, processor)
        self._engine = engine
        self._automaton = automaton
        # Groups that go on in a later call, by stage, place and attempt, and what the environment
        # was asked for them.
        self._held: dict[tuple[int, int, int], list[Sample]] = {}
        self._held_calls: deque[_Call] = deque()

    @property
    def _recorded(self) -> Mapping[str, TokenArray]:
        return self._engine.recorded

    def __call__(
        self,
        draws: Sequence[Draw],
        sampling: Sampling,
        *,
        should_stop: Callable[[], bool] = lambda: False,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> list[Group | None]:
        """Samples a group of trajectories of every task, scored, in task order.

        It ends before a chunk, once no more than `Sampling.unfinished` groups are open. These are
        None here, and go on from their tokens where their draws are given again: what stands
        in the engine then is read anew, and drawn from the same keys. Where more groups than are
        waited for end in a chunk, the later ones are given then too.

        Whatever is raised here leaves the engine empty. Calls of the environment that are under
        way then get `_PATIENCE_S` to end, and are left to themselves after.

        Args:
            draws: the tasks.
            sampling: how many trajectories of each, how they are drawn, and how many groups may
                come back unfinished.
            should_stop: asked before each chunk, and while a program is compiled.
            progress: told before each chunk how many trajectories have ended, of how many.

        Raises:
            Interrupted: `should_stop` said so.
            OutageError: what the environment asks has answered nobody for too long.
            ValueError: a prompt leaves no room for an answer.
        """
        size, keys = sampling.group_size, places_of(draws, sampling)
        held, calls = self._take_held(keys, sampling)  # calls in the order in which they were made
        new = [draw for draw, key in zip(draws, keys, strict=True) if key not in held]
        fresh = self._make_samples(new, size)
        made = (fresh[start : start + size] for start in range(0, len(fresh), size))
        groups = [held[key] if key in held else next(made) for key in keys]
        asking = {id(sample) for call in calls for _, sample, _ in call.members}
        going = [one for group in held.values() for one in group if id(one) not in asking]
        going = [one for one in going if one.episode.outcome is None]
        playing = self._begin(going, sampling) if going else {}
        playing |= self._submit(fresh, new, sampling)
        self._threads = Threads()
        try:
            with stopped_by(should_stop):
                self._play(groups, playing, calls, sampling, should_stop, progress)
        except BaseException:
            self._engine.clear()
            wait([call.replies for call in calls], timeout=_PATIENCE_S)
            raise
        finally:
            self._threads.close()
        over = [place for place, group in enumerate(groups) if not _is_open(group)]
        over = over[: len(groups) - sampling.unfinished]
        if len(over) < len(groups):
            self._engine.clear()
            self._held = {keys[i]: group for i, group in enumerate(groups) if i not in over}
            self._held_calls = calls
        found = iter(self._score([one for place in over for one in groups[place]], sampling))
        return [next(found) if place in over else None for place in range(len(groups))]

    def _take_held(
        self, keys: Sequence[tuple[int, int, int]], sampling: Sampling
    ) -> tuple[dict[tuple[int, int, int], list[Sample]], deque[_Call]]:
        """The groups of these keys that go on, and calls for them; others are forgotten.

        An evaluation, which has none, leaves those of the training alone.
        """
        if not sampling.unfinished:
            return {}, deque()
        held = {key: self._held.pop(key) for key in keys if key in self._held}
        for group in self._held.values():  # the run has gone back to a checkpoint
            for sample in group:
                sample.episode.outcome = Outcome.ENVIRONMENT_ERROR
        chunk = self._engine.counts.chunks
        calls = deque(
            dataclasses.replace(
                call, due=chunk, members=[(_NOBODY, one, text) for _, one, text in call.members]
            )
            for call in self._held_calls
        )
        self._held, self._held_calls = {}, deque()
        return held, calls

    def _play(
        self,
        groups: Sequence[Sequence[Sample]],
        samples: dict[int, Sample],
        calls: deque[_Call],
        sampling: Sampling,
        should_stop: Callable[[], bool],
        progress: Callable[[int, int], None],
    ) -> None:
        """Decodes samples until no more groups are open than may be.

        Args:
            groups: all samples.
            samples: those in the engine, by request.
            calls: of the environment under way.
            sampling: see `__call__`, also of the others.
            should_stop: likewise.
            progress: likewise.
        """
        # With a lag of 1 replies enter before the very next chunk, so this one must be read first.
        is_next = self._schedule.deterministic and self._schedule.lag_chunks == 1
        ahead = 1 if self._engine.overlaps and not is_next else 0
        while calls or not self._engine.is_idle:
            check_stop(should_stop)
            groups = [group for group in groups if _is_open(group)]
            if len(groups) <= sampling.unfinished:
                return
            open_ones = [sample.episode.outcome for sample in samples.values()].count(None)
            progress(len(samples) - open_ones, len(samples))
            for call in self._due(calls, should_stop):
                self._await([call], should_stop)
                calls.remove(call)
                self._advance(call, samples, sampling)
            events = self._engine.step(ahead=ahead)
            members = self._append(samples, events, sampling.policy_version)
            if members:
                calls.append(self._call(members, events[0].chunk + self._schedule.lag_chunks))

    def _call(self, members: list[tuple[int, Sample, str]], due: int) -> _Call:
        episodes = [sample.episode for _, sample, _ in members]
        texts = [text for _, _, text in members]
        ends = time.monotonic() + (self._schedule.deadline_s or math.inf)
        replies = self._threads.start(lambda: self._step(episodes, texts))
        return _Call(due=due, members=members, replies=replies, ends=ends)

    def _due(self, calls: Sequence[_Call], should_stop: Callable[[], bool]) -> list[_Call]:
        """The calls whose replies enter now; one of them, if nothing else is left to do."""
        is_stalled = self._engine.is_stalled
        if self._schedule.deterministic:
            chunk = self._engine.counts.chunks
            return [
                call for call in calls if call.due <= chunk or (is_stalled and call is calls[0])
            ]
        if is_stalled:
            self._await(calls, should_stop)
        now = time.monotonic()
        return [call for call in calls if call.replies.done() or call.ends <= now]

    def _await(self, calls: Sequence[_Call], should_stop: Callable[[], bool]) -> None:
        """Waits until one of the calls has its replies or is given up, and counts the time.

        It counts from when the device has nothing to do.
        """
        ends = min(call.ends for call in calls)
        replies = [call.replies for call in calls]
        if any(reply.done() for reply in replies):
            return
        engine, idle_at = self._engine, math.inf
        cause = engine.wait_cause
        while (left := ends - (now := time.monotonic())) > 0:
            if idle_at == math.inf and not engine.is_busy:
                idle_at = now
            pause = GLANCE_S if idle_at == math.inf else LOOK_S
            if wait(replies, timeout=min(left, pause), return_when=FIRST_COMPLETED).done:
                break
            check_stop(should_stop)
        engine.waits[cause] += max(time.monotonic() - idle_at, 0.0)

    def _append(
        self, samples: dict[int, Sample], events: Sequence[Event], version: int
    ) -> list[tuple[int, Sample, str]]:
        """Appends what was sampled; the samples that stopped and their turns' texts."""
        members = []
        for event in events:
            sample = samples[event.request]
            sample.append_sampled(event, version)
            if event.status == decode.RUNNING:
                continue
            text = self._turn_text(sample, event.status)
            if event.status == decode.OUT_OF_BUDGET:
                self._end(sample, Turn(text=text, is_cut=True), Outcome.OUT_OF_BUDGET)
                self._engine.finish(event.request)
            else:
                members.append((event.request, sample, text))
        return members

    def _submit(
        self, samples: Sequence[Sample], draws: Sequence[Draw], sampling: Sampling
    ) -> dict[int, Sample]:
        """Hands the samples that are to be decoded to the engine; each by its request."""
        # On a device that samples: another may be busy with an update.
        keys = keys_of(draws, sampling, self._engine.device)
        opened = [
            (sample, key)
            for sample, key in zip(samples, keys, strict=True)
            if sample.episode.outcome is None
        ]
        for sample, key in opened:
            sample.key = key
        return self._begin([sample for sample, _ in opened], sampling)

    def _begin(self, samples: Sequence[Sample], sampling: Sampling) -> dict[int, Sample]:
        """Hands samples to the engine where they stand in a context; each by its request."""
        requests = []
        for sample in samples:
            assert sample.key is not None
            number, length = len(sample.contexts), sample.context_length
            key = context_key(sample.key, number, self._engine.device) if number else sample.key
            requests.append(
                Request(
                    prompt_ids=tuple(sample.token_ids[-length:]),
                    sample_key=key,
                    budget=self._budget(
                        len(sample.token_ids),
                        num_sampled=sample.num_sampled,
                        context_length=length,
                    ),
                    attachments=tuple(sample.attachments),
                    stop_state=self._automaton.state(sample.token_ids[sample.turn_starts[-1] :]),
                )
            )
        numbers = self._engine.submit(
            requests, temperature=sampling.temperature, top_p=sampling.top_p
        )
        return dict(zip(numbers, samples, strict=True))

    def _turn_text(self, sample: Sample, status: int) -> str:
        """The turn as the environment sees it: up to its stop string, without an end-of-turn id."""
        token_ids = sample.token_ids[sample.turn_starts[-1] :]
        if status == decode.END_OF_TURN:
            token_ids = token_ids[:-1]
        data = list(map(self._tokenizer.vocab_bytes.__getitem__, token_ids))
        text = self._automaton.cut(data) if status == decode.STOP_STRING else b"".join(data)
        return text.decode("utf-8", errors="replace")

    def _advance(self, call: _Call, samples: dict[int, Sample], sampling: Sampling) -> None:
        """Ends or resumes the samples of a call that has its replies or is given up.

        One that goes on in another context does so as another request, which is put into `samples`.
        """
        resumed, attachments, renewed = [], {}, []
        is_late = not call.replies.done()
        replies = [self._give_up()] * len(call.members) if is_late else call.replies.result()
        for (request, sample, text), result in zip(call.members, replies, strict=True):
            is_held = request == _NOBODY
            if is_held and sample.episode.outcome is not None:
                continue  # nobody wants it any more
            num_before, num_contexts = len(sample.attachments), len(sample.contexts)
            token_ids = self._take(sample, text, result)
            if token_ids is None:
                if not is_held:
                    self._engine.finish(request)
                continue
            if is_held:
                renewed.append(sample)
                continue
            if len(sample.contexts) > num_contexts:
                self._engine.finish(request)
                del samples[request]
                renewed.append(sample)
                continue
            budget = self._budget(
                len(sample.token_ids),
                num_sampled=sample.num_sampled,
                context_length=sample.context_length,
            )
            resumed.append((request, token_ids, budget))
            attachments[request] = sample.attachments[num_before:]
        self._engine.resume(resumed, attachments)
        if renewed:
            samples |= self._begin(renewed, sampling)


def places_of(draws: Sequence[Draw], sampling: Sampling) -> list[tuple[int, int, int]]:
    """Stage, place in the stream and attempt of each draw, by which its group goes on later."""
    return [(sampling.seeds.stage, draw.stream_index, draw.attempt) for draw in draws]


def keys_of(draws: Sequence[Draw], sampling: Sampling, device: Any) -> np.ndarray:
    """Keys of all samples, group by group: uint32 [draws * group_size, 2]."""
    seeds, size = sampling.seeds, sampling.group_size
    return sample_keys(
        seeds.seed,
        seeds.stage,
        seeds.step,
        np.repeat([draw.stream_index for draw in draws], size),
        np.tile(np.arange(size), len(draws)),
        np.repeat([draw.attempt for draw in draws], size),
        device=device,
    )


def _is_open(group: Sequence[Sample]) -> bool:
    """True while some episode of a group has not ended."""
    return any(sample.episode.outcome is None for sample in group)


def check_stop(should_stop: Callable[[], bool]) -> None:
    """Raises `Interrupted` where the rollout is asked to stop."""
    if should_stop():
        raise Interrupted("the rollout was asked to stop")


def _ends_run(error: BaseException) -> bool:
    return isinstance(error, OutageError) and error.fallback is None


def failed_step(why: str) -> StepResult:
    """Makes the reply that ends an episode as an environment error."""
    return StepResult(outcome=Outcome.ENVIRONMENT_ERROR, error=writable(why)[:MAX_ERROR])


_TEXT = str | None
_REPLY_TYPES: Mapping[str, Any] = {
    "observation": Observation | ToolResults | None,
    "outcome": Outcome | None,
    "tool_call": _TEXT,
    "tool": _TEXT,
    "latency_s": Real,
    "error": _TEXT,
    "records": tuple,
}


def _checked_reply(reply: Any) -> StepResult:
    """A reply that can be worked with: of the right types, all of it such as JSON can hold."""
    try:
        _check_types("step", reply, StepResult, _REPLY_TYPES)
        _check_inserted(reply.observation)
        if not math.isfinite(latency_s := float(reply.latency_s)):
            raise ValueError(f"StepResult.latency_s is {latency_s}; expected a finite number")
        for record in reply.records:
            _check_types("step", record, CallRecord, {"call": str, "error": _TEXT})
    except (TypeError, ValueError, OverflowError) as error:
        return failed_step(str(error))
    error = reply.error
    if reply.outcome == Outcome.ENVIRONMENT_ERROR:
        error = error or "the environment gives no reason"
    return _changed(
        reply,
        observation=reply.observation and _writable_fields(reply.observation),
        tool_call=reply.tool_call and writable(reply.tool_call),
        tool=reply.tool and writable(reply.tool),
        latency_s=latency_s,
        error=error and writable(error)[:MAX_ERROR],
        records=reply.records and tuple(map(_writable_record, reply.records)),
    )


def _changed(one: Any, **values: Any) -> Any:
    """A dataclass with other values; itself where they are its own, as nearly always."""
    is_same = all(getattr(one, name) is value for name, value in values.items())
    return one if is_same else dataclasses.replace(one, **values)


def _writable_record(record: CallRecord) -> CallRecord:
    error = record.error and writable(record.error)[:MAX_ERROR]
    return _changed(record, call=writable(record.call), error=error)


def _check_inserted(observation: Observation | ToolResults | None) -> None:
    if isinstance(observation, Observation):
        texts = dict.fromkeys(("prefix", "body", "suffix"), str)
        _check_types("step", observation, Observation, {**texts, "images": tuple})
    elif observation is not None:
        _check_types("step", observation, ToolResults, {"bodies": tuple})
        if not observation.bodies or not all(isinstance(body, str) for body in observation.bodies):
            raise TypeError(f"ToolResults.bodies is {observation.bodies!r:.100}; expected texts")
        if len(observation.images_of_each) != len(observation.bodies):
            raise TypeError("ToolResults.images has not as many entries as bodies")
    if not all(isinstance(picture, Picture) for picture in images_of(observation)):
        raise TypeError("an observation's images are no Pictures (jaxrl.envs.images)")


def images_of(observation: Observation | ToolResults | None) -> list[Picture]:
    """Images of an observation, in its order."""
    if isinstance(observation, ToolResults):
        return [picture for some in observation.images for picture in some]
    return [] if observation is None else list(observation.images)


def _told(observation: Observation | ToolResults | None) -> Observation | ToolResults | None:
    """An observation that names its images in place of showing them."""

    def body(text: str, images: Sequence[Picture]) -> str:
        return "\n".join([*([text] if text else []), *["[image]"] * len(images)])

    if isinstance(observation, ToolResults):
        each = zip(observation.bodies, observation.images_of_each, strict=True)
        return ToolResults(bodies=tuple(body(text, images) for text, images in each))
    if observation is None:
        return None
    told = body(observation.body, observation.images)
    return dataclasses.replace(observation, body=told, images=())


def _writable_fields(observation: Observation | ToolResults) -> Observation | ToolResults:
    if isinstance(observation, ToolResults):
        bodies = tuple(map(writable, observation.bodies))
        return dataclasses.replace(observation, bodies=bodies)
    return _changed(
        observation,
        prefix=writable(observation.prefix),
        body=writable(observation.body),
        suffix=writable(observation.suffix),
    )


def _checked_reward(reward: Any) -> Reward:
    """A reward that can be worked with, its numbers finite.

    Raises:
        TypeError, ValueError: it is something else.
    """
    _check_types(
        "score", reward, Reward, {"parts": Mapping, "turn_parts": Mapping, "final_answer": str}
    )
    numbers = {**reward.parts, "total": reward.total}  # a part is told before the sum it spoils
    for name, value in numbers.items():
        if not (isinstance(name, str) and isinstance(value, Real) and math.isfinite(value)):
            raise ValueError(f"the reward's {name!r} is {value!r}; expected a finite number")
    return dataclasses.replace(
        reward,
        total=float(reward.total),
        parts={name: float(value) for name, value in reward.parts.items()},
        final_answer=writable(reward.final_answer),
        **{name: bool(getattr(reward, name)) for name in _VERDICTS},
    )


_VERDICTS = ("is_correct", "is_abstention", "is_well_formed")


def _check_types(method: str, found: Any, wanted: type, fields: Mapping[str, Any]) -> None:
    """Refuses what is no `wanted`, or has a field of another type."""
    name = wanted.__name__
    if not isinstance(found, wanted):
        raise TypeError(f"{method} gave {type(found).__name__}; expected {name}")
    for field_name, kind in fields.items():
        value = getattr(found, field_name)
        if not isinstance(value, kind):
            shown = getattr(kind, "__name__", kind)
            raise TypeError(f"{name}.{field_name} is {value!r:.100}; expected {shown}")


def _check_chat(messages: Iterable[Any]) -> None:
    for message in messages:
        texts = [message["role"], message["content"]]
        if not all(isinstance(text, str) for text in texts):
            raise TypeError(f"a message is {message!r:.100}; expected text for role and content")


def trajectory_of(sample: Sample, recorded: Mapping[str, TokenArray]) -> Trajectory:
    """The trajectory of a sample as it stands, with its recorded arrays."""
    reward, length = sample.reward, len(sample.token_ids)
    loss_mask, versions = np.zeros(length, bool), np.full(length, -1, np.int32)
    logprobs, entropies = np.zeros((2, length), np.float32)
    for span in sample.sampled:
        loss_mask[span.start : span.end] = True
        versions[span.start : span.end] = span.versions
    if sample.sampled:
        logprobs[loss_mask] = np.concatenate([x for one in sample.sampled for x in one.logprobs])
        entropies[loss_mask] = np.concatenate([x for one in sample.sampled for x in one.entropies])
    scored: dict[str, Any] = {}
    if reward is not None:
        scored = {
            "reward": reward.total,
            "reward_parts": dict(reward.parts),
            "turn_rewards": reward.turn_totals,
            "rest_reward": reward.rest,
            "final_answer": reward.final_answer,
            "is_correct": reward.is_correct,
            "is_abstention": reward.is_abstention,
            "is_well_formed": reward.is_well_formed,
        }
    return Trajectory(
        token_ids=np.array(sample.token_ids, np.int32),
        loss_mask=loss_mask,
        rollout_logprobs=logprobs,
        rollout_entropies=entropies,
        policy_versions=versions,
        attachments=tuple(sample.attachments),
        token_arrays=sample.token_arrays(recorded),
        prompt_length=sample.prompt_length,
        sample_index=sample.sample_index,
        attempt=sample.attempt,
        task=sample.episode.task,
        opener=sample.episode.opener,
        turns=tuple(sample.episode.turns),
        turn_starts=tuple(sample.turn_starts),
        contexts=tuple(sample.contexts),
        reward_records=sample.reward_records,
        outcome=sample.episode.outcome or Outcome.OUT_OF_BUDGET,
        usage=sample.usage,
        **scored,
    )
