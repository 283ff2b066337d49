"""Refused requests, and how each dialect reports them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxrl.utils.text import printable

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class RequestError(Exception):
    """A request that gets an error in place of an answer.

    Attributes:
        status: HTTP status.
        param: Name of the wrong field, if any.
        code: Short name of the reason, for programs.
        headers: HTTP headers of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self.headers = dict(headers or {})

    @property
    def type(self) -> str:
        """Return the error type that OpenAI and Anthropic use for the status."""
        server_error = "invalid_request_error" if self.status < 500 else "server_error"
        return _TYPES.get(self.status, server_error)


class ContextLengthError(RequestError):
    """A prompt that leaves no room for a completion."""

    def __init__(self, num_tokens: int, max_total_tokens: int):
        """Word the error as clients of OpenAI expect it.

        Args:
            num_tokens: Lower bound on the prompt's length.
            max_total_tokens: Limit on prompt and completion together.
        """
        super().__init__(
            400,
            f"This model's maximum context length is {max_total_tokens} tokens. However, your "
            f"prompt has {num_tokens} tokens or more. Please reduce the length of the prompt.",
            param="messages",
            code="context_length_exceeded",
        )
        self.anthropic_message = (
            f"prompt is too long: {num_tokens} tokens > {max_total_tokens - 1} maximum"
        )


def openai_error(error: RequestError) -> dict[str, Any]:
    """Return the body of an error for OpenAI's clients."""
    return {
        "error": {
            "message": printable(str(error)),
            "type": error.type,
            "param": error.param,
            "code": error.code,
        }
    }


def anthropic_error(error: RequestError) -> dict[str, Any]:
    """Return the body of an error for Anthropic's clients."""
    message = error.anthropic_message if isinstance(error, ContextLengthError) else str(error)
    kind = "api_error" if error.status == 500 else error.type
    return {"type": "error", "error": {"type": kind, "message": printable(message)}}
