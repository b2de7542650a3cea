"""Who gets which lease: capacity (L1) and the rule that makes the lag bound hold for weights that arrive late.

A grant of group g to actor a is checked against *the version installed on a*, not the learner's:

    rank(g) = groups trained + live groups dispatched before g
    grant   only if  rank(g) // B - batches(v_a) <= eta

A group's rank in dispatch order only shrinks while it is open, at most W later groups may overtake it, and its tokens
are no older than v_a; so it is trained at most eta + ceil(W / B) batches after v_a. A group that comes back to the pool
keeps its number and meets the same rule again; the actor with the newest weights always satisfies it.
"""

from __future__ import annotations

from collections.abc import Iterator

from learner.hub.ledger.groups import GroupRecord, GroupState
from learner.hub.ledger.prompts import member_seed
from learner.hub.ledger.state import Actor, Books
from streamrl.messages import EVAL_BIT, Lease, Purpose, VersionRef


class Dispatch(Books):
    """Grants."""

    def grant_order(self, now: float) -> list[str]:
        """Actors that could take a lease, the one that waited longest first."""
        hungry = [actor for actor in self.actors.values() if self._room(actor) or self._room_eval(actor)]
        return [actor.actor_id for actor in sorted(hungry, key=lambda one: (one.granted_no, one.actor_id))]

    def grant(self, actor_id: str, now: float) -> list[Lease]:
        """Leases for this actor: evaluation first, then training in dispatch order, old groups before new ones.

        Never more than the free slots that it last reported and that were not used since, and never more than a fair
        share of what is there: ask the others too, then ask again.
        """
        actor = self.actors.get(actor_id)
        if actor is None or actor.state != "READY":
            return []
        leases = self._grant_eval(actor, now) + self._grant_train(actor, now)
        if leases:
            self._grant_no += 1
            actor.granted_no = self._grant_no
        return leases

    # --- inside -----------------------------------------------------------------------------------------------------

    def _room(self, actor: Actor) -> int:
        """Training leases that this actor could take now."""
        if actor.state != "READY":
            return 0
        slots = actor.slots
        if self.settings.slots_per_actor_max is not None:
            slots = min(slots, self.settings.slots_per_actor_max)
        return max(0, min(actor.free, slots - len(actor.leases)))

    def _room_eval(self, actor: Actor) -> int:
        if actor.state != "READY":
            return 0
        return max(0, min(actor.free_eval, actor.slots_eval - len(actor.eval_leases)))

    def _version_for_grant(self, actor: Actor) -> int:
        """The version that admission relies on: what the actor generates from, never what the learner has."""
        return actor.installed.version

    def _may_lease(self, rank: int, actor: Actor) -> bool:
        batches = self.versions.batches_at(self._version_for_grant(actor))
        return rank // self.settings.groups_per_batch - batches <= self.eta

    def _grant_train(self, actor: Actor, now: float) -> list[Lease]:
        room = min(self._room(actor), self._fair_share(actor))
        leases: list[Lease] = []
        if room > 0:
            for record in self._candidates(actor, now):
                leases.append(self._lease(actor, record, now))
                if len(leases) == room:
                    break
        return leases

    def _fair_share(self, actor: Actor) -> int:
        """How many leases bring this actor level with the others that could have what is there.

        Whoever holds least can always take something, so asking everybody in `grant_order` leaves nothing lying.
        """
        ready = self.groups.ids(GroupState.READY)
        num_new = max(0, self.capacity - self.groups.num_live())
        if not ready and not num_new:
            return 0
        first = self.groups.rank(ready[0] if ready else self.groups.next_id)
        held = [len(one.leases) for one in self.actors.values() if self._room(one) and self._may_lease(first, one)]
        level = -(-(len(ready) + num_new + sum(held)) // max(1, len(held)))
        return max(0, level - len(actor.leases))

    def _candidates(self, actor: Actor, now: float) -> Iterator[GroupRecord]:
        """READY groups this actor may have, oldest first, then new draws. Ranks grow, so the first refusal ends it."""
        for group_id in self.groups.ids(GroupState.READY):
            record = self.groups.live[group_id]
            if not self._may_lease(self.groups.rank(group_id), actor):
                return
            waits_for_other = record.holder not in ("", actor.actor_id)
            if not (waits_for_other and self._grace_until is not None and now < self._grace_until):
                yield record
        while self.groups.num_live() < self.capacity and self._may_lease(self.groups.num_live(), actor):
            yield self._draw()

    def _lease(self, actor: Actor, record: GroupRecord, now: float) -> Lease:
        attempt, members = record.next_attempt, self._missing(record)
        self._counts["num_groups_leased"] += 1
        self._counts["num_leases_reissued"] += attempt > 0
        self._counts["lost_on_crash"] += bool(record.holder)
        self._bind_lease(actor, record, attempt, members, now)
        actor.free -= 1
        assert len(actor.leases) <= actor.slots, f"{actor.actor_id}: {len(actor.leases)} leases, {actor.slots} slots"
        return Lease(
            group_id=record.group_id, attempt=attempt, prompt_index=record.prompt_index, pass_index=record.pass_index,
            prompt=self.prompts.record(record.prompt_index), members=members,
            seeds=tuple(member_seed(self.run_seed, record.group_id, member) for member in members),
            min_version=actor.installed, sampling=self.sampling, ttl_s=self.settings.lease_ttl_s,
            purpose=Purpose.TRAIN,
        )

    def _grant_eval(self, actor: Actor, now: float) -> list[Lease]:
        leases: list[Lease] = []
        while len(leases) < 64 and self._room_eval(actor):
            found = self.evals.next_for(actor.installed.version)
            if found is None:
                break
            leases.append(self._lease_eval(actor, *found, now))
        return leases

    def _lease_eval(self, actor: Actor, group_id: int, version: int, now: float) -> Lease:
        lease = self.evals.lease(group_id, actor.actor_id, now)
        index = group_id & 0xFFFFFFFF
        actor.eval_leases.add(group_id)
        actor.free_eval -= 1
        self._counts["num_eval_leases"] += 1
        return Lease(
            group_id=group_id, attempt=lease.attempt, prompt_index=index, pass_index=0,
            prompt=self._eval_record(index) if self._eval_record is not None else None, members=(0,),
            # The evaluation's own number is left out: every evaluation asks the same questions with the same seeds.
            seeds=(member_seed(self.run_seed, EVAL_BIT | index, 0),),
            min_version=self._min_eval_version(version, actor), sampling=self.eval_sampling,
            ttl_s=self.settings.lease_ttl_s, purpose=Purpose.EVAL,
        )

    def _min_eval_version(self, version: int, actor: Actor) -> VersionRef:
        """The version that was asked for, named in this epoch if it belongs to it, else what the actor has."""
        epoch = self.versions.learner_epoch
        return VersionRef(epoch, version) if self.versions.known(epoch, version) else actor.installed
