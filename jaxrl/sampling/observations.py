"""Token ids of what the environment says, encoded once and cut to fit inside its tags."""

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
    room: int | None = None,
    image_tokens: Sequence[int] = (),
) -> tuple[list[int], str]:
    """Ids of an observation whose body is cut to fit inside its tags, and its text as inserted.

    Args:
        tokenizer: with the chat template, which writes images.
        observation: as it came.
        max_body_tokens: of its text.
        room: tokens of all of it; None: as many as it takes. Tags and images are written anyway.
        image_tokens: of each of its images, which stand between text and suffix.
    """
    before, after = _tag_ids(tokenizer, observation.prefix), _tag_ids(tokenizer, observation.suffix)
    images = [tokenizer.render_image(count) for count in image_tokens]
    if room is not None:
        room -= len(before) + len(after) + sum(len(ids) for ids, _ in images)
        max_body_tokens = max(min(max_body_tokens, room), 0)
    # One more than may stay: a body may be megabytes, of which no more is looked at.
    body = _first_ids(tokenizer, observation.body, max_body_tokens + 1)
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


def _first_ids(tokenizer: Tokenizer, text: str, max_tokens: int) -> Sequence[int]:
    """The first ids of a text, which episodes of a group often find alike: once for all of them."""
    if len(text) > _MAX_KEPT:
        return tokenizer.encode_start(text, max_tokens)
    return _kept_ids(tokenizer, text, max_tokens)


_MAX_KEPT = 2**14
"""Characters of a text whose ids are kept, at most."""


@lru_cache(maxsize=512)
def _kept_ids(tokenizer: Tokenizer, text: str, max_tokens: int) -> tuple[int, ...]:
    return tuple(tokenizer.encode_start(text, max_tokens))


@lru_cache(maxsize=64)
def _tag_ids(tokenizer: Tokenizer, tag: str) -> tuple[int, ...]:
    """Ids of what stands around an observation, nearly always the same."""
    return tuple(tokenizer.encode(tag))


def encode_results(
    tokenizer: Tokenizer,
    results: ToolResults,
    *,
    tools: Sequence[Mapping[str, Any]],
    max_result_tokens: int,
    room: int | None = None,
    image_tokens: Sequence[Sequence[int]] = (),
) -> tuple[list[int], str, tuple[str, ...]]:
    """Ids and text of a turn of results as the chat template writes it, each result cut to fit.

    The last item are the results as they were cut.

    Args:
        tokenizer: with the chat template.
        results: as they came.
        tools: what the template describes in this chat.
        max_result_tokens: of each.
        room: tokens of the whole turn, which the results share from the first to the last; None:
            as many as they take. The template's own and images are written in any case.
        image_tokens: of each result those of its images; () without any.
    """
    if room is not None:
        bare, _ = tokenizer.render_results([""] * len(results.bodies), tools, image_tokens)
        room -= len(bare)
    shown = []
    for body in results.bodies:
        limit = max_result_tokens if room is None else max(min(max_result_tokens, room), 0)
        ids = _first_ids(tokenizer, body, limit + 1)
        shown.append(body if len(ids) <= limit else tokenizer.decode(ids[:limit]))
        room = None if room is None else room - min(len(ids), limit)
    return *tokenizer.render_results(shown, tools, image_tokens), tuple(shown)


def omitted(
    tokenizer: Tokenizer,
    observation: Observation | ToolResults | None,
    tools: Sequence[Mapping[str, Any]] = (),
) -> list[int]:
    """Ids of an observation whose body is left out of a later context."""
    if observation is None:
        return []
    if isinstance(observation, ToolResults):
        return tokenizer.render_results([OMITTED] * len(observation.bodies), tools)[0]
    parts = observation.prefix, OMITTED, observation.suffix
    return [token for part in parts for token in tokenizer.encode(part)]
