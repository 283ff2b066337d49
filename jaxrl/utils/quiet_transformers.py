"""transformers without its advice; the process's environment and settings stay the user's."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silences transformers below errors, while it is imported and called.

    Without torch it advises to install it, and of a folder's files it warns of what is meant.
    Whoever sets TRANSFORMERS_VERBOSITY hears what that says.
    """
    logger = logging.getLogger("transformers")
    if os.environ.get("TRANSFORMERS_VERBOSITY"):
        yield
        return

    # The import sets the logger's level, so a filter stands at what it tells itself; loggers of
    # modules have no level of their own, and no filter of this one.
    def is_error(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.ERROR

    logger.addFilter(is_error)
    try:
        import transformers  # noqa: F401

        level = logger.level
        logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            logger.setLevel(level)
    finally:
        logger.removeFilter(is_error)
