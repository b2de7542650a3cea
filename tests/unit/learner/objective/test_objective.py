"""The objective: each setting moves the loss as its formula says, and no split of the batch moves it at all."""

import math
import sys
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch

from learner.data.packing import pack
from learner.objective.objective import Objective
from learner.objective.token_batch import LagPolicy, PassOutputs
from streamrl.algorithms import SURROGATE_ENTRIES, SURROGATES, CorrectionSpec
from streamrl.config.load import load_config
from streamrl.config.schema import AdvantageConfig, LossConfig, OpsmWhen
from streamrl.errors import ConfigError, ContentError
from tests.kit.learning import OneBatch, batch, plan_of

GROUP = AdvantageConfig(estimator="group")
PLAIN = LossConfig(surrogate="tis", veto_low=None, veto_high=None)
REINFORCE = replace(PLAIN, surrogate="reinforce", allow_uncorrected=True)
VERSION = 5


def objective(advantage=GROUP, loss=PLAIN, **options) -> Objective:
    return Objective(advantage, loss, **{"max_new_tokens": 16, "max_lag": 4, **options})


def policy_outputs(rows, drift=0.3, seed=0):
    """Per trajectory: log-probs near the recorded ones, as leaves, and entropies."""
    generator = torch.Generator().manual_seed(seed)
    logprobs, entropies = [], []
    for row in rows:
        recorded = torch.from_numpy(row.logprobs[row.mask])
        logprobs.append((recorded + drift * torch.randn(len(recorded), generator=generator)).requires_grad_())
        entropies.append((2 + torch.rand(len(recorded), generator=generator)).requires_grad_())
    return logprobs, entropies


def run(
    rows, advantage=GROUP, loss=PLAIN, *, max_tokens=10_000, drift=0.3, plan=None, lag_policy=None, values=None,
    **options,
):
    """(loss, gradient of each trajectory's log-probs, gradients of entropies, statistics); `values` of a critic."""
    made = objective(advantage, loss, **options)
    logprobs, entropies = policy_outputs(rows, drift)
    one = OneBatch(made, rows, plan or plan_of(rows), version=VERSION, lag_policy=lag_policy)
    micro_batches = pack(rows, max_tokens)
    if made.needs:
        for micro in micro_batches:
            before = torch.cat([logprobs[i] for i in micro.trajectory_ids]).detach()
            outputs = PassOutputs(policy=micro.padded(before))
            if values is not None:
                of_critic = torch.cat([values[i] for i in micro.trajectory_ids])
                outputs = replace(outputs, values=micro.padded(of_critic),
                                  bootstrap=torch.zeros(len(micro.trajectory_ids)))
            one.observe(micro, outputs)
        one.close_observation()
    total = sum(
        one.loss(micro, *(torch.cat([values[i] for i in micro.trajectory_ids]) for values in (logprobs, entropies)))
        for micro in micro_batches
    )
    total.backward()
    zeros = [torch.zeros_like(e) if e.grad is None else e.grad for e in entropies]
    return float(total.detach()), [x.grad for x in logprobs], zeros, one.finish().flush(0)


def ratios(rows, drift=0.3):
    logprobs, _ = policy_outputs(rows, drift)
    return [(lp.detach() - torch.from_numpy(r.logprobs[r.mask])).exp() for lp, r in zip(logprobs, rows, strict=True)]


def leave_one_out(rows):
    out = []
    for row in rows:
        others = [r.reward for r in rows if r.group_id == row.group_id and r.index != row.index]
        out.append(row.reward - sum(others) / len(others))
    return out


def num_tokens(rows):
    return sum(row.num_action_tokens for row in rows)


def close(got, expected, atol=1e-6):
    for mine, reference in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, torch.as_tensor(reference, dtype=mine.dtype), atol=atol, rtol=1e-5)


# --- the main paths, by hand ---------------------------------------------------------------------------------------


@pytest.mark.shows("loss.surrogate", "loss.cap")
@pytest.mark.parametrize("cap", [2.0, 1.1])
def test_truncated_importance_sampling_by_hand(cap):
    rows = batch()
    _, grads, _, _ = run(rows, loss=replace(PLAIN, cap=cap))
    n = num_tokens(rows)
    close(grads, [-r.clamp(max=cap) * a / n for r, a in zip(ratios(rows), leave_one_out(rows), strict=True)])


@pytest.mark.parametrize("max_tokens", [10_000, 24])
def test_oapl_is_the_mean_square_of_what_the_log_ratio_misses(max_tokens):
    rows = batch(4, 3, seed=2)
    advantage = AdvantageConfig(estimator="optimal", options={"beta": 0.5})
    loss = LossConfig(surrogate="oapl", options={"beta": 0.2}, avg_level="seq-mean-token-mean",
                      veto_low=None, veto_high=None)
    policy = [lp.detach().double().requires_grad_() for lp in policy_outputs(rows)[0]]
    squares = []
    for row, logprobs in zip(rows, policy, strict=True):
        group = [math.exp(other.reward / 0.5) for other in rows if other.group_id == row.group_id]
        target = row.reward - 0.5 * math.log(sum(group) / len(group))
        squares.append((0.2 * (logprobs - torch.from_numpy(row.logprobs[row.mask]).double()).sum() - target) ** 2)
    by_hand = torch.stack(squares).mean()
    by_hand.backward()

    found, grads, _, _ = run(rows, advantage, loss, max_tokens=max_tokens)

    assert found == pytest.approx(float(by_hand.detach()), rel=1e-5)
    close(grads, [lp.grad for lp in policy])


@pytest.mark.parametrize("max_tokens", [10_000, 24])
def test_flash_reinforce_keeps_whole_answers_that_the_policy_has_not_left(max_tokens):
    rows, kept = batch(12, 1, seed=2), 0
    loss = LossConfig(surrogate="flash_reinforce", options={"delta": 0.001}, avg_level="seq-mean-token-mean",
                      veto_low=None, veto_high=None)
    policy = [lp.detach().double().requires_grad_() for lp in policy_outputs(rows)[0]]
    total, mean = torch.zeros((), dtype=torch.float64), sum(row.reward for row in rows) / len(rows)
    for row, logprobs in zip(rows, policy, strict=True):
        behavior, fixed = torch.from_numpy(row.logprobs[row.mask]).double(), logprobs.detach()
        mu, pi = behavior.exp(), fixed.exp()
        distance = mu * (mu / pi).log() + (1 - mu) * ((1 - mu) / (1 - pi)).log()
        if distance.mean() <= 0.001:
            kept += 1
            credit = (row.reward - mean) * len(rows) / (len(rows) - 1)
            total = total - credit * ((fixed - behavior).exp() * logprobs).mean() / len(rows)
    total.backward()

    found, grads, _, _ = run(rows, AdvantageConfig(estimator="group", baseline="batch"), loss, max_tokens=max_tokens)

    assert 0 < kept < len(rows)
    assert found == pytest.approx(float(total.detach()), rel=1e-5)
    close(grads, [torch.zeros_like(lp) if lp.grad is None else lp.grad for lp in policy])


@pytest.mark.parametrize("max_tokens", [10_000, 24])
def test_sao_credits_by_length_and_gives_tokens_outside_its_bounds_no_gradient(max_tokens):
    rows, outside = paid_in_two_turns(batch(12, 1, seed=2)), 0
    recipe = load_config(["algorithm=sao_gae", "policy.model_path=any", "env.name=string.reverse"])
    # Bounds that bind on these few tokens, and a length at which lambda is not 0.
    loss = replace(recipe.loss, clip_low=0.2, clip_high=0.25)
    advantage = replace(recipe.advantage, options={"target_lam": 1.0, "length_alpha": 0.5})
    generator = torch.Generator().manual_seed(1)
    values = [torch.randn(row.num_action_tokens, generator=generator) for row in rows]
    policy = [lp.detach().double().requires_grad_() for lp in policy_outputs(rows)[0]]
    total = torch.zeros((), dtype=torch.float64)
    for row, logprobs, of_row in zip(rows, policy, values, strict=True):
        n, credit, after = row.num_action_tokens, 0.0, 0.0
        ratio = (logprobs.detach() - torch.from_numpy(row.logprobs[row.mask]).double()).exp()
        for t in reversed(range(n)):
            value = float(of_row[t])
            credit = float(row.rewards[row.mask][t]) + after - value + max(1 - 1 / (0.5 * n), 0.0) * credit
            after = value
            if 0.8 <= float(ratio[t]) <= 1.25:
                total = total - float(ratio[t]) * credit * logprobs[t] / num_tokens(rows)
            else:
                outside += 1
    total.backward()

    found, grads, _, _ = run(rows, advantage, loss, max_tokens=max_tokens, values=values)

    assert found == pytest.approx(float(total.detach()), rel=1e-5)
    assert 0 < outside < num_tokens(rows) and any(row.num_action_tokens > 2 for row in rows)
    close(grads, [torch.zeros_like(lp) if lp.grad is None else lp.grad for lp in policy])


@pytest.mark.shows("loss.allow_uncorrected")
def test_uncorrected_reinforce_is_the_negative_control_that_ignores_the_ratio():
    rows = batch()
    with pytest.raises(ConfigError, match="allow_uncorrected"):
        objective(loss=replace(PLAIN, surrogate="reinforce"))

    _, grads, _, _ = run(rows, loss=REINFORCE)

    n = num_tokens(rows)
    close(grads, [torch.full_like(g, -a / n) for g, a in zip(grads, leave_one_out(rows), strict=True)])


@pytest.mark.shows("loss.clip_low", "loss.clip_high")
def test_ppo_clip_has_no_gradient_outside_the_clip_on_the_harmful_side():
    rows = batch()
    loss = LossConfig(surrogate="ppo_clip", veto_low=None, veto_high=None, dual_clip=None, clip_low=0.1, clip_high=0.2)
    _, grads, _, _ = run(rows, loss=loss)

    n = num_tokens(rows)
    for grad, ratio, advantage in zip(grads, ratios(rows), leave_one_out(rows), strict=True):
        free = (ratio <= 1.2) if advantage > 0 else (ratio >= 0.9)
        torch.testing.assert_close(grad, torch.where(free, -ratio * advantage / n, 0.0), atol=1e-6, rtol=1e-5)


@pytest.mark.shows("advantage.lam", "advantage.rho_bar", "advantage.c_bar")
@pytest.mark.parametrize(("lam", "rho_bar", "c_bar"), [(1.0, 1.0, 1.0), (0.9, 1.3, 1.1)])
def test_critic_free_vtrace_gives_each_token_the_truncated_product_of_the_ratios_after_it(lam, rho_bar, c_bar):
    rows = batch()
    settings = AdvantageConfig(estimator="vtrace_critic_free", lam=lam, rho_bar=rho_bar, c_bar=c_bar)
    _, grads, _, stats = run(rows, settings, REINFORCE)
    n = num_tokens(rows)

    for grad, ratio, advantage in zip(grads, ratios(rows), leave_one_out(rows), strict=True):
        steps = torch.cat([lam * ratio[:-1].clamp(max=c_bar), ratio[-1:].clamp(max=rho_bar)])
        suffix = torch.stack([steps[t + 1 :].prod() for t in range(len(ratio))])
        torch.testing.assert_close(grad, -suffix * advantage / n, atol=1e-6, rtol=1e-4)
    assert 0 < stats["trace/fraction"] < 1


@pytest.mark.parametrize(("options", "fraction"), [({"trace_temperature": 1e6}, 1.0), ({"leak": 0.0}, None)])
def test_the_length_of_traces_is_that_of_the_options_which_lengthen_them(options, fraction):
    rows = batch()
    values = [torch.zeros(row.num_action_tokens) for row in rows]
    plain, longer = (
        run(rows, AdvantageConfig(estimator="vtrace", options=given), REINFORCE, values=values)[3]["trace/fraction"]
        for given in ({}, options)
    )
    assert longer > plain + 0.05 and (fraction is None or longer == pytest.approx(fraction, abs=1e-4))


@pytest.mark.parametrize("weight", ["token", "sequence"])
def test_a_correction_that_would_depend_on_how_the_batch_is_cut_is_refused(monkeypatch, weight):
    loss = LossConfig(surrogate="reinforce", correction=f"{__name__}:OWN", dual_clip=None)
    spec = CorrectionSpec(mode="bypass", surrogate="reinforce", weight=weight)
    monkeypatch.setattr(sys.modules[__name__], "OWN", spec, raising=False)
    whole, cut = (run(batch(), loss=loss, max_tokens=size)[0] for size in (10_000, 25))
    assert cut == pytest.approx(whole, rel=1e-4)
    monkeypatch.setattr(sys.modules[__name__], "OWN", replace(spec, normalize=True))
    with pytest.raises(ConfigError, match=r"OWN' has normalize=True.*leave it at False"):
        run(batch(), loss=loss)


@pytest.mark.shows("advantage.baseline")
def test_dr_grpo_is_mean_baseline_no_scale_and_a_constant_normalizer():
    rows = batch()
    advantage = AdvantageConfig(estimator="group", baseline="group_mean", scale="none")
    _, grads, _, _ = run(rows, advantage, replace(PLAIN, avg_level="seq-mean-token-sum-norm"), max_new_tokens=20)

    for row, grad, ratio in zip(rows, grads, ratios(rows), strict=True):
        mean = sum(r.reward for r in rows if r.group_id == row.group_id) / 4
        expected = -ratio.clamp(max=2.0) * (row.reward - mean) / (len(rows) * 20)
        torch.testing.assert_close(grad, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("group_size", [1, 4])
def test_the_baseline_of_the_batch_compares_an_answer_with_all_others(group_size):
    rows = batch(12 // group_size, group_size)
    _, grads, _, stats = run(rows, AdvantageConfig(estimator="group", baseline="batch"))

    total = sum(r.reward for r in rows)
    for row, grad, ratio in zip(rows, grads, ratios(rows), strict=True):
        advantage = row.reward - (total - row.reward) / (len(rows) - 1)
        torch.testing.assert_close(grad, -ratio.clamp(max=2.0) * advantage / num_tokens(rows), atol=1e-6, rtol=1e-4)
    assert ("group/zero_std_trained" in stats) == (group_size > 1)


def paid_in_two_turns(rows):
    """A reward in the middle of each answer, and 1 at its end."""
    paid = []
    for row in rows:
        rewards = np.zeros_like(row.rewards)
        rewards[-1] += 1.0
        rewards[len(rewards) // 2] += row.reward
        paid.append(replace(row, rewards=rewards, reward=row.reward + 1.0))
    return paid


@pytest.mark.shows("advantage.estimator")
@pytest.mark.parametrize("case", ["one reward", "turn rewards", "centered"])
def test_reinforce_plus_plus_whitens_returns_to_go_over_the_tokens_of_the_batch(case):
    rows = batch() if case != "turn rewards" else paid_in_two_turns(batch(with_gap=False))
    baseline = "leave_one_out" if case == "centered" else "none"
    _, grads, _, _ = run(rows, AdvantageConfig(estimator="reinforce_pp", baseline=baseline), REINFORCE, max_tokens=40)

    if case == "turn rewards":
        returns = torch.cat([torch.from_numpy(row.rewards[::-1].cumsum()[::-1].copy()) for row in rows])
    else:  # one reward, at the end
        scores = leave_one_out(rows) if case == "centered" else [row.reward for row in rows]
        returns = torch.cat([torch.full((r.num_action_tokens,), one) for r, one in zip(rows, scores, strict=True)])
    expected = -(returns - returns.mean()) / (returns.std() + 1e-8) / len(returns)
    torch.testing.assert_close(torch.cat(grads), expected, atol=1e-6, rtol=1e-5)


# --- settings ------------------------------------------------------------------------------------------------------


@pytest.mark.shows("advantage.scale")
@pytest.mark.parametrize("scale", ["std", "batch_std"])
def test_a_scale_divides_the_advantages(scale):
    rows = batch()
    _, plain, _, _ = run(rows)
    _, scaled, _, _ = run(rows, replace(GROUP, scale=scale))

    advantage = torch.tensor(leave_one_out(rows))
    for i, row in enumerate(rows):
        rewards = torch.tensor([r.reward for r in rows if r.group_id == row.group_id])
        divisor = float(rewards.std() if scale == "std" else advantage.std())
        torch.testing.assert_close(scaled[i] * divisor, plain[i], atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(("theirs", "ours"), [("token_level", "token-mean"), ("sample_level", "seq-mean-token-mean")])
def test_a_level_of_averaging_by_its_name_elsewhere_is_answered_with_ours(theirs, ours):
    with pytest.raises(ConfigError, match=f"loss.avg_level={theirs} of ColossalAI is loss.avg_level={ours} here"):
        objective(loss=replace(PLAIN, avg_level=theirs))


@pytest.mark.shows("loss.avg_level")
@pytest.mark.parametrize("level", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "prompt-mean"])
def test_the_averaging_level_decides_what_a_token_weighs(level):
    rows = batch()
    _, plain, _, _ = run(rows)
    _, grads, _, _ = run(rows, loss=replace(PLAIN, avg_level=level))

    for row, grad, reference in zip(rows, grads, plain, strict=True):
        in_group = sum(r.num_action_tokens for r in rows if r.group_id == row.group_id)
        weight = {
            "token-mean": 1 / num_tokens(rows), "seq-mean-token-mean": 1 / (len(rows) * row.num_action_tokens),
            "seq-mean-token-sum": 1 / len(rows), "prompt-mean": 1 / (3 * in_group),
        }[level]
        torch.testing.assert_close(grad, reference * num_tokens(rows) * weight, atol=1e-6, rtol=1e-4)


@pytest.mark.shows("loss.veto_low", "loss.veto_high")
def test_the_veto_removes_whole_trajectories_and_leaves_the_denominator():
    rows = batch()
    _, plain, _, _ = run(rows)
    _, grads, _, stats = run(rows, loss=replace(PLAIN, veto_low=0.6, veto_high=1.7))

    vetoed = [bool(((r < 0.6) | (r > 1.7)).any()) for r in ratios(rows)]
    assert 0 < sum(vetoed) < len(rows)
    close(grads, [torch.zeros_like(p) if v else p for v, p in zip(vetoed, plain, strict=True)])
    gone = sum(row.num_action_tokens for row, v in zip(rows, vetoed, strict=True) if v)
    assert stats["keep/veto"] == pytest.approx(gone / num_tokens(rows))


@pytest.mark.shows("loss.exact_at_lag_zero")
@pytest.mark.parametrize(("surrogate", "num_fresh"), [("tis", 0), ("tis", 2), ("ppo_clip", 2)])
def test_ratios_at_lag_zero_can_be_exactly_one_and_the_mismatch_is_still_measured(surrogate, num_fresh):
    rows = [
        replace(row, versions=np.full_like(row.versions, VERSION - (place >= num_fresh)))
        for place, row in enumerate(batch(2, 3))
    ]
    loss = replace(PLAIN, surrogate=surrogate, dual_clip=None)
    _, plain, _, as_recorded = run(rows, loss=loss)
    _, grads, _, stats = run(rows, loss=replace(loss, exact_at_lag_zero=True))

    exact = [torch.full_like(g, -a / num_tokens(rows)) for g, a in zip(plain, leave_one_out(rows), strict=True)]
    close(grads[:num_fresh], exact[:num_fresh], atol=1e-8)
    assert all(torch.equal(g, p) for g, p in zip(grads[num_fresh:], plain[num_fresh:], strict=True))
    assert not num_fresh or not torch.allclose(grads[0], plain[0])
    assert stats.get("drift/mismatch") == as_recorded.get("drift/mismatch")
    assert not num_fresh or stats["drift/mismatch"] > 0.01


@pytest.mark.shows("loss.behavior_penalty")
def test_the_behavior_penalty_adds_the_squared_log_ratio():
    rows = batch()
    base, plain, _, _ = run(rows)
    loss, grads, _, _ = run(rows, loss=replace(PLAIN, behavior_penalty=0.01))

    log_ratios = [r.log() for r in ratios(rows)]
    n = num_tokens(rows)
    assert loss - base == pytest.approx(0.01 * float(torch.cat(log_ratios).square().sum()) / n, rel=1e-3)
    close([g - p for g, p in zip(grads, plain, strict=True)], [0.02 * e / n for e in log_ratios])


@pytest.mark.shows("loss.entropy_coef")
def test_the_entropy_bonus_rewards_every_token_alike():
    rows = batch()
    _, plain, none, _ = run(rows)
    _, grads, to_entropy, _ = run(rows, loss=replace(PLAIN, entropy_coef=0.02))

    close(grads, plain)
    assert not any(g.any() for g in none)
    close(to_entropy, [torch.full_like(g, -0.02 / num_tokens(rows)) for g in to_entropy])


@pytest.mark.parametrize("wider", [False, True])
def test_old_tokens_are_masked_only_when_asked_and_beyond_the_bound_that_was_promised(wider):
    """With `wider`, the bound was lowered while group 0 was on its way: the plan's head lag says what was promised."""
    rows = batch()
    promised = {row.group_id: 2 if wider and row.group_id == 0 else 1 for row in rows}
    plan = [
        msgspec.structs.replace(one, head_lag=min(promised[one.group_id], 2 if wider else one.head_lag))
        for one in plan_of(rows)
    ]
    _, plain, _, _ = run(rows)
    _, grads, _, stats = run(rows, plan=plan, lag_policy=LagPolicy(mask_beyond=1))

    for row, grad, reference in zip(rows, grads, plain, strict=True):
        old = torch.from_numpy(VERSION - row.versions[row.mask] > promised[row.group_id])
        torch.testing.assert_close(grad, torch.where(old, 0.0, reference))  # and it stays in the denominator
    assert 0 < stats["keep/lag"] < 1 and stats["lag/token_max"] == stats["lag/head_max"] == 1 + wider
    assert any((VERSION - row.versions[row.mask] == 2).any() for row in rows if row.group_id == 0)


def test_old_tokens_are_discounted_by_their_lag_and_stay_in_the_denominator():
    rows = batch()
    loss = LossConfig(surrogate="tis", behavior_penalty=0.0)
    _, plain, _, even = run(rows, loss=loss)
    _, grads, _, stats = run(rows, loss=loss, lag_policy=LagPolicy(discount_beyond=1, decay=0.5))

    factors = []
    for row, grad, reference in zip(rows, grads, plain, strict=True):
        factor = torch.from_numpy(0.5 ** (VERSION - row.versions[row.mask] - 1).clip(min=0)).float()
        torch.testing.assert_close(grad, factor * reference)
        factors.append(factor)
    assert stats["lag/weight"] == pytest.approx(float(torch.cat(factors).mean())) and 0.0 < stats["lag/weight"] < 1.0
    assert "lag/weight" not in even and stats["lag/token_max"] == even["lag/token_max"] > 1


def test_the_discount_spares_the_pull_back_to_the_data():
    rows = batch()
    losses = [LossConfig(surrogate="tis", behavior_penalty=tau) for tau in (0.0, 0.1)]
    discounted = [run(rows, loss=loss, lag_policy=LagPolicy(discount_beyond=0, decay=0.01))[1] for loss in losses]
    undiscounted = [run(rows, loss=loss)[1] for loss in losses]

    for without, with_pull, plain, pulled in zip(*discounted, *undiscounted, strict=True):
        torch.testing.assert_close(with_pull - without, pulled - plain)


def test_off_policy_masking_comes_on_over_budget_and_is_stricter_while_the_control_is_cautious():
    rows = batch()
    loss = replace(PLAIN, opsm_delta=0.12, opsm_when=OpsmWhen.over_budget)
    removed = [
        run(rows, loss=loss, lag_policy=lag_policy)[3].get("keep/opsm", 0.0)
        for lag_policy in (LagPolicy(drift_exceeded=False), LagPolicy(), LagPolicy(opsm_scale=0.5))
    ]

    assert removed[0] == 0.0 < removed[1] < removed[2]


def test_members_of_a_group_with_a_wide_spread_of_lags_are_compared_with_their_like_only():
    rows = batch()
    plan = [msgspec.structs.replace(row, head_lag=9 * (row.index % 2)) for row in plan_of(rows)]
    _, together, _, _ = run(rows, plan=plan)
    _, apart, _, _ = run(rows, plan=plan, lag_policy=LagPolicy(spread_budget=4))
    _, within, _, _ = run(rows, plan=plan, lag_policy=LagPolicy(spread_budget=9))

    assert any(not torch.equal(a, b) for a, b in zip(together, apart, strict=True))
    torch.testing.assert_close(together, within)


@pytest.mark.parametrize("surrogate", sorted(SURROGATES))
def test_on_policy_every_surrogate_has_the_policy_gradient(surrogate):
    rows = batch()
    level = "seq-mean-token-mean" if SURROGATE_ENTRIES[surrogate].whole_row else "token-mean"
    tight = {"clip_low": 3e-4, "clip_high": 4e-4} if surrogate == "gspo" else {}
    loss = LossConfig(surrogate=surrogate, allow_uncorrected=True, avg_level=level, **tight)
    _, grads, _, _ = run(rows, loss=loss, drift=0.0)

    for row, grad, advantage in zip(rows, grads, leave_one_out(rows), strict=True):
        n = len(rows) * row.num_action_tokens if level != "token-mean" else num_tokens(rows)
        if surrogate == "oapl":  # the slope of (S - A)^2 at S = 0, which no length divides
            torch.testing.assert_close(grad, torch.full_like(grad, -2 * advantage / len(rows)), atol=2e-5, rtol=1e-4)
        elif surrogate in ("gspo", "gmpo"):  # equal after the mean over the trajectory
            assert float(grad.sum()) == pytest.approx(-advantage / len(rows), abs=1e-5)
        else:
            torch.testing.assert_close(grad, torch.full_like(grad, -advantage / n), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("surrogate", sorted(SURROGATES))
@pytest.mark.parametrize("estimator", ["group", "vtrace_critic_free", "reinforce_pp"])
def test_no_split_into_micro_batches_changes_loss_gradient_or_statistics(surrogate, estimator):
    rows = batch(4, 3, seed=2)
    level = "seq-mean-token-mean" if SURROGATE_ENTRIES[surrogate].whole_row else "prompt-mean"
    tight = {"clip_low": 3e-4, "clip_high": 4e-4} if surrogate == "gspo" else {}
    loss = LossConfig(
        surrogate=surrogate, allow_uncorrected=True, avg_level=level, entropy_coef=0.1, behavior_penalty=0.1, **tight
    )
    baseline = "none" if estimator == "reinforce_pp" else "leave_one_out"
    advantage = AdvantageConfig(estimator=estimator, baseline=baseline)
    whole = run(rows, advantage, loss)
    split = run(rows, advantage, loss, max_tokens=24)

    assert whole[3].pop("policy/num_microbatches") == 1 < split[3].pop("policy/num_microbatches")
    assert split[0] == pytest.approx(whole[0], rel=1e-5, abs=1e-6)
    close(split[1], whole[1])
    close(split[2], whole[2])
    assert split[3].keys() == whole[3].keys()
    for key, value in whole[3].items():
        assert split[3][key] == pytest.approx(value, rel=1e-5, abs=1e-6), key


def test_m2po_derives_one_clip_from_the_harmful_tokens_of_the_batch():
    rows = batch(4, 3, seed=2)
    loss = LossConfig(surrogate="m2po", veto_low=None, veto_high=None, clip_low=0.0, clip_high=0.0)
    _, grads, _, _ = run(rows, loss=loss, max_tokens=24)

    log_ratios = torch.cat([r.log() for r in ratios(rows)]).double()
    advantage = torch.cat([torch.full_like(r, a) for r, a in zip(ratios(rows), leave_one_out(rows), strict=True)])
    harmful = ((advantage > 0) & (log_ratios > 0)) | ((advantage < 0) & (log_ratios < 0))
    squares = log_ratios[harmful].square()
    caps = torch.linspace(0, 1, 20_001, dtype=torch.float64)
    within = torch.stack([squares.clamp(max=float(c) ** 2).mean() <= 0.04 for c in caps])
    cap = float(caps[within].max())
    assert squares.mean() > 0.04  # the budget binds
    assert torch.equal(torch.cat(grads) == 0, (harmful & (log_ratios.abs() > cap)) | (advantage == 0))


# --- the batch and its plan ----------------------------------------------------------------------------------------


def test_counts_and_baselines_come_from_the_plan_so_a_rank_needs_only_its_own_groups():
    rows = batch(4, 3)
    _, whole, _, _ = run(rows)
    plan = plan_of(rows, world=2)
    mine = [row for row in rows if row.group_id % 2 == 0]

    _, part, _, _ = run(mine, plan=plan)

    # the random policy outputs depend on the place in the list: compare through the ratio-free control
    _, whole, _, _ = run(rows, loss=REINFORCE)
    _, part, _, _ = run(mine, loss=REINFORCE, plan=plan)
    close(part, [g for g, row in zip(whole, rows, strict=True) if row.group_id % 2 == 0])


def test_a_plan_that_does_not_match_the_share_is_refused():
    rows = batch(2, 3)
    plan = plan_of(rows)
    made = objective()
    with pytest.raises(ContentError, match="missing"):
        OneBatch(made, rows[1:], plan, version=VERSION)
    with pytest.raises(ContentError, match="extra"):
        OneBatch(made, rows, plan[1:], version=VERSION)
    rows[0].mask[0] = False
    with pytest.raises(ContentError, match="the plan says"):
        OneBatch(made, rows, plan, version=VERSION)


# --- what is refused -----------------------------------------------------------------------------------------------


def test_a_group_of_equal_rewards_teaches_nothing():
    rows = batch(1, 4)
    same = [replace(row, reward=2.0) for row in rows]
    _, grads, _, stats = run(same, replace(GROUP, scale="std"))

    assert not any(g.any() for g in grads) and stats["group/zero_std_trained"] == 1.0


@pytest.mark.parametrize("broken", [math.nan, -math.inf])
@pytest.mark.parametrize("loss", [PLAIN, LossConfig(), LossConfig(surrogate="tis")])
def test_a_log_prob_that_is_not_finite_cannot_hide_behind_a_mask(loss, broken):
    rows = batch(1, 3)
    made = objective(loss=loss)
    one = OneBatch(made, rows, plan_of(rows), version=VERSION)
    (micro,) = pack(rows, 500)
    logprobs = torch.full((micro.num_scored,), -3.0)
    logprobs[4] = broken
    logprobs.requires_grad_()

    one.loss(micro, logprobs, torch.zeros(micro.num_scored)).backward()

    assert not torch.isfinite(logprobs.grad).all()
