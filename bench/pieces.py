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

from streamrl.algorithms.checks import LOG_BOUND, check_shape, check_tokens, float_dtype, only, read_log_ratios, require
from streamrl.algorithms.controllers import read_mean, signed_violation
from streamrl.algorithms.types import DriftBins


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
