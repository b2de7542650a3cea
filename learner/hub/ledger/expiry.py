"""Time-outs: silent actors, leases without progress, overdue groups, evaluations that wait too long."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from learner.hub.ledger.membership import Membership
from learner.hub.ledger.tables.actors import ActorTable, Effect
from learner.hub.ledger.tables.evals import EvalRun, EvalTable
from learner.hub.ledger.tables.groups import GroupState, GroupTable
from learner.hub.ledger.tables.lifecycle import GroupLifecycle
from learner.hub.ledger.tables.settings import LedgerSettings
from learner.hub.ledger.tables.versions import LagBounds, Versions


@dataclass
class Expiry:
    """Ends what has lasted too long."""

    settings: LedgerSettings
    counts: Counter[str]
    versions: Versions
    groups: GroupTable
    evals: EvalTable
    lag: LagBounds
    lifecycle: GroupLifecycle
    actors: ActorTable
    membership: Membership

    def tick(self, now: float) -> list[Effect]:
        """Let time pass; returns what the shell must do."""
        # Silent actors first: their leases then return by eviction, not one by one as expired.
        silent = [actor for actor in self.actors.all() if now - actor.heard_at >= self.settings.dead_after_s]
        effects = [Effect("evict", one.actor_id, tuple(self.membership.evict(one.actor_id, now))) for one in silent]
        self.actors.expire_leases(now)
        if not self.groups.num(GroupState.READY) and self.lag.num_free <= 0:  # there is nothing else for who waits
            self.actors.spread(now)
        if self.settings.group_deadline_s > 0:
            self._expire_groups(now)
        self._check_pins(now)
        return effects + self.actors.take_revocations()

    def _check_pins(self, now: float) -> None:
        """Start evaluations again whose version no actor has; end those that keep actors from a newer one too long."""
        # A dead actor has left the table by now, and its leases are with the others that have the version.
        for run in self.evals.lost({one.installed.version for one in self.actors.all() if one.installed is not None}):
            self._end_leases(run, now)
            self.counts["num_evals_started_again"] += 1
            self.evals.start_again(run)
        for run in self.evals.overdue(self.versions.newest_published, now):
            self._end_leases(run, now)
            self.evals.give_up(run)

    def _end_leases(self, run: EvalRun, now: float) -> None:
        for record in run.records:
            if record.lease is not None:
                self.actors.release(record.group_id, now, failed=False, revoke=True)

    def _expire_groups(self, now: float) -> None:
        """End the leases of incomplete groups that are overdue; `group_policy` says what follows."""
        settings = self.settings
        for record in self.groups.in_order():
            partial = settings.group_policy == "accept_partial" and len(record.members) >= settings.min_members
            # A group that may be accepted as it is has waited since its first lease, any other since the present one.
            since = record.first_granted_at if partial or record.lease is None else record.lease.granted_at
            if since is None or now - since < settings.group_deadline_s:
                continue
            if record.state is GroupState.LEASED:
                self.counts["num_groups_overdue"] += 1
                self.actors.release(record.group_id, now, failed=True, revoke=True)
            elif record.state is GroupState.READY and partial:
                self.lifecycle.retry(record, now, failed=False)
