"""Weights that move: each controller goes the right way, every knob counts, and a restart changes nothing."""

import json

import pytest
import torch

from learner.objective.regularizers import LossWeights, Regularizers
from streamrl.algorithms import constraint_penalty
from streamrl.config.schema import ConstraintConfig, ConstraintMethod, EntropyAdapt, EntropyConfig, KlConfig, LossConfig
from streamrl.errors import ConfigError
from streamrl.metrics.meter import Meter
from tests.kit.learning import make_objective

FEEDBACK = ("exponential", "linear", "pid", "horizon", "doubling", "log_integral")
PENALTY, PID = ConstraintMethod.penalty, ConstraintMethod.pid


def kl_config(controller: str = "constant", **options) -> KlConfig:
    if controller == "horizon":
        options.setdefault("horizon", 1000)
    return KlConfig(mode="k2_is", coef=options.pop("coef", 0.2), controller=controller, options=options)


def controls(kl=None, entropy=None, constraint=None, loss=None, **options) -> LossWeights:
    return LossWeights(
        kl or KlConfig(), entropy or EntropyConfig(), constraint or ConstraintConfig(), loss or LossConfig(), **options
    )


def seen(*, kl: float | None = None, entropy: float | None = None, num_trajectories: int = 100) -> Meter:
    """What a step measured."""
    meter = Meter()
    for key, value in (("kl/value", kl), ("entropy/mean", entropy)):
        if value is not None:
            meter.add(key, value)
    meter.add("policy/num_trajectories", num_trajectories)
    return meter


def run(made: LossWeights, *values: float, of: str = "kl", first: int = 1, **options) -> LossWeights:
    for step, value in enumerate(values, start=first):
        made.update(seen(**{of: value}), num_steps=step, **options)
    return made


def recorded(made: LossWeights) -> dict:
    meter = Meter()
    made.record(meter)
    return meter.flush(0)


@pytest.mark.shows("kl.controller")
@pytest.mark.parametrize("controller", FEEDBACK)
def test_a_kl_above_the_target_raises_the_weight_and_one_below_lowers_it(controller):
    above, below = (run(controls(kl_config(controller)), *([kl] * 3)).kl_coef for kl in (0.05, 0.001))

    assert above > 0.2 > below


@pytest.mark.shows("kl.options")
@pytest.mark.parametrize(
    ("controller", "knob", "value"),
    [
        ("exponential", "up", 2.0), ("exponential", "target", 1.0), ("linear", "factor", 0.1), ("pid", "kp", 1.0),
        ("pid", "ki", 1.0), ("pid", "kd", 1.0), ("pid", "integral_bound", 0.01), ("horizon", "horizon", 100),
        ("horizon", "clip", 0.01), ("doubling", "target", 1.0), ("log_integral", "gain", 1.0),
        ("log_integral", "high", 0.21), ("schedule", "num_steps", 5), ("schedule", "kind", "linear"),
    ],
)
def test_every_knob_of_a_controller_counts(controller, knob, value):
    plain, changed = (
        run(controls(kl_config(controller, **options)), 0.05, 0.3).kl_coef for options in ({}, {knob: value})
    )

    assert plain != pytest.approx(changed, rel=1e-6)


def test_without_a_controller_the_weight_stays_and_with_mode_off_it_is_zero():
    assert run(controls(kl_config()), 5.0, 5.0).kl_coef == 0.2
    assert run(controls(KlConfig()), 5.0).kl_coef == 0.0


def test_a_weight_that_is_not_set_starts_small_if_constant_and_at_a_fifth_under_a_controller():
    starts = [controls(KlConfig(mode="k2_is", controller=name)).kl_coef for name in ("constant", "pid")]

    assert starts == [0.001, 0.2]


def test_a_schedule_follows_the_steps_whatever_is_measured():
    made = controls(kl_config("schedule", kind="linear", num_steps=10))

    assert made.kl_coef == 0.2
    assert [run(made, 9.0, first=v).kl_coef for v in (1, 5, 9)] == pytest.approx([0.18, 0.1, 0.02])
    assert controls(kl_config("schedule", kind="linear", num_steps=10), num_steps=5).kl_coef == pytest.approx(0.1)


def test_a_step_that_measured_nothing_moves_nothing():
    made = controls(
        kl_config("doubling"), EntropyConfig(target=1.0, adapt=EntropyAdapt.coef), ConstraintConfig(kl_limit=0.01)
    )
    run(made, 0.5)
    before = made.to_plain()
    made.update(Meter(), num_steps=2)

    assert made.to_plain() == before


@pytest.mark.shows("entropy.target", "entropy.step", "entropy.low", "entropy.high")
def test_low_entropy_raises_the_bonus_and_high_entropy_lowers_it_and_lets_it_rest():
    entropy = EntropyConfig(target=1.0, adapt=EntropyAdapt.coef, step=0.1, high=0.35)
    made = controls(entropy=entropy, loss=LossConfig(entropy_coef=0.2))

    assert made.entropy_coef == 0.2
    assert run(made, 0.5, of="entropy").entropy_coef == pytest.approx(0.3)
    assert run(made, 0.5, of="entropy").entropy_coef == pytest.approx(0.35)  # entropy.high
    assert run(made, 1.5, of="entropy").entropy_coef == 0.0  # lowered, and at rest while the entropy is high
    assert run(made, 0.9, of="entropy").entropy_coef == pytest.approx(0.35)
    floor = controls(entropy=EntropyConfig(target=1.0, adapt=EntropyAdapt.coef, low=0.19, step=0.1), loss=LossConfig(
        entropy_coef=0.2))
    assert run(floor, 1.5, of="entropy").to_plain()["entropy_coef"] == 0.19


@pytest.mark.shows("entropy.adapt")
def test_low_entropy_widens_the_upper_clip_within_its_bounds():
    entropy = EntropyConfig(target=1.0, adapt=EntropyAdapt.clip_high, step=0.1)
    made = controls(entropy=entropy)

    assert run(made, 0.5, of="entropy").clip_high == pytest.approx(0.38)
    assert run(made, 0.5, 0.5, of="entropy").clip_high == 0.5
    assert run(made, *([1.5] * 9), of="entropy").clip_high == 0.2
    assert recorded(made)["clip/high"] == 0.2 and made.entropy_coef == 0.0
    assert run(controls(), 0.5, of="entropy").clip_high == 0.28


@pytest.mark.shows("loss.clip_decay")
def test_the_clip_shrinks_linearly_to_its_part_at_the_end_of_the_run():
    loss = LossConfig(clip_low=0.2, clip_high=0.4, clip_decay=0.25)
    made = controls(loss=loss, total_steps=8)
    objective = make_objective(loss=loss, regularizers=Regularizers(KlConfig(), ConstraintConfig(), loss, made))

    for step, left in enumerate([1.0 - 0.75 * done / 8 for done in range(9)] + [0.25]):
        made.update(seen(), num_steps=step)
        knobs = objective.surrogate_options
        assert (knobs["eps_low"], knobs["eps_high"]) == pytest.approx((0.2 * left, 0.4 * left))
    assert controls(loss=loss, total_steps=8, num_steps=4).clip_scale == pytest.approx(0.625), "a resumed run"
    assert run(controls(), 0.1).clip_scale == 1.0
    with pytest.raises(ConfigError, match="loss.clip_decay=0.5 does nothing with loss.surrogate='tis'"):
        make_objective(loss=LossConfig(surrogate="tis", clip_decay=0.5))


def test_a_multiplier_grows_while_its_constraint_is_violated_and_shrinks_after():
    made = controls(constraint=ConstraintConfig(kl_limit=0.1, entropy_min=1.0, options={"lr": 0.5}))

    assert made.multipliers == {"kl": 0.0, "entropy": 0.0}
    made.update(seen(kl=0.3, entropy=0.4), num_steps=1)
    assert made.multipliers == pytest.approx({"kl": 0.1, "entropy": 0.3})
    made.update(seen(kl=0.0, entropy=1.2), num_steps=2)
    assert made.multipliers == pytest.approx({"kl": 0.05, "entropy": 0.2})
    assert recorded(made) == pytest.approx({"step": 0, "constraint/kl": 0.05, "constraint/entropy": 0.2})


def test_violations_of_a_constraint_are_counted_and_averaged_over_the_run():
    constraint = ConstraintConfig(kl_limit=0.1, entropy_min=1.0)
    made, resumed = controls(constraint=constraint), controls(constraint=constraint)

    def stats(one, **measured):
        step = seen(**measured)
        one.record(step)
        found = step.flush(0)
        return [found[f"constraint/{name}_{kind}"] for name in ("kl", "entropy") for kind in (
            "satisfied", "violation", "violation_mean", "num_violations")]

    assert stats(made, kl=0.3, entropy=1.2) == pytest.approx([0, 0.2, 0.2, 1, 1, 0, 0, 0])
    assert stats(made, kl=0.05, entropy=0.4) == pytest.approx([1, 0, 0.1, 1, 0, 0.6, 0.3, 1])
    resumed.restore(json.loads(json.dumps(made.to_plain())))
    assert stats(resumed, kl=0.2, entropy=0.7) == pytest.approx([0, 0.1, 0.1, 2, 0, 0.3, 0.3, 2])


@pytest.mark.shows("constraint.one_sided")
def test_a_one_sided_constraint_keeps_its_multiplier_but_is_silent_while_it_holds():
    both, one = (
        run(controls(constraint=ConstraintConfig(kl_limit=0.1, options={"lr": 0.5}, one_sided=x)), 0.5, 0.05)
        for x in (False, True)
    )

    assert both.multipliers["kl"] == pytest.approx(0.175) and one.multipliers["kl"] == 0.0
    assert one.to_plain()["constraints"] == both.to_plain()["constraints"]


@pytest.mark.parametrize("method", [ConstraintMethod.lagrangian, PID])
def test_frozen_multipliers_wait_until_the_data_is_fresh_enough(method):
    made = run(controls(constraint=ConstraintConfig(kl_limit=0.1, method=method)), 0.5)
    before = made.multipliers

    assert run(made, 0.9, frozen=True).multipliers == before
    assert run(made, 0.9).multipliers["kl"] > before["kl"]


@pytest.mark.shows("constraint.method", "constraint.options")
def test_a_pid_multiplier_answers_at_once_and_reads_its_gains():
    plain, keen = (
        run(controls(constraint=ConstraintConfig(kl_limit=0.1, method=PID, options=gains)), 0.6).multipliers["kl"]
        for gains in ({}, {"kp": 1.0})
    )

    assert plain == pytest.approx(0.1 * 0.5 + 0.01 * 0.5 + 0.001 * 0.5) and keen == pytest.approx(plain + 0.9 * 0.5)


@pytest.mark.parametrize(("name", "limit", "value"), [("kl", 0.1, 0.4), ("entropy", 1.0, 0.3), ("kl", 0.1, 0.05)])
def test_the_penalty_weighs_each_token_with_the_slope_of_the_squared_violation(name, limit, value):
    setting = {"kl": "kl_limit", "entropy": "entropy_min"}[name]
    made = controls(constraint=ConstraintConfig(**{setting: limit}, method=PENALTY, options={"weight": 3.0}))
    mean = torch.tensor(value, dtype=torch.float64, requires_grad=True)
    sense = {"kl": "max", "entropy": "min"}[name]
    (slope,) = torch.autograd.grad(constraint_penalty(mean, limit, sense=sense, weight=3.0), mean)

    assert run(made, value, of=name).multipliers[name] == pytest.approx(abs(float(slope)))


EVERYTHING = {
    "kl": kl_config("pid"), "entropy": EntropyConfig(target=1.0, adapt=EntropyAdapt.coef, step=0.1),
    "constraint": ConstraintConfig(kl_limit=0.1, entropy_min=1.0, method=PID), "loss": LossConfig(entropy_coef=0.2),
}


def test_after_a_restart_the_weights_go_on_as_if_nothing_had_happened():
    whole, second = controls(**EVERYTHING), controls(**EVERYTHING)
    first = controls(**EVERYTHING)
    for step, (kl, entropy) in enumerate([(0.3, 0.5), (0.2, 1.1), (0.4, 0.7), (0.05, 0.9)], start=1):
        measured = seen(kl=kl, entropy=entropy)
        whole.update(measured, num_steps=step)
        (first if step < 3 else second).update(measured, num_steps=step)
        if step == 2:
            second.restore(json.loads(json.dumps(first.to_plain())))

    assert second.to_plain() == whole.to_plain() != first.to_plain()


def test_what_no_controller_moves_follows_the_setting_of_the_resumed_run():
    saved = run(controls(kl_config(coef=0.2)), 0.5).to_plain()
    resumed = controls(kl_config(coef=0.5), loss=LossConfig(clip_high=0.4, entropy_coef=0.01))
    resumed.restore(saved)

    assert (resumed.kl_coef, resumed.clip_high, resumed.entropy_coef) == (0.5, 0.4, 0.01)
    added = controls(constraint=ConstraintConfig(kl_limit=0.1))
    added.restore(saved)
    assert added.multipliers == {"kl": 0.0}


def test_a_weight_that_the_resumed_run_begins_elsewhere_is_not_that_of_the_run_before():
    adapts = {
        "coef": EntropyConfig(target=1.0, adapt=EntropyAdapt.coef),
        "clip": EntropyConfig(target=1.0, adapt=EntropyAdapt.clip_high, low=0.1),
    }
    befores = [controls(), controls(kl_config(coef=0.3), loss=LossConfig(entropy_coef=0.2, clip_high=0.35))]
    befores += [controls(kl_config(rule, coef=0.3)) for rule in FEEDBACK]
    befores += [controls(entropy=one, loss=LossConfig(entropy_coef=0.2, clip_high=0.35)) for one in adapts.values()]
    for before in befores:
        saved = json.loads(json.dumps(run(run(before, 0.5), 0.2, of="entropy").to_plain()))
        for rule in FEEDBACK:
            resumed = controls(kl_config(rule, coef=0.5))
            resumed.restore(saved)
            assert resumed.kl_coef == 0.5, (rule, saved)
        resumed = [controls(entropy=one, loss=LossConfig(entropy_coef=0.04, clip_high=0.3)) for one in adapts.values()]
        for one in resumed:
            one.restore(saved)
        assert (resumed[0].to_plain()["entropy_coef"], resumed[1].clip_high) == (0.04, 0.3), saved


def test_another_controller_goes_on_from_the_weight_without_the_sums_of_the_one_before():
    before = run(controls(kl_config("pid", coef=0.3)), 0.5)
    resumed = controls(kl_config("log_integral", coef=0.3))
    resumed.restore(before.to_plain())

    assert resumed.to_plain()["kl"] == {"coef": before.kl_coef, "integral": 0.0, "previous_error": 0.0}
    assert before.kl_coef != 0.3


def test_only_weights_that_exist_are_recorded():
    assert recorded(controls()) == {"step": 0}
    assert recorded(controls(kl_config(), loss=LossConfig(entropy_coef=0.1))) == {
        "step": 0, "kl/coef": 0.2, "entropy/coef": 0.1
    }
