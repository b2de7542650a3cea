"""The limits of one program, and the outcome of its execution."""

from __future__ import annotations

from dataclasses import dataclass

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
