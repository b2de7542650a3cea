"""What a trajectory's reward is made of: components, the price of length, and what is left out of the loss."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from learner.data.packing import pack
from learner.objective.rewards import RewardRules
from learner.ranks.mesh import Ranks
from learner.record.pareto import ParetoArchive
from learner.setup.group_mask import group_mask
from streamrl import algorithms
from streamrl.config.load import load_config
from streamrl.config.schema import AdvantageConfig, LossConfig, ObjectivesConfig, OverlongConfig
from streamrl.errors import ConfigError, ContentError
from tests.kit.learning import OneBatch, batch, make_objective, plan_of

OFF, NONE = ObjectivesConfig(), OverlongConfig()
ALONE = Ranks()
PLAIN = LossConfig(surrogate="tis", veto_low=None, veto_high=None)


def two_scores():
    """Three groups of four with a quality and a length score."""
    rows = enumerate(batch(3, 4))
    return [replace(row, scores={"quality": (i * 7 % 5) / 4, "length": (i * 3 % 4) / 3}) for i, row in rows]


def rewards(rows, objectives=OFF, overlong=NONE, max_tokens=12, **options):
    rules = RewardRules(objectives, overlong, max_tokens=max_tokens, **options)
    shaped, plan = rules.apply(rows, plan_of(rows), ALONE)
    assert [row.reward for row in shaped] == [row.reward for row in plan]
    for row in shaped:
        assert float(row.rewards.sum()) == pytest.approx(row.reward, abs=1e-5)
    return [row.reward for row in shaped]


def components(rows):
    return torch.tensor([[r.scores["length"], r.scores["quality"]] for r in rows]).double()


def test_nothing_set_changes_nothing():
    rows = batch()
    assert rewards(rows) == [row.reward for row in rows]


@pytest.mark.shows("overlong.cache_ratio", "overlong.scale")
def test_the_overlong_penalty_grows_over_the_last_tokens_that_are_allowed():
    rows = batch(3, 4)
    for cache, scale in ((3, 1.0), (3, 0.5), (6, 1.0)):
        got = rewards(rows, overlong=OverlongConfig(cache_ratio=cache / 12, scale=scale))
        price = [min(0.0, max(-1.0, (12 - cache - r.num_action_tokens) / cache)) for r in rows]
        assert got == pytest.approx([r.reward + scale * p for r, p in zip(rows, price, strict=True)], abs=1e-6)


@pytest.mark.shows("overlong.cache_tokens", "overlong.max_tokens")
@pytest.mark.parametrize(("overlong", "limit", "cache"), [
    (OverlongConfig(cache_tokens=5), 12, 5),
    (OverlongConfig(cache_tokens=5, cache_ratio=0.9), 12, 5),  # a recipe has a ratio
    (OverlongConfig(cache_tokens=4, max_tokens=9), 9, 4),
    (OverlongConfig(max_tokens=8), 8, 2),  # min(1024, a quarter)
])
def test_the_penalty_has_a_length_and_a_limit_in_tokens(overlong, limit, cache):
    rows = batch(3, 4)
    price = [min(0.0, max(-1.0, (limit - cache - r.num_action_tokens) / cache)) for r in rows]
    got = rewards(rows, overlong=overlong, correct=10.0)  # what a right answer earns is the penalty's size
    assert got == pytest.approx([r.reward + 10.0 * p for r, p in zip(rows, price, strict=True)], abs=1e-5)
    assert len(set(price)) > 2
    shaped, _ = RewardRules(OFF, overlong, max_tokens=12).apply(rows, plan_of(rows), ALONE)
    assert [row.scores["length_penalty"] for row in shaped] == pytest.approx(price)  # samples show it as a part


@pytest.mark.shows("overlong.zero_when_truncated")
def test_answers_that_were_cut_can_be_worth_nothing():
    rows = [replace(row, reward=2.0, rewards=row.rewards + 2.0 * (np.arange(len(row.rewards)) == 0) - row.rewards,
                    truncated=i % 3 == 0) for i, row in enumerate(batch(3, 4))]
    got = rewards(rows, overlong=OverlongConfig(zero_when_truncated=True))
    assert got == [0.0 if row.truncated else 2.0 for row in rows] and set(got) == {0.0, 2.0}
    both = rewards(rows, overlong=OverlongConfig(zero_when_truncated=True, cache_tokens=12))
    assert {value for value, row in zip(both, rows, strict=True) if row.truncated} == {0.0} and min(both) == 0.0


@pytest.mark.shows("objectives.divide_by_std")
def test_rewards_can_be_divided_by_their_spread_without_a_shift():
    rows = batch(3, 4)
    plain = torch.tensor([row.reward for row in rows], dtype=torch.float64)
    got = rewards(rows, ObjectivesConfig(divide_by_std=True))
    assert got == pytest.approx((plain / plain.std()).tolist()) and float(plain.std()) > 0.1
    equal = [replace(row, reward=0.5, rewards=np.full_like(row.rewards, 0.5 / len(row.rewards))) for row in rows]
    assert rewards(equal, ObjectivesConfig(divide_by_std=True)) == [0.5] * len(rows)
    with pytest.raises(ConfigError, match="does nothing with advantage.scale=std"):
        load_config(["policy.model_path=x", "objectives.divide_by_std=true", "advantage.scale=std"])


@pytest.mark.shows("objectives.combine", "objectives.components")
def test_a_weighted_sum_replaces_the_reward_and_negative_weights_punish():
    rows = two_scores()
    got = rewards(rows, ObjectivesConfig(combine="weighted_sum", components={"quality": 1.0, "length": -0.5}))

    assert got == pytest.approx([r.scores["quality"] - 0.5 * r.scores["length"] for r in rows])


@pytest.mark.shows("objectives.ideal")
def test_tchebycheff_aims_at_the_given_point_or_the_best_so_far():
    rows = two_scores()
    settings = ObjectivesConfig(combine="tchebycheff", components={"quality": 1.0, "length": 2.0})
    weights = torch.tensor([2.0, 1.0]).double()
    best = components(rows).amax(0)
    assert rewards(rows, settings) == pytest.approx(
        algorithms.tchebycheff(components(rows), weights, best).tolist())
    given = rewards(rows, replace(settings, ideal={"quality": 3.0}))
    ideal = torch.tensor([float(best[0]), 3.0]).double()
    assert given == pytest.approx(algorithms.tchebycheff(components(rows), weights, ideal).tolist())


@pytest.mark.shows("objectives.scale_by_range")
def test_tchebycheff_may_divide_each_component_by_its_range_so_far():
    rows = [replace(row, scores={**row.scores, "quality": 100 * row.scores["quality"]}) for row in two_scores()]
    settings = ObjectivesConfig(combine="tchebycheff", components={"quality": 1.0, "length": 2.0}, scale_by_range=True)
    scores = components(rows).tolist()
    best, worst = ([end(row[k] for row in scores) for k in (0, 1)] for end in (max, min))
    expected = [-max(weight * abs(row[k] - best[k]) / (best[k] - worst[k]) for k, weight in ((0, 2.0), (1, 1.0)))
                for row in scores]
    assert rewards(rows, settings) == pytest.approx(expected)

    rules = RewardRules(settings, NONE, max_tokens=12)
    rules.apply([replace(row, scores={"quality": -100.0, "length": 1.0}) for row in rows], plan_of(rows), ALONE)
    again = RewardRules(settings, NONE, max_tokens=12)
    again.restore(rules.state())
    worst[1] = -100.0
    wider = [-max(weight * abs(row[k] - best[k]) / (best[k] - worst[k]) for k, weight in ((0, 2.0), (1, 1.0)))
             for row in scores]
    assert [row.reward for row in again.apply(rows, plan_of(rows), ALONE)[0]] == pytest.approx(wider)
    same = [replace(row, scores={"quality": 3.0, "length": 1.0}) for row in rows]
    assert rewards(same, settings) == [0.0] * len(rows), "no range, no division by 0"


def test_hypervolume_without_a_reference_begins_a_tenth_of_the_range_below_the_worst():
    rows, weights = two_scores(), {"quality": 1.0, "length": 1.0}
    got = rewards(rows, ObjectivesConfig(combine="hypervolume", components=weights))
    both = list(zip(*components(rows).tolist(), strict=True))
    point = {name: min(x) - 0.1 * (max(x) - min(x)) for name, x in zip(("length", "quality"), both, strict=True)}
    given = rewards(rows, ObjectivesConfig(combine="hypervolume", components=weights, reference_point=point))
    assert got == pytest.approx(given) and len({round(x, 6) for x in got}) > 2


def test_the_best_so_far_is_remembered_between_batches_and_restarts():
    rows = two_scores()
    settings = ObjectivesConfig(combine="tchebycheff", components={"quality": 1.0, "length": 1.0})
    rules = RewardRules(settings, NONE, max_tokens=12)
    high = [replace(row, scores={"quality": 9.0, "length": 0.0}) for row in rows]
    rules.apply(high, plan_of(high), ALONE)
    again = RewardRules(settings, NONE, max_tokens=12)
    again.restore(rules.state())

    shaped, _ = again.apply(rows, plan_of(rows), ALONE)
    assert min(row.reward for row in shaped) <= -8.0


@pytest.mark.shows("objectives.bonus")
def test_pareto_takes_a_little_from_answers_that_are_dominated_in_their_group():
    rows = two_scores()
    weights = {"quality": 1.0, "length": 1.0}
    plain = rewards(rows, ObjectivesConfig(combine="weighted_sum", components=weights))
    got = rewards(rows, ObjectivesConfig(combine="pareto", components=weights, bonus=0.25))
    counts = torch.cat([algorithms.domination_count(components(rows[g:g + 4])) for g in (0, 4, 8)])

    assert got == pytest.approx([p - 0.25 * c for p, c in zip(plain, counts.tolist(), strict=True)])
    assert counts.any()


@pytest.mark.shows("objectives.reference_point")
def test_hypervolume_gives_a_little_to_answers_that_cover_what_others_do_not():
    rows = two_scores()
    weights, reference = {"quality": 1.0, "length": 1.0}, {"quality": -0.1, "length": -0.1}
    plain = rewards(rows, ObjectivesConfig(combine="weighted_sum", components=weights))
    got = rewards(
        rows, ObjectivesConfig(combine="hypervolume", components=weights, reference_point=reference, bonus=0.5)
    )
    extra = torch.cat([
        algorithms.hypervolume_contributions(components(rows[g:g + 4]), torch.tensor([-0.1, -0.1])) for g in (0, 4, 8)
    ])

    assert got == pytest.approx([p + 0.5 * e for p, e in zip(plain, extra.tolist(), strict=True)], abs=1e-6)


def test_gdpo_normalizes_each_component_in_its_group_before_the_sum():
    rows = two_scores()
    got = rewards(rows, ObjectivesConfig(combine="gdpo", components={"quality": 1.0, "length": 0.1}))
    groups = torch.tensor([r.group_id for r in rows])
    expected = algorithms.gdpo_advantages(components(rows), groups, torch.tensor([0.1, 1.0]))

    assert got == pytest.approx(expected.tolist(), abs=1e-6)


def test_a_missing_component_is_named():
    rows = two_scores()
    with pytest.raises(ContentError, match=r"no score \['style'\]"):
        rewards(rows, ObjectivesConfig(combine="weighted_sum", components={"style": 1.0}))


@pytest.mark.parametrize(
    ("objectives", "overlong", "message"),
    [
        (ObjectivesConfig(combine="magic"), NONE, "choose one of reward"),
        (ObjectivesConfig(combine="gdpo"), NONE, "name them"),
        (ObjectivesConfig(combine="hypervolume", components={"a": 1.0, "b": 1.0}, reference_point={"a": 0.0}), NONE,
         "reference_point for each"),
        (ObjectivesConfig(combine="gdpo", components={"a": 1.0}, scale_by_range=True), NONE, "does nothing"),
        (ObjectivesConfig(ideal={"a": 1.0}), NONE, "do nothing with objectives.combine=reward"),
        (ObjectivesConfig(combine="tchebycheff", components={"a": 1.0}, ideal={"b": 1.0}), NONE, "no components"),
        (OFF, OverlongConfig(max_tokens=13), "more than the 12 new tokens"),
        (OFF, OverlongConfig(cache_tokens=7, max_tokens=6), "more than the 6 tokens"),
        (OFF, OverlongConfig(scale=2.0), "does nothing without"),
    ],
)
def test_rules_that_cannot_work_are_refused(objectives, overlong, message):
    with pytest.raises(ConfigError, match=message):
        RewardRules(objectives, overlong, max_tokens=12)


def losses(rows, **options):
    made = make_objective(AdvantageConfig(estimator="group"), PLAIN, **options)
    one = OneBatch(made, rows, plan_of(rows))
    (micro,) = pack(one.plan.rows, 10_000)
    leaf = micro.behavior_logprobs[micro.mask].clone().requires_grad_()
    one.loss(micro, leaf, torch.ones_like(leaf)).backward()
    return micro.padded(leaf.grad), one.finish().flush(0)


@pytest.mark.shows("filter.truncated")
def test_truncated_trajectories_can_leave_the_loss_and_stay_in_the_baseline():
    rows = [replace(row, truncated=i % 4 == 0) for i, row in enumerate(batch(3, 4))]
    plain, _ = losses(rows)
    filtered, stats = losses(rows, filter_truncated=True)
    kept = torch.tensor([not row.truncated for row in rows])
    tokens = sum(r.num_action_tokens for r in rows)
    left = sum(r.num_action_tokens for r in rows if not r.truncated)

    assert torch.count_nonzero(filtered[~kept]) == 0
    torch.testing.assert_close(filtered[kept], plain[kept] * tokens / left)  # same advantage, fewer tokens to divide by
    assert stats["length/truncated_fraction"] == pytest.approx(0.25)


IN_RANGE = ("filter.zero_std=false", "filter.accuracy_range=[0.2,0.9]")


@pytest.mark.shows("filter.refill")
@pytest.mark.parametrize(("words", "scores", "masked"), [
    (("filter.zero_std=true",), [{}, {}, {}], [0]), (IN_RANGE, [{}, {}, {}], [0, 2]),
    (IN_RANGE, [{"ans_acc": 0.5}, {"ans_acc": 0.9}, {"score": 0.3}], [1]),
])
def test_groups_that_a_filter_would_drop_may_stay_in_the_batch_and_leave_the_loss(words, scores, masked):
    """Rewards of the groups: all 1; 0 and 1 in turn; a tenth of that."""
    words = ["policy.model_path=here", *words]
    paid = [np.ones(4), np.arange(4) % 2, 0.1 * (np.arange(4) % 2)]
    rows = [replace(row, reward=float(paid[row.group_id][row.index]), scores=scores[row.group_id])
            for row in batch(3, 4)]
    mask, every = (
        group_mask(load_config([*words, f"filter.refill={refill}"]).filter, ()) for refill in ("false", "true"))
    made = make_objective(AdvantageConfig(estimator="group"), PLAIN, group_mask=mask)
    gradients, stats = losses(rows, group_mask=mask)
    tokens = sum(row.num_action_tokens for row in rows if row.group_id not in masked)

    assert OneBatch(made, rows, plan_of(rows)).plan.tensors.weights.tolist() == pytest.approx(
        [0.0 if row.group_id in masked else 1 / tokens for row in rows])
    moved = [bool(torch.count_nonzero(gradients[4 * group : 4 * group + 4])) for group in (1, 2)]
    assert moved == [group not in masked for group in (1, 2)]
    assert stats["policy/num_groups"] == 3 and every is None
    with pytest.raises(ConfigError, match="filter.refill=false does nothing without a filter"):
        load_config(["policy.model_path=here", "filter.zero_std=false", "filter.refill=false"])


def test_metrics_tell_what_the_task_paid_whatever_is_trained_on():
    rows = two_scores()
    _, plain = losses(rows)
    rules = RewardRules(ObjectivesConfig(combine="weighted_sum", components={"quality": 5.0}), NONE, max_tokens=12)
    _, shaped = losses(rows, reward_rules=rules)

    assert shaped["reward/trained"] == plain["reward/trained"]
    assert shaped["advantage/std"] != plain["advantage/std"]


# --- the archive of evaluations --------------------------------------------------------------------------------------


def archive(path, **options):
    return ParetoArchive(path / "pareto.json", {"quality": 1.0, "length": -1.0},
                         **{"size": 100, "reference": {"quality": 0.0, "length": 10.0}, **options})


def test_only_evaluations_that_no_other_beats_stay_in_the_archive(tmp_path):
    made = archive(tmp_path)
    made.add(10, {"quality": 0.5, "length": 4.0})
    made.add(20, {"quality": 0.4, "length": 5.0})  # worse in both
    metrics = made.add(30, {"quality": 0.6, "length": 6.0})

    assert [member["version"] for member in made.members] == [10, 30]
    assert metrics["objective/archive_size"] == 2
    assert metrics["objective/hypervolume"] == pytest.approx(0.6 * 4 + 0.5 * 2)
    parts = {key.removeprefix("objective/"): metrics[key] for key in metrics if key.endswith(("best", "worst", "mean"))}
    assert parts == pytest.approx({
        "quality_best": 0.6, "quality_worst": 0.5, "quality_mean": 0.55,
        "length_best": 4.0, "length_worst": 6.0, "length_mean": 5.0,
    })
    assert archive(tmp_path).members == made.members  # a resumed run goes on from the file


@pytest.mark.shows("objectives.archive_size")
def test_a_full_archive_drops_where_the_front_is_crowded(tmp_path):
    made = archive(tmp_path, size=3)
    for version, quality in enumerate([0.1, 0.5, 0.52, 0.9]):
        made.add(version, {"quality": quality, "length": 10 * quality})

    assert len(made.members) == 3
    assert {0.1, 0.9} <= {member["quality"] for member in made.members}


def test_an_evaluation_without_a_component_is_no_point(tmp_path):
    made = archive(tmp_path)
    made.add(10, {"quality": float("nan"), "length": 4.0})
    made.add(20, {"quality": 0.5})

    assert made.members == []
