"""The tensor contract, for every public function that takes a mask: each law in one test that names its offenders."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch

import streamrl.algorithms as alg

from .catalog import DETACHED, EVERYTHING, LOSSES, OTHER_DIFFERENTIABLE, PUBLIC_NAMES, close, tensors
from .rows import random_rows

SEEDS = (0, 1, 2)


def offenders(law: Callable[..., None], calls: Mapping[str, Any], others: Iterable[Any] = (None,)) -> dict[str, str]:
    """Names of the calls that break the law, with the first thing that they broke it by."""
    found: dict[str, str] = {}
    for name, other in product(calls, others):
        try:
            law(*(calls[name],) if other is None else (calls[name], other))
        except (Exception, pytest.fail.Exception) as error:
            found.setdefault(f"{name} {other}", f"{type(error).__name__}: {error}"[:200])
    return found


def test_the_catalog_calls_every_public_function_that_takes_a_mask():
    named = {key.split(" ")[0] for key in EVERYTHING}

    with_mask = {
        name
        for name in PUBLIC_NAMES
        if inspect.isfunction(getattr(alg, name)) and "mask" in inspect.signature(getattr(alg, name)).parameters
    }

    assert with_mask <= named
    assert len(with_mask) > 50


def test_what_stands_at_masked_positions_changes_nothing():
    def law(call, seed):
        rows = random_rows(seed)
        for before, after in zip(tensors(call(rows)), tensors(call(rows.poisoned())), strict=True):
            assert torch.equal(before, after)
            if after.shape == rows.mask.shape:
                assert (after[~rows.mask] == 0).all()

    assert offenders(law, EVERYTHING, SEEDS) == {}


def test_gaps_and_padding_anywhere_change_no_action_token():
    def law(call, seed):
        rows = random_rows(seed)
        wider = rows.spread(seed + 100)
        for before, after in zip(tensors(call(rows)), tensors(call(wider)), strict=True):
            if before.shape == rows.mask.shape:
                before, after = before[rows.mask], after[wider.mask]
            assert close(before, after, 1e-12)

    assert offenders(law, EVERYTHING, SEEDS) == {}


def test_row_order_and_group_names_change_nothing():
    def law(call, seed):
        rows = random_rows(seed)
        order = torch.randperm(rows.mask.shape[0], generator=torch.Generator().manual_seed(seed))
        renamed = rows.permuted(order).change(group_ids=1000 - rows.group_ids[order])
        for before, after in zip(tensors(call(rows)), tensors(call(renamed)), strict=True):
            per_row = before.dim() > 0 and before.shape[0] == rows.mask.shape[0]
            assert close(before[order] if per_row else before, after, 1e-12)

    assert offenders(law, EVERYTHING, SEEDS) == {}


def test_rows_without_action_tokens_give_zeros():
    rows = random_rows(3)
    rows = rows.change(mask=torch.zeros_like(rows.mask)).poisoned()

    def law(call):
        for result in tensors(call(rows)):
            assert not result.isnan().any()
            if result.shape[:1] == rows.mask.shape[:1]:
                assert (result == 0).all()

    assert offenders(law, EVERYTHING) == {}


def test_one_token_rows_agree_with_the_same_token_in_a_long_row_of_padding():
    def law(call, seed):
        rows = random_rows(seed, width=1)
        rows = rows.change(mask=torch.ones_like(rows.mask))
        wider = rows.spread(seed, extra=3)
        for before, after in zip(tensors(call(rows)), tensors(call(wider)), strict=True):
            if before.shape == rows.mask.shape:
                before, after = before.flatten(), after[wider.mask]
            assert not before.isnan().any()
            assert close(before, after, 1e-12)

    assert offenders(law, EVERYTHING, SEEDS) == {}


def test_each_precision_is_kept_and_bfloat16_is_computed_in_float32():
    rows = random_rows(4)
    of_python_numbers = [EVERYTHING[name] for name in ("lag_weights", "drift_bins")]

    def law(call):
        for exact, rounded in zip(tensors(call(rows)), tensors(call(rows.to(torch.float32))), strict=True):
            assert close(exact, rounded, 1e-5)
            if exact.is_floating_point() and exact.dim() > 0 and call not in of_python_numbers:
                assert (exact.dtype, rounded.dtype) == (torch.float64, torch.float32)
        for result in tensors(call(random_rows(5).to(torch.bfloat16))):
            assert result.dtype in (torch.float32, torch.float64, torch.int64, torch.bool)

    assert offenders(law, EVERYTHING) == {}


def _requiring(rows, *names):
    return rows.change(**{name: getattr(rows, name).clone().requires_grad_() for name in names})


def test_estimators_corrections_and_statistics_are_detached():
    rows = random_rows(6)
    floating = [n for n in rows.token_fields() if getattr(rows, n).is_floating_point()]
    rows = _requiring(rows, *floating, "bootstrap", "scores", "baselines")

    def law(call):
        assert not any(result.requires_grad for result in tensors(call(rows)))

    assert offenders(law, DETACHED) == {}


def test_log_prob_losses_have_a_gradient_in_the_policy_log_probs_only():
    others = ("behavior", "proximal", "reference", "advantages", "weights")

    def law(call):
        rows = _requiring(random_rows(7), "policy", *others)
        tensors(call(rows))[0].sum().backward()
        assert rows.policy.grad is not None and rows.policy.grad.abs().sum() > 0
        assert [other for other in others if getattr(rows, other).grad is not None] == []

    assert offenders(law, LOSSES) == {}


def test_masked_positions_receive_no_gradient_even_from_nan():
    def law(call):
        rows = _requiring(random_rows(8).poisoned(), "policy", "values", "losses")
        tensors(call(rows))[0].sum().backward()
        grads = [g for g in (rows.policy.grad, rows.values.grad, rows.losses.grad) if g is not None]
        assert grads
        for grad in grads:
            assert torch.isfinite(grad).all()
            assert (grad[~rows.mask] == 0).all()

    assert offenders(law, {**LOSSES, **OTHER_DIFFERENTIABLE}) == {}


@pytest.mark.parametrize("name", ["value_loss", "value_loss clip", "aggregate", "aggregate rows"])
def test_value_loss_and_aggregate_are_differentiable_in_their_first_argument_only(name):
    rows = _requiring(random_rows(9), "values", "losses", "targets", "old_values", "scores")

    OTHER_DIFFERENTIABLE[name](rows).sum().backward()

    first = rows.values if name.startswith("value") else rows.losses
    assert first.grad is not None
    assert rows.targets.grad is None and rows.old_values.grad is None and rows.scores.grad is None


def test_extreme_log_ratios_give_finite_results_and_gradients():
    may_be_infinite = EVERYTHING["clip_from_budget"]  # its log_cap, by definition

    def law(call, extreme):
        rows = random_rows(10)
        policy, ratios = rows.policy.clone(), rows.log_ratios.clone()
        policy[:, ::2] = rows.behavior[:, ::2] + max(extreme, -1e3)
        ratios[:, ::2] = extreme
        rows = _requiring(rows.change(policy=policy, log_ratios=ratios), "policy")
        results = tensors(call(rows))
        for result in results:
            assert not result.isnan().any()
            assert torch.isfinite(result).all() or call is may_be_infinite
        if results[0].requires_grad:
            results[0].sum().backward()
            assert torch.isfinite(rows.policy.grad).all()

    assert offenders(law, EVERYTHING, (1e3, -1e3, float("-inf"))) == {}


def test_a_policy_log_prob_of_minus_infinity_keeps_bounded_surrogates_finite():
    rows = random_rows(11)
    policy = rows.policy.clone()
    policy[0, 3] = float("-inf")
    rows = rows.change(policy=policy)

    for name in ("ppo_clip", "decoupled_ppo", "gspo", "gmpo", "sapo", "m2po", "mis", "behavior_penalty"):
        assert torch.isfinite(tensors(LOSSES[name](rows))[0]).all(), name


TWELVE = random_rows(12)


def _wrong_shape(rows, name):
    tensor = getattr(rows, name)
    return rows.change(**{name: tensor[..., :-1] if tensor.dim() == 2 else tensor[:-1]})


def test_a_wrong_shape_raises_an_error_that_names_both():
    rows = TWELVE

    def law(call, field):
        if _uses(call, field):
            with pytest.raises(ValueError, match=r"shape \[.*shape \[") as caught:
                call(_wrong_shape(rows, field))
            assert str(list(rows.mask.shape)) in str(caught.value) or "[6, 8]" in str(caught.value)

    fields = [*rows.token_fields(), "bootstrap", "baselines"]
    assert offenders(law, EVERYTHING, fields) == {}
    unread = {name.split(" ")[0] for name, call in EVERYTHING.items() if not any(_uses(call, one) for one in fields)}
    assert unread == {"broadcast_rows", "place_terminal"}


@cache
def _uses(call, field):
    """Whether a call reads a field: it fails when the field is None."""
    try:
        call(TWELVE.change(**{field: None}))
    except (AttributeError, TypeError, ValueError):
        return True
    return False


def test_a_mask_of_numbers_is_refused():
    rows = random_rows(13)

    def law(call):
        with pytest.raises(ValueError, match="bool"):
            call(rows.change(mask=rows.mask.float()))

    assert offenders(law, EVERYTHING) == {}


def test_states_and_results_are_frozen():
    state = alg.KlState(0.2)

    with pytest.raises(AttributeError):
        state.coef = 1.0
    with pytest.raises(AttributeError):
        alg.CORRECTION_PRESETS["disabled"].cap = 3.0


def test_everything_exported_is_importable_and_documented():
    for name in PUBLIC_NAMES:
        thing = getattr(alg, name)
        if inspect.isfunction(thing) or inspect.isclass(thing):
            assert thing.__doc__, name
