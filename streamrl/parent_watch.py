"""Ends a child with its parent: the parent holds the write end of a pipe, the child watches the read end.

End of file means that the parent has ended, by kill -9 too: no process ids are polled, and no signal depends on the
thread that forked.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable

VARIABLE = "STREAMRL_PARENT_PIPE"
"""Set to "stdin" in the environment of a child whose standard input is the pipe."""
NOTICE = "streamrl notice: "
"""In front of a line of standard error that the check of the settings wants on the terminal at once."""

_watching = False


def watch(on_parent_exit: Callable[[], None]) -> bool:
    """Call `on_parent_exit` from a daemon thread once the parent has ended; False without one to watch."""
    if os.environ.pop(VARIABLE, None) != "stdin":
        return False

    def wait() -> None:
        while os.read(0, 1024):
            pass
        on_parent_exit()

    global _watching
    _watching = True
    threading.Thread(target=wait, name="parent_watch", daemon=True).start()
    return True


def renew() -> None:
    """Before this process replaces itself by exec: its successor watches the same pipe."""
    if _watching:
        os.environ[VARIABLE] = "stdin"


def program(module: str) -> list[str]:
    """The command that runs one of our modules; -P: no folder of that name in the working directory shadows it."""
    return [sys.executable, "-P", "-m", module]


def child_environment() -> dict[str, str]:
    """The environment for a child that is started with `stdin=subprocess.PIPE`."""
    return {**os.environ, VARIABLE: "stdin"}
