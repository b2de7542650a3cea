"""Transports by name, and one fetch over all of them: offers are tried in order, only bytes with their digests count.

`streamrl.messages.TRANSPORTS` leads from a name to its `Transport`, and one entry there adds one of ours. A setting
(`publish.transports`, `actors.transports`) may also name a user's own as `package.module:attribute`.

A transport knows how bytes move and nothing else. Deadline, cancellation, verification and the seconds are the fetch's,
so that they are the same whatever brought a version.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

import msgspec
import zmq

from streamrl.errors import ConfigError, WeightsError
from streamrl.extension import import_attribute, resolve
from streamrl.messages import TRANSPORTS, InstallSource, Layout, Limits, Manifest, Offer, VersionRef
from streamrl.transport.keys import ActorKey, split_endpoint
from streamrl.weights.delta import DeltaBase
from streamrl.weights.document import Document, DocumentMemory, NotAvailable, Superseded, VersionRetired
from streamrl.weights.manifest import check_manifest

log = logging.getLogger(__name__)

RELAY_SILENT_S = 2.0
"""Time-out of a relay, instead of the longer one that a distant learner is allowed."""
RELAY_BACKOFF_S = 30.0
"""A relay that did not answer is not asked again for so long."""
POLL_S = 0.05
"""Longest that a receiver waits for its peer between two looks at deadline and cancellation."""
_CONNECT_S = 1.0
_OUT_OF = (OSError, MemoryError, RuntimeError, zmq.ZMQError)
"""No memory, here or on the device (torch raises RuntimeErrors), or no descriptors: another transport may need less. An
EngineError is none of these: then this process must end, whatever other transports there are."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Published:
    """The newest version, as the hub has it.

    Attributes:
        path: its document on the hub's host, in the form of `streamrl.weights.document`; never written again.
        endpoint: of the hub's weight socket.
        parent: the version from which a delta can be pulled there; None without one.
    """

    manifest: Manifest
    layout: Layout
    path: str
    endpoint: str
    parent: VersionRef | None = None

    @property
    def nbytes(self) -> int:
        return sum(self.layout.bucket_bytes)


@dataclass(frozen=True, slots=True)
class FetchedVersion:
    """A verified document, how it came, and the seconds for transfer and verification."""

    document: Document
    source: InstallSource
    transfer_s: float
    verify_s: float


class Receiver(Protocol):
    """Brings one document that was offered; `source` says how it came, in INSTALLED and in the metrics."""

    source: InstallSource

    def receive(self, manifest: Manifest, layout: Layout) -> Generator[int, None, Document]:
        """Yield the number of buckets that have come, again and again while it waits, and return the document.

        The fetch closes it between two yields when the version is no longer wanted or too late, and verifies the
        document unless its digests were compared on the way.

        Raises:
            NotAvailable: the document cannot be had over this transport from here. WeightsError: the bytes are wrong.
        """
        ...


class ActorSide(Protocol):
    """The part of its actor that a receiver may use (`WeightSource`)."""

    context: zmq.Context
    pull_token: bytes
    limits: Limits


@dataclass(frozen=True, slots=True)
class Transport:
    """One transport of weights.

    Attributes:
        offer: hub side, once for every version, in the hub's thread: it must not wait. None, or an OSError, leaves this
            transport out. The hub puts the transport's name into the offer.
        receiver: actor side, once for every fetch. None for those from GPU to GPU, whose receivers share a state that
            an actor keeps (`actors.weights.device`), and whose offers the hub makes for each actor alone.
        require: raises ConfigError where the learner's device cannot use it.
        assets: brings the packed asset files of so many bytes and this digest, as `Receiver.receive` a document.
    """

    offer: Callable[[Published], Offer | None] = lambda published: None
    receiver: Callable[[Offer, ActorSide], Receiver] | None = None
    require: Callable[[str], None] = lambda device: None
    assets: Callable[[Offer, ActorSide, int, bytes], Generator[int, None, bytes]] | None = None

    @property
    def on_device(self) -> bool:
        """Whether it moves bytes from GPU to GPU."""
        return self.receiver is None


def load_transport(name: str, *, setting: str) -> Transport:
    """The transport that a setting names. Raises ConfigError if there is none, or it is no `Transport`."""
    found: object = resolve(name, TRANSPORTS, setting=setting)
    if name in TRANSPORTS:
        found = import_attribute(TRANSPORTS[name], setting=setting)
    if not isinstance(found, Transport):
        raise ConfigError(f"{setting}={name} is {type(found).__name__}: it must be a {__name__}.Transport")
    return found


def device_transports(names: Iterable[str], *, setting: str) -> list[str]:
    """Select the transports that need a GPU on both sides."""
    return [name for name in names if load_transport(name, setting=setting).on_device]


# --- one fetch --------------------------------------------------------------------------------------------------------


def bring(
    steps: Generator[int, None, T], what: str, num_buckets: int, *, cancelled: threading.Event, deadline: float
) -> T:
    """The result of a receiver's steps. Raises Superseded once `cancelled` is set, NotAvailable after `deadline`."""
    num_came = 0
    with closing(steps):  # a receiver that is given up closes its sockets, and tells peers that wait for it
        while True:
            if cancelled.is_set():
                raise Superseded(f"{what}: abandoned for a newer version")
            if time.monotonic() >= deadline:
                raise NotAvailable(f"{what}: not complete in time, {num_came} of {num_buckets} buckets came")
            try:
                num_came = next(steps)
            except StopIteration as end:
                # A version that came in the last moment is not verified for nobody.
                if cancelled.is_set():
                    raise Superseded(f"{what}: abandoned for a newer version") from None
                return end.value


def receive(
    receiver: Receiver, manifest: Manifest, layout: Layout, *, cancelled: threading.Event, deadline: float
) -> FetchedVersion:
    """Fetch a version over one transport and verify it. Raises as `bring`, or as the receiver."""
    check_manifest(manifest, layout, manifest.digest_kind)
    started = time.monotonic()
    steps = receiver.receive(manifest, layout)
    what, num_buckets = f"version {manifest.ref}", len(layout.bucket_bytes)
    document = bring(steps, what, num_buckets, cancelled=cancelled, deadline=deadline)
    # Checked for every transport, a user's own included; `verify` returns at once if it was done on the way.
    if document.manifest != manifest:
        raise WeightsError(f"brought version {document.manifest.ref} instead of {manifest.ref}")
    document.verify()
    # A broadcast may have been verified before it was asked for: then nothing was waited for.
    transfer_s = max(0.0, time.monotonic() - started - document.verify_s)
    return FetchedVersion(document, receiver.source, transfer_s, document.verify_s)


ReceiverFactory = Callable[[Offer], Receiver]


class WeightSource:
    """Fetches documents for one actor; every method may be called from any thread.

    Args:
        context: the process's ZeroMQ context.
        pull_token, limits: from WELCOME; assign both again after every WELCOME.
        transports: names of the transports that may be used, `actors.transports`.
        key: of this actor, where the hub asks for one.
    Attributes:
        factories: transport name to receiver; its keys are what HELLO lists. Those from GPU to GPU are added to it.
        share: where processes of this host leave what they pulled (`pull.host_cache.HostShare`); None pulls alone.
        relay: a nearer endpoint that is asked before the hub's own.
        puller: the last receiver that pulled, or pulls.
        delta_base: what deltas start from.
        memory: for documents that are pulled: a receiver lives for one fetch only, the pages are reused by the next.
    Raises:
        ConfigError: a transport is unknown.
    """

    def __init__(
        self, context: zmq.Context, *, pull_token: bytes = bytes(16), limits: Limits | None = None,
        transports: Sequence[str] = ("shm", "zmq"), key: ActorKey | None = None,
    ) -> None:
        self.context, self.key = context, key
        self.pull_token, self.limits = pull_token, limits or Limits()
        self.share: HostSide | None = None
        self.relay: str | None = None
        self.puller: Puller | None = None
        self.delta_base, self.memory = DeltaBase(), DocumentMemory()
        self._relay_blocked_until = 0.0
        self.factories: dict[str, ReceiverFactory] = {}
        for name in transports:
            receiver = load_transport(name, setting="actors.transports").receiver
            if receiver is not None:
                self.factories[name] = partial(receiver, actor=self)

    def limits_of(self, endpoint: str) -> Limits:
        """The limits of a pull from here: a relay is near, and the next offer is the hub's own, so it may be hasty."""
        if endpoint != self.relay:
            return self.limits
        return msgspec.structs.replace(self.limits, chunk_timeout_s=min(self.limits.chunk_timeout_s, RELAY_SILENT_S))

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
    ) -> FetchedVersion:
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
    ) -> FetchedVersion:
        if (factory := self.factories.get(offer.transport)) is None:
            raise NotAvailable("unsupported transport")
        fetched = receive(factory(offer), manifest, layout, cancelled=cancelled, deadline=deadline)
        if isinstance(fetched.document, Document):  # on the host, where deltas are applied
            self.delta_base.keep(fetched.document)
        log.debug("version %s over %s in %.1f ms", manifest.ref, offer.transport,
                  1000 * (fetched.transfer_s + fetched.verify_s))
        return fetched

    def fetch_assets(
        self, offers: Sequence[Offer], nbytes: int, digest: bytes, *, cancelled: threading.Event | None = None,
        deadline_s: float = 120.0,
    ) -> bytes:
        """The packed asset files of the model; unpack them with `streamrl.weights.assets.unpack_assets`."""
        cancelled, deadline = cancelled or threading.Event(), time.monotonic() + deadline_s
        over_zmq = [offer for offer in offers if offer.transport == "zmq"][:1]
        if not over_zmq:
            raise WeightsError("the hub offers no zmq endpoint to fetch the model's configuration and tokenizer from")
        assets = load_transport("zmq", setting="actors.transports").assets
        assert assets is not None

        def bring_from(offer: Offer) -> bytes:
            return bring(assets(offer, self, nbytes, digest), "the assets", 1, cancelled=cancelled, deadline=deadline)

        # The hub's own socket is always the last one, and its error is the caller's.
        *nearer, last = self._with_relay(over_zmq)
        for offer in nearer:
            try:
                return bring_from(offer)
            except Superseded:
                raise
            except VersionRetired as error:
                log.info("no model files from the relay: %s", error)
            except WeightsError as error:
                self._back_off_relay(str(error))
        return bring_from(last)


class HostSide(Protocol):
    """The cache of a host, as a receiver that pulls uses it (`streamrl.weights.pull.host_cache.HostShare`)."""

    def around(self, puller: Receiver) -> Receiver: ...

    def close(self) -> None: ...


class Puller(Receiver, Protocol):
    """A receiver whose progress a relay watches (`streamrl.weights.pull.client.ZmqReceiver`)."""

    moved_bytes: int
    waiting_since: float | None


def reachable(endpoint: str) -> bool:
    """Whether a connection to tcp://HOST:PORT succeeds; a dead process on a live host refuses it at once."""
    host, _, port = split_endpoint(endpoint)[0].removeprefix("tcp://").rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
    except (OSError, ValueError):
        return False
    return True
