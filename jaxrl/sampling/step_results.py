"""Validation of environment results: types, and values that JSON can represent."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

from jaxrl.envs.base import CallRecord, Observation, Outcome, Reward, StepResult, ToolResults
from jaxrl.envs.images import Picture
from jaxrl.utils.text import MAX_ERROR_CHARS, replace_surrogates


def make_failed_step(reason: str) -> StepResult:
    """Return a step result that ends the episode with an environment error."""
    return StepResult(
        outcome=Outcome.ENVIRONMENT_ERROR, error=replace_surrogates(reason)[:MAX_ERROR_CHARS]
    )


_OPTIONAL_STR = str | None
_STEP_RESULT_TYPES: Mapping[str, Any] = {
    "observation": Observation | ToolResults | None,
    "outcome": Outcome | None,
    "tool_call": _OPTIONAL_STR,
    "tool": _OPTIONAL_STR,
    "latency_s": Real,
    "error": _OPTIONAL_STR,
    "records": tuple,
}
_OBSERVATION_TYPES = {"prefix": str, "body": str, "suffix": str, "images": tuple}
_RECORD_TYPES = {"call": str, "error": _OPTIONAL_STR, "result_index": int}
_REWARD_TYPES = {"parts": Mapping, "turn_parts": Mapping, "final_answer": str}


def validate_step_result(reply: Any) -> StepResult:
    """Return a valid reply with JSON-safe values, or a failed step for an invalid reply."""
    try:
        _check_types("step", reply, StepResult, _STEP_RESULT_TYPES)
        _check_observation(reply.observation)
        if not math.isfinite(latency_s := float(reply.latency_s)):
            raise ValueError(f"StepResult.latency_s is {latency_s}; expected a finite number")
        for record in reply.records:
            _check_types("step", record, CallRecord, _RECORD_TYPES)
    except (TypeError, ValueError, OverflowError) as error:
        return make_failed_step(str(error))
    error = reply.error
    if reply.outcome == Outcome.ENVIRONMENT_ERROR:
        error = error or "the environment gave no reason"
    return dataclasses.replace(
        reply,
        observation=reply.observation and _sanitize_observation(reply.observation),
        tool_call=reply.tool_call and replace_surrogates(reply.tool_call),
        tool=reply.tool and replace_surrogates(reply.tool),
        latency_s=latency_s,
        error=error and replace_surrogates(error)[:MAX_ERROR_CHARS],
        records=reply.records and tuple(map(sanitize_record, reply.records)),
    )


def sanitize_record(record: CallRecord) -> CallRecord:
    """Return a record with all text that JSON cannot represent replaced."""
    error = record.error and replace_surrogates(record.error)[:MAX_ERROR_CHARS]
    return dataclasses.replace(record, call=replace_surrogates(record.call), error=error)


def _check_observation(observation: Observation | ToolResults | None) -> None:
    if isinstance(observation, Observation):
        _check_types("step", observation, Observation, _OBSERVATION_TYPES)
    elif observation is not None:
        _check_types("step", observation, ToolResults, {"bodies": tuple})
        if not observation.bodies or not all(isinstance(body, str) for body in observation.bodies):
            raise TypeError(f"ToolResults.bodies is {observation.bodies!r:.100}; expected strings")
        if len(observation.images_per_body) != len(observation.bodies):
            raise TypeError(
                "ToolResults.images and bodies differ in length; expected one entry per body"
            )
    if not all(isinstance(picture, Picture) for picture in get_images(observation)):
        raise TypeError("an observation has an image that is not a Picture (jaxrl.envs.images)")


def get_images(observation: Observation | ToolResults | None) -> list[Picture]:
    """Return the images of an observation in order."""
    if isinstance(observation, ToolResults):
        return [picture for images in observation.images for picture in images]
    return [] if observation is None else list(observation.images)


def without_images(
    observation: Observation | ToolResults | None,
) -> Observation | ToolResults | None:
    """Replace each image or video of an observation with the text `[image]` or `[video]`."""

    def append_marks(text: str, images: Sequence[Picture]) -> str:
        return "\n".join([*([text] if text else []), *(f"[{i.tag[1:-1]}]" for i in images)])

    if isinstance(observation, ToolResults):
        pairs = zip(observation.bodies, observation.images_per_body, strict=True)
        return ToolResults(bodies=tuple(append_marks(text, images) for text, images in pairs))
    if observation is None:
        return None
    new_body = append_marks(observation.body, observation.images)
    return dataclasses.replace(observation, body=new_body, images=())


def _sanitize_observation(observation: Observation | ToolResults) -> Observation | ToolResults:
    if isinstance(observation, ToolResults):
        bodies = tuple(map(replace_surrogates, observation.bodies))
        return dataclasses.replace(observation, bodies=bodies)
    return dataclasses.replace(
        observation,
        prefix=replace_surrogates(observation.prefix),
        body=replace_surrogates(observation.body),
        suffix=replace_surrogates(observation.suffix),
    )


def validate_reward(reward: Any) -> Reward:
    """Return a valid reward with plain finite numbers and JSON-safe text.

    Raises:
        TypeError, ValueError: The reward is invalid.
    """
    _check_types("score", reward, Reward, _REWARD_TYPES)
    # Report an invalid part before the total that it makes invalid.
    numbers = {**reward.parts, "total": reward.total}
    for name, value in numbers.items():
        if not (isinstance(name, str) and isinstance(value, Real) and math.isfinite(value)):
            raise ValueError(f"the reward's {name!r} is {value!r}; expected a finite number")
    return dataclasses.replace(
        reward,
        total=float(reward.total),
        parts={name: float(value) for name, value in reward.parts.items()},
        final_answer=replace_surrogates(reward.final_answer),
        is_correct=bool(reward.is_correct),
        is_abstention=bool(reward.is_abstention),
        is_well_formed=bool(reward.is_well_formed),
    )


def _check_types(method: str, result: Any, expected: type, fields: Mapping[str, Any]) -> None:
    """Raise a TypeError if `result` is not an `expected`, or if a field has the wrong type."""
    name = expected.__name__
    if not isinstance(result, expected):
        raise TypeError(f"{method} returned {type(result).__name__}; expected {name}")
    for field_name, kind in fields.items():
        value = getattr(result, field_name)
        if not isinstance(value, kind):
            shown = getattr(kind, "__name__", kind)
            raise TypeError(f"{name}.{field_name} is {value!r:.100}; expected {shown}")


def check_chat(messages: Iterable[Any]) -> None:
    """Raise a KeyError or TypeError unless each message's role and content are text."""
    for message in messages:
        texts = [message["role"], message["content"]]
        if not all(isinstance(text, str) for text in texts):
            raise TypeError(f"a message is {message!r:.100}; expected text for role and content")
