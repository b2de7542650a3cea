"""The hub's sender process: started with a pipe as its parent_watch, ended without asking."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec

from learner.hub.settings import BroadcasterSettings, HubSettings
from streamrl.parent_watch import child_environment


class BroadcasterProcess:
    """The child; it ends with the hub, however the hub goes."""

    def __init__(self, settings: HubSettings) -> None:
        path = Path(settings.run_dir) / "sender_settings.json"
        path.write_bytes(msgspec.json.format(msgspec.json.encode(sender_settings(settings)), indent=2))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "learner.broadcaster", str(path)], stdin=subprocess.PIPE, env=child_environment(),
            start_new_session=True, cwd=os.getcwd(),
        )

    def alive(self) -> bool:
        """Asked once more after its end, this is also what removes it from the system's table."""
        return self._process.poll() is None

    def kill(self) -> None:
        """Returns at once: a process that the GPU's driver holds may take minutes to die, or never do."""
        self._process.kill()


def sender_settings(settings: HubSettings) -> BroadcasterSettings:
    return BroadcasterSettings(
        rank_endpoint=settings.rank_endpoint, device=settings.device, transports=settings.transports,
        slot_bytes=settings.bucket_bytes, init_deadline_s=settings.nccl_init_deadline_s,
        bucket_deadline_s=settings.nccl_bucket_deadline_s,
    )
