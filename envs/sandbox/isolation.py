"""Isolation of a program from this machine: the command line that starts its supervisor.

    level 1  a process of its own: resource limits, no environment, no new privileges, killed with all its descendants.
             Robustness against mistakes, NOT security: a program can read the user's files and open connections.
    level 2  level 1 inside namespaces of its own, which bubblewrap makes: no network, no processes but its own, no
             files but a read-only Python and an empty /tmp of limited size.

Neither protects from faults of the kernel. For hostile code use a virtual machine behind reward.code.url.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

STATUSES = ("ok", "error", "compile_error", "timeout", "output_limit", "memory_limit", "process_limit", "lost")


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one execution.

    Args:
        timeout_s: wall time; then the program and all that it started are killed.
        memory_bytes: memory of all processes together, looked at 20 times a second; and address space of each.
        file_bytes: largest file that may be written; at level 2 also the size of all that is in /tmp together.
        output_bytes: standard output and error together; the program is killed beyond it.
        num_processes: processes and threads at once.
        num_files: open files of each process.
    """

    timeout_s: float = 10.0
    memory_bytes: int = 1 << 30
    file_bytes: int = 16 << 20
    output_bytes: int = 1 << 20
    num_processes: int = 64
    num_files: int = 64


@dataclass(frozen=True, slots=True)
class Call:
    """Call a function of the program instead of only running it.

    Args:
        name: a function of the program, or a method of its class `Solution`.
        arguments: positional, the JSON of each; what is no JSON is a text.
    """

    name: str
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Case:
    """One run of the program: what it reads, or what of it is called."""

    stdin: str = ""
    call: Call | None = None


@dataclass(frozen=True, slots=True)
class Execution:
    """The outcome of one run of a program.

    Args:
        status: one of STATUSES. "error" is an exception, a signal or an exit status other than 0; "lost" means that the
            program brought down its own sandbox.
        stdout, stderr: what it printed, cut at the limit; bytes that are no UTF-8 are replaced.
        value: JSON text of what the called function returned; None without a call or when nothing came back.
        exit_status: the program's own; negative is the number of the signal that ended it.
        seconds: wall time.
    """

    status: str
    stdout: str = ""
    stderr: str = ""
    value: str | None = None
    exit_status: int = 0
    seconds: float = 0.0


WORDS = {
    1: "level 1: limits and no privileges, but programs can read this user's files and use the network",
    2: "level 2: no network, no files but a read-only Python, no processes but its own",
}
_SUPERVISOR = Path(__file__).with_name("supervisor.py").read_text()
_FIRST_UID = 200_000_000
"""Start of the user numbers that programs run under where we are root; one for each sandbox of each actor."""


@dataclass(frozen=True, slots=True)
class Isolation:
    """A way to start a supervisor that was seen to work here.

    Args:
        python: the interpreter that programs run in.
        drops_root: programs run under a user number of their own; only where we are root.
        bubblewrap: path of the program bwrap, which makes the namespaces of level 2; without it this is level 1.
    """

    python: str
    drops_root: bool = False
    bubblewrap: str | None = None

    @property
    def level(self) -> int:
        return 1 if self.bubblewrap is None else 2

    def command(self, work: str, uid: int | None, tmp_bytes: int) -> list[str]:
        """Command line of a supervisor; `work` is its directory (at level 2 one inside its own /tmp)."""
        supervisor = [self.python, "-I", "-S", "-c", _SUPERVISOR]
        if self.bubblewrap is None:
            return [*supervisor, json.dumps({"uid": uid, "work": work})]
        namespaces = _namespaces(self.bubblewrap, self.python, uid, tmp_bytes)
        return [*namespaces, *supervisor, json.dumps({"uid": uid, "work": "/tmp"})]

    def uid(self, slot: int) -> int | None:
        return _FIRST_UID + (os.getpid() % 4_000_000) * 256 + slot % 256 if self.drops_root else None


def watched(words: Sequence[str], tail_bytes: int) -> list[str]:
    """Command line that runs another one, not isolated: all that descends from it ends with it or with standard input.

    What it writes is a JSON object, `status` with the end of `out` and `err`.
    """
    settings = {"command": [*words], "tail_bytes": tail_bytes}
    return [sys.executable, "-I", "-S", "-c", _SUPERVISOR, json.dumps(settings)]


def _namespaces(bubblewrap: str, python: str, uid: int | None, tmp_bytes: int) -> Iterator[str]:
    yield from (bubblewrap, "--die-with-parent", "--new-session", "--clearenv", "--setenv", "PATH", "/usr/bin:/bin")
    yield from ("--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try")
    if uid is None:
        yield from ("--unshare-user", "--uid", "65534", "--gid", "65534", "--cap-drop", "ALL")
    else:  # root makes the namespaces, then the supervisor gives root up
        yield from ("--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID")
    folders, links, files = _visible(python)
    for parent in sorted({str(parent) for folder in folders for parent in PurePath(folder).parents[:-1]}):
        yield from ("--dir", parent)  # for everyone: those that --ro-bind makes are closed to the program's user
    for path in (*folders, *files):
        yield from ("--ro-bind", path, path)
    for name, target in links.items():
        yield from ("--symlink", target, name)
    yield from ("--proc", "/proc", "--dev", "/dev", "--perms", "1777", "--size", str(tmp_bytes), "--tmpfs", "/tmp")
    yield from ("--perms", "1777", "--size", str(1 << 20), "--tmpfs", "/dev/shm")
    yield from ("--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp", "--")


def _visible(python: str) -> tuple[list[str], dict[str, str], list[str]]:
    """Folders, links and files of this machine that a program sees, read-only."""
    folders, links = ["/usr", *_roots(python)], {}
    for folder in ("/bin", "/lib", "/lib64"):
        if os.path.islink(folder):
            links[folder] = os.readlink(folder)
        elif os.path.isdir(folder):
            folders.append(folder)
    return folders, links, [file for file in ("/etc/ld.so.cache",) if os.path.exists(file)]


def _roots(python: str) -> list[str]:
    """Folders outside /usr that this interpreter needs."""
    prefix = sys.base_prefix if python == base_python() else "/usr"
    return [] if prefix == "/usr" or prefix.startswith("/usr/") else [prefix]


def base_python() -> str:
    """The interpreter behind a virtual environment: programs get its standard library, not our packages."""
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))
