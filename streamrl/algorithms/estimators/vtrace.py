"""V-trace: value targets and advantages for a policy that differs from the one that acted.

Every estimator here leaves the token's own importance ratio to the surrogate, unless `rho_bar_pg` is given (the
published IMPALA form); then only a surrogate without a ratio fits. Recursions run over action tokens only; the value
after the last one is `bootstrap_values`: 0 if the episode ended, V(s_{T+1}) if it was cut.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from streamrl.algorithms.checks import LOG_BOUND, check_rows, check_tokens, discounts, float_dtype, only, read, require
from streamrl.algorithms.estimators.ratios import token_log_ratios
from streamrl.algorithms.estimators.scan import last_action, next_action, recursion_inputs, suffix_scan
from streamrl.algorithms.types import Returns, SegmentReturns

__all__ = ["vtrace", "vtrace_critic_free", "vtrace_segments"]

# exp of this is finite in float32; a larger suffix product would be inf, and inf times 0 is NaN.
_MAX_LOG_PRODUCT = 80.0


@torch.no_grad()
def vtrace(
    behavior_logprobs: Tensor,  # [B, T]
    policy_logprobs: Tensor,  # [B, T]
    rewards: Tensor,  # [B, T]
    values: Tensor,  # [B, T] V(s_t), before token t
    mask: Tensor,  # bool [B, T]
    *,
    bootstrap_values: Tensor,  # [B]
    gamma: float | Tensor = 1.0, lam: float = 1.0, rho_bar: float = 1.0, c_bar: float = 1.0,
    rho_bar_pg: float | None = None, trace_temperature: float = 1.0, leak: float = 1.0,
) -> Returns:
    """V-trace targets `v_t` and advantages `r_t + gamma v_{t+1} - V_t`, [B, T], detached.

    `rhohat = min(rho_bar, rho)`, `c = lam min(c_bar, rho)`, `delta_t = rhohat_t (r_t + gamma V_{t+1} - V_t)`,
    `v_t = V_t + delta_t + gamma_t c_t (v_{t+1} - V_{t+1})`. The advantage bootstraps from v_{t+1} for every lam.

    Args:
        gamma: float or [B, T], in [0, 1].
        rho_bar: truncation in the TD error, decides the fixed point.
        c_bar: truncation of the trace, at most rho_bar; decides speed and variance; keep it at 1.
        rho_bar_pg: multiply the advantage by `min(rho_bar_pg, rho_t)`; None leaves the own ratio to the surrogate.
        trace_temperature: kappa >= 1 lengthens the trace, `c = lam min(c_bar, exp(ell / kappa))`; experimental.
        leak: alpha, `(1 - alpha) rho + alpha min(bar, rho)` for every truncation; 1 is V-trace, 0 full per-decision IS.
    Raises:
        ValueError: shapes differ, c_bar > rho_bar, or a knob out of range.
    Example: with equal log-probs the targets are TD(lam) returns and `targets - values` is GAE(lam).
    Source: Espeholt et al. 2018, arXiv:1802.01561, eq. 1, remarks 1 and 2; leak: arXiv:2002.12928.
    """
    _check_bars(lam, rho_bar, c_bar, rho_bar_pg)
    require(trace_temperature > 0.0, f"trace_temperature={trace_temperature} must be positive")
    require(0.0 <= leak <= 1.0, f"leak={leak} must lie in [0, 1]")
    log_ratios = token_log_ratios(behavior_logprobs, policy_logprobs, mask)
    (log_ratios, rewards, values), last, gammas = recursion_inputs(
        mask, bootstrap_values, gamma, log_ratios=log_ratios, rewards=rewards, values=values
    )
    ratio = log_ratios.exp()
    traces = lam * _truncate((log_ratios / trace_temperature).exp(), c_bar, leak)
    own = None if rho_bar_pg is None else _truncate(ratio, rho_bar_pg, leak)
    return _recursion(_truncate(ratio, rho_bar, leak), traces, own, rewards, values, mask, last, gammas)


@torch.no_grad()
def vtrace_segments(
    behavior_logprobs: Tensor, policy_logprobs: Tensor, rewards: Tensor, values: Tensor, mask: Tensor,
    segment_ids: Tensor,  # int64 [B, T], non-decreasing along a row
    *, bootstrap_values: Tensor, gamma: float = 1.0, lam: float = 1.0, rho_bar: float = 1.0, c_bar: float = 1.0,
    rho_bar_pg: float | None = None, trace: str = "product",
) -> SegmentReturns:
    """V-trace on segments (turns, or blocks of 16 to 64 tokens), so that long rows keep a usable trace.

    A segment acts as one step: log-ratio and reward are its tokens' sums (log-ratio clamped to +-20), its value is
    that of its first action token, gamma applies once. Every token of a segment gets its advantage; the critic is
    trained at `starts`. Ratios between tokens of one segment are ignored (bias of order length squared times total
    variation).

    Args:
        gamma: float, per segment.
        trace: "product", or "geometric": `c = lam min(c_bar, exp(ell_seg / length))` with rhohat unchanged, the same
            fixed point with a longer trace.
        Others as in `vtrace`, which is the case of one token per segment.
    """
    _check_bars(lam, rho_bar, c_bar, rho_bar_pg)
    require(trace in ("product", "geometric"), f"trace={trace!r} must be one of product, geometric")
    require(not isinstance(gamma, Tensor), "gamma of vtrace_segments must be a float: it applies once per segment")
    check_tokens(mask, segment_ids=segment_ids)
    check_rows(mask, bootstrap_values=bootstrap_values)
    log_ratios = token_log_ratios(behavior_logprobs, policy_logprobs, mask)
    rewards, values = read(mask, rewards=rewards, values=values)
    dtype = float_dtype(log_ratios, rewards, bootstrap_values)
    starts, segment = _segment_numbers(segment_ids, mask)

    def per_segment(tokens: Tensor) -> Tensor:
        # Masked positions hold 0 and may fall on any segment.
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).scatter_add_(1, segment, tokens.to(dtype))

    lengths = per_segment(mask)
    occupied = lengths > 0
    log_sums = per_segment(log_ratios).clamp(-LOG_BOUND, LOG_BOUND)
    ratio = log_sums.exp()
    trace_log = log_sums if trace == "product" else per_segment(log_ratios) / lengths.clamp(min=1.0)
    traces = lam * trace_log.exp().clamp(max=c_bar)
    own = None if rho_bar_pg is None else ratio.clamp(max=rho_bar_pg)
    returns = _recursion(
        ratio.clamp(max=rho_bar), traces, own, per_segment(rewards), per_segment(only(starts, values)), occupied,
        bootstrap_values, discounts(gamma, occupied, dtype),
    )
    return SegmentReturns(
        advantages=only(mask, returns.advantages.gather(1, segment)),
        targets=only(starts, returns.targets.gather(1, segment)),
        starts=starts,
    )


@torch.no_grad()
def vtrace_critic_free(
    behavior_logprobs: Tensor, policy_logprobs: Tensor,
    scores: Tensor,  # [B]
    baselines: Tensor,  # [B]
    mask: Tensor, *, lam: float = 1.0, rho_bar: float = 1.0, c_bar: float = 1.0, rho_bar_pg: float | None = None,
) -> Tensor:
    """V-trace advantages with a constant value, gamma 1 and one terminal score: a truncated suffix product.

    `A_T = R - b`, `A_s = lam^(T-s-1) (prod_{s<i<T} min(c_bar, rho_i)) min(rho_bar, rho_T) (R - b)`; [B, T], detached.
    The suffix corrects the future that earned R; the token's own ratio is left to the surrogate unless `rho_bar_pg` is
    given. Evaluated as exp of a reversed cumulative sum. Keep lam at 1: less merely decays early tokens. For turn
    rewards use `vtrace` with a per-turn baseline as `values`.

    Example: equal to `vtrace(values=baseline on every token, rewards=place_terminal(scores, mask))`.
    """
    _check_bars(lam, rho_bar, c_bar, rho_bar_pg)
    check_rows(mask, scores=scores, baselines=baselines)
    log_ratios = token_log_ratios(behavior_logprobs, policy_logprobs, mask)
    dtype = float_dtype(log_ratios, scores, baselines)
    log_ratios = log_ratios.to(dtype)
    log_lam = math.log(lam) if lam > 0.0 else -math.inf
    inner = log_ratios.clamp(max=math.log(c_bar)) + log_lam
    factors = only(mask, torch.where(last_action(mask), log_ratios.clamp(max=math.log(rho_bar)), inner))
    suffix = factors.flip(1).cumsum(1).flip(1)
    # Exclusive of token s itself. Shifted rather than subtracted: -inf minus -inf (lam = 0) is NaN.
    exclusive = torch.cat([suffix[:, 1:], torch.zeros_like(suffix[:, :1])], dim=1)
    centered = (scores.to(dtype) - baselines.to(dtype))[:, None]
    advantages = exclusive.clamp(max=_MAX_LOG_PRODUCT).exp() * centered
    if rho_bar_pg is not None:
        advantages = advantages * log_ratios.exp().clamp(max=rho_bar_pg)
    return only(mask, advantages)


def _check_bars(lam: float, rho_bar: float, c_bar: float, rho_bar_pg: float | None) -> None:
    require(0.0 <= lam <= 1.0, f"lam={lam} must lie in [0, 1]")
    require(0.0 < c_bar <= rho_bar, f"c_bar={c_bar} and rho_bar={rho_bar} must satisfy 0 < c_bar <= rho_bar")
    require(rho_bar_pg is None or rho_bar_pg > 0.0, f"rho_bar_pg={rho_bar_pg} must be positive or None")


def _truncate(ratio: Tensor, bar: float, leak: float) -> Tensor:
    return (1.0 - leak) * ratio + leak * ratio.clamp(max=bar)


def _recursion(
    rhos: Tensor,  # [B, T] truncated ratios
    traces: Tensor,  # [B, T] c_t, lam included
    own: Tensor | None,  # [B, T] factor on the advantage
    rewards: Tensor, values: Tensor, mask: Tensor, bootstrap_values: Tensor, gammas: Tensor,
) -> Returns:
    """V-trace on clean inputs of one dtype, shared by tokens and segments."""
    last = bootstrap_values.to(values.dtype)
    following = next_action(values, mask, last)
    deltas = only(mask, rhos * (rewards + gammas * following - values))
    decays = torch.where(mask, gammas * traces, torch.ones_like(traces))
    errors = suffix_scan(deltas, decays, torch.zeros_like(last))  # v_t - V_t
    targets = only(mask, values + errors)
    advantages = rewards + gammas * next_action(targets, mask, last) - values
    if own is not None:
        advantages = advantages * own
    return Returns(advantages=only(mask, advantages), targets=targets)


def _segment_numbers(segment_ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The mask of segment starts, and each position's segment number in its row (0 before the first)."""
    ids = segment_ids.long()
    none = torch.iinfo(torch.int64).min
    clean = torch.where(mask, ids, none)
    # Ids do not decrease along a row, so the running maximum up to t-1 is the id of the previous action token.
    running = clean.cummax(dim=1).values if mask.shape[1] else clean
    previous = torch.cat([torch.full_like(running[:, :1], none), running[:, :-1]], dim=1)
    starts = mask & (clean != previous)
    return starts, (starts.cumsum(1) - 1).clamp(min=0)
