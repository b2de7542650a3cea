"""One interface over every way to get a document: try the offers in order, believe only what is proven.

A transport is a *receiver*: an object made from an offer, with a `source` and one method

    receive(manifest, layout, *, cancelled, deadline) -> (verified Document, transfer_s, verify_s)

that raises NotAvailable if its way does not lead here. A new transport is one entry in `WeightSource.factories`.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
import zmq

from streamrl.errors import WeightsError
from streamrl.messages import InstallSource, Layout, Limits, Manifest, Offer
from streamrl.weights.delta.pull import DeltaBase
from streamrl.weights.document import Document, NotAvailable, Superseded, VersionRetired
from streamrl.weights.manifest import check_manifest
from streamrl.weights.memory import DocumentMemory
from streamrl.weights.pull.client import ZmqReceiver
from streamrl.weights.pull.host_cache import HostShare, SharedReceiver
from streamrl.weights.shm.transport import ShmReceiver

log = logging.getLogger(__name__)

RELAY_SILENT_S = 2.0
"""Silence of a relay that counts, instead of the longer one that a learner far away is allowed."""
RELAY_RESTS_S = 30.0
"""A relay that did not answer is not asked for so long."""
_CONNECT_S = 1.0
_OUT_OF = (OSError, MemoryError, RuntimeError, zmq.ZMQError)
"""No memory, here or on the device (torch raises RuntimeErrors), or no descriptors: another way may need less of it. An
EngineError is none of these: this process has to end, whatever other ways there are."""


class Receiver(Protocol):
    """One way to one document."""

    source: InstallSource

    def receive(
        self, manifest: Manifest, layout: Layout, *, cancelled: threading.Event, deadline: float
    ) -> tuple[Document, float, float]:
        """(verified document, transfer_s, verify_s). Raises NotAvailable, Superseded or WeightsError."""
        ...


ReceiverFactory = Callable[[Offer], Receiver]


@dataclass(frozen=True, slots=True)
class Fetched:
    """A verified document, how it came, and the seconds for bringing and for checking it."""

    document: Document
    source: InstallSource
    transfer_s: float
    verify_s: float


class WeightSource:
    """Fetches documents for one actor; every method may be called from any thread.

    Args:
        context: the process's ZeroMQ context.
        pull_token: from WELCOME; assign `pull_token` again after every WELCOME.
        limits: from WELCOME, assigned the same way.
        secure: sets the CURVE keys of a fresh socket; None leaves it plain.
    """

    def __init__(
        self, context: zmq.Context, *, pull_token: bytes = bytes(16), limits: Limits | None = None,
        secure: Callable[[zmq.Socket], None] | None = None,
    ) -> None:
        self.pull_token = pull_token
        self.limits = limits or Limits()
        self.share: HostShare | None = None
        """Where processes of this host leave what they pulled; None pulls alone."""
        self.relay: str | None = None
        """A nearer endpoint that is asked before the hub's own."""
        self._context, self._secure = context, secure
        self._relay_rests_until = 0.0
        self.puller: ZmqReceiver | None = None
        """The last one that pulled, or does."""
        self.shadow = DeltaBase()
        self._memory = DocumentMemory()
        self.factories: dict[str, ReceiverFactory] = {"shm": ShmReceiver, "zmq": self._zmq}
        """Transport name to receiver; its keys are what HELLO says this actor can do."""

    def _zmq(self, offer: Offer) -> Receiver:
        puller = self._puller(offer)
        return puller if self.share is None else SharedReceiver(self.share, puller)

    def _puller(self, offer: Offer) -> ZmqReceiver:
        limits = self.limits
        if offer.name == self.relay:
            limits = msgspec.structs.replace(limits, chunk_timeout_s=min(limits.chunk_timeout_s, RELAY_SILENT_S))
        self.puller = ZmqReceiver(
            offer.name, self._context, pull_token=self.pull_token, limits=limits, secure=self._secure,
            shadow=self.shadow, parent=offer.parent, memory=self._memory,
        )
        return self.puller

    def close(self) -> None:
        """Leave the host's share; may be called twice."""
        if self.share is not None:
            self.share.close()

    def _with_relay(self, offers: Sequence[Offer]) -> list[Offer]:
        """The relay before the hub's own socket, unless it did not answer lately."""
        if self.relay is None or time.monotonic() < self._relay_rests_until:
            return list(offers)
        if not reachable(self.relay):
            self._rest_relay("nobody listens there")
            return list(offers)
        found: list[Offer] = []
        for offer in offers:
            if offer.transport == "zmq":
                found.append(msgspec.structs.replace(offer, name=self.relay))
            found.append(offer)
        return found

    def _rest_relay(self, why: str) -> None:
        self._relay_rests_until = time.monotonic() + RELAY_RESTS_S
        log.warning("the relay %s is left out for %g s, the learner is asked instead: %s",
                    self.relay, RELAY_RESTS_S, why)

    def fetch(
        self, manifest: Manifest, offers: Sequence[Offer], layout: Layout, *,
        cancelled: threading.Event | None = None, deadline_s: float = 120.0,
    ) -> Fetched:
        """Bring and verify the document of `manifest`; blocks, so call it in a thread.

        Args:
            offers: best first, as the hub lists them.
            cancelled: set it to abandon the fetch.
            deadline_s: for all offers together.
        Raises:
            Superseded: `cancelled` was set. VersionRetired: retired everywhere.
            WeightsError: no offer led to the right bytes; says why for each.
            EngineError: a way cannot be left any more; this process must end.
        """
        check_manifest(manifest, layout)
        cancelled = cancelled or threading.Event()
        deadline = time.monotonic() + deadline_s
        failures: list[str] = []
        gone = False
        for offer in self._with_relay(offers):
            if cancelled.is_set():
                raise Superseded(f"version {manifest.ref}: abandoned for a newer version")
            if (factory := self.factories.get(offer.transport)) is None:
                failures.append(f"{offer.transport}: not spoken here")
                continue
            try:
                receiver = factory(offer)
                parts = receiver.receive(manifest, layout, cancelled=cancelled, deadline=deadline)
            except Superseded:
                raise
            except NotAvailable as error:
                gone = gone or isinstance(error, VersionRetired)
                if offer.name == self.relay and not isinstance(error, VersionRetired):
                    self._rest_relay(str(error))
                log.info("version %s not by %s: %s", manifest.ref, offer.transport, error)
                failures.append(f"{offer.transport}: {error}")
            except WeightsError as error:
                log.warning("version %s refused from %s: %s", manifest.ref, offer.transport, error)
                failures.append(f"{offer.transport}: {error}")
            except _OUT_OF as error:
                log.warning("version %s not by %s: %r", manifest.ref, offer.transport, error)
                failures.append(f"{offer.transport}: {error!r}")
            else:
                log.debug("version %s by %s in %.1f ms", manifest.ref, offer.transport, 1000 * (parts[1] + parts[2]))
                if isinstance(parts[0], Document):  # deltas are applied on the host
                    self.shadow.keep(parts[0])
                return Fetched(parts[0], receiver.source, parts[1], parts[2])
        message = f"version {manifest.ref} could not be fetched: " + ("; ".join(failures) or "the hub offered no way")
        raise VersionRetired(message) if gone else WeightsError(message)

    def fetch_assets(
        self, endpoint: str, nbytes: int, digest: bytes, *,
        cancelled: threading.Event | None = None, deadline_s: float = 120.0,
    ) -> bytes:
        """The packed asset files of the model; unpack them with `streamrl.weights.assets.unpack_assets`."""
        cancelled, deadline = cancelled or threading.Event(), time.monotonic() + deadline_s
        *nearer, last = self._with_relay([Offer("zmq", endpoint, nbytes)])
        for offer in nearer:
            try:
                return self._puller(offer).receive_assets(nbytes, digest, cancelled=cancelled, deadline=deadline)
            except Superseded:
                raise
            except VersionRetired as error:
                log.info("no model files from the relay: %s", error)
            except WeightsError as error:
                self._rest_relay(str(error))
        return self._puller(last).receive_assets(nbytes, digest, cancelled=cancelled, deadline=deadline)


def reachable(endpoint: str) -> bool:
    """Whether anybody listens at tcp://HOST:PORT; a dead process on a living host says no at once."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
    except (OSError, ValueError):
        return False
    return True
