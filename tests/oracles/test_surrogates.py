"""Policy losses against rlax and verl: every loss in value and in its gradient by each token's log-prob.

verl returns one number, aggregated by its `agg_loss`; ours is aggregated by `aggregate` in the mode of the same name.
Drift is large enough that every clip acts on some tokens.
"""

import pytest
import torch

import streamrl.algorithms as alg

from .compare import agree, batches, same_loss

DRIFT = 1.2
ROW_MEAN = 1e-7  # verl divides the mean of a row by its token count plus 1e-8


def against(verl_loss, config, surrogate, *, mode="token-mean", **knobs):
    """verl's loss and `surrogate` under `knobs` agree on every batch; returns how many tokens the clip acted on."""
    acted, within = 0, ROW_MEAN if mode == "seq-mean-token-mean" else 1e-9
    for rows in batches(drift=DRIFT):

        def ours(leaf, rows=rows):
            return alg.aggregate(
                surrogate(rows.behavior, leaf, rows.advantages, rows.mask, **knobs).losses, rows.mask, mode=mode
            )

        def theirs(leaf, rows=rows):
            return verl_loss(rows.behavior, leaf, rows.advantages, rows.mask.double(), mode, config)[0]

        same_loss(ours, theirs, rows.policy, within)
        acted += int(surrogate(rows.behavior, rows.policy, rows.advantages, rows.mask, **knobs).clipped.sum())
    return acted


def test_ppo_clip_agrees_with_rlax(rlax):
    """Its clip is symmetric, its result the mean over the tokens it sees, its input the ratios."""
    import jax

    value_and_slope = jax.value_and_grad(rlax.clipped_surrogate_pg_loss)
    for rows in batches(drift=DRIFT):
        leaf = rows.policy.clone().requires_grad_()
        loss = alg.aggregate(alg.ppo_clip(rows.behavior, leaf, rows.advantages, rows.mask).losses, rows.mask)
        loss.backward()
        ratios = (rows.policy - rows.behavior).exp()[rows.mask]
        value, slope = value_and_slope(ratios.numpy(), rows.advantages[rows.mask].numpy(), 0.2)
        agree(loss, value)
        agree(leaf.grad[rows.mask], torch.from_numpy(slope.__array__().copy()) * ratios)  # d ratio / d log pi = ratio


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
def test_ppo_clip_with_dual_clip_agrees_with_verl(verl, verl_actor, mode):
    """Dual clip is on there, at 3."""
    config = verl_actor(clip_ratio_low=0.2, clip_ratio_high=0.28)
    knobs = {"eps_low": 0.2, "eps_high": 0.28, "dual_clip": 3.0}
    assert against(verl.compute_policy_loss_vanilla, config, alg.ppo_clip, mode=mode, **knobs)


def test_decoupled_ppo_agrees_with_verl_given_its_truncated_weights(verl, verl_actor, verl_corrections):
    """pi_prox is its `old_log_prob`; the weights pi_prox/mu come from its own rollout correction."""
    config = verl_actor(clip_ratio_c=1e9)
    for rows in batches(drift=DRIFT):
        mask = rows.mask.double()
        staleness = rows.proximal - rows.behavior
        weights, _ = verl_corrections.compute_rollout_correction_weights(staleness, mask, "token", 2.0)

        def ours(leaf, rows=rows):
            out = alg.decoupled_ppo(rows.behavior, rows.proximal, leaf, rows.advantages, rows.mask, cap=2.0)
            return alg.aggregate(out.losses, rows.mask)

        def theirs(leaf, rows=rows, mask=mask, weights=weights):
            return verl.compute_policy_loss_vanilla(
                rows.proximal, leaf, rows.advantages, mask, "token-mean", config, rollout_is_weights=weights
            )[0]

        same_loss(ours, theirs, rows.policy)


def test_gspo_agrees_with_verl(verl, verl_actor):
    config, knobs = verl_actor(clip_ratio_low=0.1, clip_ratio_high=0.15), {"eps_low": 0.1, "eps_high": 0.15}
    assert against(verl.compute_policy_loss_gspo, config, alg.gspo, mode="seq-mean-token-mean", **knobs)


@pytest.mark.parametrize(("low", "high"), [(1.0, 4.0), (0.5, 1.0)])
def test_cispo_agrees_with_verl(verl, verl_actor, low, high):
    """Its bounds are 1 - low and 1 + high; low 1 is the one-sided form."""
    config, knobs = verl_actor(clip_ratio_low=low, clip_ratio_high=high), {"floor": 1 - low, "cap": 1 + high}
    assert against(verl.compute_policy_loss_cispo, config, alg.cispo, **knobs)
    assert against(verl.compute_policy_loss_cispo, config, alg.tis, **knobs)


def test_sapo_agrees_with_verl(verl, verl_actor):
    config = verl_actor(tau_pos=1.0, tau_neg=1.05)
    against(verl.compute_policy_loss_sapo, config, alg.sapo, mode="seq-mean-token-mean")


@pytest.mark.parametrize("cap", [20.0, 2.0])
def test_dppo_by_total_variation_agrees_with_verl(verl, verl_actor, cap):
    """Its default cap of 20 only holds where the configuration has no `clip_ratio_c`, and the actor's has one: 3."""
    config = verl_actor(clip_ratio_low=0.15, clip_ratio_high=0.1, clip_ratio_c=cap)
    knobs = {"bound_low": 0.15, "bound_high": 0.1, "cap": cap}
    assert against(verl.compute_policy_loss_dppo_tv, config, alg.dppo_tv, **knobs)


def test_dppo_by_kl_agrees_with_verl(verl, verl_actor):
    """It adds 1e-8 inside the logarithm of the second term; only a token within that of the bound could differ."""
    config = verl_actor(clip_ratio_low=0.05, clip_ratio_high=0.02, clip_ratio_c=20.0)
    knobs = {"bound_low": 0.05, "bound_high": 0.02, "cap": 20.0}
    assert against(verl.compute_policy_loss_dppo_kl, config, alg.dppo_kl, **knobs)


def test_gmpo_agrees_with_verl(verl, verl_actor):
    """It averages the advantages of a row, so they are constant here, and counts empty rows, so there are none."""
    config = verl_actor(clip_ratio_low=0.4, clip_ratio_high=0.4)
    for rows in batches(drift=DRIFT):
        occupied = rows.mask.any(1)
        behavior, policy, mask = rows.behavior[occupied], rows.policy[occupied], rows.mask[occupied]
        advantages = rows.scores[occupied, None].expand(mask.shape)

        def ours(leaf, behavior=behavior, advantages=advantages, mask=mask):
            out = alg.gmpo(behavior, leaf, advantages, mask, log_clip=0.4)
            return alg.aggregate(out.losses, mask, mode="seq-mean-token-mean")

        def theirs(leaf, behavior=behavior, advantages=advantages, mask=mask):
            return verl.compute_policy_loss_geo_mean(behavior, leaf, advantages, mask.double(), config=config)[0]

        same_loss(ours, theirs, policy, ROW_MEAN)


def test_reinforce_with_given_weights_agrees_with_verl(verl, verl_actor):
    config = verl_actor()
    for rows in batches(drift=DRIFT):

        def ours(leaf, rows=rows):
            losses = alg.reinforce(leaf, rows.advantages, rows.mask, weights=rows.weights).losses
            return alg.aggregate(losses, rows.mask, mode="seq-mean-token-sum")

        def theirs(leaf, rows=rows):
            return verl.compute_policy_loss_reinforce(
                rows.behavior, leaf, rows.advantages, rows.mask.double(), "seq-mean-token-sum", config, rows.weights
            )[0]

        same_loss(ours, theirs, rows.policy)


BYPASS = [name for name, spec in alg.CORRECTION_PRESETS.items() if spec.mode == "bypass"]
EDGE = {"none": 0.7, "geometric": 2e-3, "k3": 0.15}  # drift at which the preset's bounds keep some rows and drop others


@pytest.mark.parametrize("name", BYPASS)
def test_bypass_presets_agree_with_the_presets_of_that_name_in_verl(verl, verl_actor, verl_config, name):
    """There, rejected tokens also leave the denominator unless the batch's token count is given, as it is here; ours
    always keeps them in it.
    """
    spec, kept, dropped = alg.CORRECTION_PRESETS[name], 0, 0
    policy_loss = verl_config.PolicyLossConfig(rollout_correction=getattr(verl_config.RolloutCorrectionConfig, name)())
    for rows in batches(drift=EDGE[spec.reject]):
        found = alg.apply_correction(spec, rows.policy - rows.behavior, rows.mask)
        counts = {"batch_num_tokens": int(rows.mask.sum())}
        config = verl_actor(clip_ratio_c=1e9, policy_loss=policy_loss, global_batch_info=counts)

        def ours(leaf, rows=rows, found=found):
            if spec.surrogate == "ppo_clip":
                losses = alg.ppo_clip(rows.behavior, leaf, rows.advantages, rows.mask).losses
            else:
                losses = alg.reinforce(leaf, rows.advantages, rows.mask, weights=found.weights).losses
            return alg.aggregate(losses, rows.mask, keep=found.keep)

        def theirs(leaf, rows=rows, config=config):
            mask = rows.mask.double()
            return verl.compute_policy_loss_bypass_mode(
                rows.behavior, leaf, rows.advantages, mask, "token-mean", config
            )[0]

        same_loss(ours, theirs, rows.policy)
        kept, dropped = kept + int(found.keep.sum()), dropped + int((rows.mask & ~found.keep).sum())
    assert kept and (spec.reject == "none" or dropped)
