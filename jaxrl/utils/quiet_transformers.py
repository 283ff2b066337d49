"""Suppression of warnings from transformers."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Hide transformers' log messages below ERROR, unless TRANSFORMERS_VERBOSITY is set.

    These messages include advice to install torch, and warnings about files in a model folder.
    """
    logger = logging.getLogger("transformers")
    if os.environ.get("TRANSFORMERS_VERBOSITY"):
        yield
        return

    # The import resets the logger's level, so it needs a filter. Later calls need the level, since
    # child loggers inherit the level but not the filter.
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
