"""One fetch over every transport: offers are tried in order, and only bytes that match their digests are believed."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
import zmq

from streamrl.errors import WeightsError
from streamrl.messages import InstallSource, Layout, Limits, Manifest, Offer
from streamrl.transport.keys import ActorKey, split_endpoint
from streamrl.weights.delta.pull import DeltaBase
from streamrl.weights.document import Document, DocumentMemory, NotAvailable, Superseded, VersionRetired
from streamrl.weights.manifest import check_manifest
from streamrl.weights.pull.client import ZmqReceiver
from streamrl.weights.pull.host_cache import HostShare, SharedReceiver
from streamrl.weights.transport import Receiver, load_transport

log = logging.getLogger(__name__)

RELAY_SILENT_S = 2.0
"""Time-out of a relay, instead of the longer one that a distant learner is allowed."""
RELAY_BACKOFF_S = 30.0
"""A relay that did not answer is not asked again for so long."""
_CONNECT_S = 1.0
_OUT_OF = (OSError, MemoryError, RuntimeError, zmq.ZMQError)
"""No memory, here or on the device (torch raises RuntimeErrors), or no descriptors: another transport may need less. An
EngineError is none of these: then this process must end, whatever other transports there are."""

ReceiverFactory = Callable[[Offer], Receiver]


@dataclass(frozen=True, slots=True)
class Fetched:
    """A verified document, how it came, and the seconds for transfer and verification."""

    document: Document
    source: InstallSource
    transfer_s: float
    verify_s: float


class WeightSource:
    """Fetches documents for one actor; every method may be called from any thread.

    Args:
        context: the process's ZeroMQ context.
        pull_token, limits: from WELCOME; assign both again after every WELCOME.
        transports: names of the transports that may be used, `actors.transports`.
        key: of this actor, where the hub asks for one.
    Attributes:
        factories: transport name to receiver; its keys are what HELLO lists. Those from GPU to GPU are added to it.
        share: where processes of this host leave what they pulled; None pulls alone.
        relay: a nearer endpoint that is asked before the hub's own.
        puller: the last receiver that pulled, or pulls.
        delta_base: what deltas start from.
    Raises:
        ConfigError: a transport is unknown.
    """

    def __init__(
        self, context: zmq.Context, *, pull_token: bytes = bytes(16), limits: Limits | None = None,
        transports: Sequence[str] = ("shm", "zmq"), key: ActorKey | None = None,
    ) -> None:
        self.context = context
        self.key = key
        self.pull_token = pull_token
        self.limits = limits or Limits()
        self.share: HostShare | None = None
        self.relay: str | None = None
        self.puller: ZmqReceiver | None = None
        self.delta_base = DeltaBase()
        # One pool for all pulls: a receiver lives for one fetch only, the pages are reused by the next.
        self._memory = DocumentMemory()
        self._relay_blocked_until = 0.0
        self.factories: dict[str, ReceiverFactory] = {}
        for name in transports:
            receiver = load_transport(name, setting="actors.transports").receiver
            if receiver is not None:
                self.factories[name] = partial(receiver, actor=self)

    def zmq_receiver(self, offer: Offer) -> Receiver:
        """A receiver that pulls, and shares what it pulled with this host."""
        puller = self._puller(offer)
        return puller if self.share is None else SharedReceiver(self.share, puller)

    def _puller(self, offer: Offer) -> ZmqReceiver:
        limits = self.limits
        # A relay is near. The next offer is the hub's own, so a short time-out costs little.
        if offer.name == self.relay:
            limits = msgspec.structs.replace(limits, chunk_timeout_s=min(limits.chunk_timeout_s, RELAY_SILENT_S))
        self.puller = ZmqReceiver(
            offer.name, self.context, pull_token=self.pull_token, limits=limits,
            delta_base=self.delta_base, parent=offer.parent, memory=self._memory, key=self.key,
        )
        return self.puller

    def close(self) -> None:
        """Leave the host's share; may be called twice."""
        if self.share is not None:
            self.share.close()

    def _with_relay(self, offers: Sequence[Offer]) -> list[Offer]:
        """The relay before the hub's own socket, unless it is in back-off."""
        if self.relay is None or time.monotonic() < self._relay_blocked_until:
            return list(offers)
        # A connect refused at once is cheaper than waiting for the time-out of a PULL.
        if not reachable(self.relay):
            self._back_off_relay("connection refused")
            return list(offers)
        found: list[Offer] = []
        for offer in offers:
            # Only the place of the socket changes; shm and the device transports stay before it in the hub's order.
            if offer.transport == "zmq":
                found.append(msgspec.structs.replace(offer, name=self.relay))
            found.append(offer)
        return found

    def _back_off_relay(self, why: str) -> None:
        self._relay_blocked_until = time.monotonic() + RELAY_BACKOFF_S
        log.warning("the relay %s is not asked for %g s, the learner is instead: %s", self.relay, RELAY_BACKOFF_S, why)

    def fetch(
        self, manifest: Manifest, offers: Sequence[Offer], layout: Layout, *,
        cancelled: threading.Event | None = None, deadline_s: float = 120.0,
    ) -> Fetched:
        """Fetch and verify the document of `manifest`; blocks, so call it in a thread.

        Args:
            offers: best first, as the hub lists them.
            cancelled: set it to abandon the fetch.
            deadline_s: for all offers together.
        Raises:
            Superseded: `cancelled` was set. VersionRetired: retired everywhere.
            WeightsError: no offer led to the right bytes; says why for each.
            EngineError: a transport hangs for good; this process must end.
        """
        check_manifest(manifest, layout)
        cancelled = cancelled or threading.Event()
        deadline = time.monotonic() + deadline_s
        failures: list[str] = []
        retired = False
        for offer in self._with_relay(offers):
            if cancelled.is_set():
                raise Superseded(f"version {manifest.ref}: abandoned for a newer version")
            try:
                return self._fetch_one(offer, manifest, layout, cancelled, deadline)
            except Superseded:
                raise
            except NotAvailable as error:
                # Retired at one place may only mean that this place is ahead; the others are still asked.
                retired = retired or isinstance(error, VersionRetired)
                # A relay that has retired the version works: it is not put into back-off.
                if offer.name == self.relay and not isinstance(error, VersionRetired):
                    self._back_off_relay(str(error))
                log.info("version %s not over %s: %s", manifest.ref, offer.transport, error)
                failures.append(f"{offer.transport}: {error}")
            except WeightsError as error:
                log.warning("version %s refused from %s: %s", manifest.ref, offer.transport, error)
                failures.append(f"{offer.transport}: {error}")
            # Not the transport's fault, and not fatal: one of the next offers may need less.
            except _OUT_OF as error:
                log.warning("version %s not over %s: %r", manifest.ref, offer.transport, error)
                failures.append(f"{offer.transport}: {error!r}")
        message = f"version {manifest.ref} could not be fetched: " + ("; ".join(failures) or "the hub made no offer")
        raise VersionRetired(message) if retired else WeightsError(message)

    def _fetch_one(
        self, offer: Offer, manifest: Manifest, layout: Layout, cancelled: threading.Event, deadline: float
    ) -> Fetched:
        if (factory := self.factories.get(offer.transport)) is None:
            raise NotAvailable("unsupported transport")
        receiver = factory(offer)
        document, transfer_s, verify_s = receiver.receive(manifest, layout, cancelled=cancelled, deadline=deadline)
        if isinstance(document, Document):  # on the host, where deltas are applied
            # Checked here for every transport, a user's own included; `verify` returns at once if it was done before.
            if document.manifest != manifest:
                raise WeightsError(f"brought version {document.manifest.ref} instead of {manifest.ref}")
            document.verify()
            self.delta_base.keep(document)
        log.debug("version %s over %s in %.1f ms", manifest.ref, offer.transport, 1000 * (transfer_s + verify_s))
        return Fetched(document, receiver.source, transfer_s, verify_s)

    def fetch_assets(
        self, offers: Sequence[Offer], nbytes: int, digest: bytes, *, cancelled: threading.Event | None = None,
        deadline_s: float = 120.0,
    ) -> bytes:
        """The packed asset files of the model; unpack them with `streamrl.weights.assets.unpack_assets`."""
        cancelled, deadline = cancelled or threading.Event(), time.monotonic() + deadline_s
        over_zmq = [offer for offer in offers if offer.transport == "zmq"][:1]
        if not over_zmq:
            raise WeightsError("the hub offers no zmq endpoint to fetch the model's configuration and tokenizer from")
        # The hub's own socket is always the last one, and its error is the caller's.
        *nearer, last = self._with_relay(over_zmq)
        for offer in nearer:
            try:
                return self._puller(offer).receive_assets(nbytes, digest, cancelled=cancelled, deadline=deadline)
            except Superseded:
                raise
            except VersionRetired as error:
                log.info("no model files from the relay: %s", error)
            except WeightsError as error:
                self._back_off_relay(str(error))
        return self._puller(last).receive_assets(nbytes, digest, cancelled=cancelled, deadline=deadline)


def reachable(endpoint: str) -> bool:
    """Whether a connection to tcp://HOST:PORT succeeds; a dead process on a live host refuses it at once."""
    host, _, port = split_endpoint(endpoint)[0].removeprefix("tcp://").rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
    except (OSError, ValueError):
        return False
    return True
