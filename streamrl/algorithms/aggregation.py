"""Aggregation of token losses to one number, the same for every split into ranks and micro-batches.

`loss = sum_i a_i sum_t mask keep loss_it`. The row weights a_i are computed once, from the whole optimizer batch, and
travel with the rows. Rows are trajectories, not turns. Multiply by the data-parallel size where gradients are averaged.
"""

from __future__ import annotations

import torch
from torch import Tensor

from streamrl.algorithms.checks import check_alike, check_rows, check_tokens, float_dtype, only, require

__all__ = [
    "aggregate", "aggregation_weights",
]


MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "prompt-mean")


@torch.no_grad()
def aggregation_weights(
    num_tokens: Tensor,  # [B] action tokens per row, before any correction mask
    *, mode: str = "token-mean", group_ids: Tensor | None = None, max_tokens: int | None = None,
) -> Tensor:
    """The weight `a_i` of each row of the optimizer batch, float32 [B] (float64 for float64 counts).

    | mode | a_i |
    |---|---|
    | token-mean | 1 / N_tokens |
    | seq-mean-token-mean | 1 / (N_rows n_i) |
    | seq-mean-token-sum | 1 / N_rows |
    | seq-mean-token-sum-norm | 1 / (N_rows max_tokens) |
    | prompt-mean | 1 / (N_groups n_group) |

    Rows without action tokens count nowhere and get weight 0: a padding row changes nothing. Tokens that a correction
    drops still count, or the survivors would be inflated.
    Raises:
        ValueError: an unknown mode, or one whose `group_ids` or `max_tokens` is missing.
    """
    require(mode in MODES, f"mode={mode!r} must be one of {', '.join(MODES)}")
    require(num_tokens.dim() == 1, f"num_tokens has shape {list(num_tokens.shape)}, expected [B]")
    counts = num_tokens.double()
    occupied = counts > 0
    num_rows = occupied.sum().clamp(min=1).double()
    ones = torch.ones_like(counts)
    if mode == "token-mean":
        inverse = ones * counts.sum()
    elif mode == "seq-mean-token-mean":
        inverse = num_rows * counts
    elif mode == "seq-mean-token-sum":
        inverse = ones * num_rows
    elif mode == "seq-mean-token-sum-norm":
        if max_tokens is None or max_tokens <= 0:
            raise ValueError(f"mode={mode!r} needs max_tokens > 0, got max_tokens={max_tokens}")
        inverse = ones * num_rows * max_tokens
    else:
        inverse = _prompt_tokens(counts, group_ids)
    weights = only(occupied, 1.0 / torch.where(occupied, inverse, ones))
    return weights.to(torch.promote_types(torch.float32, num_tokens.dtype))


def _prompt_tokens(counts: Tensor, group_ids: Tensor | None) -> Tensor:
    """N_groups n_group of each row; groups without any token do not count."""
    if group_ids is None:
        raise ValueError("mode='prompt-mean' needs group_ids, got group_ids=None")
    check_alike(num_tokens=counts, group_ids=group_ids)
    unique, index = group_ids.unique(return_inverse=True)
    per_group = counts.new_zeros(unique.numel()).index_add_(0, index, counts)
    return (per_group > 0).sum() * per_group[index]


def aggregate(
    losses: Tensor, mask: Tensor, *, mode: str = "token-mean", keep: Tensor | None = None,
    group_ids: Tensor | None = None, max_tokens: int | None = None, row_weights: Tensor | None = None,
) -> Tensor:
    """Weighted sum of the token losses [B, T], 0-d, differentiable in `losses`.

    Args:
        keep: bool [B, T] from corrections; its tokens leave the sum and stay in the denominator.
        row_weights: [B] from `aggregation_weights` over the whole optimizer batch; then `mode`, `group_ids` and
            `max_tokens` are not used. Without it the rows given are taken to be the whole batch.
    """
    check_tokens(mask, losses=losses, **({} if keep is None else {"keep": keep}))
    values = only(mask if keep is None else mask & keep, losses.to(float_dtype(losses)))
    if row_weights is None:
        row_weights = aggregation_weights(
            mask.sum(1).to(values.dtype), mode=mode, group_ids=group_ids, max_tokens=max_tokens
        )
    check_rows(mask, row_weights=row_weights)
    return (values.sum(1) * row_weights.detach().to(values.dtype)).sum()
