"""Turns written by a model behind an OpenAI-compatible endpoint, in place of the run's own.

The environment is the same, and so are the budgets: texts are counted and cut by the run's
tokenizer. The ids of a trajectory are those of its texts; what the endpoint's model sampled, and
how likely that was, nobody knows here, so there is nothing to train on. Images are sent as they
are, and counted as the run's own processor cuts them.

An endpoint leaves out the stop string at which it stopped. Where it says which one that was (vLLM,
SGLang), it is put back. Where it does not, the text decides: a tag that was opened and not closed
is closed, as `<search>` by `</search>`.
"""

from __future__ import annotations

import functools
import hashlib
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxrl.data.chat_template import parts_of
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.envs.base import (
    Env,
    OutageError,
    Outcome,
    StepResult,
    ToolError,
    ToolResults,
    Turn,
)
from jaxrl.envs.images import Picture, Pictured, UnreadableError, images_behind
from jaxrl.envs.search.recording import Recording
from jaxrl.envs.search.resilient import Nobody, ResilientSearch
from jaxrl.envs.tools.base import Tool
from jaxrl.extras.endpoints.completions import Completions, first_choice, policy_of
from jaxrl.extras.endpoints.sent_images import sent_image, url_of
from jaxrl.sampling.episodes import EpisodePlayer, Limits, Pay, Schedule, StartError
from jaxrl.sampling.interfaces import Processor, Sampling
from jaxrl.sampling.rollout import LOOK_S, check_stop
from jaxrl.sampling.step_results import failed_step, images_of
from jaxrl.sampling.trajectory import Sample
from jaxrl.types import Draw, Group
from jaxrl.utils.concurrency import MAX_ERROR, in_thread, started
from jaxrl.utils.http_client import check_url, plain_text, shown_url
from jaxrl.utils.text import writable

GO_ON = "Continue."
"""The user's message where the environment says nothing and the model is to go on."""

Content = str | Sequence[str | Picture]
"""Content of a message that is sent: a text, or texts and images in their order."""

REFUSALS = {
    401: "key_env names the environment variable with the key",
    403: "key_env names the environment variable with the key",
    404: "url and model say what is asked",
}
"""Statuses after which nobody need be asked again, and the keys to look at."""


@dataclass(frozen=True, kw_only=True)
class ChatSettings:
    """Settings of a model behind an endpoint: the keys of `config.policy.openai`."""

    url: str
    model: str
    key_env: str = ""
    max_concurrent: int = 16
    deadline_s: float = 120.0
    retries: int = 3
    backoff_s: float = 1.0
    outage_deadline_s: float = 120.0
    continues_message: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    prompt_price: float = 0.0
    completion_price: float = 0.0
    replay: str = "record"
    replay_folder: str = ""

    def __post_init__(self) -> None:
        """Checks the address.

        Raises:
            ValueError: it is none.
        """
        check_url("policy.openai.url", self.url)


@dataclass(frozen=True, kw_only=True)
class Written:
    """A turn that a model wrote.

    Attributes:
        text: up to the stop string, which is in it.
        is_cut: it was not done, but had no tokens left.
        usage: calls, tries, tokens as the endpoint counts them, and what these cost, where they
            have a price.
    """

    text: str
    is_cut: bool
    usage: Mapping[str, float]


class ChatModel:
    """A model behind an endpoint, asked with care; several threads may ask at once."""

    def __init__(
        self,
        keys: Mapping[str, Any],
        *,
        workdir: Path | None = None,
        process: int = 0,
        log: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Asks nothing yet.

        Args:
            keys: those of `ChatSettings`.
            workdir: of the run, for what is kept beside it; None where there is none.
            process: number of this process of the run.
            log: told of outages.

        Raises:
            ValueError: the address is none, or the key's environment variable is not set.
            FileNotFoundError: the recording alone is to answer, and there is none.
        """
        self.settings = settings = ChatSettings(**keys)
        is_replay = settings.replay == "only"
        self._endpoint = None if is_replay else _Endpoint(settings)
        recording, folder = None, settings.replay_folder or (workdir and workdir / "replies")
        if settings.replay != "off" and (folder or is_replay):
            asked = {"model": settings.model, "options": dict(settings.options)}
            recording = Recording(Path(folder or "replies"), asked, process=process, log=log)
            if is_replay and not len(recording):
                raise FileNotFoundError(
                    f"config.policy.openai.replay is 'only', but {recording.folder} has no answers "
                    f"of {json.dumps(asked)}; name the folder by "
                    "config.policy.openai.replay_folder."
                )
        self._asked = _Asked(
            self._endpoint or Nobody(),
            policy_of(settings, max_concurrent=settings.max_concurrent),
            recording=recording,
            is_replay=is_replay,
            log=log,
        )

    @property
    def shown(self) -> str:
        """Name and address, for people."""
        return f"{self.settings.model} at {shown_url(self.settings.url)}"

    def rollout(
        self,
        env: Env,
        tokenizer: Tokenizer,
        limits: Limits,
        schedule: Schedule,
        pay: Pay,
        processor: Processor | None = None,
    ) -> ChatRollout:
        """A rollout with this model; arguments and errors as of `ChatRollout`."""
        return ChatRollout(self, env, tokenizer, limits, schedule, pay, processor)

    def write(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        stops: Sequence[str],
        sampling: Mapping[str, Any],
    ) -> Written:
        """Asks for the next turn of a chat.

        Args:
            messages: role, `Content` and other fields of each so far; images in PNG or JPEG.
            stops: strings at which the turn ends.
            sampling: further fields of the request; a seed among them keeps equal chats apart.

        Raises:
            OutageError: the endpoint refuses everybody, as with a wrong key.
            ToolError: there is no turn.
        """
        chat = []
        for message in messages:
            said = message["content"]
            content: Any = plain_text(said) if isinstance(said, str) else []
            for one in () if isinstance(said, str) else said:
                if isinstance(one, str):
                    content.append({"type": "text", "text": plain_text(one)})
                else:  # named by its digest, so that a recording holds no images
                    content.append({"type": "image_url", "image_url": {"url": one.digest}})
            role = plain_text(message["role"])
            chat.append({**message, "role": role, "content": content, **_sent_calls(message)})
        body = {"messages": chat, **sampling, **({"stop": list(stops)} if stops else {})}
        said_in_all = (one for message in messages for one in message["content"])
        images = [one for one in said_in_all if isinstance(one, Picture)]
        [answer] = self._asked.answer_all([Pictured(json.dumps(body), images)])
        if self._endpoint and self._endpoint.refusal:
            raise OutageError(self._endpoint.refusal)
        if isinstance(answer.found, ToolError):
            raise ToolError(f"the model behind config.policy.openai: {answer.found}")
        reply = json.loads(answer.found)
        usage: dict[str, float] = {"calls": 1, "attempts": 0, "replayed": 1}
        if answer.record.source != "replay":  # an answer of the recording took nothing
            tokens, settings = _tokens(reply), self.settings
            usage = {"calls": 1, "attempts": answer.record.attempts, **tokens}
            if settings.prompt_price or settings.completion_price:
                paid = tokens["prompt_tokens"] * settings.prompt_price
                paid += tokens["completion_tokens"] * settings.completion_price
                usage["cost"] = paid / 1e6
        text, is_cut = read_turn(reply, stops)
        return Written(text=text, is_cut=is_cut, usage=usage)


def _sent_calls(message: Mapping[str, Any]) -> dict[str, Any]:
    """The calls of tools in a message as endpoints have them: with arguments as JSON text."""
    calls = []
    for call in message.get("tool_calls", ()):
        function = dict(call["function"])
        if not isinstance(function.get("arguments", ""), str):
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
        calls.append({"type": "function", **call, "function": function})
    return {"tool_calls": calls} if calls else {}


class _Endpoint(Tool):
    """Sends the body of a request, with its images; returns the endpoint's answer as JSON."""

    name, blank = "policy", ""

    def __init__(self, settings: ChatSettings) -> None:
        self._settings = settings
        self._completions = Completions(
            settings.url,
            section="policy.openai.key_env",
            key_env=settings.key_env,
            timeout_s=settings.deadline_s,
            connections=settings.max_concurrent,
        )
        self.refusal = ""  # why nobody need be asked again

    def run(self, call: str, /) -> str:
        if self.refusal:
            raise ToolError(self.refusal, is_permanent=True)
        asked = json.loads(call)
        urls = {image.digest: url_of(image) for image in images_behind(call)}
        for message in asked["messages"]:
            for part in message["content"] if isinstance(message["content"], list) else ():
                if part["type"] == "image_url":
                    part["image_url"]["url"] = urls[part["image_url"]["url"]]
        fields = {"model": self._settings.model, **asked, **self._settings.options}
        body = {name: value for name, value in fields.items() if value is not None}
        try:
            answer = self._completions.ask(body)
        except ToolError as error:
            if error.status in REFUSALS:
                self.refusal = f"{error}; config.policy.openai.{REFUSALS[error.status]}."
            raise
        read_turn(answer, ())  # one that cannot be read is asked for again
        _tokens(answer)
        return json.dumps(answer)


class _Asked(ResilientSearch):
    """Guard around the model's endpoint."""

    what, section = "the model's endpoint", "config.policy.openai"


def read_turn(answer: Any, stops: Sequence[str]) -> tuple[str, bool]:
    """The text of an answer up to its stop string, and whether its tokens ran out.

    Args:
        answer: of the endpoint.
        stops: strings at which the turn ends.

    Raises:
        ToolError: it holds no text, or ended for a reason that is not the model's.
    """
    choice, message = first_choice(answer)
    reason = choice.get("finish_reason")
    if reason not in ("stop", "length"):
        raise ToolError(
            f"the reply ended with finish_reason {reason!r:.100}; expected 'stop' or 'length'"
        )
    # Without content are refusals, and models that spent their tokens on hidden reasoning.
    text = message.get("content") or message.get("refusal") or ""
    if not isinstance(text, str):
        raise ToolError(f"the reply's content is {text!r:.100}; expected text")
    ends = [text.index(stop) + len(stop) for stop in stops if stop in text]
    if ends:
        return text[: min(ends)], False
    if reason == "length":
        return text, True
    # The endpoint left the stop string out, unless the model ended its turn by itself.
    for name in ("stop_reason", "matched_stop"):  # vLLM, SGLang
        if name in choice:
            return (text + choice[name] if choice[name] in stops else text), False
    opened = {
        text.rfind(opening): stop
        for stop in stops
        if stop.startswith("</") and (opening := f"<{stop[2:]}") in text
    }
    return (text + opened[max(opened)] if opened else text), False


MAX_COUNT = 10**9
"""Tokens that an endpoint may count in one reply, far more than any model reads or writes."""


def _tokens(answer: Mapping[str, Any]) -> dict[str, int]:
    """Tokens that the endpoint counted; 0 where it did not.

    Raises:
        ToolError: it counted something else.
    """
    usage = answer.get("usage")
    if usage is None:
        usage = {}
    if not isinstance(usage, dict):
        raise ToolError(f"the reply's usage is {usage!r:.100}; expected an object")
    counts = {}
    for name in ("prompt_tokens", "completion_tokens"):
        count = usage.get(name)
        if count is not None and not (type(count) is int and 0 <= count <= MAX_COUNT):
            raise ToolError(
                f"the reply's usage has {name} {count!r:.40}; expected a whole number from 0 to "
                f"{MAX_COUNT}"
            )
        counts[name] = count or 0
    return counts


class ChatRollout(EpisodePlayer):
    """Plays groups of episodes of tasks with a model behind an endpoint and an environment."""

    def __init__(
        self,
        model: ChatModel,
        env: Env,
        tokenizer: Tokenizer,
        limits: Limits,
        schedule: Schedule,
        pay: Pay,
        processor: Processor | None = None,
    ):
        """Adds the model to an `EpisodePlayer`; a blank processor sends blank images.

        Raises:
            ValueError: the environment reads calls as the model's own chat template has them.
        """
        super().__init__(env, tokenizer, limits, schedule, pay, processor)
        if self._tools:
            raise ValueError(
                "config.policy.name is 'openai', and the environment describes its tools by the "
                "chat template, which an endpoint keeps to itself; expected a protocol with tags, "
                "as config.env.search.protocol='search_r1'."
            )
        self._model = model
        self._opener = ""  # the endpoint has a template of its own

    def __call__(
        self,
        draws: Sequence[Draw],
        sampling: Sampling,
        *,
        should_stop: Callable[[], bool] = lambda: False,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> list[Group]:
        """A group of trajectories of every task, scored, in task order; as `Rollout.__call__`.

        Raises:
            Interrupted: `should_stop` said so.
            OutageError: the endpoint refuses every call, or what the environment asks is down.
            ValueError: a prompt leaves no room for an answer.
        """
        samples = self._make_samples(draws, sampling.group_size)
        is_over = threading.Event()
        size = sampling.group_size
        playing = [
            functools.partial(self._play, sample, draws[i // size], sampling, is_over)
            for i, sample in enumerate(samples)
            if sample.episode.outcome is None
        ]
        episodes = started(playing, max_threads=self._model.settings.max_concurrent)
        try:
            left, total = set(episodes), len(samples)
            while left:
                check_stop(should_stop)
                progress(total - len(left), total)
                done, left = wait(left, timeout=LOOK_S, return_when=FIRST_EXCEPTION)
                for episode in done:
                    episode.result()
            progress(total, total)
        except BaseException:
            is_over.set()
            for episode in episodes:
                episode.cancel()
            raise
        return self._score(samples, sampling)

    def _play(
        self, sample: Sample, draw: Draw, sampling: Sampling, is_over: threading.Event
    ) -> None:
        """Plays an episode to its end, unless all are given up."""
        prompt: list[Mapping[str, Any]] = []
        while sample.episode.outcome is None and not is_over.is_set():
            try:
                if not prompt:  # with the task's images where their marks are
                    opening, left = self._start(draw.task), list(self._sent(draw.task.images))
                    for message in opening:
                        content: Content = message["content"]
                        if draw.task.images and None in (parts := parts_of(message["content"])):
                            content = [left.pop(0) if part is None else part for part in parts]
                        prompt.append({**message, "content": content})
                written = self._write(prompt, sample, draw, sampling)
            except OutageError:
                raise
            except (ToolError, StartError, UnreadableError) as error:
                turn = Turn(text="", error=writable(str(error))[:MAX_ERROR])
                self._end(sample, turn, Outcome.ENVIRONMENT_ERROR)
                return
            text = writable(written.text)
            sample.usage = {k: sample.usage.get(k, 0) + n for k, n in written.usage.items()}
            sample.append_unknown(self._tokenizer.encode_plain(text), sampling.policy_version)
            if written.is_cut:
                self._end(sample, Turn(text=text, is_cut=True), Outcome.OUT_OF_BUDGET)
            else:
                self._take(sample, text, self._answer(sample, text))

    def _sent(self, images: Sequence[Picture]) -> list[Picture]:
        is_blank = self._processor is not None and self._processor.is_blank
        return [sent_image(image, is_blank=is_blank) for image in images]

    def _write(
        self,
        prompt: Sequence[Mapping[str, Any]],
        sample: Sample,
        draw: Draw,
        sampling: Sampling,
    ) -> Written:
        """The next turn of an episode."""
        episode, settings = sample.episode, self._model.settings
        fields: dict[str, Any] = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_tokens": self._budget(
                len(sample.token_ids),
                num_sampled=sample.num_sampled,
                context_length=sample.context_length,
            ),
            "seed": _seed(sampling, draw, sample),
        }
        messages = list(prompt)
        if not settings.continues_message:
            for turn in episode.turns:
                said: Content = turn.observation or GO_ON
                if turn.images:
                    # They stand where the run's template has written them, all together; behind
                    # them is only what the protocol writes.
                    _, written = self._tokenizer.render_image(1)
                    before, _, after = str(said).rpartition(written * len(turn.images))
                    parts = [before, *self._sent(turn.images), after]
                    said = [part for part in parts if part != ""]
                messages += [
                    {"role": "assistant", "content": turn.text},
                    {"role": "user", "content": said},
                ]
        elif episode.turns:
            messages.append({"role": "assistant", "content": episode.response})
            fields |= {"continue_final_message": True, "add_generation_prompt": False}
        return self._model.write(messages, stops=self._env.stop_strings, sampling=fields)

    def _answer(self, sample: Sample, text: str) -> StepResult:
        """The environment's reply to a turn, within its deadline."""
        reply = in_thread(lambda: self._step([sample.episode], [text]))
        if not wait([reply], timeout=self._schedule.deadline_s or None).done:
            return self._give_up()
        [result] = reply.result()
        why = ""
        if isinstance(result.observation, ToolResults):
            why = "gave results of tools; a model behind an endpoint is shown messages of the user"
        elif images_of(result.observation) and self._model.settings.continues_message:
            why = (
                "shows an image, which endpoints do not take within the model's own message; set "
                "config.policy.openai.continues_message to False"
            )
        if why:
            return failed_step(f"{type(self._env).__name__}.step {why}")
        return result


def _seed(sampling: Sampling, draw: Draw, sample: Sample) -> int:
    """Seed of this turn, different from all others of the run; 31 bits."""
    seeds = sampling.seeds
    parts = (
        *(seeds.seed, seeds.stage, seeds.step, draw.stream_index, sample.sample_index),
        *(draw.attempt, len(sample.episode.turns)),
    )
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:4]) >> 1
