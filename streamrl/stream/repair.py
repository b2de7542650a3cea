"""A damaged log cut at the damage, so that its run can go on: nothing is deleted, and a person has asked for it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from streamrl.stream.mark import write_mark
from streamrl.stream.segments import ANYWHERE, FOLDER, DamagedLogError, scan
from streamrl.stream.writer import close_log, cut_file, new_path


@dataclass(frozen=True, slots=True)
class Repaired:
    """The result of a repair.

    Attributes:
        why: what was damaged first.
        kept: files that hold what was cut.
        last: the last record that is left.
    """

    why: str
    kept: tuple[Path, ...]
    last: int


def repair(run_dir: Path) -> Repaired | None:
    """Cut a log at its first damage; None if it has none. No process may write it meanwhile.

    Raises OSError: something cannot be kept; doing it again goes on from there.
    """
    folder = run_dir / FOLDER
    found, kept = _damage(run_dir), []
    why = str(found)
    if found is None:
        return None
    while found is not None:
        path, at = found.path, found.at
        for one in sorted(folder.glob("*.seg"), reverse=True):
            if one.name > path.name or (one == path and at == 0):
                kept.append(one.rename(new_path(one.with_suffix(".cut"))))
            elif one == path:
                kept.append(cut_file(path, at))
        write_mark(folder, 0)  # what it says is told in `why`; from here on it is about what is left
        found = _damage(run_dir)
    following, _ = close_log(run_dir)
    write_mark(folder, following - 1)
    return Repaired(why, tuple(sorted(one for one in kept if one is not None)), following - 1)


def _damage(run_dir: Path) -> DamagedLogError | None:
    try:
        for _ in scan(run_dir, complete_from=ANYWHERE):
            pass
    except DamagedLogError as error:
        return error
    return None
