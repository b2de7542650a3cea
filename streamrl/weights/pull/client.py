"""Weights for every process that can reach the hub: PULL and CHUNK over a DEALER; the logic is in `pull.plan`.

A PULL is one frame. Its answer is two: the CHUNK, and the payload, which is empty unless the status is OK.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Generator, Iterator
from typing import TypeVar

import zmq

from streamrl.errors import WeightsError, WireError
from streamrl.messages import (
    FROM_WEIGHTS,
    Chunk,
    InstallSource,
    Layout,
    Limits,
    Manifest,
    Offer,
    Pull,
    PullMode,
    VersionRef,
)
from streamrl.messages.codec import Decoder, encode
from streamrl.transport.keys import ActorKey
from streamrl.transport.sockets import actor_dealer
from streamrl.weights.assets import MAX_ASSETS_BYTES
from streamrl.weights.delta import DeltaBase, DeltaUnavailable, apply_delta
from streamrl.weights.document import Document, DocumentMemory, NotAvailable
from streamrl.weights.manifest import bucket_ranges, document_nbytes
from streamrl.weights.pull.plan import ChunkPlan, IndexPlan, PullPlan, PullStats
from streamrl.weights.transport import POLL_S, Receiver, Transport, WeightSource

log = logging.getLogger(__name__)

# A CHUNK without its payload takes far less; the payload is a frame of its own, not decoded.
_MAX_HEADER_BYTES = 4096

T = TypeVar("T")
Steps = Generator[int, None, T]
"""As `transport.Receiver.receive`: yields the number of buckets that have come, returns the result."""


class ZmqReceiver:
    """Pulls documents from one endpoint, a socket for each fetch; blocks, so it belongs in a thread.

    Args:
        endpoint: of the hub's weight socket, or of a relay.
        pull_token, limits: from WELCOME.
        delta_base: what this process holds; None always pulls the full version.
        parent: the version that the hub's delta starts from, from its offer.
        key: of this actor, where the other side asks for one.
        memory: for documents; shared by many receivers it saves new pages.
    Attributes:
        waiting_since: when the other side last answered, while an answer is due; None otherwise.
    """

    def __init__(
        self, endpoint: str, context: zmq.Context, *, pull_token: bytes, limits: Limits | None = None,
        delta_base: DeltaBase | None = None, parent: VersionRef | None = None, memory: DocumentMemory | None = None,
        key: ActorKey | None = None,
    ) -> None:
        self.endpoint, self._context, self._token, self._key = endpoint, context, pull_token, key
        self._limits = limits or Limits()
        self._delta_base, self._parent = delta_base, parent
        self._memory = memory or DocumentMemory()
        self.source = InstallSource.ZMQ
        self.stats = PullStats()
        self.moved_bytes = 0
        self.waiting_since: float | None = None
        self._decoder = Decoder(FROM_WEIGHTS, max_bytes=_MAX_HEADER_BYTES)

    def receive(self, manifest: Manifest, layout: Layout) -> Steps[Document]:
        """Pull, as `transport.Receiver`; afterwards `source` tells whether the version came as a delta."""
        base = self._delta_base.base_of(manifest, self._parent) if self._delta_base is not None else None
        with self._connection():
            if base is not None and (found := (yield from self._try_delta(base, manifest, layout))) is not None:
                return found
            return (yield from self._receive_full(manifest, layout))

    def _receive_full(self, manifest: Manifest, layout: Layout) -> Steps[Document]:
        memory = self._memory.take(document_nbytes(layout))
        buckets = [memory[start:end] for start, end in bucket_ranges(layout)]
        plan = PullPlan(buckets, manifest.digests, self._limits, what=f"version {manifest.ref}", now=time.monotonic())
        yield from self._pull(plan, manifest.ref, PullMode.FULL)
        # The plan is done only when every bucket has matched its digest.
        return Document(memory, manifest, layout, verified=True, verify_s=plan.verify_s)

    def _try_delta(self, base: Document, manifest: Manifest, layout: Layout) -> Steps[Document | None]:
        """None when the full version has to be pulled; raises where that could not be pulled either."""
        assert self._delta_base is not None
        try:
            found = yield from self._receive_delta(base, manifest, layout)
        except DeltaUnavailable as error:
            log.info("%s", error)
            return None
        except NotAvailable:
            raise  # it says nothing about the delta's bytes, so it does not count against deltas
        except WeightsError as error:
            self._delta_base.failed(error)
            return None
        self._delta_base.succeeded()
        self.source = InstallSource.ZMQ_DELTA
        return found

    def _receive_delta(self, base: Document, manifest: Manifest, layout: Layout) -> Steps[Document]:
        what = f"the delta from {base.manifest.ref} to {manifest.ref}"
        index_plan = IndexPlan(self._limits, what=what, now=time.monotonic())
        yield from self._pull(index_plan, manifest.ref, PullMode.DELTA)
        # Sizes were checked against the layout here, before memory is taken for the payloads.
        index = index_plan.index(base.manifest, layout)
        payloads = [memoryview(bytearray(nbytes)) for nbytes in index.nbytes]
        plan = PullPlan(payloads, index.digests, self._limits, what=what, now=time.monotonic())
        yield from self._pull(plan, manifest.ref, PullMode.DELTA)
        return apply_delta(base, manifest, layout, payloads, self._memory.take(document_nbytes(layout)))

    def receive_assets(self, nbytes: int, digest: bytes) -> Steps[bytes]:
        """Pull the packed asset files with the size and xxh3-128 in WELCOME."""
        # Checked before the memory is taken: the number comes from a peer.
        if not 0 < nbytes <= MAX_ASSETS_BYTES:
            raise WeightsError(f"the hub offers {nbytes} bytes of assets, expected 1..{MAX_ASSETS_BYTES}")
        memory = bytearray(nbytes)
        plan = PullPlan([memoryview(memory)], [digest], self._limits, what="the assets", now=time.monotonic())
        with self._connection():
            yield from self._pull(plan, VersionRef(0, 0), PullMode.ASSETS)
        return bytes(memory)

    # --- one connection, on which plans are carried out one after another -------------------------------------------

    @contextlib.contextmanager
    def _connection(self) -> Iterator[None]:
        try:
            self._socket = actor_dealer(
                self._context, self.endpoint, max_message_bytes=self._limits.max_message_bytes,
                # Two windows of answers: every PULL in flight may have been sent again, and be answered twice.
                receive_hwm=2 * self._limits.pull_window + 8, key=self._key,
            )
        except zmq.ZMQError as error:
            raise NotAvailable(f"cannot connect to {self.endpoint!r}: {error}") from error
        try:
            yield
        finally:
            # Nothing that is still queued matters: what was not answered will be pulled again.
            self._socket.close(linger=0)
            self.waiting_since = None

    def _pull(self, plan: ChunkPlan, ref: VersionRef, mode: PullMode) -> Steps[None]:
        """Carry out a plan, buckets done out; raises as the plan does."""
        self.stats = plan.stats
        self.waiting_since = time.monotonic()
        while not plan.done:
            yield plan.num_done
            now = time.monotonic()
            plan.tick(now)
            blocked = self._send(plan, ref, mode, now)
            if not self._receive(plan, ref, mode):
                # Poll for POLLOUT only while a send is refused: on a connected socket it would return at once, always.
                wait_s = min(plan.next_event(now), POLL_S)
                self._socket.poll(int(wait_s * 1000) + 1, zmq.POLLIN | (zmq.POLLOUT if blocked else 0))
        self.waiting_since = None
        if plan.stats.repeated_pulls or plan.stats.refused_chunks or plan.stats.refused_buckets:
            log.info("%s came from %s with repairs: %s", plan.what, self.endpoint, plan.stats)

    def _send(self, plan: ChunkPlan, ref: VersionRef, mode: PullMode, now: float) -> bool:
        """Fill the window; True if the socket cannot take more, for lack of a connection."""
        while (ask := plan.next_ask(now)) is not None:
            try:
                self._socket.send(
                    encode(Pull(self._token, ref, mode, ask.bucket, ask.offset, ask.length)), zmq.NOBLOCK
                )
            except zmq.Again:
                return True
            plan.sent(ask)
        return False

    def _receive(self, plan: ChunkPlan, ref: VersionRef, mode: PullMode) -> bool:
        """Take one answer; False if none is there."""
        try:
            frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        try:
            chunk = self._decoder.decode(frames[0].buffer)
        except WireError as error:
            # Its PULL is still in flight, and is overtaken or times out.
            plan.stats.refused_chunks += 1
            log.warning("%s: %s sent something other than a CHUNK: %s", plan.what, self.endpoint, error)
            return True
        assert isinstance(chunk, Chunk), chunk
        # One socket carries the index and then the payloads of a delta: late answers of the plan before are dropped.
        if (chunk.target, chunk.mode) != (ref, mode) or len(frames) != 2:
            plan.stats.surplus_chunks += 1
            return True
        self.moved_bytes += len(frames[1].buffer)
        self.waiting_since = time.monotonic()
        plan.accept(chunk, frames[1].buffer, time.monotonic())
        return True


def receiver(offer: Offer, actor: WeightSource) -> Receiver:
    """A receiver that pulls, and shares what it pulled with this host if the actor has a share there."""
    puller = actor.puller = _puller(offer, actor)
    return puller if actor.share is None else actor.share.around(puller)


def _puller(offer: Offer, actor: WeightSource) -> ZmqReceiver:
    return ZmqReceiver(
        offer.name, actor.context, pull_token=actor.pull_token, limits=actor.limits_of(offer.name),
        delta_base=actor.delta_base, parent=offer.parent, memory=actor.memory, key=actor.key,
    )


def _assets(offer: Offer, actor: WeightSource, nbytes: int, digest: bytes) -> Steps[bytes]:
    puller = actor.puller = _puller(offer, actor)
    return puller.receive_assets(nbytes, digest)


ZMQ = Transport(
    offer=lambda published: Offer("zmq", published.endpoint, published.nbytes, parent=published.parent),
    receiver=receiver,
    assets=_assets,
)
