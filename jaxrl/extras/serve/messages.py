"""Anthropic's Messages API, which shares the chat history with OpenAI's API.

Streams send each content block in one piece when the completion ends.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from jaxrl.extras.serve.generation import (
    Completion,
    Event,
    ServedModel,
    build_request,
)
from jaxrl.extras.serve.schemas import (
    CountTokensRequest,
    MessagesRequest,
    parse_body,
    reject_unsupported_fields,
)
from jaxrl.extras.serve.worker import STOP, CompletionRequest


def parse_messages_request(
    data: bytes,
    session: str,
    model: ServedModel,
    body_type: type[CountTokensRequest] = MessagesRequest,
) -> CompletionRequest:
    """Parse the body of a Messages request and build the prompt.

    Raises:
        RequestError: The request is invalid or not supported.
    """
    body = parse_body(data, body_type)
    reject_unsupported_fields(body.model_extra)
    prompt_ids = model.history.build_prompt(session, body.build_chat(), body.get_template_tools())
    return build_request(model, prompt_ids, body, body)


def build_messages_response(completion: Completion) -> dict[str, Any]:
    """Build the response to a non-streaming Messages request."""
    [choice] = completion.choices
    request, chunk = completion.request, choice.merge_chunks()
    reply, reason = completion.store_choice(choice)
    content: list[dict[str, Any]] = []
    functions = [call["function"] for call in reply.get("tool_calls", ())]
    if reply["content"] or not functions:
        content.append({"type": "text", "text": reply["content"]})
    for number, function in enumerate(functions):
        block = {"type": "tool_use", "id": f"toolu_{completion.id[:16]}_{number}"}
        content.append({**block, "name": function["name"], "input": function["arguments"]})
    stop_string = None
    if chunk.finish_reason == STOP:  # a stop id, or a stop string after the text
        rest = completion.model.decode_bytes(chunk.token_ids)[chunk.text_bytes :]
        matches = (stop for stop in request.stops if rest.startswith(stop.encode()))
        stop_string = next(matches, None)
    stop_reason = {"tool_calls": "tool_use", "length": "max_tokens"}.get(reason, "end_turn")
    if stop_string is not None and reason == STOP:
        stop_reason = "stop_sequence"
    response: dict[str, Any] = {
        "id": f"msg_{completion.id}",
        "type": "message",
        "role": "assistant",
        "model": completion.model.name,
        "content": content,
        "stop_reason": stop_reason,
        "stop_sequence": stop_string,
        "usage": {
            "input_tokens": len(request.prompt_ids) - chunk.num_cached,
            "cache_read_input_tokens": chunk.num_cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": len(chunk.token_ids),
        },
    }
    if request.body.return_token_ids:
        response["prompt_token_ids"] = list(request.prompt_ids)
        response["token_ids"] = list(chunk.token_ids)
    if request.body.logprobs:
        response["logprobs"] = list(chunk.logprobs)
    return response


async def stream_messages(completion: Completion) -> AsyncIterator[Event]:
    """Yield all events of a streamed response once the completion ends."""
    await completion.wait()
    message = build_messages_response(completion)
    usage = message["usage"]
    end = {name: message[name] for name in ("stop_reason", "stop_sequence")}
    start = {**message, "content": [], **dict.fromkeys(end), "usage": {**usage, "output_tokens": 0}}
    events: list[dict[str, Any]] = [{"type": "message_start", "message": start}]
    for index, block in enumerate(message["content"]):
        if block["type"] == "text":
            empty_block = {**block, "text": ""}
            delta = {"type": "text_delta", "text": block["text"]}
        else:
            empty_block = {**block, "input": {}}
            text = json.dumps(block["input"], ensure_ascii=False)
            delta = {"type": "input_json_delta", "partial_json": text}
        events += [
            {"type": "content_block_start", "index": index, "content_block": empty_block},
            {"type": "content_block_delta", "index": index, "delta": delta},
            {"type": "content_block_stop", "index": index},
        ]
    output = {"output_tokens": usage["output_tokens"]}
    events.append({"type": "message_delta", "delta": end, "usage": output})
    for event in [*events, {"type": "message_stop"}]:
        yield event["type"], event
