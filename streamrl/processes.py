"""Processes of this machine as /proc shows them, where there is a /proc; the cores that this one may use, its host."""

from __future__ import annotations

import os
import socket
from pathlib import Path


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
