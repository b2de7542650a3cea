"""Explanations for a person: what the learner and every actor wait for. Nothing here changes a table."""

from __future__ import annotations

from learner.hub.ledger.actors import ActorTable
from learner.hub.ledger.cut import BatchCutter
from learner.hub.ledger.state import Part, State
from learner.hub.ledger.tables.actor import Actor
from learner.hub.ledger.tables.filters import dropped_by
from learner.hub.ledger.tables.groups import GroupState


class Explanations(Part):
    """Answers why nothing happens."""

    def __init__(self, state: State, cutter: BatchCutter, actors: ActorTable) -> None:
        super().__init__(state)
        self.cutter, self.actors = cutter, actors

    def wait_reason(self, now: float) -> str:
        """Say what the next batch waits for."""
        have, needed = sum(1 for _ in self.cutter.consumable()), self.lag.num_to_cut
        if have >= needed:
            return "nothing: a batch can be cut"
        num_dropped, filters = dropped_by(self.counts, self.cutter.counts_at_cut)
        dropped = f", {num_dropped} more were dropped by {filters}" if num_dropped else ""
        lead = f"{have} of {needed} groups have arrived{dropped}; "
        open_states = (GroupState.READY, GroupState.LEASED)
        first = next((record for record in self.groups.in_order() if record.state in open_states), None)
        if first is None:
            return lead + self._idle_reason()
        done = f"{len(first.members)} of {self.settings.group_size} members done"
        group = f"group {first.group_id} (prompt {first.prompt_index}"
        if first.lease is None:
            return f"{lead}{group}, {done}) waits for an actor; {self._connected()}"
        lease = first.lease
        held_for = f"for {now - lease.granted_at:.0f} s"
        return f"{lead}{group}, attempt {lease.attempt}) is with actor {lease.actor_id} {held_for}, {done}"

    def _idle_reason(self) -> str:
        if self.lag.num_free > 0:
            return f"{self.lag.num_free} more may be leased; {self._connected()}"
        if self.lag.capacity == self.lag.num_groups_total:
            return f"all {self.lag.capacity} groups of the run are trained or held: the run is over"
        return f"the lead of {self.lag.rule.eta} batches is used up until the next optimizer step"

    def _connected(self) -> str:
        actors = sorted(self.actors.all(), key=lambda one: one.actor_id)
        if not actors:
            return "no actor is connected"
        names = []
        for actor in actors[:4]:
            has = f"with version {actor.installed} and {actor.train.free} free slots"
            names.append(f"{actor.actor_id} is {actor.state} "
                         + (has if actor.installed is not None else "and has no usable version yet"))
        more = f" and {len(actors) - 4} more actors" if len(actors) > 4 else ""
        return f"learner is at {self.versions.ref}; " + ", ".join(names) + more

    def actor_status(self, actor_id: str, now: float, *, loads: bool = False) -> str:
        """Say what an actor works on, or what it waits for; `loads`: its heartbeats show no engine yet."""
        actor = self.actors.get(actor_id)
        if actor is None:
            return "waits to join again: the hub gave its leases to others"
        train, evals = len(actor.train.leases), len(actor.eval.leases)
        work = " and ".join(_count(num, what) for num, what in ((train, "group"), (evals, "evaluation answer")) if num)
        if actor.state == "LEAVING":
            return f"is leaving: it finishes {work}" if work else "is leaving"
        if work:
            oldest = min(lease.granted_at for _, lease in actor.open_leases())
            return f"generates {work}, the oldest for {now - oldest:.1f} s"
        if actor.installed is None:
            return "loads its task and its engine" if loads else "waits for weights: it has no usable version yet"
        return f"waits for {self._no_lease_reason(actor)}"

    def _no_lease_reason(self, actor: Actor) -> str:
        assert actor.installed is not None
        if not actor.train.trust:
            return "its own first group: others waited for it, so it gets no more leases before it delivers"
        if not actor.train.room:
            return "itself: it offers no free slot (an install, or an outbox that only a checkpoint empties)"
        ready = self.groups.in_state(GroupState.READY)
        if not ready and self.lag.num_free <= 0:
            if self.lag.capacity == self.lag.num_groups_total:
                return "nothing: every group of the run is trained, held or with another actor"
            return f"the learner: the lead of {self.lag.rule.eta} batches is used up until its next step"
        rank = self.groups.rank(ready[0].group_id) if ready else self.groups.num_live()
        if not self.lag.may_grant(rank, actor.installed.version):
            return f"a newer version: with {actor.installed} its next group could become too old"
        return "its next lease"


def _count(num: int, what: str) -> str:
    return f"{num} {what}{'s' if num != 1 else ''}"
