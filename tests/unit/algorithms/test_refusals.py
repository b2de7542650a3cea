"""Impossible knobs and wrong shapes: each is refused by a sentence that names what was got."""

import pytest
import torch

import streamrl.algorithms as alg
from bench import pieces
from tests.kit.each import each

from .rows import random_rows

ROWS = random_rows(0)
ZERO, ONE = torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool)
SCORES, IDS = torch.arange(14.0), torch.arange(14) % 4
LINEAR = alg.DriftModel((0.0, 1.0), (1e3, 1e3), (0.0, 0.001), (0.0, 0.0))
FIT = alg.DriftFit(0, 1, 1, 0)
STATE = alg.KlState(0.2)
LOGITS, TOKENS = torch.zeros(3, 5, 7), torch.zeros(3, 5, dtype=torch.int64)


def of_returns(function, **knobs):
    """An estimator of rewards and values alone."""
    return lambda r: function(r.rewards, r.values, r.mask, bootstrap_values=r.bootstrap, **knobs)


def on_values(function, **knobs):
    """An estimator of the recorded and the learner's log-probs, rewards and values."""
    return lambda r: function(
        r.behavior, r.policy, r.rewards, r.values, r.mask, bootstrap_values=r.bootstrap, **knobs
    )


def on_segments(**knobs):
    return lambda r: alg.vtrace_segments(
        r.behavior, r.policy, r.rewards, r.values, r.mask, r.segment_ids, bootstrap_values=r.bootstrap, **knobs
    )


def surrogate(name, **knobs):
    return lambda r: alg.SURROGATES[name](r.behavior, r.policy, r.advantages, r.mask, **knobs)


def aggregate(**knobs):
    return lambda r: alg.aggregate(r.losses, r.mask, **knobs)


def bins(count):
    return alg.DriftModel((0.0,) * count, (1000.0,) * count, (0.0,) * count, (0.0,) * count)


REFUSED = [
    # estimators
    (on_values(alg.vtrace, rho_bar=1.0, c_bar=2.0), "c_bar=2.0 and rho_bar=1.0"),
    (on_values(alg.vtrace, lam=1.5), "lam=1.5"),
    (on_values(alg.vtrace, gamma=-0.1), "gamma=-0.1"),
    (on_values(alg.vtrace, leak=2.0), "leak=2.0"),
    (on_values(alg.vtrace, trace_temperature=0.0), "trace_temperature=0.0"),
    (on_values(alg.vtrace, rho_bar_pg=0.0), "rho_bar_pg=0.0"),
    (on_values(alg.retrace_v, lam=-1.0), "lam=-1.0"),
    (on_values(alg.retrace_v, target_rho_bar=-1.0), "target_rho_bar=-1.0"),
    (on_values(alg.clipped_is, eps=-0.1), "eps=-0.1"),
    (of_returns(alg.gae, target_lam=1.5), "target_lam=1.5"),
    (of_returns(alg.gae, length_alpha=0.0), "length_alpha=0.0"),
    (of_returns(alg.gae, length_alpha=0.05, lam=0.9), "length_alpha=0.05 .* lam=0.9"),
    (on_segments(trace="mean"), "trace="),
    (on_segments(gamma=ROWS.gamma), "gamma"),
    (of_returns(alg.n_step, n=0), "n=0"),
    (lambda r: alg.value_loss(r.values, r.targets, r.mask, clip=0.2), "old_values and clip"),
    (lambda r: alg.dueling_q(r.values, LOGITS, LOGITS[..., 1:], TOKENS), r"\[3, 5, 7\].*\[3, 5, 6\]"),
    (lambda r: alg.grpo_advantages(SCORES, IDS[:-1]), r"group_ids has shape \[13\] but scores has shape \[14\]"),
    (lambda r: alg.leave_one_out(SCORES, IDS, weights=SCORES[:-1]), r"weights has shape \[13\]"),
    (lambda r: alg.opob(SCORES, IDS, SCORES[:-1], SCORES), r"weights has shape \[13\]"),
    (lambda r: alg.gdpo_advantages(SCORES[:, None], IDS, SCORES), r"\[14, 1\].*\[14\]"),
    (lambda r: alg.group_advantages(SCORES, IDS, scale="max"), "scale='max'"),
    (lambda r: alg.optimal_advantages(SCORES, IDS, beta=0.0), "beta=0.0"),
    (lambda r: alg.group_advantages(SCORES, IDS, baseline="max"), "baseline='max'"),
    # surrogates, corrections and their aggregation
    (surrogate("ppo_clip", eps_low=-0.1), "eps_low=-0.1"),
    (surrogate("ppo_clip", eps_low=1.5), "eps_low=1.5"),
    (surrogate("ppo_clip", dual_clip=0.5), "dual_clip=0.5"),
    (surrogate("ppo_clip", ratio_cap=1.1), "ratio_cap=1.1"),
    (surrogate("tis", cap=1.0, floor=2.0), "floor=2.0 and cap=1.0"),
    (surrogate("seq_tis", cap=0.0), "cap=0.0"),
    (surrogate("mis", low=3.0, high=2.0), "low=3.0 and high=2.0"),
    (surrogate("gmpo", log_clip=0.0), "log_clip=0.0"),
    (surrogate("topr", cap=-1.0), "cap=-1.0"),
    (surrogate("sapo", tau_pos=0.0), "tau_pos=0.0"),
    (surrogate("vespo", lam_neg=-1.0), "lam_neg=-1.0"),
    (surrogate("oapl", beta=0.0), "beta=0.0"),
    (surrogate("flash_reinforce", delta=-1.0), "delta=-1.0"),
    (surrogate("m2po", budget=-1.0), "budget=-1.0"),
    (surrogate("dppo_tv", bound_low=-1.0), "bound_low=-1.0"),
    (surrogate("dppo_tv", cap=0.0), "cap=0.0"),
    (surrogate("dppo_kl"), "bound"),  # it has no default
    (lambda r: alg.tis_weights(r.log_ratios, r.mask, cap=1.0, floor=2.0), "floor=2.0 and cap=1.0"),
    (lambda r: alg.seq_tis_weights(r.log_ratios, r.mask, cap=0.0), "cap=0.0"),
    (lambda r: alg.seq_mis_keep(r.log_ratios, r.mask, low=-1.0), "low=-1.0"),
    (lambda r: alg.geo_keep(r.log_ratios, r.mask, low=r.scores[:-1]), r"low has shape \[5\]"),
    (lambda r: alg.k3_keep(r.log_ratios, r.mask, bound=-1.0), "bound=-1.0"),
    (lambda r: alg.normalize_weights(r.weights, r.mask, level="row"), "level='row'"),
    (lambda r: alg.apply_correction(alg.CorrectionSpec(weight="row"), r.log_ratios, r.mask), "weight='row'"),
    (lambda r: alg.apply_correction(alg.CorrectionSpec(reject="row"), r.log_ratios, r.mask), "reject='row'"),
    (lambda r: alg.log_ratios(r.behavior, r.policy, r.mask, bound=0.0), "bound=0.0"),
    (lambda r: alg.trace_length(r.log_ratios, r.mask, lam=2.0), "lam=2.0"),
    (lambda r: alg.trace_length(r.log_ratios, r.mask, c_bar=0.0), "c_bar=0.0"),
    (lambda r: alg.trace_length(r.log_ratios, r.mask, trace_temperature=0.0), "trace_temperature=0.0"),
    (aggregate(mode="mean"), "mode='mean'"),
    (aggregate(mode="prompt-mean"), "group_ids"),
    (aggregate(mode="seq-mean-token-sum-norm"), "max_tokens"),
    (aggregate(mode="seq-mean-token-sum-norm", max_tokens=0), "max_tokens=0"),
    (aggregate(row_weights=torch.ones(3)), r"row_weights has shape \[3\]"),
    (aggregate(mode="prompt-mean", group_ids=torch.ones(3)), r"group_ids has shape \[3\]"),
    # KL, constraints and their controllers
    (lambda r: alg.kl_estimate(r.policy, r.reference, r.mask, kind="k4"), "kind='k4'"),
    (lambda r: alg.kl_loss(r.behavior, r.policy, r.reference, r.mask, kind="k1"), "kind='k1'"),
    (lambda r: alg.kl_loss(r.behavior, r.policy, r.reference, r.mask, cap=0.0), "cap=0.0"),
    (lambda r: alg.kl_shaped_rewards(r.rewards, r.policy, r.reference, r.mask, beta=-1.0), "beta=-1.0"),
    (lambda r: alg.kl_exponential(STATE, 0.1, target=0.0), "target=0.0"),
    (lambda r: alg.kl_linear(STATE, 0.1, low=2.0, high=1.0), "low=2.0 and high=1.0"),
    (lambda r: alg.kl_pid(STATE, 0.1, integral_bound=-1.0), "integral_bound=-1.0"),
    (lambda r: alg.kl_horizon(STATE, 0.1, num_trajectories=1, horizon=0), "horizon=0"),
    (lambda r: alg.kl_schedule(1, kind="step"), "kind='step'"),
    (lambda r: alg.kl_schedule(1, num_steps=0), "num_steps=0"),
    (lambda r: alg.entropy_coef_update(0.1, 0.1, target=0.1, low=2.0), "low=2.0"),
    (lambda r: alg.clip_high_update(0.1, 0.1, target=0.1, low=2.0), "low=2.0"),
    (lambda r: alg.constraint_penalty(0.1, 0.1, sense="less"), "sense='less'"),
    (lambda r: alg.constraint_penalty(torch.zeros(2), 0.1), r"value has shape \[2\]"),
    (lambda r: alg.constraint_penalty(0.1, 0.1, weight=-1.0), "weight=-1.0"),
    (lambda r: alg.lagrangian_update(alg.ConstraintState(), 0.1, 0.1, high=-1.0), "high=-1.0"),
    (lambda r: alg.pid_lagrangian_update(alg.ConstraintState(), 0.1, 0.1, high=-1.0), "high=-1.0"),
    # staleness
    (lambda r: alg.lag_for_ess(FIT, ess_target=0.0, num_effective_tokens=1), "ess_target=0.0"),
    (lambda r: alg.lag_for_ess(FIT, num_effective_tokens=0), "num_effective_tokens=0"),
    (lambda r: alg.step_lag_bound(alg.LagBound(1.0, 1), 1.0, low=3, high=2), "low=3 and high=2"),
    (lambda r: alg.step_goodput(alg.GoodputState(1), 1.0, num_steps=1), "num_steps=1"),
    (lambda r: alg.lr_scale(0.5, rule="cube"), "rule='cube'"),
    (lambda r: alg.lr_scale(0.5, floor=2.0), "floor=2.0"),
    (lambda r: alg.spread_budget(LINEAR, m2_target=0.0), "m2_target=0.0"),
    (lambda r: alg.should_publish(0.1, m2_target=0.0), "m2_target=0.0"),
    (lambda r: alg.rho_bar_for_ess(ZERO, ONE, low=2.0, high=1.0), "low=2.0 and high=1.0"),
    (lambda r: alg.clip_from_budget(ZERO, ZERO, ONE, floor_low=2.0), "floor_low=2.0"),
    (lambda r: alg.zscore_keep(ZERO, ZERO, ZERO, ONE, z_bound=0.0), "z_bound=0.0"),
    (lambda r: alg.update_drift(None, bins(1), half_life=0.0), "half_life=0.0"),
    (lambda r: alg.update_drift(bins(1), bins(2)), "1 bins but the batch has 2"),
    (lambda r: alg.predict_m2(bins(1), -1.0), "lag=-1.0"),
    (lambda r: alg.predict_m2(alg.DriftModel((0.0,), (0.0,), (0.0,), (0.0,)), 1.0), "no tokens"),
    (lambda r: alg.oscillation(bins(1), -1.0), "lag=-1.0"),
    (lambda r: alg.lag_keep(ZERO, ONE, max_lag=-1), "max_lag=-1"),
    (lambda r: alg.lag_weights(ZERO, ONE, max_lag=1, decay=2.0), "decay=2.0"),
    (lambda r: alg.split_by_lag(torch.zeros(2), torch.zeros(2), budget=-1), "budget=-1"),
    # scores
    (lambda r: alg.weighted_sum(torch.zeros(3, 2), torch.zeros(3)), r"\[3\].*\[3, 2\]"),
    (lambda r: alg.tchebycheff(torch.zeros(3, 2), torch.zeros(2), torch.zeros(3)), r"ideal has shape \[3\]"),
    (lambda r: alg.domination_count(torch.zeros(3)), r"\[3\]"),
    (lambda r: alg.hypervolume(torch.zeros(3, 5), torch.zeros(5)), "K=5"),
    (lambda r: alg.hypervolume(torch.zeros(3, 2), torch.zeros(3)), r"reference has shape \[3\]"),
    (lambda r: alg.overlong_penalty(torch.zeros(2), max_tokens=4, cache_tokens=5), "cache_tokens=5 and max_tokens=4"),
    (lambda r: alg.overlong_penalty(torch.zeros(2, 2), max_tokens=4, cache_tokens=1), r"\[2, 2\]"),
    # the experiments' pieces
    (lambda r: pieces.token_logprobs(LOGITS, TOKENS, temperature=0.0), "temperature=0.0"),
    (lambda r: pieces.token_logprobs(LOGITS, TOKENS, temperature=torch.ones(2)), r"\[2\]"),
    (lambda r: pieces.token_logprobs(LOGITS, TOKENS, chunk=0), "chunk=0"),
    (lambda r: pieces.token_logprobs(LOGITS, TOKENS[:, :-1]), r"\[3, 4\].*\[3, 5, 7\]"),
    (lambda r: pieces.ess_report(r.log_ratios, r.mask, cap=0.0), "cap=0.0"),
    (lambda r: pieces.effective_sample_size(torch.ones(3), torch.ones(2, dtype=torch.bool)), r"\[2\].*\[3\]"),
    (lambda r: pieces.drift_bins(r.log_ratios, r.lags, r.mask, edges=(0,)), r"edges=\[0\]"),
    (lambda r: pieces.drift_bins(r.log_ratios, r.lags, r.mask, edges=(0, 2, 2)), "edges"),
    (lambda r: pieces.predict_ess(-1.0, 3), "m2=-1.0"),
]


@each("case", REFUSED)
def test_what_is_impossible_is_refused_by_name(case):
    call, message = case
    with pytest.raises((ValueError, TypeError), match=message):
        call(ROWS)
