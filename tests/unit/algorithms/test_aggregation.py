"""From token losses to one number, under every split."""

import pytest
import torch

import streamrl.algorithms as alg
from tests.kit.each import each

from .rows import random_rows

MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "prompt-mean")
SEEDS = range(4)


def by_definition(mode, losses, mask, group_ids, max_tokens, keep=None):
    kept = mask if keep is None else mask & keep
    rows = [i for i in range(len(mask)) if mask[i].any()]
    length = {i: int(mask[i].sum()) for i in rows}
    total = {i: float(losses[i][kept[i]].sum()) for i in rows}
    if mode == "token-mean":
        return sum(total.values()) / sum(length.values())
    if mode == "seq-mean-token-mean":
        return sum(total[i] / length[i] for i in rows) / len(rows)
    if mode == "seq-mean-token-sum":
        return sum(total.values()) / len(rows)
    if mode == "seq-mean-token-sum-norm":
        return sum(total.values()) / (len(rows) * max_tokens)
    groups = {int(group_ids[i]) for i in rows}
    means = []
    for name in groups:
        inside = [i for i in rows if int(group_ids[i]) == name]
        means.append(sum(total[i] for i in inside) / sum(length[i] for i in inside))
    return sum(means) / len(groups)


@each("seed", SEEDS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("masked", [False, True])
def test_each_mode_is_its_definition(masked, mode, seed):
    rows = random_rows(seed)
    keep = rows.keep if masked else None

    loss = alg.aggregate(rows.losses, rows.mask, mode=mode, keep=keep, group_ids=rows.group_ids, max_tokens=7)

    assert float(loss) == pytest.approx(by_definition(mode, rows.losses, rows.mask, rows.group_ids, 7, keep))


@each("seed", SEEDS)
@pytest.mark.parametrize("mode", MODES)
def test_11_every_split_with_shared_row_weights_gives_the_same_sum_and_gradient(mode, seed):
    rows = random_rows(seed)
    weights = alg.aggregation_weights(rows.mask.sum(1).double(), mode=mode, group_ids=rows.group_ids, max_tokens=7)
    whole = rows.losses.clone().requires_grad_()
    parts = rows.losses.clone().requires_grad_()

    once = alg.aggregate(whole, rows.mask, mode=mode, keep=rows.keep, group_ids=rows.group_ids, max_tokens=7)
    split = sum(
        alg.aggregate(parts[i], rows.mask[i], keep=rows.keep[i], row_weights=weights[i])
        for i in (slice(0, 1), slice(1, 4), slice(4, 6))
    )

    assert split.item() == pytest.approx(once.item(), abs=1e-12)
    once.backward()
    split.backward()
    assert torch.allclose(whole.grad, parts.grad, atol=1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_22_tokens_dropped_by_a_correction_stay_in_the_denominator(mode):
    mask, keep = torch.ones(2, 4, dtype=torch.bool), torch.ones(2, 4, dtype=torch.bool)
    keep[0, 0] = False
    ones = torch.ones(2, 4)

    loss = alg.aggregate(ones, mask, mode=mode, keep=keep, group_ids=torch.tensor([0, 1]), max_tokens=4)
    full = alg.aggregate(ones, mask, mode=mode, group_ids=torch.tensor([0, 1]), max_tokens=4)

    assert float(loss) == pytest.approx(float(full) * 7 / 8)


def test_a_non_finite_loss_at_a_dropped_token_is_never_read():
    losses = torch.tensor([[1.0, float("nan")]], requires_grad=True)
    keep = torch.tensor([[True, False]])

    loss = alg.aggregate(losses, torch.ones(1, 2, dtype=torch.bool), keep=keep)
    loss.backward()

    assert loss.item() == 0.5
    assert losses.grad.tolist() == [[0.5, 0.0]]


def test_gradient():
    rows = random_rows(1)
    losses = rows.losses.clone().requires_grad_()

    for mode in MODES:
        assert torch.autograd.gradcheck(
            lambda x, m=mode: alg.aggregate(
                x, rows.mask, mode=m, keep=rows.keep, group_ids=rows.group_ids, max_tokens=5
            ),
            (losses,),
        )
