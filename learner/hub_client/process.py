"""The hub as a child process of rank 0; each watches the other."""

from __future__ import annotations

import logging
import shutil
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

from learner.hub.settings import HubSettings, write_settings
from streamrl.errors import StreamrlError
from streamrl.parent_watch import child_environment, program

log = logging.getLogger("streamrl.learner")

FOLDER_PREFIX = "streamrl-ranks-"


def private_rank_endpoint() -> str:
    """A socket file in a directory that only this user may enter."""
    return f"ipc://{tempfile.mkdtemp(prefix=FOLDER_PREFIX)}/ranks"


class HubProcess:
    """The child. If it dies, the learner fails; if the learner dies, end-of-file on its stdin ends it."""

    def __init__(self, settings: HubSettings) -> None:
        self._socket_folder = Path(settings.rank_endpoint.removeprefix("ipc://")).parent
        path = Path(settings.run_dir) / "hub_settings.json"
        write_settings(settings, path)
        self._process = subprocess.Popen(
            [*program("learner.hub"), str(path)], stdin=subprocess.PIPE,
            env={**child_environment(), "OMP_NUM_THREADS": "1"}, start_new_session=True,
        )

    def check(self) -> None:
        """Raises StreamrlError if the hub has ended."""
        code = self._process.poll()
        if code is not None:
            raise StreamrlError(f"the hub process ended with status {code}: its log is above")

    def wait(self, timeout_s: float) -> None:
        """After Shutdown: let it flush, and kill it if that takes too long."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            log.warning("the hub did not end within %g s: killed", timeout_s)
            self._process.kill()
            self._process.wait()

    def abandon(self) -> None:
        """Close its stdin: the hub tells the actors to wait for a successor, cleans up and ends."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self.wait(15.0)
        if self._socket_folder.name.startswith(FOLDER_PREFIX):  # still there if the hub was killed
            shutil.rmtree(self._socket_folder, ignore_errors=True)
