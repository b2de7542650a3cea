"""CURVE on sockets: the hub accepts only keys of its directory, and an actor only the hub whose public key it has.

CurveZMQ (RFC 26) encrypts and authenticates each connection; ZAP (RFC 27) asks `Authenticator` which keys may connect.
A key that is removed while its connection is open is refused at the next message, and the hub evicts its actor.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import recv_monitor_message

from streamrl.errors import ConfigError
from streamrl.transport.keys import ActorKey, KeyDirectory, KeyPair, RankKeys, short

log = logging.getLogger("streamrl.transport")

ZAP_DOMAIN = b"streamrl"
REFUSAL_LOG_S = 10.0
_HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


class Authenticator:
    """Authentication of the keys that connect to the sockets of one process.

    Args:
        context: of the sockets; the answers to their ZAP requests come from a thread of its own.
        keys: where the hub's key pair and the allowed public keys lie.
    Raises:
        ConfigError: the directory has no keys, or a damaged one.
    """

    def __init__(self, context: zmq.Context, keys: KeyDirectory | RankKeys) -> None:
        self.pair = keys.hub()
        self._keys = keys
        self._stamp = keys.stamp()
        self._allowed = keys.allowed()
        self._refused: Counter[bytes] = Counter()
        self._next_log_s = 0.0
        self._zap = ThreadAuthenticator(context, log=logging.getLogger("zmq.auth"))
        self._zap.start()  # before any socket is bound, or its first clients would be let in unasked
        self._zap.configure_curve_callback(ZAP_DOMAIN.decode(), self)

    def protect(self, socket: zmq.Socket) -> None:
        """Let only allowed keys connect; before bind."""
        serve_with(socket, self.pair)
        socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)

    def callback(self, domain: str, key: bytes) -> bool:
        """ZAP: may this public key (Z85) connect? In the thread of the authenticator."""
        if key not in self._allowed:
            with contextlib.suppress(ConfigError):
                self._allowed = self._keys.allowed()  # it may have been added a moment ago
        if key not in self._allowed:
            self._refused[key] += 1
        return key in self._allowed

    def name_of(self, frame: zmq.Frame) -> str:
        """Name of the key that this came with; "" once it is removed."""
        return self._allowed.get(str(frame.get("User-Id")).encode(), "")

    def names(self) -> set[str]:
        """Names whose keys are allowed."""
        return set(self._allowed.values())

    def reload(self) -> bool:
        """Read the directory again if it has changed; whether it has. One that cannot be read changes nothing."""
        try:
            stamp = self._keys.stamp()
            if stamp == self._stamp:
                return False
            self._allowed = self._keys.allowed()  # one assignment: safe for the other thread
        except ConfigError as error:
            log.error("the keys known so far stay allowed: %s", error)
            return False
        self._stamp = stamp
        log.info("keys changed, allowed are now: %s", ", ".join(sorted(self.names())) or "none")
        return True

    def report_refusals(self, now: float) -> None:
        """At most one line every ten seconds, however often an unknown key tries."""
        if not self._refused or now < self._next_log_s:
            return
        self._next_log_s = now + REFUSAL_LOG_S
        refused, self._refused = self._refused, Counter()
        names = ", ".join(f"{short(key)} ({count} times)" for key, count in refused.most_common(3))
        log.warning("connections refused because their keys are not allowed: %s. `streamrl keys list` shows those that "
                    "are, `streamrl keys add` makes one", names)

    def close(self) -> None:
        """End the thread; before the context ends."""
        self._zap.stop()


def serve_with(socket: zmq.Socket, pair: KeyPair) -> None:
    """Encrypt, and prove to clients that this process has the secret half of `pair`; before bind."""
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, pair.secret)


def connect_with(socket: zmq.Socket, key: ActorKey, server: bytes = b"") -> None:
    """Show this key, and talk only to the holder of `server` (the hub, if empty); before connect."""
    socket.setsockopt(zmq.CURVE_PUBLICKEY, key.pair.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, key.pair.secret)
    socket.setsockopt(zmq.CURVE_SERVERKEY, server or key.hub)


class HandshakeMonitor:
    """Tells why an actor gets no connection. After a refusal ZeroMQ itself does not try again on the same socket.

    Args:
        name: of the key that is shown; empty without one.
    """

    def __init__(self, endpoint: str, name: str) -> None:
        self._endpoint, self._name, self._next_log_s = endpoint, name, 0.0
        self._failed: dict[str, int] | None = None
        self._connected = False

    def watch(self, socket: zmq.Socket) -> None:
        """Look at this socket from now on; before it connects nothing is missed."""
        events = _HANDSHAKE_FAILED | zmq.EVENT_HANDSHAKE_SUCCEEDED
        self._watched, self.socket = socket, socket.get_monitor_socket(events)

    def _read(self) -> None:
        while self.socket.poll(0):
            event = recv_monitor_message(self.socket)
            if event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._connected = True
            else:
                self._failed = event

    def connected(self) -> bool:
        """Whether a connection was made since the last call."""
        self._read()
        found, self._connected = self._connected, False
        return found

    def refused(self) -> bool:
        """Whether a handshake has failed since the last call; logged at most every ten seconds."""
        self._read()
        event, self._failed = self._failed, None
        if event is not None and time.monotonic() >= self._next_log_s:
            self._next_log_s = time.monotonic() + REFUSAL_LOG_S
            log.warning("%s %s", self._endpoint, self._why(event["event"]))
        return event is not None

    def _why(self, event: int) -> str:
        if not self._name:
            return ("closes the connection at once: it asks for a key and this actor has none (get one where the hub "
                    "runs with `streamrl keys add`, then give actors.key=FILE), or it is going down")
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            return f"refuses this actor: its list has no such key as {self._name}: see `streamrl keys list`"
        return (f"is not trusted by this actor: it lacks the key that the one of {self._name} expects of the hub, or "
                "asks for none: is it the right address, and does hub.keys name the directory that this key is from?")

    def close(self) -> None:
        """Close both ends of the monitor, before the watched socket; an open one blocks `Context.term`."""
        self._watched.disable_monitor()
        self.socket.close(0)
