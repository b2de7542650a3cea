"""Every public function that takes a mask, called on `Rows`: the subject of the contract tests."""

import dataclasses
import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import streamrl.algorithms as alg
from bench import pieces

from .rows import Rows

EDGES = (0, 1, 3, 6)


def tensors(result: Any) -> list[Tensor]:
    """Whatever a function returns, as a flat list of tensors."""
    if isinstance(result, Tensor):
        return [result]
    if dataclasses.is_dataclass(result):
        return [t for f in dataclasses.fields(result) for t in tensors(getattr(result, f.name))]
    if isinstance(result, tuple):
        return [torch.tensor(result, dtype=torch.float64)]
    return [torch.tensor(result, dtype=torch.float64)]


def _v(r: Rows) -> tuple[Tensor, ...]:
    return r.behavior, r.policy, r.rewards, r.values, r.mask


def _s(r: Rows) -> tuple[Tensor, ...]:
    return r.behavior, r.policy, r.advantages, r.mask


LOSSES: dict[str, Callable[[Rows], Any]] = {
    "reinforce": lambda r: alg.reinforce(r.policy, r.advantages, r.mask, weights=r.weights),
    "reinforce plain": lambda r: alg.reinforce(r.policy, r.advantages, r.mask),
    "ppo_clip": lambda r: alg.ppo_clip(*_s(r)),
    "ppo_clip dual": lambda r: alg.ppo_clip(*_s(r), eps_high=0.28, dual_clip=1.5),
    "ppo_clip capped": lambda r: alg.ppo_clip(*_s(r), ratio_cap=1.4),
    "decoupled_ppo": lambda r: alg.decoupled_ppo(r.behavior, r.proximal, r.policy, r.advantages, r.mask, cap=1.2),
    "tis": lambda r: alg.tis(*_s(r), cap=1.5, floor=0.6),
    "tis low": lambda r: alg.tis(*_s(r), cap=0.8),
    "cispo": lambda r: alg.cispo(*_s(r)),
    "aipo": lambda r: alg.aipo(*_s(r)),
    "seq_tis": lambda r: alg.seq_tis(*_s(r)),
    "seq_tis geometric": lambda r: alg.seq_tis(*_s(r), cap=1.1, geometric=True),
    "mis": lambda r: alg.mis(*_s(r), low=0.7, high=1.5),
    "gspo": lambda r: alg.gspo(*_s(r), eps_low=0.2, eps_high=0.2),
    "gmpo": lambda r: alg.gmpo(*_s(r)),
    "topr": lambda r: alg.topr(*_s(r)),
    "sapo": lambda r: alg.sapo(*_s(r)),
    "vespo": lambda r: alg.vespo(*_s(r)),
    "oapl": lambda r: alg.oapl(*_s(r), beta=0.5),
    "flash_reinforce": lambda r: alg.flash_reinforce(*_s(r), delta=0.2),
    "m2po": lambda r: alg.m2po(*_s(r)),
    "dppo_tv": lambda r: alg.dppo_tv(*_s(r), bound_low=0.08, bound_high=0.2, cap=1.5),
    "dppo_kl": lambda r: alg.dppo_kl(*_s(r), bound_low=0.02, bound_high=0.1, cap=None),
    "behavior_penalty": lambda r: alg.behavior_penalty(r.behavior, r.policy, r.mask),
    "kl_estimate k1": lambda r: alg.kl_estimate(r.policy, r.reference, r.mask, kind="k1"),
    "kl_estimate k2": lambda r: alg.kl_estimate(r.policy, r.reference, r.mask, kind="k2"),
    "kl_estimate k3": lambda r: alg.kl_estimate(r.policy, r.reference, r.mask),
    **{
        f"kl_loss {kind}": lambda r, kind=kind: alg.kl_loss(r.behavior, r.policy, r.reference, r.mask, kind=kind)
        for kind in ("k2_is", "k1_is", "k3_is", "k2", "k3", "k1+", "k3+")
    },
}


def _entry(name: str) -> Callable[[Rows], Any]:
    """A surrogate of the table with its usual knobs."""
    entry = alg.SURROGATE_ENTRIES[name]
    return lambda r: entry({
        "policy_logprobs": r.policy, "behavior_logprobs": r.behavior, "proximal_logprobs": r.proximal,
        "anchor_logprobs": r.behavior, "advantages": r.advantages, "mask": r.mask, "lags": r.lags,
    })


# An entry of the table is called by every test of this catalog, listed above or not.
_LISTED = {key.split(" ")[0] for key in LOSSES}
LOSSES |= {name: _entry(name) for name in alg.SURROGATE_ENTRIES if name not in _LISTED}

DETACHED: dict[str, Callable[[Rows], Any]] = {
    "place_terminal": lambda r: alg.place_terminal(r.scores, r.mask),
    "broadcast_rows": lambda r: alg.broadcast_rows(r.scores, r.mask),
    "reward_to_go": lambda r: alg.reward_to_go(r.rewards, r.mask),
    "reward_to_go gamma": lambda r: alg.reward_to_go(r.rewards, r.mask, gamma=r.gamma),
    "moments": lambda r: alg.moments(r.advantages, r.mask),
    "whiten": lambda r: alg.whiten(r.advantages, r.mask),
    "log_ratios": lambda r: alg.log_ratios(r.behavior, r.policy, r.mask),
    "token_log_ratios": lambda r: alg.token_log_ratios(r.behavior, r.policy, r.mask),
    "sequence_stats": lambda r: alg.sequence_stats(r.log_ratios, r.mask),
    "effective_sample_size": lambda r: pieces.effective_sample_size(r.weights, r.mask),
    "ess_report": lambda r: pieces.ess_report(r.log_ratios, r.mask, keep=r.keep),
    "trace_length": lambda r: alg.trace_length(r.log_ratios, r.mask, lam=0.9, trace_temperature=2.0),
    "tis_weights": lambda r: alg.tis_weights(r.log_ratios, r.mask, cap=1.5, floor=0.5),
    "seq_tis_weights": lambda r: alg.seq_tis_weights(r.log_ratios, r.mask),
    "seq_mis_keep": lambda r: alg.seq_mis_keep(r.log_ratios, r.mask),
    "geo_keep": lambda r: alg.geo_keep(r.log_ratios, r.mask, low=0.8, high=1.2),
    "geo_keep rows": lambda r: alg.geo_keep(r.log_ratios, r.mask, low=r.scores - r.scores, high=1.2 + 0 * r.scores),
    "k3_keep": lambda r: alg.k3_keep(r.log_ratios, r.mask, bound=0.2),
    "veto_keep": lambda r: alg.veto_keep(r.log_ratios, r.mask, low=0.4, high=3.0),
    "veto_keep suffix": lambda r: alg.veto_keep(r.log_ratios, r.mask, low=0.0, high=9.0, kl=0.2, suffix=True),
    "opsm_keep": lambda r: alg.opsm_keep(r.log_ratios, r.advantages, r.mask, delta=0.2),
    "normalize_weights": lambda r: alg.normalize_weights(r.weights, r.mask),
    "normalize_weights sequence": lambda r: alg.normalize_weights(r.weights, r.mask, level="sequence"),
    **{
        f"apply_correction {name}": lambda r, spec=spec: alg.apply_correction(spec, r.log_ratios, r.mask)
        for name, spec in alg.CORRECTION_PRESETS.items()
    },
    "vtrace": lambda r: alg.vtrace(*_v(r), bootstrap_values=r.bootstrap, gamma=0.9, lam=0.95),
    "vtrace knobs": lambda r: alg.vtrace(
        *_v(r),
        bootstrap_values=r.bootstrap,
        gamma=r.gamma,
        rho_bar=2.0,
        rho_bar_pg=1.5,
        trace_temperature=3.0,
        leak=0.4,
    ),
    "vtrace_segments": lambda r: alg.vtrace_segments(
        *_v(r), r.segment_ids, bootstrap_values=r.bootstrap, gamma=0.9, rho_bar_pg=1.0
    ),
    "vtrace_segments geometric": lambda r: alg.vtrace_segments(
        *_v(r), r.segment_ids, bootstrap_values=r.bootstrap, trace="geometric"
    ),
    "vtrace_critic_free": lambda r: alg.vtrace_critic_free(
        r.behavior, r.policy, r.scores, r.baselines, r.mask, rho_bar=2.0, rho_bar_pg=1.0, lam=0.9
    ),
    "retrace_v": lambda r: alg.retrace_v(*_v(r), bootstrap_values=r.bootstrap, gamma=r.gamma, target_rho_bar=1.0),
    "retrace_q": lambda r: alg.retrace_q(
        r.behavior,
        r.policy,
        r.rewards,
        r.values,
        r.expected_q,
        r.mask,
        bootstrap_values=r.bootstrap,
        gamma=0.9,
        lam=0.9,
    ),
    "gae": lambda r: alg.gae(r.rewards, r.values, r.mask, bootstrap_values=r.bootstrap, gamma=r.gamma, lam=0.9),
    "td_lambda": lambda r: alg.td_lambda(r.rewards, r.values, r.mask, bootstrap_values=r.bootstrap, gamma=0.9, lam=0.9),
    "n_step": lambda r: alg.n_step(r.rewards, r.values, r.mask, bootstrap_values=r.bootstrap, gamma=r.gamma, n=3),
    "n_step long": lambda r: alg.n_step(
        r.rewards, r.values, r.mask, bootstrap_values=r.bootstrap, gamma=r.gamma, n=50, bootstrap=False
    ),
    "clipped_is": lambda r: alg.clipped_is(*_v(r), bootstrap_values=r.bootstrap, gamma=0.9),
    "score_square_norms": lambda r: alg.score_square_norms(r.token_probs, r.token_probs.square(), r.mask),
    "reinforce_pp_advantages": lambda r: alg.reinforce_pp_advantages(r.rewards, r.mask, gamma=0.9),
    "loglinear_proximal": lambda r: alg.loglinear_proximal(r.behavior, r.policy, r.lags, r.mask),
    "kl_shaped_rewards": lambda r: alg.kl_shaped_rewards(r.rewards, r.policy, r.reference, r.mask, beta=0.1),
    "token_lags": lambda r: alg.token_lags(r.versions, 16, r.mask),
    "lag_summary": lambda r: alg.lag_summary(r.versions, 16, r.mask),
    "lag_keep": lambda r: alg.lag_keep(r.lags, r.mask, max_lag=3),
    "lag_weights": lambda r: alg.lag_weights(r.lags, r.mask, max_lag=3, decay=0.5),
    "drift_bins": lambda r: pieces.drift_bins(r.log_ratios, r.lags, r.mask, edges=EDGES),
    "clip_from_budget": lambda r: alg.clip_from_budget(r.log_ratios, r.advantages, r.mask),
    "zscore_keep": lambda r: alg.zscore_keep(r.log_ratios, r.advantages, r.lag_m2, r.mask),
    "rho_bar_for_ess": lambda r: alg.rho_bar_for_ess(r.log_ratios, r.mask, ess_target=0.8),
}

OTHER_DIFFERENTIABLE: dict[str, Callable[[Rows], Any]] = {
    "value_loss": lambda r: alg.value_loss(r.values, r.targets, r.mask),
    "value_loss clip": lambda r: alg.value_loss(r.values, r.targets, r.mask, old_values=r.old_values, clip=0.5),
    "aggregate": lambda r: alg.aggregate(r.losses, r.mask, keep=r.keep),
    "aggregate rows": lambda r: alg.aggregate(r.losses, r.mask, row_weights=r.scores),
    **{
        f"aggregate {mode}": lambda r, mode=mode: alg.aggregate(
            r.losses, r.mask, mode=mode, group_ids=r.group_ids, max_tokens=7
        )
        for mode in (
            "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "prompt-mean",
        )
    },
}  # fmt: skip

PUBLIC_NAMES = sorted(
    name
    for module in pkgutil.walk_packages(alg.__path__, f"{alg.__name__}.")
    for name in getattr(importlib.import_module(module.name), "__all__", ())
)

EVERYTHING = {**LOSSES, **DETACHED, **OTHER_DIFFERENTIABLE}


def close(left: Tensor, right: Tensor, tolerance: float) -> bool:
    """Equal shapes, and equal values within a tolerance relative to their size; inf equals inf."""
    return left.shape == right.shape and torch.allclose(
        left.double(), right.double(), rtol=tolerance, atol=tolerance, equal_nan=False
    )
