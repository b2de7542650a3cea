"""Common parts of the commands: the exit status, the error in a sentence, the arguments of those that read a log."""

from __future__ import annotations

import argparse
import io
import logging
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from streamrl.errors import StreamrlError, one_sentence
from streamrl.messages.printable import printable_lines, start_log

EQUAL, DIFFERS, ERROR, NOT_COMPARABLE = 0, 1, 2, 3
"""Exit statuses of commands that compare."""
INTERRUPTED = 130


def parser_of(
    command: str, description: str, *, find: Callable[[str], Any], between: bool = False, **more: Any
) -> argparse.ArgumentParser:
    """A parser of a run and, if asked for, the versions between which its batches are meant.

    Args:
        find: the run that is named, or its directory.
        more: of the parser, as `epilog`.
    """
    parser = argparse.ArgumentParser(prog=f"streamrl {command}", description=description, **more)
    parser.add_argument("run", metavar="RUN", type=find, help="a run directory, or its name in runs/")
    if between:
        parser.add_argument("--from", dest="first", type=int, default=0, metavar="N", help="begin with version N")
        parser.add_argument("--to", dest="last", type=int, default=None, metavar="N", help="end at version N")
    return parser


def parsed(
    parser: argparse.ArgumentParser, *, words: str = "settings that replace the run's own", level: str = "WARNING"
) -> argparse.Namespace:
    """The arguments, and `words` that are settings; warnings of this process go to standard error."""
    parser.add_argument("words", nargs="*", default=[], metavar="key=value", help=words)
    given = parser.parse_intermixed_args()
    first, last = getattr(given, "first", 0), getattr(given, "last", None)
    if last is not None and last <= first:
        parser.error(f"--from {first} --to {last}: no batch lies between them; give a later version to end at")
    start_log(parser.prog.split()[1], level=level)
    return given


def status_of(command: Callable[[], int], *, interrupted: str = "stopped") -> int:
    """The exit status of a command; what it refuses is printed, and Ctrl-C ends it without a traceback."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal in Latin-1 has no ± and not what every model says
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = command()
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader has all it wants, as in `streamrl settings | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (StreamrlError, OSError) as error:  # as a directory that is read-only, or a full disk
        print(f"error: {printable_lines(one_sentence(error))}", file=sys.stderr)
        return ERROR
    except KeyboardInterrupt:
        if interrupted:
            print(interrupted, file=sys.stderr)
        return INTERRUPTED


def say(text: object, *, error: bool = False) -> None:
    """Print a line, or lines, of a command: a text of a run's author in it does not steer the terminal."""
    print(printable_lines(str(text)), file=sys.stderr if error else None, flush=True)


def exit_at_once(code: int) -> NoReturn:
    """End this process now: a thread that waits or hangs in somebody's code must not hold it."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
