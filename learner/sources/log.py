"""Batches from a run's log, as the hub handed them out: a learner without hub and actors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec
from msgspec import Struct

from learner.data.trajectories import Trajectory, read_share
from learner.hub.ledger.plan import share_batch
from learner.hub.ledger.tables.groups import HeldGroup, HeldMember
from learner.objective.statistics import TrainedBatch
from learner.ranks.mesh import Ranks
from learner.sources.batch import Batch
from streamrl.messages import BatchShare, GroupOrigin, PlanRow
from streamrl.stream.history import History
from streamrl.stream.records import BatchCut, GroupArrived, LogError, StepTaken


class Logged(Struct, array_like=True):
    """A batch of the log, as rank 0 sends it to the others; `step` is None if the log does not know its end."""

    sequence: int
    cut: BatchCut
    step: StepTaken | None
    arrivals: list[GroupArrived]


class LogSource:
    """One rank's source of the batches that a run was trained on.

    Args:
        history: of the run; None on ranks other than 0, to which that one sends every batch.
        vocab_size: of the policy; token ids beyond are refused.
        max_tokens: of one micro-batch.
        without: groups that are left out of their batches.
    """

    def __init__(
        self, history: History | None, ranks: Ranks, *, vocab_size: int, max_tokens: int,
        check_rewards: Callable[[Sequence[Trajectory]], None] | None = None, without: frozenset[int] = frozenset(),
    ) -> None:
        self._ranks, self._vocab_size, self._max_tokens = ranks, vocab_size, max_tokens
        self._check_rewards, self._without = check_rewards, without
        self._left = _trained(history) if history is not None else iter(())
        self.batch: Logged | None = None
        """The one handed out last."""
        self.cause = ""
        """Why it cannot be trained on, where the log does not know its end; it has no rows then."""

    def next_batch(self, version: int) -> Batch | None:
        """The next batch that was trained; None at the end. A collective call.

        Raises LogError: it was cut for another version, or it was trained and cannot be with these settings.
        """
        one = next(self._left, None)
        data = self._ranks.bytes_from_rank_zero(msgspec.msgpack.encode(one) if one is not None else b"")
        if not data:
            return None
        self.batch = logged = msgspec.msgpack.decode(data, type=Logged)
        where = f"record {logged.sequence} of the log, a batch for version {logged.cut.version},"
        if logged.cut.version != version:
            raise LogError(f"{where} comes next, training is at {version}: the log lacks what lies between")
        share = self._share(logged)
        rows, cause = read_share(
            share, vocab_size=self._vocab_size, max_tokens=self._max_tokens, check_rewards=self._check_rewards
        )
        if not self._ranks.maximum(float(bool(cause))):
            self.cause = ""
            return Batch(rows, share.plan)
        self.cause = cause or "another rank cannot train on its part"
        if logged.step is not None:
            raise LogError(f"{where} was trained, and cannot be with these settings: {self.cause}")
        return Batch((), share.plan)

    def commit_batch(self, version: int, trained: TrainedBatch) -> None:
        """Logged batches need no answer."""

    def _share(self, logged: Logged) -> BatchShare:
        """This rank's share: as it was divided then; for other ranks, or without some groups, divided again."""
        cut, dp_ranks = logged.cut, self._ranks.mesh.dp_ranks
        if dp_ranks == cut.dp_ranks and self._without.isdisjoint(row.group_id for row in cut.plan):
            mine = {row.group_id for row in cut.plan if row.rank == self._ranks.dp_rank}
            kept = [one for one in logged.arrivals if one.group_id in mine]
            return BatchShare(
                cut.version, cut.plan, tuple(one.frame for one in kept), origins=tuple(map(_origin, kept))
            )
        ids = dict.fromkeys(row.group_id for row in cut.plan if row.group_id not in self._without)
        groups = [_held(group_id, logged) for group_id in ids]
        if not groups:
            raise LogError(f"every group of the batch for version {cut.version} is left out: leave out fewer")
        if len(groups) % cut.num_minibatches:
            raise LogError(
                f"{len(groups)} groups of the batch for version {cut.version} are left, which {cut.num_minibatches} "
                "minibatches do not divide: leave out another number of groups"
            )
        return share_batch(groups, cut.version, dp_ranks, cut.num_minibatches)[self._ranks.rank]


def _trained(history: History) -> Iterator[Logged]:
    for one in history.batches:
        if one.trained:
            yield Logged(one.sequence, one.cut, one.step, history.arrivals(one))


def _origin(arrived: GroupArrived) -> GroupOrigin:
    return GroupOrigin(arrived.actor_id, arrived.prompt_index)


def _held(group_id: int, logged: Logged) -> HeldGroup:
    """A logged group as the hub held it."""
    mine = [one for one in logged.arrivals if one.group_id == group_id]
    rows: list[PlanRow] = [row for row in logged.cut.plan if row.group_id == group_id]
    members = tuple(
        HeldMember(row.index, row.num_tokens, row.num_action_tokens, row.reward, {}, row.head_lag) for row in rows
    )
    frames, origins = tuple(one.frame for one in mine), tuple(map(_origin, mine))
    return HeldGroup(group_id, logged.cut.version, members, frames, origins=origins)
