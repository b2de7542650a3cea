"""The end of every command that reads a log: its exit status, and its error in a sentence."""

from __future__ import annotations

import sys
from collections.abc import Callable

from streamrl.errors import StreamrlError, one_sentence
from streamrl.messages.printable import printable_lines

EQUAL, DIFFERS, ERROR, NOT_COMPARABLE = 0, 1, 2, 3
"""Exit statuses of commands that compare."""
INTERRUPTED = 130


def status_of(command: Callable[[], int]) -> int:
    """The exit status of a command; what it refuses is printed, and Ctrl-C ends it without a traceback."""
    try:
        return command()
    except (StreamrlError, OSError) as error:
        print(f"error: {printable_lines(one_sentence(error))}", file=sys.stderr)
        return ERROR
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return INTERRUPTED
