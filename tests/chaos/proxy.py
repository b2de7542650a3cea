"""A TCP proxy that knows ZMTP frames: it resets, cuts, delays, duplicates and damages what actors and hub exchange.

Every connection to `far` is carried to the same port of `near`. ZMTP 3: a greeting of 64 bytes each way, then frames of
one flag byte (1 more, 2 long, 4 command), a size of 1 or 8 bytes, and a body. Commands, which make the connection, are
carried as they are.
"""

import asyncio
import random
import socket
import struct
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from tests.chaos.processes import ChaosSpec

GREETING_BYTES = 64
LONG, COMMAND = 2, 4
TO_HUB, TO_ACTORS = 0, 1


class Proxy:
    """State of the network; the nemesis changes it by commands."""

    def __init__(self, spec: ChaosSpec) -> None:
        self.spec, self.rng = spec, random.Random(f"{spec.seed} proxy")
        self.open: set[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = set()
        self.blocked = [False, False]  # to the hub, to actors
        self.refusing = False
        self.delay_s = 0.0
        self.budget = {"flip": 0, "duplicate": 0, "late_copy": 0, "truncate": 0}
        self.moved = asyncio.Event()

    async def serve(self, commands: Connection) -> None:
        for port in (self.spec.hub_port, self.spec.weights_port):
            await asyncio.start_server(
                lambda reader, writer, port=port: self._carry(reader, writer, port), self.spec.far, port, backlog=4096
            )
        asyncio.get_running_loop().add_reader(commands.fileno(), lambda: self._obey(*commands.recv()))
        await asyncio.Event().wait()

    def _obey(self, command: str, *arguments: Any) -> None:
        if command == "reset":
            pairs = sorted(self.open, key=id)
            for pair in self.rng.sample(pairs, k=max(1, round(len(pairs) * arguments[0])) if pairs else 0):
                self._reset(pair)
        elif command == "block":
            self.blocked = list(arguments[0])
        elif command == "refuse":
            self.refusing = arguments[0]
            for pair in list(self.open) if self.refusing else ():
                self._reset(pair)
        elif command == "delay":
            self.delay_s = arguments[0]
        elif command == "spend":
            self.budget[arguments[0]] += arguments[1]
        elif command == "heal":
            self.blocked, self.refusing, self.delay_s = [False, False], False, 0.0
            self.budget = dict.fromkeys(self.budget, 0)
        self.moved.set()
        self.moved = asyncio.Event()

    def _reset(self, pair: tuple[asyncio.StreamWriter, asyncio.StreamWriter]) -> None:
        """RST instead of FIN, as a broken path or a firewall answers."""
        self.open.discard(pair)
        for writer in pair:
            with suppress(OSError):
                writer.get_extra_info("socket").setsockopt(
                    socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
                )
            writer.transport.abort()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int) -> None:
        try:
            if self.refusing:
                raise ConnectionError
            hub_reader, hub_writer = await asyncio.open_connection(self.spec.near, port)
        except OSError:  # the hub is down: so is the far end
            writer.transport.abort()
            return
        pair = (writer, hub_writer)
        self.open.add(pair)
        pumps = [
            asyncio.ensure_future(self._pump(reader, hub_writer, TO_HUB, pair)),
            asyncio.ensure_future(self._pump(hub_reader, writer, TO_ACTORS, pair)),
        ]
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        for pump in pumps:
            pump.cancel()
        self.open.discard(pair)
        for one in pair:
            one.transport.abort()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: int,
        pair: tuple[asyncio.StreamWriter, asyncio.StreamWriter],
    ) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            left = GREETING_BYTES  # carried as it comes: each side waits for the other's in the middle of it
            while left:
                part = await reader.read(left)
                if not part:
                    return
                writer.write(part)
                left -= len(part)
            while True:
                header = await reader.readexactly(1)
                size = await reader.readexactly(8 if header[0] & LONG else 1)
                body = await reader.readexactly(int.from_bytes(size, "big"))
                while self.blocked[way]:
                    await self.moved.wait()
                if self.delay_s:
                    await asyncio.sleep(self.rng.uniform(0.0, self.delay_s))
                self._forward(writer, header + size, body, command=bool(header[0] & COMMAND), pair=pair)
                await writer.drain()

    def _forward(
        self, writer: asyncio.StreamWriter, header: bytes, body: bytes, *, command: bool,
        pair: tuple[asyncio.StreamWriter, asyncio.StreamWriter],
    ) -> None:
        frame = header + body
        if command or header[0] & 1:  # the first of several frames: a copy would make a message that was never sent
            writer.write(frame)
        elif body and self._spend("flip"):
            place = len(header) + self.rng.randrange(len(body))
            writer.write(frame[:place] + bytes([frame[place] ^ (1 << self.rng.randrange(8))]) + frame[place + 1 :])
        elif self._spend("truncate"):
            writer.write(frame[: self.rng.randrange(len(frame))])
            asyncio.get_running_loop().call_soon(self._reset, pair)
        elif self._spend("duplicate"):
            writer.write(frame + frame)
        else:
            writer.write(frame)
            if self._spend("late_copy"):
                asyncio.get_running_loop().call_later(self.rng.uniform(0.1, 2.0), _write_late, writer, frame)

    def _spend(self, kind: str) -> bool:
        if not self.budget[kind] or self.rng.random() > 0.3:
            return False
        self.budget[kind] -= 1
        return True


def _write_late(writer: asyncio.StreamWriter, frame: bytes) -> None:
    if not writer.transport.is_closing():
        writer.write(frame)


def main(spec: ChaosSpec, commands: Connection) -> int:
    spec.log_to("proxy")

    async def run() -> None:
        await Proxy(spec).serve(commands)

    asyncio.run(run())
    return 0
