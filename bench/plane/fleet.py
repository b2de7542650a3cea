"""Many actors in one process: the real session of each over a socket of its own, all on one epoll loop, and no model.

A finished group is bytes that were encoded once; only its numbers and its digest are new. So an actor costs little more
than its sockets, and the hub is what is measured.
"""

from __future__ import annotations

import heapq
import json
import math
import os
import random
import select
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash
import zmq

from streamrl.messages import (
    PROTOCOL,
    TO_ACTOR,
    Announce,
    Group,
    Installed,
    InstallSource,
    Lease,
    LeaseRef,
    Leases,
    Manifest,
    Member,
    MemberStatus,
    Outcome,
    ReturnReason,
    Sampling,
    Span,
    Turn,
    VersionRef,
    Welcome,
)
from streamrl.messages.codec import MAGIC, PREAMBLE, Decoder, encode, pack_ids, pack_logprobs
from streamrl.parent_watch import watch
from streamrl.transport.keys import ActorKey, read_actor_key
from streamrl.transport.session import ActorSession, Deliver, Effect, LinkClosed, Progress, Send
from streamrl.transport.sockets import actor_dealer

TICKS_PER_S = 4
VOCAB_SIZE = 50_000
MAX_ENDS = 64
START = msgspec.msgpack.encode([0] * len(Group.__struct_fields__))[:1]


class FleetActor:
    """One session, its socket, and the leases that it answers."""

    def __init__(self, fleet: Fleet, number: int) -> None:
        self._fleet = fleet
        self.session = ActorSession(
            f"actor-{number}", number + 1, engine="fake", max_leases=fleet.max_leases, transports=("zmq",),
            software="bench", random_seed=number,
        )
        self.socket = actor_dealer(fleet.context, fleet.endpoint, key=fleet.key)
        self.held: dict[LeaseRef, VersionRef] = {}  # lease -> version at its beginning
        self.num_joined = 0

    def apply(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                try:
                    self.socket.send(effect.frame, zmq.NOBLOCK, copy=False)
                except zmq.Again:
                    self._fleet.num_refused += 1  # the session sends it again
            elif isinstance(effect, Deliver):
                self._handle(effect.event)
            elif isinstance(effect, LinkClosed):
                self._fleet.num_closed += 1

    def receive(self, now: float) -> None:
        """Everything that has come. The descriptor is edge-triggered: what is left would not be told of again."""
        while True:
            try:
                frame = self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self.apply(self.session.received(self._fleet.decoder.decode(frame), now))

    def _handle(self, event: Any) -> None:
        match event:
            case Welcome(manifest=Manifest() as manifest):
                self.num_joined += 1
                self._install(manifest)
            case Announce():
                self._install(event.manifest)
            case Leases():
                for lease in event.grants:
                    self._fleet.begin(self, lease)

    def _install(self, manifest: Manifest) -> None:
        if self.session.installed is not None and manifest.ref <= self.session.installed[0]:
            return
        self._fleet.later(self._fleet.draw_install_s(), lambda: self._installed(manifest))

    def _installed(self, manifest: Manifest) -> None:
        if self.session.installed is not None and manifest.ref <= self.session.installed[0]:
            return
        self.tell_progress()
        self.apply(self.session.report_installed(
            Installed(manifest.ref, manifest.root, True, InstallSource.SAME, 0.0, 0.0, 0.0, 0.0, 0, ""), self._fleet.now
        ))

    def tell_progress(self) -> None:
        most = self._fleet.max_leases
        self.session.progress = Progress(
            max_leases=most, free=max(0, most - len(self.held)), held=tuple(self.held), running=len(self.held)
        )

    def finish(self, lease: Lease) -> None:
        began = self.held.pop(lease.ref)
        self.tell_progress()
        self._fleet.num_groups += 1
        assert self.session.installed is not None
        outbox = self.session.outbox
        frame = self._fleet.frame(
            self.session.incarnation, outbox.next_seq, lease, began, self.session.installed[0]
        )
        outbox.add(frame)
        self.apply(self.session._flush(self._fleet.now))  # as `submit` does, which would encode the group again


class Fleet:
    """Runs all actors and the loop."""

    def __init__(
        self, endpoint: str, *, num_actors: int, group_size: int, num_tokens: int, max_leases: int,
        key: ActorKey | None = None, group_s: float = 0.0, sigma: float = 0.0, install_s: float = 0.0,
    ) -> None:
        self.endpoint, self.key, self.max_leases = endpoint, key, max_leases
        self._group_s, self._sigma, self._install_s, self._random = group_s, sigma, install_s, random.Random(0)
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._num_due = 0
        self.context = zmq.Context()
        self.context.set(zmq.MAX_SOCKETS, num_actors + 16)
        self.decoder = Decoder(TO_ACTOR)
        self.now = time.monotonic()
        self.num_groups = self.num_refused = self.num_closed = 0
        rng = np.random.default_rng(0)
        ids, logprobs = rng.integers(0, VOCAB_SIZE, num_tokens), -rng.exponential(0.7, num_tokens)
        self._fields = dict(
            status=MemberStatus.FINISHED, prompt_ids=pack_ids(ids[:16]), token_ids=pack_ids(ids),
            logprobs=pack_logprobs(logprobs), mask=((0, num_tokens),), turns=(Turn(0, num_tokens, 1.0),), scores={},
            finish="stop",
        )
        self._num_tokens, self._group_size = num_tokens, group_size
        self._ends: dict[tuple[VersionRef, VersionRef, Sampling], bytes] = {}
        self.actors = [FleetActor(self, number) for number in range(num_actors)]
        self._epoll = select.epoll()
        self._by_descriptor = {actor.socket.getsockopt(zmq.FD): actor for actor in self.actors}
        for descriptor in self._by_descriptor:
            self._epoll.register(descriptor, select.EPOLLIN | select.EPOLLET)

    def begin(self, actor: FleetActor, lease: Lease) -> None:
        assert actor.session.installed is not None
        actor.held[lease.ref] = actor.session.installed[0]
        seconds = 0.0
        if self._group_s:
            seconds = self._random.lognormvariate(math.log(self._group_s) - self._sigma**2 / 2, self._sigma)
            actor.tell_progress()
        self.later(seconds, lambda: actor.finish(lease))

    def draw_install_s(self) -> float:
        return self._random.expovariate(1 / self._install_s) if self._install_s else 0.0

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        """Calls the action at once, or from the loop after a delay."""
        if seconds <= 0:
            action()
            return
        self._num_due += 1
        heapq.heappush(self._due, (self.now + seconds, self._num_due, action))

    def frame(self, incarnation: int, seq: int, lease: Lease, first: VersionRef, last: VersionRef) -> bytes:
        """A complete group of this lease, as if it had been generated by these versions, half by each; encoded."""
        key = (first, last, lease.sampling)
        end = self._ends.get(key)
        if end is None:
            if len(self._ends) >= MAX_ENDS:
                self._ends.clear()
            # With the four numbers 0 each takes one byte, after one byte for the length of the array.
            end = self._ends[key] = bytes(encode(self._group(lease.sampling, first, last))[PREAMBLE.size + 5 :])
        start = START + b"".join(map(msgspec.msgpack.encode, (incarnation, seq, lease.group_id, lease.attempt)))
        digest = xxhash.xxh3_64(start)
        digest.update(end)
        return b"".join((PREAMBLE.pack(MAGIC, PROTOCOL, Group.KIND, 0, digest.intdigest()), start, end))

    def _group(self, sampling: Sampling, first: VersionRef, last: VersionRef) -> Group:
        half = self._num_tokens // 2
        spans = (
            (Span(first.learner_epoch, first.version, 0, self._num_tokens),) if first == last else
            (Span(first.learner_epoch, first.version, 0, half),
             Span(last.learner_epoch, last.version, half, self._num_tokens))
        )
        members = tuple(
            Member(index=index, versions=spans, reward=float(index), **self._fields)
            for index in range(self._group_size)
        )
        return Group(0, 0, 0, 0, Outcome.COMPLETE, ReturnReason.NONE, "", sampling, members, {})

    def run(self, report: Path, stop: Path) -> None:
        """Until `stop` exists; a line of counters a second goes to `report`."""
        self.now = time.monotonic()
        for actor in self.actors:
            actor.apply(actor.session.start(self.now))
            actor.receive(self.now)  # only after a read that found nothing does its descriptor tell of the next message
        turn, next_turn, next_report = 0, self.now, self.now
        while not stop.exists():
            wait_s = min(0.02, max(0.0, self._due[0][0] - time.monotonic())) if self._due else 0.02
            for descriptor, _ in self._epoll.poll(wait_s, 1024):
                actor = self._by_descriptor[descriptor]
                self.now = time.monotonic()
                actor.receive(self.now)
            self.now = time.monotonic()
            while self._due and self._due[0][0] <= self.now:
                heapq.heappop(self._due)[2]()
            while self.now >= next_turn:  # a share of all sessions, so that ticks do not come in one burst
                for actor in self.actors[turn::20]:
                    actor.apply(actor.session.tick(self.now))
                    actor.receive(self.now)  # a send may have hidden an edge
                turn = (turn + 1) % 20
                next_turn = max(next_turn + 1 / (20 * TICKS_PER_S), self.now - 0.5)
            if self.now >= next_report:
                next_report = self.now + 0.5
                self._report(report)

    def _report(self, path: Path) -> None:
        fresh = path.with_suffix(".tmp")
        fresh.write_text(json.dumps({
            "t": self.now, "linked": sum(actor.session.linked for actor in self.actors),
            "joined": sum(actor.num_joined for actor in self.actors), "groups": self.num_groups,
            "outbox": sum(len(actor.session.outbox) for actor in self.actors), "closed": self.num_closed,
            "refused": self.num_refused, "cpu_s": time.process_time(),
            "unsettled": sum(not actor.session.outbox.all_settled() for actor in self.actors),
        }))
        fresh.replace(path)


def main() -> int:
    options = json.loads(sys.argv[1])
    watch(lambda: os._exit(1))
    key = read_actor_key(options["key"]) if options["key"] else None
    fleet = Fleet(
        options["endpoint"], num_actors=options["num_actors"], group_size=options["group_size"],
        num_tokens=options["num_tokens"], max_leases=options["max_leases"], key=key, group_s=options["group_s"],
        sigma=options["sigma"], install_s=options["install_s"],
    )
    fleet.run(Path(options["report"]), Path(options["stop"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
