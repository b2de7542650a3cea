"""Forward, backward, clip, step: on one process."""

import copy
import math

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from learner.data.packing import pack
from learner.model.gradients import BatchResult, GradientCosine, StepResult, grad_norm, optimizer_step
from learner.model.optimizer import SCHEDULES, Schedule, make_optimizer, make_schedule
from learner.model.policy import load_policy
from learner.ranks.mesh import Ranks
from streamrl.config.schema import AdvantageConfig, LossConfig, OptimizerConfig, ScheduleConfig, SchedulerConfig
from streamrl.errors import ConfigError
from tests.kit.learning import OneBatch, batch, make_objective, plan_of

ALONE = Ranks()
CONSTANT = Schedule("constant", 1e-3, 10)


def gradients(policy, rows, *, max_tokens=500, loss=None, advantage=None):
    made = make_objective(advantage or AdvantageConfig(), loss or LossConfig())
    one = OneBatch(made, rows, plan_of(rows), version=5)
    micro_batches = pack(rows, max_tokens)
    one.score(policy, micro_batches)
    total = sum(float(one.forward_backward(policy, micro)) for micro in micro_batches)
    return total, [p.grad.clone() for p in policy.parameters()]


def test_the_number_of_micro_batches_changes_neither_loss_nor_gradients(checkpoints):
    policy, rows = load_policy(checkpoints["qwen3-tied"]), batch(3, 4)
    whole, expected = gradients(policy, rows)
    policy.zero_grad()
    split, got = gradients(policy, rows, max_tokens=25)

    assert split == pytest.approx(whole, abs=1e-6)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)


def test_a_surrogate_that_must_see_the_batch_first_leaves_no_gradient_while_it_looks(checkpoints):
    policy, rows = load_policy(checkpoints["qwen3-tied"]), batch(3, 4)
    made = make_objective(AdvantageConfig(), LossConfig(surrogate="m2po"))
    one = OneBatch(made, rows, plan_of(rows), version=5)
    micro_batches = pack(rows, 60)
    one.score(policy, micro_batches)

    assert all(p.grad is None for p in policy.parameters())
    assert all(math.isfinite(one.forward_backward(policy, micro)) for micro in micro_batches)


def test_the_gradient_norm_is_global_and_clipping_scales_all_gradients_alike(checkpoints):
    policy = load_policy(checkpoints["llama-tied"])
    _, before = gradients(policy, batch(2, 3))
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in before))
    kept = torch.optim.SGD(policy.parameters(), lr=1.0)
    weights = [p.detach().clone() for p in policy.parameters()]

    result = optimizer_step(
        policy, kept, Schedule("constant", 1.0, 10), step=0, max_grad_norm=norm / 3, ranks=ALONE
    )

    assert result.grad_norm == pytest.approx(norm, rel=1e-5) and not result.skipped and result.lr == 1.0
    for old, new, grad in zip(weights, policy.parameters(), before, strict=True):
        torch.testing.assert_close(old - new.detach(), grad / 3, atol=1e-6, rtol=1e-4)
    assert all(p.grad is None for p in policy.parameters())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_skips_the_step_and_touches_nothing(checkpoints, bad):
    policy = load_policy(checkpoints["llama-tied"])
    optimizer = make_optimizer(policy, OptimizerConfig(lr=1e-3))
    gradients(policy, batch(2, 3))
    optimizer_step(policy, optimizer, CONSTANT, step=0, max_grad_norm=1.0, ranks=ALONE)
    weights, moments = copy.deepcopy(policy.state_dict()), copy.deepcopy(optimizer.state_dict())
    gradients(policy, batch(2, 3))
    next(policy.parameters()).grad[0, 0] = bad

    result = optimizer_step(policy, optimizer, CONSTANT, step=1, max_grad_norm=1.0, ranks=ALONE)

    assert result.skipped and not math.isfinite(result.grad_norm)
    assert all(torch.equal(weights[name], value) for name, value in policy.state_dict().items())
    for index, state in optimizer.state_dict()["state"].items():
        assert all(torch.equal(moments["state"][index][key], value) for key, value in state.items())
    assert all(p.grad is None for p in policy.parameters())


def test_three_steps_lower_the_loss_of_the_same_batch(checkpoints):
    policy, rows = load_policy(checkpoints["qwen3-tied"]), batch(3, 4)
    optimizer = make_optimizer(policy, OptimizerConfig(lr=1e-3))
    loss = LossConfig(surrogate="reinforce", allow_uncorrected=True, veto_low=None, veto_high=None)
    advantage = AdvantageConfig(estimator="group")
    values = []
    for step in range(4):
        values.append(gradients(policy, rows, loss=loss, advantage=advantage)[0])
        optimizer_step(policy, optimizer, CONSTANT, step=step, max_grad_norm=1.0, ranks=ALONE)
    assert values == sorted(values, reverse=True)


def test_weight_decay_spares_norms_and_biases(checkpoints):
    optimizer = make_optimizer(load_policy(checkpoints["qwen3-tied"]), OptimizerConfig(weight_decay=0.1))

    decays = {p.dim(): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert decays == {2: 0.1, 1: 0.0}


def test_schedules_warm_up_then_stay_or_fall_to_their_end():
    linear = Schedule("linear", 1.0, 12, num_warmup_steps=2, min_lr=0.1)
    cosine = Schedule("cosine_with_min_lr", 1.0, 12, num_warmup_steps=2, min_lr=0.1)
    constant = Schedule("constant", 1.0, 12, num_warmup_steps=2)

    assert [constant.lr_at(n) for n in (0, 1, 2, 99)] == pytest.approx([1 / 3, 2 / 3, 1, 1])
    assert [linear.lr_at(n) for n in (0, 1, 2, 7, 12, 99)] == pytest.approx([1 / 3, 2 / 3, 1, 0.55, 0.1, 0.1])
    assert [cosine.lr_at(n) for n in (2, 7, 12)] == pytest.approx([1, 0.55, 0.1])
    assert cosine.lr_at(4) == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 0.2)))


def left_at(name: str, step: int, *, warmup: int, total: int, decay: int) -> float:
    """The published formulas, from the end of the warm-up to the end of the run, as a share of the peak."""
    progress = (step - warmup) / (total - warmup)
    return {
        "constant": 1.0,
        "linear": 1 - progress,
        "cosine_with_min_lr": (1 + math.cos(math.pi * progress)) / 2,
        "cosine_with_restarts": (1 + math.cos(math.pi * (2 * progress % 1.0))) / 2 if progress < 1 else 0.0,
        "polynomial": (1 - progress) ** 2,
        "inverse_sqrt": math.sqrt(warmup / step),  # Vaswani et al. 2017
        "warmup_stable_decay": 1.0 if step < total - decay else 1 - math.sqrt((step - total + decay) / decay),
    }[name]


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_is_its_formula(name):
    options = {"cosine_with_restarts": {"num_cycles": 2}, "polynomial": {"power": 2.0},
               "warmup_stable_decay": {"decay_type": "1-sqrt"}}.get(name, {})
    own = {"min_lr": 0.5 * (name != "constant"), "decay_ratio": 0.3 if name == "warmup_stable_decay" else 0.1}
    made = make_schedule(
        OptimizerConfig(lr=2.0), ScheduleConfig(name, num_warmup_steps=2, options=options, **own), num_steps=10,
        steps_per_batch=2,
    )

    assert [made.lr_at(n) for n in range(4)] == pytest.approx([0.4, 0.8, 1.2, 1.6])
    expected = [0.5 + 1.5 * left_at(name, n, warmup=4, total=20, decay=6) for n in range(4, 21)]
    assert [made.lr_at(n) for n in range(4, 21)] == pytest.approx(expected, abs=1e-6)
    assert made.lr_at(99) == made.lr_at(20), "a longer run than was planned keeps the last rate"


def halved_every(optimizer, num_training_steps, period=1):
    """A schedule of one's own."""
    return LambdaLR(optimizer, lambda step: 0.5 ** (step // period))


def test_a_schedule_of_ones_own_is_called_as_those_of_transformers_are():
    own = ScheduleConfig(f"{__name__}:halved_every", options={"period": 2})
    made = make_schedule(OptimizerConfig(lr=1.0), own, num_steps=6)

    assert [made.lr_at(n) for n in range(6)] == [1, 1, 0.5, 0.5, 0.25, 0.25]


@pytest.mark.parametrize(("given", "readers"), [
    ({"min_lr": 0.5}, {*SCHEDULES, f"{__name__}:halved_every"} - {"constant"}),
    ({"decay_ratio": 0.5}, {"warmup_stable_decay"}),
])
def test_a_schedule_reads_what_is_set_or_refuses_it_by_name(given, readers):
    for name in (*SCHEDULES, f"{__name__}:halved_every"):
        usual, own = ScheduleConfig(name, num_warmup_steps=2), ScheduleConfig(name, num_warmup_steps=2, **given)
        if name in readers:
            rates = [make_schedule(OptimizerConfig(lr=1.0), one, num_steps=20) for one in (usual, own)]
            assert rates[0].lr_at(19) != rates[1].lr_at(19), name
        else:
            with pytest.raises(ConfigError, match=f"scheduler.{next(iter(given))}=0.5 does nothing with .*name={name}"):
                make_schedule(OptimizerConfig(lr=1.0), own, num_steps=20)


def test_the_schedule_of_the_settings_counts_its_warm_up_in_steps_of_the_run():
    made = make_schedule(
        OptimizerConfig(lr=2e-6), SchedulerConfig(name="linear", warmup_ratio=0.05, min_lr=1e-6), num_steps=50
    )

    assert made == Schedule("linear", 2e-6, 50, num_warmup_steps=3, min_lr=1e-6, num_decay_steps=5)


@pytest.mark.parametrize("name", ["linear", "cosine_with_min_lr", "warmup_stable_decay", "inverse_sqrt"])
def test_a_schedule_begins_when_its_weights_are_trained(name):
    scheduler = ScheduleConfig(name=name, num_warmup_steps=2, decay_ratio=0.5 if name == "warmup_stable_decay" else 0.1)
    late = make_schedule(OptimizerConfig(lr=1.0), scheduler, num_steps=30, steps_per_batch=2, num_frozen_steps=10)
    alone = make_schedule(OptimizerConfig(lr=1.0), scheduler, num_steps=20, steps_per_batch=2)
    assert [late.lr_at(step) for step in range(20, 70)] == [alone.lr_at(step) for step in range(50)]


@pytest.mark.parametrize(("settings", "message"), [
    ({"name": "cosine"}, "critic.scheduler.name=cosine is unknown.*constant, cosine_with_min_lr"),
    ({"name": "linear", "min_lr": 2.0}, "critic.scheduler.min_lr=2.0 must lie between 0 and the peak 1.0"),
    ({"name": "linear", "options": {"power": 2}}, "name=linear cannot take critic.scheduler.options.*'power'"),
    ({"options": {"power": 2}}, "name=constant cannot take critic.scheduler.options.*'power'"),
    ({"warmup_ratio": 0.1, "num_warmup_steps": 3}, "two lengths of one warm-up"),
])
def test_settings_that_make_no_schedule_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        make_schedule(OptimizerConfig(lr=1.0), ScheduleConfig(**settings), num_steps=10, setting="critic.scheduler")


def cosine_of(one: list[list[float]], other: list[list[float]]) -> float:
    """A transcription over lists of numbers."""
    def product(left, right):
        return sum(a * b for x, y in zip(left, right, strict=True) for a, b in zip(x, y, strict=True))
    return product(one, other) / math.sqrt(product(one, one) * product(other, other))


GRADIENTS = [[[3.0, 4.0], [0.0]], [[4.0, 3.0], [0.0]], [[-8.0, -6.0], [0.0]], [[0.0, 0.0], [2.0]]]
COSINES = [None, 0.96, -1.0, 0.0]


@pytest.mark.parametrize("unused_has_none", [False, True])
def test_the_cosine_of_consecutive_gradients_is_that_of_all_parameters_together(unused_has_none):
    measured, before = GradientCosine(), None
    module = torch.nn.ParameterList([torch.zeros(2), torch.zeros(1)])
    for gradients, expected in zip(GRADIENTS, COSINES, strict=True):
        for parameter, one in zip(module, gradients, strict=True):
            parameter.grad = None if unused_has_none and not any(one) else torch.tensor(one)
        norm = grad_norm([one.grad for one in module if one.grad is not None], ALONE)
        found = measured.measure(module, norm, ALONE)
        assert found == (None if expected is None else pytest.approx(expected, abs=1e-6))
        assert found is None or found == pytest.approx(cosine_of(before, gradients), abs=1e-6)
        before = gradients


def test_a_step_measures_its_cosine_before_the_clip_only_if_asked_and_not_past_a_skipped_one():
    layer = torch.nn.Linear(2, 1, bias=False)
    optimizer = make_optimizer(layer, OptimizerConfig())
    asked, found = GradientCosine(), []
    for gradient in ([3.0, 4.0], [30.0, 40.0], [math.nan, 1.0], [4.0, 3.0]):
        layer.weight.grad = torch.tensor([gradient])
        result = optimizer_step(layer, optimizer, CONSTANT, step=0, max_grad_norm=1.0, ranks=ALONE, cosine=asked)
        found.append(result.cosine)
    assert found == [None, pytest.approx(1.0), None, pytest.approx(0.96)], "the last is to the second, not to nan"
    results = tuple(StepResult(1.0, False, 1e-3, one) for one in found)
    assert BatchResult(results).cosine == pytest.approx(0.98)
    layer.weight.grad = torch.tensor([[3.0, 4.0]])
    plain = optimizer_step(layer, optimizer, CONSTANT, step=0, max_grad_norm=1.0, ranks=ALONE)
    assert plain.cosine is None and BatchResult((plain,)).cosine is None
