"""Errors that several packages raise and handle."""

from __future__ import annotations


class ToolError(Exception):
    """The tool failed, not the model's call of it. It never becomes a reward.

    Attributes:
        retry_after_s: seconds that the server asked to wait; None where it did not ask.
        is_permanent: True where another try would fail alike, as with a wrong key or address.
        status: of an HTTP server's answer; None where there was none.
    """

    def __init__(
        self,
        message: str = "",
        *,
        retry_after_s: float | None = None,
        is_permanent: bool = False,
        status: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s
        self.is_permanent = is_permanent
