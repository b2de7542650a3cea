"""Linked actors: their heartbeats and installs, and how they leave."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from learner.hub.ledger.tables.actors import MAX_LEASES, Actor, ActorTable
from learner.hub.ledger.tables.dedup import DedupTable
from learner.hub.ledger.tables.groups import GroupState, GroupTable
from learner.hub.ledger.tables.lifecycle import GroupLifecycle
from learner.hub.ledger.tables.versions import Versions
from streamrl.messages import ANSWERED_STEPS, ActorHeartbeat, LeaseRef, VersionRef


@dataclass
class Membership:
    """Keeps the table of actors true to what they say; any message proves that an actor lives."""

    counts: Counter[str]
    versions: Versions
    groups: GroupTable
    dedup: DedupTable
    lifecycle: GroupLifecycle
    actors: ActorTable

    def beat(self, actor_id: str, beat: ActorHeartbeat, now: float) -> bool:
        """Note what it has free and renew its leases; False for an actor without a link, or with a fenced one."""
        actor = self.actors.get(actor_id)
        if actor is None or actor.incarnation != beat.incarnation:
            return False
        actor.heard_at = now
        actor.record_progress((beat.tokens_total, beat.stats.get(ANSWERED_STEPS, 0.0)), now)
        actor.train.free, actor.train.limit = beat.free, min(beat.max_leases or actor.train.limit, MAX_LEASES)
        actor.eval.free, actor.eval.limit = beat.free_eval, min(max(actor.eval.limit, beat.free_eval), MAX_LEASES)
        actor.install(self.versions.usable(beat.installed))
        self.actors.shares.touch(actor)
        self.actors.renew(actor, beat, now)
        return True

    def installed(self, actor_id: str, ref: VersionRef, ok: bool, now: float) -> None:
        """Note the version that it generates from now on; a refused one changes nothing."""
        actor = self._heard(actor_id, now)
        if actor is not None:
            self.counts["num_installs" if ok else "num_install_failures"] += 1
            if ok:
                actor.install(self.versions.usable(ref))
                self.actors.shares.touch(actor)

    def suspend(self, actor_id: str, now: float) -> None:
        """Forget its version, so that it gets no leases, and give those that it has to others."""
        actor = self._heard(actor_id, now)
        if actor is not None:
            actor.install(None)
            self.actors.shares.touch(actor)
            for group_id, _ in actor.open_leases():
                self.actors.release(group_id, now, failed=False, revoke=True)

    def distrust(self, actor_id: str, now: float) -> None:
        """Disconnect it, and generate again every group with data of it that no batch has."""
        self.disconnect(actor_id, now, failed=False)
        for record in self.groups.in_order():
            mine = any(one.actor_id == actor_id for one in record.deliveries)
            if not mine or record.state is GroupState.IN_BATCH:
                continue
            # The whole group, with the members of other actors: siblings share a baseline.
            self.counts["num_groups_distrusted"] += 1
            if record.lease is not None:
                self.actors.detach(record, revoke=True)
            self.lifecycle.again(record, "distrusted")

    def drain(self, actor_id: str, now: float) -> None:
        """Give it no new leases; it may finish those it has."""
        actor = self._heard(actor_id, now)
        if actor is not None:
            actor.state = "LEAVING"
            self.actors.shares.touch(actor)

    def evict(self, actor_id: str, now: float) -> list[LeaseRef]:
        """Disconnect it for a fault of its own; returns the leases that it held."""
        if self.actors.get(actor_id) is not None:
            self.counts["num_evictions"] += 1
        return self.disconnect(actor_id, now, failed=True)

    def disconnect(self, actor_id: str, now: float, *, failed: bool) -> list[LeaseRef]:
        """Remove it; its leases go back to the pool, and count as failures of their groups if `failed`."""
        actor = self.actors.get(actor_id)
        if actor is None:
            return []
        refs = self.actors.remove(actor, now, failed=failed)
        self.dedup.depart(actor_id, actor.incarnation)  # what it delivered is remembered, in case it returns
        return refs

    def _heard(self, actor_id: str, now: float) -> Actor | None:
        actor = self.actors.get(actor_id)
        if actor is not None:
            actor.heard_at = now
        return actor
