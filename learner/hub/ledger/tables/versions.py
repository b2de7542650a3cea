"""Versions on this history of the run, and how old the tokens of a group may be in terms of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from learner.hub.ledger.tables.groups import GroupRecord, GroupState, GroupTable, HeldGroup, HeldMember
from learner.hub.ledger.tables.settings import LedgerSettings
from streamrl.lag_rule import LagRule
from streamrl.messages import Lineage, VersionRef
from streamrl.messages.validate import MemberSummary

MAX_LINEAGE = 1024  # epochs: as many as a WELCOME may list
NEVER, ALWAYS = -(1 << 62), 1 << 62  # below and above every version


class Versions:
    """The learner's version and the surviving lineage.

    Args:
        learner_epoch: of this start.
        version: optimizer steps done.
        lineage: earlier epochs, already cut to `version`, and this one's versions so far if it goes on.
    """

    def __init__(self, learner_epoch: int, version: int, lineage: Sequence[Lineage]) -> None:
        self.learner_epoch = learner_epoch
        self.current = version
        self._past = {entry.learner_epoch: entry for entry in lineage[-(MAX_LINEAGE - 1) :]}
        # An epoch that goes on has versions from before this start.
        own = self._past.pop(learner_epoch, None)
        self._first = version if own is None else own.first
        # Published or trained, whichever is later: an epoch that goes on has versions whose end the log lacks, too.
        self._last = version if own is None else max(version, own.last)
        self.newest_published = version

    @property
    def ref(self) -> VersionRef:
        return VersionRef(self.learner_epoch, self.current)

    @property
    def lineage(self) -> tuple[Lineage, ...]:
        """Every epoch's versions that lie on this history, the present epoch last; for WELCOME."""
        return (*self._past.values(), Lineage(self.learner_epoch, self._first, self._last))

    def known(self, learner_epoch: int, version: int) -> bool:
        """Return whether these weights lie on the surviving history; the future and dead branches do not."""
        if learner_epoch == self.learner_epoch:
            return self._first <= version <= self._last
        entry = self._past.get(learner_epoch)
        return entry is not None and entry.first <= version <= entry.last

    def usable(self, ref: VersionRef | None) -> VersionRef | None:
        """Return these weights, None if they are of a dead branch: an actor gets no leases for those."""
        return ref if ref is not None and self.known(ref.learner_epoch, ref.version) else None

    def check_next(self, ref: VersionRef) -> None:
        """Raise ValueError if this version cannot be published now."""
        if ref.learner_epoch != self.learner_epoch or ref.version < self._last:
            raise ValueError(f"published {ref} after {self.learner_epoch}:{self._last}: versions only go up")

    def published(self, ref: VersionRef) -> None:
        """Note that a version was announced: its tokens are accepted even before its batch is reported as trained.

        One of an earlier epoch, which an old log has, changes nothing.
        """
        if ref.learner_epoch == self.learner_epoch:
            self.newest_published = max(self.newest_published, ref.version)
            self._last = max(self._last, ref.version)

    def advance(self, num_steps: int = 1) -> None:
        """Count a batch that was trained, in so many optimizer steps."""
        self.current += num_steps
        self._last = max(self._last, self.current)

    def first_known(self, oldest: int) -> VersionRef:
        """The smallest known version that is not below `oldest`, named in the epoch that made it."""
        for entry in self.lineage:
            if entry.first <= entry.last and entry.last >= oldest:
                return VersionRef(entry.learner_epoch, max(entry.first, oldest))
        return self.ref


def cut_lineage(lineage: Sequence[Lineage], version: int) -> tuple[Lineage, ...]:
    """Cut the lineage for a run that resumes from `version`: later versions are a dead branch."""
    return tuple(Lineage(entry.learner_epoch, entry.first, min(entry.last, version)) for entry in lineage)


class LagBounds:
    """The current lag rule, and what the ledger asks of lead and age; its only use of `lag_rule`."""

    def __init__(self, settings: LedgerSettings, groups: GroupTable, versions: Versions) -> None:
        self.rule = settings.lag
        self._num_groups_total = settings.num_groups_total
        self._groups = groups
        self._versions = versions
        self._masks_old_tokens = settings.mode == "mask_old_tokens"
        self._lowered: list[tuple[int, int]] = []  # (bound that was lowered, version up to which it may still bind)
        self._drawn_before = 0  # live groups when eta was lowered: the only ones that may exceed capacity
        self.ahead = 0
        """Groups trained by now beyond what as many batches of today's size hold; below 0 where they were smaller."""

    def count_on(self, in_flight: Iterable[int]) -> None:
        """Go on from the batches that were trained, whose size, as that of those in flight, may have been another."""
        size, num_batches = self.rule.groups_per_batch, self._versions.current // self.rule.steps_per_batch
        self.ahead = self._groups.num_trained - num_batches * size + sum(num - size for num in in_flight)

    def set_bounds(self, eta: int, max_lag: int) -> None:
        """Move the lead and the bound of a running hub.

        Raising acts at once. Lowering drains: what was leased under a wider bound keeps it and is trained, and nothing
        new is drawn until the lead has shrunk. So every group is trained within the larger of the bound at its grant
        and the bound now, and lowering throws nothing away. Raises ValueError: the pair contradicts itself; nothing is
        changed.
        """
        moved = self.moved(eta, max_lag)
        version = self._versions.current
        if max_lag < self.rule.max_lag:
            self._lowered.append((self.rule.max_lag, version + self.rule.max_lag))
        self._lowered = [one for one in self._lowered if one[1] >= version]
        self.rule = moved
        self.allow_drawn()

    def moved(self, eta: int, max_lag: int) -> LagRule:
        """Return the rule with this lead and bound. Raises ValueError: the pair contradicts itself."""
        rule = replace(self.rule, eta=eta, max_lag=max_lag)
        rule.check()
        return rule

    def allow_drawn(self) -> None:
        """Let what is drawn by now stay, even beyond a capacity that has shrunk."""
        self._drawn_before = max(self._drawn_before, self._groups.num_live())

    @property
    def capacity(self) -> int:
        """Groups that may be drawn and not dropped, trained ones included."""
        by_lead, total = self.rule.capacity(self._groups.num_trained), self.num_groups_total
        return by_lead if total is None else min(by_lead, total)

    @property
    def num_groups_total(self) -> int | None:
        """Groups that the whole run trains, those of earlier batches as many as they were; None is no end."""
        return None if self._num_groups_total is None else self._num_groups_total + self.ahead

    @property
    def num_free(self) -> int:
        """Groups that may be drawn now; negative while a lowered lead drains."""
        return self.capacity - self._groups.num_live()

    @property
    def num_to_cut(self) -> int:
        """Groups that must be held before a batch is cut."""
        total, num_cut = self.num_groups_total, self._groups.num_trained + self._groups.num(GroupState.IN_BATCH)
        return self.rule.num_to_cut(None if total is None else total - num_cut)

    def may_grant(self, rank: int, installed: int) -> bool:
        """Return whether a group of this rank may go to an actor with this version installed."""
        # A version may be installed before its batch is reported as trained: until then it counts as the one before.
        return self.rule.may_grant(rank - self.ahead, min(installed, self._versions.current))

    def of(self, record: GroupRecord) -> int:
        """The largest lag at which this group may be trained now."""
        # Judged by today's bound alone, lowering it would throw away work that was leased under a wider one.
        return max(record.max_lag, self.rule.max_lag)

    def min_useful(self) -> VersionRef:
        """Return the oldest version worth beginning with, for the hub's heartbeat: older groups can only be refused."""
        if self._masks_old_tokens:
            return VersionRef(0, 0)  # the young end of a sequence is of use, however old its beginning
        version = self._versions.current
        widest = max([self.rule.max_lag, *(bound for bound, until in self._lowered if until >= version)])
        return self._versions.first_known(max(0, self.rule.oldest_trainable(version, widest)))

    def is_stale(self, record: GroupRecord, version: int, members: Iterable[MemberSummary] | None = None) -> bool:
        """Return whether a token of its members, or of these, is too old (L2); with masking, every token of one."""
        decisive = self._decisive(record) if members is None else self._decisive_of(members)
        return decisive < self.rule.oldest_trainable(version, self.of(record))

    def stale_held(self, version: int) -> list[GroupRecord]:
        """List the held groups that are too old for a batch of this version, in dispatch order."""
        # No group has a narrower bound than today's: one look at a number settles nearly all of a long queue.
        oldest = self.rule.oldest_trainable(version, self.rule.max_lag)
        return [
            record for record in self._groups.in_state(GroupState.HELD)
            if self._decisive(record) < oldest and self.is_stale(record, version)
        ]

    def _decisive(self, record: GroupRecord) -> int:
        """The version that decides on a group, found once for as long as it stays in its state."""
        noted = self._groups.decisive_versions
        if record.state is not GroupState.HELD:
            return self._decisive_of(record.members.values())
        if record.group_id not in noted:
            noted[record.group_id] = self._decisive_of(record.members.values())
        return noted[record.group_id]

    def _decisive_of(self, members: Iterable[MemberSummary]) -> int:
        """The smallest over members of the version that decides on one; a member without a token is always too old."""
        decisive = max if self._masks_old_tokens else min
        return min((decisive([span.version for span in one.spans], default=NEVER) for one in members), default=ALWAYS)

    def held(self, record: GroupRecord, version: int | None = None) -> HeldGroup:
        """Return a complete group as it would be trained at this version, or now."""
        version = self._versions.current if version is None else version
        bound = self.of(record)
        oldest = self.rule.oldest_trainable(version, bound) if self._masks_old_tokens else -1
        members = tuple(
            HeldMember(
                index, one.num_tokens, one.num_action_tokens, one.reward, one.scores,
                head_lag=max((version - span.version for span in one.spans if span.version >= oldest), default=0),
            )
            for index, one in sorted(record.members.items())
        )
        return HeldGroup(
            record.group_id, version, members, tuple(record.frames), bound, record.origins, tuple(record.sequences)
        )

    def check(self) -> None:
        """Assert L1; cheap enough for every tick."""
        live = self._groups.num_live()
        assert live <= max(self.capacity, self._drawn_before), f"{live} live groups, capacity is {self.capacity}"
