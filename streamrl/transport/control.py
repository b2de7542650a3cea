"""The control socket of a running process: a JSON request, a JSON answer, between processes of one user and machine.

The socket is a file in a directory that only its owner may enter (mode 0700): the file system authenticates. The hub
names it in `hub.json`, `streamrl launch` in `launch.json`. Nothing here can be reached over a network.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import zmq

from streamrl.errors import ControlError
from streamrl.processes import began, process_state
from streamrl.transport.sockets import socket_folder, socket_root

log = logging.getLogger(__name__)

FOLDER_PREFIX = "streamrl-control-"
OWNER = "owner.json"
"""In such a folder: whose it is."""
MAX_REQUEST_BYTES = 1 << 16
MAX_AT_ONCE = 16
MOST_FINISH_S = 86_400.0
"""The longest time that an actor may be given to finish its leases."""

Answerer = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""From a request, with `verb` and its arguments, to the answer; raises ControlError for one that is refused."""


class ControlServer:
    """Answers requests when its owner's loop calls `serve`, which never waits."""

    def __init__(self, context: zmq.Context, answer: Answerer) -> None:
        remove_dead_folders()
        self._folder = Path(socket_folder(FOLDER_PREFIX))
        (self._folder / OWNER).write_text(json.dumps(note("")))
        self.endpoint = f"ipc://{self._folder}/control"
        self._answer = answer
        self.socket = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        self.socket.setsockopt(zmq.LINGER, 500)
        self.socket.bind(self.endpoint)

    def serve(self) -> None:
        """Answer what has arrived. A request that cannot be read, or a client that is gone, changes nothing."""
        for _ in range(MAX_AT_ONCE):
            try:
                routing_id, *frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self.socket.send_multipart([routing_id, b"", json.dumps(self._reply(frames)).encode()], zmq.NOBLOCK)

    def _reply(self, frames: list[bytes]) -> Mapping[str, Any]:
        try:
            request = json.loads(frames[-1])
            if not isinstance(request, dict) or not isinstance(request.get("verb"), str):
                raise ControlError("a control request is an object with a verb")
        except (ControlError, ValueError, IndexError, RecursionError) as error:
            return {"ok": False, "error": f"the request cannot be read: {error}"}
        try:
            return {"ok": True, **self._answer(request)}
        except ControlError as error:
            return {"ok": False, "error": str(error)}
        except Exception as error:  # a run must not end by a request
            log.exception("a request could not be answered")
            return {"ok": False, "error": f"the request cannot be answered: {error!r:.300}"}

    def close(self) -> None:
        self.socket.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def note(endpoint: str) -> dict[str, Any]:
    """The entry that a process writes into its file of the run directory, so that `ask` finds it."""
    return {"control": endpoint, "pid": os.getpid(), "began": began(os.getpid()), "host": socket.gethostname()}


def remove_dead_folders() -> None:
    """Remove the folders of this user's processes on this machine that were killed without a chance to do so."""
    for folder in Path(socket_root()).glob(f"{FOLDER_PREFIX}*"):
        with suppress(OSError, ValueError):  # of another user, just begun or just gone
            owner = json.loads((folder / OWNER).read_text())
            if folder.stat().st_uid == os.getuid() and not is_running(owner):
                shutil.rmtree(folder, ignore_errors=True)


def is_elsewhere(noted: Mapping[str, Any]) -> bool:
    """True if the process that left this note is of another machine or container, which has a name of its own."""
    return noted.get("host", socket.gethostname()) != socket.gethostname()


def is_running(noted: Mapping[str, Any]) -> bool:
    """Whether the process that left this note still runs, as far as this machine can tell."""
    pid = noted.get("pid")
    if is_elsewhere(noted):
        return True  # not to be known here
    try:
        if not pid or process_state(int(pid)) in ("", "Z", "X"):
            return False
        return noted.get("began", "") in ("", began(int(pid)))  # else another process has its id by now
    except (ValueError, TypeError, OverflowError):  # of a note that somebody has edited
        return False


def ask(noted: Mapping[str, Any], who: str, *, timeout_s: float = 5.0, **request: Any) -> dict[str, Any]:
    """Send a request to the process that left this note and return its answer.

    Raises:
        ControlError: it has no control socket, runs on another machine, refuses, or does not answer in time.
    """
    endpoint, host = str(noted.get("control", "")), noted.get("host", "")
    if not endpoint.startswith("ipc://"):
        raise ControlError(f"{who} has no control socket: it is of an older release")
    if host != socket.gethostname():
        raise ControlError(f"{who} runs on {host}: give this command there, as the user who started the run")
    path = endpoint.removeprefix("ipc://")
    if not os.access(path, os.W_OK):
        why = "it belongs to another user" if is_running(noted) else "the process has ended"
        raise ControlError(f"{who} cannot be reached at {path}: {why}")
    context = zmq.Context()
    client = context.socket(zmq.REQ)
    client.setsockopt(zmq.LINGER, 0)
    try:
        client.connect(endpoint)
        client.send(json.dumps(request).encode())
        if not client.poll(timeout_s * 1000):
            raise ControlError(f"{who} (process {noted.get('pid')}) did not answer within {timeout_s:g} s")
        answer = json.loads(client.recv())
    finally:
        client.close()
        context.term()
    if not answer.pop("ok"):
        raise ControlError(str(answer["error"]))
    return answer
