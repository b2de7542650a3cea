"""What becomes of an incoming group, in the order of the contract, section 8.1: cheap and certain tests first."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from learner.hub.ledger.actors import Roster
from learner.hub.ledger.dedup import DedupEntry
from learner.hub.ledger.evals import EvalItem
from learner.hub.ledger.grant import Dispatch
from learner.hub.ledger.groups import Delivery, GroupRecord, GroupState
from learner.hub.ledger.state import Actor
from streamrl.errors import ContentError
from streamrl.messages import EVAL_BIT, Group, Outcome, RejectReason, ReturnReason
from streamrl.messages.validate import MemberSummary, check_group

HOPELESS = {
    ReturnReason.TOO_LONG: "too_long",
    ReturnReason.PROMPT_INVALID: "prompt_invalid",
    ReturnReason.POISON: "poison",
}
"""Handed back for a fault of the prompt: no other actor could do better, so the group is dropped at once."""
BLAMELESS = (ReturnReason.DRAIN, ReturnReason.NO_SLOT)
"""Handed back for a reason that says nothing about the group: no failure is counted."""


@dataclass(frozen=True, slots=True)
class AcceptResult:
    """accepted; rejected, with its reason; repeat (said before, said again); no_link (answer STOP(NO_LINK)).

    `strike` marks what no honest actor would send.
    """

    kind: Literal["accepted", "rejected", "repeat", "no_link"]
    reason: RejectReason = RejectReason.NONE
    detail: str = ""
    strike: bool = False


class Refusal(Exception):
    """Inside the ledger: this group is rejected."""

    def __init__(self, reason: RejectReason, detail: str, *, strike: bool = False) -> None:
        super().__init__(detail)
        self.reason, self.detail, self.strike = reason, detail, strike


class Admission(Roster, Dispatch):
    """`accept`."""

    def accept(self, actor_id: str, group: Group, frame: bytes | bytearray | memoryview, now: float) -> AcceptResult:
        """Judge a GROUP. `frame` is what arrived, preamble included; it is what the learner will be given."""
        actor = self.actors.get(actor_id)
        if actor is None:
            return AcceptResult("no_link", detail=f"actor {actor_id} has no link")
        if group.incarnation != actor.incarnation:
            self._counts["num_rejected_fenced"] += 1
            detail = f"incarnation {group.incarnation} of {actor_id} is over"
            return AcceptResult("rejected", RejectReason.FENCED, detail)
        actor.heard_at = now
        sender = self.senders.get(actor_id, actor.incarnation)
        place = sender.place(group.seq)
        if place == "repeat":
            self._counts["num_repeats"] += 1
            sender.repeat(group.seq)
            return AcceptResult("repeat")
        if place == "beyond":
            detail = f"seq {group.seq} is more than {self.settings.dedupe_window} ahead of {sender.settled.upto}"
            return self._reject(sender, group, Refusal(RejectReason.MALFORMED, detail, strike=True), settle=False)
        verdict = self._decide(actor, sender, group, frame, now)
        self._release_orphans(actor, now)
        return verdict

    def _decide(self, actor: Actor, sender: DedupEntry, group: Group, frame: bytes, now: float) -> AcceptResult:
        try:
            if group.group_id & EVAL_BIT:
                self._admit_eval(actor, group, now)
                durable = True
            else:
                durable = self._admit(actor, group, frame, now)
        except Refusal as refusal:
            self._after_refusal(actor, group, now)
            return self._reject(sender, group, refusal)
        sender.accept(group.seq)
        if durable:
            sender.make_durable(group.seq)
        return AcceptResult("accepted")

    def _reject(self, sender: DedupEntry, group: Group, refusal: Refusal, *, settle: bool = True) -> AcceptResult:
        sender.reject(group.seq, refusal.reason, refusal.detail, settle=settle)
        self._counts[f"num_rejected_{refusal.reason.name.lower()}"] += 1
        self._counts["num_duplicates_dropped"] += refusal.reason is RejectReason.DUPLICATE
        return AcceptResult("rejected", refusal.reason, refusal.detail, refusal.strike)

    def _after_refusal(self, actor: Actor, group: Group, now: float) -> None:
        """The sender believes that it is done: unless more was to follow, its lease must not stay open for ever."""
        if group.outcome == Outcome.PARTIAL:
            return
        for group_id, lease in self._open_leases(actor):
            if (group_id, lease.attempt) == (group.group_id, group.attempt):
                self._release(group_id, now, failed=True)

    # --- training groups --------------------------------------------------------------------------------------------

    def _admit(self, actor: Actor, group: Group, frame: bytes, now: float) -> bool:
        """Take a training group in; True if its delivery needs no checkpoint. Raises Refusal."""
        record = self.groups.live.get(group.group_id)
        grant = record.grants.get(group.attempt) if record is not None else None
        mine = grant is not None and grant.actor_id == actor.actor_id
        facts = self._check(group, grant.members if mine else range(self.settings.group_size))
        if record is None:
            record = self._find(actor, group, facts)
        elif not mine and not actor.survived_restart:
            raise Refusal(
                RejectReason.NO_LEASE,
                f"group {group.group_id} attempt {group.attempt} was never leased to {actor.actor_id}", strike=True,
            )
        if group.outcome == Outcome.RETURNED and not facts:
            self._hand_back(actor, record, group, now)
            return True
        self._check_open(record, group, facts)
        self._check_versions(group, facts)
        self._check_age(actor, record, group, facts)
        self._take_in(actor, record, group, facts, bytes(frame), now)
        return False

    def _check(self, group: Group, leased: Collection[int]) -> tuple[MemberSummary, ...]:
        try:
            return check_group(group, self.settings.bounds, leased)
        except ContentError as error:
            self._counts[f"num_malformed_{error.check}"] += 1
            raise Refusal(RejectReason.MALFORMED, f"{error.check}: {error}", strike=True) from error

    def _find(self, actor: Actor, group: Group, facts: tuple[MemberSummary, ...]) -> GroupRecord:
        """A group that is not live: it has ended, or it was dispatched by a start of the learner that died since."""
        group_id = group.group_id
        if group_id >= self.groups.next_id:
            if not actor.survived_restart:
                raise Refusal(RejectReason.NO_LEASE, f"group {group_id} was never dispatched", strike=True)
            self._check_versions(group, facts)  # before anything is drawn for work of a dead branch
            if not facts or not self._draw_upto(group_id):
                raise Refusal(RejectReason.NO_LEASE, f"group {group_id} of an earlier start cannot be taken up now")
            return self.groups.live[group_id]
        row = self.groups.settled.get(group_id)
        if row is not None and row.state is GroupState.DROPPED:
            raise Refusal(RejectReason.NO_LEASE, f"group {group_id} was dropped: {row.reason}")
        raise Refusal(RejectReason.DUPLICATE, f"group {group_id} has been trained on")

    def _check_open(self, record: GroupRecord, group: Group, facts: tuple[MemberSummary, ...]) -> None:
        if record.state in (GroupState.HELD, GroupState.IN_BATCH):
            raise Refusal(RejectReason.DUPLICATE, f"group {group.group_id} is complete")
        done = [one.index for one in facts if not one.aborted and one.index in record.members]
        if done:
            raise Refusal(RejectReason.DUPLICATE, f"group {group.group_id}: members {done} came from another attempt")

    def _check_versions(self, group: Group, facts: tuple[MemberSummary, ...]) -> None:
        for one in facts:
            for ref in one.all_versions:
                if not self.versions.known(ref.learner_epoch, ref.version):
                    raise Refusal(
                        RejectReason.VERSION,
                        f"group {group.group_id} member {one.index} has tokens of version {ref}, which is "
                        f"not in this history (now {self.versions.ref})",
                    )

    def _check_age(
        self, actor: Actor, record: GroupRecord, group: Group, facts: tuple[MemberSummary, ...]
    ) -> None:
        """L2, a cheap first look; the cut looks again."""
        stale = [one for one in facts if not one.aborted and self._is_stale(record, one, self.version)]
        if not stale:
            return
        oldest = min(span.version for one in stale for span in one.spans)
        lease = record.lease
        if lease is not None and (lease.actor_id, lease.attempt) == (actor.actor_id, group.attempt):
            self._detach(record, revoke=group.outcome == Outcome.PARTIAL)
            self._counts["num_tokens_stale"] += sum(one.num_action_tokens for one in facts)
            self._stale(record)
        raise Refusal(
            RejectReason.STALE,
            f"group {group.group_id} attempt {group.attempt} from actor {actor.actor_id} has lag "
            f"{self.version - oldest} > max_lag {self.bound_of(record)} (oldest token version {oldest}, now at "
            f"{self.version})",
        )

    def _take_in(
        self, actor: Actor, record: GroupRecord, group: Group, facts: tuple[MemberSummary, ...], frame: bytes,
        now: float,
    ) -> None:
        delivery = Delivery(actor.actor_id, actor.incarnation, group.seq)
        fresh = {one.index: one for one in facts if not one.aborted}
        self._counts["num_members_aborted"] += len(facts) - len(fresh)
        self._counts["num_members_accepted"] += len(fresh)
        self._counts["num_tokens_accepted"] += sum(one.num_action_tokens for one in fresh.values())
        record.holder = ""
        if fresh:
            record.members.update(fresh)
            record.frames.append(frame)
            record.deliveries.append(delivery)
        else:
            self._ends.deliveries.append(delivery)
        lease = record.lease
        current = lease is not None and (lease.actor_id, lease.attempt) == (actor.actor_id, group.attempt)
        complete = len(record.members) == self.settings.group_size
        over = current and group.outcome != Outcome.PARTIAL
        beaten = lease is not None and not current and bool(set(lease.members) & set(fresh))
        if lease is not None and (complete or over or beaten):
            # First valid completion wins; an attempt that lost part of its members to another is called off.
            self._detach(record, revoke=not over)
        if complete:
            self._counts["num_groups_accepted"] += 1
            self._hold(record)
        elif over:
            self._retry(record, now, failed=_is_failure(group))
        elif beaten:
            self._retry(record, now, failed=False)

    def _hand_back(self, actor: Actor, record: GroupRecord, group: Group, now: float) -> None:
        """RETURNED without members. From an attempt that is no longer current it changes nothing."""
        reason = group.reason
        self._counts[f"num_returned_{reason.name.lower()}"] += 1
        lease = record.lease
        if lease is None or (lease.actor_id, lease.attempt) != (actor.actor_id, group.attempt):
            return
        self._detach(record, revoke=False)
        if reason in HOPELESS:
            self._drop(record, HOPELESS[reason])
        else:
            self._retry(record, now, failed=_is_failure(group))

    # --- evaluation groups ------------------------------------------------------------------------------------------

    def _admit_eval(self, actor: Actor, group: Group, now: float) -> None:
        """The same order of tests, without capacity and age. Raises Refusal."""
        facts = self._check(group, (0,))
        item = self.evals.item(group.group_id)
        if item is None:
            raise Refusal(RejectReason.NO_LEASE, f"evaluation group {group.group_id:#x} is not under way")
        if item.grants.get(group.attempt) != actor.actor_id:
            raise Refusal(
                RejectReason.NO_LEASE,
                f"evaluation group {group.group_id:#x} attempt {group.attempt} was never leased to {actor.actor_id}",
                strike=not actor.survived_restart,
            )
        scored = [one for one in facts if not one.aborted]
        if scored and not item.open:
            raise Refusal(RejectReason.DUPLICATE, f"evaluation group {group.group_id:#x} has its score")
        self._check_versions(group, facts)
        current = item.lease is not None and (item.lease.actor_id, item.lease.attempt) == (
            actor.actor_id, group.attempt
        )
        if scored:
            self._finish_eval(item, group.group_id, scored[0], revoke=not current)
        elif current:
            self._release(group.group_id, now, failed=_is_failure(group))

    def _finish_eval(self, item: EvalItem, group_id: int, facts: MemberSummary, *, revoke: bool) -> None:
        if item.lease is not None:
            holder = self.actors.get(item.lease.actor_id)
            if holder is not None:
                holder.eval_leases.discard(group_id)
                if revoke:
                    holder.revocations.append((group_id, item.lease.attempt))
                else:
                    holder.free_eval += 1
        self._counts["num_eval_groups"] += 1
        self.evals.finish(group_id, facts)


def _is_failure(group: Group) -> bool:
    """Whether an attempt that left members missing counts against the group."""
    return group.outcome != Outcome.RETURNED or group.reason not in BLAMELESS
