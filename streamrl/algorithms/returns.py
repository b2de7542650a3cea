"""Estimators with a value function: on-policy returns, V-trace, Retrace(lambda), and the loss of the critic.

Tensors are [B, T]; recursions run backwards over action tokens only. `values[:, t]` is V(s_t), *before* token t; the
value after the last token is `bootstrap_values` [B]: 0 if the episode ended, V(s_{T+1}) if it was cut. All results are
detached except those of `value_loss` and `dueling_q`.

V-trace leaves the token's own importance ratio to the surrogate, unless `rho_bar_pg` is given (the published IMPALA
form); then only a surrogate without a ratio fits. Retrace has `c_t = lam min(1, rho_t)`: the token's own ratio never
cuts its own error, the product starts at t + 1. With a true Q it converges to Q^pi for any behavior, without the bias
of a rho_bar (Munos et al. 2016, arXiv:1606.02647).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from streamrl.algorithms.checks import (
    LOG_BOUND,
    check_rows,
    check_shape,
    check_tokens,
    clamped_difference,
    discounts,
    float_dtype,
    only,
    read,
    require,
    row_counts,
)
from streamrl.algorithms.tokens import last_action, next_action, off_policy_inputs, recursion_inputs, suffix_scan
from streamrl.algorithms.types import Returns, SegmentReturns

__all__ = [
    "clipped_is", "dueling_q", "gae", "n_step", "retrace_q", "retrace_v", "td_lambda", "value_loss", "vtrace",
    "vtrace_critic_free", "vtrace_segments",
]


@torch.no_grad()
def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    *,
    bootstrap_values: Tensor,
    gamma: float | Tensor = 1.0,
    lam: float = 1.0,
    target_lam: float | None = None,
    length_alpha: float | None = None,
) -> Returns:
    """Generalized advantage estimation: `delta_t = r_t + gamma_t V_{t+1} - V_t`, `A_t = delta_t + gamma_t lam A_{t+1}`.

    Targets are `A_t + V_t` with the raw A; whitening is a separate call. `gamma` is a float or [B, T]. The next token
    is the next action: text that the model did not write is skipped.

    Args:
        target_lam: the lambda of the targets, where it is another one; 1 fits the critic to returns.
        length_alpha: in the place of lam, `1 - 1 / (length_alpha n)` for a row of n actions, at least 0: the longer the
            answer, the further back credit goes (VAPO, arXiv:2504.05118).
    Source: Schulman et al. 2016, arXiv:1506.02438, eq. 16.
    """
    for name, value in (("lam", lam), ("target_lam", target_lam)):
        require(value is None or 0.0 <= value <= 1.0, f"{name}={value} must lie in [0, 1]")
    require(
        length_alpha is None or (length_alpha > 0.0 and lam == 1.0),
        f"length_alpha={length_alpha} must be positive, and lam={lam} left at 1",
    )
    (rewards, values), last, gammas = recursion_inputs(mask, bootstrap_values, gamma, rewards=rewards, values=values)
    deltas = only(mask, rewards + gammas * next_action(values, mask, last) - values)

    def summed(lams: float | Tensor) -> Tensor:
        decays = torch.where(mask, lams * gammas, torch.ones_like(gammas))
        return only(mask, suffix_scan(deltas, decays, torch.zeros_like(last)))

    by_length = None if length_alpha is None else 1.0 - 1.0 / (length_alpha * row_counts(mask, gammas.dtype))
    advantages = summed(lam if by_length is None else by_length.clamp(min=0.0)[:, None])
    of_targets = advantages if target_lam is None else summed(target_lam)
    return Returns(advantages=advantages, targets=only(mask, of_targets + values))


@torch.no_grad()
def td_lambda(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    *,
    bootstrap_values: Tensor,
    gamma: float | Tensor = 1.0,
    lam: float = 1.0,
) -> Returns:
    """TD(lambda): `G_t = r_t + gamma_t [(1 - lam) V_{t+1} + lam G_{t+1}]`, `A_t = G_t - V_t`.

    The same numbers as `gae`, by another recursion. Source: Sutton and Barto 2018, eq. 12.18.
    """
    require(0.0 <= lam <= 1.0, f"lam={lam} must lie in [0, 1]")
    (rewards, values), last, gammas = recursion_inputs(mask, bootstrap_values, gamma, rewards=rewards, values=values)
    steps = only(mask, rewards + gammas * (1.0 - lam) * next_action(values, mask, last))
    decays = torch.where(mask, lam * gammas, torch.ones_like(gammas))
    targets = only(mask, suffix_scan(steps, decays, last))
    return Returns(advantages=only(mask, targets - values), targets=targets)


@torch.no_grad()
def n_step(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    *,
    bootstrap_values: Tensor,
    gamma: float | Tensor = 1.0,
    n: int = 5,
    bootstrap: bool = True,
) -> Returns:
    """n-step returns: k = min(n, tokens left), `G_t = sum_{i<k} gamma^i r_{t+i} + gamma^k V_{t+k}`, `A_t = G_t - V_t`.

    `bootstrap=False` leaves the last term out, also at the end of a cut row. Costs min(n, T) passes over [B, T].
    """
    require(n >= 1, f"n={n} must be at least 1")
    (rewards, values), last, gammas = recursion_inputs(mask, bootstrap_values, gamma, rewards=rewards, values=values)
    last = last if bootstrap else torch.zeros_like(last)
    if n >= mask.shape[1]:
        targets = only(mask, suffix_scan(rewards, gammas, last))
    else:  # G^(k)_t = r_t + gamma_t G^(k-1)_{t+1}, from G^(0) = V (or 0)
        targets = values if bootstrap else torch.zeros_like(values)
        for _ in range(n):
            targets = only(mask, rewards + gammas * next_action(targets, mask, last))
    return Returns(advantages=only(mask, targets - values), targets=targets)


@torch.no_grad()
def clipped_is(
    behavior_logprobs: Tensor,
    policy_logprobs: Tensor,
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    *,
    bootstrap_values: Tensor,
    gamma: float | Tensor = 1.0,
    eps: float = 0.2,
) -> Returns:
    """Clipped importance sampling: `R_t = r_t + gamma_t R_{t+1}`, `A_t = clip(rho_t, 1 - eps, 1 + eps) R_t - V_t`.

    Targets are R_t. The advantage carries its own ratio: pair it with `reinforce` only.
    """
    require(eps >= 0.0, f"eps={eps} must not be negative")
    log_ratios, (rewards, values), last, gammas = off_policy_inputs(
        behavior_logprobs, policy_logprobs, mask, bootstrap_values, gamma, rewards=rewards, values=values
    )
    ratio = log_ratios.exp()
    returns = only(mask, suffix_scan(rewards, gammas, last))
    return Returns(advantages=only(mask, ratio.clamp(1.0 - eps, 1.0 + eps) * returns - values), targets=returns)


def value_loss(
    values: Tensor,
    targets: Tensor,
    mask: Tensor,
    *,
    old_values: Tensor | None = None,
    clip: float | None = None,
) -> Tensor:
    """`1/2 (V - G)^2` per token, or with `clip` the larger of that and `1/2 (V_old + clip(V - V_old, -c, c) - G)^2`.

    [B, T], differentiable in `values` only. `old_values` and `clip` come together.
    """
    if (old_values is None) != (clip is None):
        given = "clip" if old_values is None else "old_values"
        raise ValueError(f"old_values and clip must be given together, got only {given}")
    values, targets = read(mask, values=values, targets=targets.detach())
    plain = (values - targets).square()
    if old_values is None or clip is None:
        return plain / 2
    require(clip > 0.0, f"clip={clip} must be positive")
    (old,) = read(mask, old_values=old_values.detach())
    clipped = (old + (values - old).clamp(-clip, clip) - targets).square()
    return only(mask, torch.maximum(plain, clipped) / 2)


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
    log_ratios, (rewards, values), last, gammas = off_policy_inputs(
        behavior_logprobs, policy_logprobs, mask, bootstrap_values, gamma, rewards=rewards, values=values
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
    log_ratios, (rewards, values), last, _ = off_policy_inputs(
        behavior_logprobs, policy_logprobs, mask, bootstrap_values, gamma, rewards=rewards, values=values
    )
    dtype = last.dtype
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
        last, discounts(gamma, occupied, dtype),
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
    behavior, policy = read(mask, behavior_logprobs=behavior_logprobs, policy_logprobs=policy_logprobs)
    dtype = float_dtype(behavior, scores, baselines)
    log_ratios = clamped_difference(behavior, policy).to(dtype)
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
    rewards: Tensor, values: Tensor, mask: Tensor, last: Tensor, gammas: Tensor,
) -> Returns:
    """V-trace on clean inputs of one dtype, shared by tokens and segments."""
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


@torch.no_grad()
def retrace_v(
    behavior_logprobs: Tensor,
    policy_logprobs: Tensor,
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    *,
    bootstrap_values: Tensor,
    gamma: float | Tensor = 1.0,
    lam: float = 1.0,
    target_rho_bar: float | None = None,
) -> Returns:
    """Retrace with the state value as control variate, [B, T], detached; the surrogate supplies the own ratio.

    `A_t = delta_t + gamma_t c_{t+1} A_{t+1}`, `delta_t = r_t + gamma_t V_{t+1} - V_t`: a lambda-return with
    lambda_t = c_{t+1}.

    Args:
        target_rho_bar: None gives `targets = V_t + A_t`, a target for Q(s_t, a_t). A critic of *states* regressed on it
            would learn the behavior policy's first action; train it with 1.0, `targets = V_t + min(1, rho_t) A_t`,
            whose fixed point is V-trace's.
    Example: with equal log-probs it is `gae` with the same lam.
    Source: arXiv:1606.02647, eq. 3 and 4, with Q replaced by V.
    """
    require(target_rho_bar is None or target_rho_bar > 0.0, f"target_rho_bar={target_rho_bar} must be positive or None")
    require(0.0 <= lam <= 1.0, f"lam={lam} must lie in [0, 1]")
    log_ratios, (rewards, values), last, gammas = off_policy_inputs(
        behavior_logprobs, policy_logprobs, mask, bootstrap_values, gamma, rewards=rewards, values=values
    )
    ratio = log_ratios.exp()
    deltas = only(mask, rewards + gammas * next_action(values, mask, last) - values)
    advantages = _scan(deltas, lam * ratio.clamp(max=1.0), gammas, mask)
    step = advantages if target_rho_bar is None else advantages * ratio.clamp(max=target_rho_bar)
    return Returns(advantages=advantages, targets=only(mask, values + step))


@torch.no_grad()
def retrace_q(
    behavior_logprobs: Tensor, policy_logprobs: Tensor, rewards: Tensor,
    q_values: Tensor,  # [B, T] Q(s_t, a_t)
    expected_q: Tensor,  # [B, T] sum_a pi(a|s_t) Q(s_t, a)
    mask: Tensor, *, bootstrap_values: Tensor, gamma: float | Tensor = 1.0, lam: float = 1.0,
) -> Returns:
    """Retrace with real action values: targets `G_t` for Q, advantages `G_t - expected_q_t`; [B, T], detached.

    `G_t = r_t + gamma_t [Vbar_{t+1} + c_{t+1} (G_{t+1} - Q_{t+1})]`, `G_T = r_T + gamma_T bootstrap`, Vbar =
    expected_q. Do not pass the one-step `q = r + gamma V'` with `expected_q = V`: the bracket vanishes and Retrace
    becomes TD(0). Source: arXiv:1606.02647, eq. 3 and 4.
    """
    require(0.0 <= lam <= 1.0, f"lam={lam} must lie in [0, 1]")
    log_ratios, (rewards, q_values, expected_q), last, gammas = off_policy_inputs(
        behavior_logprobs, policy_logprobs, mask, bootstrap_values, gamma, rewards=rewards, q_values=q_values,
        expected_q=expected_q,
    )
    traces = lam * log_ratios.exp().clamp(max=1.0)
    # D_t = G_t - Q_t obeys the same recursion as the advantages of `retrace_v`.
    deltas = only(mask, rewards + gammas * next_action(expected_q, mask, last) - q_values)
    targets = only(mask, q_values + _scan(deltas, traces, gammas, mask))
    return Returns(advantages=only(mask, targets - expected_q), targets=targets)


def dueling_q(
    values: Tensor,  # [B, T]
    action_advantages: Tensor,  # [B, T, A]
    policy_logprobs_all: Tensor,  # [B, T, A], log-softmax of the current policy
    tokens: Tensor,  # int [B, T]
) -> tuple[Tensor, Tensor]:
    """`Q(s, a) = V(s) + Adv(s, a) - sum_b pi(b|s) Adv(s, b)` of the given tokens, and its expectation V; [B, T] each.

    Differentiable in `values` and `action_advantages`, because Q is what `value_loss` regresses on Retrace targets; the
    policy is a constant. One head of vocabulary size: for small vocabularies.
    """
    require(
        action_advantages.dim() == 3 and action_advantages.shape == policy_logprobs_all.shape,
        f"action_advantages has shape {list(action_advantages.shape)} but policy_logprobs_all has shape "
        f"{list(policy_logprobs_all.shape)}: both must be [B, T, A]",
    )
    check_shape(
        action_advantages.shape[:2], "action_advantages", action_advantages, "expected [B, T] and [B, T, A]",
        values=values, tokens=tokens,
    )
    dtype = float_dtype(values, action_advantages, policy_logprobs_all)
    values, advantages = values.to(dtype), action_advantages.to(dtype)
    mean = (policy_logprobs_all.detach().to(dtype).exp() * advantages).sum(-1)
    chosen = advantages.gather(-1, tokens.long()[..., None]).squeeze(-1)
    return values + chosen - mean, values


def _scan(deltas: Tensor, traces: Tensor, gammas: Tensor, mask: Tensor) -> Tensor:
    """`x_t = delta_t + gamma_t c_{t+1} x_{t+1}`."""
    zero = torch.zeros_like(deltas.sum(1))
    following = next_action(traces, mask, zero)
    return only(mask, suffix_scan(deltas, torch.where(mask, gammas * following, torch.ones_like(gammas)), zero))
