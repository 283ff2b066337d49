"""Rollouts with a model behind an OpenAI-compatible endpoint instead of the run's model.

The run's environment and budgets apply, and its tokenizer counts tokens and truncates texts.
Trajectories contain this tokenizer's ids, without log-probabilities, so they cannot be used for
training. Images are sent unprocessed; the run's processor counts their tokens.

Endpoints omit the stop string from the text. If an endpoint reports the string (vLLM, SGLang), it
is appended to the text. Otherwise, an open tag such as `<search>` is closed with `</search>`.
"""

from __future__ import annotations

import functools
import hashlib
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from jaxrl.data.tokenizer import Tokenizer
from jaxrl.envs.base import Env, OutageError, Outcome, StepResult, ToolError, ToolResults, Turn
from jaxrl.envs.images import (
    Picture,
    TextWithImages,
    UnreadableImageError,
    Video,
    VideoTokens,
    get_attached_images,
    split_at_tags,
)
from jaxrl.envs.search.resilient import ResilientSearch
from jaxrl.extras.endpoints.completions import EndpointTool, get_first_choice, wrap_endpoint
from jaxrl.extras.endpoints.images import format_part, make_data_url, prepare_image
from jaxrl.extras.endpoints.keys import KEYS
from jaxrl.sampling.episodes import (
    BaseRollout,
    EpisodeStartError,
    ReplySchedule,
    RewardFn,
    TokenLimits,
)
from jaxrl.sampling.interfaces import ImageProcessor, SamplingConfig
from jaxrl.sampling.rollout import IDLE_POLL_S, raise_if_stopped
from jaxrl.sampling.step_results import get_images, make_failed_step
from jaxrl.sampling.trajectory import Sample
from jaxrl.types import Draw, Group
from jaxrl.utils.concurrency import run_in_thread, start_calls
from jaxrl.utils.http_client import check_url, redact_url
from jaxrl.utils.text import MAX_ERROR_CHARS, replace_surrogates

CONTINUE_MESSAGE = "Continue."
"""User message for an empty observation of an episode that continues."""

FATAL_STATUSES = (401, 403, 404)
"""HTTP statuses with which all requests fail."""

Content = str | Sequence[str | Picture]
"""Content of a message: text, or a sequence of texts, images and video files."""


@dataclass(frozen=True, kw_only=True)
class ModelTurn:
    """Text and token usage of a model turn."""

    text: str  # up to and including the stop string
    is_cut: bool  # True if the token limit was reached
    usage: Mapping[str, float]  # calls, attempts, token counts, and cost if prices are set


class ChatModel:
    """Client for a chat model behind an endpoint. Thread-safe."""

    def __init__(
        self,
        keys: Mapping[str, Any],
        *,
        workdir: Path | None = None,
        process: int = 0,
        log: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Set up the client without sending a request.

        `keys` contains the non-default values of `policy.openai`. See `wrap_endpoint` for other
        arguments and for errors.
        """
        defaults = {name.removeprefix("policy.openai."): key.default for name, key in KEYS.items()}
        limits = {"cache_mib": 0.0, "queries_per_second": 0.0}
        self.settings = settings = SimpleNamespace(**defaults | limits | dict(keys))
        check_url("policy.openai.url", settings.url)
        self._resilient = wrap_endpoint(
            _ResilientModel,
            _ChatEndpoint,
            settings,
            key="policy.openai",
            identity={"model": settings.model, "options": dict(settings.options)},
            folder="replies",
            workdir=workdir,
            process=process,
            log=log,
        )

    @property
    def display_name(self) -> str:
        """Name and address of the model, for messages."""
        return f"{self.settings.model} at {redact_url(self.settings.url)}"

    def make_rollout(self, *args: Any) -> ChatRollout:
        """Create a rollout of this model; see `ChatRollout` for the arguments."""
        return ChatRollout(self, *args)

    def generate_turn(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        stops: Sequence[str],
        sampling: Mapping[str, Any],
    ) -> ModelTurn:
        """Request the next turn of a chat.

        Args:
            messages: Messages with role, `Content` and other fields; see `prepare_image` for
                images and videos.
            stops: Strings at which the turn ends.
            sampling: Additional request fields, including a seed that differs between samples.

        Raises:
            OutageError: The endpoint rejects all requests, for example because of a wrong key.
            ToolError: The request failed.
        """
        chat: list[Mapping[str, Any]] = []
        images: list[Picture] = []
        for message in messages:
            content: Any = message["content"]
            if isinstance(content, str):
                content = replace_surrogates(content)
            else:
                images += [part for part in content if isinstance(part, Picture)]
                content = [_format_part(part) for part in content]
            role = replace_surrogates(message["role"])
            chat.append(
                {**message, "role": role, "content": content, **_format_tool_calls(message)}
            )
        body = {"messages": chat, **sampling, **({"stop": list(stops)} if stops else {})}
        [response] = self._resilient.call_batch([TextWithImages(json.dumps(body), images)])
        if isinstance(self._resilient.engine, _ChatEndpoint) and self._resilient.engine.fatal_error:
            raise OutageError(self._resilient.engine.fatal_error)
        if isinstance(response.result, ToolError):
            raise ToolError(f"the model behind config.policy.openai: {response.result}")
        reply = json.loads(response.result)
        usage: dict[str, float] = {"calls": 1, "attempts": 0, "replayed": 1}
        if response.record.source != "replay":  # replays cost nothing
            tokens, settings = _get_token_counts(reply), self.settings
            usage = {"calls": 1, "attempts": response.record.attempts, **tokens}
            if settings.prompt_price or settings.completion_price:
                cost = tokens["prompt_tokens"] * settings.prompt_price
                cost += tokens["completion_tokens"] * settings.completion_price
                usage["cost"] = cost / 1e6
        text, is_cut = parse_turn(reply, stops)
        return ModelTurn(text=text, is_cut=is_cut, usage=usage)


def _format_part(part: str | Picture) -> dict[str, Any]:
    """Return a message part in OpenAI's format, with image digests to keep recordings small."""
    if isinstance(part, str):
        return {"type": "text", "text": replace_surrogates(part)}
    return format_part(part, part.digest)


def _format_tool_calls(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tool calls of a message in OpenAI's format, with arguments as JSON text."""
    calls = []
    for call in message.get("tool_calls", ()):
        function = dict(call["function"])
        if not isinstance(function.get("arguments", ""), str):
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
        calls.append({"type": "function", **call, "function": function})
    return {"tool_calls": calls} if calls else {}


class _ChatEndpoint(EndpointTool):
    """Chat endpoint that takes request bodies with images and returns JSON responses."""

    name = "policy"
    fatal_error = ""
    """Reason all requests fail; "" if they do not."""

    def run(self, call: str, /) -> str:
        if self.fatal_error:
            raise ToolError(self.fatal_error, is_permanent=True)
        request = json.loads(call)
        urls = {image.digest: make_data_url(image) for image in get_attached_images(call)}
        for message in request["messages"]:
            for part in message["content"] if isinstance(message["content"], list) else ():
                if part["type"] != "text":
                    source = part[part["type"]]
                    source["url"] = urls[source["url"]]
        fields = {"model": self.settings.model, **request, **self.settings.options}
        body = {name: value for name, value in fields.items() if value is not None}
        try:
            response = self.send_request(body)
        except ToolError as error:
            if error.status in FATAL_STATUSES:
                self.fatal_error = f"{error}; check url, model and key_env in config.policy.openai."
            raise
        # Raise an error for a malformed response, so that the request is retried.
        parse_turn(response, ())
        _get_token_counts(response)
        return json.dumps(response)


class _ResilientModel(ResilientSearch):
    """Model endpoint wrapped with caching, retries and a recording."""

    label, section = "the model's endpoint", "config.policy.openai"


def parse_turn(response: Any, stops: Sequence[str]) -> tuple[str, bool]:
    """Return a completion's text through the first stop string, and whether it was truncated.

    Args:
        response: JSON response of the endpoint.
        stops: Strings at which the turn ends.

    Raises:
        ToolError: The content is not text, or the finish reason is neither "stop" nor "length".
    """
    choice, message = get_first_choice(response)
    reason = choice.get("finish_reason")
    if reason not in ("stop", "length"):
        raise ToolError(
            f"the response ended with finish_reason {reason!r:.100}; expected 'stop' or 'length'"
        )
    # Refusals, and responses whose hidden reasoning used up all tokens, have no content.
    text = message.get("content") or message.get("refusal") or ""
    if not isinstance(text, str):
        raise ToolError(f"the response's content is {text!r:.100}; expected text")
    ends = [text.index(stop) + len(stop) for stop in stops if stop in text]
    if ends:
        return text[: min(ends)], False
    if reason == "length":
        return text, True
    # The endpoint omits the stop string, if the turn ended with one.
    for name in ("stop_reason", "matched_stop"):  # vLLM, SGLang
        if name in choice:
            return (text + choice[name] if choice[name] in stops else text), False
    open_tags = {
        text.rfind(opening): stop
        for stop in stops
        if stop.startswith("</") and (opening := f"<{stop[2:]}") in text
    }
    return (text + open_tags[max(open_tags)] if open_tags else text), False


def _get_token_counts(response: Mapping[str, Any]) -> dict[str, int]:
    """Return the numbers of prompt and completion tokens in a response; 0 if missing."""
    usage = response.get("usage") or {}
    return {name: int(usage.get(name) or 0) for name in ("prompt_tokens", "completion_tokens")}


class ChatRollout(BaseRollout):
    """Rollout whose turns are sampled from a model behind an endpoint."""

    def __init__(
        self,
        model: ChatModel,
        env: Env | Mapping[str, Env],
        tokenizer: Tokenizer,
        limits: TokenLimits,
        schedule: ReplySchedule,
        reward_fn: RewardFn,
        processor: ImageProcessor | None = None,
    ):
        """Create a rollout that samples from `model`.

        If `processor.is_blank`, the model gets blank images as a control.

        Raises:
            ValueError: The environment describes its tools through the chat template.
        """
        super().__init__(env, tokenizer, limits, schedule, reward_fn, processor)
        if any(self._tools.values()):
            raise ValueError(
                "config.policy.name is 'openai', and the environment describes its tools through "
                "the chat template, which an endpoint does not share; expected a protocol with "
                "tags, such as config.env.search.protocol='search_r1'."
            )
        self._model = model
        self._openers = dict.fromkeys(self._envs, "")  # the endpoint applies a template

    def __call__(
        self,
        draws: Sequence[Draw],
        sampling: SamplingConfig,
        *,
        should_stop: Callable[[], bool] = lambda: False,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> list[Group]:
        """Sample and score a group of trajectories per draw, like `Rollout.__call__`.

        Raises:
            Interrupted: `should_stop` returned True.
            OutageError: The endpoint rejects all requests, or a tool of the environment is down.
            ValueError: A prompt leaves no tokens for a response.
        """
        samples = self._make_samples(draws, sampling.group_size)
        stop_event = threading.Event()
        size = sampling.group_size
        episode_runs = [
            functools.partial(self._run_episode, sample, draws[i // size], sampling, stop_event)
            for i, sample in enumerate(samples)
            if sample.episode.outcome is None
        ]
        episodes = start_calls(episode_runs, max_threads=self._model.settings.max_concurrent)
        try:
            pending, total = set(episodes), len(samples)
            while pending:
                raise_if_stopped(should_stop)
                progress(total - len(pending), total)
                done, pending = wait(pending, timeout=IDLE_POLL_S, return_when=FIRST_EXCEPTION)
                for episode in done:
                    episode.result()
            progress(total, total)
        except BaseException:
            stop_event.set()
            for episode in episodes:
                episode.cancel()
            raise
        return self._score_groups(samples, sampling)

    def _run_episode(
        self, sample: Sample, draw: Draw, sampling: SamplingConfig, stop_event: threading.Event
    ) -> None:
        """Run an episode until it ends or `stop_event` is set."""
        prompt: list[Mapping[str, Any]] = []
        while sample.episode.outcome is None and not stop_event.is_set():
            try:
                prompt = prompt or self._start_chat(draw)
                output = self._generate_turn(prompt, sample, draw, sampling)
            except OutageError:
                raise
            except (ToolError, EpisodeStartError, UnreadableImageError) as error:
                turn = Turn(text="", error=replace_surrogates(str(error))[:MAX_ERROR_CHARS])
                self._end_episode(sample, turn, Outcome.ENVIRONMENT_ERROR)
                return
            text = replace_surrogates(output.text)
            sample.usage = {k: sample.usage.get(k, 0) + n for k, n in output.usage.items()}
            sample.append_unknown_tokens(
                self._tokenizer.encode_plain(text), sampling.policy_version
            )
            if output.is_cut:
                self._end_episode(sample, Turn(text=text, is_cut=True), Outcome.OUT_OF_BUDGET)
            else:
                self._apply_step_result(sample, text, self._step_env(sample, text))

    def _start_chat(self, draw: Draw) -> list[Mapping[str, Any]]:
        """Start an episode; return its first messages, with images in place of placeholders."""
        opening, images = self._start_episode(draw.task), self._prepare_images(draw.task.images)
        prompt: list[Mapping[str, Any]] = []
        tags = sorted({image.tag for image in images})
        for message in opening:
            content: Content = message["content"]
            texts = split_at_tags(message["content"], tags)
            if any(tag in texts for tag in tags):
                content = [images.pop(0) if text in tags else text for text in texts]
            prompt.append({**message, "content": content})
        return prompt

    def _prepare_images(self, images: Sequence[Picture]) -> list[Picture]:
        is_blank = self._processor is not None and self._processor.is_blank
        return [prepare_image(image, is_blank=is_blank) for image in images]

    def _generate_turn(
        self,
        prompt: Sequence[Mapping[str, Any]],
        sample: Sample,
        draw: Draw,
        sampling: SamplingConfig,
    ) -> ModelTurn:
        """Request the next turn of an episode."""
        episode = sample.episode
        fields: dict[str, Any] = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_tokens": self._compute_remaining_budget(sample),
            "seed": _derive_seed(sampling, draw, sample),
        }
        messages = list(prompt)
        if not self._model.settings.continues_message:
            for turn in episode.turns:
                messages += [
                    {"role": "assistant", "content": turn.text},
                    {"role": "user", "content": self._make_observation(turn)},
                ]
        elif episode.turns:
            messages.append({"role": "assistant", "content": episode.response})
            fields |= {"continue_final_message": True, "add_generation_prompt": False}
        stops = self._get_env(episode.task).stop_strings
        return self._model.generate_turn(messages, stops=stops, sampling=fields)

    def _make_observation(self, turn: Turn) -> Content:
        """Return the observation after a turn, with its images.

        As in the run's template, only the protocol's text follows the images.
        """
        if not turn.images:
            return turn.observation or CONTINUE_MESSAGE
        counts = [VideoTokens(1) if isinstance(image, Video) else 1 for image in turn.images]
        output = "".join(self._tokenizer.render_image(count)[1] for count in counts)
        before, _, after = (turn.observation or CONTINUE_MESSAGE).rpartition(output)
        return [part for part in (before, *self._prepare_images(turn.images), after) if part != ""]

    def _step_env(self, sample: Sample, text: str) -> StepResult:
        """Step the environment; return a timeout result after `schedule.deadline_s` seconds."""
        reply = run_in_thread(lambda: self._step_episodes([sample.episode], [text]))
        if not wait([reply], timeout=self._schedule.deadline_s or None).done:
            return self._make_timeout_result(sample.episode.task)
        [result] = reply.result()
        problem = ""
        if isinstance(result.observation, ToolResults):
            problem = "returned tool results; expected an observation, which becomes a user message"
        elif get_images(result.observation) and self._model.settings.continues_message:
            problem = (
                "returned an image, which endpoints reject within an assistant message; set "
                "config.policy.openai.continues_message to False"
            )
        name = type(self._get_env(sample.episode.task)).__name__
        return make_failed_step(f"{name}.step {problem}") if problem else result


def _derive_seed(sampling: SamplingConfig, draw: Draw, sample: Sample) -> int:
    """Derive a 31-bit seed from a turn's position in the run."""
    seeds = sampling.seeds
    position = (
        *(seeds.seed, seeds.stage, seeds.step, draw.stream_index, sample.sample_index),
        *(draw.attempt, len(sample.episode.turns)),
    )
    return int.from_bytes(hashlib.sha256(repr(position).encode()).digest()[:4]) >> 1
