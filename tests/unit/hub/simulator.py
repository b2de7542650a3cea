"""A learner, a few actors and a network that loses things, around one ledger; and what must hold after every step.

The world keeps its own books, from what it sees on the outside, and compares.
"""

from dataclasses import dataclass, field, replace

from learner.hub.ledger.ledger import Ledger, LedgerSettings
from learner.hub.ledger.tables.groups import GroupState, HeldGroup
from streamrl.lag_rule import LagRule
from streamrl.messages import EVAL_BIT, TO_HUB, Group, Lease, LeaseRef, MemberStatus, Outcome, ReturnReason, VersionRef
from streamrl.messages.codec import Decoder
from streamrl.stream.records import BatchCut, GroupArrived
from tests.unit.hub.factories import FakeActor, cut, end_batch, ledger_arguments, log_of, publish, restart, sync

DECODER = Decoder(TO_HUB)


MOVES = ("join", "ask", "ask", "finish", "finish", "finish", "finish", "install", "acks", "beat", "train", "train")
SHAPES = ("aborted", "partial", "env_error", "drain", "stale", "too_long", "whole")
FAULTS = (
    "lose_link", "lose_leases", "silence", "evict", "leave", "die", "restart", "zombie", "resend", "freeze",
    "checkpoint", "checkpoint", "crash", "cut", "skip", "publish_first", "late", "late", "stuck", "bounds", "bounds",
    "publish_inside", "publish_inside", "sync", "sync", "sync",
)


def derived_bound(rule: LagRule, eta: int | None = None) -> int:
    """What grants and window allow, at this eta or at the rule's own."""
    return (rule if eta is None else rule.at_eta(eta)).bound


def drop_some(group: HeldGroup) -> str | None:
    """A filter that drops every fifth group."""
    return "fifth" if group.group_id % 5 == 3 else None


@dataclass
class SimActor(FakeActor):
    """A fake actor whose running groups see new weights arrive, and whose link may be down."""

    linked: bool = False
    spans: dict[LeaseRef, list[VersionRef]] = field(default_factory=dict)

    def take(self, leases: list[Lease]) -> None:
        for lease in leases:
            self.leases[lease.ref] = lease
            self.spans[lease.ref] = [self.ref]

    def install_ref(self, ref: VersionRef, now: float) -> None:
        """In flight: running groups go on under the new weights."""
        self.ref = ref
        for spans in self.spans.values():
            spans.append(ref)
        if self.linked:
            self.ledger.installed(self.actor_id, ref, True, now)

    def versions_of(self, lease: Lease) -> list[tuple[int, int]]:
        return [(ref.learner_epoch, ref.version) for ref in self.spans[lease.ref]]


class World:
    """Events as methods; `check` after each."""

    def __init__(
        self, settings: LedgerSettings, *, kind: type[Ledger] = Ledger, with_filter: bool = False,
        publishes_late: bool = False,
    ) -> None:
        arguments = ledger_arguments(**({"keep_group": drop_some} if with_filter else {}))
        self.ledger = kind(settings, **arguments)  # type: ignore[arg-type]
        self.settings = settings
        self.publishes_late = publishes_late  # only when half the lead is used up that way
        self.now = 0.0
        self.published = VersionRef(1, 0)
        publish(self.ledger, self.published)
        self.actors: dict[str, SimActor] = {}
        self.zombies: list[SimActor] = []
        self.batch: list[HeldGroup] | None = None
        self.history: list[tuple[int, list[tuple[int, int]]]] = []  # (version before, keys trained), this lineage only
        self.trained_from: dict[tuple[int, int], int] = {}  # (incarnation, seq) -> version its bytes were trained at
        self.durable: set[tuple[int, int]] = set()  # keys of batches that the disk has: no crash takes them back
        self.accepted: dict[tuple[int, int], int] = {}  # key -> the log's end when ACCEPTED was said
        self.cuts: dict[int, int] = {}  # version before -> record of the last batch that was cut for it
        self.skips: set[int] = set()  # records of batches whose step is not finite, however often it is computed
        self.synced = 0  # the newest record on the disk
        self.arrived: dict[tuple[int, int], int] = {}  # (incarnation, seq) -> record
        self._num_read = 0
        self.any_stale = False
        self.drawn: set[int] = set()  # groups seen in leases, this start
        self.valid = {VersionRef(1, 0)}  # weights on this history
        self.met: set[int] = set()  # incarnations that said HELLO in this history; a crash forgets the later ones
        self.fenced: set[int] = set()  # those of them that were superseded
        self.head_lags: list[int] = []
        self.num_lags_at_the_bound = self.num_published_inside = 0
        self.promised: dict[int, int] = {}  # group -> largest bound that was in force at one of its grants
        self.tight = False  # a bound was below what admission allows, so groups may outlive it
        self._took_bounds(settings.lag.eta, settings.lag.max_lag)
        self.frozen: dict[int, tuple[bytes, set[int], set[int]]] = {}
        self.saved = (0, self.ledger.freeze(0), set(), set())
        self.ledger.saved(0)
        self.num_incarnations = 10
        self.num_restarts = self.num_lost_records = self.num_trained_again = 0

    # --- actors -------------------------------------------------------------------------------------------------------

    def join(self, name: str) -> SimActor:
        """HELLO from a new process, or from one that lost its link."""
        actor = self.actors.get(name)
        if actor is None:
            self.num_incarnations += 1
            actor = SimActor(self.ledger, name, incarnation=self.num_incarnations, slots=3, ref=self.published)
            self.actors[name] = actor
        actor.ledger = self.ledger
        before = dict(actor.outbox)
        result = actor.join(self.now)
        assert result.stop is None, result.stop
        actor.linked = True
        self._promise(list(actor.leases.values()))  # a lease that a new learner confirms is as good as granted now
        self.met.add(actor.incarnation)
        self.fenced |= self.met & {one.incarnation for one in self.zombies if one.actor_id == name}
        self._check_forgotten(actor, before, set())
        settled = set(range(1, result.settled_upto + 1)) | {
            seq for first, last in result.settled for seq in range(first, last + 1)
        }
        assert settled | set(before) >= set(range(1, actor.next_seq)), "a number that is never sent again is open"
        if actor.incarnation % 2:  # the others do not check: they send tokens of dead branches, which must be refused
            for ref in list(actor.leases):
                if not set(actor.spans[ref]) <= self.valid:
                    actor.hand_back(actor.leases[ref], ReturnReason.STALE, self.now)
        actor.spans = {ref: actor.spans[ref] for ref in actor.leases}
        return actor

    def ask(self, actor: SimActor) -> None:
        actor.beat(self.now)
        while leases := self.ledger.grant(actor.actor_id, self.now):
            assert actor.ref in self.valid, f"{actor.actor_id} got leases with weights of a dead branch, {actor.ref}"
            ids = [lease.group_id for lease in leases]
            assert ids == sorted(ids), f"granted out of dispatch order: {ids}"
            self.drawn.update(ids)
            self._promise(leases)
            actor.take(leases)
            assert len(actor.leases) <= actor.slots, f"{actor.actor_id} has {len(actor.leases)} leases"

    def finish(self, actor: SimActor, ref: LeaseRef, shape: str, *, delivered: bool = True) -> None:
        """A group, or part of one, or a hand-back; delivered now, or lost on the way and kept in the outbox."""
        lease = actor.leases[ref]
        versions = actor.versions_of(lease)
        members = lease.members
        if shape == "aborted":
            group = actor.group(lease, versions=versions, aborted=members[:1])
        elif shape == "partial":
            group = actor.group(lease, versions=versions, members=members[:1], outcome=Outcome.PARTIAL)
            lease = actor.leases.pop(ref)  # a real actor would go on; here the rest comes back as aborted later
            actor.spans.pop(ref)
            if delivered and actor.linked:
                self.send(actor, group)
            rest = actor.group(lease, members=(), outcome=Outcome.RETURNED, reason=ReturnReason.ENV_ERROR)
            if delivered and actor.linked:
                self.send(actor, rest)
            return
        elif shape == "whole":
            group = actor.group(lease, versions=versions)
        else:
            group = actor.group(lease, members=(), outcome=Outcome.RETURNED, reason=ReturnReason[shape.upper()])
        actor.spans.pop(ref, None)
        if delivered and actor.linked:
            self.send(actor, group)

    def send(self, actor: SimActor, group: Group) -> None:
        result = actor.send(group, self.now)
        assert not result.strike, f"an honest actor was struck: {result}"
        if result.kind == "accepted":
            for member in group.members:
                if member.status != MemberStatus.ABORTED:
                    self.accepted[group.group_id, member.index] = self.ledger.journal.next_sequence - 1
        if result.kind == "no_link":
            actor.linked = False

    def lose_leases(self, actor: SimActor) -> None:
        """A LEASE message gets lost together with the link."""
        actor.beat(self.now)
        self._promise(self.ledger.grant(actor.actor_id, self.now))
        actor.linked = False

    def acks(self, actor: SimActor) -> None:
        before = dict(actor.outbox)
        rejected = {one.seq for ack in actor.take_acks() for one in ack.rejected}
        self._check_forgotten(actor, before, rejected)

    def resend(self, actor: SimActor) -> None:
        """Everything in the outbox, in order: byte-identical repeats, and what was lost."""
        for seq in sorted(actor.outbox):
            if actor.linked and seq in actor.outbox:
                self.send(actor, actor.outbox[seq])

    def kill(self, actor: SimActor) -> None:
        """The process dies; its outbox dies with it. A zombie of it may still talk."""
        del self.actors[actor.actor_id]
        self.zombies.append(actor)

    def leave(self, actor: SimActor) -> None:
        """In order: DRAIN, then BYE."""
        self.ledger.drain(actor.actor_id, self.now)
        self.ledger.bye(actor.actor_id, self.now)
        del self.actors[actor.actor_id]

    def zombie_talks(self, zombie: SimActor) -> None:
        """A process that was superseded, and does not know it: nothing it says may have an effect."""
        if zombie.incarnation not in self.fenced:
            return
        zombie.ledger = self.ledger
        assert zombie.join(self.now).stop.exit_code == 3
        assert not zombie.beat(self.now)
        for group in zombie.outbox.values():
            assert zombie.send(group, self.now).kind in ("rejected", "no_link")

    def tick(self, seconds: float) -> None:
        """Time passes; linked actors beat, all others are silent."""
        self.now += seconds
        for actor in self.actors.values():
            if actor.linked and seconds and not actor.beat(self.now):
                actor.linked = False
        for effect in self.ledger.tick(self.now):
            actor = self.actors.get(effect.actor_id)
            if actor is None:
                continue
            if effect.kind == "revoke":
                actor.revoke(effect.leases)
                actor.spans = {ref: spans for ref, spans in actor.spans.items() if ref in actor.leases}
            else:
                actor.linked = False

    # --- one event, by name ------------------------------------------------------------------------------------------

    def move(self, name: str, move: str, pick: int, shape: str = "whole") -> None:
        """What an actor or the learner does all day; nothing, if there is nothing of the kind to do."""
        actor = self.actors.get(name)
        if move == "train":
            self.train()
        elif move == "join":
            if actor is None or not actor.linked:
                self.resend(self.join(name))
        elif actor is None:
            return
        elif move == "finish" and actor.leases:
            refs = sorted(actor.leases)
            self.finish(actor, refs[pick % len(refs)], shape)
        elif move == "install" and actor.ref < self.published:
            actor.install_ref(self.published, self.now)
        elif not actor.linked:
            return
        elif move == "ask":
            self.ask(actor)
        elif move == "acks":
            self.acks(actor)
        elif move == "beat":
            actor.linked = actor.beat(self.now)

    def fault(self, fault: str, name: str, pick: int) -> None:
        """What goes wrong, or happens in an awkward order."""
        actor = self.actors.get(name)
        if fault in ("freeze", "cut", "publish_inside", "sync"):
            getattr(self, fault)()
        elif fault == "crash":
            self.crash(pick)
        elif fault == "checkpoint":
            self.freeze()
            self.save()
        elif fault == "bounds":
            self.set_bounds(pick % 4)
        elif fault in ("skip", "publish_first"):
            self.train(skipped=fault == "skip", publish_first=fault == "publish_first")
        elif fault == "zombie" and self.zombies:
            self.zombie_talks(self.zombies[pick % len(self.zombies)])
        elif actor is not None:
            self._actor_fault(actor, fault, pick)

    def _actor_fault(self, actor: SimActor, fault: str, pick: int) -> None:
        refs = sorted(actor.leases)
        if fault == "lose_link":
            actor.linked = False
        elif fault == "lose_leases" and actor.linked:
            self.lose_leases(actor)
        elif fault == "silence":  # long enough for an eviction, then others have its groups
            actor.linked = False
            self.tick(4.0)
        elif fault == "evict" and actor.linked:
            self.ledger.evict(actor.actor_id, self.now)
            actor.linked = False
        elif fault == "leave" and actor.linked:
            self.leave(actor)
        elif fault in ("die", "restart"):
            self.kill(actor)
            if fault == "restart":
                self.join(actor.actor_id)
        elif fault == "resend" and actor.linked:
            self.resend(actor)
        elif fault == "late" and refs:
            self.finish(actor, refs[pick % len(refs)], "whole", delivered=False)
        elif fault == "stuck" and actor.linked and refs:
            self._stuck(actor, refs[pick % len(refs)])

    def _stuck(self, actor: SimActor, ref: LeaseRef) -> None:
        """One lease makes no progress until it expires, while its actor is well."""
        for _ in range(11):
            self.now += 2.0
            for other in self.actors.values():
                if other.linked:
                    other.linked = other.beat(self.now, stuck=[ref] if other is actor else [])
            self.tick(0.0)

    # --- the learner --------------------------------------------------------------------------------------------------

    def cut(self) -> bool:
        if self.batch is not None:
            return True
        self.batch = cut(self.ledger)
        if self.batch is None:
            return False
        self.cuts[self.ledger.version] = self.ledger.journal.next_sequence - 1
        assert len(self.batch) == self.settings.lag.groups_per_batch
        for group in self.batch:
            self._check_age(group)
        return True

    def train(self, *, skipped: bool = False, publish_first: bool = False) -> None:
        """Finish the step of the batch that was cut."""
        if not self.cut():
            return
        version = self.ledger.version
        after = VersionRef(self.ledger.versions.learner_epoch, version + self.settings.lag.steps_per_batch)
        if skipped and self.published.version <= version:  # what is published of a batch comes from a finite step
            self.skips.add(self.cuts[version])
            end_batch(self.ledger, version, skipped=True, reason="not finite")
        else:
            if publish_first:
                self._publish(after)
            end_batch(self.ledger, after.version)
            self._publish_if_due()
            keys = [(group.group_id, member.index) for group in self.batch for member in group.members]
            self.history.append((version, keys))
            for frame in (frame for group in self.batch for frame in group.frames):
                message = DECODER.decode(frame)
                self.trained_from[message.incarnation, message.seq] = version
        self.batch = None

    def publish_inside(self) -> None:
        """One more optimizer step of the batch that was cut is done, and published, and others follow."""
        inside = VersionRef(self.ledger.versions.learner_epoch, max(self.published.version, self.ledger.version) + 1)
        if self.cut() and inside.version < self.ledger.version + self.settings.lag.steps_per_batch:
            self._publish(inside)
            self.num_published_inside += 1

    def _publish_if_due(self) -> None:
        now = self.ledger.versions.ref
        behind = now.version - self.published.version
        late = self.settings.lag.steps_per_batch * (self.eta // 2)
        if behind > 0 and not (self.publishes_late and behind <= late):
            self._publish(now)

    def _publish(self, ref: VersionRef) -> None:
        # The hub gives out no version before the disk has its batches.
        if any(record > self.synced for version, record in self.cuts.items() if version < ref.version):
            self.sync()
        publish(self.ledger, ref)
        self.published = ref
        self.valid.add(ref)

    def set_bounds(self, eta: int) -> None:
        """The controller moves the lead; max_lag keeps its distance to what admission allows."""
        slack = self.settings.lag.max_lag - derived_bound(self.settings.lag)
        least = replace(self.settings.lag, eta=eta, window=0).bound
        max_lag = max(least, derived_bound(self.settings.lag, eta) + slack)
        self.ledger.lag.set_bounds(eta, max_lag)
        self._took_bounds(eta, max_lag)
        self._publish_if_due()

    def _took_bounds(self, eta: int, max_lag: int) -> None:
        self.eta, self.max_lag = eta, max_lag
        self.tight |= max_lag < derived_bound(self.settings.lag, eta)
        self.num_allowed = self._num_open()  # what was drawn under a wider lead drains, it is not thrown away

    def _num_open(self) -> int:
        return sum(record.state is not GroupState.TRAINED for record in self.ledger.groups.live.values())

    def _promise(self, leases: list[Lease]) -> None:
        for lease in leases:
            if not lease.group_id & EVAL_BIT:
                self.promised[lease.group_id] = max(self.promised.get(lease.group_id, 0), self.max_lag)

    def sync(self) -> None:
        """The disk has the log up to now, and the ledger hears of it."""
        sync(self.ledger)
        self.synced = self.ledger.journal.next_sequence - 1
        self.durable |= {key for before, keys in self.history for key in keys}

    def freeze(self) -> None:
        if self.batch is not None:
            return  # a learner saves between its batches
        self.sync()  # the hub gives out no snapshot before
        state = self.ledger.freeze(self.ledger.version)
        self.frozen[self.ledger.version] = (state, set(self.fenced), set(self.met))

    def save(self) -> None:
        """The newest snapshot's checkpoint gets published."""
        if not self.frozen:
            return
        version = max(self.frozen)
        self.saved = (version, *self.frozen[version])
        self.ledger.saved(version)
        self.frozen.clear()

    def crash(self, pick: int) -> None:
        """The learner dies; its successor has the last checkpoint, and of the log at least what was synced.

        What it trains again from the log gives the same weights, or others, and then its epoch is a new one.
        """
        _, state, fenced, met = self.saved
        self.fenced, self.met = set(fenced), set(met)
        end = log_of(self.ledger)[-1][0]
        upto = (self.synced, end, (self.synced + end) // 2)[pick % 3]
        self.num_restarts, self.num_lost_records = self.num_restarts + 1, self.num_lost_records + end - upto
        self._read_log()
        self.ledger = restart(self.ledger, state, upto=upto, equal=pick % 2 == 0, publishes=False)
        self._num_read, self.arrived = 0, {key: one for key, one in self.arrived.items() if one <= upto}
        self.history = [(before, keys) for before, keys in self.history if self.cuts[before] <= upto]
        self._train_again()
        version = self.ledger.version
        assert max(ref.version for ref in self.valid) <= version, "a version that actors had is not reached any more"
        self.trained_from = {key: before for key, before in self.trained_from.items() if self.cuts[before] <= upto}
        self.accepted = {key: record for key, record in self.accepted.items() if record <= upto}
        self.cuts = {before: record for before, record in self.cuts.items() if record <= upto}
        self.batch, self.frozen, self.drawn = None, {}, set()
        self._took_bounds(self.settings.lag.eta, self.settings.lag.max_lag)
        self._publish(self.ledger.versions.ref)
        self.sync()
        for actor in self.actors.values():
            actor.linked = False
            actor.ledger = self.ledger

    def _train_again(self) -> None:
        """End the batches whose end the log does not have, as their steps end again."""
        ledger, known = self.ledger, {before for before, _ in self.history}
        cuts = [(one, record) for one, record in log_of(ledger) if isinstance(record, BatchCut)]
        for sequence, record in cuts[len(cuts) - len(ledger.in_flight) :] if ledger.in_flight else []:
            keys = [(row.group_id, row.index) for row in record.plan]
            self.num_trained_again += 1
            if sequence in self.skips:
                end_batch(ledger, ledger.version, skipped=True, reason="not finite")
                continue
            end_batch(ledger, record.version + self.settings.lag.steps_per_batch)
            if record.version not in known:
                self.history.append((record.version, keys))

    def _read_log(self) -> None:
        """Take note of the records of GROUP messages."""
        log = log_of(self.ledger)
        for sequence, record in log[self._num_read :]:
            if isinstance(record, GroupArrived) and not record.refused:
                self.arrived[record.incarnation, record.seq] = sequence
        self._num_read = len(log)

    # --- what must hold ---------------------------------------------------------------------------------------------

    def _check_age(self, group: HeldGroup) -> None:
        """From the frames: every member once, no trained token over the bound at a grant or the bound now."""
        bound = max(self.promised.get(group.group_id, 0), self.max_lag)
        assert group.max_lag <= bound, f"group {group.group_id} was judged by {group.max_lag}, promised was {bound}"
        seen: list[int] = []
        for frame in group.frames:
            message = DECODER.decode(frame)
            for member in message.members:
                if member.status == MemberStatus.ABORTED:
                    continue
                seen.append(member.index)
                refs = {VersionRef(span.learner_epoch, span.version) for span in member.versions}
                assert refs <= self.valid, f"group {group.group_id} has tokens of {refs - self.valid}: not this history"
                newest = max(span.version for span in member.versions)
                assert newest <= group.version, f"group {group.group_id} has tokens of its own batch's steps"
                last = group.version + self.settings.lag.steps_per_batch - 1  # of the batch's optimizer steps
                lags = [last - span.version for span in member.versions]
                if self.settings.mode == "mask_old_tokens":
                    lags = [lag for lag in lags if lag <= bound]
                assert lags and min(lags) >= 0, f"group {group.group_id} member {member.index} has nothing to train"
                self.head_lags.append(max(lags))
                assert max(lags) <= bound, f"lag {max(lags)} > {bound} at the cut of group {group.group_id}"
                self.num_lags_at_the_bound += max(lags) == bound > 0
        assert sorted(seen) == [member.index for member in group.members], "a member twice, or not at all"

    def check(self) -> None:
        ledger = self.ledger
        ledger.check()
        trained = [key for _, keys in self.history for key in keys]
        assert len(trained) == len(set(trained)), "a member was trained twice in one lineage"
        assert self.durable <= set(trained), "a durable step is missing from the lineage"
        counts = ledger.counters()
        assert counts["num_lag_violations"] == 0
        for group_id in self.drawn:
            known = group_id in ledger.groups.live or group_id in ledger.groups.settled
            assert known or group_id < ledger.groups.done_below, f"group {group_id} was leased and then lost"
        num_open, lead = self._num_open(), (self.eta + 1) * self.settings.lag.groups_per_batch
        assert num_open <= max(lead, self.num_allowed), f"{num_open} open groups, the lead is {lead}"
        self.num_allowed = num_open
        self._check_window()
        self._check_accepted(trained)
        if not self.tight and not self.num_restarts:
            assert counts["num_groups_stale"] == 0, "admission let something through that the cut had to refuse"

    def _check_window(self) -> None:
        """No open group was overtaken by more than W later ones."""
        consumed = {group_id for _, keys in self.history for group_id, _ in keys}
        consumed |= {group.group_id for group in self.batch or ()}
        for group_id, record in self.ledger.groups.live.items():
            if record.state in (GroupState.READY, GroupState.LEASED):
                passed = sum(other > group_id for other in consumed)
                assert passed <= self.settings.lag.window, f"group {group_id} was overtaken by {passed} groups"

    def _check_forgotten(self, actor: SimActor, before: dict[int, Group], rejected: set[int]) -> None:
        """What left an outbox as DURABLE is in the log on the disk, unless it will never matter again."""
        self._read_log()
        for seq in before.keys() - actor.outbox.keys() - rejected:
            message, at = before[seq], self.arrived.get((actor.incarnation, seq), 0)
            record = self.ledger.groups.live.get(message.group_id)
            waits = record is not None and any(
                (one.actor_id, one.incarnation, one.seq) == (actor.actor_id, actor.incarnation, seq)
                for one in record.deliveries
            )
            assert not waits or at <= self.synced, (
                f"seq {seq} is DURABLE, but record {at} of group {message.group_id} is not on the disk ({self.synced})"
            )
            version = self.trained_from.get((actor.incarnation, seq), -1)
            assert version < 0 or at <= self.synced, (
                f"seq {seq} is DURABLE and was trained at {version}, but its record {at} is not on the disk"
            )

    def _check_drained(self, actor: SimActor) -> None:
        """Once the log is on the disk an outbox is empty; else it would fill up and stop its actor."""
        assert not actor.outbox, f"seq {min(actor.outbox)} of {actor.actor_id} can never leave its outbox"

    def seen(self) -> dict[str, float]:
        """How often each occasion for a promise came up."""
        return {
            **self.ledger.counters(), "num_restarts": self.num_restarts, "num_durable": len(self.durable),
            "num_lost_records": self.num_lost_records, "num_trained_again": self.num_trained_again,
            "num_lags_at_the_bound": self.num_lags_at_the_bound, "num_published_inside": self.num_published_inside,
        }

    def _check_accepted(self, trained: list[tuple[int, int]]) -> None:
        """Whatever was ACCEPTED, and survived if there was a crash, is trained, dropped with a reason, or there."""
        self.any_stale |= self.ledger.counters()["num_groups_stale"] > 0
        if self.settings.group_policy == "reissue_whole" or self.any_stale:
            return  # there, accepted members may be thrown away while their group lives on, counted
        done = set(trained)
        for group_id, index in self.accepted:
            record = self.ledger.groups.live.get(group_id)
            if record is not None:
                assert index in record.members, f"member {index} of group {group_id} was accepted and lost"
            elif (group_id, index) not in done:
                row = self.ledger.groups.settled.get(group_id)
                dropped = row is None or row.state is GroupState.DROPPED
                assert dropped, f"accepted member {index} of group {group_id} vanished from a trained group"

    def behave(self, num_batches: int) -> None:
        """From now on everybody does what they should; then batches must come."""
        for _ in range(40 * num_batches):
            self.tick(1.0)
            for name in sorted({*self.actors, "a0", "a1"}):
                actor = self.actors.get(name)
                if actor is None or not actor.linked:
                    actor = self.join(name)
                self.resend(actor)
                self.acks(actor)
                if actor.ref < self.published:
                    actor.install_ref(self.published, self.now)
                for ref in list(actor.leases):
                    self.finish(actor, ref, "whole")
                self.ask(actor)
            if self.cut():
                num_batches -= 1
                self.train()
                self.freeze()
                self.save()
                self.check()
            if num_batches == 0:
                for actor in self.actors.values():
                    self.resend(actor)
                self.freeze()
                self.save()
                for actor in self.actors.values():
                    self.acks(actor)
                    self._check_drained(actor)
                return
        raise AssertionError(f"no batch after 40 honest rounds each: {self.ledger.wait_reason(self.now)}")
