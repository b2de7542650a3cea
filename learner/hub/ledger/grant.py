"""Grants of leases to actors: capacity, the lag rule, and a fair share.

A grant is checked against *the version installed on the actor*, never the learner's: `streamrl.lag_rule` proves why the
lag bound needs it. A group that comes back to the pool keeps its number and meets the same rule again; the actor with
the newest weights always satisfies it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from learner.hub.ledger.actors import ActorTable
from learner.hub.ledger.apply import draw_through
from learner.hub.ledger.lifecycle import GroupLifecycle
from learner.hub.ledger.state import Part, State
from learner.hub.ledger.tables.actor import Actor
from learner.hub.ledger.tables.evals import EvalRun
from learner.hub.ledger.tables.groups import GroupRecord, GroupState
from streamrl.messages import EVAL_BIT, Lease, Purpose, VersionRef
from streamrl.messages.seeding import member_seed

MAX_EVAL_LEASES = 64  # in one grant, so that one actor does not get a whole evaluation
LEASES_PER_MESSAGE, LEASES_BYTES = 64, 16 << 20  # as many as a LEASE may list; a quarter of the usual largest frame
MAX_PASSED_OVER = 256  # records in one grant, so that the hub goes on with other work between them


class Grants(Part):
    """Makes leases; evaluation first, then training in dispatch order, old groups before new ones."""

    def __init__(self, state: State, lifecycle: GroupLifecycle, actors: ActorTable) -> None:
        super().__init__(state)
        self.lifecycle, self.actors = lifecycle, actors
        self.num_grants = 0  # so far: who got the last one longest ago is asked first

    def order(self) -> list[str]:
        """List actors that could take what there is: first who holds least, then who waited longest."""
        num = self.groups.num(GroupState.READY) + max(0, self.lag.num_free)
        if not self.evals.any_waiting():
            return self.actors.shares.first(num, self._admits()) if num else []
        ready = [one for one in self.actors.all() if one.state == "READY" and (one.train.room or one.eval.room)]
        return [actor.actor_id for actor in sorted(ready, key=lambda one: (one.granted_no, one.actor_id))]

    def grant(self, actor_id: str, now: float) -> list[Lease]:
        """Make leases for this actor: at most its free slots, and at most a fair share of what is there.

        Ask the others too, then ask again.
        """
        actor = self.actors.get(actor_id)
        if actor is None or actor.state != "READY":
            return []
        leases = self._grant_eval(actor, now) + self._grant_train(actor, now)
        if leases:
            self.num_grants += 1
            actor.granted_no = self.num_grants
            self.actors.shares.touch(actor)
        return leases

    def _grant_eval(self, actor: Actor, now: float) -> list[Lease]:
        leases: list[Lease] = []
        while len(leases) < MAX_EVAL_LEASES and actor.eval.room:
            run = self.evals.next_for(actor.installed.version)
            if run is None:
                break
            leases.append(self._lease_eval(actor, run, now))
        return leases

    def _lease_eval(self, actor: Actor, run: EvalRun, now: float) -> Lease:
        assert actor.installed is not None
        record, lease = self.evals.lease(run, actor.actor_id, actor.installed.version, now)
        source = self.eval_sources[run.dataset]
        place = record.group_id & 0xFFFFFFFF  # of prompt and answer
        actor.eval.leases[record.group_id] = lease
        actor.eval.free -= 1
        self.counts["num_eval_leases"] += 1
        # The version that was asked for, named in this epoch if it belongs to it, else what the actor has.
        pinned = run.pin is not None
        asked_for = None if pinned else self.versions.usable(VersionRef(self.versions.learner_epoch, run.version))
        return Lease(
            group_id=record.group_id, attempt=lease.attempt, prompt_index=record.prompt_index,
            pass_index=record.pass_index, members=(0,),
            prompt=source.record(record.prompt_index),
            # The evaluation's own number is left out: every evaluation asks the same questions with the same seeds.
            seeds=(member_seed(self.state.run_seed, EVAL_BIT | place, 0),),
            min_version=asked_for or actor.installed, sampling=source.sampling,
            ttl_s=self.settings.lease_ttl_s, purpose=Purpose.EVAL, dataset=run.dataset,
            keep_s=self.evals.keep_s if pinned else 0.0, num_after=self.evals.num_waiting_with(run),
        )

    def _grant_train(self, actor: Actor, now: float) -> list[Lease]:
        # Without the share, the first actor with many free slots would take a whole batch and the others would idle.
        room = min(actor.train.room, self._fair_share(actor))
        leases: list[Lease] = []
        prompts, num_passed_over = self.state.prompts, 0
        for record in self._candidates(actor, now) if room > 0 and not prompts.fatal else ():
            prompt = prompts.read(record.prompt_index)
            if prompt is not None:
                leases.append(self._lease_train(actor, record, prompt, now))
            else:  # no actor could do better
                num_passed_over += 1
                self.lifecycle.drop(record, "prompt_invalid")
            if len(leases) == room or num_passed_over == MAX_PASSED_OVER or prompts.fatal:
                break
        return leases

    def _fair_share(self, actor: Actor) -> int:
        """Count the leases that bring this actor level with the others that could have what is there."""
        # The actor that holds least is always below the level, so asking every actor in order leaves nothing over.
        num = self.groups.num(GroupState.READY) + max(0, self.lag.num_free)
        if not num:
            return 0
        num_actors, num_held = self.actors.shares.totals(self._admits())
        level = -(-(num + num_held) // max(1, num_actors))
        return max(0, level - actor.num_train)

    def _admits(self) -> Callable[[int], bool]:
        """Return a test whether an actor with some version may have the first of what there is."""
        oldest = self.groups.first(GroupState.READY)
        rank = self.groups.rank(self.groups.next_id if oldest is None else oldest)
        return lambda installed: self.lag.may_grant(rank, installed)

    def _candidates(self, actor: Actor, now: float) -> Iterator[GroupRecord]:
        """Yield READY groups that this actor may have, oldest first, then new draws."""
        installed = actor.installed.version
        for record in self.groups.in_state(GroupState.READY):
            if not self.lag.may_grant(self.groups.rank(record.group_id), installed):
                return  # ranks grow, so nothing behind it may be granted either
            # Leases that were out when the learner died: their actors come back with them within the grace period, or
            # with their groups. Those of this one are lost only if none of what it sends again is theirs.
            waits = record.holder != actor.actor_id or self._sends_again(actor)
            if not (record.holder and waits and self.actors.in_grace(now)):
                yield record
        while self.lag.num_free > 0 and self.lag.may_grant(self.groups.num_live(), installed):
            yield draw_through(self.state, self.groups.next_id)

    def _sends_again(self, actor: Actor) -> bool:
        """Return whether groups are still to come that this actor had sent before its HELLO."""
        entry = self.dedup.get(actor.actor_id, actor.incarnation)
        return entry is not None and entry.settled.upto < actor.resend_upto

    def _lease_train(self, actor: Actor, record: GroupRecord, prompt: bytes, now: float) -> Lease:
        attempt, members = record.next_attempt, self.lifecycle.missing(record)
        rule = self.settings.sampling_rule
        self.counts["num_groups_leased"] += 1
        self.counts["num_leases_reissued"] += attempt > 0
        self.counts["lost_on_crash"] += bool(record.holder)
        self.actors.lease(actor, record, attempt, members, now)
        actor.train.free -= 1  # until its next heartbeat, which may have been written before this lease arrived
        self.actors.shares.touch(actor)
        num, limit = len(actor.train.leases), actor.train.limit
        assert num <= limit, f"{actor.actor_id}: {num} leases, it takes {limit}"
        return Lease(
            group_id=record.group_id, attempt=attempt, prompt_index=record.prompt_index, pass_index=record.pass_index,
            prompt=prompt, members=members,
            seeds=tuple(member_seed(self.state.run_seed, record.group_id, member) for member in members),
            min_version=actor.installed, sampling=self.state.sampling_of(record.group_id),
            ttl_s=self.settings.lease_ttl_s, purpose=Purpose.TRAIN,
            samplings=tuple(own for member in members if (own := rule.of_member(member)) is not None),
        )


def in_messages(leases: list[Lease]) -> list[tuple[Lease, ...]]:
    """Divide leases into messages that are not too large."""
    parts: list[list[Lease]] = []
    nbytes = 0
    for lease in leases:
        size = len(lease.prompt or b"")
        if not parts or len(parts[-1]) == LEASES_PER_MESSAGE or nbytes + size > LEASES_BYTES:
            parts.append([])
            nbytes = 0
        parts[-1].append(lease)
        nbytes += size
    return [tuple(part) for part in parts]
