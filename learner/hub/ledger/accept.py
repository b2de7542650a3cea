"""Acceptance of incoming groups: tests in the order of the contract, section 8.1, cheap and certain ones first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from learner.hub.ledger.accept_train import TrainAcceptance
from learner.hub.ledger.refusal import AcceptResult, GroupChecks, Refused, is_failure
from learner.hub.ledger.tables.actor import Actor
from learner.hub.ledger.tables.actors import ActorTable
from learner.hub.ledger.tables.dedup import DedupEntry, DedupTable
from learner.hub.ledger.tables.evals import EvalSource, EvalTable
from learner.hub.ledger.tables.groups import Delivery, GroupState
from streamrl.messages import EVAL_BIT, Group, Outcome, RejectReason


@dataclass
class Acceptance:
    """Judges GROUP messages; `sources` say how the leases of each evaluation set have answers drawn."""

    counts: Counter[str]
    dedup: DedupTable
    evals: EvalTable
    actors: ActorTable
    checks: GroupChecks
    sources: Mapping[str, EvalSource]
    train: TrainAcceptance

    def accept(self, actor_id: str, group: Group, frame: bytes | bytearray | memoryview, now: float) -> AcceptResult:
        """Judge a GROUP. `frame` is what arrived, preamble included; it is what the learner will be given."""
        actor = self.actors.get(actor_id)
        if actor is None:
            return AcceptResult("no_link", detail=f"actor {actor_id} has no link")
        # A fenced process may still send; its numbers mean nothing in the tables of the new one.
        if group.incarnation != actor.incarnation:
            self.counts["num_rejected_fenced"] += 1
            detail = f"incarnation {group.incarnation} of {actor_id} is over"
            return AcceptResult("rejected", RejectReason.FENCED, detail)
        actor.heard_at = now
        entry = self.dedup.get(actor_id, actor.incarnation)
        place = entry.place(group.seq)
        if place == "repeat":
            # The ack was lost, or the link. The first answer stands, whatever has become of the group since.
            self.counts["num_repeats"] += 1
            entry.repeat(group.seq)
            return AcceptResult("repeat")
        if place == "beyond":
            # Left unsettled, so that an honest re-send of this number is still possible.
            detail = f"seq {group.seq} is more than {self.dedup.window} ahead of {entry.settled.upto}"
            return self._reject(entry, group, AcceptResult("rejected", RejectReason.MALFORMED, detail, True), False)
        result = self._decide(actor, entry, group, frame, now)
        # After the judgement: this may have been the last re-send that orphaned leases waited for.
        self.actors.release_orphans(actor, entry, now)
        return result

    def _decide(self, actor: Actor, entry: DedupEntry, group: Group, frame: bytes, now: float) -> AcceptResult:
        lease = actor.credit(group.group_id).leases.get(group.group_id)
        try:
            judge = self._accept_eval if group.group_id & EVAL_BIT else self.train.accept
            durable = judge(actor, group, frame, now)
        except Refused as refused:
            # The actor believes that it is done: unless more was to follow, its lease must not stay open forever.
            lease = actor.credit(group.group_id).leases.get(group.group_id)  # a stale group has ended it
            if group.outcome != Outcome.PARTIAL and lease is not None and lease.attempt == group.attempt:
                self.actors.release(group.group_id, now, failed=True)
            if refused.result.reason is RejectReason.DUPLICATE:  # too late, but it does work
                self.actors.delivered(actor, group.group_id, None, now)
            return self._reject(entry, group, refused.result)
        entry.accept(group.seq)
        actor.moved_at = now
        if group.members:
            self.actors.delivered(actor, group.group_id, lease, now)
        self.counts["num_episodes_failed"] += group.num_failed_episodes
        if durable:
            entry.make_durable(group.seq)
        return AcceptResult("accepted")

    def _reject(self, entry: DedupEntry, group: Group, result: AcceptResult, settle: bool = True) -> AcceptResult:
        entry.reject(group.seq, result.reason, result.detail, settle=settle)
        self.counts[f"num_rejected_{result.reason.name.lower()}"] += 1
        self.counts["num_duplicates_dropped"] += result.reason is RejectReason.DUPLICATE
        return result

    def _accept_eval(self, actor: Actor, group: Group, frame: bytes, now: float) -> bool:
        """Take an evaluation group in, without tests of capacity and age; it is durable at once. Raises Refused."""
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
