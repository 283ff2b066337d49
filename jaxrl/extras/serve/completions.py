"""`POST /v1/chat/completions`, as OpenAI's clients send it and vLLM extends it by ids."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxrl.extras.serve.answers import (
    MAX_CHOICES,
    Answer,
    Limits,
    Question,
    Sample,
    joined,
    read_question,
)
from jaxrl.extras.serve.chats import ChatMessage, Chats, read_messages, read_reply
from jaxrl.extras.serve.fields import Fields, RefusedError, fields_of
from jaxrl.extras.serve.texts import Text
from jaxrl.extras.serve.worker import STOP, Piece

UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "response_format": ({"type": "text"},),
    "logit_bias": ({},),
    "top_logprobs": (0,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "min_tokens": (0,),
    "best_of": (1,),
    "use_beam_search": (False,),
    "ignore_eos": (False,),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "prompt_logprobs": (0,),
    "echo": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template": (),
    "documents": ([],),
    "structured_outputs": ({},),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    "logits_processors": ([],),
}
"""Fields that would change the answer, and the values at which they do not."""

SAMPLED = {name: UNSUPPORTED[name] for name in (
    "logit_bias", "frequency_penalty", "presence_penalty", "repetition_penalty", "top_k", "min_p",
    "min_tokens", "ignore_eos", "bad_words", "allowed_token_ids", "prompt_logprobs",
    "structured_outputs", "length_penalty", "best_of", "use_beam_search",
)}  # fmt: skip
"""Unsupported fields that are about drawing, for dialects of ids."""


@dataclass(frozen=True, kw_only=True)
class Shown:
    """Parts of an answer that a client wants to see.

    Attributes:
        model: name to give back.
        session: whose chat it is.
        messages: the chat.
        tools: what the model may call.
        streams: pieces as they come.
        has_usage: a stream ends with the counts of tokens.
        has_logprobs: of each token.
        has_ids: of the prompt and of what was sampled.
        names_ids: tokens read "token_id:N" in place of their text.
        has_one_call: of the calls in an answer it wants the first alone.
    """

    model: str
    session: str
    messages: tuple[ChatMessage, ...]
    tools: tuple[Mapping[str, Any], ...]
    streams: bool
    has_usage: bool
    has_logprobs: bool
    has_ids: bool
    names_ids: bool
    has_one_call: bool


def read(
    fields: Fields,
    *,
    session: str,
    model: str,
    chats: Chats,
    limits: Limits,
    template_arguments: Mapping[str, Any],
) -> tuple[Question, Shown]:
    """Reads a body, and makes its prompt.

    Args:
        fields: of the body.
        session: whose chat it is.
        model: name of the one that answers.
        chats: of all sessions.
        limits: of the server.
        template_arguments: which the chat template is rendered with in any case.

    Raises:
        RefusedError: names what is wrong, or cannot be done.
    """
    fields.only(UNSUPPORTED)
    fields.text("model", "")
    check_template(fields, template_arguments)
    limits.check(fields.items("messages"))
    messages = read_messages(fields.items("messages"))
    tools = read_tools(fields)
    wanted = [
        fields.whole(name, 1, 1)
        for name in ("max_completion_tokens", "max_tokens")
        if name in fields.values
    ]
    count = fields.whole("n", 1, 1, MAX_CHOICES)
    prompt_ids = chats.prompt(session, messages, tools)
    question = read_question(fields, prompt_ids, limits, wanted[0] if wanted else None, count)
    shown = Shown(
        model=model,
        session=session,
        messages=tuple(messages),
        tools=tuple(tools),
        streams=fields.flag("stream"),
        has_usage=fields.inner("stream_options").flag("include_usage"),
        has_logprobs=fields.flag("logprobs"),
        has_ids=fields.flag("return_token_ids"),
        names_ids=fields.flag("return_tokens_as_token_ids"),
        has_one_call=not fields.flag("parallel_tool_calls", True),
    )
    return question, shown


def check_template(fields: Fields, own: Mapping[str, Any]) -> None:
    """Refuses arguments of the chat template that differ from the server's.

    `preserve_thinking` is taken: what a session has sampled stays as it is in any case.
    """
    given = fields.inner("chat_template_kwargs")
    given.only({name: (own[name],) if name in own else () for name in given.values
                if name != "preserve_thinking"})  # fmt: skip
    if not given.flag("preserve_thinking", True):
        raise given.refuse("preserve_thinking", "true: what was sampled stays in the prompt")


def read_tools(fields: Fields) -> list[Mapping[str, Any]]:
    """Reads the tools that the model may call; none where it is not to call any."""
    tools: list[Mapping[str, Any]] = []
    for index, one in enumerate(fields.items("tools")):
        tool = fields_of(one, f"tools[{index}]")
        if tool.text("type", "function") != "function":
            raise tool.refuse("type", "'function'")
        function = tool.inner("function")
        function.text("name")
        function.text("description", "")
        function.inner("parameters")
        tools.append(tool.values)
    choice = fields.values.get("tool_choice", "auto")
    if choice not in ("auto", "none"):
        raise RefusedError(
            400,
            "tool_choice is neither 'auto' nor 'none'; this server cannot make a model call a "
            "tool.",
            param="tool_choice",
            code="unsupported_parameter",
        )
    return [] if choice == "none" else tools


@dataclass(frozen=True, kw_only=True)
class Writer:
    """Writes an answer for a client that asked in this dialect."""

    answer: Answer
    shown: Shown
    chats: Chats

    @property
    def streams(self) -> bool:
        """True where pieces are sent as they come."""
        return self.shown.streams

    def _whole(self, kind: str) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{self.answer.id}",
            "object": kind,
            "created": self.answer.created,
            "model": self.shown.model,
        }

    def usage(self) -> dict[str, Any]:
        """Counts of tokens, of all samples."""
        ends = [joined(sample.pieces) for sample in self.answer.samples]
        num_prompt = len(self.answer.question.prompt_ids)
        num_sampled = sum(len(end.token_ids) for end in ends)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_sampled,
            "total_tokens": num_prompt + num_sampled,
            "prompt_tokens_details": {"cached_tokens": ends[0].num_cached},
        }

    def message(self, sample: Sample) -> tuple[ChatMessage, str]:
        """Reads the reply, and the reason why it ends; keeps the chat with its ids.

        A chat that goes on from one call of several is another one, which is rendered anew.
        """
        piece = joined(sample.pieces)
        text = Text(self.chats.tokenizer.vocab_bytes, ()).add(piece)
        reply = read_reply(text, has_tools=bool(self.shown.tools))
        self.chats.keep(
            self.shown.session,
            [*self.shown.messages, reply],
            self.shown.tools,
            [*self.answer.question.prompt_ids, *piece.token_ids],
        )
        if self.shown.has_one_call:
            reply = replace(reply, calls=reply.calls[:1])
        reason = "tool_calls" if reply.calls and piece.end == STOP else piece.end
        return reply, reason

    def calls(self, reply: ChatMessage, index: int) -> list[dict[str, Any]]:
        """Calls of tools as a client reads them."""
        return [
            {
                "id": f"call_{self.answer.id[:16]}_{index}_{number}",
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": json.dumps(call.arguments, ensure_ascii=False),
                },
            }
            for number, call in enumerate(reply.calls)
        ]

    def logprobs(self, piece: Piece) -> dict[str, Any]:
        """Log-probabilities of a piece's tokens."""
        content = []
        for id, logprob in zip(piece.token_ids, piece.logprobs, strict=True):
            data = self.chats.tokenizer.vocab_bytes[id]
            text = f"token_id:{id}" if self.shown.names_ids else data.decode("utf-8", "replace")
            content.append(
                {"token": text, "logprob": logprob, "bytes": list(data), "top_logprobs": []}
            )
        return {"content": content, "refusal": None}

    def finished(self) -> dict[str, Any]:
        """The whole answer."""
        choices = []
        for index, sample in enumerate(self.answer.samples):
            piece = joined(sample.pieces)
            reply, reason = self.message(sample)
            message: dict[str, Any] = {"role": "assistant", "content": reply.content}
            if reply.calls:
                message["content"] = reply.content or None
                message["tool_calls"] = self.calls(reply, index)
            choice = {
                "index": index,
                "message": message,
                "logprobs": self.logprobs(piece) if self.shown.has_logprobs else None,
                "finish_reason": reason,
            }
            if self.shown.has_ids:
                choice["token_ids"] = list(piece.token_ids)
            choices.append(choice)
        whole = {**self._whole("chat.completion"), "choices": choices, "usage": self.usage()}
        if self.shown.has_ids:
            whole["prompt_token_ids"] = list(self.answer.question.prompt_ids)
        return whole

    async def events(self) -> AsyncIterator[tuple[str, dict[str, Any] | str]]:
        """A stream: the beginnings of all samples, what comes of them, an end."""
        for chunk in self.first():
            yield "", chunk
        streams = [self.stream(index) for index in range(len(self.answer.samples))]
        async for chunk in merged(streams):
            yield "", chunk
        for chunk in self.last():
            yield "", chunk
        yield "", "[DONE]"

    def first(self) -> list[dict[str, Any]]:
        """The chunks that begin a stream."""
        chunks = [
            self._chunk(index, {"role": "assistant", "content": ""})
            for index in range(len(self.answer.samples))
        ]
        if self.shown.has_ids:
            chunks[0]["prompt_token_ids"] = list(self.answer.question.prompt_ids)
        return chunks

    def _chunk(self, index: int, delta: Mapping[str, Any], **others: Any) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "finish_reason": None, **others}
        return {**self._whole("chat.completion.chunk"), "choices": [choice]}

    async def stream(self, index: int) -> AsyncIterator[dict[str, Any]]:
        """The chunks of a sample as it grows.

        Where tools may be called the text comes at the end: only then it is known what is a call.
        """
        sample = self.answer.samples[index]
        text = Text(self.chats.tokenizer.vocab_bytes, self.answer.question.stops)
        async for piece in sample.follow():
            delta: dict[str, Any] = {}
            others: dict[str, Any] = {}
            if (new := text.add(piece)) and not self.shown.tools:
                delta["content"] = new
            if self.shown.has_logprobs:
                others["logprobs"] = self.logprobs(piece)
            if self.shown.has_ids:
                others["token_ids"] = list(piece.token_ids)
            if piece.end:
                reply, others["finish_reason"] = self.message(sample)
                if self.shown.tools and reply.content:
                    delta["content"] = reply.content
                if reply.calls:
                    calls = self.calls(reply, index)
                    delta["tool_calls"] = [{"index": i, **one} for i, one in enumerate(calls)]
            if delta or others:
                yield self._chunk(index, delta, **others)

    def last(self) -> list[dict[str, Any]]:
        """The chunks that end a stream."""
        if not self.shown.has_usage:
            return []
        usage = self.usage()
        return [{**self._whole("chat.completion.chunk"), "choices": [], "usage": usage}]


async def merged(streams: Sequence[AsyncIterator[Any]]) -> AsyncIterator[Any]:
    """Items of several streams, as they come; an error of one ends all."""
    waiting = {asyncio.ensure_future(anext(one)): one for one in streams}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=[*waiting].index):  # a set; who waits longest goes first
                stream = waiting.pop(task)
                try:
                    yield task.result()
                except StopAsyncIteration:
                    continue
                waiting[asyncio.ensure_future(anext(stream))] = stream
    finally:
        for task in waiting:
            task.cancel()
