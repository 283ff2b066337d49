"""Errors for rejected requests, in the format of each API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxrl.utils.text import escape_control_chars

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class RequestError(Exception):
    """Error returned to the client as an HTTP response.

    Attributes:
        status: HTTP status code.
        param: Name of the invalid request field, or None.
        code: Machine-readable error code, or None.
        headers: Additional HTTP headers of the response.
    """

    anthropic_message = ""

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
        if status == 401:
            self.headers["WWW-Authenticate"] = "Bearer"
            self.code = "invalid_api_key"

    def build_body(self, *, is_anthropic: bool) -> dict[str, Any]:
        """Return the response body in OpenAI's or Anthropic's format."""
        error_type = "invalid_request_error" if self.status < 500 else "server_error"
        error_type = _TYPES.get(self.status, error_type)
        if is_anthropic:
            error_type = "api_error" if self.status == 500 else error_type
            message = escape_control_chars(self.anthropic_message or str(self))
            return {"type": "error", "error": {"type": error_type, "message": message}}
        fields = {"type": error_type, "param": self.param, "code": self.code}
        return {"error": {"message": escape_control_chars(str(self)), **fields}}


class ContextLengthError(RequestError):
    """Error for a prompt that leaves no tokens for a completion.

    The messages match those of OpenAI and Anthropic, so agents recognize them and compact their
    history.
    """

    def __init__(self, num_tokens: int, max_total_tokens: int):
        """Build the error messages of both APIs.

        Args:
            num_tokens: Lower bound on the length of the prompt.
            max_total_tokens: Maximum number of prompt and completion tokens combined.
        """
        super().__init__(
            400,
            f"This model's maximum context length is {max_total_tokens} tokens. However, your "
            f"prompt has {num_tokens} tokens or more. Please reduce the length of the prompt.",
            param="messages",
            code="context_length_exceeded",
        )
        limit = max_total_tokens - 1
        self.anthropic_message = f"prompt is too long: {num_tokens} tokens > {limit} maximum"
