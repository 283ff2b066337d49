"""Anthropic's messages, over the same turns as OpenAI's chats.

A stream sends each block of the answer in one piece, at its end.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from jaxrl.extras.serve.generation import (
    Choice,
    Completion,
    CompletionRequest,
    ServedModel,
    build_request,
)
from jaxrl.extras.serve.schemas import (
    CountBody,
    MessagesBody,
    parse_body,
    refuse_unsupported,
)
from jaxrl.extras.serve.worker import STOP


def read_messages(data: bytes, session: str, model: ServedModel) -> CompletionRequest:
    """Parse a body and build its prompt.

    Raises:
        RequestError: The request is not valid or not supported.
    """
    body = parse_body(data, MessagesBody)
    return _build(body, session, model, max_tokens=body.max_tokens)


def read_count(data: bytes, session: str, model: ServedModel) -> CompletionRequest:
    """Parse the body of a request for a prompt's number of tokens, and build the prompt.

    Raises:
        RequestError: The request is not valid or not supported.
    """
    return _build(parse_body(data, CountBody), session, model, max_tokens=None)


def _build(
    body: CountBody, session: str, model: ServedModel, max_tokens: int | None
) -> CompletionRequest:
    refuse_unsupported(body.model_extra)
    prompt_ids = model.history.build_prompt(session, body.chat(), body.callable_tools())
    return build_request(model, prompt_ids, body, max_tokens=max_tokens, body=body)


@dataclass(frozen=True)
class MessagesWriter:
    """Writes a completion as a message, whole or as a stream."""

    completion: Completion
    model: ServedModel

    @property
    def body(self) -> MessagesBody:
        """Return the body of the request."""
        body: MessagesBody = self.completion.request.body
        return body

    @property
    def streams(self) -> bool:
        """Return True if the client wants a stream."""
        return self.body.stream

    def response(self) -> dict[str, Any]:
        """Return the whole response."""
        [choice] = self.completion.choices
        chunk = choice.joined()
        reply, reason = self.completion.reply(self.model, choice)
        content: list[dict[str, Any]] = []
        if reply.content or not reply.calls:
            content.append({"type": "text", "text": reply.content})
        for number, call in enumerate(reply.calls):
            id = f"toolu_{self.completion.id[:16]}_{number}"
            content.append(
                {"type": "tool_use", "id": id, "name": call.name, "input": call.arguments}
            )
        stop = self._stop_string(choice) if chunk.finish_reason == STOP else None
        stop_reason = {"tool_calls": "tool_use", "length": "max_tokens"}.get(reason, "end_turn")
        if stop is not None and reason == STOP:
            stop_reason = "stop_sequence"
        response = self._start(choice)
        response |= {"content": content, "stop_reason": stop_reason, "stop_sequence": stop}
        response["usage"]["output_tokens"] = len(chunk.token_ids)
        if self.body.return_token_ids:
            response["prompt_token_ids"] = list(self.completion.request.prompt_ids)
            response["token_ids"] = list(chunk.token_ids)
        if self.body.logprobs:
            response["logprobs"] = list(chunk.logprobs)
        return response

    def _start(self, choice: Choice) -> dict[str, Any]:
        """Return the message before its first block."""
        num_cached = choice.joined().num_cached
        return {
            "id": f"msg_{self.completion.id}",
            "type": "message",
            "role": "assistant",
            "model": self.model.name,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {
                "input_tokens": len(self.completion.request.prompt_ids) - num_cached,
                "cache_read_input_tokens": num_cached,
                "cache_creation_input_tokens": 0,
                "output_tokens": 0,
            },
        }

    def _stop_string(self, choice: Choice) -> str | None:
        """Return the stop string after the text of a sample, if one stopped it."""
        chunk = choice.joined()
        vocab_bytes = self.model.history.tokenizer.vocab_bytes
        rest = b"".join(vocab_bytes[id] for id in chunk.token_ids)[chunk.text_bytes :]
        stops = self.completion.request.stops
        return next((stop for stop in stops if rest.startswith(stop.encode())), None)

    async def events(self) -> AsyncIterator[tuple[str, dict[str, Any] | str]]:
        """Yield the events of a stream: names and data."""
        await self.completion.wait()
        [choice] = self.completion.choices
        message = self.response()
        for event in [
            {"type": "message_start", "message": {**message, **self._start(choice)}},
            *_block_events(message["content"]),
            {
                "type": "message_delta",
                "delta": {name: message[name] for name in ("stop_reason", "stop_sequence")},
                "usage": {"output_tokens": message["usage"]["output_tokens"]},
            },
            {"type": "message_stop"},
        ]:
            yield event["type"], event


def _block_events(content: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the events of the blocks, each in one piece."""
    events: list[dict[str, Any]] = []
    for index, block in enumerate(content):
        if block["type"] == "text":
            start: dict[str, Any] = {"type": "text", "text": ""}
            delta = {"type": "text_delta", "text": block["text"]}
        else:
            start = {**block, "input": {}}
            text = json.dumps(block["input"], ensure_ascii=False)
            delta = {"type": "input_json_delta", "partial_json": text}
        events += [
            {"type": "content_block_start", "index": index, "content_block": start},
            {"type": "content_block_delta", "index": index, "delta": delta},
            {"type": "content_block_stop", "index": index},
        ]
    return events
