"""Ends a child with its parent: the parent holds the write end of a pipe, the child watches the read end.

End of file means that the parent has ended, by kill -9 too: no process ids are polled, and no signal depends on the
thread that forked.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import TextIO

VARIABLE = "STREAMRL_PARENT_PIPE"
"""Set to "stdin" in the environment of a child whose standard input is the pipe."""
NOTICE = "streamrl notice: "
"""In front of a line of standard error that the check of the settings wants on the terminal at once."""

_on_parent_exit: Callable[[], None] | None = None


def watch(on_parent_exit: Callable[[], None]) -> bool:
    """Call `on_parent_exit` from a daemon thread once the parent has ended; False without one to watch.

    A later call replaces what is called: a process that is still being set up ends at once, later it ends in order.
    """
    global _on_parent_exit
    first = _on_parent_exit is None
    if first and os.environ.pop(VARIABLE, None) != "stdin":
        return False
    _on_parent_exit = on_parent_exit
    if first:
        threading.Thread(target=_wait, name="parent_watch", daemon=True).start()
    return True


def end_with_parent() -> bool:
    """End this process with its parent, whatever it does, until `watch` is called again: it has nothing to save yet."""
    return watch(lambda: os._exit(1))


def _wait() -> None:
    while os.read(0, 1024):
        pass
    assert _on_parent_exit is not None
    _on_parent_exit()


def renew() -> None:
    """Prepare for an exec, or for children that share standard input: they watch the parent in turn."""
    if _on_parent_exit is not None:
        os.environ[VARIABLE] = "stdin"


def take_stdout() -> TextIO:
    """Standard output for the answers of this process alone: what code of a user prints there is for the log."""
    sys.stdout.flush()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


def program(module: str) -> list[str]:
    """The command that runs one of our modules; -P: no folder of that name in the working directory shadows it."""
    return [sys.executable, "-P", "-m", module]
