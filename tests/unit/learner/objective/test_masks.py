"""Guards, corrections and anchors: which tokens they take out, which weights they put in, and on whose ratio."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from learner.data.packing import pack
from learner.model.gradients import BatchResult, StepResult
from learner.model.networks import FrozenPolicy, Networks
from learner.model.policy import load_policy
from learner.objective.loss import token_masks
from learner.objective.token_batch import LagPolicy, PassOutputs
from learner.trainer import Trainer, TrainerSettings
from streamrl.algorithms import CORRECTION_PRESETS, find_correction
from streamrl.config.schema import AdvantageConfig, LossConfig, OpsmWhen, VetoScope, VetoStat
from streamrl.errors import ConfigError
from streamrl.metrics.names import Reduction, lookup
from tests.kit.learning import OneBatch, batch, make_objective, plan_of
from tests.unit.learner.objective.test_objective import leave_one_out, num_tokens

OFF = LossConfig(veto_low=None, veto_high=None)
MASK = torch.tensor([[True, True, True], [True, True, False]])
LAGS = torch.tensor([[3, 1, 0], [0, 0, 0]])
LOG_RATIOS = torch.tensor([[-1.0, -0.8, -0.6], [0.1, -0.1, 0.0]])
GOOD, BAD = torch.ones(2, 3), -torch.ones(2, 3)


def kept(loss, advantages=GOOD, log_ratios=LOG_RATIOS, **lag_policy):
    tokens = SimpleNamespace(log_ratios=log_ratios, lags=LAGS, first_lags=LAGS, mask=MASK, micro=None)
    plan = SimpleNamespace(
        objective=SimpleNamespace(loss=loss, correction=find_correction(loss.correction)),
        lag_policy=LagPolicy(**lag_policy), tensors=SimpleNamespace(head_lags=torch.zeros(2, dtype=torch.int64)),
        of_rows=lambda per_row, micro: per_row,
    )
    return token_masks(tokens, plan, advantages)


def test_without_guards_every_action_token_stays():
    found = kept(OFF)
    assert torch.equal(found.keep, MASK) and found.removed == {} and found.weights is None


@pytest.mark.shows("loss.zscore_bound")
def test_each_guard_removes_its_tokens_and_says_so():
    cases = {
        "lag": (kept(OFF, mask_beyond=1), [[False, True, True], [True, True, False]]),
        "veto": (kept(replace(OFF, veto_low=0.4)), [[False] * 3, [True, True, False]]),
        "opsm": (kept(replace(OFF, opsm_delta=0.5), BAD), [[False] * 3, [True, True, False]]),
        "zscore": (kept(replace(OFF, zscore_bound=2.5), BAD, m2_by_lag=(0.09,)),
                   [[False, False, True], [True, True, False]]),
        "rejected": (kept(replace(OFF, correction="bypass_pg_geo_rs")), [[False] * 3, [True, True, False]]),
    }
    for cause, (found, expected) in cases.items():
        assert found.keep.tolist() == expected, cause
        assert torch.equal(found.removed[cause], MASK & ~found.keep), cause


def test_what_every_guard_removes_has_a_metric():
    for cause in ("lag", "veto", "opsm", "zscore", "rejected"):
        assert lookup(f"keep/{cause}").reduction is Reduction.mean


@pytest.mark.shows("loss.veto_stat")
def test_the_veto_looks_at_any_ratio_or_at_their_mean():
    """Ratios of the first row: 0.37, 0.45, 0.55."""
    loss = replace(OFF, veto_low=0.4)
    assert not kept(loss).keep[0].any()
    assert kept(replace(loss, veto_stat=VetoStat.mean)).keep[0].all()
    assert not kept(replace(loss, veto_low=0.5, veto_stat=VetoStat.mean)).keep[0].any()


@pytest.mark.shows("loss.veto_kl", "loss.veto_scope")
def test_the_veto_by_kl_drops_a_trajectory_or_what_follows_its_trigger():
    """KL estimates of the first row: 0.37, 0.25, 0.15; of the second at most 0.01."""
    assert kept(replace(OFF, veto_kl=0.4)).keep[0].all()
    assert kept(replace(OFF, veto_kl=0.3)).keep.tolist() == [[False] * 3, [True, True, False]]

    loss = replace(OFF, veto_low=0.4, veto_scope=VetoScope.suffix)
    late = LOG_RATIOS.flip(1)
    assert kept(loss, log_ratios=late).keep[0].tolist() == [True, True, False]
    assert not kept(replace(loss, veto_scope=VetoScope.trajectory), log_ratios=late).keep[0].any()


@pytest.mark.shows("loss.opsm_delta", "loss.opsm_when")
def test_sequence_masking_spares_good_trajectories_and_can_wait_for_drift():
    loss = replace(OFF, opsm_delta=0.5)
    assert torch.equal(kept(loss, GOOD).keep, MASK)
    waiting = replace(loss, opsm_when=OpsmWhen.over_budget)
    assert torch.equal(kept(waiting, BAD, drift_exceeded=False).keep, MASK)
    assert not torch.equal(kept(waiting, BAD, drift_exceeded=True).keep, MASK)


def step(rows, advantage=None, loss=OFF, *, drift=0.3, proximal=None, **options):
    """(gradient of each row's log-probs, statistics) with log-probs near the recorded ones."""
    made = make_objective(advantage or AdvantageConfig(estimator="group"), loss, **options)
    rng = np.random.default_rng(0)
    leaves = [
        torch.tensor(r.logprobs[r.mask] + drift * rng.standard_normal(r.num_action_tokens), dtype=torch.float32,
                     requires_grad=True) for r in rows
    ]
    one = OneBatch(made, rows, plan_of(rows), version=5)
    (micro,) = pack(rows, 10_000)
    if made.needs:
        policy = micro.padded(torch.cat([leaves[i] for i in micro.trajectory_ids]).detach())
        average = None if proximal is None else torch.where(micro.mask, micro.behavior_logprobs + proximal, 0.0)
        one.observe(micro, PassOutputs(policy=policy, proximal=average))
        one.close_observation()
    flat = torch.cat([leaves[i] for i in micro.trajectory_ids])
    one.loss(micro, flat, torch.ones_like(flat)).backward()
    return [x.grad for x in leaves], one.finish().flush(0), [x.detach() for x in leaves]


def ratios(rows, policy):
    return [(p - torch.from_numpy(r.logprobs[r.mask])).exp() for p, r in zip(policy, rows, strict=True)]


@pytest.mark.shows("loss.correction")
def test_a_bypass_weight_is_the_truncated_sequence_ratio_on_every_token():
    rows = batch()
    grads, _, policy = step(rows, loss=replace(OFF, surrogate="reinforce", correction="bypass_pg_is"))

    for grad, ratio, advantage in zip(grads, ratios(rows, policy), leave_one_out(rows), strict=True):
        expected = -float(ratio.prod().clamp(max=2.0)) * advantage / num_tokens(rows)
        torch.testing.assert_close(grad, torch.full_like(grad, expected), atol=1e-6, rtol=1e-4)


def test_a_decoupled_weight_and_a_clip_on_the_proximal_policy_make_one_ratio():
    """At the policy before the update the ratio pi/pi_prox is 1 and the weight is the truncated pi/mu."""
    rows = batch()
    loss = replace(OFF, surrogate="ppo_clip", anchor="recomputed", correction="decoupled_token_is", dual_clip=None)
    grads, _, policy = step(rows, loss=loss)

    for grad, ratio, advantage in zip(grads, ratios(rows, policy), leave_one_out(rows), strict=True):
        torch.testing.assert_close(grad, -ratio.clamp(max=2.0) * advantage / num_tokens(rows), atol=1e-6, rtol=1e-4)


@pytest.mark.shows("loss.anchor")
def test_an_averaged_anchor_clips_against_the_average_and_not_against_mu():
    rows = batch()
    loss = replace(OFF, surrogate="decoupled_ppo", anchor="ewma", dual_clip=None, clip_low=0.2, clip_high=0.2)
    grads, _, policy = step(rows, loss=loss, proximal=0.1)

    for grad, ratio, advantage in zip(grads, ratios(rows, policy), leave_one_out(rows), strict=True):
        own, weight = ratio / math.exp(0.1), math.exp(0.1)
        free = (own <= 1.2) if advantage > 0 else (own >= 0.8)
        expected = torch.where(free, -weight * own * advantage / num_tokens(rows), 0.0)
        torch.testing.assert_close(grad, expected, atol=1e-6, rtol=1e-4)


def test_rejected_tokens_stay_in_the_denominator():
    rows = batch()
    plain, _, _ = step(rows, loss=replace(OFF, surrogate="tis"))
    grads, stats, _ = step(rows, loss=replace(OFF, surrogate="tis", veto_low=0.7))

    assert 0 < stats["keep/veto"] < 1
    for mine, other in zip(grads, plain, strict=True):
        assert torch.count_nonzero(mine) == 0 or torch.allclose(mine, other)


@pytest.mark.parametrize("name", [name for name, spec in CORRECTION_PRESETS.items() if spec.mode])
def test_every_correction_preset_trains_with_the_surrogate_it_is_made_for(name):
    spec = CORRECTION_PRESETS[name]
    surrogate = spec.surrogate or "ppo_clip"
    decoupled = spec.mode == "decoupled"
    loss = replace(
        OFF, surrogate=surrogate, correction=name, anchor="recomputed" if decoupled else None, allow_uncorrected=True
    )
    rows = batch()
    grads, stats, _ = step(rows, loss=loss, drift=1e-4)

    assert all(torch.isfinite(g).all() for g in grads) and any(torch.count_nonzero(g) for g in grads)
    assert ("keep/rejected" in stats) == (spec.mode is not None)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ({"surrogate": "tis", "correction": "bypass_pg_is"}, "applied more than once"),
        ({"surrogate": "ppo_clip", "correction": "bypass_pg_geo_rs"}, "belongs to loss.surrogate='reinforce'"),
        ({"surrogate": "ppo_clip", "correction": "decoupled_geo_rs"}, "needs a proximal policy"),
        ({"surrogate": "tis", "anchor": "ewma"}, "recorded behavior log-prob"),
        ({"surrogate": "ppo_clip", "anchor": "recomputed"}, "nothing applies the whole ratio"),
        ({"surrogate": "ppo_clip", "correction": "magic"}, "loss.correction=magic is unknown"),
        ({"opsm_when": OpsmWhen.over_budget}, "does nothing without loss.opsm_delta"),
        ({"veto_scope": VetoScope.suffix}, "does nothing without loss.veto_low"),
        ({"veto_low": 0.1, "veto_stat": VetoStat.mean, "veto_kl": 0.1}, "looks at no single token"),
        ({"ewma_decay": 1.0}, "loss.ewma_decay"),
        ({"surrogate": "tis", "options": {"budget": 1.0}}, "takes there"),
        ({"surrogate": "ppo_clip", "options": {"eps_low": 0.3}}, "takes there"),
    ],
)
def test_combinations_that_weigh_twice_or_do_nothing_are_refused(loss, message):
    with pytest.raises(ConfigError, match=message):
        make_objective(AdvantageConfig(estimator="group"), replace(OFF, **loss))


@pytest.mark.shows("loss.options")
@pytest.mark.parametrize(
    ("surrogate", "options"),
    [("ppo_clip", {"ratio_cap": 1.29}), ("m2po", {"budget": 1e-4}), ("mis", {"low": 0.95, "high": 1.05}),
     ("tis", {"floor": 1.0}), ("sapo", {"tau_pos": 4.0}), ("vespo", {"k_pos": 0.5})],
)
def test_a_surrogates_own_constants_reach_it(surrogate, options):
    rows = batch()
    loss = replace(OFF, surrogate=surrogate, dual_clip=None, clip_low=0.01, clip_high=0.28)
    plain, _, _ = step(rows, loss=loss)
    other, _, _ = step(rows, loss=replace(loss, options=options))

    assert not all(torch.allclose(a, b) for a, b in zip(plain, other, strict=True))


def test_the_average_follows_the_policy_at_its_decay(checkpoints):
    policy, average = load_policy(checkpoints["llama-tied"]), load_policy(checkpoints["llama-tied"])
    frozen = FrozenPolicy(average, name="ewma")
    with torch.no_grad():
        for p in policy.parameters():
            p.add_(1.0)
    frozen.blend(policy, decay=0.75)

    gaps = [float((a - b).detach().mean()) for a, b in zip(policy.parameters(), average.parameters(), strict=True)]
    assert gaps == pytest.approx([0.75] * len(gaps), abs=1e-5)


def test_the_scoring_pass_asks_the_average_for_its_log_probs(checkpoints):
    policy, other = load_policy(checkpoints["llama-tied"]), load_policy(checkpoints["llama-tied"])
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(1.1)
    rows = batch(2, 3)
    made = make_objective(AdvantageConfig(estimator="group"), replace(OFF, surrogate="decoupled_ppo", anchor="ewma"))
    one = OneBatch(made, rows, plan_of(rows), version=5)
    (micro,) = pack(rows, 10_000)
    frozen = FrozenPolicy(other, name="ewma")
    one.score(policy, [micro], frozen={"proximal": frozen})

    outputs = one.plan.outputs_of(micro)
    assert torch.equal(outputs.proximal, micro.padded(frozen.score(micro)))
    assert outputs.policy is None  # the objective did not ask for the policy's own


@pytest.mark.shows("loss.ewma_decay")
@pytest.mark.parametrize("decay", [0.5, 0.9])
def test_after_every_step_the_average_moves_as_far_as_its_decay_lets_it(checkpoints, decay):
    policy, average = load_policy(checkpoints["llama-tied"]), load_policy(checkpoints["llama-tied"])
    with torch.no_grad():
        for p in policy.parameters():
            p.add_(1.0)
    trainer = Trainer(
        Networks(policy, None, proximal=FrozenPolicy(average, name="ewma")), None, None,
        TrainerSettings(max_tokens=1, num_epochs=2, ewma_decay=decay),
    )
    step = StepResult(grad_norm=1.0, skipped=False, lr=1e-3)
    trainer._advance(BatchResult((step, step)))

    assert trainer.version == 2  # two optimizer steps; the average moves once
    gap = next(policy.parameters()) - next(average.parameters())
    assert float(gap.detach().mean()) == pytest.approx(decay, abs=1e-5)
