"""OpenAI's chat completions with vLLM's extensions for token ids, and plain token ids.

`/inference/v1/generate` takes and returns ids: there the client renders prompts and parses tool
calls, as the training client of verifiers does. Its answers have every sampled id, the one that
stops included, since the next turn's prompt is made of them.
"""

from __future__ import annotations

import asyncio
import codecs
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from jaxrl.extras.serve.chats import ChatMessage
from jaxrl.extras.serve.errors import RequestError
from jaxrl.extras.serve.generation import (
    Completion,
    CompletionRequest,
    ServedModel,
    build_request,
)
from jaxrl.extras.serve.schemas import (
    ChatBody,
    IdsBody,
    parse_body,
    refuse_unsupported,
    show,
)
from jaxrl.extras.serve.worker import OutputChunk


def read_chat(data: bytes, session: str, model: ServedModel) -> CompletionRequest:
    """Parse a body and build its prompt.

    Raises:
        RequestError: The request is not valid or not supported.
    """
    body = parse_body(data, ChatBody)
    refuse_unsupported(body.model_extra)
    # A session's sampled tokens stay in its prompts anyway, as preserve_thinking asks.
    expected = {**model.template_arguments, "preserve_thinking": True}
    for name, value in body.chat_template_kwargs.items():
        if value is not None and value != expected.get(name):
            param = f"chat_template_kwargs.{name}"
            message = f"{param} is {show(value)}; expected the server's, {expected.get(name)!r}."
            raise RequestError(400, message, param=param, code="unsupported_parameter")
    return build_request(
        model,
        model.history.build_prompt(session, body.chat(), body.callable_tools()),
        body,
        max_tokens=body.max_completion_tokens or body.max_tokens,
        body=body,
        num_samples=body.n,
    )


class StreamDecoder:
    """Text of a sample while its tokens arrive, never more than is certain.

    Holds back incomplete characters and what may be the start of a stop string.
    """

    def __init__(self, vocab_bytes: Sequence[bytes], stops: Sequence[str]):
        """Start empty."""
        self._vocab_bytes = vocab_bytes
        self._num_held = max((len(stop.encode()) - 1 for stop in stops), default=0)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._data, self._num_sent = bytearray(), 0

    def add(self, chunk: OutputChunk) -> str:
        """Return the text that a chunk has made certain."""
        self._data += b"".join(self._vocab_bytes[id] for id in chunk.token_ids)
        # A stop id counts as a token of the completion, but has no text.
        end = max(len(self._data) - self._num_held, self._num_sent)
        if chunk.finish_reason:
            end = chunk.text_bytes
        new = bytes(self._data[self._num_sent : end])
        self._num_sent = end
        return self._decoder.decode(new, final=bool(chunk.finish_reason))


@dataclass(frozen=True)
class ChatWriter:
    """Writes a completion of a chat, whole or as a stream."""

    completion: Completion
    model: ServedModel

    @property
    def body(self) -> ChatBody:
        """Return the body of the request."""
        body: ChatBody = self.completion.request.body
        return body

    @property
    def streams(self) -> bool:
        """Return True if the client wants a stream."""
        return self.body.stream

    def response(self) -> dict[str, Any]:
        """Return the whole response."""
        choices = []
        for index, choice in enumerate(self.completion.choices):
            chunk = choice.joined()
            reply, reason = self.completion.reply(self.model, choice)
            message: dict[str, Any] = {"role": "assistant", "content": reply.content}
            if reply.calls:
                message["content"] = reply.content or None
                message["tool_calls"] = self._tool_calls(reply, index)
            item = {
                "index": index,
                "message": message,
                "logprobs": self._logprobs(chunk) if self.body.logprobs else None,
                "finish_reason": reason,
            }
            if self.body.return_token_ids:
                item["token_ids"] = list(chunk.token_ids)
            choices.append(item)
        response = {**self._head("chat.completion"), "choices": choices}
        response["usage"] = usage_of(self.completion)
        if self.body.return_token_ids:
            response["prompt_token_ids"] = list(self.completion.request.prompt_ids)
        return response

    async def events(self) -> AsyncIterator[tuple[str, dict[str, Any] | str]]:
        """Yield the events of a stream: names, which are empty here, and data."""
        num_choices = len(self.completion.choices)
        for index in range(num_choices):
            start = self._stream_chunk(index, {"role": "assistant", "content": ""})
            if index == 0 and self.body.return_token_ids:
                start["prompt_token_ids"] = list(self.completion.request.prompt_ids)
            yield "", start
        async for chunk in merge([self._stream(index) for index in range(num_choices)]):
            yield "", chunk
        if self.body.stream_options.include_usage:
            head = self._head("chat.completion.chunk")
            yield "", {**head, "choices": [], "usage": usage_of(self.completion)}
        yield "", "[DONE]"

    async def _stream(self, index: int) -> AsyncIterator[dict[str, Any]]:
        """Yield the stream chunks of one sample.

        With tools its text comes at the end, when it is known what is a tool call.
        """
        choice, has_tools = self.completion.choices[index], bool(self.body.callable_tools())
        vocab_bytes = self.model.history.tokenizer.vocab_bytes
        decoder = StreamDecoder(vocab_bytes, self.completion.request.stops)
        async for chunk in choice.follow():
            delta: dict[str, Any] = {}
            others: dict[str, Any] = {}
            text = decoder.add(chunk)
            if text and not has_tools:
                delta["content"] = text
            if self.body.logprobs:
                others["logprobs"] = self._logprobs(chunk)
            if self.body.return_token_ids:
                others["token_ids"] = list(chunk.token_ids)
            if chunk.finish_reason:
                reply, others["finish_reason"] = self.completion.reply(self.model, choice)
                if has_tools and reply.content:
                    delta["content"] = reply.content
                if reply.calls:
                    calls = self._tool_calls(reply, index)
                    delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
            if delta or others:
                yield self._stream_chunk(index, delta, **others)

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{self.completion.id}",
            "object": kind,
            "created": self.completion.created,
            "model": self.model.name,
        }

    def _stream_chunk(self, index: int, delta: dict[str, Any], **others: Any) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "finish_reason": None, **others}
        return {**self._head("chat.completion.chunk"), "choices": [choice]}

    def _tool_calls(self, reply: ChatMessage, index: int) -> list[dict[str, Any]]:
        return [
            {
                "id": f"call_{self.completion.id[:16]}_{index}_{number}",
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": json.dumps(call.arguments, ensure_ascii=False),
                },
            }
            for number, call in enumerate(reply.calls)
        ]

    def _logprobs(self, chunk: OutputChunk) -> dict[str, Any]:
        content = []
        for id, logprob in zip(chunk.token_ids, chunk.logprobs, strict=True):
            data = self.model.history.tokenizer.vocab_bytes[id]
            is_id = self.body.return_tokens_as_token_ids
            text = f"token_id:{id}" if is_id else data.decode("utf-8", "replace")
            content.append(
                {"token": text, "logprob": logprob, "bytes": list(data), "top_logprobs": []}
            )
        return {"content": content, "refusal": None}


def usage_of(completion: Completion) -> dict[str, Any]:
    """Return the token counts of a finished completion, over all samples."""
    chunks = [choice.joined() for choice in completion.choices]
    num_prompt = len(completion.request.prompt_ids)
    num_sampled = sum(len(chunk.token_ids) for chunk in chunks)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_sampled,
        "total_tokens": num_prompt + num_sampled,
        "prompt_tokens_details": {"cached_tokens": chunks[0].num_cached},
    }


async def merge(streams: Sequence[AsyncIterator[Any]]) -> AsyncIterator[Any]:
    """Yield the items of several streams as they arrive; an error in one ends all."""
    waiting = {asyncio.ensure_future(anext(stream)): stream for stream in streams}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=[*waiting].index):  # a set; the longest wait goes first
                stream = waiting.pop(task)
                try:
                    yield task.result()
                except StopAsyncIteration:
                    continue
                waiting[asyncio.ensure_future(anext(stream))] = stream
    finally:
        for task in waiting:
            task.cancel()


def read_ids(data: bytes, session: str, model: ServedModel) -> CompletionRequest:
    """Parse a body of token ids.

    Raises:
        RequestError: The request is not valid or not supported.
    """
    body = parse_body(data, IdsBody)
    sampling = body.sampling_params
    refuse_unsupported(body.model_extra)
    refuse_unsupported(sampling.model_extra, "sampling_params.")
    return build_request(model, body.token_ids, sampling, max_tokens=sampling.max_tokens, body=body)


@dataclass(frozen=True)
class IdsWriter:
    """Writes a completion as token ids."""

    completion: Completion
    model: ServedModel
    streams = False

    def response(self) -> dict[str, Any]:
        """Return the whole response."""
        [choice] = self.completion.choices
        chunk = choice.joined()
        logprobs = [
            {"token": f"token_id:{id}", "logprob": logprob}
            for id, logprob in zip(chunk.token_ids, chunk.logprobs, strict=True)
        ]
        return {
            "request_id": f"gen-{self.completion.id}",
            "choices": [
                {
                    "index": 0,
                    "token_ids": list(chunk.token_ids),
                    "finish_reason": chunk.finish_reason,
                    "logprobs": {"content": logprobs},
                }
            ],
            "prompt_token_ids": list(self.completion.request.prompt_ids),
            "usage": usage_of(self.completion),
        }

    def events(self) -> AsyncIterator[Any]:
        """Raise an error, since ids are not streamed."""
        raise NotImplementedError
