"""The division of a batch over the learner's ranks and minibatches."""

from __future__ import annotations

from collections.abc import Sequence

from learner.hub.ledger.tables.groups import HeldGroup
from streamrl.messages import BatchShare, PlanRow


def plan_batch(groups: Sequence[HeldGroup], num_ranks: int, num_minibatches: int = 1) -> list[PlanRow]:
    """Spread whole groups over data-parallel ranks so that tokens are balanced; one row per member, in batch order.

    Minibatches are equal parts of the batch in its order, whatever the number of ranks: the oldest groups are trained
    first. In each the largest group goes first, to the rank with the fewest tokens so far (Graham's LPT rule: at
    most 4/3 of the best possible maximum). Ties go to the rank with fewer groups, then the lower rank, so the plan is a
    function of its arguments.

    Raises:
        ValueError: fewer groups than ranks; a rank without a group could not take part in the step.
    """
    size, rest = divmod(len(groups), num_minibatches)
    if rest or not 1 <= num_ranks <= size:
        parts = f"{num_minibatches} equal minibatches and " if num_minibatches > 1 else ""
        raise ValueError(
            f"a batch of {len(groups)} groups cannot be split over {parts}{num_ranks} ranks: use at least one group "
            "per rank"
        )
    rank_of: dict[int, int] = {}
    for start in range(0, len(groups), size):
        load = [(0, 0)] * num_ranks  # (tokens, groups) of each rank
        for group in sorted(groups[start : start + size], key=lambda one: (-one.num_tokens, one.group_id)):
            rank = min(range(num_ranks), key=lambda one: (*load[one], one))
            rank_of[group.group_id] = rank
            load[rank] = (load[rank][0] + group.num_tokens, load[rank][1] + 1)
    return [
        PlanRow(
            group_id=group.group_id, index=member.index, rank=rank_of[group.group_id], num_tokens=member.num_tokens,
            num_action_tokens=member.num_action_tokens, reward=member.reward, head_lag=member.head_lag,
            minibatch=place // size,
        )
        for place, group in enumerate(groups) for member in group.members
    ]


def share_batch(
    groups: Sequence[HeldGroup], version: int, dp_ranks: Sequence[int], num_minibatches: int = 1,
    plan: tuple[PlanRow, ...] | None = None,
) -> list[BatchShare]:
    """Divide a batch into every rank's share; ranks of one data-parallel rank get the same groups.

    Args:
        dp_ranks: the data-parallel rank of every rank.
        plan: of the batch for these ranks; None makes it.
    """
    rows = plan if plan is not None else tuple(plan_batch(groups, max(dp_ranks) + 1, num_minibatches))
    dp_rank_of = {row.group_id: row.rank for row in rows}
    shares = [
        [group for group in groups if dp_rank_of.get(group.group_id) == dp_rank] for dp_rank in range(max(dp_ranks) + 1)
    ]
    frames = [tuple(bytes(frame) for group in share for frame in group.frames) for share in shares]
    origins = [tuple(origin for group in share for origin in group.origins) for share in shares]
    return [BatchShare(version, rows, frames[at], stats={}, origins=origins[at]) for at in dp_ranks]
