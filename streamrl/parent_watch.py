"""A child must not outlive its parent: the parent holds the write end of a pipe, the child watches the read end.

End of file means that the parent is gone, however it went (kill -9 included). No polling of process ids, no signals
that depend on which thread forked.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

VARIABLE = "STREAMRL_PARENT_PIPE"
"""Set to "stdin" in the environment of a child whose standard input is the pipe."""

_watching = False


def watch(on_parent_gone: Callable[[], None]) -> bool:
    """Call `on_parent_gone` from a daemon thread once the parent is gone; False if there is none to watch."""
    if os.environ.pop(VARIABLE, None) != "stdin":
        return False

    def wait() -> None:
        while os.read(0, 1024):
            pass
        on_parent_gone()

    global _watching
    _watching = True
    threading.Thread(target=wait, name="parent_watch", daemon=True).start()
    return True


def renew() -> None:
    """Before this process replaces itself by exec: its successor watches the same pipe."""
    if _watching:
        os.environ[VARIABLE] = "stdin"


def child_environment() -> dict[str, str]:
    """The environment for a child that is started with `stdin=subprocess.PIPE`."""
    return {**os.environ, VARIABLE: "stdin"}
