"""Which learner rank trains which group, decided once for all ranks when the batch is cut."""

from __future__ import annotations

from collections.abc import Sequence

from learner.hub.ledger.groups import HeldGroup
from streamrl.messages import PlanRow


def plan_batch(groups: Sequence[HeldGroup], num_ranks: int) -> list[PlanRow]:
    """Spread whole groups over ranks so that tokens are balanced; one row a member, in batch order.

    The largest group goes first, each to the rank with the fewest tokens so far (Graham's LPT rule: at most 4/3 of the
    best possible maximum). Ties go to the rank with fewer groups, then the lower rank, so the plan is a function of its
    arguments.

    Raises:
        ValueError: fewer groups than ranks; a rank without a group could not take part in the step.
    """
    if not 1 <= num_ranks <= len(groups):
        raise ValueError(
            f"a batch of {len(groups)} groups cannot be split over {num_ranks} ranks: use at least one group a rank"
        )
    load = [(0, 0)] * num_ranks  # (tokens, groups) of each rank
    rank_of: dict[int, int] = {}
    for group in sorted(groups, key=lambda one: (-one.num_tokens, one.group_id)):
        rank = min(range(num_ranks), key=lambda one: (*load[one], one))
        rank_of[group.group_id] = rank
        load[rank] = (load[rank][0] + group.num_tokens, load[rank][1] + 1)
    return [
        PlanRow(
            group_id=group.group_id, index=member.index, rank=rank_of[group.group_id], num_tokens=member.num_tokens,
            num_action_tokens=member.num_action_tokens, reward=member.reward, head_lag=member.head_lag,
        )
        for group in groups for member in group.members
    ]
