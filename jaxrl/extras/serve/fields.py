"""Bodies of requests, read field by field: what is of another type is refused by its name."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl.utils.json_io import parse_json
from jaxrl.utils.text import writable

BAD = "invalid_request_error"

_SHORT = reprlib.Repr()
_SHORT.maxlist = _SHORT.maxdict = 20
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = 200


class RefusedError(Exception):
    """A request that is not answered.

    Attributes:
        status: of HTTP.
        param: the field that is wrong; None of none.
        code: by which programs tell refusals apart; None of the usual.
        headers: to send with it.
    """

    def __init__(
        self,
        status: int,
        text: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(text)
        self.status, self.param, self.code = status, param, code
        self.headers = dict(headers or {})

    @property
    def kind(self) -> str:
        """Type of the error as OpenAI has them."""
        kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
        kinds |= {429: "rate_limit_error", 503: "overloaded_error"}
        return kinds.get(self.status, BAD if self.status < 500 else "server_error")


class TooLongError(RefusedError):
    """A prompt that leaves no room for an answer."""

    def __init__(self, count: int, most: int):
        """Tells it as OpenAI's clients expect.

        Args:
            count: tokens of the prompt, at least.
            most: of prompt and answer.
        """
        text = (
            f"This model's maximum context length is {most} tokens. However, your prompt has "
            f"{count} tokens or more. Please reduce the length of the prompt."
        )
        super().__init__(400, text, param="messages", code="context_length_exceeded")
        self.short = f"prompt is too long: {count} tokens > {most - 1} maximum"


class Fields:
    """Fields of a JSON object; a null is a field that is not there."""

    def __init__(self, values: Mapping[str, Any], place: str = ""):
        """Takes an object; `place` is where it stands in the body."""
        self.values = {name: value for name, value in values.items() if value is not None}
        self.place = place

    def name(self, field: str) -> str:
        """The field as messages call it."""
        return f"{self.place}.{field}" if self.place else field

    def refuse(self, field: str, expected: str) -> RefusedError:
        """The error about a field: what it is and what was expected."""
        name, value = self.name(field), self.values.get(field)
        given = "missing" if value is None else f"{shown(value)}"
        return RefusedError(400, f"{name} is {given}; expected {expected}.", param=name)

    def whole(self, field: str, default: int, low: int, high: int = 2**63 - 1) -> int:
        """A whole number within bounds."""
        value = self.values.get(field, default)
        if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
            value = int(value)
        if type(value) is not int or not low <= value <= high:
            raise self.refuse(field, f"a whole number from {low} to {high}")
        return value

    def number(self, field: str, default: float, low: float, high: float) -> float:
        """A finite number within bounds."""
        value = self.values.get(field, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not low <= value <= high or not math.isfinite(value):
            raise self.refuse(field, f"a number from {low:g} to {high:g}")
        return float(value)

    def flag(self, field: str, default: bool = False) -> bool:
        """True or false."""
        value = self.values.get(field, default)
        if not isinstance(value, bool):
            raise self.refuse(field, "true or false")
        return value

    def text(self, field: str, default: str | None = None) -> str:
        """A text; one that must be there, without a default."""
        value = self.values.get(field, default)
        if not isinstance(value, str):
            raise self.refuse(field, "a text")
        return value

    def texts(self, field: str, most: int) -> list[str]:
        """A text or a list of some, none of them empty."""
        value = self.values.get(field, [])
        value = [value] if isinstance(value, str) else value
        is_list = isinstance(value, list) and len(value) <= most
        if not is_list or not all(isinstance(one, str) and one for one in value):
            raise self.refuse(field, f"a text, or a list of at most {most}, none of them empty")
        return list(value)

    def ids(
        self, field: str, num_tokens: int, most: int, *, default: Sequence[int] | None = None
    ) -> list[int]:
        """A list of at most so many ids of the tokenizer; it must be there, without a default."""
        value = self.values.get(field, default)
        if (
            not isinstance(value, list | tuple)
            or len(value) > most
            or not all(type(one) is int and 0 <= one < num_tokens for one in value)
        ):
            raise self.refuse(field, f"a list of at most {most} ids from 0 to {num_tokens - 1}")
        return list(value)

    def items(self, field: str) -> list[Any]:
        """A list; an empty one where there is none."""
        value = self.values.get(field, [])
        if not isinstance(value, list):
            raise self.refuse(field, "a list")
        return value

    def inner(self, field: str) -> Fields:
        """The fields of an object; none where there is none."""
        value = self.values.get(field, {})
        if not isinstance(value, dict):
            raise self.refuse(field, "an object")
        return Fields(value, self.name(field))

    def only(self, allowed: Mapping[str, tuple[Any, ...]]) -> None:
        """Refuses fields that would change the answer and that nothing here reads.

        Args:
            allowed: of each field the values at which it changes nothing.

        Raises:
            RefusedError: names the field.
        """
        for field, neutral in allowed.items():
            value = self.values.get(field)
            is_neutral = any(type(value) is type(one) and value == one for one in neutral)
            # 0 and 0.0 are the same, 0 and false are not.
            if isinstance(value, int | float) and not isinstance(value, bool):
                is_neutral = any(value == one and not isinstance(one, bool) for one in neutral)
            if value is not None and not is_neutral:
                name = self.name(field)
                raise RefusedError(
                    400,
                    f"{name} is {shown(value)}, which this server cannot do; leave it out.",
                    param=name,
                    code="unsupported_parameter",
                )


def read_body(data: bytes) -> Fields:
    """Reads a body.

    Raises:
        RefusedError: it is no JSON object.
    """
    try:
        # The parser's own decoding takes UTF-16 and halves of surrogate pairs, which no UTF-8 has.
        value = parse_json(data.decode("utf-8-sig"), "the body")
    except UnicodeDecodeError as error:
        raise RefusedError(400, f"the body is not UTF-8: {error}"[:300]) from None
    except ValueError as error:
        raise RefusedError(400, f"{error}"[:300]) from None
    if not isinstance(value, dict):
        raise RefusedError(400, f"the body is {shown(value)}; expected a JSON object.")
    # An escape may stand for half of a pair, which has no bytes.
    return Fields(writable_json(value) if b"\\ud" in data.lower() else value)


def writable_json(value: Any) -> Any:
    """A JSON value whose texts UTF-8 has bytes for; see `writable`."""
    if isinstance(value, str):
        return writable(value)
    if isinstance(value, list):
        return [writable_json(one) for one in value]
    if isinstance(value, dict):
        return {writable(name): writable_json(one) for name, one in value.items()}
    return value


def fields_of(value: Any, place: str) -> Fields:
    """The fields of an object in a list.

    Raises:
        RefusedError: it is no object.
    """
    if not isinstance(value, dict):
        raise RefusedError(400, f"{place} is {shown(value)}; expected an object.", param=place)
    return Fields(value, place)


def shown(value: Any) -> str:
    """A value as a message names it, cut; of a long one the rest is not gone through."""
    text = writable(_SHORT.repr(value))
    return text if len(text) <= 60 else f"{text[:60]}…"
