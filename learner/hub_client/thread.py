"""The hub as a thread of the learner's process (`launch.in_process`): the same sockets, ledger and log."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

from learner.hub.context.settings import HubSettings, read_settings, write_settings
from learner.hub.server import serve
from streamrl.errors import StreamrlError, one_sentence

log = logging.getLogger("streamrl.learner")


class HubThread:
    """The thread, with the calls of `HubProcess`; it ends with its process."""

    def __init__(self, settings: HubSettings) -> None:
        path = Path(settings.run_dir) / "hub_settings.json"
        write_settings(settings, path)
        self._abandoned = threading.Event()
        self._failure: Exception | None = None
        # Read again: the learner's config may change, and a hub in a process of its own would not see it.
        self._thread = threading.Thread(target=self._run, args=(read_settings(path),), name="hub", daemon=True)
        self._thread.start()

    def _run(self, settings: HubSettings) -> None:
        try:
            serve(settings, self._abandoned.is_set)
        except Exception as error:
            self._failure = error
            log.error("the hub failed: %s", one_sentence(error), exc_info=not isinstance(error, StreamrlError))

    def check(self) -> None:
        """Check that the hub runs. Raises StreamrlError if it has ended."""
        if self._thread.is_alive():
            return
        cause = one_sentence(self._failure) if self._failure is not None else "nobody asked it to"
        raise StreamrlError(f"the hub has ended: {cause}; see the log, and go on with streamrl resume")

    def wait(self, timeout_s: float) -> None:
        """Let the hub flush after Shutdown; no thread can be killed."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.warning("the hub did not end within %g s: it ends with this process", timeout_s)

    def abandon(self) -> None:
        """Let the hub tell the actors to wait for a successor, clean up and end."""
        self._abandoned.set()
        self.wait(15.0)
