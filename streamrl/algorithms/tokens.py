"""Token log-probs from logits, and per-token numbers from per-row ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from streamrl.algorithms.checks import (
    check_rows,
    check_shape,
    check_tokens,
    discounts,
    float_dtype,
    only,
    read,
    require,
)
from streamrl.algorithms.estimators.scan import last_action, suffix_scan
from streamrl.algorithms.types import Moments

__all__ = ["broadcast_rows", "moments", "place_terminal", "reward_to_go", "token_entropy", "token_logprobs", "whiten"]


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


@torch.no_grad()
def place_terminal(scores: Tensor, mask: Tensor) -> Tensor:
    """`scores` [B] on each row's last action token, 0 elsewhere; [B, T], detached."""
    check_rows(mask, scores=scores)
    return only(last_action(mask), scores.to(float_dtype(scores))[:, None].expand(mask.shape))


@torch.no_grad()
def broadcast_rows(per_row: Tensor, mask: Tensor) -> Tensor:
    """`per_row` [B] on every action token of its row, 0 elsewhere; [B, T], detached."""
    check_rows(mask, per_row=per_row)
    return only(mask, per_row.to(float_dtype(per_row))[:, None].expand(mask.shape))


@torch.no_grad()
def reward_to_go(rewards: Tensor, mask: Tensor, *, gamma: float | Tensor = 1.0) -> Tensor:
    """`G_t = r_t + gamma_t G_{t+1}` over action tokens, across gaps; [B, T], detached.

    Observation tokens neither reset nor discount the sum, so early turns learn from the final reward.
    `gamma` is a float or [B, T] (per-turn discounting).
    """
    (rewards,) = read(mask, rewards=rewards)
    decays = discounts(gamma, mask, rewards.dtype)
    if not isinstance(gamma, Tensor) and gamma == 1.0:
        return only(mask, rewards.flip(1).cumsum(1).flip(1))
    return only(mask, suffix_scan(rewards, decays, rewards.new_zeros(rewards.shape[0])))


@torch.no_grad()
def moments(values: Tensor, mask: Tensor) -> Moments:
    """Count, sum and sum of squares of `values` over action tokens, in float64; add over ranks before use."""
    check_tokens(mask, values=values)
    wide = only(mask, values.double())
    return Moments(count=mask.sum().double(), total=wide.sum(), total_squares=wide.square().sum())


@torch.no_grad()
def whiten(values: Tensor, mask: Tensor, *, moments: Moments | None = None, eps: float = 1e-8) -> Tensor:
    """`(x - mean) / (std + eps)` over the batch's action tokens, unbiased std; [B, T], detached.

    Pass the `moments` of the whole optimizer batch when `values` is only a part of it. One token or a constant gives 0.
    """
    check_tokens(mask, values=values)
    given = moments if moments is not None else _moments(values, mask)
    count, total, squares = (
        torch.as_tensor(number, dtype=torch.float64, device=values.device)
        for number in (given.count, given.total, given.total_squares)
    )
    mean = total / count.clamp(min=1.0)
    variance = (squares - total * mean).clamp(min=0.0) / (count - 1.0).clamp(min=1.0)
    white = (only(mask, values.double()) - mean) / (variance.sqrt() + eps)
    return only(mask, white.to(float_dtype(values)))


_moments = moments  # `whiten` has an argument of that name


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
