"""Constraints: gradients exist, multipliers act, cap and freeze."""

import pytest
import torch

import streamrl.algorithms as alg
from bench import pieces


def scalar(value):
    return torch.tensor(value, dtype=torch.float64, requires_grad=True)


def test_penalty_is_a_hinge_squared_with_a_gradient():
    value = scalar(0.03)

    penalty = alg.constraint_penalty(value, 0.01)
    penalty.backward()

    assert penalty.item() == pytest.approx(10 * 0.02**2)
    assert value.grad.item() == pytest.approx(20 * 0.02)
    assert alg.constraint_penalty(scalar(0.005), 0.01).item() == 0
    assert alg.constraint_penalty(scalar(0.005), 0.01, sense="min").item() == pytest.approx(10 * 0.005**2)


@pytest.mark.parametrize("sense, sign", [("max", 1.0), ("min", -1.0)])
def test_lagrangian_loss_keeps_acting_at_the_boundary_unless_one_sided(sense, sign):
    for one_sided in (False, True):
        satisfied = scalar(0.01 - sign * 0.005)
        loss = pieces.lagrangian_loss(satisfied, 0.01, 2.0, sense=sense, one_sided=one_sided)
        loss.backward()
        assert loss.item() == pytest.approx(0.0 if one_sided else -0.01)
        assert satisfied.grad.item() == pytest.approx(0.0 if one_sided else 2 * sign)
    violated = scalar(0.01 + sign * 0.005)
    assert pieces.lagrangian_loss(violated, 0.01, 2.0, sense=sense, one_sided=True).item() == pytest.approx(0.01)


def test_the_multiplier_is_a_constant_of_the_loss():
    multiplier = scalar(2.0)

    pieces.lagrangian_loss(scalar(0.5), 0.1, multiplier).backward()

    assert multiplier.grad is None


def test_gradcheck():
    for call in (
        lambda v: alg.constraint_penalty(v, 0.1),
        lambda v: pieces.lagrangian_loss(v, 0.1, 2.0, sense="min"),
        lambda v: pieces.lagrangian_loss(v, 0.1, 2.0, one_sided=True),
    ):
        assert torch.autograd.gradcheck(call, (scalar(0.4),))


@pytest.mark.parametrize("update", [alg.lagrangian_update, alg.pid_lagrangian_update])
def test_multipliers_start_at_zero_stay_in_bounds_and_freeze(update):
    state = alg.ConstraintState()
    assert state.multiplier == 0.0
    for _ in range(2000):
        state = update(state, 3.0, 0.0, high=1.5)
    assert state.multiplier == 1.5

    frozen = update(state, -5.0, 0.0, frozen=True)
    assert (frozen.multiplier, frozen.integral) == (state.multiplier, state.integral)

    for _ in range(2000):
        state = update(state, -3.0, 0.0, high=1.5)
    assert state.multiplier == 0.0


def test_a_capped_pid_multiplier_comes_down_at_once():
    state = alg.ConstraintState()
    for _ in range(10_000):
        state = alg.pid_lagrangian_update(state, 1.0, 0.0, high=0.5)

    state = alg.pid_lagrangian_update(state, -1.0, 0.0, high=0.5)

    assert state.multiplier < 0.5
