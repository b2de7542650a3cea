"""Processes of this machine as /proc shows them, where there is a /proc; the cores that this one may use, its host."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PRIVATE = 0o077
"""The umask of our programs: what they write holds prompts and answers, and is for its owner."""
_USERS_UMASK = "STREAMRL_USERS_UMASK"
"""In the environment of our programs: the umask before that."""


def keep_private() -> None:
    """Make all files that this process and its children write private to their owner; programs begin with it."""
    os.environ.setdefault(_USERS_UMASK, f"{os.umask(PRIVATE):o}")
    os.umask(PRIVATE)


@contextmanager
def for_all() -> Iterator[None]:
    """Inside, files are made as the user has it: in a cache of downloads, which several users may share."""
    before = os.umask(PRIVATE)
    os.umask(int(os.environ.get(_USERS_UMASK, f"{before:o}"), 8))
    try:
        yield
    finally:
        os.umask(before)


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def process_state(pid: int) -> str:
    """One letter as in /proc: R, S, D, T (stopped), Z ...; "" if there is no such process."""
    fields = _fields(pid)
    return fields[0] if fields else ""


def is_stopped(pid: int) -> bool:
    """Whether SIGSTOP, a terminal or a debugger stopped it: it does nothing until it is continued."""
    return process_state(pid) in ("T", "t")


def processor_s(pid: int) -> float:
    """Seconds of processor time that it has used so far; 0 if there is no such process."""
    fields = _fields(pid)
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") if fields else 0.0


def _fields(pid: int) -> list[str]:
    """The fields of /proc/PID/stat, from the state on."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def host_id() -> str:
    """Equal for two processes only if one sees the other's process id: the host's name and the process namespace."""
    return f"{socket.gethostname()[:40]}/{os.stat('/proc/self/ns/pid').st_ino}"
