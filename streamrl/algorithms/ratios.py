"""Importance ratios and their statistics: by row, effective sample size, trace length.

`ell_t = log pi(a_t|s_t) - log mu_t(a_t|s_t)`; the denominator is what the actor recorded, never a recomputation. With
versions mixed inside a trajectory nothing changes, because mu_t is recorded per token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from streamrl.algorithms.checks import LOG_BOUND, only, read, read_log_ratios, require, row_counts
from streamrl.algorithms.tokens import suffix_scan
from streamrl.algorithms.types import SequenceStats

__all__ = [
    "log_ratios", "sequence_stats", "token_log_ratios", "trace_length",
]


@torch.no_grad()
def token_log_ratios(
    behavior_logprobs: Tensor, policy_logprobs: Tensor, mask: Tensor, *, bound: float = LOG_BOUND
) -> Tensor:
    """`policy - behavior` per action token, clamped to +-bound, 0 elsewhere; [B, T], nats, detached.

    The clamp turns an infinite ratio into a finite one, so non-finite behavior log-probs must be rejected when the
    batch is assembled; NaN is not hidden.
    """
    require(bound > 0.0, f"bound={bound} must be positive")
    older, policy = read(mask, behavior_logprobs=behavior_logprobs, policy_logprobs=policy_logprobs)
    return only(mask, (policy - older).clamp(-bound, bound))


log_ratios = token_log_ratios  # the short public name, for callers without a local variable of that name


@torch.no_grad()
def sequence_stats(log_ratios: Tensor, mask: Tensor) -> SequenceStats:
    """Row statistics of `log_ratios` [B, T] over action tokens; each [B], 0 for an empty row. See `SequenceStats`."""
    log_ratios = read_log_ratios(mask, log_ratios)
    count = row_counts(mask, log_ratios.dtype)
    half_squares = log_ratios.square() / 2
    log_sum = log_ratios.sum(1)
    return SequenceStats(
        num_tokens=mask.sum(1),
        log_sum=log_sum,
        log_mean=log_sum / count,
        k2_sum=half_squares.sum(1),
        k2_max=half_squares.amax(1) if mask.shape[1] else log_sum,
        # expm1 keeps the digits that exp(ell) - 1 loses for the small log-ratios of fresh data
        k3_mean=(torch.expm1(log_ratios) - log_ratios).sum(1) / count,
    )


@torch.no_grad()
def row_log_ratios(log_ratios: Tensor, mask: Tensor) -> Tensor:
    """S of each row, [B], clamped to +-20 so that its exponential is finite."""
    return sequence_stats(log_ratios, mask).log_sum.clamp(-LOG_BOUND, LOG_BOUND)


@torch.no_grad()
def trace_length(
    log_ratios: Tensor, mask: Tensor, *, lam: float = 1.0, c_bar: float = 1.0, trace_temperature: float = 1.0,
    leak: float = 1.0,
) -> Tensor:
    """Mean over start tokens s of `sum_{t>=s} prod_{i=s..t} c_i`, in tokens; [B], 0 for an empty row.

    `c = lam min(c_bar, exp(ell / trace_temperature))`, of which `leak` is the part that is truncated, as in `vtrace`;
    all c = 1 gives (n + 1) / 2. A short trace means that early tokens see only the critic, or nothing without one.
    """
    require(0.0 <= lam <= 1.0, f"lam={lam} must lie in [0, 1]")
    require(c_bar > 0.0, f"c_bar={c_bar} must be positive")
    require(trace_temperature > 0.0, f"trace_temperature={trace_temperature} must be positive")
    log_ratios = read_log_ratios(mask, log_ratios)
    ratio = (log_ratios / trace_temperature).exp()
    traces = lam * torch.lerp(ratio, ratio.clamp(max=c_bar), leak)
    decays = torch.where(mask, traces, torch.ones_like(traces))
    # L_s = c_s (1 + L_{s+1})
    lengths = suffix_scan(only(mask, traces), decays, log_ratios.new_zeros(log_ratios.shape[0]))
    return only(mask, lengths).sum(1) / row_counts(mask, log_ratios.dtype)
