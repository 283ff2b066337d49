"""OpenAI chat completions with vLLM's token-id extensions, and generation from token ids.

Clients of `/inference/v1/generate`, such as verifiers' training client, render prompts and parse
tool calls themselves. Responses contain every sampled id, including the stop id, because clients
build the next prompt from the response.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import AsyncIterator
from typing import Any

from jaxrl.extras.serve.chats import ChatMessage
from jaxrl.extras.serve.generation import (
    Completion,
    Event,
    ServedModel,
    build_request,
)
from jaxrl.extras.serve.schemas import (
    ChatCompletionRequest,
    GenerateRequest,
    make_unsupported_error,
    parse_body,
    reject_unsupported_fields,
)
from jaxrl.extras.serve.worker import CompletionRequest, OutputChunk


def parse_chat_request(data: bytes, session: str, model: ServedModel) -> CompletionRequest:
    """Parse the body of a chat request and build the prompt.

    Raises:
        RequestError: The request is invalid or not supported.
    """
    body = parse_body(data, ChatCompletionRequest)
    reject_unsupported_fields(body.model_extra)
    # Prompts always keep a session's sampled tokens, as preserve_thinking=True requests.
    expected = {**model.tokenizer.template_arguments, "preserve_thinking": True}
    for name, value in body.chat_template_kwargs.items():
        if value is not None and value != expected.get(name):
            default = f"the server's, {expected.get(name)!r}"
            raise make_unsupported_error(f"chat_template_kwargs.{name}", value, default)
    body.max_tokens = body.max_completion_tokens or body.max_tokens
    prompt_ids = model.history.build_prompt(session, body.build_chat(), body.get_template_tools())
    return build_request(model, prompt_ids, body, body, num_samples=body.n)


def build_chat_response(completion: Completion) -> dict[str, Any]:
    """Build the response to a non-streaming chat request."""
    body = completion.request.body
    choices = []
    for index, choice in enumerate(completion.choices):
        chunk = choice.merge_chunks()
        reply, reason = completion.store_choice(choice)
        message = dict(reply)
        if calls := _format_tool_calls(completion, reply, index):
            message |= {"content": reply["content"] or None, "tool_calls": calls}
        item = {"index": index, "message": message, "logprobs": None, "finish_reason": reason}
        choices.append({**item, **_format_token_fields(completion, chunk)})
    response = {**_build_common_fields(completion, "chat.completion"), "choices": choices}
    response["usage"] = build_usage(completion)
    if body.return_token_ids:
        response["prompt_token_ids"] = list(completion.request.prompt_ids)
    return response


async def stream_chat(completion: Completion) -> AsyncIterator[Event]:
    """Yield the events of a streamed response, choice by choice.

    If the request has tools, the text of a choice is sent only after the choice is complete, when
    its calls can be parsed.
    """
    body = completion.request.body
    has_tools = bool(body.get_template_tools())
    head = _build_common_fields(completion, "chat.completion.chunk")
    ids = {"prompt_token_ids": list(completion.request.prompt_ids)} if body.return_token_ids else {}
    for index, choice in enumerate(completion.choices):
        role_delta = {"role": "assistant", "content": ""}
        start = {"index": index, "delta": role_delta, "finish_reason": None}
        yield "", {**head, "choices": [start], **ids}
        ids = {}
        decoder = StreamDecoder(completion)
        async for chunk in choice.stream():
            delta: dict[str, Any] = {}
            reason: str | None = None
            text = decoder.add_chunk(chunk)
            if chunk.finish_reason:
                reply, reason = completion.store_choice(choice)
                text = reply["content"] if has_tools else text
                calls = _format_tool_calls(completion, reply, index)
                if calls:
                    delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
            if text and (reason or not has_tools):
                delta["content"] = text
            token_fields = _format_token_fields(completion, chunk)
            if delta or token_fields or reason:
                item = {"index": index, "delta": delta, "finish_reason": reason, **token_fields}
                yield "", {**head, "choices": [item]}
    if body.stream_options.include_usage:
        yield "", {**head, "choices": [], "usage": build_usage(completion)}
    yield "", "[DONE]"


class StreamDecoder:
    """Incremental UTF-8 decoder of a sample's tokens.

    The decoder holds back incomplete characters and text that may start a stop string.
    """

    def __init__(self, completion: Completion):
        """Create a decoder for one sample of `completion`."""
        self._vocab_bytes = completion.model.tokenizer.vocab_bytes
        stops = completion.request.stops
        self._num_holdback_bytes = max((len(stop.encode()) - 1 for stop in stops), default=0)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._data, self._num_sent = bytearray(), 0

    def add_chunk(self, chunk: OutputChunk) -> str:
        """Append a chunk; return new text that later tokens cannot change."""
        self._data += b"".join(self._vocab_bytes[id] for id in chunk.token_ids)
        # A stop id counts as a token of the completion but has no text.
        end = max(len(self._data) - self._num_holdback_bytes, self._num_sent)
        if chunk.finish_reason:
            end = chunk.text_bytes
        new = bytes(self._data[self._num_sent : end])
        self._num_sent = end
        return self._decoder.decode(new, final=bool(chunk.finish_reason))


def _build_common_fields(completion: Completion, object_type: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{completion.id}",
        "object": object_type,
        "created": completion.created,
        "model": completion.model.name,
    }


def _format_tool_calls(
    completion: Completion, reply: ChatMessage, index: int
) -> list[dict[str, Any]]:
    calls = []
    for number, call in enumerate(reply.get("tool_calls", ())):
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        function = {"name": call["function"]["name"], "arguments": arguments}
        id = f"call_{completion.id[:16]}_{index}_{number}"
        calls.append({"id": id, "type": "function", "function": function})
    return calls


def _format_token_fields(completion: Completion, chunk: OutputChunk) -> dict[str, Any]:
    """Return a chunk's token ids and log-probabilities, if the client requested them."""
    body: ChatCompletionRequest = completion.request.body
    fields: dict[str, Any] = {}
    if body.return_token_ids:
        fields["token_ids"] = list(chunk.token_ids)
    if body.logprobs:
        content = []
        for id, logprob in zip(chunk.token_ids, chunk.logprobs, strict=True):
            data = completion.model.tokenizer.vocab_bytes[id]
            is_id = body.return_tokens_as_token_ids
            text = f"token_id:{id}" if is_id else data.decode("utf-8", "replace")
            token = {"token": text, "logprob": logprob, "bytes": list(data), "top_logprobs": []}
            content.append(token)
        fields["logprobs"] = {"content": content, "refusal": None}
    return fields


def build_usage(completion: Completion) -> dict[str, Any]:
    """Return the numbers of prompt tokens and sampled tokens of a finished completion."""
    chunks = [choice.merge_chunks() for choice in completion.choices]
    num_prompt = len(completion.request.prompt_ids)
    num_sampled = sum(len(chunk.token_ids) for chunk in chunks)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_sampled,
        "total_tokens": num_prompt + num_sampled,
        "prompt_tokens_details": {"cached_tokens": chunks[0].num_cached},
    }


def parse_generate_request(data: bytes, session: str, model: ServedModel) -> CompletionRequest:
    """Parse the body of a request to `/inference/v1/generate`.

    Raises:
        RequestError: The request is invalid or not supported.
    """
    body = parse_body(data, GenerateRequest)
    reject_unsupported_fields(body.model_extra)
    reject_unsupported_fields(body.sampling_params.model_extra, "sampling_params.")
    return build_request(model, body.token_ids, body.sampling_params, body)


def build_generate_response(completion: Completion) -> dict[str, Any]:
    """Build the response of `/inference/v1/generate`."""
    [choice] = completion.choices
    chunk = choice.merge_chunks()
    logprobs = [
        {"token": f"token_id:{id}", "logprob": logprob}
        for id, logprob in zip(chunk.token_ids, chunk.logprobs, strict=True)
    ]
    item = {
        "index": 0,
        "token_ids": list(chunk.token_ids),
        "finish_reason": chunk.finish_reason,
        "logprobs": {"content": logprobs},
    }
    return {
        "request_id": f"gen-{completion.id}",
        "choices": [item],
        "prompt_token_ids": list(completion.request.prompt_ids),
        "usage": build_usage(completion),
    }
