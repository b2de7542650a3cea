"""Trajectories that cannot move a parameter get no pass, and nothing else changes."""

import sys
import types
from dataclasses import replace

import msgspec
import pytest
import torch

from learner.data.packing import LeaveOut, pack_minibatches
from learner.model.policy import load_policy
from learner.objective.objective import Objective
from learner.objective.options import surrogate_options, vanishes_at_zero
from learner.objective.regularizers import LossWeights, Regularizers
from learner.objective.token_batch import LagPolicy
from learner.ranks.mesh import Ranks
from learner.setup.trainer import make_objective, make_staleness
from streamrl.algorithms import Correction, CorrectionSpec, find_surrogate
from streamrl.algorithms.registry import SURROGATE_ENTRIES
from streamrl.algorithms.types import TokenLoss
from streamrl.config.schema import AdvantageConfig, ConstraintConfig, EntropyConfig, KlConfig, LossConfig
from tests.kit.learning import OneBatch, batch, plan_of
from tests.unit.config.setting_harness import config_of

VERSION = 5
GROUP = AdvantageConfig(estimator="group")
OF_PASSES = ("ess/", "ratio/", "drift/", "entropy/", "clip", "keep/veto", "policy/clip", "policy/num_microbatches")
"""Statistics that need the policy's log-probs, hence a pass."""


def rows_with_idle_groups():
    """Five groups of four: two with equal rewards, one of tokens that are far too old."""
    rows = batch(5, 4, seed=3)
    for row in rows:
        if row.group_id == 4:
            row.versions[row.mask] = 0
    rewards = (0.0, 1.0, 2.0, 6.0)  # none is the mean of the others
    return [replace(row, reward=2.0 if row.group_id in (1, 3) else rewards[row.index]) for row in rows]


def made(leave_out: bool | LeaveOut, advantage=GROUP, loss=None, **options) -> Objective:
    if isinstance(leave_out, bool):
        leave_out = LeaveOut.PASS if leave_out else LeaveOut.NOTHING
    return Objective(
        advantage, loss or LossConfig(), max_new_tokens=16, max_lag=6, leave_out=leave_out, **options
    )


def trained(policy, objective, rows, plan=None, lag_policy=None):
    """(loss, gradients, statistics, tokens that were packed for gradients) of one batch."""
    policy.zero_grad()
    plan = plan or plan_of(rows)
    one = OneBatch(objective, rows, plan, version=VERSION, lag_policy=lag_policy)
    (batches,) = pack_minibatches(
        rows, plan, 60, Ranks(), places=one.plan.places, measured=one.plan.measured
    )
    loss = sum(float(one.forward_backward(policy, micro)) for micro in batches)
    gradients = [p.grad.clone() for p in policy.parameters()]
    num_tokens = sum(micro.num_tokens for micro in batches if micro.has_gradient)
    return loss, gradients, one.finish().flush(1), num_tokens


@pytest.mark.shows("learner.skip_zero_advantage")
@pytest.mark.parametrize(
    "loss",
    [LossConfig(), LossConfig(surrogate="gspo", clip_low=3e-4, clip_high=4e-4, avg_level="seq-mean-token-mean"),
     LossConfig(surrogate="tis", dual_clip=None, avg_level="prompt-mean"), LossConfig(surrogate="decoupled_ppo")],
    ids=lambda loss: loss.surrogate,
)
def test_loss_gradients_and_what_needs_no_pass_are_the_same_with_fewer_tokens(checkpoints, loss):
    policy, rows = load_policy(checkpoints["qwen3-tied"]), rows_with_idle_groups()
    whole, expected, stats, num_tokens = trained(policy, made(False, loss=loss), rows)
    less, gradients, fewer_stats, fewer_tokens = trained(policy, made(True, loss=loss), rows)

    assert less == pytest.approx(whole, abs=1e-6)
    torch.testing.assert_close(gradients, expected, atol=1e-6, rtol=1e-5)
    idle = sum(row.num_action_tokens for row in rows if row.group_id in (1, 3))
    share = idle / sum(row.num_action_tokens for row in rows)
    assert fewer_tokens < 0.8 * num_tokens
    assert (stats["policy/left_out_fraction"], fewer_stats["policy/left_out_fraction"]) == (0, pytest.approx(share))
    for key, value in stats.items():
        if not key.startswith((*OF_PASSES, "policy/left_out")):
            assert fewer_stats[key] == pytest.approx(value, abs=1e-6), key


def test_where_a_control_reads_ratios_they_are_measured_without_a_backward_pass(checkpoints):
    policy, rows = load_policy(checkpoints["qwen3-tied"]), rows_with_idle_groups()
    whole, expected, stats, num_tokens = trained(policy, made(False), rows)
    less, gradients, same_stats, fewer_tokens = trained(policy, made(LeaveOut.BACKWARD), rows)

    assert less == pytest.approx(whole, abs=1e-6)
    torch.testing.assert_close(gradients, expected, atol=1e-6, rtol=1e-5)
    assert fewer_tokens < 0.8 * num_tokens
    of_micro_batches = "policy/num_microbatches"
    assert stats.pop(of_micro_batches) <= same_stats.pop(of_micro_batches)
    assert same_stats.keys() == stats.keys()
    for key, value in stats.items():
        if isinstance(value, float | dict):
            value = pytest.approx(value, abs=1e-6, rel=1e-5)
        assert same_stats[key] == value, key


def test_cut_and_over_old_trajectories_are_left_out_too(checkpoints):
    policy, rows = load_policy(checkpoints["qwen3-tied"]), rows_with_idle_groups()
    plan = [msgspec.structs.replace(row, head_lag=0) for row in plan_of(rows)]  # no wider bound was promised
    results = []
    for leave_out in (False, True):
        objective = made(leave_out, filter_truncated=True)
        lag_policy = LagPolicy(mask_beyond=4)
        places = OneBatch(objective, rows, plan, lag_policy=lag_policy).plan.places
        results.append((trained(policy, objective, rows, plan, lag_policy), places))
    ((whole, expected, stats, _), every), ((less, gradients, fewer, _), places) = results

    gone = {i for i, row in enumerate(rows) if row.group_id in (1, 3, 4) or row.truncated}
    assert set(places) == set(range(len(rows))) - gone and len(every) == len(rows)
    assert any(row.truncated and row.group_id in (0, 2) for row in rows), "the batch shows nothing otherwise"
    assert less == pytest.approx(whole, abs=1e-6)
    torch.testing.assert_close(gradients, expected, atol=1e-6, rtol=1e-5)
    assert abs(stats["advantage/mean"]) > 1e-3, "the batch shows nothing otherwise"
    lags = ("keep/lag", "lag/token", "lag/token_mean", "lag/head", "lag/queue", "lag/token_max")
    for key in ("advantage/mean", "advantage/std", *lags):
        assert fewer[key] == pytest.approx(stats[key]), key


def test_a_batch_without_any_gradient_still_gives_every_parameter_one_of_zero(checkpoints):
    policy = load_policy(checkpoints["qwen3-tied"])
    rows = [replace(row, reward=1.0) for row in batch(2, 3)]
    _, gradients, stats, num_tokens = trained(policy, made(True), rows)

    assert num_tokens == 1 and stats["policy/left_out_fraction"] == 1.0
    assert all(not gradient.any() for gradient in gradients)  # so moments and weights decay as ever


def test_a_sample_of_a_trajectory_without_a_pass_has_an_advantage_and_no_ratios():
    rows = rows_with_idle_groups()
    objective = made(True)
    one = OneBatch(objective, rows, plan_of(rows), version=VERSION)
    one.statistics.watch([0, 4])

    assert one.statistics.watched(4, rows[4].num_action_tokens) == ([], [0.0] * rows[4].num_action_tokens)
    assert one.statistics.watched(0, rows[0].num_action_tokens) == ([], [])  # it has not had its pass yet

    plan = [msgspec.structs.replace(row, head_lag=0) for row in plan_of(rows)]
    one = OneBatch(objective, rows, plan, version=VERSION, lag_policy=LagPolicy(mask_beyond=4))
    one.statistics.watch([16])
    seen = one.statistics.watched(16, rows[16].num_action_tokens)
    first, *others = (row.reward for row in rows[16:20])
    assert 16 not in one.plan.places and seen[0] == []
    assert seen[1] == pytest.approx([first - sum(others) / 3] * rows[16].num_action_tokens)


def test_an_advantage_that_only_a_pass_would_tell_is_left_out_and_not_0():
    rows = rows_with_idle_groups()
    objective = made(True, AdvantageConfig(estimator="reinforce_pp", baseline="group_mean"), filter_truncated=True)
    one = OneBatch(objective, rows, plan_of(rows), version=VERSION)
    gone = next(place for place, row in enumerate(rows) if row.truncated)
    one.statistics.watch([gone])

    assert gone not in one.plan.places and one.statistics.watched(gone, 3) == ([], [])
    assert "advantage/mean" not in one.finish().flush(1)


@pytest.mark.parametrize(
    ("advantage", "loss", "kl", "entropy", "constraint"),
    [
        ({"estimator": "vtrace"}, {}, {}, {}, {}),
        ({"whiten": "batch"}, {}, {}, {}, {}),
        ({"baseline": "opob"}, {}, {}, {}, {}),
        ({}, {"surrogate": "m2po"}, {}, {}, {}),
        ({}, {"entropy_coef": 0.01}, {}, {}, {}),
        ({}, {"behavior_penalty": 0.1}, {}, {}, {}),
        ({}, {"surrogate": "decoupled_ppo", "anchor": "ewma"}, {}, {}, {}),
        ({}, {}, {"mode": "k2_is"}, {}, {}),
        ({}, {}, {"mode": "advantage"}, {}, {}),
        ({}, {}, {}, {"adapt": "clip_high", "target": 0.5}, {}),
        ({}, {}, {}, {}, {"entropy_min": 0.1}),
        ({}, {}, {}, {}, {"kl_limit": 0.1}),
    ],
    ids=str,
)
def test_whatever_reads_tokens_without_advantage_keeps_them(advantage, loss, kl, entropy, constraint):
    loss, kl, constraint = LossConfig(**loss), KlConfig(**kl), ConstraintConfig(**constraint)
    controls = LossWeights(kl, EntropyConfig(**entropy), constraint, loss)
    objective = made(
        True, AdvantageConfig(**advantage), loss, regularizers=Regularizers(kl, constraint, loss, controls)
    )
    rows = rows_with_idle_groups()
    one = OneBatch(objective, rows, plan_of(rows), version=VERSION)

    assert one.plan.places == tuple(range(len(rows)))


def test_advantages_that_are_not_known_before_the_pass_keep_theirs_and_scaled_ones_do_not():
    rows, places = rows_with_idle_groups(), {}
    for name, baseline in (("reinforce_pp", "group_mean"), ("vtrace_critic_free", "leave_one_out")):
        objective = made(True, AdvantageConfig(estimator=name, baseline=baseline))
        one = OneBatch(objective, rows, plan_of(rows), version=VERSION)
        places[name] = len(one.plan.places)

    assert places == {"reinforce_pp": 20, "vtrace_critic_free": 12}


def test_a_correction_that_may_read_the_whole_micro_batch_keeps_every_trajectory(monkeypatch):
    spec = CorrectionSpec(mode="bypass", weight="token", function=lambda ratios, mask: Correction(ratios.exp(), mask))
    module = types.ModuleType("my_corrections")
    module.mine, module.plain = spec, CorrectionSpec(mode="bypass", weight="token")
    monkeypatch.setitem(sys.modules, "my_corrections", module)
    rows, places = rows_with_idle_groups(), {}
    for name in ("mine", "plain"):
        loss = LossConfig(surrogate="reinforce", dual_clip=None, correction=f"my_corrections:{name}")
        objective = made(True, loss=loss)
        one = OneBatch(objective, rows, plan_of(rows), version=VERSION)
        places[name] = len(one.plan.places)

    assert places == {"mine": 20, "plain": 12}


@pytest.mark.parametrize("name", SURROGATE_ENTRIES)
def test_the_shipped_surrogates_but_a_regression_have_no_loss_without_advantage(name):
    loss = LossConfig(surrogate=name)
    found = vanishes_at_zero(find_surrogate(name), surrogate_options(loss))

    assert found is (SURROGATE_ENTRIES[name].fit is None and name != "oapl")


@pytest.mark.parametrize("name", SURROGATE_ENTRIES)
def test_no_surrogate_loses_a_gradient_with_the_trajectories_that_are_left_out(checkpoints, name):
    policy, rows, entry = load_policy(checkpoints["qwen3-tied"]), rows_with_idle_groups(), find_surrogate(name)
    loss = LossConfig(
        surrogate=name, clip_low=0.05, clip_high=0.05, dual_clip=None, allow_uncorrected=True, veto_low=None,
        avg_level="seq-mean-token-mean" if entry.whole_row else "token-mean",
    )
    if entry.fit is None:
        (_, expected, *_), (_, gradients, *_) = (trained(policy, made(out, loss=loss), rows) for out in (False, True))
        torch.testing.assert_close(gradients, expected, atol=1e-5, rtol=1e-4)
        assert any(gradient.any() for gradient in gradients)
    assert made(True, loss=loss).leave_out is (LeaveOut.NOTHING if name in ("oapl", "m2po") else LeaveOut.PASS)


def test_a_surrogate_with_a_term_of_its_own_keeps_every_trajectory(monkeypatch):
    def pulled(policy_logprobs, behavior_logprobs, advantages, mask):
        losses = (-advantages * policy_logprobs + 0.1 * (policy_logprobs - behavior_logprobs).square()) * mask
        return TokenLoss(losses, torch.zeros_like(mask))

    module = types.ModuleType("my_losses")
    module.pulled = pulled
    monkeypatch.setitem(sys.modules, "my_losses", module)
    objective, rows = made(True, loss=LossConfig(surrogate="my_losses:pulled")), rows_with_idle_groups()
    one = OneBatch(objective, rows, plan_of(rows), version=VERSION)

    assert len(one.plan.places) == len(rows)


@pytest.mark.parametrize(
    ("words", "auto"),
    [
        ((), LeaveOut.PASS),
        (("staleness.adaptive.enabled=true",), LeaveOut.BACKWARD),
        (("policy.scheduler.ess_rule=sqrt",), LeaveOut.BACKWARD),
        (("publish.when=drift",), LeaveOut.BACKWARD),
        (("shadow.algorithms=[oapl]",), LeaveOut.BACKWARD),  # whose gradient such tokens have
        (("loss.zscore_bound=3",), LeaveOut.BACKWARD),
        (("loss.opsm_delta=0.5", "loss.opsm_when=always"), LeaveOut.PASS),
        (("loss.opsm_delta=0.5", "loss.opsm_when=over_budget"), LeaveOut.BACKWARD),
    ],
    ids=str,
)
def test_a_control_that_reads_ratios_keeps_their_tokens_unless_told_otherwise(words, auto):
    plain = ("policy.scheduler.ess_rule=none", "loss.opsm_delta=null", "loss.opsm_when=always")
    found = []
    for wish in ("auto", "always", "never"):
        config = config_of(*plain, *words, f"learner.skip_zero_advantage={wish}")
        found.append(make_objective(config, make_staleness(config, {}), {}, num_steps=0)[0].leave_out)

    assert found == [auto, LeaveOut.PASS, LeaveOut.NOTHING]
