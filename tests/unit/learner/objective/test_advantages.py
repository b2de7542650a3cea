"""Estimators in the learner: what each setting does to the advantage of a token; no split of the batch matters."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from learner.data.packing import pack
from learner.objective.loss import estimated_advantages, segment_ids
from learner.objective.token_batch import PassOutputs
from streamrl import algorithms
from streamrl.config.schema import AdvantageConfig, Discount, LossConfig, Segment
from streamrl.errors import ConfigError
from tests.kit.learning import OneBatch, batch, make_objective, plan_of, trajectory

VERSION = 5
PLAIN = LossConfig(surrogate="tis", veto_low=None, veto_high=None)
VALUED = ("vtrace", "vtrace_segments", "retrace_v", "retrace_q", "gae", "td_lambda", "n_step")


def drifted(rows, seed=0, drift=0.4):
    """Log-probs of a policy near the recorded ones, values and norms, one array per row."""
    rng = np.random.default_rng(seed)
    policy = [row.logprobs[row.mask] + drift * rng.standard_normal(row.num_action_tokens) for row in rows]
    values = [rng.standard_normal(row.num_action_tokens) for row in rows]
    return policy, values, rng.standard_normal(len(rows)), 0.1 + rng.random(len(rows))


def spread(micro, per_row):
    out = torch.zeros(micro.mask.shape, dtype=torch.float32)
    out[micro.mask] = torch.cat([torch.as_tensor(per_row[i], dtype=torch.float32) for i in micro.trajectory_ids])
    return out


def advantages_of(rows, advantage, *, loss=PLAIN, max_tokens=10_000, seed=0, drift=0.4):
    """Row -> (advantages, targets) of its action tokens, as the loss would use them."""
    made = make_objective(advantage, loss)
    policy, values, ends, norms = drifted(rows, seed, drift)
    one = OneBatch(made, rows, plan_of(rows), version=VERSION)
    micros = pack(rows, max_tokens, bootstrap=made.bootstraps)
    for micro in micros:
        cut = torch.zeros(len(micro.trajectory_ids), dtype=torch.bool).index_fill(0, micro.bootstrap_rows, True)
        one.observe(micro, PassOutputs(
            policy=spread(micro, policy), values=spread(micro, values),
            bootstrap=torch.where(cut, torch.tensor([float(ends[i]) for i in micro.trajectory_ids]), 0.0),
            action_values=spread(micro, [v + 0.3 for v in values]) if advantage.estimator == "retrace_q" else None,
            square_norms=torch.tensor([float(norms[i]) for i in micro.trajectory_ids]),
        ))
    one.close_observation()
    out = {}
    for micro in micros:
        found = one.plan.advantages.get(micro.trajectory_ids)
        found = found or estimated_advantages(one.plan.tokens(micro, spread(micro, policy)), one.plan)
        for place, i in enumerate(micro.trajectory_ids):
            chosen = micro.mask[place]
            targets = None if found.targets is None else found.targets[place][chosen]
            out[i] = (found.advantages[place][chosen], targets)
    return out


def alone(row, per_token):
    return torch.as_tensor(per_token, dtype=torch.float32)[None]


def all_advantages(found):
    return torch.cat([found[i][0] for i in sorted(found)])


@pytest.mark.parametrize("estimator", [*VALUED, "vtrace_critic_free", "group", "clipped_is"])
@pytest.mark.parametrize("whiten", ["none", "batch", "group"])
def test_how_the_batch_is_split_changes_no_advantage(estimator, whiten):
    rows = batch(3, 4)
    loss = replace(PLAIN, surrogate="reinforce") if estimator == "clipped_is" else PLAIN
    settings = AdvantageConfig(estimator=estimator, whiten=whiten, baseline="group_mean")

    whole = advantages_of(rows, settings, loss=loss)
    split = advantages_of(rows, settings, loss=loss, max_tokens=25)

    torch.testing.assert_close(all_advantages(split), all_advantages(whole), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("estimator", VALUED)
def test_with_a_critic_each_row_gets_what_the_function_gives_it_alone(estimator):
    rows = batch(2, 4)
    settings = AdvantageConfig(estimator=estimator, baseline="none")
    if estimator != "n_step":
        settings = replace(settings, lam=0.9)
    found = advantages_of(rows, settings)
    policy, values, ends, _ = drifted(rows)

    for i, row in enumerate(rows):
        mask = torch.ones(1, row.num_action_tokens, dtype=torch.bool)
        mu, pi = alone(row, row.logprobs[row.mask]), alone(row, policy[i])
        rewards, value = alone(row, row.rewards[row.mask]), alone(row, values[i])
        end = {"bootstrap_values": torch.tensor([float(ends[i]) if row.truncated else 0.0])}
        lam = {} if estimator == "n_step" else {"lam": 0.9}
        function = algorithms.ESTIMATORS[estimator]
        if estimator == "vtrace_segments":
            turns = torch.as_tensor(row.turns[row.mask])[None]
            expected = function(mu, pi, rewards, value, mask, turns, **end, **lam)
        elif estimator == "retrace_q":
            expected = function(mu, pi, rewards, value + 0.3, value, mask, **end, **lam)
        elif estimator == "retrace_v":  # the critic is one of states: its targets carry the truncated ratio
            expected = function(mu, pi, rewards, value, mask, **end, **lam, target_rho_bar=1.0)
        elif estimator == "vtrace":
            expected = function(mu, pi, rewards, value, mask, **end, **lam)
        else:
            expected = function(rewards, value, mask, **end, **lam)
        torch.testing.assert_close(found[i][0], expected.advantages[0], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(found[i][1], expected.targets[0], atol=1e-5, rtol=1e-4)


def test_truncated_trajectories_bootstrap_and_finished_ones_do_not():
    rows = [replace(row, truncated=i == 0) for i, row in enumerate(batch(1, 4))]
    settings = AdvantageConfig(estimator="gae", baseline="none", lam=1.0)
    policy, values, ends, _ = drifted(rows)
    found = advantages_of(rows, settings)

    for i, row in enumerate(rows):
        end = float(ends[i]) if i == 0 else 0.0
        assert float(found[i][0][-1]) == pytest.approx(float(row.rewards[row.mask][-1]) + end - values[i][-1], abs=1e-5)


@pytest.mark.shows("advantage.bootstrap_truncated")
@pytest.mark.parametrize("baseline", ["none", "group_mean"])
def test_a_cut_answer_may_end_with_nothing_as_a_finished_one_does(baseline):
    settings = AdvantageConfig(estimator="gae", baseline=baseline, lam=1.0)
    cut, finished = ([replace(row, truncated=is_cut, judged=False) for row in batch(1, 4)] for is_cut in (True, False))
    ends_with_zero = advantages_of(cut, replace(settings, bootstrap_truncated=False))

    for i, (advantages, targets) in advantages_of(finished, settings).items():
        assert torch.equal(ends_with_zero[i][0], advantages) and torch.equal(ends_with_zero[i][1], targets)
    assert any(not torch.equal(ends_with_zero[i][0], one) for i, (one, _) in advantages_of(cut, settings).items())
    with pytest.raises(ConfigError, match="bootstrap_truncated=False does nothing with advantage.estimator='group'"):
        make_objective(AdvantageConfig(bootstrap_truncated=False), PLAIN)


def test_an_answer_that_was_cut_and_judged_has_the_advantage_of_a_wrong_one():
    """With V = 0.25 everywhere: right +0.75, wrong -0.25, cut and wrong -0.25, cut before any judgment 0."""
    cases = [(1.0, False, True), (0.0, False, True), (0.0, True, True), (0.0, True, False)]
    rows = [
        replace(row, rewards=np.where(np.arange(len(row.mask)) == len(row.mask) - 1, reward, 0.0).astype(np.float32),
                reward=reward, truncated=cut, judged=judged)
        for row, (reward, cut, judged) in zip(batch(1, 4), cases, strict=True)
    ]
    made = make_objective(AdvantageConfig(estimator="gae", baseline="none", lam=1.0), PLAIN)
    one = OneBatch(made, rows, plan_of(rows), version=VERSION)
    (micro,) = pack(rows, 10_000, bootstrap=True)
    constant = torch.where(micro.mask, 0.25, 0.0)
    ends = torch.tensor([0.25 if rows[i].bootstraps else 0.0 for i in micro.trajectory_ids])
    one.observe(micro, PassOutputs(policy=torch.zeros_like(constant), values=constant, bootstrap=ends))
    one.close_observation()

    advantages = estimated_advantages(one.plan.tokens(micro, torch.zeros_like(constant)), one.plan).advantages
    found = {i: advantages[place][micro.mask[place]] for place, i in enumerate(micro.trajectory_ids)}

    assert len(micro.bootstrap_index) == 1
    for i, expected in enumerate([0.75, -0.25, -0.25, 0.0]):
        torch.testing.assert_close(found[i], torch.full_like(found[i], expected))


def test_a_group_baseline_centers_the_rewards_that_a_critic_sees_and_is_paid_once():
    """Where a cut trajectory goes on with V, V has the baseline in it: it is not charged on top."""
    rows = [replace(row, truncated=i % 3 == 0) for i, row in enumerate(batch(2, 4))]
    plain = advantages_of(rows, AdvantageConfig(estimator="gae", baseline="none"))
    centered = advantages_of(rows, AdvantageConfig(estimator="gae", baseline="group_mean"))

    for i, row in enumerate(rows):
        mean = 0.0 if row.truncated else np.mean([r.reward for r in rows if r.group_id == row.group_id])
        torch.testing.assert_close(plain[i][0] - centered[i][0], torch.full((row.num_action_tokens,), float(mean)),
                                   atol=1e-5, rtol=1e-4)


@pytest.mark.shows("advantage.whiten")
def test_whitening_gives_all_tokens_of_the_batch_mean_zero_and_spread_one():
    settings = AdvantageConfig(estimator="vtrace", whiten="batch")
    found = all_advantages(advantages_of(batch(3, 4), settings, max_tokens=40))

    assert float(found.mean()) == pytest.approx(0.0, abs=1e-5)
    assert float(found.std()) == pytest.approx(1.0, abs=1e-4)


def test_whitening_of_groups_gives_the_tokens_of_each_mean_zero_and_spread_one():
    rows = batch(3, 4)
    plain = advantages_of(rows, AdvantageConfig(estimator="vtrace"))
    found = advantages_of(rows, AdvantageConfig(estimator="vtrace", whiten="group"), max_tokens=40)

    for group in range(3):
        mine = [i for i, row in enumerate(rows) if row.group_id == group]
        values = [float(x) for i in mine for x in plain[i][0]]
        mean = sum(values) / len(values)
        spread = (sum((x - mean) ** 2 for x in values) / (len(values) - 1)) ** 0.5
        expected = [(x - mean) / spread for x in values]
        assert [float(x) for i in mine for x in found[i][0]] == pytest.approx(expected, abs=1e-4)


@pytest.mark.shows("advantage.gamma", "advantage.discount")
def test_gamma_discounts_tokens_or_only_the_ends_of_turns():
    row = trajectory(np.random.default_rng(3), 0, 0, num_actions=6, with_gap=False)
    rewards = np.array([0, 0, 0, 0, 0, 3], dtype=np.float32)
    two_turns = replace(row, turns=np.array([0, 0, 0, 1, 1, 1]), truncated=False, rewards=rewards, reward=3.0)
    settings = AdvantageConfig(estimator="gae", baseline="none", gamma=0.5)

    def first_advantage(config):
        _, values, _, _ = drifted([two_turns])
        return float(advantages_of([two_turns], config)[0][0][0]) + values[0][0]

    by_token, by_turn = first_advantage(settings), first_advantage(replace(settings, discount=Discount.turn))

    assert by_token == pytest.approx(two_turns.reward * 0.5**5, abs=1e-4)
    assert by_turn == pytest.approx(two_turns.reward * 0.5, abs=1e-4)  # the second turn's end is the episode's


def test_segments_are_turns_or_blocks_inside_turns():
    row = trajectory(np.random.default_rng(3), 0, 0, num_actions=7, with_gap=False)
    (micro,) = pack([replace(row, turns=np.array([0, 0, 0, 0, 1, 1, 1]))], 100)

    assert segment_ids(micro, Segment.turn, 2).tolist() == [[0, 0, 0, 0, 1, 1, 1]]
    assert segment_ids(micro, Segment.block, 3).tolist() == [[1, 1, 1, 2, 3, 3, 3]]


@pytest.mark.shows("advantage.segment", "advantage.segment_tokens")
def test_segment_length_changes_the_advantages():
    rows = batch(2, 4)
    settings = AdvantageConfig(estimator="vtrace_segments", segment=Segment.block, segment_tokens=2)
    two, four = (all_advantages(advantages_of(rows, replace(settings, segment_tokens=n))) for n in (2, 4))
    turns = all_advantages(advantages_of(rows, AdvantageConfig(estimator="vtrace_segments")))

    assert not torch.allclose(two, four) and not torch.allclose(four, turns)


@pytest.mark.shows("advantage.rho_bar_pg")
def test_rho_bar_pg_multiplies_the_own_ratio_into_the_advantage():
    rows = batch(2, 4)
    reinforce = replace(PLAIN, surrogate="reinforce")
    with_ratio = advantages_of(rows, AdvantageConfig(estimator="vtrace", rho_bar_pg=1.0), loss=reinforce)
    without = advantages_of(rows, AdvantageConfig(estimator="vtrace"))
    policy, *_ = drifted(rows)

    for i, row in enumerate(rows):
        ratio = torch.as_tensor(np.exp(policy[i] - row.logprobs[row.mask]), dtype=torch.float32).clamp(max=1.0)
        torch.testing.assert_close(with_ratio[i][0], ratio * without[i][0], atol=1e-5, rtol=1e-3)


@pytest.mark.shows("advantage.options")
@pytest.mark.parametrize(
    ("estimator", "options"),
    [("vtrace", {"leak": 0.5}), ("vtrace", {"trace_temperature": 4.0}), ("vtrace_segments", {"trace": "geometric"}),
     ("retrace_v", {"target_rho_bar": 0.5}), ("n_step", {"n": 1}), ("n_step", {"bootstrap": False}),
     ("clipped_is", {"eps": 0.01})],
)
def test_an_estimators_own_constants_reach_it(estimator, options):
    rows = [replace(row, truncated=True) for row in batch(2, 4)]
    loss = replace(PLAIN, surrogate="reinforce") if estimator == "clipped_is" else PLAIN
    blocks = {"segment": Segment.block, "segment_tokens": 2} if estimator == "vtrace_segments" else {}
    settings = AdvantageConfig(estimator=estimator, **blocks)
    plain = advantages_of(rows, settings, loss=loss)
    other = advantages_of(rows, replace(settings, options=options), loss=loss)

    same = all(torch.allclose(plain[i][k], other[i][k]) for i in plain for k in (0, 1))
    assert not same


@pytest.mark.shows("advantage.weight_cap", "advantage.min_ess")
def test_a_weighted_baseline_listens_to_siblings_that_the_policy_still_would_say():
    rows = batch(2, 4)
    settings = AdvantageConfig(estimator="group", baseline="weighted_leave_one_out", min_ess=0.0)
    found, (policy, *_) = advantages_of(rows, settings, max_tokens=30), drifted(rows)
    scores, groups = torch.tensor([r.reward for r in rows]).double(), torch.tensor([r.group_id for r in rows])
    sums = torch.tensor([float((policy[i] - r.logprobs[r.mask]).sum()) for i, r in enumerate(rows)])

    for cap in (2.0, 0.5):
        found = advantages_of(rows, replace(settings, weight_cap=cap))
        expected = scores - algorithms.leave_one_out(scores, groups, weights=sums.exp().clamp(max=cap), min_ess=0.0)
        assert [float(found[i][0][0]) for i in range(len(rows))] == pytest.approx(expected.tolist(), abs=1e-4)
    plain = advantages_of(rows, replace(settings, min_ess=100.0))
    expected = scores - algorithms.leave_one_out(scores, groups)
    assert [float(plain[i][0][0]) for i in range(len(rows))] == pytest.approx(expected.tolist(), abs=1e-4)


def test_the_optimal_baseline_weighs_siblings_by_the_size_of_their_gradients_too():
    rows = batch(2, 4)
    found = advantages_of(rows, AdvantageConfig(estimator="group", baseline="opob"), max_tokens=30)
    policy, _, _, norms = drifted(rows)
    scores, groups = torch.tensor([r.reward for r in rows]).double(), torch.tensor([r.group_id for r in rows])
    sums = torch.tensor([float((policy[i] - r.logprobs[r.mask]).sum()) for i, r in enumerate(rows)])
    expected = scores - algorithms.opob(scores, groups, sums.exp().clamp(max=2.0), torch.as_tensor(norms))

    assert [float(found[i][0][0]) for i in range(len(rows))] == pytest.approx(expected.tolist(), abs=1e-4)


@pytest.mark.shows("advantage.rho_bar_ess_target")
def test_rho_bar_can_follow_the_effective_sample_size():
    rows = batch(3, 4)
    settings = AdvantageConfig(estimator="vtrace_critic_free")
    fixed = all_advantages(advantages_of(rows, settings, drift=0.2))
    chosen = all_advantages(advantages_of(rows, replace(settings, rho_bar_ess_target=0.3), drift=0.2))

    assert not torch.allclose(fixed, chosen)  # a wider cap than 1 reaches so low a target


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"estimator": "group", "lam": 0.9}, "advantage.lam=0.9 does nothing"),
        ({"estimator": "group", "baseline": "opob", "min_ess": 3.0}, "advantage.min_ess=3.0 does nothing with"),
        ({"estimator": "gae", "rho_bar": 2.0}, "advantage.rho_bar=2.0 does nothing"),
        ({"estimator": "gae", "options": {"leak": 0.5}}, "which 'gae' does not have"),
        ({"estimator": "gae", "discount": Discount.turn}, "discounts nothing"),
        ({"estimator": "vtrace", "scale": "std"}, "use advantage.whiten=batch"),
        ({"estimator": "group", "baseline": "opob", "scale": "std"}, "use advantage.whiten=batch"),
        ({"estimator": "gae", "rho_bar_ess_target": 0.5}, "rho_bar_ess_target"),
        ({"estimator": "vtrace", "segment": Segment.block}, "does nothing without"),
        ({"estimator": "reinforce_pp", "whiten": "batch", "baseline": "none"}, "whitens over the batch itself"),
        ({"estimator": "vtrace", "rho_bar_pg": 1.0}, "applied more than once"),
        ({"estimator": "clipped_is"}, "applied more than once"),
    ],
)
def test_a_setting_that_the_estimator_does_not_read_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        make_objective(AdvantageConfig(**settings), PLAIN)


@pytest.mark.parametrize("discount", list(Discount))
def test_discounted_returns_are_whitened_by_their_own_moments(discount):
    settings = AdvantageConfig(estimator="reinforce_pp", baseline="none", gamma=0.9, discount=discount)
    found = all_advantages(advantages_of(batch(3, 4), settings, max_tokens=40))

    assert float(found.mean()) == pytest.approx(0.0, abs=1e-5)
    assert float(found.std()) == pytest.approx(1.0, abs=1e-4)
