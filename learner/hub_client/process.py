"""The hub as a child process of rank 0; each watches the other."""

from __future__ import annotations

import logging
import os
import shutil
import signal
from pathlib import Path

from learner.hub.context.settings import HubSettings, write_settings
from learner.hub.status import note_lost
from learner.hub_client.endpoint import FOLDER_PREFIX
from streamrl.errors import StreamrlError
from streamrl.parent_watch import program
from streamrl.processes import Child
from streamrl.transport.keys import RankKeys

log = logging.getLogger("streamrl.learner")


class HubProcess(Child):
    """The child process. If it dies, the learner fails; if the learner dies, end-of-file on its stdin ends it."""

    def __init__(self, settings: HubSettings, rank_keys: RankKeys | None = None) -> None:
        self._socket_folder = Path(settings.rank_endpoint.removeprefix("ipc://")).parent
        self._run_dir = Path(settings.run_dir)
        path = self._run_dir / "hub_settings.json"
        write_settings(settings, path)
        keys = rank_keys.environment() if rank_keys else {}
        super().__init__(
            [*program("learner.hub"), str(path)], environment={**os.environ, "OMP_NUM_THREADS": "1", **keys}
        )

    def check(self) -> None:
        """Check that the hub runs. Raises StreamrlError if it has ended."""
        code = self.poll()
        if code is None:
            return
        if code >= 0:  # it failed by itself, and would again
            raise StreamrlError(f"the hub process ended with status {code}: its log is above")
        cause = f"the hub process was killed by {signal.Signals(-code).name}"
        note_lost(self._run_dir, cause)
        raise StreamrlError(f"{cause}: streamrl launch starts the learner again, streamrl resume does so by hand")

    def wait(self, timeout_s: float) -> None:
        """Let the hub flush after Shutdown, and kill it if that takes too long."""
        if not self.ends_within(timeout_s):
            log.warning("the hub did not end within %g s: killed", timeout_s)
            self.kill()

    def abandon(self) -> None:
        """Close its stdin: the hub tells the actors to wait for a successor, cleans up and ends."""
        self.close_input()
        self.wait(15.0)
        if self._socket_folder.name.startswith(FOLDER_PREFIX):  # still there if the hub was killed
            shutil.rmtree(self._socket_folder, ignore_errors=True)
