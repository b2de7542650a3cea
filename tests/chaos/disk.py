"""What a power cut leaves of a run directory: what was synced, and of the rest nothing that may be relied on.

kill -9 spares the page cache, so a missing fsync would never show. `journal` notes every fsync and rename of a process;
`power_cut` then takes back what no fsync covers: files written since are cut in half, renames are undone, and the run's
log ends where it was synced last.
"""

import json
import os
import stat
from pathlib import Path
from typing import Any

from streamrl.stream.segments import MARK

_FSYNC, _REPLACE, _FDATASYNC = os.fsync, os.replace, os.fdatasync


def journal_log(path: Path) -> None:
    """In a child of a process that keeps a journal, the hub: this one notes the syncs of the run's log alone."""
    os.fsync, os.replace = _FSYNC, _REPLACE
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def noted_fdatasync(number: int) -> None:
        size = os.fstat(number).st_size
        _FDATASYNC(number)
        os.write(file, json.dumps({"log": os.fstat(number).st_ino, "size": size}).encode() + b"\n")

    os.fdatasync = noted_fdatasync


def journal(path: Path) -> None:
    """Note this process's syncs and renames in a file that survives it."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    fsync, replace = _FSYNC, _REPLACE
    kept = path.parent / "replaced"
    kept.mkdir(exist_ok=True)

    def note(**entry: Any) -> None:
        os.write(file, json.dumps(entry).encode() + b"\n")

    def noted_fsync(target: Any) -> None:
        fsync(target)
        number = target if isinstance(target, int) else target.fileno()
        found = os.fstat(number)
        if stat.S_ISDIR(found.st_mode):
            note(directory=os.readlink(f"/proc/self/fd/{number}"))
        else:
            note(inode=found.st_ino, written=found.st_mtime_ns)

    def noted_replace(source: Any, target: Any) -> None:
        before = None
        if os.path.isfile(target):
            before = str(kept / f"{os.stat(target).st_ino}-{os.stat(source).st_ino}")
            os.link(target, before)
        note(source=str(source), target=str(target), before=before)
        replace(source, target)

    os.fsync, os.replace = noted_fsync, noted_replace


def power_cut(run_dir: Path, path: Path) -> int:
    """Leave only what was synced; how many files and renames were lost. The journal begins again."""
    synced, renames, sizes = _read(path)
    num_lost = 0
    for file in (run_dir / "stream").glob("*.seg"):
        size = sizes.get(file.stat().st_ino, 0)
        num_lost += file.stat().st_size > size
        os.truncate(file, size)
    (run_dir / "stream" / MARK).unlink(missing_ok=True)  # it is never synced
    for source, target, before in reversed(renames):
        if os.path.exists(target):
            num_lost += 1
            os.replace(target, source)
            if before is not None and os.path.exists(before):
                os.link(before, target)
    for file in [one for folder in run_dir.glob("ckpt*") for one in folder.iterdir()]:
        found = file.stat()
        if synced.get(found.st_ino) != found.st_mtime_ns:
            num_lost += 1
            os.truncate(file, found.st_size // 2)
            os.utime(file, ns=(0, 0))
    return num_lost


def _read(path: Path) -> tuple[dict[int, int], list[tuple[str, str, str | None]], dict[int, int]]:
    """inode -> time of the newest write that was synced; renames that no sync of their folder covers; inode of a file
    of the log -> bytes that were synced."""
    synced: dict[int, int] = {}
    sizes: dict[int, int] = {}
    renames: list[tuple[str, str, str | None]] = []
    for line in path.read_text().splitlines() if path.exists() else ():
        entry = json.loads(line)
        if "log" in entry:
            sizes[entry["log"]] = entry["size"]
        elif "inode" in entry:
            synced[entry["inode"]] = entry["written"]
        elif "directory" in entry:
            renames = [one for one in renames if os.path.dirname(one[1]) != entry["directory"]]
        else:
            renames.append((entry["source"], entry["target"], entry["before"]))
    return synced, renames, sizes
