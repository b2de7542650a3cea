"""The statistics of a step against a direct computation over all tokens of the batch."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from learner.data.packing import pack
from streamrl.config.schema import AdvantageConfig, LossConfig
from streamrl.metrics.names import METRICS
from tests.kit.learning import OneBatch, batch, make_objective, plan_of

VERSION = 5
LOSS = LossConfig(surrogate="ppo_clip", veto_low=0.4, veto_high=2.5, dual_clip=None)


@pytest.fixture(scope="module")
def step():
    """(trajectories, per-trajectory log-ratios, entropies, the flushed statistics)."""
    rows = batch(5, 4, seed=7)
    generator = torch.Generator().manual_seed(7)
    logprobs = [torch.from_numpy(r.logprobs[r.mask]) + 0.4 * torch.randn(r.num_action_tokens, generator=generator)
                for r in rows]
    entropies = [1 + torch.rand(len(x), generator=generator) for x in logprobs]
    made = make_objective(AdvantageConfig(estimator="group"), LOSS)
    one = OneBatch(made, rows, plan_of(rows), version=VERSION)
    for micro in pack(rows, 40):
        one.loss(micro, *(torch.cat([values[i] for i in micro.trajectory_ids]) for values in (logprobs, entropies)))
    recorded = [torch.from_numpy(row.logprobs[row.mask]) for row in rows]
    log_ratios = [(x - mu).double().numpy() for x, mu in zip(logprobs, recorded, strict=True)]
    return rows, log_ratios, [e.numpy() for e in entropies], one.finish().flush(1)


def ess(weights):
    return weights.sum() ** 2 / (len(weights) * np.square(weights).sum())


def vetoed(log_ratios):
    return [bool(((np.exp(x) < 0.4) | (np.exp(x) > 2.5)).any()) for x in log_ratios]


def test_effective_sample_sizes_are_of_kept_tokens_and_rows(step):
    _, log_ratios, _, stats = step
    kept = [x for x, gone in zip(log_ratios, vetoed(log_ratios), strict=True) if not gone]
    assert 0 < len(kept) < len(log_ratios)
    tokens, rows = np.exp(np.concatenate(kept)), np.exp([x.sum() for x in kept])

    assert stats["ess/token"] == pytest.approx(ess(tokens))
    assert stats["ess/token_clipped"] == pytest.approx(ess(np.minimum(tokens, 2.0)))
    assert stats["ess/token_clipped"] > stats["ess/token"]
    assert stats["ess/sequence"] == pytest.approx(ess(rows))
    assert stats["ess/sequence_clipped"] == pytest.approx(ess(np.minimum(rows, 2.0)))
    assert stats["ratio/mean_token"] == pytest.approx(tokens.mean())
    assert stats["ratio/mean_sequence"] == pytest.approx(rows.mean())
    assert stats["ess/kept_fraction"] == pytest.approx(len(tokens) / sum(map(len, log_ratios)))


def test_the_log_ratio_of_audited_tokens_splits_into_the_engines_part_and_the_policys():
    """By hand: with what the version said 0.1, -0.2, 0.1, ... above the record, the rest of each log-ratio is drift."""
    rows = batch(2, 2, seed=3)
    made = make_objective(AdvantageConfig(estimator="group"), LOSS)
    one = OneBatch(made, rows, plan_of(rows), version=VERSION)
    engine = {place: [(0.1, -0.2, 0.1)[t % 3] for t in range(rows[place].num_action_tokens)] for place in (0, 3)}
    one.statistics.agreements.mismatches = {place: torch.tensor([*e, 0.0, 0.0]) for place, e in engine.items()}
    for micro in pack(rows, 10_000):
        shift = 0.3 * torch.cos(torch.arange(micro.mask.sum()))
        one.loss(micro, micro.behavior_logprobs[micro.mask] + shift, torch.ones_like(shift))
        parts = dict(zip(micro.trajectory_ids, shift.split(micro.mask.sum(1).tolist()), strict=True))
    stats = one.finish().flush(1)

    pairs = [(e, float(x)) for place in engine for e, x in zip(engine[place], parts[place], strict=True)]
    assert stats["drift/audited_engine"] == pytest.approx(sum(e * e for e, _ in pairs) / len(pairs), rel=1e-5)
    assert stats["drift/audited_policy"] == pytest.approx(sum((x - e) ** 2 for e, x in pairs) / len(pairs), rel=1e-4)


def test_drift_and_ratios_are_of_all_action_tokens(step):
    rows, log_ratios, entropies, stats = step
    every = np.concatenate(log_ratios)
    lags = np.concatenate([VERSION - r.versions[r.mask] for r in rows])

    assert stats["ratio/max"] == pytest.approx(np.exp(every).max())
    assert stats["ratio/share_truncated"] == pytest.approx((np.exp(every) > 2.0).mean())
    assert stats["ratio/share_at_bound"] == 0
    assert stats["drift/m2"] == pytest.approx(np.square(every).mean())
    assert stats["drift/k1"] == pytest.approx(-every.mean())
    assert stats["drift/k3"] == pytest.approx((np.exp(every) - 1 - every).mean())
    assert stats["drift/mismatch"] == pytest.approx(np.square(every[lags == 0]).mean())
    for lag, value in stats["drift/m2_by_lag"].items():
        assert value == pytest.approx(np.square(every[lags == lag]).mean())
    assert stats["entropy/mean"] == pytest.approx(np.concatenate(entropies).mean())


def test_lags_are_of_trained_tokens_and_of_the_oldest_token_of_a_trajectory(step):
    rows, _, _, stats = step
    lags = [VERSION - r.versions[r.mask] for r in rows]
    every, heads, tails = np.concatenate(lags), np.array([x.max() for x in lags]), np.array([x.min() for x in lags])

    assert stats["lag/token"] == {int(x): int((every == x).sum()) for x in np.unique(every)}
    assert stats["lag/head"] == {int(x): int((heads == x).sum()) for x in np.unique(heads)}
    assert (stats["lag/token_max"], stats["lag/head_max"]) == (every.max(), heads.max())
    assert stats["lag/token_mean"] == pytest.approx(every.mean())
    assert stats["lag/head_mean"] == pytest.approx(heads.mean())
    assert stats["lag/queue"] == pytest.approx(tails.mean())
    assert stats["lag/flight"] == stats["lag/span"] == pytest.approx((heads - tails).mean())
    assert stats["lag/head_groups"] == pytest.approx(heads.mean() * 5)
    spread = [np.ptp(heads[[i for i, r in enumerate(rows) if r.group_id == g]]) for g in range(5)]
    assert stats["lag/group_spread"] == pytest.approx(np.mean(spread))


def test_clip_shares_are_by_the_sign_of_the_advantage(step):
    rows, log_ratios, _, stats = step
    advantage = []
    for row in rows:
        others = [r.reward for r in rows if r.group_id == row.group_id and r.index != row.index]
        advantage.append(row.reward - np.mean(others))
    per_token = np.concatenate([np.full(len(x), a) for x, a in zip(log_ratios, advantage, strict=True)])
    ratio = np.exp(np.concatenate(log_ratios))

    assert stats["clip/positive"] == pytest.approx((ratio[per_token > 0] > 1.28).mean())
    assert stats["clip/negative"] == pytest.approx((ratio[per_token < 0] < 0.8).mean())
    assert stats["advantage/mean"] == pytest.approx(per_token.mean(), abs=1e-6)
    assert stats["advantage/std"] == pytest.approx(per_token.std(), rel=1e-5)


def test_rewards_lengths_and_counts_are_of_the_batch(step):
    rows, log_ratios, _, stats = step
    rewards = np.array([r.reward for r in rows])

    assert stats["reward/trained"] == pytest.approx(rewards.mean())
    assert stats["score/trained"] == pytest.approx((rewards / 3).mean())
    assert stats["length/consumed"] == pytest.approx(np.mean([r.num_action_tokens for r in rows]))
    assert stats["length/truncated_fraction"] == pytest.approx(np.mean([r.truncated for r in rows]))
    assert stats["rollout/num_turns/train"] == pytest.approx(np.mean([r.num_turns for r in rows]))
    assert (stats["policy/num_groups"], stats["policy/num_trajectories"]) == (5, 20)
    assert stats["policy/num_tokens"] == sum(map(len, log_ratios))


def test_every_key_is_in_the_list_of_metrics(step):
    assert not [key for key in step[3] if key != "step" and key not in METRICS]


def test_a_reward_part_named_like_a_metric_does_not_pose_as_it():
    rows = batch(1, 2)
    rows = [replace(row, scores={"trained": 9.0, "format ok": 1.0}) for row in rows]
    made = make_objective(AdvantageConfig(), LOSS)
    one = OneBatch(made, rows, plan_of(rows), version=VERSION)
    stats = one.finish().flush(1)

    assert stats["reward/trained"] == pytest.approx(np.mean([r.reward for r in rows]))
    assert stats["reward/format_ok"] == 1.0
