"""Batches of groups that were recorded before: a learner without hub and actors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from learner.data.trajectories import Trajectory, check_groups, read_groups
from learner.objective.statistics import TrainedBatch
from learner.sources.batch import Batch
from streamrl.errors import ContentError
from streamrl.messages import PlanRow


class RecordedBatches:
    """Hands out batches in the order in which they are given, whole, to a lone learner process.

    Args:
        batches: of each batch its groups, as the frames that actors sent.
        num_minibatches: into which the groups of a batch are dealt in order, as the hub deals them.
        vocab_size: token ids beyond are refused; None does not check.
    """

    def __init__(
        self, batches: Iterable[Sequence[bytes]], *, num_minibatches: int = 1, vocab_size: int | None = None
    ) -> None:
        self._batches: Iterator[Sequence[bytes]] = iter(batches)
        self._num_minibatches, self._vocab_size = num_minibatches, vocab_size

    def next_batch(self, version: int) -> Batch | None:
        """The next batch, None at the end.

        Raises:
            WireError: a group cannot be read, or has tokens of a later version; or `plan_of` refuses the batch.
        """
        frames = next(self._batches, None)
        if frames is None:
            return None
        check_groups(frames, version=version, vocab_size=self._vocab_size)
        rows = read_groups(frames)
        return Batch(rows, plan_of(rows, version, num_minibatches=self._num_minibatches))

    def commit_batch(self, version: int, trained: TrainedBatch) -> None:
        """Recorded batches need no answer."""


def plan_of(rows: Sequence[Trajectory], version: int, *, num_minibatches: int = 1) -> tuple[PlanRow, ...]:
    """The plan of a batch that one rank trains whole at this version.

    Raises:
        ContentError: there is no trajectory, or the groups cannot be dealt into equal minibatches.
    """
    places = {group_id: place for place, group_id in enumerate(dict.fromkeys(row.group_id for row in rows))}
    if not places:
        raise ContentError("batch", "the batch has no trajectory: give at least one group with an answer")
    if len(places) % num_minibatches:
        raise ContentError(
            "batch",
            f"a batch of {len(places)} groups cannot be split over learner.num_minibatches={num_minibatches} equal "
            "minibatches: give a multiple of it",
        )
    return tuple(
        PlanRow(
            row.group_id, row.index, 0, row.num_tokens, row.num_action_tokens, row.reward,
            version - int(row.versions[row.mask].min()) if row.mask.any() else 0,
            minibatch=places[row.group_id] * num_minibatches // len(places),
        )
        for row in rows
    )
