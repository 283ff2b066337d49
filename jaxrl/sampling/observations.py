"""Tokenize environment output: encode it once, and truncate it inside its tags."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from jaxrl.data.tokenizer import Tokenizer
from jaxrl.envs.base import Observation, ToolResults
from jaxrl.sampling.contexts import OMITTED


def encode_observation(
    tokenizer: Tokenizer,
    observation: Observation,
    *,
    max_body_tokens: int,
    max_tokens: int | None = None,
    image_tokens: Sequence[int] = (),
) -> tuple[list[int], str]:
    """Encode an observation, with its body truncated to fit; return its ids and text.

    Args:
        tokenizer: Tokenizer with the chat template, which renders images.
        observation: Observation from the environment.
        max_body_tokens: Maximum length of the body in tokens.
        max_tokens: Maximum length of the complete observation in tokens; None for no limit. Tags
            and images are never truncated.
        image_tokens: Number of tokens of each image. Images go between the body and the suffix.
    """
    before = _encode_tag(tokenizer, observation.prefix)
    after = _encode_tag(tokenizer, observation.suffix)
    images = [tokenizer.render_image(count) for count in image_tokens]
    if max_tokens is not None:
        max_tokens -= len(before) + len(after) + sum(len(ids) for ids, _ in images)
        max_body_tokens = max(min(max_body_tokens, max_tokens), 0)
    # Encode one token more than the limit: a body may be megabytes long.
    body = _encode_prefix(tokenizer, observation.body, max_body_tokens + 1)
    shown = observation.body
    if len(body) > max_body_tokens:
        body = body[:max_body_tokens]
        shown = tokenizer.decode(body)
    return [
        *before,
        *body,
        *(id for ids, _ in images for id in ids),
        *after,
    ], "".join([observation.prefix, shown, *(text for _, text in images), observation.suffix])


def _encode_prefix(tokenizer: Tokenizer, text: str, max_tokens: int) -> Sequence[int]:
    """Return the first `max_tokens` ids of a text, cached because groups often repeat texts."""
    if len(text) > _MAX_CACHED_CHARS:
        return tokenizer.encode_prefix(text, max_tokens)
    return _encode_and_cache(tokenizer, text, max_tokens)


_MAX_CACHED_CHARS = 2**14
"""Maximum number of characters in a cached text."""


@lru_cache(maxsize=512)
def _encode_and_cache(tokenizer: Tokenizer, text: str, max_tokens: int) -> tuple[int, ...]:
    return tuple(tokenizer.encode_prefix(text, max_tokens))


@lru_cache(maxsize=64)
def _encode_tag(tokenizer: Tokenizer, tag: str) -> tuple[int, ...]:
    """Return the ids of a tag, cached because tags rarely change."""
    return tuple(tokenizer.encode(tag))


def encode_results(
    tokenizer: Tokenizer,
    results: ToolResults,
    *,
    tools: Sequence[Mapping[str, Any]],
    max_result_tokens: int,
    max_tokens: int | None = None,
    image_tokens: Sequence[Sequence[int]] = (),
) -> tuple[list[int], str, tuple[str, ...]]:
    """Encode a turn of tool results, each truncated to fit.

    Args:
        tokenizer: Tokenizer with the chat template.
        results: Results from the environment.
        tools: Tool schemas that the template describes in this chat.
        max_result_tokens: Maximum length of each result in tokens.
        max_tokens: Maximum length of the complete turn in tokens; None for no limit. Earlier
            results take tokens first. Images and the template's text are never truncated.
        image_tokens: Number of tokens of each image of each result; () if there are none.

    Returns:
        The turn's ids, its text, and the truncated results.
    """
    if max_tokens is not None:
        template_ids, _ = tokenizer.render_results([""] * len(results.bodies), tools, image_tokens)
        max_tokens -= len(template_ids)
    shown = []
    for body in results.bodies:
        limit = (
            max_result_tokens if max_tokens is None else max(min(max_result_tokens, max_tokens), 0)
        )
        ids = _encode_prefix(tokenizer, body, limit + 1)
        shown.append(body if len(ids) <= limit else tokenizer.decode(ids[:limit]))
        max_tokens = None if max_tokens is None else max_tokens - min(len(ids), limit)
    return *tokenizer.render_results(shown, tools, image_tokens), tuple(shown)


def encode_omitted_observation(
    tokenizer: Tokenizer,
    observation: Observation | ToolResults | None,
    tools: Sequence[Mapping[str, Any]] = (),
) -> list[int]:
    """Encode an observation with `OMITTED` as the body; return the ids."""
    if observation is None:
        return []
    if isinstance(observation, ToolResults):
        return tokenizer.render_results([OMITTED] * len(observation.bodies), tools)[0]
    parts = observation.prefix, OMITTED, observation.suffix
    return [token for part in parts for token in tokenizer.encode(part)]
