"""Completions, with a cache for repeated requests.

All code in this module runs on the event loop, which receives chunks from the worker's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from cachetools import LRUCache

from jaxrl.config.schema import MIN_TEMPERATURE
from jaxrl.data.tokenizer import Tokenizer
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
    CompletionRequest,
    GenerationJob,
    OutputChunk,
    Worker,
)

ABORT_ERRORS: Mapping[str, tuple[int, str]] = {
    TIMED_OUT: (504, "the completion exceeded its deadline; raise --deadline_s."),
    CANCELLED: (503, "the completion was canceled: the server is shutting down."),
    FAILED: (500, "the engine failed; see the server's log."),
}
"""HTTP status and message of incomplete completions, by finish reason."""

Event = tuple[str, Any]
"""Name and data of a server-sent event; the name is empty in OpenAI's API."""


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """Properties of the served model that all APIs use.

    Attributes:
        name: Model name in requests and responses.
        tokenizer: Tokenizer with the chat template.
        history: Chat history of all sessions.
        max_total_tokens: Maximum number of prompt and completion tokens combined.
        stops: Default stop strings.
    """

    name: str
    tokenizer: Tokenizer
    history: ChatHistory
    max_total_tokens: int
    stops: tuple[str, ...] = ()

    def decode_bytes(self, token_ids: Sequence[int]) -> bytes:
        """Decode token ids to bytes."""
        return b"".join(self.tokenizer.vocab_bytes[id] for id in token_ids)

    def decode_text(self, chunk: OutputChunk) -> str:
        """Decode a finished completion to text, without its stop string."""
        return self.decode_bytes(chunk.token_ids)[: chunk.text_bytes].decode("utf-8", "replace")


def build_request(
    model: ServedModel,
    prompt_ids: Sequence[int],
    fields: SamplingFields,
    body: Any,
    num_samples: int = 1,
) -> CompletionRequest:
    """Build a request from a prompt and a body's sampling fields.

    A temperature between 0 and `MIN_TEMPERATURE` is raised to it.

    Raises:
        RequestError: The prompt leaves no tokens for a completion, or a token id is unknown.
    """
    max_new_tokens = model.max_total_tokens - len(prompt_ids)
    if max_new_tokens < 1:
        raise ContextLengthError(len(prompt_ids), model.max_total_tokens)
    num_tokens = model.tokenizer.num_tokens
    if (largest_id := max([*prompt_ids, *fields.stop_token_ids])) >= num_tokens:
        raise RequestError(
            400, f"token id {largest_id} is unknown; expected 0 to {num_tokens - 1}."
        )
    temperature = max(fields.temperature, MIN_TEMPERATURE) if fields.temperature else 0.0
    return CompletionRequest(
        prompt_ids=tuple(prompt_ids),
        num_samples=num_samples,
        params=SamplingParams(temperature, max(fields.top_p, 1e-6)),
        seed=fields.seed,
        max_tokens=min(fields.max_tokens or max_new_tokens, max_new_tokens),
        stop_ids=frozenset(fields.stop_token_ids),
        stops=model.stops if fields.stop is None else tuple(fields.stop),
        body=body,
    )


class Choice:
    """One sample of a completion, received in chunks."""

    def __init__(self) -> None:
        self.chunks: list[OutputChunk] = []
        self.job: GenerationJob | None = None
        self._chunk_event = asyncio.Event()

    @property
    def finish_reason(self) -> str:
        """Finish reason, or "" while the sample is incomplete."""
        return self.chunks[-1].finish_reason if self.chunks else ""

    @property
    def needs_submission(self) -> bool:
        """True if the sample is incomplete and has no running job."""
        is_running = self.job is not None and not self.job.is_cancelled and not self.finish_reason
        return not is_running and self.finish_reason not in (STOP, LENGTH)

    def append(self, chunk: OutputChunk) -> None:
        """Append a chunk and wake waiting clients."""
        self.chunks.append(chunk)
        self._chunk_event.set()

    async def stream(self) -> AsyncIterator[OutputChunk]:
        """Yield chunks as they arrive.

        Raises:
            RequestError: The sample timed out, was cancelled or failed.
        """
        index = 0
        while not index or not self.chunks[index - 1].finish_reason:
            while index == len(self.chunks):
                self._chunk_event.clear()
                await self._chunk_event.wait()
            chunk = self.chunks[index]
            index += 1
            if chunk.finish_reason in ABORT_ERRORS:
                raise RequestError(*ABORT_ERRORS[chunk.finish_reason])
            yield chunk

    def merge_chunks(self) -> OutputChunk:
        """Merge all chunks into one."""
        names = ("token_ids", "logprobs", "entropies", "versions")
        values: dict[str, Any] = {
            name: tuple(chain.from_iterable(getattr(chunk, name) for chunk in self.chunks))
            for name in names
        }
        return dataclasses.replace(self.chunks[-1], **values)


class Completion:
    """Samples of a request, shared by all clients that send the same request."""

    def __init__(
        self,
        model: ServedModel,
        request: CompletionRequest,
        session: str = "",
        keys: Sequence[np.ndarray] = (),
    ):
        """Create a completion; sampling starts later.

        Args:
            model: Model that samples the completion.
            request: Parsed request.
            session: Name of the session; "" for none.
            keys: Random key of each sample, uint32 [2]; derived from the seed if empty.
        """
        self.model, self.request, self.session = model, request, session
        self.keys = keys or [
            derive_sample_key(request.seed, index) for index in range(request.num_samples)
        ]
        # The id depends only on the keys.
        self.id = hashlib.sha256(b"".join(key.tobytes() for key in self.keys)).hexdigest()[:24]
        self.choices = [Choice() for _ in self.keys]
        self.created = int(time.time())
        self.is_undelivered = False  # the client disconnected before the end
        self.num_readers = 0

    @property
    def is_finished(self) -> bool:
        """True if all samples have ended."""
        return all(choice.finish_reason for choice in self.choices)

    async def wait(self) -> None:
        """Wait until all samples have ended.

        Raises:
            RequestError: A sample timed out, was cancelled or failed.
        """
        for choice in self.choices:
            async for _ in choice.stream():
                pass

    def store_choice(self, choice: Choice) -> tuple[ChatMessage, str]:
        """Parse a finished sample of a chat, and store the chat with its token ids.

        If parallel calls are disabled, the client gets only the first call. If other calls are
        dropped, the client's next chat does not match the stored chat.

        Returns:
            The message and its finish reason.
        """
        body, chunk = self.request.body, choice.merge_chunks()
        tools = body.get_template_tools()
        message = parse_reply(self.model.decode_text(chunk), tools)
        token_ids = [*self.request.prompt_ids, *chunk.token_ids]
        self.model.history.store(self.session, [*body.build_chat(), message], tools, token_ids)
        if "tool_calls" not in message:
            return message, chunk.finish_reason
        if not body.parallel_tool_calls:
            message = {**message, "tool_calls": message["tool_calls"][:1]}
        return message, "tool_calls" if chunk.finish_reason == STOP else chunk.finish_reason


def derive_sample_key(seed: int | None, index: int) -> np.ndarray:
    """Derive a sample's key, uint32 [2], from `seed`, or from a random seed if `seed` is None."""
    data = os.urandom(8) if seed is None else f"{seed},{index}".encode()
    return np.frombuffer(hashlib.sha256(data).digest()[:8], np.uint32).copy()


class CompletionCache:
    """Cache that serves repeated requests and submits completions to the worker.

    The keys of a request are the digest of its body and, if sent, the Idempotency-Key.
    """

    def __init__(self, worker: Worker, *, deadline_s: float, max_size: int = 512):
        """Create a cache without completions.

        Args:
            worker: Worker that samples the completions.
            deadline_s: Time limit per completion, in seconds.
            max_size: Maximum number of keys, without those of completions with attached clients.
        """
        self._worker, self._deadline_s = worker, deadline_s
        self._active: dict[str, tuple[str, Completion]] = {}  # digest of the body, by key
        self._finished: LRUCache[str, tuple[str, Completion]] = LRUCache(max_size)

    def find(self, keys: Sequence[str], *, is_retry: bool, is_recorded: bool) -> Completion | None:
        """Return the completion of a repeated request, or None for a new request.

        Args:
            keys: Keys of the request; the first is the digest of its body.
            is_retry: True if the client marks the request as a retry.
            is_recorded: True if a run trains on the response. An identical request then counts as a
                repeat even if the first response was not delivered.

        Raises:
            RequestError: The Idempotency-Key was used with a different body.
        """
        digest = keys[0]
        for key in reversed(keys):
            stored_digest, completion = (
                self._active.get(key) or self._finished.get(key) or ("", None)
            )
            if completion is None:
                continue
            if stored_digest != digest:
                raise RequestError(
                    422,
                    "the Idempotency-Key was used for another body; use a new key.",
                    code="idempotency_key_reused",
                )
            if key != digest or is_retry or (is_recorded and completion.is_undelivered):
                return completion
        return None

    @contextlib.contextmanager
    def attach_client(self, completion: Completion, keys: Sequence[str]) -> Iterator[None]:
        """Attach a client to a completion. Incomplete samples run while any client is attached.

        Raises:
            RequestError: The queue is full, or the server is shutting down.
        """
        self._submit(completion)
        self._active.update(dict.fromkeys(keys, (keys[0], completion)))
        completion.num_readers += 1
        try:
            yield
        finally:
            completion.num_readers -= 1
            if not completion.num_readers:
                for key, entry in [*self._active.items()]:
                    if entry[1] is completion:
                        self._finished[key] = self._active.pop(key)
                for choice in completion.choices:
                    if choice.job is not None and not choice.finish_reason:
                        self._worker.cancel(choice.job)

    def _submit(self, completion: Completion) -> None:
        """Submit all incomplete samples, with unchanged random keys."""
        choices, jobs = [], []
        for choice, key in zip(completion.choices, completion.keys, strict=True):
            if choice.needs_submission:
                choice = Choice()
                choice.job = GenerationJob(
                    request=completion.request,
                    sample_key=key,
                    deadline=time.monotonic() + self._deadline_s,
                    on_output=_wrap_threadsafe(choice.append),
                    session=completion.session,
                )
                jobs.append(choice.job)
            choices.append(choice)
        self._worker.submit(jobs)
        completion.choices = choices


def _wrap_threadsafe(callback: Callable[[OutputChunk], None]) -> Callable[[OutputChunk], None]:
    """Wrap an event-loop callback so that other threads can call it."""
    loop = asyncio.get_running_loop()

    def call(chunk: OutputChunk) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(callback, chunk)

    return call
