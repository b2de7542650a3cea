"""The staleness control: what it decides from what a step measured, in closed loops with a scripted drift."""

import json
import logging
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from random import Random

import pytest
import torch

from bench.pieces import predict_ess
from learner.control.staleness import DriftTracker, StalenessControl, to_bins
from learner.setup.trainer import make_staleness
from streamrl.config.load import from_plain, load_config, to_plain
from streamrl.errors import ConfigError
from streamrl.metrics.meter import Meter

BASE = to_plain(load_config([
    "experiment=quickstart", "staleness.eta=4", "staleness.adaptive.enabled=true", "staleness.adaptive.max_eta=40",
    "staleness.adaptive.half_life_steps=5",
]))
N_EFF = 50.0


def control_of(*words: str) -> StalenessControl:
    return make_staleness(from_plain(BASE, words), {})


def measured(
    m2_by_lag: Mapping[int, float] | None = None, *, ess: float | None = 1.0, queue: float = 0.0, num_tokens: int = 500
) -> Meter:
    """A step's totals: so much drift at each lag, over this many tokens each, and this ESS."""
    meter = Meter()
    for lag, m2 in (m2_by_lag or {0: 0.0}).items():
        meter.add_at("drift/m2_by_lag", lag, m2, num_tokens)
        meter.add("lag/token_mean", lag, num_tokens)
    if ess is not None:
        meter.add_moments("ess/sequence_clipped", 1000.0, 1000.0, 1000.0 / ess)
    meter.add("lag/queue", queue)
    meter.add("policy/num_groups", 16.0)
    return meter


def step(control: StalenessControl, *args, grad_norm: float = 1.0, step_s: float = 1.0, **changes) -> None:
    meter = measured(*args, **changes)
    control.lr_scale(meter)
    control.update(meter, grad_norm=grad_norm, step_s=step_s)


def drifting(control: StalenessControl, scale: float, num_steps: int, *, exponent: float = 1.5) -> list[int]:
    """A closed loop: a bound shows in the lags of a batch as many steps later as it is long. The leads of all steps."""
    rng, etas = Random(0), []
    in_force: deque[int] = deque([control.eta] * 200, maxlen=200)
    for _ in range(num_steps):
        in_force.append(control.eta)
        oldest = in_force[-1 - min(199, in_force[-1])] + 1
        lags = {lag: scale * lag**exponent * math.exp(rng.gauss(0.0, 0.1)) for lag in range(oldest + 1)}
        step(control, lags, ess=math.exp(-N_EFF * sum(lags.values()) / len(lags)))
        etas.append(control.eta)
    return etas


# --- the lag bound ----------------------------------------------------------------------------------------------------


def test_the_lead_settles_where_the_predicted_ess_of_the_oldest_data_is_the_target():
    scale = math.log(2.0) / N_EFF / 21.0**1.5  # ESS 0.5 at lag 21
    control = control_of("staleness.adaptive.breaker=false")

    etas = drifting(control, scale, 700)

    assert 17 <= min(etas[-200:]) and max(etas[-200:]) <= 22, etas[-200:]
    assert max(etas[-200:]) - min(etas[-200:]) <= 2, "the bound chases its own delay"
    assert control.max_lag == control.eta + 1
    assert control.tracker.num_effective_tokens == pytest.approx(N_EFF, rel=0.1)
    tracker = control.tracker
    assert 0.35 < predict_ess(tracker.m2_at(control.max_lag), tracker.num_effective_tokens) < 0.65


def test_faster_drift_lowers_the_lead_and_slower_drift_raises_it_again():
    scale = math.log(2.0) / N_EFF / 11.0**1.5
    control = control_of("staleness.adaptive.breaker=false")

    calm, wild, calm_again = (drifting(control, factor * scale, 350)[-1] for factor in (1.0, 8.0, 1.0))

    assert 8 <= calm <= 12 and 8 <= calm_again <= 12
    assert wild <= 4


@pytest.mark.shows("staleness.adaptive.min_eta", "staleness.adaptive.max_eta", "staleness.adaptive.ess_target")
def test_a_stricter_target_gives_a_shorter_lead_inside_the_bounds_that_are_set():
    scale = math.log(2.0) / N_EFF / 21.0**1.5
    words = ("staleness.adaptive.breaker=false",)
    loose = drifting(control_of(*words), scale, 400)[-1]
    strict = drifting(control_of(*words, "staleness.adaptive.ess_target=0.9"), scale, 400)[-1]
    capped = drifting(control_of(*words, "staleness.adaptive.max_eta=6"), scale, 300)
    floored = drifting(control_of(*words, "staleness.adaptive.min_eta=3"), 100 * scale, 300)

    assert strict < loose
    assert max(capped) == capped[-1] == 6
    assert min(floored) == floored[-1] == 3


@pytest.mark.shows("staleness.adaptive.half_life_steps")
def test_a_short_memory_follows_a_change_of_drift_sooner():
    scale = math.log(2.0) / N_EFF / 11.0**1.5
    etas = {}
    for half_life in (3, 300):
        control = control_of("staleness.adaptive.breaker=false", f"staleness.adaptive.half_life_steps={half_life}")
        drifting(control, scale, 300)
        etas[half_life] = drifting(control, 8.0 * scale, 60)[-1]

    assert etas[3] < etas[300]


def test_without_drift_any_lead_is_fine_and_with_no_budget_left_at_lag_zero_none_is():
    free = control_of()
    for _ in range(400):
        step(free, {0: 0.0, 1: 0.0})
    spent = control_of("staleness.adaptive.breaker=false")
    for _ in range(400):
        step(spent, {0: 0.05, 1: 0.06}, ess=0.2)

    assert free.eta == 40 and spent.eta == 1


def test_under_reweight_the_discount_begins_where_the_rule_says_and_the_hard_bound_keeps_its_distance():
    control = control_of(
        "staleness.mode=reweight", "staleness.max_lag=2", "staleness.hard_max_lag=7", "staleness.adaptive.breaker=false"
    )
    assert (control.eta, control.soft_max_lag, control.max_lag) == (4, 2, 7)

    drifting(control, math.log(2.0) / N_EFF / 21.0**1.5, 600)

    assert 17 <= control.soft_max_lag <= 22
    assert control.max_lag - control.eta == 3 and control.eta - control.soft_max_lag == 2


@pytest.mark.shows("staleness.decay")
def test_the_decay_says_how_fast_old_tokens_lose_their_say():
    lags, mask = torch.tensor([[0, 2, 3, 5]]), torch.ones(1, 4, dtype=torch.bool)
    words = ("staleness.mode=reweight", "staleness.max_lag=2")
    seen = {
        decay: control_of(*words, f"staleness.decay={decay}").lag_policy.weights(lags, mask).tolist()[0]
        for decay in (0.5, 0.1)
    }

    assert seen[0.5] == pytest.approx([1, 1, 0.5, 0.125]) and seen[0.1] == pytest.approx([1, 1, 0.1, 0.001])


def test_the_drift_that_is_usual_at_each_lag_is_known_to_the_guards_that_read_it():
    for words, known in (((), False), (("loss.zscore_bound=2.5",), True)):
        control = control_of("staleness.adaptive.enabled=false", *words)
        assert control.lag_policy.expected_m2(torch.tensor([[0, 3]])) is None, "nothing is known before the first batch"
        step(control, {0: 0.0, 1: 0.01, 3: 0.03, 5: 0.05}, num_tokens=10**9)
        usual = control.lag_policy.expected_m2(torch.tensor([[0, 2, 3, 99]]))
        assert (usual is not None) is known
        if known:
            assert usual.tolist()[0] == pytest.approx([0.0, 0.02, 0.03, 0.05], rel=1e-3)


def test_each_mode_has_its_own_rule_of_age():
    masked = control_of("staleness.mode=mask_old_tokens", "staleness.max_lag=4").lag_policy
    waits, drops = control_of("staleness.mode=wait"), control_of()

    assert (masked.mask_beyond, masked.discount_beyond) == (4, None)
    assert (waits.eta, waits.max_lag, drops.max_lag) == (4, 4, 5)
    for control in (waits, drops):
        assert (control.lag_policy.mask_beyond, control.lag_policy.discount_beyond) == (None, None)


@pytest.mark.shows("staleness.adaptive.enabled")
def test_disabled_it_measures_and_changes_nothing():
    control = control_of("staleness.adaptive.enabled=false")
    for _ in range(50):
        step(control, {0: 0.0, 5: 1.0}, ess=0.01, queue=4.0)

    assert (control.eta, control.max_lag, control.mode, control.bounds) == (4, 5, "normal", None)
    assert control.opsm_on, "off-policy masking does not need the adaptive control"


# --- goodput ----------------------------------------------------------------------------------------------------------


@pytest.mark.shows("staleness.adaptive.rule")
def test_goodput_climbs_to_the_lead_with_the_most_effective_groups_a_second():
    """The learner waits at short leads, samples lose value at long ones: the best is in between."""
    words = ("staleness.adaptive.rule=goodput", "staleness.adaptive.num_trial_steps=5", "staleness.adaptive.max_eta=12")
    control, rng, seen = control_of(*words, "staleness.adaptive.breaker=false"), Random(1), []
    for _ in range(600):
        ess = math.exp(-0.08 * control.eta)
        seconds = max(1.0, 3.0 - 0.4 * control.eta) * math.exp(rng.gauss(0.0, 0.02))
        step(control, {0: 0.0, 1: 0.001}, ess=ess, step_s=seconds)
        seen.append(control.eta)

    assert sum(abs(eta - 5) <= 1 for eta in seen[200:]) > 0.9 * len(seen[200:]), seen[200:]
    assert all(1 <= eta <= 12 for eta in seen)


@pytest.mark.shows("staleness.adaptive.num_trial_steps")
def test_the_length_of_a_trial_is_the_one_that_is_set():
    first_trial = {}
    for num_steps in (4, 9):
        control = control_of("staleness.adaptive.rule=goodput", f"staleness.adaptive.num_trial_steps={num_steps}")
        first_trial[num_steps] = next(n for n in range(1, 50) if step(control) or control.eta != 4)

    assert first_trial == {4: 4, 9: 9}


@pytest.mark.parametrize("words", [("staleness.adaptive.max_eta=4", "staleness.adaptive.min_eta=4"),
                                   ("staleness.adaptive.max_eta=4", "staleness.adaptive.min_eta=3")])
def test_a_trial_never_leaves_the_bounds(words):
    control = control_of("staleness.adaptive.rule=goodput", "staleness.adaptive.num_trial_steps=2", *words)
    etas = set()
    for number in range(100):
        step(control, ess=0.5 + 0.3 * (number % 2))
        etas.add(control.eta)

    assert etas == {int(word.rpartition("=")[2]) for word in words}


# --- the circuit breaker ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trouble", [{"ess": 0.2}, {"grad_norm": 20.0}, {"grad_norm": math.nan, "ess": None}])
def test_trouble_halves_the_lead_freezes_the_constraints_and_health_brings_it_back(trouble, caplog):
    control = control_of("staleness.adaptive.rule=fixed")
    step(control)
    with caplog.at_level(logging.INFO, logger="streamrl.learner"):
        step(control, **trouble)
        assert (control.mode, control.eta, control.max_lag, control.frozen) == ("cautious", 2, 3, True)
        assert control.lag_policy.opsm_scale == 0.5
        for _ in range(20):
            step(control)
    assert (control.mode, control.eta, control.frozen) == ("normal", 4, False)
    assert control.lag_policy.opsm_scale == 1.0
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert "normal -> cautious" in caplog.text and "eta 4 -> 2" in caplog.text


def test_a_collapse_with_a_full_queue_drains_it_and_an_empty_queue_ends_the_drain():
    control = control_of("staleness.adaptive.rule=fixed")
    step(control, ess=0.05, queue=3.0)
    assert (control.mode, control.eta, control.max_lag) == ("drain", 0, 1)
    step(control, ess=0.05, queue=0.5)
    assert (control.mode, control.eta) == ("cautious", 2)


def test_drift_that_swings_back_is_trouble_only_if_it_is_large_enough_to_matter():
    for size, mode in ((0.05, "cautious"), (0.02, "normal")):
        control = control_of("staleness.adaptive.rule=fixed")
        step(control, {0: 0.0, 2: size, 10: 0.1 * size, 12: 0.1 * size})
        assert control.mode == mode


def test_a_rate_at_its_floor_for_five_steps_is_trouble():
    control = control_of("staleness.adaptive.rule=fixed", "policy.scheduler.ess_rule=linear",
                         "policy.scheduler.ess_floor=0.5")
    modes = [step(control, ess=0.4) or control.mode for _ in range(6)]

    assert modes == ["normal"] * 4 + ["cautious"] * 2


@pytest.mark.shows("staleness.adaptive.breaker")
def test_without_the_breaker_trouble_changes_nothing():
    control = control_of("staleness.adaptive.breaker=false", "staleness.adaptive.rule=goodput")
    step(control, ess=0.01, queue=5.0, grad_norm=math.nan)

    assert (control.mode, control.eta) == ("normal", 4)


# --- the step size ----------------------------------------------------------------------------------------------------


@pytest.mark.shows("policy.scheduler.ess_rule")
@pytest.mark.parametrize(("rule", "scales"), [("none", [1, 1, 1]), ("sqrt", [1, 0.5, 0.1]), ("linear", [1, 0.25, 0.1])])
def test_the_rate_is_scaled_by_the_ess_of_the_batch(rule, scales):
    control = control_of(f"policy.scheduler.ess_rule={rule}", "staleness.adaptive.enabled=false")

    assert [control.lr_scale(measured(ess=ess)) for ess in (1.0, 0.25, 1e-4)] == pytest.approx(scales)
    assert control.lr_scale(measured(ess=None)) == 1.0


@pytest.mark.shows("policy.scheduler.ess_floor")
def test_the_floor_of_the_rate_is_the_one_that_is_set():
    control = control_of("policy.scheduler.ess_rule=sqrt", "policy.scheduler.ess_floor=0.3")

    assert control.lr_scale(measured(ess=1e-4)) == 0.3


# --- gates and publishing ---------------------------------------------------------------------------------------------


@pytest.mark.shows("staleness.adaptive.m2_target")
def test_off_policy_masking_goes_on_while_drift_at_the_mean_lag_is_over_its_budget():
    control = control_of("staleness.adaptive.half_life_steps=1", "staleness.adaptive.m2_target=0.01")
    seen = []
    for m2 in (0.001, 0.05, 0.05, 0.0, 0.0, 0.0, 0.0, 0.0):
        step(control, {2: m2}, num_tokens=5000)
        seen.append(control.opsm_on)

    assert seen[0] is False and seen[1] is True and seen[-1] is False
    lenient = control_of("staleness.adaptive.m2_target=1.0")
    step(lenient, {2: 0.05})
    assert not lenient.opsm_on


@pytest.mark.shows("staleness.adaptive.group_spread")
def test_the_spread_of_a_group_is_limited_by_drift_only_if_asked_for():
    budgets = []
    for words in ((), ("staleness.adaptive.group_spread=true",)):
        control = control_of(*words)
        step(control, {lag: 0.00099 * lag for lag in range(30)}, num_tokens=10**9)
        budgets.append(control.spread_budget)

    assert budgets == [None, 10]


@pytest.mark.shows("publish.when")
def test_on_drift_a_version_is_published_once_a_quarter_of_the_budget_is_spent_or_half_the_lead():
    def versions(per_step: float, *words: str) -> list[int]:
        control = control_of("publish.when=drift", "staleness.adaptive.rule=fixed", *words)
        published = []
        for version in range(13):
            if control.publish_due(version):
                control.published(version)
                published.append(version)
            step(control, {lag: per_step * lag for lag in range(6)}, num_tokens=10**9)
        return published

    assert versions(0.0) == [0, 3, 6, 9, 12]  # nothing drifts: only the lead of 4 asks for it
    assert versions(0.004, "staleness.eta=12") == [0, 3, 6, 9, 12]  # 3 steps drift 0.012, over 0.01
    assert versions(0.02) == list(range(13))
    control = control_of("publish.when=drift")
    assert control.publish_due(7)
    control.published(7)
    assert not control.publish_due(7, asked_for=True) and control.publish_due(8, asked_for=True)
    assert versions(0.0, "staleness.eta=1") == versions(0.0, "publish.when=every_step") == list(range(13))


@pytest.mark.shows("publish.every_steps")
def test_every_third_step_is_published_but_for_evaluations_and_a_lead_that_is_gone():
    def versions(*words: str, asked_for: int = -1) -> list[int]:
        control, published = control_of("staleness.adaptive.enabled=false", *words), []
        for version in range(0, 26, 2):
            if control.publish_due(version, asked_for=version == asked_for):
                control.published(version)
                published.append(version)
        return published

    two_steps = "learner.num_epochs=2"
    assert versions(two_steps) == list(range(0, 26, 2))
    assert versions(two_steps, "publish.every_steps=3") == [0, 6, 12, 18, 24]
    assert versions(two_steps, "publish.every_steps=3", asked_for=8) == [0, 6, 8, 14, 20]
    drained = control_of("publish.every_steps=3")
    drained._breaker = replace(drained._breaker, mode="drain")
    assert drained.publish_due(0) and drained.eta == 0
    drained.published(0)
    assert drained.publish_due(1), "actors without a lead need every version"


@pytest.mark.parametrize(("words", "message"), [
    (["publish.every_steps=6"], "publish.every_steps=6 is more than staleness.eta=4 [+] 1"),
    (["publish.every_steps=2", "publish.when=drift"], "goes with publish.when=every_step"),
    (["publish.every_steps=2", "staleness.adaptive.enabled=false", "staleness.force=2"], "and staleness.force=2"),
])
def test_versions_are_not_kept_from_actors_that_could_not_go_on(words, message):
    with pytest.raises(ConfigError, match=message):
        control_of(*words)


# --- records ----------------------------------------------------------------------------------------------------------


def test_every_row_says_what_holds():
    control = control_of("policy.scheduler.ess_rule=sqrt")
    step(control, {0: 0.0, 1: 0.01, 2: 0.04, 4: 0.16}, ess=0.25)
    meter = Meter()
    control.add_metrics(meter)
    row = meter.flush(1)

    assert row["drift/exponent"] == pytest.approx(2.0)
    assert row["lr/scale"] == 0.5 and row["control/mode"] == 1 and row["control/eta"] == 2
    assert row["control/max_lag"] == 3 and row["drift/oscillation"] == 0.0


def test_a_control_that_comes_back_from_a_checkpoint_goes_on_where_it_was():
    for rule in ("ess", "goodput", "fixed"):
        control = control_of(f"staleness.adaptive.rule={rule}")
        drifting(control, 1e-4, 60)
        twin = control_of(f"staleness.adaptive.rule={rule}")
        twin.restore(json.loads(json.dumps(control.to_json())))
        assert drifting(twin, 2e-4, 40) == drifting(control, 2e-4, 40)
        assert twin.to_json() == control.to_json()


def test_restored_under_tighter_settings_it_moves_inside_them():
    control = control_of("staleness.adaptive.breaker=false")
    drifting(control, 1e-6, 200)
    assert control.eta > 8
    twin = control_of("staleness.adaptive.max_eta=8")
    twin.restore(control.to_json())
    plain = control_of("staleness.adaptive.enabled=false")
    plain.restore(control.to_json())

    assert twin.eta == 8 and plain.eta == 4


def test_a_resumed_control_has_the_lead_that_is_set_now_or_goes_on_from_the_one_that_was_reached():
    off, rules = "staleness.adaptive.enabled=false", ("ess", "goodput")
    for before in (off, *(f"staleness.adaptive.rule={rule}" for rule in rules)):
        control = control_of(before, "staleness.adaptive.breaker=false")
        drifting(control, 1e-6, 60)
        saved = json.loads(json.dumps(control.to_json()))
        assert (control.eta == 4) is (before == off)
        for rule in rules:
            for words, eta, slack in (((), control.eta, 1), (("staleness.eta=7",), 7, 1),
                                      (("staleness.max_lag=9",), control.eta, 5)):
                twin = control_of(f"staleness.adaptive.rule={rule}", *words)
                twin.restore(saved)
                assert (twin.eta, twin.max_lag) == (eta, eta + slack), (before, rule, words)


def test_sums_by_lag_become_bins_that_keep_count_mean_lag_and_drift():
    bins = to_bins({0: (0.0, 10.0), 8: (1.0, 5.0), 9: (3.0, 15.0), 5000: (9.0, 9.0)})
    tracker = DriftTracker(10.0).observed({0: (0.0, 10.0), 8: (1.0, 5.0), 9: (3.0, 15.0)}, None)

    assert sum(bins.count) == 30  # what is outside all bins is left out
    assert sorted(zip(bins.lag, bins.count, bins.m2, strict=True))[-1] != (8.75, 20.0, 0.2)
    assert (8.75, 20.0, pytest.approx(0.2)) in list(zip(bins.lag, bins.count, bins.m2, strict=True))
    assert tracker.num_effective_tokens == 0.0 and tracker.lag_for(0.5) == math.inf
