"""Redaction of registered secrets, such as API keys, from messages, results and files."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Iterable, Iterator
from typing import IO, Any
from urllib.parse import quote, quote_plus

_MIN_LENGTH = 8  # characters; shorter secrets are redacted only as complete words

_patterns: dict[str, re.Pattern[str]] = {}  # by encoded form of a secret


def register_secret(value: str) -> None:
    """Register a secret for redaction in plain, JSON-escaped and percent-encoded form.

    Long words in the secret, such as the token in `Bearer TOKEN`, are also redacted.
    """
    for secret in {value, *(word for word in value.split() if len(word) >= _MIN_LENGTH)} - {""}:
        escaped = json.dumps(secret)[1:-1]
        encoded = {quote(secret), quote(secret, safe=""), quote_plus(secret)}
        for form in {secret, escaped, escaped.replace("/", r"\/"), *encoded}:
            pattern = re.escape(form)
            if len(secret) < _MIN_LENGTH:
                pattern = rf"(?<!\w){pattern}(?!\w)"
            # Servers write %2F or %2f.
            _patterns[form] = re.compile(pattern, re.IGNORECASE if "%" in form else 0)


def redact(value: Any) -> Any:
    """Replace each registered secret with `***`, in text or in all strings of a JSON value."""
    if isinstance(value, list | tuple):
        return type(value)(map(redact, value))
    if isinstance(value, dict):
        return {redact(name): redact(item) for name, item in value.items()}
    if not isinstance(value, str):
        return value
    matches = (pattern.finditer(value) for pattern in list(_patterns.values()))
    pieces, end = [], 0
    for start, stop in sorted(match.span() for match_iter in matches for match in match_iter):
        if start >= end:  # otherwise, it overlaps the previous secret
            pieces += [value[end:start], "***"]
        end = max(end, stop)
    return "".join([*pieces, value[end:]])


class _RedactedStream:
    """Text stream that redacts secrets and replaces characters that it cannot encode."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        text = redact(text)
        try:
            return self._stream.write(text)
        except UnicodeEncodeError as error:
            return self._stream.write(text.encode(error.encoding, "replace").decode(error.encoding))

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def redact_output() -> Iterator[None]:
    """Redact the block's output and any exception that the block raises."""
    out, err = [_RedactedStream(stream) for stream in (sys.stdout, sys.stderr)]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            yield
        except BaseException as error:
            error.args = redact(error.args)
            if isinstance(error, SystemExit):
                error.code = redact(error.code)
            raise
