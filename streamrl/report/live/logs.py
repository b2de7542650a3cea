"""The files of a run as they grow: whole new lines, and which of them a person wants to see."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from streamrl.messages.printable import printable

LOG_LINE = re.compile(r"\d\d:\d\d:\d\d \w+ +\S")
"""How our own processes begin a line. Progress bars of libraries and the rest of a traceback do not."""
ROUTINE = (
    "installed version", "connecting to", "joined run", "hub listens at", "working:", "exiting:", "stopped by the hub",
    "report: ", "environment failure", "the next version waits for",
)
"""Lines of every healthy run that the display says better itself."""


class Tail:
    """New whole lines of a growing file, which may not exist yet and may be replaced by another."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset, self._inode = path, 0, -1

    def skip(self) -> None:
        """Leave out what is there now."""
        self.lines()

    def lines(self) -> list[str]:
        """The lines added since the last call; all of them again after the file was replaced or cut."""
        try:
            with self._path.open("rb") as file:
                stat = os.fstat(file.fileno())
                if stat.st_ino != self._inode or stat.st_size < self._offset:
                    self._offset, self._inode = 0, stat.st_ino
                file.seek(self._offset)
                fresh = file.read()
        except OSError:  # not there yet, or not to be read
            return []
        whole = fresh[: fresh.rfind(b"\n") + 1]
        self._offset += len(whole)
        return whole.decode("utf-8", errors="replace").splitlines()


class LogReader:
    """The logs of a run's processes; those that are there at the start are of an earlier part, and skipped."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._tails: dict[Path, Tail] = {}
        for path in self._paths():
            self._tail(path).skip()

    def news(self) -> list[str]:
        """New lines worth reading, in the order of the files; an actor's with its name, which is its file's."""
        return [
            printable(line if path.stem == "learner" else line.replace(" actor  ", f" {path.stem}", 1))
            for path in self._paths() for line in self._tail(path).lines() if worth_reading(line)
        ]

    def _tail(self, path: Path) -> Tail:
        return self._tails.setdefault(path, Tail(path))

    def _paths(self) -> Iterable[Path]:
        learner_first = sorted(self._root.glob("logs/*.log"), key=lambda path: (path.stem != "learner", path.stem))
        return [*sorted(self._root.glob("*.log")), *learner_first]


def worth_reading(line: str) -> bool:
    """Neither routine nor what a library prints; steps have a line of their own."""
    return LOG_LINE.match(line) is not None and not any(words in line for words in ROUTINE)
