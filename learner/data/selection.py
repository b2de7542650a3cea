"""The selection of trajectories that need a forward and backward pass: those that can move a parameter.

A trajectory counts in every denominator whether it gets a pass or not, so leaving it out changes no gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import numpy as np
import torch
from torch import Tensor

from learner.data.trajectories import Trajectory


class LeaveOut(Enum):
    """The passes that a trajectory goes without if it cannot move a parameter."""

    NOTHING = "nothing"
    BACKWARD = "backward"  # a control reads their log-probs
    PASS = "pass"


def places_with_gradient(
    rows: Sequence[Trajectory], *, weights: Tensor, advantages: Tensor | None, oldest_lags: Tensor | None, version: int
) -> tuple[int, ...]:
    """Places of the trajectories that some token may give a gradient.

    Args:
        rows: R trajectories.
        weights: [R] factor of each trajectory's token losses.
        advantages: [R] of which every token's advantage is a multiple; None if they are not known yet.
        oldest_lags: int64 [R] tokens of a larger lag are masked; None masks none.
        version: that lags are counted to.
    """
    live = (weights != 0) & torch.tensor([bool(row.mask.any()) for row in rows], dtype=torch.bool)
    if advantages is not None:
        live &= advantages != 0
    if oldest_lags is not None:
        newest = torch.tensor([int(row.versions.max(initial=-1)) for row in rows], dtype=torch.int64)
        live &= version - newest <= oldest_lags
    return tuple(live.nonzero().squeeze(1).tolist())


def versions_of(rows: Sequence[Trajectory]) -> tuple[Tensor, Tensor]:
    """Versions int64 [R, A] of the action tokens side by side, 0 in the padding, and where they are, bool [R, A]."""
    counts = np.array([row.num_action_tokens for row in rows], dtype=np.int64)
    mask = np.arange(counts.max(initial=0))[None, :] < counts[:, None]
    versions = np.zeros(mask.shape, dtype=np.int64)
    if mask.any():
        versions[mask] = np.concatenate([row.versions[row.mask] for row in rows])
    return torch.from_numpy(versions), torch.from_numpy(mask)
