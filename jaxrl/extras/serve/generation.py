"""Completions while they grow, and the cache of completions for clients that repeat a request.

Everything here runs on the event loop; the worker's thread hands over its chunks.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import os
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import numpy as np

from jaxrl.extras.serve.chats import ChatHistory, ChatMessage, parse_reply
from jaxrl.extras.serve.engine import SamplingParams
from jaxrl.extras.serve.errors import ContextLengthError, RequestError
from jaxrl.extras.serve.schemas import SamplingFields
from jaxrl.extras.serve.worker import (
    CANCELLED,
    FAILED,
    LENGTH,
    STOP,
    TIMED_OUT,
    EndingError,
    Job,
    OutputChunk,
    QueueFullError,
    Worker,
)


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """What the dialects know of the model.

    Attributes:
        name: Name for clients.
        history: Chats of all sessions, with the tokenizer.
        max_total_tokens: Limit on prompt and completion together.
        template_arguments: Arguments of the chat template.
        stops: Stop strings of requests that name none.
    """

    name: str
    history: ChatHistory
    max_total_tokens: int
    template_arguments: Mapping[str, Any]
    stops: tuple[str, ...] = ()

    def text(self, token_ids: Sequence[int], num_bytes: int | None = None) -> str:
        """Decode ids, cut to a number of bytes."""
        data = b"".join(self.history.tokenizer.vocab_bytes[id] for id in token_ids)
        return data[:num_bytes].decode("utf-8", "replace")


@dataclass(frozen=True, kw_only=True)
class CompletionRequest:
    """A request in any dialect.

    Attributes:
        prompt_ids: Token ids of the prompt.
        num_samples: Completions to sample.
        params: How tokens are drawn.
        seed: Seed of the draws; None for a random one.
        max_tokens: Limit on each completion.
        stop_ids: Token ids that end a completion.
        stops: Strings that end a completion.
        body: The parsed body, which says what the client wants to see.
    """

    prompt_ids: tuple[int, ...]
    num_samples: int = 1
    params: SamplingParams
    seed: int | None
    max_tokens: int
    stop_ids: frozenset[int] = frozenset()
    stops: tuple[str, ...] = ()
    body: Any = None


def build_request(
    model: ServedModel,
    prompt_ids: Sequence[int],
    fields: SamplingFields,
    *,
    max_tokens: int | None,
    body: Any,
    num_samples: int = 1,
) -> CompletionRequest:
    """Combine a prompt with the sampling settings of a body.

    Raises:
        RequestError: The prompt leaves no room, or an id is not in the vocabulary.
    """
    room = model.max_total_tokens - len(prompt_ids)
    if room < 1:
        raise ContextLengthError(len(prompt_ids), model.max_total_tokens)
    num_tokens = model.history.tokenizer.num_tokens
    if (unknown := max([*prompt_ids, *fields.stop_token_ids])) >= num_tokens:
        raise RequestError(400, f"token id {unknown} is unknown; expected 0 to {num_tokens - 1}.")
    return CompletionRequest(
        prompt_ids=tuple(prompt_ids),
        num_samples=num_samples,
        params=SamplingParams(fields.temperature, max(fields.top_p, 1e-6)),
        seed=fields.seed,
        max_tokens=min(max_tokens or room, room),
        stop_ids=frozenset(fields.stop_token_ids),
        stops=model.stops if fields.stop is None else tuple(fields.stop),
        body=body,
    )


class Choice:
    """One sample of a completion, in chunks as they arrive."""

    def __init__(self) -> None:
        self.chunks: list[OutputChunk] = []
        self.job: Job | None = None
        self._changed = asyncio.Event()

    @property
    def finish_reason(self) -> str:
        """Return why the sample has ended; "" before."""
        return self.chunks[-1].finish_reason if self.chunks else ""

    @property
    def is_whole(self) -> bool:
        """Return True if all of the sample was drawn."""
        return self.finish_reason in (STOP, LENGTH)

    @property
    def must_start(self) -> bool:
        """Return True if the sample was not drawn yet, or not to its end."""
        is_running = self.job is not None and not self.job.is_cancelled and not self.finish_reason
        return not is_running and not self.is_whole

    def append(self, chunk: OutputChunk) -> None:
        """Append a chunk from the worker."""
        self.chunks.append(chunk)
        self._changed.set()

    async def follow(self) -> AsyncIterator[OutputChunk]:
        """Yield chunks as they arrive, up to the last one.

        Raises:
            RequestError: The sample was not finished.
        """
        index = 0
        while not index or not self.chunks[index - 1].finish_reason:
            while index == len(self.chunks):
                self._changed.clear()
                await self._changed.wait()
            chunk = self.chunks[index]
            index += 1
            if chunk.finish_reason == TIMED_OUT:
                raise RequestError(504, "the completion exceeded its deadline; raise --deadline_s.")
            if chunk.finish_reason == CANCELLED:
                raise RequestError(503, "the completion was cancelled: the server is ending.")
            if chunk.finish_reason == FAILED:
                raise RequestError(500, chunk.error)
            yield chunk

    def joined(self) -> OutputChunk:
        """Return all chunks as one."""
        return dataclasses.replace(
            self.chunks[-1],
            token_ids=tuple(chain.from_iterable(chunk.token_ids for chunk in self.chunks)),
            logprobs=tuple(chain.from_iterable(chunk.logprobs for chunk in self.chunks)),
            entropies=tuple(chain.from_iterable(chunk.entropies for chunk in self.chunks)),
        )


class Completion:
    """All samples of a request, for every client that waits for them."""

    def __init__(
        self, request: CompletionRequest, session: str = "", keys: Sequence[np.ndarray] = ()
    ):
        """Choose the random keys; nothing is sampled yet.

        Args:
            request: The request.
            session: Name of its session.
            keys: Keys uint32 [2] of the samples; by default they follow from the seed.
        """
        self.request, self.session = request, session
        self.keys = keys or [
            sample_key(request.seed, index) for index in range(request.num_samples)
        ]
        self.choices = [Choice() for _ in self.keys]
        self.created = int(time.time())
        self.is_undelivered = False  # the client left before it was sent
        self.num_readers = 0
        self.cache_keys: set[str] = set()

    @property
    def id(self) -> str:
        """Return a name that is the same for repeated requests."""
        return hashlib.sha256(b"".join(key.tobytes() for key in self.keys)).hexdigest()[:24]

    @property
    def is_finished(self) -> bool:
        """Return True if all samples have ended."""
        return all(choice.finish_reason for choice in self.choices)

    async def wait(self) -> None:
        """Wait for the end of all samples.

        Raises:
            RequestError: One was not finished.
        """
        for choice in self.choices:
            async for _ in choice.follow():
                pass

    def reply(self, model: ServedModel, choice: Choice) -> tuple[ChatMessage, str]:
        """Parse a finished sample of a chat, and store the chat with its ids.

        Without parallel calls the client sees the first call only. A chat that continues from it
        does not match the stored one.

        Returns:
            The message, and why it ends.
        """
        body, chunk = self.request.body, choice.joined()
        tools = body.callable_tools()
        text = model.text(chunk.token_ids, chunk.text_bytes)
        message = parse_reply(text, has_tools=bool(tools))
        token_ids = [*self.request.prompt_ids, *chunk.token_ids]
        model.history.store(self.session, [*body.chat(), message], tools, token_ids)
        if not body.parallel_tool_calls:
            message = dataclasses.replace(message, calls=message.calls[:1])
        has_calls = bool(message.calls) and chunk.finish_reason == STOP
        return message, "tool_calls" if has_calls else chunk.finish_reason


def sample_key(seed: int | None, index: int) -> np.ndarray:
    """Return the key uint32 [2] of a sample's draws."""
    data = os.urandom(8) if seed is None else f"{seed},{index}".encode()
    return np.frombuffer(hashlib.sha256(data).digest()[:8], np.uint32).copy()


class CompletionCache:
    """Submits completions to the worker, and remembers them for repeated requests."""

    def __init__(self, worker: Worker, *, deadline_s: float, max_size: int = 512):
        """Start empty.

        Args:
            worker: Worker that samples.
            deadline_s: Seconds that a completion may take.
            max_size: Completions to remember, beside those that are being read.
        """
        self._worker, self._deadline_s, self._max_size = worker, deadline_s, max_size
        self._entries: OrderedDict[str, tuple[str, Completion]] = OrderedDict()

    def get(self, key: str, digest: str) -> Completion | None:
        """Return the completion of a key.

        Args:
            key: Key of the request.
            digest: Digest of its body.

        Raises:
            RequestError: The key belongs to another body.
        """
        if key not in self._entries:
            return None
        stored_digest, completion = self._entries[key]
        if stored_digest != digest:
            raise RequestError(
                422,
                "the Idempotency-Key was used for another body; use a new key.",
                code="idempotency_key_reused",
            )
        self._entries.move_to_end(key)
        return completion

    def put(self, key: str, digest: str, completion: Completion) -> None:
        """Remember a completion, and forget the oldest that nobody reads."""
        self._entries[key] = digest, completion
        self._entries.move_to_end(key)
        completion.cache_keys.add(key)
        if (excess := len(self._entries) - self._max_size) > 0:
            old = (key for key, (_, entry) in self._entries.items() if not entry.num_readers)
            for key in [*islice(old, excess)]:
                del self._entries[key]

    @contextlib.contextmanager
    def reading(self, completion: Completion) -> Iterator[None]:
        """Sample what is missing of a completion while at least one client reads it.

        Raises:
            RequestError: The queue is full, or the server is ending.
        """
        self._submit(completion)
        completion.num_readers += 1
        try:
            yield
        finally:
            completion.num_readers -= 1
            if not completion.num_readers:
                for key in completion.cache_keys & self._entries.keys():  # its age starts now
                    self._entries.move_to_end(key)
                for choice in completion.choices:
                    if choice.job is not None and not choice.finish_reason:
                        self._worker.cancel(choice.job)

    def _submit(self, completion: Completion) -> None:
        """Queue the samples that were not drawn yet, or not to their end, with the same keys."""
        request = completion.request
        choices, jobs = [], []
        for choice, key in zip(completion.choices, completion.keys, strict=True):
            if choice.must_start:
                choice = Choice()
                choice.job = Job(
                    prompt_ids=request.prompt_ids,
                    sample_key=key,
                    params=request.params,
                    max_tokens=request.max_tokens,
                    stop_ids=request.stop_ids,
                    stops=tuple(stop.encode() for stop in request.stops),
                    deadline=time.monotonic() + self._deadline_s,
                    on_output=_to_loop(choice.append),
                    session=completion.session,
                )
                jobs.append(choice.job)
            choices.append(choice)
        if jobs:
            try:
                self._worker.submit(jobs)
            except ValueError as error:
                raise RequestError(400, str(error), param="n") from error
            except QueueFullError as error:
                raise RequestError(429, str(error), headers={"Retry-After": "1"}) from error
            except EndingError as error:
                raise RequestError(503, str(error)) from error
        completion.choices = choices


def _to_loop(callback: Callable[[OutputChunk], None]) -> Callable[[OutputChunk], None]:
    """Wrap a callback of the event loop for the worker's thread."""
    loop = asyncio.get_running_loop()

    def call(chunk: OutputChunk) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(callback, chunk)

    return call
