"""Errors that several packages raise and handle."""

from __future__ import annotations


class ToolError(Exception):
    """Error for a tool failure that the model did not cause, which therefore earns no reward.

    Attributes:
        retry_after_s: Seconds that the server asked to wait, or None.
        is_permanent: True if a retry would also fail, for example because of a wrong key or URL.
        status: HTTP status of the server's response, or None.
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
