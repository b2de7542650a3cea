"""The thread that owns an actor's socket and moves bytes between the hub, the session and the worker's event loop.

A thread of its own, because an engine step or a long reward call must not delay a heartbeat.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable

import zmq

from streamrl.errors import ProtocolVersionError, WireError
from streamrl.messages import TO_ACTOR, ActorState, Group, Installed, NcclState
from streamrl.messages.codec import Decoder
from streamrl.transport.authentication import HandshakeMonitor
from streamrl.transport.keys import ActorKey
from streamrl.transport.session import ActorSession, Deliver, Effect, LinkClosed, Progress, Send
from streamrl.transport.sockets import actor_dealer

log = logging.getLogger("streamrl.actor")

TICK_S = 0.05
NO_ANSWER_S = 10.0
"""How often an actor that gets no answer says so."""
REFUSED_S = 1.0
"""Time from a refused handshake to the next: the key may be added meanwhile."""
RENEW_S = 2.0
"""An actor that lost its hub makes a new connection so often: TCP may wait half a minute for one that broke."""
EXIT_PROTOCOL = 4


class HubClient:
    """The worker's end of a session with the hub at `endpoint`, encrypted if there is a `key`.

    Events arrive in `events`; commands are thread-safe and return at once. Only the client's own thread uses `session`
    after `start`.
    """

    def __init__(self, endpoint: str, session: ActorSession, key: ActorKey | None = None) -> None:
        self.endpoint = endpoint
        self.key = key
        self.session = session
        self.events: asyncio.Queue[Deliver | LinkClosed] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._commands: deque[Callable[[float], list[Effect]]] = deque()
        self._wake_read, self._wake_write = os.pipe()
        self._stopping = False
        self._next_warning_s = NO_ANSWER_S
        self._waiting: deque[bytes | bytearray] = deque()
        self._decoder = Decoder(TO_ACTOR)
        self._thread = threading.Thread(target=self._run, name="hub-client", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def send_group(self, group: Group) -> None:
        """Number, keep and send a group; it stays in the outbox until it is DURABLE or rejected."""
        self._command(lambda now: self.session.submit(group, now))

    def report_installed(self, message: Installed) -> None:
        self._command(lambda now: self.session.report_installed(message, now))

    def report_released(self, turn: int) -> None:
        """The engine has given its memory back, for this turn of the learner."""
        self._command(lambda now: self.session.report_released(turn, now))

    def report_nccl(self, state: NcclState) -> None:
        """A communicator is being built here, formed or lost; from any thread."""
        self._command(lambda now: self.session.report_nccl(state, now))

    def update(self, progress: Progress) -> None:
        """The worker's part of the next heartbeat."""
        self.session.progress = progress  # one reference assignment: atomic for the other thread

    def drain(self, reason: str, deadline_s: float | None = None) -> None:
        self._command(lambda now: self.session.drain(reason, now, deadline_s))

    def close(self) -> None:
        """End the thread and the socket; nothing more is sent."""
        self._stopping = True
        self._wake()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout=5)

    def _command(self, command: Callable[[float], list[Effect]]) -> None:
        self._commands.append(command)
        if len(self._commands) <= 1:  # with more the thread is awake, and takes all before it sleeps
            self._wake()

    def _wake(self) -> None:
        try:
            os.write(self._wake_write, b"x")
        except OSError:  # the pipe is closed: the thread has ended
            pass

    # --- the thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:  # whatever it was, an actor without a session must exit, loudly
            log.exception("the session with the hub failed")
            closed = LinkClosed(1, f"the session with the hub failed: {error!r}")
            self._loop.call_soon_threadsafe(self.events.put_nowait, closed)

    def _serve(self) -> None:
        context = zmq.Context()
        handshakes = HandshakeMonitor(self.endpoint, self.key.name if self.key else "")
        socket = self._connect(context, handshakes)
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(self._wake_read, zmq.POLLIN)
        retry_at, renewed_at = math.inf, time.monotonic()
        try:
            self._apply(socket, self.session.start(time.monotonic()))
            while not self._stopping:
                ready = dict(poller.poll(TICK_S * 1000))
                self._retry(socket)
                if self._wake_read in ready:
                    os.read(self._wake_read, 4096)
                while self._commands:
                    self._apply(socket, self._commands.popleft()(time.monotonic()))
                if socket in ready:
                    self._receive(socket)
                self._apply(socket, self.session.tick(time.monotonic()))
                now = time.monotonic()
                if handshakes.connected():
                    self._apply(socket, self.session.connected(now))
                if handshakes.refused():
                    retry_at = now + REFUSED_S
                elif now >= retry_at or (retry_at == math.inf and self._broken(now, now - renewed_at)):
                    retry_at, renewed_at = math.inf, now
                    poller.unregister(socket)
                    handshakes.close()
                    socket.close(0)
                    socket = self._connect(context, handshakes)
                    poller.register(socket, zmq.POLLIN)
                self._warn_if_unanswered(time.monotonic())
        finally:
            handshakes.close()
            socket.close(0)
            context.term()
            os.close(self._wake_read)
            os.close(self._wake_write)

    def _connect(self, context: zmq.Context, handshakes: HandshakeMonitor) -> zmq.Socket:
        socket = actor_dealer(context, self.endpoint, key=self.key)
        handshakes.watch(socket)
        return socket

    def _broken(self, now: float, since_s: float) -> bool:
        """Whether to try another connection, `since_s` after the present one was made."""
        if self.session.linked:
            return False
        # Before the first WELCOME a hub may be loading, and answers now and then.
        wait_s = RENEW_S if self.session.state is ActorState.DISCONNECTED else NO_ANSWER_S
        return min(since_s, self.session.silent_s(now)) > wait_s

    def _warn_if_unanswered(self, now: float) -> None:
        silent_s = self.session.silent_s(now)
        if silent_s < NO_ANSWER_S:
            self._next_warning_s = NO_ANSWER_S
        elif silent_s >= self._next_warning_s:
            self._next_warning_s += NO_ANSWER_S
            log.warning("no answer from %s for %.0f s: is the learner up, is the address "
                        "right and the port open?", self.endpoint, silent_s)

    def _receive(self, socket: zmq.Socket) -> None:
        for _ in range(64):
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = self._decoder.decode(frames[0])
            except WireError as error:
                log.warning("refused a message of the hub (%s): %s", error.counter, error)
                if isinstance(error, ProtocolVersionError) and not self.session.linked:
                    self._apply(socket, [LinkClosed(EXIT_PROTOCOL, str(error))])  # none can ever be read
                continue
            self._apply(socket, self.session.received(message, time.monotonic()))

    def _apply(self, socket: zmq.Socket, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                self._send(socket, effect.frame)
            else:
                self._loop.call_soon_threadsafe(self.events.put_nowait, effect)
                if isinstance(effect, LinkClosed):
                    self._stopping = True

    def _send(self, socket: zmq.Socket, frame: bytes | bytearray) -> None:
        """Send now, or queue behind a full pipe; unlinked nothing is queued, because HELLO is repeated."""
        if not self.session.linked:
            self._waiting.clear()
        elif self._waiting:
            self._waiting.append(frame)
            return
        if not self._try(socket, frame) and self.session.linked:
            self._waiting.append(frame)

    def _retry(self, socket: zmq.Socket) -> None:
        while self._waiting and self._try(socket, self._waiting[0]):
            self._waiting.popleft()

    @staticmethod
    def _try(socket: zmq.Socket, frame: bytes | bytearray) -> bool:
        try:
            socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True
