"""`subprocess.Popen` for our own programs (`python -m learner WORDS`), which a fork server starts as forks of itself.

The process is a child of the fork server (`tests/flow/fork_server.py`). Its process id, session, standard streams,
environment, words and exit status are those that a child of this process would have.
"""

import io
import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

MAX_REQUEST_BYTES = 1 << 18
KNOWN_OPTIONS = {"stdin", "stdout", "stderr", "env", "cwd", "start_new_session", "text", "errors"}


def module_and_words(command: object) -> tuple[str, list[str]] | None:
    """The module of `python [-P] [-u] -m MODULE WORDS` and its words; None for any other command."""
    if not isinstance(command, Sequence) or isinstance(command, str) or not command or command[0] != sys.executable:
        return None
    rest = [str(word) for word in command[1:]]
    while rest[:1] in (["-P"], ["-u"]):
        del rest[0]
    return (rest[1], rest[2:]) if len(rest) > 1 and rest[0] == "-m" else None


class ForkedPopen(subprocess.Popen):
    """Starts our own programs through the fork server, and everything else as `subprocess.Popen` does."""

    server = ""
    """The fork server's socket. Its children are told, so their children are forked too."""
    programs: tuple[str, ...] = ()
    """Modules that are forked."""
    _answers: socket.socket | None = None

    def __init__(self, args: Any, **options: Any) -> None:
        program = module_and_words(args)
        if program is None or program[0] not in self.programs or not options.keys() <= KNOWN_OPTIONS:
            super().__init__(args, **options)
            return
        self.args, self.returncode, self.text_mode = args, None, options.get("text")
        self._communication_started, self._input, self._sigint_wait_secs = False, None, 0.25  # for its `communicate`
        with ExitStack() as childs_ends:
            childs, ours = _streams(options, childs_ends)
            self.stdin, self.stdout, self.stderr = (_opened(end, number, options) for number, end in enumerate(ours))
            self._answers = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._answers.connect(self.server)
            request = {
                "module": program[0], "words": program[1], "command": [str(word) for word in args],
                "environment": dict(_plain(options.get("env"))), "folder": str(options.get("cwd") or os.getcwd()),
                "new_session": bool(options.get("start_new_session")), "server": self.server,
                "programs": self.programs,
            }
            socket.send_fds(self._answers, [json.dumps(request).encode()], childs)
        self.pid = self._receive(None)["pid"]

    def poll(self) -> int | None:
        return self._ended(0.0) if self._answers is not None else super().poll()

    def wait(self, timeout: float | None = None) -> int:
        if self._answers is None:
            return super().wait(timeout)
        code = self._ended(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return code

    def _ended(self, timeout_s: float | None) -> int | None:
        """Its exit status as soon as it has ended, None if it runs on."""
        if self.returncode is None and (answer := self._receive(timeout_s)):
            self.returncode = answer["code"]
        return self.returncode

    def _receive(self, timeout_s: float | None) -> dict[str, int]:
        """The server's next message; empty if none came in time."""
        assert self._answers is not None
        if not select.select([self._answers], [], [], timeout_s)[0]:
            return {}
        answer = self._answers.recv(MAX_REQUEST_BYTES)
        if not answer:
            raise RuntimeError(f"the fork server ended before it told the exit status of {self.args}: see its log")
        return json.loads(answer)


def _plain(environment: Mapping[str, str] | None) -> Mapping[str, str]:
    return os.environ if environment is None else environment


def _streams(options: Mapping[str, Any], childs_ends: ExitStack) -> tuple[list[int], list[int]]:
    """(the child's three standard streams, our ends of those that are pipes or else -1)."""
    childs, ours = [], []
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        wanted, end = options.get(name), -1
        if wanted is None:
            file = number
        elif wanted == subprocess.STDOUT:
            file = childs[1]
        elif wanted in (subprocess.PIPE, subprocess.DEVNULL):
            if wanted == subprocess.DEVNULL:
                file = os.open(os.devnull, os.O_RDWR)
            else:
                file, end = os.pipe() if number == 0 else reversed(os.pipe())
            childs_ends.callback(os.close, file)
        else:
            file = wanted if isinstance(wanted, int) else wanted.fileno()
        childs.append(file)
        ours.append(end)
    return childs, ours


def _opened(file: int, number: int, options: Mapping[str, Any]) -> Any:
    """Our end of a pipe as Popen offers it; None where there is no pipe."""
    if file < 0:
        return None
    if number == 0:
        stream: Any = os.fdopen(file, "wb", buffering=-1)
        return io.TextIOWrapper(stream, write_through=True) if options.get("text") else stream
    stream = os.fdopen(file, "rb")
    return io.TextIOWrapper(stream, errors=options.get("errors")) if options.get("text") else stream
