"""`POST /v1/messages`, as Anthropic's clients send it, by the same turns as OpenAI's chats.

A stream has an answer's blocks in one piece each, once it has ended.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from jaxrl.extras.serve.answers import (
    MAX_STOPS,
    Limits,
    Question,
    Sample,
    joined,
    read_question,
)
from jaxrl.extras.serve.chats import TEXT_FIELDS, Call, ChatMessage, Chats, check_known
from jaxrl.extras.serve.completions import Shown, Writer
from jaxrl.extras.serve.fields import Fields, RefusedError, fields_of, shown
from jaxrl.extras.serve.worker import STOP

UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "top_k": (0, -1),
    "thinking": ({"type": "disabled"},),
    "output_format": (),
    "output_config": ({},),
    "mcp_servers": ([],),
    "container": (),
}
"""Fields that would change the answer, and the values at which they do not."""

BLOCKS = ("text", "tool_use", "tool_result")


def read(
    fields: Fields, *, session: str, model: str, chats: Chats, limits: Limits, counts: bool = False
) -> tuple[Question, Shown]:
    """Reads a body, and makes its prompt.

    Args:
        fields: of the body.
        session: whose chat it is.
        model: name of the one that answers.
        chats: of all sessions.
        limits: of the server.
        counts: only the prompt's tokens are asked for.

    Raises:
        RefusedError: names what is wrong, or cannot be done.
    """
    fields.only(UNSUPPORTED)
    fields.text("model", "")
    limits.check(fields.items("messages"))
    messages = read_messages(fields)
    tools, has_one_call = read_tools(fields)
    # Its own names of what all dialects have.
    stops = fields.texts("stop_sequences", MAX_STOPS) if "stop_sequences" in fields.values else None
    common = Fields({**fields.values, "stop": stops})
    budget = None if counts else fields.whole("max_tokens", 0, 1)
    prompt_ids = chats.prompt(session, messages, tools)
    question = read_question(common, prompt_ids, limits, budget)
    return question, Shown(
        model=model,
        session=session,
        messages=tuple(messages),
        tools=tuple(tools),
        streams=fields.flag("stream"),
        has_usage=True,
        has_logprobs=fields.flag("logprobs"),
        has_ids=fields.flag("return_token_ids"),
        names_ids=False,
        has_one_call=has_one_call,
    )


def read_messages(fields: Fields) -> list[ChatMessage]:
    """Messages and the system's text, as the chats of OpenAI have them.

    A result of a tool is a message of its own.

    Raises:
        RefusedError: names what is wrong.
    """
    messages = []
    if "system" in fields.values:
        messages.append(ChatMessage(role="system", content=_text(fields, "system")))
    for index, value in enumerate(fields.items("messages")):
        message = fields_of(value, f"messages[{index}]")
        check_known(message, ("role", "content"))
        role = message.text("role")
        if role not in ("user", "assistant"):
            raise message.refuse("role", "'user' or 'assistant'")
        if "content" not in message.values:
            raise message.refuse("content", "a text, or a list of blocks")
        messages += _assistant(message) if role == "assistant" else _user(message)
    if not messages or messages[-1].role == "system":
        raise RefusedError(400, "messages is empty; expected at least one.", param="messages")
    return messages


def _blocks(fields: Fields, field: str = "content") -> list[Fields]:
    """The blocks of a content; a text is one."""
    value = fields.values.get(field)
    values = [{"type": "text", "text": value}] if isinstance(value, str) else fields.items(field)
    blocks = [fields_of(one, f"{fields.name(field)}[{index}]") for index, one in enumerate(values)]
    for block in blocks:
        if block.text("type") not in BLOCKS:
            raise RefusedError(
                400,
                f"{block.place} is of the type {shown(block.values['type'])}; expected "
                f"{', '.join(BLOCKS)}, which are all that this server reads.",
                param=block.place,
            )
        if block.values["type"] == "text":
            check_known(block, TEXT_FIELDS)
    return blocks


def _text(fields: Fields, field: str = "content") -> str:
    """The text of a content that has no other blocks."""
    blocks = _blocks(fields, field)
    for block in blocks:
        if block.values["type"] != "text":
            raise block.refuse("type", "'text'")
    return "".join(block.text("text") for block in blocks)


def _assistant(message: Fields) -> list[ChatMessage]:
    texts: list[str] = []
    calls: list[Call] = []
    for block in _blocks(message):
        if block.values["type"] == "text":
            if calls and block.text("text").strip():
                raise block.refuse("text", "text before the calls of a message, not behind one")
            texts.append(block.text("text"))
        elif block.values["type"] == "tool_use":
            block.inner("input")  # refuses what is no object
            arguments = block.values.get("input", {})  # with its nulls
            name, id = block.text("name"), block.text("id", "")
            calls.append(Call(name=name, arguments=arguments, id=id))
        else:
            raise block.refuse("type", "'text' or 'tool_use' in a message of the assistant")
    return [ChatMessage(role="assistant", content="".join(texts), calls=tuple(calls))]


def _user(message: Fields) -> list[ChatMessage]:
    messages: list[ChatMessage] = []
    for block in _blocks(message):
        if block.values["type"] == "text":
            text = block.text("text")
            if messages and messages[-1].role == "user":
                text = messages.pop().content + text
            messages.append(ChatMessage(role="user", content=text))
        elif block.values["type"] == "tool_result":
            others = {"tool_call_id": block.text("tool_use_id")}
            content = _text(block) if "content" in block.values else ""
            messages.append(ChatMessage(role="tool", content=content, others=others))
        else:
            raise block.refuse("type", "'text' or 'tool_result' in a message of the user")
    if not messages:
        raise message.refuse("content", "at least one block")
    return messages


def read_tools(fields: Fields) -> tuple[list[Mapping[str, Any]], bool]:
    """Reads tools as the chat template describes them, and whether only one may be called at once.

    There are none where none is to be called.
    """
    tools = []
    for index, one in enumerate(fields.items("tools")):
        tool = fields_of(one, f"tools[{index}]")
        if tool.text("type", "custom") != "custom":
            raise tool.refuse("type", "'custom': tools of the client")
        function = {
            "name": tool.text("name"),
            "description": tool.text("description", ""),
            "parameters": tool.inner("input_schema").values,
        }
        tools.append({"type": "function", "function": function})
    choice = fields.inner("tool_choice")
    if choice.text("type", "auto") not in ("auto", "none"):
        raise choice.refuse("type", "'auto' or 'none'; this server cannot make a model call a tool")
    has_one_call = choice.flag("disable_parallel_tool_use")
    return [] if choice.text("type", "auto") == "none" else list(tools), has_one_call


class MessageWriter(Writer):
    """Writes an answer for a client that asked in this dialect."""

    def finished(self) -> dict[str, Any]:
        """The whole answer."""
        [sample] = self.answer.samples
        piece = joined(sample.pieces)
        reply, _ = self.message(sample)
        content: list[dict[str, Any]] = []
        if reply.content or not reply.calls:
            content.append({"type": "text", "text": reply.content})
        for number, call in enumerate(reply.calls):
            name = f"toolu_{self.answer.id[:16]}_{number}"
            content.append(
                {"type": "tool_use", "id": name, "name": call.name, "input": call.arguments}
            )
        # The string that stopped the answer stands behind its text.
        data = b"".join(self.chats.tokenizer.vocab_bytes[id] for id in piece.token_ids)
        behind = data[piece.text_bytes :]
        stops = self.answer.question.stops
        stop = next((one for one in stops if behind.startswith(one.encode())), None)
        reason = "end_turn" if stop is None else "stop_sequence"
        if piece.end != STOP:
            reason, stop = "max_tokens", None
        elif reply.calls:
            reason = "tool_use"
        ended = {"content": content, "stop_reason": reason, "stop_sequence": stop}
        whole = {**self._begun(sample), **ended}
        whole["usage"]["output_tokens"] = len(piece.token_ids)
        if self.shown.has_ids:
            whole["prompt_token_ids"] = list(self.answer.question.prompt_ids)
            whole["token_ids"] = list(piece.token_ids)
        if self.shown.has_logprobs:
            whole["logprobs"] = list(piece.logprobs)
        return whole

    def _begun(self, sample: Sample) -> dict[str, Any]:
        num_cached = joined(sample.pieces).num_cached
        return {
            "id": f"msg_{self.answer.id}",
            "type": "message",
            "role": "assistant",
            "model": self.shown.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {
                "input_tokens": len(self.answer.question.prompt_ids) - num_cached,
                "cache_read_input_tokens": num_cached,
                "cache_creation_input_tokens": 0,
                "output_tokens": 0,
            },
        }

    async def events(self) -> AsyncIterator[tuple[str, dict[str, Any] | str]]:
        """A stream: the message begins, its blocks, its end."""
        [sample] = self.answer.samples
        async for _ in sample.follow():
            pass
        whole = self.finished()
        start = {**whole, **self._begun(sample)}
        for event in [
            {"type": "message_start", "message": start},
            *_block_events(whole["content"]),
            {
                "type": "message_delta",
                "delta": {name: whole[name] for name in ("stop_reason", "stop_sequence")},
                "usage": {"output_tokens": whole["usage"]["output_tokens"]},
            },
            {"type": "message_stop"},
        ]:
            yield event["type"], event


def _block_events(content: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Events of blocks, each in one piece."""
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
