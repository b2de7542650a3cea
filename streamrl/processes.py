"""Processes of this machine: children that do not outlive this one, and what the system tells of others.

Our programs watch their standard input, a pipe from here (`streamrl.parent_watch`): they end with this process, after
kill -9 too.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

from streamrl.parent_watch import VARIABLE

PRIVATE = 0o077
"""The umask of our programs: what they write holds prompts and answers, and is for its owner."""
_USERS_UMASK = "STREAMRL_USERS_UMASK"
"""In the environment of our programs: the umask before that."""
HAS_PROC = os.path.exists("/proc/self/ns/pid")
_TAIL_CHARS, _MAX_LINE = 2000, 1 << 16


class Child:
    """A process with a pipe from this one as its standard input.

    It has a session of its own: Ctrl-C is for the process that started it, which ends it.

    Args:
        argv: its command line.
        log: file for its output and its errors, for its owner alone; None: they go where ours go.
        environment: all of its variables; None: ours.
        parent_watch: let it know that its standard input is a pipe to watch.
        answers: read its output with `receive` and `receive_line`.
        keep_errors: read its errors, for `errors` and `how_it_ended`.
        on_error: called with each line of its errors, in a thread of its own.
        folder: its working directory.
    Raises:
        OSError: it cannot be started.
    """

    def __init__(
        self, argv: Sequence[str], *, log: Path | None = None, environment: Mapping[str, str] | None = None,
        parent_watch: bool = True, answers: bool = False, keep_errors: bool = False,
        on_error: Callable[[str], None] | None = None, folder: str | None = None,
    ) -> None:
        variables = dict(os.environ if environment is None else environment)
        output: IO[bytes] | int | None = subprocess.PIPE if answers else None
        errors = subprocess.PIPE if keep_errors or on_error else None
        with ExitStack() as opened:
            if log is not None:
                output = opened.enter_context(open(log, "ab", opener=_private))
                errors = subprocess.STDOUT
            self.process = subprocess.Popen(
                argv, stdin=subprocess.PIPE, stdout=output, stderr=errors, cwd=folder, start_new_session=True,
                env=variables | ({VARIABLE: "stdin"} if parent_watch else {}),
            )
        self._received, self._error_tail, self._on_error = bytearray(), "", on_error
        self._reader: threading.Thread | None = None
        if self.process.stderr is not None:
            self._reader = threading.Thread(target=self._read_errors, name="errors of a child", daemon=True)
            self._reader.start()

    @property
    def pid(self) -> int:
        return self.process.pid

    def poll(self) -> int | None:
        """Return its exit status once it has ended; negative is the signal that ended it."""
        return self.process.poll()

    def ends_within(self, limit_s: float) -> bool:
        """Wait for its end, for so long at most."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(limit_s)
        return self.process.returncode is not None

    def close_input(self) -> None:
        """Close its standard input: by this our programs end in order."""
        assert self.process.stdin is not None
        with suppress(OSError):  # it has ended, and bytes that were written for it are left
            self.process.stdin.close()

    def kill_group(self) -> None:
        """Kill what is in its process group now."""
        with suppress(ProcessLookupError, PermissionError):  # none is left
            os.killpg(self.pid, signal.SIGKILL)

    def kill(self) -> int:
        """Kill it and its process group, and return its exit status; nothing of it is left."""
        if self.poll() is None:  # later its number may be that of another group
            self.kill_group()
        self.process.kill()
        status = self.process.wait()
        self.close_input()
        if self.process.stdout is not None:
            self.process.stdout.close()
        return status

    def errors(self, wait_s: float) -> str:
        """Return the end of its errors, once it has ended; what it left running may hold their pipe open for longer."""
        if self._reader is not None:
            self._reader.join(wait_s)
        return self._error_tail

    def how_it_ended(self, limit_s: float) -> tuple[int, str]:
        """Return status and last words, once its output has ended; it should be over, and is killed if it lives on."""
        self.ends_within(limit_s)
        status = self.kill()
        return status, next(iter(self.errors(limit_s).strip().splitlines()[-1:]), "it printed nothing")

    def send(self, data: bytes, deadline: float) -> None:
        """Write to its standard input. Raises TimeoutError: it does not read in time, EOFError: it reads no more."""
        assert self.process.stdin is not None
        fd, left = self.process.stdin.fileno(), memoryview(data)
        os.set_blocking(fd, False)
        while left:
            _wait_for(fd, select.POLLOUT, deadline)
            try:
                left = left[os.write(fd, left) :]
            except BrokenPipeError:
                raise EOFError from None

    def receive(self, size: int, deadline: float) -> bytes:
        """Return this many bytes of its output. Raises TimeoutError, and EOFError if it ends before."""
        while len(self._received) < size:
            self._receive_more(deadline)
        return self._taken(size)

    def receive_line(self, deadline: float | None) -> bytes:
        """Return the next line of its output; no deadline waits for as long as it runs. Raises as `receive`."""
        while (end := self._received.find(b"\n")) < 0:
            self._receive_more(deadline)
        return self._taken(end + 1)[:-1]

    def _receive_more(self, deadline: float | None) -> None:
        assert self.process.stdout is not None
        fd = self.process.stdout.fileno()
        _wait_for(fd, select.POLLIN, deadline)
        chunk = os.read(fd, 1 << 16)
        if not chunk:
            raise EOFError
        self._received += chunk

    def _taken(self, size: int) -> bytes:
        data = bytes(self._received[:size])
        del self._received[:size]
        return data

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as lines:
            while line := lines.readline(_MAX_LINE):
                text = line.decode(errors="replace")
                self._error_tail = (self._error_tail + text)[-_TAIL_CHARS:]
                if self._on_error is not None:
                    self._on_error(text)


def _wait_for(fd: int, event: int, deadline: float | None) -> None:
    """Wait for an end of a pipe. Raises TimeoutError. Not by select, which takes no descriptor above 1,023."""
    poller = select.poll()
    poller.register(fd, event)
    if not poller.poll(None if deadline is None else 1000 * max(0.0, deadline - time.monotonic())):
        raise TimeoutError


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def keep_private() -> None:
    """Make all files that this process and its children write private to their owner; programs begin with it."""
    os.environ.setdefault(_USERS_UMASK, f"{os.umask(PRIVATE):o}")
    os.umask(PRIVATE)


@contextmanager
def for_all() -> Iterator[None]:
    """Make files as the user has it: in a cache of downloads, which several users may share."""
    before = os.umask(PRIVATE)
    os.umask(int(os.environ.get(_USERS_UMASK, f"{before:o}"), 8))
    try:
        yield
    finally:
        os.umask(before)


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_LETTERS = {"running": "R", "sleeping": "S", "disk-sleep": "D", "stopped": "T", "tracing-stop": "t", "zombie": "Z",
            "dead": "X"}


def process_state(pid: int) -> str:
    """One letter as in /proc: R, S, D, T (stopped), Z ...; "" if there is no such process."""
    return _of_process(pid)[0]


def is_stopped(pid: int) -> bool:
    """Whether SIGSTOP, a terminal or a debugger stopped it: it does nothing until it is continued."""
    return process_state(pid) in ("T", "t")


def processor_s(pid: int) -> float:
    """Seconds of processor time that it has used so far; 0 if there is no such process."""
    return _of_process(pid)[1]


def began(pid: int) -> str:
    """Tells a process from another one that gets its id later, as after a restart of the machine; "" without one."""
    if HAS_PROC:
        try:
            ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
            return f"{ticks} after {Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"
        except OSError:
            return ""
    import psutil

    try:
        return str(psutil.Process(pid).create_time())
    except psutil.Error:
        return ""


def _of_process(pid: int) -> tuple[str, float]:
    """State and processor time: from /proc/PID/stat, or on a system without it by psutil, which takes longer."""
    if HAS_PROC:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return "", 0.0
        return fields[0], (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    import psutil

    try:
        process = psutil.Process(pid)
        with process.oneshot():
            times = process.cpu_times()
            return _LETTERS.get(process.status(), "S"), times.user + times.system
    except psutil.AccessDenied:  # of another user, and there
        return "S", 0.0
    except psutil.Error:
        return "", 0.0


def host_id() -> str:
    """Equal for two processes only if one sees the other's process id: the host's name and the process namespace."""
    namespace = os.stat("/proc/self/ns/pid").st_ino if HAS_PROC else 0
    return f"{socket.gethostname()[:40]}/{namespace}"
