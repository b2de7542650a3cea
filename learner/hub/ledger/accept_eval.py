"""Acceptance of evaluation groups: the same order of tests, without capacity and age."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from learner.hub.ledger.refusal import GroupChecks, Refused, is_failure
from learner.hub.ledger.tables.actors import Actor, ActorTable
from learner.hub.ledger.tables.evals import EvalSource, EvalTable
from learner.hub.ledger.tables.groups import Delivery, GroupState
from streamrl.messages import Group, RejectReason


@dataclass
class EvalAcceptance:
    """Judges evaluation groups; `sources` say how the leases of each set have answers drawn."""

    checks: GroupChecks
    counts: Counter[str]
    evals: EvalTable
    actors: ActorTable
    sources: Mapping[str, EvalSource]

    def accept(self, actor: Actor, group: Group, frame: bytes, now: float) -> bool:
        """Take an evaluation group in; it is durable at once. Raises Refused."""
        summaries = self.checks.content(group, (0,))
        record = self.evals.record(group.group_id)
        name = f"evaluation group {group.group_id:#x}"
        if record is None:
            raise Refused(RejectReason.NO_LEASE, f"{name} is not under way")
        if not record.was_granted(actor.actor_id, group.attempt):
            raise Refused(
                RejectReason.NO_LEASE, f"{name} attempt {group.attempt} was never leased to {actor.actor_id}",
                strike=not actor.survived_restart,
            )
        scored = [one for one in summaries if not one.aborted]
        if scored and record.state in (GroupState.HELD, GroupState.DROPPED):
            raise Refused(RejectReason.DUPLICATE, f"{name} has its score")
        self.checks.sampling(group, self.sources[self.evals.run_of(record).dataset].sampling)
        self.checks.versions_known(group, summaries)
        current = record.is_with(actor.actor_id, group.attempt)
        if scored and not self.evals.run_of(record).counts(scored[0]):
            self.counts["num_eval_discarded"] += 1
            if current:
                self.actors.release(group.group_id, now, failed=False)  # no fault of the prompt: it is asked again
        elif scored:
            if record.lease is not None:
                self.actors.detach(record, revoke=not current)
            self.counts["num_eval_groups"] += 1
            self.evals.finish(record, scored[0], frame, Delivery(actor.actor_id, actor.incarnation, group.seq),
                              group.answers[0] if group.answers else "")
        elif current:
            self.actors.release(group.group_id, now, failed=is_failure(group))
        return True
