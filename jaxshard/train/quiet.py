"""Orbax says nothing of its own: what goes wrong in a save is raised, once, in one line."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class _NotOfOrbax(logging.Filter):
    """Drops what orbax logs, and what asyncio logs of orbax's tasks."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name == "asyncio":  # the message names the task, or the file that it could not write
            return "orbax" not in record.getMessage()
        return f"{os.sep}orbax{os.sep}" not in record.pathname


_FILTER = _NotOfOrbax()


@contextmanager
def quiet() -> Iterator[None]:
    """Inside, orbax's progress and tracebacks are not shown; after an error nor is what its other writes say.

    When one write fails, orbax closes the event loop under the others, each of which then has an error that nobody
    awaits: a traceback for every leaf, up to the end of the program.
    """
    loggers, before = [logging.getLogger(name) for name in ("absl", "asyncio")], sys.unraisablehook
    for logger in loggers:
        logger.addFilter(_FILTER)

    def unraisable(what: Any) -> None:
        if str(what.exc_value) != "Event loop is closed":
            before(what)

    sys.unraisablehook = unraisable
    yield
    for logger in loggers:
        logger.removeFilter(_FILTER)
    if sys.unraisablehook is unraisable:
        sys.unraisablehook = before
