"""Build chat prompts from the token ids of a session's earlier prompts and completions.

The model's text is never tokenized again. Each completion is stored with its chat and all token
ids. A later chat reuses the ids of its longest stored prefix; only the messages after the prefix
are rendered. Assistant messages match if their text without whitespace and their parsed tool calls
are equal. Text in messages cannot forge special tokens, and fields that the chat template drops
are rejected; see `Tokenizer.render_prompt`.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from cachetools import LRUCache

from jaxrl.data.chat_template import check_result_order
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.envs.protocol import MalformedCall, mask_call_arguments, parse_tool_calls
from jaxrl.extras.serve.errors import ContextLengthError, RequestError
from jaxrl.utils.json_io import parse_json, to_finite_float
from jaxrl.utils.text import replace_surrogates

CALL_TAG = "<tool_call>"

Tools = Sequence[Mapping[str, Any]]


ChatMessage = dict[str, Any]
"""Message in the chat template's format.

`role` is `system`, `user`, `assistant` or `tool`, and `content` is text. A message without calls
has no `tool_calls`. Other fields, such as `tool_call_id`, come from the client.
"""


def make_tool_call(name: str, arguments: Any, id: str = "") -> dict[str, Any]:
    """Return a tool call in the chat template's format.

    The arguments are an object, or a text if they could not be parsed.
    """
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {**call, "id": id} if id else call


def compute_match_key(message: ChatMessage) -> str:
    """Return a key that is equal for messages that match."""
    message = map_json(_convert_to_double, message)
    if message["role"] == "assistant":
        # A client that returns the text may strip it, or separate the thoughts from it by line
        # breaks. Clients also choose the ids of calls.
        message["content"] = "".join(message["content"].split())
        message["tool_calls"] = [call["function"] for call in message.get("tool_calls", ())]
    return json.dumps(message, sort_keys=True)


def parse_arguments(value: Any) -> Any:
    """Parse the arguments of a tool call. Text that is not JSON is returned unchanged.

    Raises:
        ValueError: The value is neither text nor an object.
    """
    if isinstance(value, dict):  # from clients that read calls from a dataset
        return value
    if not isinstance(value, str):
        raise ValueError("Input should be a JSON text or an object")
    try:
        return map_json(sanitize_scalar, parse_json(value or "{}", "arguments"))
    except ValueError:
        return value


def map_json(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply a function to all keys and scalars in a JSON value."""
    if isinstance(value, dict):
        return {function(name): map_json(function, item) for name, item in value.items()}
    if isinstance(value, list):
        return [map_json(function, item) for item in value]
    return function(value)


def sanitize_scalar(scalar: Any) -> Any:
    """Replace lone surrogates in a JSON scalar, and check that a number fits in a double.

    Raises:
        ValueError: The number does not fit in a double.
    """
    if isinstance(scalar, str):
        return replace_surrogates(scalar)
    is_number = isinstance(scalar, int | float) and not isinstance(scalar, bool)
    if is_number and to_finite_float(scalar) is None:
        raise ValueError("a number does not fit in a double; expected a smaller number.")
    return scalar


def _convert_to_double(scalar: Any) -> Any:
    """Convert a number to a double, since JavaScript clients write 1.0 as 1."""
    number = to_finite_float(scalar)
    return scalar if number is None else number + 0.0  # -0.0 is 0


def parse_reply(text: str, tools: Tools) -> ChatMessage:
    """Parse a completion into text and tool calls.

    Without tools, calls are left as text. All calls are also left as text if any call cannot be
    parsed or contains a number that JSON clients cannot represent.
    """
    plain: ChatMessage = {"role": "assistant", "content": text}
    parsed = parse_tool_calls(text).calls if tools else ()
    if not parsed:
        return plain
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}
    calls = []
    for call in parsed:
        if isinstance(call, MalformedCall):
            return plain
        try:
            arguments = call.parse_arguments(schemas.get(call.tool) or {})
            arguments = map_json(sanitize_scalar, arguments)
        except (ValueError, RecursionError):
            return plain
        calls.append(make_tool_call(replace_surrogates(call.tool), arguments))
    # Ignore calls inside thoughts, and tags inside the JSON of calls.
    masked = mask_call_arguments(text)
    start = masked.index(CALL_TAG, masked.rfind("</think>") + 1)
    return {"role": "assistant", "content": text[:start].rstrip(), "tool_calls": calls}


class ChatHistory:
    """Store of all sessions' chats and their token ids. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, *, max_prompt_tokens: int, max_tokens: int = 2**24):
        """Create a history without chats.

        Args:
            tokenizer: Tokenizer with the chat template.
            max_prompt_tokens: Maximum length of a prompt, in tokens.
            max_tokens: Maximum number of stored ids. The least recently used chats are evicted.
        """
        self._tokenizer, self._max_prompt_tokens = tokenizer, max_prompt_tokens
        self._longest_token = max(map(len, tokenizer.vocab_bytes))
        self._ids_by_digest: LRUCache[bytes, np.ndarray] = LRUCache(max_tokens, getsizeof=len)
        self._lock = threading.Lock()
        self._writes_calls: bool | None = None  # None until a request has tools

    def build_prompt(
        self, session: str, messages: Sequence[ChatMessage], tools: Tools
    ) -> list[int]:
        """Build the token ids of a chat, up to the start of the model's next message.

        Raises:
            RequestError: The chat template rejects the chat or ignores the tools, or the prompt is
                too long.
        """
        self._check_length(messages, tools)
        try:
            check_result_order(messages)
            if tools:
                self._check_template(tools)
            stored_ids, new_messages = self._find_longest_match(session, messages, tools)
            if stored_ids is not None:
                new = self._render_suffix(stored_ids, new_messages, tools)
                if new is not None:
                    return [*stored_ids.tolist(), *new]
            return self._tokenizer.render_prompt(messages, tools, has_default_system=True)
        except ValueError as error:
            raise RequestError(400, f"{error}", param="messages") from error

    def store(
        self,
        session: str,
        messages: Sequence[ChatMessage],
        tools: Tools,
        token_ids: Sequence[int],
    ) -> None:
        """Store the token ids of a chat that ends with the model's message."""
        *_, digest = _compute_prefix_digests(session, messages, tools)
        with self._lock:
            self._ids_by_digest[digest] = np.array(token_ids, np.int32)

    def _check_length(self, messages: Sequence[ChatMessage], tools: Tools) -> None:
        """Reject text that is certainly too long, because tokenizing it could take minutes.

        Tokens have a known maximum length in bytes, and each message takes at least one token.
        """
        fields: list[Any] = list(tools)
        num_bytes = 0
        for message in messages:
            num_bytes += len(message["content"].encode())
            fields += [value for name, value in message.items() if name != "content"]
        if fields:
            num_bytes += len(json.dumps(fields, ensure_ascii=False, separators=(",", ":")))
        min_tokens = max(num_bytes // self._longest_token, len(messages))
        if min_tokens > self._max_prompt_tokens:
            raise ContextLengthError(min_tokens, self._max_prompt_tokens + 1)

    def _find_longest_match(
        self, session: str, messages: Sequence[ChatMessage], tools: Tools
    ) -> tuple[np.ndarray | None, Sequence[ChatMessage]]:
        """Return the ids of the longest stored prefix of the chat, and the remaining messages."""
        digests = _compute_prefix_digests(session, messages, tools)
        with self._lock:
            for count in range(len(messages), 0, -1):
                if (ids := self._ids_by_digest.get(digests[count - 1])) is not None:
                    return ids, messages[count:]
        return None, messages

    def _render_suffix(
        self, stored_ids: np.ndarray, new_messages: Sequence[ChatMessage], tools: Tools
    ) -> list[int] | None:
        """Return the token ids of the messages that follow a stored chat, or None.

        The messages are rendered after a short placeholder chat, so the ids do not depend on how
        the template renders earlier messages. The result is None if the template rejects the
        placeholder chat or does not end its assistant message with an end-of-sequence id.
        """
        chat: list[ChatMessage] = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": "!"},
            *new_messages,
        ]
        try:
            ids = self._tokenizer.render_prompt(chat, tools, num_skipped=2)
        except ValueError:
            return None
        eos_ids = self._tokenizer.eos_ids
        if not ids or ids[0] not in eos_ids:
            return None
        # Skip the end-of-sequence id if the model sampled it.
        return ids[int(stored_ids[-1]) in eos_ids :]

    def _check_template(self, tools: Tools) -> None:
        """Raise a ValueError if the template ignores tools or uses a different call format."""
        if self._writes_calls is None:
            ids = self._tokenizer.render_prompt([{"role": "user", "content": "?"}], tools)
            self._writes_calls = CALL_TAG in self._tokenizer.decode(ids)
        if not self._writes_calls:
            raise ValueError(
                f"the chat template does not write tool calls as {CALL_TAG}, the only format that "
                "this server parses; leave tools out."
            )


def _compute_prefix_digests(
    session: str, messages: Sequence[ChatMessage], tools: Tools
) -> list[bytes]:
    """Return the digest of each non-empty prefix of a chat, shortest first."""
    hasher = hashlib.sha256(json.dumps([session, list(tools)], sort_keys=True).encode())
    digests = []
    for message in messages:
        text = compute_match_key(message).encode()
        hasher.update(len(text).to_bytes(8, "big") + text)
        digests.append(hasher.digest())
    return digests
