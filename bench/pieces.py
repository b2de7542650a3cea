"""Pieces that the experiments measure with, and published forms that the tests of the algorithms compare with.

No run of streamrl reaches them; they obey the rules of `streamrl.algorithms.checks`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from streamrl.algorithms import broadcast_rows, sequence_stats, whiten
from streamrl.algorithms.checks import (
    LOG_BOUND,
    check_rows,
    check_shape,
    check_tokens,
    float_dtype,
    only,
    read_log_ratios,
    require,
)
from streamrl.algorithms.controllers import read_mean, signed_violation
from streamrl.algorithms.corrections import require_range
from streamrl.algorithms.groups import center_by_group
from streamrl.algorithms.types import DriftBins, Moments


def token_logprobs(logits: Tensor, tokens: Tensor, *, temperature: float | Tensor = 1.0, chunk: int = 1024) -> Tensor:
    """Log-probability of each token under the tempered softmax, [B, T], nats, differentiable in `logits`.

    Args:
        logits: [B, T, A]; `logits[:, t]` is the distribution that token t is drawn from.
        tokens: int [B, T] in [0, A), at padding too.
        temperature: the sampling temperature of the trajectory, > 0; a float or [B]. Without it the ratio against the
            recorded log-prob is not a ratio of the same two distributions.
        chunk: tokens whose float32 logits exist at one time; forward and backward never hold a full copy.
    """
    inverse = _inverse_temperature(logits, temperature, chunk)
    check_shape(logits.shape[:2], "logits", logits, "expected [B, T], [B, T, A]", tokens=tokens)
    return _ChosenLogprob.apply(logits, tokens, inverse, chunk)


def token_entropy(logits: Tensor, *, temperature: float | Tensor = 1.0, chunk: int = 1024) -> Tensor:
    """Entropy of the full tempered softmax, `-sum p log p`, [B, T], nats, differentiable in `logits`.

    Logits of -inf (removed tokens) count as probability 0. Knobs and errors as in `token_logprobs`.
    """
    return _Entropy.apply(logits, _inverse_temperature(logits, temperature, chunk), chunk)


@dataclass(frozen=True, eq=False, slots=True)
class EssReport:
    """Effective sample sizes as fractions in (0, 1], with the mean weights they must be read beside. All 0-d."""

    token: Tensor
    sequence: Tensor
    sequence_clipped: Tensor
    mean_token_weight: Tensor
    mean_sequence_weight: Tensor
    kept_fraction: Tensor  # kept tokens / action tokens


@torch.no_grad()
def effective_sample_size(weights: Tensor, keep: Tensor | None = None) -> Tensor:
    """`(sum w)^2 / (N sum w^2)` over the kept weights, a fraction in (0, 1]; 0-d, 0 if nothing is kept.

    `weights` has any one shape, `keep` (bool) the same. Dropped entries leave N too: counted as zeros they would report
    the variance of the mask. Equal tiny weights give 1, so read the mean weight next to it. Weights are not clamped.
    """
    kept = torch.ones_like(weights, dtype=torch.bool) if keep is None else keep
    check_shape(weights.shape, "weights", weights, "both must be equal", keep=kept)
    require(kept.dtype == torch.bool, f"keep has dtype {kept.dtype}, expected torch.bool")
    # float64: squares of ratios span e^-40 to e^40
    wide = only(kept, weights.double())
    # The largest weight is scaled to 1, so that squares can neither overflow nor vanish.
    wide = wide / wide.abs().max().clamp(min=torch.finfo(torch.float64).tiny) if wide.numel() else wide
    denominator = kept.sum() * wide.square().sum()
    ess = torch.where(denominator > 0, wide.sum().square() / denominator.clamp(min=1e-300), 0.0)
    return torch.where(denominator.isnan(), denominator, ess).to(float_dtype(weights))


@torch.no_grad()
def ess_report(log_ratios: Tensor, mask: Tensor, *, keep: Tensor | None = None, cap: float = 2.0) -> EssReport:
    """Token, sequence and clipped-sequence ESS with the mean weights; six 0-d tensors.

    Only kept action tokens enter, and a row enters with the sum over them if it has any. `cap` truncates the sequence
    weights of `sequence_clipped` from above, nothing from below. Raises `ValueError` on shapes or cap <= 0.
    """
    require(cap > 0.0, f"cap={cap} must be positive")
    log_ratios = read_log_ratios(mask, log_ratios)
    if keep is not None:
        check_tokens(mask, keep=keep)
    kept = mask if keep is None else mask & keep
    token = only(kept, log_ratios.exp())
    rows = kept.any(1)
    sequence = only(rows, only(kept, log_ratios).sum(1).clamp(-LOG_BOUND, LOG_BOUND).exp())
    num_kept, num_rows = kept.sum().clamp(min=1), rows.sum().clamp(min=1)
    return EssReport(
        token=effective_sample_size(token, kept),
        sequence=effective_sample_size(sequence, rows),
        sequence_clipped=effective_sample_size(sequence.clamp(max=cap), rows),
        mean_token_weight=token.sum() / num_kept,
        mean_sequence_weight=sequence.sum() / num_rows,
        kept_fraction=(kept.sum() / mask.sum().clamp(min=1)).to(log_ratios.dtype),
    )


@torch.no_grad()
def drift_bins(log_ratios: Tensor, lags: Tensor, mask: Tensor, *, edges: Sequence[float]) -> DriftBins:
    """Mean ell^2 of one batch by lag; bin k holds `edges[k] <= lag < edges[k+1]`, tokens outside all bins are left out.

    Standard errors treat tokens as independent, which the tokens of a row are not: read them as lower bounds.
    """
    require(
        len(edges) >= 2 and all(a < b for a, b in zip(edges, edges[1:], strict=False)),
        f"edges={list(edges)} must be at least two increasing numbers",
    )
    check_tokens(mask, lags=lags)
    squares = read_log_ratios(mask, log_ratios).double().square()
    ages = lags.double()
    bounds = torch.tensor(list(edges), dtype=torch.float64, device=lags.device)
    number = torch.bucketize(ages, bounds, right=True) - 1
    num_bins = len(edges) - 1
    inside = mask & (number >= 0) & (number < num_bins)
    index, squares, ages = number[inside], squares[inside], ages[inside]

    def total(values: Tensor) -> Tensor:
        return values.new_zeros(num_bins).index_add_(0, index, values)

    count = total(torch.ones_like(squares))
    size = count.clamp(min=1.0)
    m2 = total(squares) / size
    variance = total((squares - m2[index]).square()) / (size - 1.0).clamp(min=1.0)
    center = torch.where(count > 0, total(ages) / size, bounds[:-1])
    columns = (center, count, m2, (variance / size).sqrt())
    return DriftBins(*(tuple(column.tolist()) for column in columns))


def predict_ess(m2: float, num_effective_tokens: float) -> float:
    """`exp(-n_eff m2)`, the Gaussian proxy of the sequence ESS; reliable above 0.2, too low below."""
    require(
        m2 >= 0.0 and num_effective_tokens >= 0.0,
        f"m2={m2} and num_effective_tokens={num_effective_tokens} must not be negative",
    )
    return math.exp(-num_effective_tokens * m2)


@torch.no_grad()
def dr_grpo_advantages(scores: Tensor, group_ids: Tensor) -> Tensor:
    """`R - mean`, [B]. Dr. GRPO, arXiv:2503.20783."""
    return center_by_group(scores, group_ids)[0].to(float_dtype(scores))


@torch.no_grad()
def rloo_advantages(scores: Tensor, group_ids: Tensor) -> Tensor:
    """`R - mean of the others = G/(G-1) (R - mean)`, [B]; unbiased on-policy. RLOO, arXiv:2402.14740."""
    centered, _, count = center_by_group(scores, group_ids)
    return (centered * count / (count - 1.0).clamp(min=1.0)).to(float_dtype(scores))


@torch.no_grad()
def maxrl_advantages(scores: Tensor, group_ids: Tensor, *, eps: float = 1e-6) -> Tensor:
    """`(R - mean) / (mean + eps)`, [B], for scores >= 0: rare successes weigh more. MaxRL."""
    centered, _, _ = center_by_group(scores, group_ids)
    return (centered / (scores.double() - centered + eps)).to(float_dtype(scores))


@torch.no_grad()
def reinforce_pp_baseline_advantages(
    scores: Tensor, group_ids: Tensor, mask: Tensor, *, moments: Moments | None = None
) -> Tensor:
    """`R - mean` of the group on every action token, whitened over the global batch's tokens; [B, T].

    `moments` as in `reinforce_pp_advantages`. Source: REINFORCE++, arXiv:2501.03262.
    """
    check_rows(mask, scores=scores, group_ids=group_ids)
    return whiten(broadcast_rows(dr_grpo_advantages(scores, group_ids), mask), mask, moments=moments)


@torch.no_grad()
def mis_weights(log_ratios: Tensor, mask: Tensor, *, low: float = 0.5, high: float = 5.0) -> Tensor:
    """Masked token ratio (IcePop, DIS): `rho` if `low <= rho <= high`, else 0; [B, T]. Both bounds are inclusive."""
    require_range(low, high)
    ratio = read_log_ratios(mask, log_ratios).exp()
    return only(mask & (ratio >= low) & (ratio <= high), ratio)


@torch.no_grad()
def k2_keep(log_ratios: Tensor, mask: Tensor, *, bound: float, level: str = "mean") -> Tensor:
    """Keep where `ell^2 / 2 <= bound`: per "token", or for the row's "mean", "sum" or "max"; bool [B, T]."""
    require(level in ("token", "mean", "sum", "max"), f"level={level!r} must be one of token, mean, sum, max")
    require(bound >= 0.0, f"bound={bound} must not be negative")
    if level == "token":
        return mask & (read_log_ratios(mask, log_ratios).square() / 2 <= bound)
    stats = sequence_stats(log_ratios, mask)
    rows = {"mean": stats.k2_sum / stats.num_tokens.clamp(min=1), "sum": stats.k2_sum, "max": stats.k2_max}[level]
    return mask & (rows <= bound)[:, None]


@torch.no_grad()
def geo_bound(kl: float | Tensor, num_tokens: Tensor, *, base: float = 0.001) -> Tensor:
    """Bound on abs(g) for a row of `num_tokens` [B] drifted by `kl` nats per token: `base + 3 sqrt(2 kl/n) + kl`, [B].

    `kl` is a float or [B], >= 0; 0 for rows without tokens. Pass `exp(-bound)` and `exp(bound)` to `geo_keep`.
    """
    require(num_tokens.dim() == 1, f"num_tokens has shape {list(num_tokens.shape)}, expected [B]")
    drift = kl if isinstance(kl, Tensor) else torch.tensor(float(kl), device=num_tokens.device)
    require(
        drift.dim() == 0 or drift.shape == num_tokens.shape,
        f"kl has shape {list(drift.shape)} but num_tokens has shape {list(num_tokens.shape)}: expected a float or [B]",
    )
    dtype = float_dtype(num_tokens, drift)
    drift, count = drift.to(dtype), num_tokens.to(dtype)
    bound = base + 3.0 * (2.0 * drift / count.clamp(min=1.0)).sqrt() + drift
    return only(num_tokens > 0, bound)


def lagrangian_loss(
    value: Tensor | float, limit: float, multiplier: float | Tensor, *, sense: str = "max", one_sided: bool = False
) -> Tensor:
    """`multiplier * e`, 0-d, differentiable in `value`; with `one_sided` `multiplier * relu(e)`.

    The standard form keeps acting at the boundary, the one-sided one is 0 as soon as the constraint holds.
    """
    error = signed_violation(read_mean(value), limit, sense)
    constant = multiplier.detach() if isinstance(multiplier, Tensor) else multiplier
    return constant * (error.clamp(min=0.0) if one_sided else error)


def _inverse_temperature(logits: Tensor, temperature: float | Tensor, chunk: int) -> Tensor:
    """1/temperature as [B, 1, 1] in the dtype of the computation, after checking the knobs."""
    require(logits.dim() == 3, f"logits has shape {list(logits.shape)}, expected [B, T, A]")
    require(chunk >= 1, f"chunk={chunk} must be at least 1")
    dtype = float_dtype(logits)
    if isinstance(temperature, Tensor) and temperature.dim() > 0:
        check_shape(logits.shape[:1], "logits", logits, "expected [B]", temperature=temperature)
        return 1.0 / temperature.detach().to(device=logits.device, dtype=dtype)[:, None, None]
    require(float(temperature) > 0.0, f"temperature={temperature} must be positive")
    return torch.full((logits.shape[0], 1, 1), 1.0 / float(temperature), dtype=dtype, device=logits.device)


def _time_slices(logits: Tensor, chunk: int) -> list[slice]:
    """Slices along T that hold about `chunk` tokens over all rows; slicing T copies nothing, flattening might."""
    num_rows, width = logits.shape[0], logits.shape[1]
    step = max(1, chunk // max(1, num_rows))
    return [slice(start, min(start + step, width)) for start in range(0, width, step)]


class _ChosenLogprob(torch.autograd.Function):
    """z_a - logsumexp(z), keeping only the caller's logits and one number per token for the backward pass."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, tokens: Tensor, inverse: Tensor, chunk: int) -> Tensor:
        chosen = torch.empty(tokens.shape, dtype=inverse.dtype, device=logits.device)
        log_sums = torch.empty_like(chosen)
        for part in _time_slices(logits, chunk):
            scaled = logits[:, part].to(inverse.dtype) * inverse
            log_sums[:, part] = scaled.logsumexp(-1)
            chosen[:, part] = scaled.gather(-1, tokens[:, part, None].long()).squeeze(-1) - log_sums[:, part]
        ctx.save_for_backward(logits, tokens, inverse, log_sums)
        ctx.chunk = chunk
        return chosen

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        logits, tokens, inverse, log_sums = ctx.saved_tensors
        slope = upstream[0][..., None] * inverse
        grad = torch.empty_like(logits)
        for part in _time_slices(logits, ctx.chunk):
            probs = (logits[:, part].to(inverse.dtype) * inverse - log_sums[:, part, None]).exp_()
            piece = probs.mul_(-slope[:, part])
            piece.scatter_add_(-1, tokens[:, part, None].long(), slope[:, part])
            grad[:, part] = piece.to(grad.dtype)
        return grad, None, None, None


class _Entropy(torch.autograd.Function):
    """-sum p log p, chunked like `_ChosenLogprob`; dH/dz = -p (log p + H)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, inverse: Tensor, chunk: int) -> Tensor:
        entropies = torch.empty(logits.shape[:2], dtype=inverse.dtype, device=logits.device)
        for part in _time_slices(logits, chunk):
            entropies[:, part] = _surprise(logits[:, part], inverse)[1].sum(-1)
        ctx.save_for_backward(logits, inverse, entropies)
        ctx.chunk = chunk
        return entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        logits, inverse, entropies = ctx.saved_tensors
        slope = upstream[0][..., None] * inverse
        grad = torch.empty_like(logits)
        for part in _time_slices(logits, ctx.chunk):
            probs, surprise = _surprise(logits[:, part], inverse)
            grad[:, part] = (slope[:, part] * (surprise - probs * entropies[:, part, None])).to(grad.dtype)
        return grad, None, None


def _surprise(logits: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """p and -p log p over the last axis, with 0 log 0 = 0 for removed tokens."""
    log_probs = (logits.to(inverse.dtype) * inverse).log_softmax(-1)
    probs = log_probs.exp()
    return probs, -probs * log_probs.clamp(min=torch.finfo(log_probs.dtype).min)
