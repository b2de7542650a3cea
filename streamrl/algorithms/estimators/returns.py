"""Returns with a value function, on-policy or with clipped ratios, and the loss of the critic.

Tensors are [B, T]; recursions run backwards over action tokens only. `values[:, t]` is V(s_t), *before* token t; the
value after the last token is `bootstrap_values` [B]: 0 if the episode ended, V(s_{T+1}) if it was cut. All results are
detached except `value_loss`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from streamrl.algorithms.checks import only, read, require
from streamrl.algorithms.estimators.ratios import token_log_ratios
from streamrl.algorithms.estimators.scan import next_action, recursion_inputs, suffix_scan
from streamrl.algorithms.types import Returns

__all__ = ["clipped_is", "gae", "n_step", "td_lambda", "value_loss"]


@torch.no_grad()
def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, *, bootstrap_values: Tensor, gamma: float | Tensor = 1.0,
    lam: float = 1.0,
) -> Returns:
    """Generalized advantage estimation: `delta_t = r_t + gamma_t V_{t+1} - V_t`, `A_t = delta_t + gamma_t lam A_{t+1}`.

    Targets are `A_t + V_t` with the raw A; whitening is a separate call. `gamma` is a float or [B, T].
    Source: Schulman et al. 2016, arXiv:1506.02438, eq. 16.
    """
    require(0.0 <= lam <= 1.0, f"lam={lam} must lie in [0, 1]")
    (rewards, values), last, gammas = recursion_inputs(mask, bootstrap_values, gamma, rewards=rewards, values=values)
    deltas = only(mask, rewards + gammas * next_action(values, mask, last) - values)
    decays = torch.where(mask, lam * gammas, torch.ones_like(gammas))
    advantages = only(mask, suffix_scan(deltas, decays, torch.zeros_like(last)))
    return Returns(advantages=advantages, targets=only(mask, advantages + values))


@torch.no_grad()
def td_lambda(
    rewards: Tensor, values: Tensor, mask: Tensor, *, bootstrap_values: Tensor, gamma: float | Tensor = 1.0,
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
    rewards: Tensor, values: Tensor, mask: Tensor, *, bootstrap_values: Tensor, gamma: float | Tensor = 1.0, n: int = 5,
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
    behavior_logprobs: Tensor, policy_logprobs: Tensor, rewards: Tensor, values: Tensor, mask: Tensor, *,
    bootstrap_values: Tensor, gamma: float | Tensor = 1.0, eps: float = 0.2,
) -> Returns:
    """Clipped importance sampling: `R_t = r_t + gamma_t R_{t+1}`, `A_t = clip(rho_t, 1 - eps, 1 + eps) R_t - V_t`.

    Targets are R_t. The advantage carries its own ratio: pair it with `reinforce` only.
    """
    require(eps >= 0.0, f"eps={eps} must not be negative")
    (rewards, values), last, gammas = recursion_inputs(mask, bootstrap_values, gamma, rewards=rewards, values=values)
    ratio = token_log_ratios(behavior_logprobs, policy_logprobs, mask).exp()
    returns = only(mask, suffix_scan(rewards, gammas, last))
    return Returns(advantages=only(mask, ratio.clamp(1.0 - eps, 1.0 + eps) * returns - values), targets=returns)


def value_loss(
    values: Tensor, targets: Tensor, mask: Tensor, *, old_values: Tensor | None = None, clip: float | None = None
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
