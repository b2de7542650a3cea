"""A rank's share of a batch as trajectories, or why they cannot be trained on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from learner.data.trajectories import Trajectory, check_groups, read_groups
from streamrl.errors import ContentError, WireError
from streamrl.messages import BatchShare


def read_share(
    share: BatchShare, *, max_tokens: int, vocab_size: int | None = None,
    check_rewards: Callable[[Sequence[Trajectory]], None] | None = None,
) -> tuple[list[Trajectory], str]:
    """The trajectories of this rank, and why packing or the objective would fail on them; "" if they would not.

    Args:
        max_tokens: that one micro-batch holds.
        vocab_size: of the policy, where the share does not come from a hub, which has checked its groups.
        check_rewards: raises a WireError for rows whose rewards the objective cannot use.
    """
    try:
        if vocab_size is not None:
            check_groups(share.groups, version=share.version, vocab_size=vocab_size)
        rows = read_groups(share.groups, share.origins)
        planned = {(row.group_id, row.index) for row in share.plan}
        for row in rows:
            _check(row, planned, max_tokens)
        if check_rewards is not None:
            check_rewards(rows)
    except WireError as error:
        return [], str(error)
    return rows, ""


def _check(row: Trajectory, planned: set[tuple[int, int]], max_tokens: int) -> None:
    where = f"group {row.group_id} member {row.index} of actor {row.actor_id or 'unknown'}"
    if (row.group_id, row.index) not in planned:
        raise ContentError("plan", f"{where} is not in the plan of its batch")
    if row.num_tokens > max_tokens:
        raise ContentError(
            "too_many_tokens",
            f"{where} has {row.num_tokens} tokens, more than learner.max_tokens_per_device={max_tokens} holds",
        )
