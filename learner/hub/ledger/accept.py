"""Acceptance of incoming groups: tests in the order of the contract, section 8.1, cheap and certain ones first."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

import xxhash

from learner.hub.ledger.actors import ActorTable
from learner.hub.ledger.apply import commit
from learner.hub.ledger.lifecycle import GroupLifecycle
from learner.hub.ledger.state import Part, State
from learner.hub.ledger.tables.actor import Actor
from learner.hub.ledger.tables.dedup import DedupEntry
from learner.hub.ledger.tables.groups import Delivery, GroupRecord, GroupState
from learner.hub.ledger.tables.settings import SamplingRule
from streamrl.errors import ContentError
from streamrl.messages import EVAL_BIT, Group, GroupOrigin, Outcome, RejectReason, ReturnReason, Sampling
from streamrl.messages.validate import MemberSummary, check_group, is_scorable
from streamrl.stream.records import GroupArrived

DROP_AT_ONCE = (ReturnReason.TOO_LONG, ReturnReason.PROMPT_INVALID, ReturnReason.POISON)
"""Faults of the prompt: no other actor could do better."""
NOT_A_FAILURE = (ReturnReason.DRAIN, ReturnReason.NO_SLOT)
"""Reasons that have nothing to do with the group."""

Summaries = tuple[MemberSummary, ...]


@dataclass(frozen=True, slots=True)
class AcceptResult:
    """The answer to a group: accepted; rejected, with its reason; repeat (answered again); no_link (send STOP).

    `strike` marks what no honest actor would send.
    """

    kind: Literal["accepted", "rejected", "repeat", "no_link"]
    reason: RejectReason = RejectReason.NONE
    detail: str = ""
    strike: bool = False


class Refused(Exception):
    """Raised where a group is rejected."""

    def __init__(self, reason: RejectReason, detail: str, *, strike: bool = False) -> None:
        super().__init__(detail)
        self.result = AcceptResult("rejected", reason, detail, strike)


def is_failure(group: Group) -> bool:
    """Return whether an attempt that left members missing counts against the group."""
    return group.outcome != Outcome.RETURNED or group.reason not in NOT_A_FAILURE


class Acceptance(Part):
    """Judges GROUP messages."""

    def __init__(self, state: State, lifecycle: GroupLifecycle, actors: ActorTable) -> None:
        super().__init__(state)
        self.lifecycle, self.actors = lifecycle, actors

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
            judge = self._accept_eval if group.group_id & EVAL_BIT else self._accept_train
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

    # --- what no leased group can have, whatever its lease; each raises Refused ---------------------------------------

    def _content(self, group: Group, leased: Collection[int]) -> Summaries:
        """Check the rules of `streamrl.messages.validate`; returns a summary of each member."""
        try:
            return check_group(group, self.settings.limits, leased)
        except ContentError as error:
            self.counts[f"num_malformed_{error.check}"] += 1
            raise Refused(RejectReason.MALFORMED, f"{error.check}: {error}", strike=True) from error

    def _check_sampling(
        self, group: Group, leased: Sampling, rule: SamplingRule | None = None, *, or_scorable: bool = False
    ) -> None:
        """Check that answers were drawn as the lease asked, or with `or_scorable` in any way that can be scored."""
        rule = rule or SamplingRule()
        wrong = [one for one in group.members if one.sampling != rule.of_member(one.index)]
        right = not group.members or (group.sampling == leased and not wrong)
        if right or (or_scorable and all(map(is_scorable, group.samplings))):
            return
        self.counts["num_malformed_sampling"] += 1
        drawn, asked = group.sampling, leased
        if wrong:
            drawn, asked = wrong[0].sampling or drawn, rule.of_member(wrong[0].index) or asked
        detail = f"sampling: group {group.group_id} was drawn with {drawn}, the lease asked for {asked}"
        raise Refused(RejectReason.MALFORMED, detail, strike=True)

    def _check_versions(self, group: Group, summaries: Summaries) -> None:
        """Check that no token is of the future, or of a branch of the run that a crash has cut off."""
        for one in summaries:
            for ref in one.all_versions:
                if self.versions.usable(ref) is None:
                    raise Refused(
                        RejectReason.VERSION,
                        f"group {group.group_id} member {one.index} has tokens of version {ref}, which is not in "
                        f"this history (now {self.versions.ref})",
                    )

    # --- training -------------------------------------------------------------------------------------------------

    def _accept_train(self, actor: Actor, group: Group, frame: bytes, now: float) -> bool:
        """Take a training group in; True if its delivery need not wait for the log. Raises Refused."""
        record = self.groups.live.get(group.group_id)
        mine = record is not None and record.was_granted(actor.actor_id, group.attempt)
        leased = record.grants[group.attempt].members if mine else range(self.settings.group_size)
        summaries = self._content(group, leased)
        if record is None:
            record = self._find(actor, group, summaries)
        elif not mine and not actor.survived_restart:
            raise Refused(
                RejectReason.NO_LEASE,
                f"group {group.group_id} attempt {group.attempt} was never leased to {actor.actor_id}", strike=True,
            )
        # No content to judge, and nothing that a crash could lose: durable at once.
        if group.outcome == Outcome.RETURNED and not summaries:
            self._hand_back(actor, record, group, now)
            return True
        self._check_open(record, group, summaries)
        # The learner scores a group under the sampling that it names: what survived a restart may have an earlier one.
        leased = self.state.sampling_of(group.group_id)
        self._check_sampling(group, leased, self.settings.sampling_rule, or_scorable=actor.survived_restart)
        self._check_versions(group, summaries)
        self._check_age(actor, record, group, frame, summaries)
        commit(self.state, self._arrival(actor, record, group, frame), summaries)
        self._settle_lease(actor, record, group, {one.index for one in summaries if not one.aborted}, now)
        return False

    def _find(self, actor: Actor, group: Group, summaries: Summaries) -> GroupRecord:
        """Find a group that is not live: it has ended, or an earlier start of the learner dispatched it."""
        group_id = group.group_id
        if group_id >= self.groups.next_id:
            if not actor.survived_restart:
                raise Refused(RejectReason.NO_LEASE, f"group {group_id} was never dispatched", strike=True)
            self._check_versions(group, summaries)  # before anything is drawn for work of a dead branch
            if not summaries or not self.lifecycle.draw_through(group_id):
                raise Refused(RejectReason.NO_LEASE, f"group {group_id} of an earlier start cannot be taken up now")
            return self.groups.live[group_id]
        row = self.groups.settled.get(group_id)  # None once a checkpoint covers it, and all before it
        if row is not None and row.state is GroupState.DROPPED:
            raise Refused(RejectReason.NO_LEASE, f"group {group_id} was dropped: {row.reason}")
        raise Refused(RejectReason.DUPLICATE, f"group {group_id} has been trained on")

    def _check_open(self, record: GroupRecord, group: Group, summaries: Summaries) -> None:
        if record.state in (GroupState.HELD, GroupState.IN_BATCH):
            raise Refused(RejectReason.DUPLICATE, f"group {group.group_id} is complete")
        # (group, member) is the authority on duplicates: sequence numbers are forgotten with their sender.
        done = [one.index for one in summaries if not one.aborted and one.index in record.members]
        if done:
            raise Refused(RejectReason.DUPLICATE, f"group {group.group_id}: members {done} came from another attempt")

    def _check_age(
        self, actor: Actor, record: GroupRecord, group: Group, frame: bytes, summaries: Summaries
    ) -> None:
        """Refuse what is too old by L2: a cheap first look, the cut looks again."""
        version = self.versions.current
        if not self.lag.is_stale(record, version, [one for one in summaries if not one.aborted]):
            return
        oldest = min(span.version for one in summaries if not one.aborted for span in one.spans)
        # A late copy of an older attempt says nothing about the attempt that is out now: only its own lease ends.
        if record.is_with(actor.actor_id, group.attempt):
            self.actors.detach(record, revoke=group.outcome == Outcome.PARTIAL)
            self.counts["num_tokens_stale"] += sum(one.num_action_tokens for one in summaries)
            self.lifecycle.expire_stale(record)
        origin = GroupOrigin(actor.actor_id, record.prompt_index)
        self.state.passed_over.add(record.group_id, [frame], [origin], "stale")
        commit(self.state, self._arrival(actor, record, group, frame, refused="stale"), summaries)
        last = self.lag.rule.last_step(version)
        raise Refused(
            RejectReason.STALE,
            f"group {group.group_id} attempt {group.attempt} from actor {actor.actor_id} has lag {last - oldest} > "
            f"max_lag {self.lag.of(record)} (oldest token version {oldest}, now at {last})",
        )

    def _arrival(
        self, actor: Actor, record: GroupRecord, group: Group, frame: bytes, *, refused: str = ""
    ) -> GroupArrived:
        kept = not refused or self.settings.keep_refused
        return GroupArrived(
            actor.actor_id, actor.incarnation, group.seq, group.group_id, record.prompt_index,
            bytes(frame) if kept else b"", refused, 0 if kept else xxhash.xxh3_64_intdigest(frame),
        )

    def _settle_lease(self, actor: Actor, record: GroupRecord, group: Group, fresh: set[int], now: float) -> None:
        """End the open lease if this message completes or ends it, and move the group on."""
        lease = record.lease
        current = record.is_with(actor.actor_id, group.attempt)
        complete = len(record.members) == self.settings.group_size
        over = current and group.outcome != Outcome.PARTIAL
        # First valid completion wins; an attempt that lost part of its members to another is called off.
        beaten = lease is not None and not current and bool(set(lease.members) & fresh)
        if lease is not None and (complete or over or beaten):
            self.actors.detach(record, revoke=not over)
        if complete:
            self.lifecycle.hold(record)
        elif over or beaten:
            self._retry(record, group, now, failed=over and is_failure(group))

    def _hand_back(self, actor: Actor, record: GroupRecord, group: Group, now: float) -> None:
        """Take back a lease that was RETURNED without members; from an earlier attempt it changes nothing."""
        reason = group.reason.name.lower()
        self.counts[f"num_returned_{reason}"] += 1
        if not record.is_with(actor.actor_id, group.attempt):
            return
        self.actors.detach(record, revoke=False)
        if group.reason in DROP_AT_ONCE:
            self.lifecycle.drop(record, reason)
        else:
            self._retry(record, group, now, failed=is_failure(group))

    def _retry(self, record: GroupRecord, group: Group, now: float, *, failed: bool) -> None:
        self.lifecycle.retry(record, now, failed=failed)
        # Leased again for a fault of the environment: no recovery from a lost actor, so it is counted apart.
        self.counts["num_leases_retried"] += record.state is GroupState.READY and group.num_failed_episodes > 0

    # --- evaluation -----------------------------------------------------------------------------------------------

    def _accept_eval(self, actor: Actor, group: Group, frame: bytes, now: float) -> bool:
        """Take an evaluation group in, without tests of capacity and age; it is durable at once. Raises Refused."""
        summaries = self._content(group, (0,))
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
        self._check_sampling(group, self.eval_sources[self.evals.run_of(record).dataset].sampling)
        self._check_versions(group, summaries)
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
                              group.answers[0] if group.answers else "", len(group.members[0].turns))
        elif current:
            self.actors.release(group.group_id, now, failed=is_failure(group))
        return True
