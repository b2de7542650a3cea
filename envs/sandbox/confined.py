"""Grade what a model wrote in a process that can only compute: for graders that are packages, not programs.

    worker --question--> grader     the worker imports all that grading needs, then forks the grader, which gives up
           <--answer----            everything but reading files and its memory; one that takes too long or ends is
                                    replaced by another fork, within milliseconds

A sandbox (envs/sandbox/process.py) shows a program no packages. Here they are there, and the kernel refuses (seccomp)
to write files, to open connections, and to start or signal processes. That needs neither root nor namespaces.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import resource
import select
import signal
import struct
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

MEMORY_BYTES = 1 << 30
"""That a grader may take beside what was there when it started."""
PREPARE_S = 120.0
"""For what does not depend on the answer; a question may be slow to make."""
_MAX_ANSWER = 1 << 16
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _MODE_FILTER = 1, 22, 38, 2
_ALLOW, _REFUSE, _KILL = 0x7FFF0000, 0x00050001, 0x80000000  # refused calls fail with EPERM
_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06
_CHANGES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_CALLS = {
    # number of the architecture, of openat, and of the calls that are allowed, in the order of the comment:
    # read write close fstat newfstatat lseek mmap mprotect munmap brk rt_sigaction rt_sigprocmask rt_sigreturn pread64
    # madvise mremap sched_yield getpid gettid futex getdents64 clock_gettime clock_nanosleep exit exit_group getrandom
    # readlinkat faccessat faccessat2 statx getcwd uname getrusage getuid geteuid getgid getegid sigaltstack rseq
    # restart_syscall gettimeofday sched_getaffinity; then the older ones of x86-64: stat lstat access readlink time
    "x86_64": (0xC000003E, 257, (
        0, 1, 3, 5, 262, 8, 9, 10, 11, 12, 13, 14, 15, 17, 28, 25, 24, 39, 186, 202, 217, 228, 230, 60, 231, 318, 267,
        269, 439, 332, 79, 63, 98, 102, 107, 104, 108, 131, 334, 219, 96, 204, 4, 6, 21, 89, 201,
    )),
    "aarch64": (0xC00000B7, 56, (
        63, 64, 57, 80, 79, 62, 222, 226, 215, 214, 134, 135, 139, 67, 233, 216, 124, 172, 178, 98, 61, 113, 115, 93,
        94, 278, 78, 48, 439, 291, 17, 160, 165, 174, 175, 176, 177, 132, 293, 128, 169, 123,
    )),
}  # fmt: skip


def confine(memory_bytes: int = MEMORY_BYTES) -> None:
    """Confine this process, of one thread, to reading files and computing, from here on. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "prctl"):
        raise OSError("answers are graded where the kernel confines the grader (seccomp): on Linux, or Windows in WSL2")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with open("/proc/self/statm") as file:
        most = int(file.read().split()[0]) * resource.getpagesize() + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    if platform.machine() not in _CALLS:
        raise OSError(f"answers are graded on {' and '.join(_CALLS)} alone, this machine is {platform.machine()}")
    text = b"".join(struct.pack("HBBI", *step) for step in _filter(*_CALLS[platform.machine()]))
    code = ctypes.create_string_buffer(text, len(text))
    program = ctypes.create_string_buffer(struct.pack("HP", len(text) // 8, ctypes.addressof(code)))
    for option, *values in (
        (_PR_SET_PDEATHSIG, signal.SIGKILL, 0), (_PR_SET_NO_NEW_PRIVS, 1, 0),
        (_PR_SET_SECCOMP, _MODE_FILTER, ctypes.addressof(program)),
    ):
        if libc.prctl(option, *map(ctypes.c_ulong, (*values, 0, 0))) != 0:
            raise OSError(ctypes.get_errno(), "the kernel does not let a process confine itself (prctl, seccomp)")


def _filter(architecture: int, openat: int, calls: Iterable[int]) -> list[tuple[int, int, int, int]]:
    """Instructions for the kernel: what to compute, the jumps if it is so and if not, a constant."""
    program = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, 0)]
    for call in calls:
        program += [(_EQUAL, 0, 1, call), (_RETURN, 0, 0, _ALLOW)]
    return [
        *program, (_EQUAL, 0, 3, openat), (_LOAD, 0, 0, 32), (_ANY_BIT, 1, 0, _CHANGES), (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _REFUSE),
    ]


def serve(prepare: Callable[[Any], Callable[[], Any]], limit_s: float) -> None:
    """Answer the questions on standard input, a JSON line each, until it ends.

    Args:
        prepare: what grading this question means, as a function; its own time and its errors are not the answer's.
        limit_s: of that function.

    An answer is `{"value": ...}`; `{"failed": why}` if the grader raised, took too long or ended its process; or
    `{"broken": why}` if `prepare` did.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a package prints must not pass for an answer
    grader: _Grader | None = None
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        grader = grader or _Grader(prepare)
        answer = grader.ask(line, limit_s)
        if grader.ended:
            grader = None
        print(json.dumps(answer), file=answers, flush=True)


class _Grader:
    """A fork of the worker that has confined itself."""

    def __init__(self, prepare: Callable[[Any], Callable[[], Any]]) -> None:
        reads, self._questions = os.pipe()
        self._answers, writes = os.pipe()
        self.ended, self._buffer = False, b""
        self._pid = os.fork()
        if self._pid == 0:
            _grade_all(prepare, reads, writes)
        os.close(reads)
        os.close(writes)

    def ask(self, line: str, limit_s: float) -> dict[str, Any]:
        data = memoryview(line.encode())
        while data:
            try:
                data = data[os.write(self._questions, data) :]
            except BrokenPipeError:
                return self._end("broken", "the grader's process does not start")
        answer = self._read(PREPARE_S)
        if answer is None:
            return self._end("broken", f"the request ended its process, or took longer than {PREPARE_S:g} s")
        if answer == {"prepared": True}:
            answer = self._read(limit_s)
        if answer is None:
            return self._end("failed", f"it ended its process, or took longer than {limit_s:g} s")
        return answer

    def _read(self, limit_s: float) -> dict[str, Any] | None:
        """One answer; None at the end of the time or of the process, or if there is no end to it."""
        deadline = time.monotonic() + limit_s
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or len(self._buffer) > _MAX_ANSWER or not select.select([self._answers], [], [], left)[0]:
                return None
            chunk = os.read(self._answers, 1 << 12)
            if not chunk:
                return None
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)

    def _end(self, kind: str, why: str) -> dict[str, Any]:
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self._questions)
        os.close(self._answers)
        self.ended = True
        return {kind: why}


def _grade_all(prepare: Callable[[Any], Callable[[], Any]], questions: int, answers: int) -> None:
    """Grade the questions in the forked process: never returns."""
    try:
        null = os.open(os.devnull, os.O_RDWR)
        for place, fd in enumerate((null, null, null, questions, answers)):
            os.dup2(fd, 10 + place)
        for place in range(5):
            os.dup2(10 + place, place)
        os.closerange(5, 1 << 12)
        try:
            confine()
        except OSError as error:
            os.write(4, json.dumps({"broken": str(error)}).encode() + b"\n")
            os._exit(1)
        with os.fdopen(3) as lines:
            for line in lines:
                for answer in _answers(prepare, json.loads(line)):
                    os.write(4, json.dumps(answer).encode() + b"\n")
    finally:
        os._exit(0)


def _answers(prepare: Callable[[Any], Callable[[], Any]], question: Any) -> Iterable[dict[str, Any]]:
    try:
        grade = prepare(question)
    except Exception as error:
        yield {"broken": f"{type(error).__name__}: {error}"[:500]}
        return
    yield {"prepared": True}
    try:
        yield {"value": grade()}
    except BaseException as error:  # SystemExit and its like, too
        yield {"failed": f"{type(error).__name__}: {error}"[:500]}
