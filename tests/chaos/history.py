"""Event histories: every process of a chaos run appends JSON lines to a file of its own.

Each line is one `write`, so what was recorded survives kill -9. Times are of CLOCK_MONOTONIC, which all processes of a
host share: sorted by it, the files are one history. What a role is about to do is recorded before it does it, what it
was told after it was told; so no effect stands in the history before its cause.

    learner  start  train  publish  saved  closing  end  hub    welcome  accept  discard  drop
    actor    join  send  settled  durable  rejected  install  exit         nemesis  fault  heal         any  crash
"""

import json
import os
import time
from pathlib import Path
from typing import Any

Event = dict[str, Any]


class History:
    """The file of one process; `role` tells whose view it is."""

    def __init__(self, folder: Path, role: str) -> None:
        self.role = role
        self._file = os.open(folder / f"{role}-{os.getpid()}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def add(self, event: str, **fields: Any) -> None:
        """Record what happens now."""
        line = {"t": time.monotonic(), "role": self.role, "event": event, **fields}
        os.write(self._file, json.dumps(line, separators=(",", ":")).encode() + b"\n")


def read_history(folder: Path) -> list[Event]:
    """All files of a run in order of time; a line that its process could not finish is left out."""
    events: list[Event] = []
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_bytes().split(b"\n"):
            try:
                events.append(json.loads(line))
            except ValueError:
                continue
    return sorted(events, key=lambda event: event["t"])
