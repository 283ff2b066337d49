"""Demonstrations: example episodes, encoded exactly as a rollout would encode them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import numpy as np

from jaxrl.data.chat_template import check_result_order
from jaxrl.data.readers.lines import open_jsonl
from jaxrl.data.records import parse_demonstration
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.envs.base import ToolResults
from jaxrl.envs.images import Picture, UnreadableImageError
from jaxrl.envs.protocol import SEARCH_R1, Protocol, mask_call_arguments
from jaxrl.sampling.contexts import ContextRule, TurnIds
from jaxrl.sampling.episodes import TokenLimits
from jaxrl.sampling.interfaces import ImageProcessor
from jaxrl.sampling.observations import (
    encode_observation,
    encode_omitted_observation,
    encode_results,
)
from jaxrl.types import Attachment


@dataclass(frozen=True, kw_only=True)
class Demonstration:
    """Example episode, with a loss mask over the tokens of its assistant messages."""

    token_ids: np.ndarray  # int32 [L]
    loss_mask: np.ndarray  # bool [L]
    rollout_logprobs: np.ndarray  # float32 [L], zeros because nothing was sampled
    contexts: tuple[tuple[int, int], ...] = ()  # see `Trajectory.contexts`
    pictures: tuple[Picture, ...] = ()  # images of the prompt
    processor: ImageProcessor | None = None  # preprocessor of the images
    token_arrays: Mapping[str, np.ndarray] = field(default_factory=dict)  # always empty

    @property
    def attachments(self) -> tuple[Attachment, ...]:
        """Preprocess and return the images of the prompt, without caching them.

        Raises:
            UnreadableImageError: An image is damaged.
        """
        return tuple(map(self.processor, self.pictures)) if self.processor else ()


def read_demonstrations(
    path: str,
    tokenizer: Tokenizer,
    limits: TokenLimits,
    *,
    protocol: Protocol = SEARCH_R1,
    tools: Sequence[str] = ("search",),
    chat_tools: Sequence[Mapping[str, Any]] = (),
    processor: ImageProcessor | None = None,
) -> list[Demonstration]:
    """Read a JSONL file of chats and encode them exactly as a rollout would.

    The messages before the first assistant message are the prompt. Messages with role `tool` are
    raw results, rendered by the protocol and truncated like the environment's observations. `tools`
    has the names of the tools that this run can call; `chat_tools` has the tool schemas for the
    chat template. Prompts may have images, as in tasks. `processor` preprocesses the images; it is
    None for a text-only model. The limits on total, observation and image tokens apply; an image
    limit of 0 means no limit.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: A line is malformed or too long. The message names the file and the line.
    """

    def parse_and_encode(fields: dict[str, Any], location: str) -> Demonstration:
        # Count the image tokens first: the chat template needs them.
        messages, pictures = parse_demonstration(fields, location)
        image_tokens: list[int] = []
        if pictures and processor is None:
            raise ValueError(
                f"{location} has images, but the model does not support them: its config.json has "
                "no image_token_id. Set config.model.path to a model that does, such as Qwen2.5-VL."
            )
        if processor is not None:
            try:
                image_tokens = [processor.count_tokens(picture) for picture in pictures]
            except UnreadableImageError as error:
                raise ValueError(f"{location}, of config.sft.source: {error}.") from error
        if 0 < limits.max_image_tokens < sum(image_tokens):
            raise ValueError(
                f"{location}: the demonstration's images take {sum(image_tokens)} tokens; expected "
                f"at most config.rollout.max_image_tokens={limits.max_image_tokens}. Raise it, or "
                "lower config.images.max_pixels."
            )
        demonstration = encode_demonstration(
            messages,
            tokenizer,
            limits,
            image_tokens=image_tokens,
            protocol=protocol,
            tools=tools,
            chat_tools=chat_tools,
            location=location,
        )
        if len(demonstration.token_ids) > limits.max_total_tokens:
            raise ValueError(
                f"{location}: the demonstration has {len(demonstration.token_ids)} tokens; "
                f"expected at most config.rollout.max_total_tokens={limits.max_total_tokens}."
            )
        if not pictures:
            return demonstration
        return dataclasses.replace(demonstration, pictures=pictures, processor=processor)

    reader = open_jsonl(path, "config.sft.source")
    if not len(reader):
        raise ValueError(f"config.sft.source: {path!r} contains no demonstrations; add one.")
    records = reader.read(range(len(reader)))
    return [
        parse_and_encode(fields, reader.location(index)) for index, fields in enumerate(records)
    ]


def encode_demonstration(
    messages: list[dict[str, Any]],
    tokenizer: Tokenizer,
    limits: TokenLimits,
    *,
    protocol: Protocol = SEARCH_R1,
    tools: Sequence[str] = ("search",),
    chat_tools: Sequence[Mapping[str, Any]] = (),
    image_tokens: Sequence[int] = (),
    location: str = "demonstration",
) -> Demonstration:
    """Encode a prompt, then assistant turns (trained on) and observations (masked) in order.

    If the chat template renders tool results, the model also learns to end its turns.
    `image_tokens` has the number of tokens of each image in the prompt. Observation and context
    limits apply as in a rollout.

    Raises:
        ValueError: The chat is malformed, or has text that no rollout could produce; the message
            names `location`.
    """
    roles = [message["role"] for message in messages]
    start = roles.index("assistant") if "assistant" in roles else 0
    if start == 0 or not {*roles[start:]} <= {"assistant", "tool"}:
        raise ValueError(
            f"{location}: the messages have the roles {roles}; expected a prompt, an 'assistant' "
            "message, and then only 'assistant' and 'tool' messages."
        )

    # Render the prompt, and each later message as plain text.
    try:
        prompt = tokenizer.render_prompt(messages[:start], chat_tools, image_tokens)
        check_result_order(messages)
        turns = [_flatten_message(m, tokenizer, protocol, chat_tools) for m in messages[start:]]
    except ValueError as error:
        raise ValueError(f"{location}: {error}") from error
    segments: list[Segment] = []
    num_sampled = 0  # length of the turn before an observation

    # The chat template may write the beginning of an assistant message after a prompt or results.
    response_prefix = tokenizer.get_response_prefix(chat_tools)
    turns = [
        _strip_template_prefix(response_prefix, turn, location)
        if index == 0 or (protocol.in_template and turn["role"] == "assistant")
        else turn
        for index, turn in enumerate(turns)
    ]
    messages = [*messages[:start], *turns]

    # Encode each run of assistant messages or tool results.
    for role, run in itertools.groupby(messages[start:], key=itemgetter("role")):
        contents = [message["content"] for message in run]
        if role == "assistant":
            end = tokenizer.eos_ids[:1] if protocol.in_template else ()
            segments += [([*tokenizer.encode(content), *end], None) for content in contents]
            num_sampled = sum(len(ids) for ids, _ in segments[-len(contents) :])
            continue
        max_tokens = limits.compute_context_observation_limit(len(prompt), num_sampled)
        limit = limits.max_observation_tokens
        if protocol.in_template:
            results = ToolResults(bodies=tuple(map(protocol.sanitize, contents)))
            ids, *_ = encode_results(
                tokenizer, results, tools=chat_tools, max_result_tokens=limit, max_tokens=max_tokens
            )
            segments.append((ids, encode_omitted_observation(tokenizer, results, chat_tools)))
            continue
        for content in contents:
            observation = protocol.render_observation(content)
            ids, _ = encode_observation(
                tokenizer, observation, max_body_tokens=limit, max_tokens=max_tokens
            )
            segments.append((ids, encode_omitted_observation(tokenizer, observation)))
    _check_tool_results(messages[start:], protocol, tools, location)
    return _join_segments(prompt, segments, limits.context, tokenizer, location)


Segment = tuple[Sequence[int], Sequence[int] | None]
"""Ids of a message, and ids of an observation without its body (None for the assistant)."""


def _join_segments(
    prompt: Sequence[int],
    segments: Sequence[Segment],
    contexts: ContextRule | None,
    tokenizer: Tokenizer,
    location: str,
) -> Demonstration:
    """Join a prompt and segments into as many contexts as necessary.

    Raises:
        ValueError: There is nothing to train on, a trained token is a placeholder for images or
            videos, or a turn does not fit.
    """
    written, starts, length = [(prompt, False)], [], len(prompt)  # length of the context
    turn_ids: list[TurnIds] = []
    sampled: list[int] = []

    # As in a rollout, begin the next context when a turn does not fit.
    for ids, without_body in segments:
        new_ids, num_repeated = ids, 0
        if without_body is None:
            sampled += ids
        elif contexts is not None:
            turn_ids.append(TurnIds(sampled=sampled, observation=ids, placeholder=without_body))
            sampled = []
            if not contexts.has_room(length + len(ids)):
                # -1 if even the next context has no room; the check below rejects it.
                new_ids, num_repeated = contexts.build_next_context(prompt, turn_ids) or ([], -1)
        if num_repeated:
            starts.append((sum(len(ids) for ids, _ in written), num_repeated))
            length = 0
        written.append((new_ids, without_body is None))
        length += len(new_ids)
        if contexts is not None and (num_repeated < 0 or length > contexts.max_tokens):
            raise ValueError(
                f"{location}: a turn of the demonstration does not fit in a context of "
                f"config.rollout.context.max_tokens={contexts.max_tokens}; raise it, or lower "
                "config.rollout.context.keep, turn_tokens or config.rollout.max_observation_tokens."
            )
    token_ids = np.concatenate([np.array(ids, np.int32) for ids, _ in written])
    loss_mask = np.concatenate([np.full(len(ids), is_sampled) for ids, is_sampled in written])

    # Do not train on placeholders of images and videos.
    for id in (tokenizer.image_id, tokenizer.video_id):
        if id is not None and id in token_ids[loss_mask]:
            raise ValueError(
                f"{location}: an assistant message has {tokenizer.decode([id])!r}, the "
                "placeholder of an image or a video, which a model never writes; remove it."
            )
    if not loss_mask.any():
        raise ValueError(f"{location}: all assistant messages are empty; add text to train on.")
    return Demonstration(
        token_ids=token_ids,
        loss_mask=loss_mask,
        rollout_logprobs=np.zeros(len(token_ids), np.float32),
        contexts=tuple(starts),
    )


def _flatten_message(
    message: dict[str, Any],
    tokenizer: Tokenizer,
    protocol: Protocol,
    chat_tools: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Render all fields of a message into its content.

    Raises:
        ValueError: The message has fields that the protocol cannot render.
    """
    links = ("tool_call_id", "name") if message["role"] == "tool" else ()
    fields = [
        name
        for name, value in message.items()
        if name not in ("role", "content", *links) and value not in ("", [], {})
    ]
    if not fields:
        return message
    if message["role"] != "assistant" or not protocol.in_template:
        raise ValueError(
            f"a message with the role {message['role']!r} has the field {fields[0]!r}, which the "
            f"protocol {protocol.name!r} does not render; expected all text in the content, as the "
            "model should write it. Move it there, or remove the field."
        )
    response_prefix = tokenizer.get_response_prefix(chat_tools)
    text = tokenizer.render_turn(message, chat_tools)
    return {"role": message["role"], "content": text.removeprefix(response_prefix)}


def _strip_template_prefix(
    response_prefix: str, message: dict[str, Any], location: str
) -> dict[str, Any]:
    """Return an assistant message without the text that the chat template writes before it.

    Raises:
        ValueError: That text starts a `<think>` block that the message does not close.
    """
    content, prefix = message["content"], response_prefix.strip()
    if not prefix:
        return message
    if content.lstrip().startswith(prefix):
        return {**message, "content": content.lstrip().removeprefix(prefix).lstrip()}
    if (
        prefix.endswith("<think>")
        and "</think>" not in mask_call_arguments(content).partition("<think>")[0]
    ):
        raise ValueError(
            f"{location}: the model's chat template begins every answer with {response_prefix!r}, "
            f"but {content[:40]!r} does not start with it or close the thought. Start the "
            "message with it, or try to disable it with "
            "config.prompt.chat_template_kwargs (enable_thinking)."
        )
    return message


def _check_tool_results(
    messages: list[dict[str, Any]], protocol: Protocol, tools: Sequence[str], location: str
) -> None:
    """Check that each turn has one tool result per call, as in rollouts."""
    closing_tags = tuple(f"</{tool}>" for tool in tools)
    written, num_calls = "", 0  # of the previous turn
    for role, run in itertools.groupby(messages, key=itemgetter("role")):
        contents = [message["content"] for message in run]
        if role == "tool" and len(contents) != num_calls:
            call = "<tool_call>" if protocol.in_template else " or ".join(closing_tags)
            raise ValueError(
                f"{location}: {len(contents)} messages with the role 'tool' follow {num_calls} "
                f"calls in {written[-40:]!r}; expected a result for each {call} that ends an "
                "assistant message."
            )
        if role == "assistant":
            written = contents[-1]
            if not protocol.in_template:
                num_calls = int(written.endswith(closing_tags))
                continue
            num_calls = len(protocol.read(written, tools).calls)
            if len(contents) > 1:
                raise ValueError(
                    f"{location}: two assistant messages in a row; expected one turn, or results "
                    "with the role 'tool' between them."
                )
