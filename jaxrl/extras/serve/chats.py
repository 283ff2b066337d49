"""Chats as prompts: built from the ids that a session has read and sampled, or rendered anew.

What a model wrote is never tokenised again. Each answer is kept with its chat and all its ids; a
later chat that begins with that one (messages of the assistant are compared by their content and
their tool calls, as JSON of doubles) goes on from these ids, of the longest that fits, and only
what stands behind is rendered. Texts cannot forge the chat: see `Tokenizer.render_prompt`. What the
chat template leaves out of a message is refused there.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxrl.data.chat_template import check_result_order
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.envs.protocol import Asked, Unreadable, mask_calls, read_tool_calls
from jaxrl.extras.serve.fields import (
    Fields,
    RefusedError,
    TooLongError,
    fields_of,
    shown,
    writable_json,
)
from jaxrl.utils.json_io import is_too_deep, number_of, parse_json
from jaxrl.utils.text import writable

ROLES = ("system", "developer", "user", "assistant", "tool")
TEXT_FIELDS = ("type", "text", "cache_control", "annotations", "citations", "logprobs")
"""Fields of a text in a list of parts or blocks; beside the text, none changes what it says."""

CALL = "<tool_call>"
MAX_TOOLS = 64
"""Lists of tools that are known to be described; to find out costs a rendering of the template."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """A call of a tool."""

    name: str
    arguments: Any  # an object, or the text that is none
    id: str = ""  # "" where the client gives none

    @property
    def rendered(self) -> dict[str, Any]:
        """The call for the chat template."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"type": "function", "function": function, **({"id": self.id} if self.id else {})}


@dataclass(frozen=True, kw_only=True)
class ChatMessage:
    """A message of a chat.

    Attributes:
        role: out of `ROLES`.
        content: text.
        calls: of tools, in a message of the assistant.
        others: all other fields that are given, such as `tool_call_id`.
    """

    role: str
    content: str
    calls: tuple[Call, ...] = ()
    others: Mapping[str, Any] = field(default_factory=dict)

    @property
    def compared(self) -> str:
        """Text that is equal for messages that count as the same."""
        calls = [[call.name, _as_doubles(call.arguments)] for call in self.calls]
        others = _as_doubles(self.others)
        if self.role == "assistant":
            # Its clients keep the calls' ids. They strip the text, or take it apart into thoughts
            # and what is said, and put line breaks around the thoughts when they write it again.
            text = "".join(self.content.split())
            return json.dumps([self.role, text, calls, others], sort_keys=True)
        return json.dumps([self.role, self.content, others], sort_keys=True)

    @property
    def rendered(self) -> dict[str, Any]:
        """The message for the chat template."""
        calls = [call.rendered for call in self.calls]
        fields = {**self.others, **({"tool_calls": calls} if calls else {})}
        return {"role": self.role, "content": self.content, **fields}


def read_messages(values: Sequence[Any]) -> list[ChatMessage]:
    """Messages as OpenAI's chats have them.

    Raises:
        RefusedError: names what is wrong.
    """
    if not values:
        raise RefusedError(400, "messages is empty; expected at least one.", param="messages")
    return [_message(value, f"messages[{index}]") for index, value in enumerate(values)]


def _message(value: Any, place: str) -> ChatMessage:
    fields = fields_of(value, place)
    role = fields.text("role")
    if role not in ROLES:
        raise fields.refuse("role", f"one of {', '.join(ROLES)}")
    calls = []
    for index, one in enumerate(fields.items("tool_calls")):
        call = fields_of(one, f"{place}.tool_calls[{index}]")
        function = call.inner("function")
        check_known(call, ("id", "type", "index", "function"))
        check_known(function, ("name", "arguments"))
        given = function.values.get("arguments")
        # OpenAI's clients send text; objects come from programs that read them from a data set.
        arguments = given if isinstance(given, dict) else _parsed(function.text("arguments", ""))
        calls.append(Call(name=function.text("name"), arguments=arguments, id=call.text("id", "")))
    content = _content(fields)
    if role != "assistant" and "content" not in fields.values:
        raise fields.refuse("content", "a text, or a list of parts of the type text")
    if calls and role != "assistant":
        raise fields.refuse("tool_calls", "calls in messages of the assistant alone")
    for name in ("name", "tool_call_id"):
        fields.text(name, "")
    known = ("role", "content", "tool_calls")
    others = {name: value for name, value in fields.values.items() if name not in known}
    role = "system" if role == "developer" else role
    return ChatMessage(role=role, content=content, calls=tuple(calls), others=others)


def check_known(fields: Fields, known: Sequence[str]) -> None:
    """Refuses fields that nothing reads.

    Raises:
        RefusedError: names one.
    """
    for name in fields.values:
        if name not in known:
            raise fields.refuse(name, f"no fields but {', '.join(known)}")


def _content(fields: Fields) -> str:
    value = fields.values.get("content", "")
    if isinstance(value, str):
        return fields.text("content", "")
    texts = []
    for index, one in enumerate(fields.items("content")):
        part = fields_of(one, f"{fields.place}.content[{index}]")
        if (kind := part.text("type", "text")) not in ("text", "input_text", "output_text"):
            raise RefusedError(
                400,
                f"{part.place} is of the type {shown(kind)}; expected text, which is all that this "
                "server reads.",
                param=part.place,
            )
        check_known(part, TEXT_FIELDS)
        texts.append(part.text("text"))
    return "".join(texts)


def _parsed(text: str) -> Any:
    """Arguments of a call as JSON; the text itself where they are none."""
    try:
        value = parse_json(text or "{}", "arguments")
    except ValueError:
        return text
    return writable_json(value) if _is_finite(value) else text


def _is_finite(value: Any) -> bool:
    """Return True if all numbers of a JSON value are doubles, which every client can read."""
    if isinstance(value, dict):
        return all(map(_is_finite, value.values()))
    if isinstance(value, list):
        return all(map(_is_finite, value))
    return value is None or isinstance(value, str | bool) or number_of(value) is not None


def _as_doubles(value: Any) -> Any:
    """A JSON value with its numbers as JavaScript's clients read and write them: 1.0 is 1."""
    if isinstance(value, dict):
        return {name: _as_doubles(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_as_doubles(one) for one in value]
    number = number_of(value)
    return value if number is None else number + 0.0  # -0.0 is 0


def read_reply(text: str, *, has_tools: bool) -> ChatMessage:
    """The message that a model wrote: text before its calls, and these where all can be read.

    Calls that a client could not send back, or not as they are, count as text.
    """
    if has_tools:
        calls = [_readable(one) for one in read_tool_calls(text).calls]
        if calls and None not in calls:
            # A call among the thoughts is none, and tags in the JSON of calls are none.
            masked = mask_calls(text)
            start = masked.index(CALL, masked.rfind("</think>") + 1)
            return ChatMessage(
                role="assistant",
                content=text[:start].rstrip(),
                calls=tuple(one for one in calls if one is not None),
            )
    return ChatMessage(role="assistant", content=text)


def _readable(call: Asked | Unreadable) -> Call | None:
    """A call as clients are told of it; None where it could not be read back."""
    if not isinstance(call, Asked):
        return None
    try:
        # As it stands in a body of `/v1/messages`, which is read as deep as this.
        sent = {"messages": [{"content": [{"input": call.arguments}]}]}
        if is_too_deep(json.dumps(sent), sent) or not _is_finite(call.arguments):
            return None
    except RecursionError:
        return None
    return Call(name=writable(call.tool), arguments=writable_json(call.arguments))


class Chats:
    """Chats of all sessions, by what they hold, and prompts made of them.

    Several threads may ask at once.
    """

    def __init__(self, tokenizer: Tokenizer, *, max_prompt_tokens: int, max_tokens: int = 2**24):
        """Keeps none yet.

        Args:
            tokenizer: with the chat template.
            max_prompt_tokens: of any prompt.
            max_tokens: that are kept of all sessions; the chats used least recently go first.
        """
        self.tokenizer, self._max_prompt_tokens = tokenizer, max_prompt_tokens
        self._longest_token = max(map(len, tokenizer.vocab_bytes))
        self._max_tokens, self._num_tokens = max_tokens, 0
        self._kept: OrderedDict[bytes, np.ndarray] = OrderedDict()
        self._tools: set[str] = set()
        self._lock = threading.Lock()

    def prompt(
        self, session: str, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]]
    ) -> list[int]:
        """Ids up to where the model's next message begins.

        Raises:
            RefusedError: the chat template refuses the chat, or describes no tools, or the texts
                cannot fit.
        """
        # Refuse texts that cannot fit, before minutes go to them: a token holds so many bytes at
        # most, and each message takes at least one.
        described = json.dumps(list(tools), ensure_ascii=False, separators=(",", ":"))
        texts = [described]
        for message in messages:
            arguments = [call.arguments for call in message.calls]
            fields = [*message.others.values(), *arguments]
            written = json.dumps(fields, ensure_ascii=False, separators=(",", ":"))
            texts += [message.content, written if fields else ""]
        least = max(sum(len(text.encode()) for text in texts) // self._longest_token, len(messages))
        if least > self._max_prompt_tokens:
            raise TooLongError(least, self._max_prompt_tokens + 1)
        chat = [message.rendered for message in messages]
        try:
            check_result_order(chat)
            self._check_tools(tools)
            with self._lock:  # not while a template is rendered: the event loop waits here too
                stored, rest = self._stored(session, messages, tools)
            if stored is not None and (behind := self._behind(stored, rest, tools)) is not None:
                return [*stored.tolist(), *behind]
            return self.tokenizer.render_prompt(chat, tools, has_default_system=True)
        except ValueError as error:
            raise RefusedError(400, f"{error}", param="messages") from error

    def keep(
        self,
        session: str,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]],
        token_ids: Sequence[int],
    ) -> None:
        """Keeps the ids of a chat that ends with the model's message."""
        *_, digest = _digests(session, messages, tools)
        with self._lock:
            self._forget(digest)
            self._kept[digest] = np.array(token_ids, np.int32)
            self._num_tokens += len(token_ids)
            while self._num_tokens > self._max_tokens and len(self._kept) > 1:
                self._forget(next(iter(self._kept)))

    def _forget(self, digest: bytes) -> None:
        if (ids := self._kept.pop(digest, None)) is not None:
            self._num_tokens -= len(ids)

    def _stored(
        self, session: str, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]]
    ) -> tuple[np.ndarray | None, Sequence[ChatMessage]]:
        """Ids of the longest chat that was kept and that this one begins with, and what is left."""
        digests = _digests(session, messages, tools)
        for count in range(len(messages), 0, -1):
            if digests[count - 1] in self._kept:
                self._kept.move_to_end(digests[count - 1])
                return self._kept[digests[count - 1]], messages[count:]
        return None, messages

    def _behind(
        self,
        stored: np.ndarray,
        rest: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]],
    ) -> list[int] | None:
        """Ids that the template writes behind the model's message, with its end if it has none.

        Taken from a small chat, behind the end of its message of the assistant: what the template
        makes of the messages before cannot matter. None where it refuses that chat, or where no id
        that ends a message stands there.
        """
        chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
        chat += [one.rendered for one in rest]
        try:
            ids = self.tokenizer.render_prompt(chat, tools, behind=2)
        except ValueError:
            return None
        eos_ids = self.tokenizer.eos_ids
        if not ids or ids[0] not in eos_ids:
            return None
        # The end of the message is left out where the model has written it.
        return ids[int(stored[-1]) in eos_ids :]

    def _check_tools(self, tools: Sequence[Mapping[str, Any]]) -> None:
        """Refuses tools of which the template says nothing, or whose calls are not read back."""
        key = json.dumps(list(tools), sort_keys=True)
        if not tools or key in self._tools:
            return
        ids = self.tokenizer.render_prompt([{"role": "user", "content": "?"}], tools)
        if CALL not in self.tokenizer.decode(ids):
            raise ValueError(
                f"tools: the chat template does not write calls as {CALL}, the only ones that are "
                "read back; leave tools out."
            )
        if len(self._tools) > MAX_TOOLS:
            self._tools.clear()
        self._tools.add(key)


def _digests(
    session: str, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]]
) -> list[bytes]:
    """A digest of each beginning of a chat, of one message and more."""
    state = hashlib.sha256(json.dumps([session, list(tools)], sort_keys=True).encode())
    digests = []
    for message in messages:
        text = message.compared.encode()
        state.update(len(text).to_bytes(8, "big") + text)
        digests.append(state.digest())
    return digests
