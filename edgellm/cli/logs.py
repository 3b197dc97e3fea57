"""Logs of daemons: standard logging, to stderr, and nothing unless it is asked for.

Loggers have the names of their modules. No prompt, no token, no key and no pairing code is ever logged.
"""

from __future__ import annotations

import logging
from enum import StrEnum


class LogLevel(StrEnum):
    """Levels of logging; each includes those before it."""

    off = "off"
    error = "error"
    warning = "warning"
    info = "info"
    debug = "debug"


def log_to_stderr(level: LogLevel) -> None:
    """Send edgellm's own records of `level` and above to stderr, and libraries' from one level higher on."""
    if level is LogLevel.off:
        return
    number = logging.getLevelNamesMapping()[level.upper()]
    logging.disable(logging.NOTSET)
    handler = logging.StreamHandler()
    handler.setFormatter(_OneLine("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
    logging.basicConfig(level=min(number + 10, logging.ERROR), handlers=[handler], force=True)
    logging.getLogger("edgellm").setLevel(number)


class _OneLine(logging.Formatter):
    """A formatter with one line per record: no text from another device can forge a second one."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
