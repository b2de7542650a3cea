"""Text of a peer, or of a user's code, before it is put into a log or on a terminal.

A control character could move the cursor, change colors or hide what stands before it, and a line break could forge a
line of another process.
"""

from __future__ import annotations

import logging
import os
from typing import Any


def printable(text: str) -> str:
    """The text with escapes such as \\x1b and \\n for every character that is not printable."""
    return text if text.isprintable() else "".join(char if char.isprintable() else _escape(char) for char in text)


def printable_lines(text: str) -> str:
    """Escape a text as `printable` does, but keep line breaks and tabs."""
    return "".join(char if char.isprintable() or char in "\n\t" else _escape(char) for char in text)


def _escape(char: str) -> str:
    return char.encode("unicode_escape").decode()


class PrintableFormatter(logging.Formatter):
    """Lines of a log in which only line breaks are left of control characters, and each further line is indented."""

    def format(self, record: logging.LogRecord) -> str:
        return printable_lines(super().format(record))

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = record.message.replace("\n", "\n  ")
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:
        return super().formatException(ei).replace("\n", "\n  ")  # an error's text may have lines of its own


def start_log(
    who: str, *, level: str | None = None, handler: logging.Handler | None = None, force: bool = False
) -> None:
    """Log lines of this process, as `12:34:56 <who>   <text>`.

    Args:
        level: STREAMRL_LOG unless it is given.
        handler: where they go; None is standard error.
        force: replace a log that this process has started before.
    """
    handler = handler or logging.StreamHandler()
    handler.setFormatter(PrintableFormatter(f"%(asctime)s {who:<8} %(message)s", datefmt="%H:%M:%S"))
    for library in ("httpx", "httpx2"):  # at INFO they log every request
        logging.getLogger(library).setLevel(logging.WARNING)
    level = (level or os.environ.get("STREAMRL_LOG") or "INFO").upper()
    known = level in logging.getLevelNamesMapping()
    logging.basicConfig(level=level if known else "INFO", handlers=[handler], force=force)
    if not known:
        logging.warning("STREAMRL_LOG=%s is no level, so INFO: give DEBUG, INFO, WARNING or ERROR", level)
