"""Retrace(lambda): off-policy returns whose first action carries no ratio. Arguments as in `returns` and `vtrace`.

`c_t = lam min(1, rho_t)`; the token's own ratio never cuts its own error, the product starts at t + 1. With a true Q it
converges to Q^pi for any behavior, without the bias of a rho_bar. Munos et al. 2016, arXiv:1606.02647.
"""

from __future__ import annotations

import torch
from torch import Tensor

from streamrl.algorithms.checks import check_shape, float_dtype, only, require
from streamrl.algorithms.estimators.ratios import token_log_ratios
from streamrl.algorithms.estimators.scan import next_action, recursion_inputs, suffix_scan
from streamrl.algorithms.types import Returns

__all__ = ["dueling_q", "retrace_q", "retrace_v"]


@torch.no_grad()
def retrace_v(
    behavior_logprobs: Tensor, policy_logprobs: Tensor, rewards: Tensor, values: Tensor, mask: Tensor, *,
    bootstrap_values: Tensor, gamma: float | Tensor = 1.0, lam: float = 1.0, target_rho_bar: float | None = None,
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
    log_ratios, traces = _traces(behavior_logprobs, policy_logprobs, mask, lam)
    (traces, rewards, values), last, gammas = recursion_inputs(
        mask, bootstrap_values, gamma, traces=traces, rewards=rewards, values=values
    )
    deltas = only(mask, rewards + gammas * next_action(values, mask, last) - values)
    advantages = _scan(deltas, traces, gammas, mask)
    step = advantages if target_rho_bar is None else advantages * log_ratios.exp().clamp(max=target_rho_bar)
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
    _, traces = _traces(behavior_logprobs, policy_logprobs, mask, lam)
    (traces, rewards, q_values, expected_q), last, gammas = recursion_inputs(
        mask, bootstrap_values, gamma, traces=traces, rewards=rewards, q_values=q_values, expected_q=expected_q
    )
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


def _traces(behavior_logprobs: Tensor, policy_logprobs: Tensor, mask: Tensor, lam: float) -> tuple[Tensor, Tensor]:
    require(0.0 <= lam <= 1.0, f"lam={lam} must lie in [0, 1]")
    log_ratios = token_log_ratios(behavior_logprobs, policy_logprobs, mask)
    return log_ratios, lam * log_ratios.exp().clamp(max=1.0)


def _scan(deltas: Tensor, traces: Tensor, gammas: Tensor, mask: Tensor) -> Tensor:
    """`x_t = delta_t + gamma_t c_{t+1} x_{t+1}`."""
    zero = torch.zeros_like(deltas.sum(1))
    following = next_action(traces, mask, zero)
    return only(mask, suffix_scan(deltas, torch.where(mask, gammas * following, torch.ones_like(gammas)), zero))
