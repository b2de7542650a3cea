"""Importance weights and rejection masks against verl's rollout correction.

Its statistics are of -log rho: the bounds of a `k1` rule, a pair like 0.5 and 2, hold for 1/rho there and for rho here.
Most of its bounds are their own reciprocals; where they are not, they are swapped below.
"""

import pytest
import torch

import streamrl.algorithms as alg
from bench import pieces

from .compare import agree, batches

DRIFT = 0.8
EDGE = {"none": 0.7, "sequence": 0.3, "geometric": 2e-3, "k3": 0.15}  # drift around the bounds of a preset


@pytest.mark.parametrize("name", [name for name in alg.CORRECTION_PRESETS])
def test_every_preset_means_what_verl_means_by_that_name(verl_config, verl_corrections, name):
    """Its own preset against ours: weights on the tokens it keeps, and which those are.

    0.999 and 1.001 are reciprocal up to 1e-6; no row here is that near to the bound.
    """
    spec, settings = alg.CORRECTION_PRESETS[name], getattr(verl_config.RolloutCorrectionConfig, name)()
    assert settings.bypass_mode == (spec.mode == "bypass")
    if spec.mode == "bypass":
        assert settings.loss_type == spec.surrogate
    kept = dropped = 0
    for rows in batches(drift=EDGE[spec.reject]):
        weights, modified, _ = verl_corrections.compute_rollout_correction_and_rejection_mask(
            rows.policy, rows.behavior, rows.mask.double(), settings.rollout_is, settings.rollout_is_threshold,
            settings.rollout_is_batch_normalize, settings.rollout_rs, settings.rollout_rs_threshold,
        )  # fmt: skip
        ours = alg.apply_correction(spec, rows.policy - rows.behavior, rows.mask)

        agree(ours.weights, rows.mask.double() if weights is None else weights.batch["rollout_is_weights"])
        assert torch.equal(ours.keep, modified.bool())
        kept, dropped = kept + int(ours.keep.sum()), dropped + int((rows.mask & ~ours.keep).sum())
    assert kept and (spec.reject == "none") == (dropped == 0)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_truncated_weights_agree_with_verl_normalized_or_not(verl_corrections, level, normalize):
    """Its mean divides by the count plus 1e-8."""
    for rows in batches(drift=DRIFT):
        theirs, _ = verl_corrections.compute_rollout_correction_weights(
            rows.log_ratios, rows.mask.double(), level, 1.5, normalize
        )
        function = alg.tis_weights if level == "token" else alg.seq_tis_weights
        ours = function(rows.log_ratios, rows.mask, cap=1.5)
        agree(alg.normalize_weights(ours, rows.mask, level=level) if normalize else ours, theirs, 1e-7)


def test_masked_weights_agree_with_the_two_sided_threshold_of_verl(verl_corrections):
    for rows in batches(drift=DRIFT):
        theirs, _ = verl_corrections.compute_rollout_correction_weights(
            rows.log_ratios, rows.mask.double(), "token", "0.6_1.8"
        )
        ones, behavior = torch.ones_like(rows.policy), rows.policy - rows.log_ratios
        agree(alg.mis(behavior, rows.policy, ones, rows.mask, low=0.6, high=1.8).losses, -rows.policy * theirs)


REJECTIONS = {
    "seq_sum_k1": ("0.25_2.0", lambda ell, mask: alg.seq_mis_keep(ell, mask, low=0.5, high=4.0)),
    "seq_mean_k1": ("0.5_1.25", lambda ell, mask: alg.geo_keep(ell, mask, low=0.8, high=2.0)),
    "seq_mean_k3": (0.25, lambda ell, mask: alg.k3_keep(ell, mask, bound=0.25)),
}


@pytest.mark.parametrize("rule", REJECTIONS)
def test_rejection_masks_agree_with_verl(verl_corrections, rule):
    threshold, keep = REJECTIONS[rule]
    kept = dropped = 0
    for rows in batches(drift=DRIFT):
        theirs, _ = verl_corrections.compute_rollout_rejection_mask(
            rows.log_ratios, rows.mask.double(), rule, threshold
        )
        ours = keep(rows.log_ratios, rows.mask)
        assert torch.equal(ours, theirs.bool())
        kept, dropped = kept + int(ours.sum()), dropped + int((rows.mask & ~ours).sum())
    assert kept and dropped


def test_effective_sample_size_of_truncated_weights_agrees_with_verl(verl_corrections):
    """Only of truncated weights: it caps whatever it gets, and weights zeroed by a rejection would count as samples."""
    for rows in batches(drift=DRIFT):
        weights, metrics = verl_corrections.compute_rollout_correction_weights(
            rows.log_ratios, rows.mask.double(), "token", 1.5
        )
        ours = pieces.effective_sample_size(weights, rows.mask)
        assert abs(float(ours) - metrics["rollout_is_eff_sample_size"]) < 1e-7


def test_mean_k3_agrees_with_the_off_policy_metrics_of_verl(verl_corrections):
    for rows in batches(drift=DRIFT):
        metrics = verl_corrections.compute_offpolicy_metrics(rows.policy, rows.behavior, rows.mask.double())
        stats = alg.sequence_stats(rows.policy - rows.behavior, rows.mask)
        per_token = (stats.k3_mean * stats.num_tokens).sum() / stats.num_tokens.sum()
        assert abs(float(per_token) - metrics["k3_kl"]) < 1e-7
