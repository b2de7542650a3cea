"""FakeCommunicator: a communicator over loopback sockets, with the bad habits of the real ones. For tests only.

Rank 0 listens at the port that its unique id names; the others connect. As with NCCL, connecting blocks until every
rank is there, a rank that died leaves the others waiting without limit, and only `abort` ends that. It moves bytes of
CPU tensors between threads or processes, so that everything above a communicator runs for real.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import struct
import threading
from collections.abc import Callable

import torch

from streamrl.errors import WeightsError

_ID = struct.Struct("<H16s")
_HELLO = struct.Struct("<16sHH")


class FakeLibrary:
    """Makes FakeCommunicators.

    Attributes:
        on_broadcast: called with (rank, bytes) before each broadcast of a communicator of this library.
        damage: may change what a receiver of this library is given: bytearray in, nothing out.
    """

    def __init__(self) -> None:
        self.on_broadcast: Callable[[int, int], None] = lambda rank, nbytes: None
        self.damage: Callable[[bytearray], None] = lambda data: None
        self.abort_hangs = threading.Event()
        self._listeners: dict[bytes, socket.socket] = {}
        self._open: list[socket.socket] = []

    def die(self) -> None:
        """What the system does with the sockets of a killed process: a peer that connects is told, a member of a
        formed group is not (and hangs, see below)."""
        for one in self._open:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        self._open.clear()

    def unique_id(self) -> bytes:
        listener = socket.create_server(("127.0.0.1", 0))
        unique_id = _ID.pack(listener.getsockname()[1], secrets.token_bytes(16))
        self._listeners[unique_id] = listener
        self._open.append(listener)
        return unique_id

    def connect(self, world: int, unique_id: bytes, rank: int) -> FakeCommunicator:
        port, secret = _ID.unpack(unique_id)
        if rank:
            link = socket.create_connection(("127.0.0.1", port))
            link.sendall(_HELLO.pack(secret, world, rank))
            try:
                _read(link, 1)  # rank 0 says when all are there
            except OSError as error:
                raise WeightsError("the root of the group is gone") from error
            return FakeCommunicator(self, world, rank, {0: link})
        links: dict[int, socket.socket] = {}
        with self._listeners.pop(unique_id) as listener:
            while len(links) < world - 1:
                link, _ = listener.accept()
                self._open.append(link)
                theirs, their_world, their_rank = _HELLO.unpack(_read(link, _HELLO.size))
                if (theirs, their_world) != (secret, world) or their_rank in links:
                    raise WeightsError(f"rank {their_rank} of {their_world} came to a group of {world}")
                links[their_rank] = link
        for link in links.values():
            link.sendall(b"!")
        return FakeCommunicator(self, world, rank, links)


class FakeCommunicator:
    """One rank. Its peers' death is met with silence, as in the real library, until `abort`."""

    def __init__(self, library: FakeLibrary, world: int, rank: int, links: dict[int, socket.socket]) -> None:
        self._library, self._world, self._rank, self._links = library, world, rank, links
        self._aborted = threading.Event()

    def test(self) -> None:
        total = 1
        if self._rank:
            self._send(0, b"\x01")
            (total,) = struct.unpack("<H", self.wait_for(0, 2))
        else:
            total += sum(self.wait_for(rank)[0] for rank in self._links)
            for rank in self._links:
                self._send(rank, struct.pack("<H", total))
        if total != self._world:
            raise WeightsError(f"{total} ranks answered, the group has {self._world}")

    def broadcast(self, buffer: torch.Tensor) -> None:
        self._library.on_broadcast(self._rank, buffer.numel())
        if self._rank == 0:
            data = buffer.numpy().tobytes()
            for rank in self._links:
                self._send(rank, data)
            for rank in self._links:  # no rank runs ahead by more than one broadcast
                self.wait_for(rank)
            return
        received = bytearray(self.wait_for(0, buffer.numel()))
        self._library.damage(received)
        buffer.copy_(torch.frombuffer(received, dtype=torch.uint8))
        self._send(0, b"\x01")

    def abort(self) -> None:
        if self._library.abort_hangs.is_set():
            threading.Event().wait()
        self._aborted.set()
        for link in self._links.values():
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
            link.close()

    def _send(self, rank: int, data: bytes) -> None:
        try:
            self._links[rank].sendall(data)
        except OSError:
            self._hang()

    def wait_for(self, rank: int, nbytes: int = 1) -> bytes:
        try:
            return _read(self._links[rank], nbytes)
        except OSError:
            self._hang()
            raise

    def _hang(self) -> None:
        self._aborted.wait()
        raise WeightsError("aborted")


def _read(link: socket.socket, nbytes: int) -> bytes:
    data = bytearray()
    while len(data) < nbytes:
        piece = link.recv(min(1 << 20, nbytes - len(data)))
        if not piece:
            raise ConnectionResetError
        data += piece
    return bytes(data)
