"""The slow truth: formulas transcribed term by term from the papers, one row of action tokens as plain lists.

Nothing here is a recursion where the paper gives a sum, and nothing is shared with the package.
"""

import math

BOUND = 20.0


def clamp(x: float, low: float = -BOUND, high: float = BOUND) -> float:
    return min(high, max(low, x))


def prod(factors) -> float:
    out = 1.0
    for factor in factors:
        out *= factor
    return out


def discount(gammas: list[float], start: int, end: int) -> float:
    """gamma_start ... gamma_{end-1}"""
    return prod(gammas[start:end])


def truncated(ratio: float, bar: float, leak: float) -> float:
    return (1 - leak) * ratio + leak * min(bar, ratio)


def vtrace(
    log_ratios, rewards, values, bootstrap, gammas, *, lam=1.0, rho_bar=1.0, c_bar=1.0, rho_bar_pg=None, kappa=1.0,
    leak=1.0,
):
    """v_s = V_s + sum_{t>=s} gamma^{t-s} (prod_{i=s}^{t-1} c_i) delta_t: arXiv:1802.01561, eq. 1."""
    n = len(rewards)
    following = [*values[1:], bootstrap]
    rho = [math.exp(clamp(x)) for x in log_ratios]
    c = [lam * truncated(math.exp(clamp(x) / kappa), c_bar, leak) for x in log_ratios]
    delta = [truncated(rho[t], rho_bar, leak) * (rewards[t] + gammas[t] * following[t] - values[t]) for t in range(n)]
    targets = [values[s] + sum(discount(gammas, s, t) * prod(c[s:t]) * delta[t] for t in range(s, n)) for s in range(n)]
    advantages = []
    for s in range(n):
        after = targets[s + 1] if s + 1 < n else bootstrap
        own = 1.0 if rho_bar_pg is None else truncated(rho[s], rho_bar_pg, leak)
        advantages.append(own * (rewards[s] + gammas[s] * after - values[s]))
    return targets, advantages


def retrace_v(log_ratios, rewards, values, bootstrap, gammas, *, lam=1.0, target_rho_bar=None):
    """A_s = sum_{t>=s} gamma^{t-s} (prod_{i=s+1}^{t} c_i) delta_t: arXiv:1606.02647, eq. 3, Q replaced by V."""
    n = len(rewards)
    following = [*values[1:], bootstrap]
    c = [lam * min(1.0, math.exp(clamp(x))) for x in log_ratios]
    delta = [rewards[t] + gammas[t] * following[t] - values[t] for t in range(n)]
    advantages = [
        sum(discount(gammas, s, t) * prod(c[s + 1 : t + 1]) * delta[t] for t in range(s, n)) for s in range(n)
    ]
    own = [1.0 if target_rho_bar is None else min(target_rho_bar, math.exp(clamp(x))) for x in log_ratios]
    return [v + w * a for v, w, a in zip(values, own, advantages, strict=True)], advantages


def retrace_q(log_ratios, rewards, q, expected_q, bootstrap, gammas, *, lam=1.0):
    """G_s = Q_s + sum_{t>=s} gamma^{t-s} (prod_{i=s+1}^{t} c_i) (r_t + gamma E_pi Q(s_{t+1}, .) - Q_t)."""
    n = len(rewards)
    following = [*expected_q[1:], bootstrap]
    c = [lam * min(1.0, math.exp(clamp(x))) for x in log_ratios]
    return [
        q[s]
        + sum(
            discount(gammas, s, t) * prod(c[s + 1 : t + 1]) * (rewards[t] + gammas[t] * following[t] - q[t])
            for t in range(s, n)
        )
        for s in range(n)
    ]


def gae(rewards, values, bootstrap, gammas, *, lam):
    n = len(rewards)
    following = [*values[1:], bootstrap]
    delta = [rewards[t] + gammas[t] * following[t] - values[t] for t in range(n)]
    return [sum(discount(gammas, s, t) * lam ** (t - s) * delta[t] for t in range(s, n)) for s in range(n)]


def n_step(rewards, values, bootstrap, gammas, *, n, use_bootstrap=True):
    length = len(rewards)
    following = [*values, bootstrap]
    out = []
    for s in range(length):
        k = min(n, length - s)
        total = sum(discount(gammas, s, s + i) * rewards[s + i] for i in range(k))
        if use_bootstrap:
            total += discount(gammas, s, s + k) * following[s + k]
        out.append(total)
    return out


def td_lambda(rewards, values, bootstrap, gammas, *, lam):
    """(1 - lam) sum_n lam^{n-1} G^{(n)} + lam^{last} G^{full}: Sutton and Barto, eq. 12.3."""
    length = len(rewards)
    out = []
    for s in range(length):
        left = length - s
        returns = [n_step(rewards, values, bootstrap, gammas, n=k)[s] for k in range(1, left + 1)]
        mixed = sum((1 - lam) * lam ** (k - 1) * returns[k - 1] for k in range(1, left))
        out.append(mixed + lam ** (left - 1) * returns[-1])
    return out


def clipped_is(log_ratios, rewards, values, bootstrap, gammas, *, eps):
    n = len(rewards)
    returns = [
        sum(discount(gammas, s, t) * rewards[t] for t in range(s, n)) + discount(gammas, s, n) * bootstrap
        for s in range(n)
    ]
    ratios = [clamp(math.exp(clamp(x)), 1 - eps, 1 + eps) for x in log_ratios]
    return returns, [w * g - v for w, g, v in zip(ratios, returns, values, strict=True)]


def critic_free(log_ratios, score, baseline, *, lam=1.0, rho_bar=1.0, c_bar=1.0, rho_bar_pg=None):
    n = len(log_ratios)
    rho = [math.exp(clamp(x)) for x in log_ratios]
    out = []
    for s in range(n):
        factor = 1.0
        if s < n - 1:
            factor = lam ** (n - s - 2) * prod(min(c_bar, rho[i]) for i in range(s + 1, n - 1))
            factor *= min(rho_bar, rho[n - 1])
        own = 1.0 if rho_bar_pg is None else min(rho_bar_pg, rho[s])
        out.append(own * factor * (score - baseline))
    return out


def segments(log_ratios, rewards, values, ids, bootstrap, gamma, *, lam, rho_bar, c_bar, rho_bar_pg, geometric):
    """Targets at the first token of each segment (0 elsewhere) and the advantage of every token."""
    order = sorted(set(ids))
    members = [[t for t in range(len(ids)) if ids[t] == name] for name in order]
    ell_seg = [clamp(sum(clamp(log_ratios[t]) for t in group)) for group in members]
    reward_seg = [sum(rewards[t] for t in group) for group in members]
    value_seg = [values[group[0]] for group in members]
    n = len(order)
    following = [*value_seg[1:], bootstrap]
    rho = [math.exp(x) for x in ell_seg]
    trace_log = [
        sum(clamp(log_ratios[t]) for t in group) / len(group) if geometric else x
        for group, x in zip(members, ell_seg, strict=True)
    ]
    c = [lam * min(c_bar, math.exp(x)) for x in trace_log]
    delta = [min(rho_bar, rho[t]) * (reward_seg[t] + gamma * following[t] - value_seg[t]) for t in range(n)]
    targets = [value_seg[s] + sum(gamma ** (t - s) * prod(c[s:t]) * delta[t] for t in range(s, n)) for s in range(n)]
    token_targets, token_advantages = [0.0] * len(ids), [0.0] * len(ids)
    for s, group in enumerate(members):
        after = targets[s + 1] if s + 1 < n else bootstrap
        own = 1.0 if rho_bar_pg is None else min(rho_bar_pg, rho[s])
        token_targets[group[0]] = targets[s]
        for t in group:
            token_advantages[t] = own * (reward_seg[s] + gamma * after - value_seg[s])
    return token_targets, token_advantages


def trace_length(log_ratios, *, lam, c_bar, kappa, leak):
    n = len(log_ratios)
    rhos = [math.exp(clamp(x) / kappa) for x in log_ratios]
    c = [lam * ((1 - leak) * rho + leak * min(c_bar, rho)) for rho in rhos]
    return sum(sum(prod(c[s : t + 1]) for t in range(s, n)) for s in range(n)) / n if n else 0.0
