"""Prompts of chats, built from the token ids that a session has read and sampled.

What the model wrote is never tokenized again. Each completion is stored with its chat and all its
ids. A later chat that starts with a stored one continues from these ids, of the longest match, and
only the messages after it are rendered. Messages of the assistant match by their text without
whitespace and by their tool calls as parsed JSON. Text cannot forge the chat's structure: see
`Tokenizer.render_prompt`, which also refuses fields that the chat template drops.
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
from jaxrl.extras.serve.errors import ContextLengthError, RequestError
from jaxrl.utils.json_io import is_too_deep, number_of, parse_json
from jaxrl.utils.text import writable

CALL = "<tool_call>"
MAX_TOOLS = 64
"""Lists of tools whose template check is remembered; a check renders the template."""

Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """A tool call. Arguments are an object, or the text that could not be parsed."""

    name: str
    arguments: Any
    id: str = ""

    def to_template(self) -> dict[str, Any]:
        """Return the call for the chat template."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"type": "function", "function": function, **({"id": self.id} if self.id else {})}


@dataclass(frozen=True, kw_only=True)
class ChatMessage:
    """A message of a chat.

    Attributes:
        role: `system`, `user`, `assistant` or `tool`.
        content: Text.
        calls: Tool calls of the assistant.
        extra: All other fields of the message, such as `tool_call_id`.
    """

    role: str
    content: str
    calls: tuple[ToolCall, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def match_key(self) -> str:
        """Return a text that is equal for messages that count as the same."""
        extra = _as_doubles(self.extra)
        if self.role == "assistant":
            # Clients strip the text, or split it into thoughts and answer and put line breaks
            # around the thoughts when they send it again. Ids of calls are theirs.
            calls = [[call.name, _as_doubles(call.arguments)] for call in self.calls]
            text = "".join(self.content.split())
            return json.dumps([self.role, text, calls, extra], sort_keys=True)
        return json.dumps([self.role, self.content, extra], sort_keys=True)

    def to_template(self) -> dict[str, Any]:
        """Return the message for the chat template."""
        calls = [call.to_template() for call in self.calls]
        fields = {**self.extra, **({"tool_calls": calls} if calls else {})}
        return {"role": self.role, "content": self.content, **fields}


def parse_arguments(value: Any) -> Any:
    """Parse the arguments of a tool call; text that is no JSON stays text.

    Raises:
        ValueError: The value is neither a text nor an object.
    """
    if isinstance(value, dict):  # from programs that read calls from a data set
        return value
    if not isinstance(value, str):
        raise ValueError("Input should be a JSON text or an object")
    try:
        parsed = parse_json(value or "{}", "arguments")
    except ValueError:
        return value
    return writable_json(parsed) if _is_finite(parsed) else value


def writable_json(value: Any) -> Any:
    """Return a JSON value whose texts UTF-8 has bytes for; see `writable`."""
    if isinstance(value, str):
        return writable(value)
    if isinstance(value, list):
        return [writable_json(item) for item in value]
    if isinstance(value, dict):
        return {writable(name): writable_json(item) for name, item in value.items()}
    return value


def _is_finite(value: Any) -> bool:
    """Return True if all numbers of a JSON value are doubles, which every client can read."""
    if isinstance(value, dict):
        return all(map(_is_finite, value.values()))
    if isinstance(value, list):
        return all(map(_is_finite, value))
    return value is None or isinstance(value, str | bool) or number_of(value) is not None


def _as_doubles(value: Any) -> Any:
    """Return a JSON value with its numbers as JavaScript clients write them: 1.0 is 1."""
    if isinstance(value, dict):
        return {name: _as_doubles(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_as_doubles(item) for item in value]
    number = number_of(value)
    return value if number is None else number + 0.0  # -0.0 is 0


def parse_reply(text: str, *, has_tools: bool) -> ChatMessage:
    """Parse what the model wrote: text, then tool calls if all of them can be read.

    Calls that a client could not send back unchanged count as text.
    """
    if has_tools:
        calls = [_sendable_call(call) for call in read_tool_calls(text).calls]
        if calls and None not in calls:
            # Calls inside of thoughts do not count, nor do tags inside of the JSON of calls.
            masked = mask_calls(text)
            start = masked.index(CALL, masked.rfind("</think>") + 1)
            return ChatMessage(
                role="assistant",
                content=text[:start].rstrip(),
                calls=tuple(call for call in calls if call is not None),
            )
    return ChatMessage(role="assistant", content=text)


def _sendable_call(call: Asked | Unreadable) -> ToolCall | None:
    """Return a call for clients; None if a client could not send it back."""
    if not isinstance(call, Asked):
        return None
    try:
        # The arguments as part of a body of `/v1/messages`, whose depth is limited.
        body = {"messages": [{"content": [{"input": call.arguments}]}]}
        if is_too_deep(json.dumps(body), body) or not _is_finite(call.arguments):
            return None
    except RecursionError:
        return None
    return ToolCall(name=writable(call.tool), arguments=writable_json(call.arguments))


class ChatHistory:
    """Token ids of the chats of all sessions, and prompts built from them. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, *, max_prompt_tokens: int, max_tokens: int = 2**24):
        """Start empty.

        Args:
            tokenizer: Tokenizer with the chat template.
            max_prompt_tokens: Limit on a prompt.
            max_tokens: Limit on all stored ids; the least recently used chats go first.
        """
        self.tokenizer, self._max_prompt_tokens = tokenizer, max_prompt_tokens
        self._longest_token = max(map(len, tokenizer.vocab_bytes))
        self._max_tokens, self._num_tokens = max_tokens, 0
        self._stored: OrderedDict[bytes, np.ndarray] = OrderedDict()
        self._checked_tools: set[str] = set()
        self._lock = threading.Lock()

    def build_prompt(
        self, session: str, messages: Sequence[ChatMessage], tools: Tools
    ) -> list[int]:
        """Return the ids up to the start of the model's next message.

        Raises:
            RequestError: The chat template refuses the chat or ignores the tools, or the prompt is
                too long.
        """
        self._check_length(messages, tools)
        chat = [message.to_template() for message in messages]
        try:
            check_result_order(chat)
            self._check_tools(tools)
            stored, rest = self._longest_match(session, messages, tools)
            if stored is not None:
                new = self._render_after(stored, rest, tools)
                if new is not None:
                    return [*stored.tolist(), *new]
            return self.tokenizer.render_prompt(chat, tools, has_default_system=True)
        except ValueError as error:
            raise RequestError(400, f"{error}", param="messages") from error

    def store(
        self,
        session: str,
        messages: Sequence[ChatMessage],
        tools: Tools,
        token_ids: Sequence[int],
    ) -> None:
        """Store the ids of a chat that ends with the model's message."""
        *_, digest = _digests(session, messages, tools)
        with self._lock:
            self._drop(digest)
            self._stored[digest] = np.array(token_ids, np.int32)
            self._num_tokens += len(token_ids)
            while self._num_tokens > self._max_tokens and len(self._stored) > 1:
                self._drop(next(iter(self._stored)))

    def _drop(self, digest: bytes) -> None:
        if (ids := self._stored.pop(digest, None)) is not None:
            self._num_tokens -= len(ids)

    def _check_length(self, messages: Sequence[ChatMessage], tools: Tools) -> None:
        """Refuse text that cannot fit before spending minutes on its tokens.

        A token has a known longest text, and each message takes at least one token.
        """
        num_bytes = len(_compact_json(list(tools)))
        for message in messages:
            num_bytes += len(message.content.encode())
            arguments = [call.arguments for call in message.calls]
            if fields := [*message.extra.values(), *arguments]:
                num_bytes += len(_compact_json(fields))
        least = max(num_bytes // self._longest_token, len(messages))
        if least > self._max_prompt_tokens:
            raise ContextLengthError(least, self._max_prompt_tokens + 1)

    def _longest_match(
        self, session: str, messages: Sequence[ChatMessage], tools: Tools
    ) -> tuple[np.ndarray | None, Sequence[ChatMessage]]:
        """Return the ids of the longest stored chat that this one starts with, and the rest."""
        digests = _digests(session, messages, tools)
        with self._lock:
            for count in range(len(messages), 0, -1):
                if digests[count - 1] in self._stored:
                    self._stored.move_to_end(digests[count - 1])
                    return self._stored[digests[count - 1]], messages[count:]
        return None, messages

    def _render_after(
        self, stored: np.ndarray, rest: Sequence[ChatMessage], tools: Tools
    ) -> list[int] | None:
        """Return the ids that the template writes after the model's message.

        They are taken from a short chat, from the end of its assistant message on, so that nothing
        depends on how the template writes earlier messages. None if the template refuses the short
        chat or writes no id that ends a message there.
        """
        chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
        chat += [message.to_template() for message in rest]
        try:
            ids = self.tokenizer.render_prompt(chat, tools, behind=2)
        except ValueError:
            return None
        eos_ids = self.tokenizer.eos_ids
        if not ids or ids[0] not in eos_ids:
            return None
        # Leave out the end of the message if the model has sampled it.
        return ids[int(stored[-1]) in eos_ids :]

    def _check_tools(self, tools: Tools) -> None:
        """Refuse tools that the template ignores, or whose calls could not be parsed."""
        key = json.dumps(list(tools), sort_keys=True)
        if not tools or key in self._checked_tools:
            return
        ids = self.tokenizer.render_prompt([{"role": "user", "content": "?"}], tools)
        if CALL not in self.tokenizer.decode(ids):
            raise ValueError(
                f"the chat template does not write tool calls as {CALL}, the only format that "
                "this server parses; leave tools out."
            )
        if len(self._checked_tools) > MAX_TOOLS:
            self._checked_tools.clear()
        self._checked_tools.add(key)


def _compact_json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def _digests(session: str, messages: Sequence[ChatMessage], tools: Tools) -> list[bytes]:
    """Return a digest of each prefix of a chat that has at least one message."""
    state = hashlib.sha256(json.dumps([session, list(tools)], sort_keys=True).encode())
    digests = []
    for message in messages:
        text = message.match_key.encode()
        state.update(len(text).to_bytes(8, "big") + text)
        digests.append(state.digest())
    return digests
