"""Which groups are worth training on, and the price of answers that run out of room.

Filters act before the batch is cut: what they drop is in neither numerator nor denominator, and never waits for a
refill.
"""

from __future__ import annotations

import torch
from torch import Tensor

from streamrl.algorithms.checks import check_alike, require

__all__ = ["accuracy_in_range", "informative_groups", "overlong_penalty"]


@torch.no_grad()
def informative_groups(scores: Tensor, group_ids: Tensor, *, min_std: float = 1e-6) -> Tensor:
    """Rows of groups whose scores differ: unbiased std >= min_std; bool [B].

    A group of one has no std of its own and is kept: its advantage comes from the statistics of the batch.
    """
    require(min_std >= 0.0, f"min_std={min_std} must not be negative")
    check_alike(scores=scores, group_ids=group_ids)
    unique, index, sizes = group_ids.unique(return_inverse=True, return_counts=True)
    wide = scores.double()
    lowest = wide.new_full((unique.numel(),), torch.inf).scatter_reduce_(0, index, wide, "amin")
    above = wide - lowest[index]  # exactly 0 for equal scores
    mean = torch.zeros_like(lowest).index_add_(0, index, above) / sizes
    squares = torch.zeros_like(lowest).index_add_(0, index, (above - mean[index]).square())
    std = (squares / (sizes - 1).clamp(min=1)).sqrt()
    return ((std >= min_std) | (sizes == 1))[index]


@torch.no_grad()
def accuracy_in_range(accuracies: Tensor, group_ids: Tensor, *, low: float = 0.01, high: float = 0.99) -> Tensor:
    """Rows of groups whose mean accuracy lies strictly inside (low, high); bool [B]. DAPO, arXiv:2503.14476."""
    require(low <= high, f"low={low} and high={high} must satisfy low <= high")
    check_alike(accuracies=accuracies, group_ids=group_ids)
    unique, index, sizes = group_ids.unique(return_inverse=True, return_counts=True)
    wide = accuracies.double()
    mean = wide.new_zeros(unique.numel()).index_add_(0, index, wide) / sizes
    return ((mean > low) & (mean < high))[index]


@torch.no_grad()
def overlong_penalty(num_tokens: Tensor, *, max_tokens: int, cache_tokens: int) -> Tensor:
    """Soft overlong penalty in [-1, 0], [B]: 0 up to `max - cache`, then linear to -1 at `max`, -1 beyond.

    Add it to the score, times a scale. DAPO, arXiv:2503.14476, eq. 13.
    """
    require(max_tokens >= 1, f"max_tokens={max_tokens} must be at least 1")
    require(
        0 <= cache_tokens <= max_tokens,
        f"cache_tokens={cache_tokens} and max_tokens={max_tokens} must satisfy 0 <= cache_tokens <= max_tokens",
    )
    require(num_tokens.dim() == 1, f"num_tokens has shape {list(num_tokens.shape)}, expected [B]")
    lengths = num_tokens.to(torch.promote_types(torch.float32, num_tokens.dtype))
    free = max_tokens - cache_tokens
    inside = (free - lengths) / max(cache_tokens, 1)
    penalty = torch.where(lengths > max_tokens, torch.full_like(lengths, -1.0), inside.clamp(-1.0, 0.0))
    return torch.where(lengths <= free, torch.zeros_like(lengths), penalty)
