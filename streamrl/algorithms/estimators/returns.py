"""Returns with a value function: what to learn from rewards, on-policy or off.

Recursions run backwards over action
tokens only and step over observations and padding. `values[:, t]` is V(s_t), *before* token t; the value after the
last token is `bootstrap_values` [B]: 0 if the episode ended, V(s_{T+1}) if it was cut. All results are detached except
`value_loss`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from streamrl.algorithms.checks import check_rows, discounts, float_dtype, only, read, require
from streamrl.algorithms.estimators.ratios import token_log_ratios
from streamrl.algorithms.estimators.scan import next_action, suffix_scan
from streamrl.algorithms.types import Returns

__all__ = ["clipped_is", "gae", "n_step", "td_lambda", "value_loss"]


@torch.no_grad()
def gae(
    rewards: Tensor,  # [B, T]
    values: Tensor,  # [B, T]
    mask: Tensor,  # bool [B, T]
    *,
    bootstrap_values: Tensor,  # [B]
    gamma: float | Tensor = 1.0,
    lam: float = 1.0,
) -> Returns:
    """Generalized advantage estimation: `delta_t = r_t + gamma_t V_{t+1} - V_t`, `A_t = delta_t + gamma_t lam A_{t+1}`.

    Targets are `A_t + V_t` with the raw A; whitening is a separate call. `gamma` is a float or [B, T].
    Source: Schulman et al. 2016, arXiv:1506.02438, eq. 16.
    """
    paid, value, following, gammas = _td_inputs(rewards, values, mask, bootstrap_values, gamma, lam)
    deltas = only(mask, paid + gammas * following - value)
    decays = torch.where(mask, lam * gammas, torch.ones_like(gammas))
    advantages = only(mask, suffix_scan(deltas, decays, value.new_zeros(value.shape[0])))
    return Returns(advantages=advantages, targets=only(mask, advantages + value))


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

    The same numbers as `gae`, by another recursion.
    Source: Sutton and Barto 2018, eq. 12.18.
    """
    paid, value, following, gammas = _td_inputs(rewards, values, mask, bootstrap_values, gamma, lam)
    steps = only(mask, paid + gammas * (1.0 - lam) * following)
    decays = torch.where(mask, lam * gammas, torch.ones_like(gammas))
    targets = only(mask, suffix_scan(steps, decays, bootstrap_values.to(value.dtype)))
    return Returns(advantages=only(mask, targets - value), targets=targets)


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
    paid, value, _, gammas = _td_inputs(rewards, values, mask, bootstrap_values, gamma, 1.0)
    end = bootstrap_values.to(value.dtype) if bootstrap else torch.zeros_like(bootstrap_values, dtype=value.dtype)
    if n >= mask.shape[1]:
        targets = only(mask, suffix_scan(paid, gammas, end))
        return Returns(advantages=only(mask, targets - value), targets=targets)
    # G^(k)_t = r_t + gamma_t G^(k-1)_{t+1}, from G^(0) = V (or 0)
    targets = value if bootstrap else torch.zeros_like(value)
    for _ in range(n):
        targets = only(mask, paid + gammas * next_action(targets, mask, end))
    return Returns(advantages=only(mask, targets - value), targets=targets)


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
    paid, value, _, gammas = _td_inputs(rewards, values, mask, bootstrap_values, gamma, 1.0)
    ratio = token_log_ratios(behavior_logprobs, policy_logprobs, mask).exp()
    returns = only(mask, suffix_scan(paid, gammas, bootstrap_values.to(paid.dtype)))
    return Returns(advantages=only(mask, ratio.clamp(1.0 - eps, 1.0 + eps) * returns - value), targets=returns)


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
    value, target = read(mask, values=values, targets=targets.detach())
    plain = (value - target).square()
    if old_values is None or clip is None:
        return plain / 2
    require(clip > 0.0, f"clip={clip} must be positive")
    (old,) = read(mask, old_values=old_values.detach())
    clipped = (old + (value - old).clamp(-clip, clip) - target).square()
    return only(mask, torch.maximum(plain, clipped) / 2)


def _td_inputs(
    rewards: Tensor, values: Tensor, mask: Tensor, bootstrap_values: Tensor, gamma: float | Tensor, lam: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Clean rewards, values, next values and discounts of one dtype, [B, T] each."""
    require(0.0 <= lam <= 1.0, f"lam={lam} must lie in [0, 1]")
    paid, value = read(mask, rewards=rewards, values=values)
    check_rows(mask, bootstrap_values=bootstrap_values)
    dtype = float_dtype(value, bootstrap_values)
    paid, value = paid.to(dtype), value.to(dtype)
    following = next_action(value, mask, bootstrap_values.to(dtype))
    return paid, value, following, discounts(gamma, mask, dtype)
