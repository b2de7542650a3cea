"""From token losses to one number, and the critic's loss, against verl.

It divides the mean of a row by its token count plus 1e-8: agreement is 1e-7 where row means occur.
"""

import pytest
import torch

import streamrl.algorithms as alg

from .compare import agree, batches

MODES = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]


@pytest.mark.parametrize("mode", MODES)
def test_aggregates_agree_with_verl_in_the_modes_it_has(verl, mode):
    """Rows without tokens count nowhere in either."""
    for rows in batches():
        theirs = verl.agg_loss(rows.losses, rows.mask.double(), mode, loss_scale_factor=64)
        agree(alg.aggregate(rows.losses, rows.mask, mode=mode, max_tokens=64), theirs, 1e-7)


@pytest.mark.parametrize("mode", MODES)
def test_parts_of_a_batch_agree_with_verl_given_the_counts_of_the_whole(verl, mode):
    """The same promise by other means: we pass the weights of the rows, verl the counts of the batch."""
    for rows in batches():
        weights = alg.aggregation_weights(rows.mask.sum(1).double(), mode=mode, max_tokens=64)
        counts = {"batch_num_tokens": int(rows.mask.sum()), "global_batch_size": int(rows.mask.any(1).sum())}
        ours = theirs = 0.0
        for part in (slice(0, 2), slice(2, None)):
            losses, mask = rows.losses[part], rows.mask[part]
            ours = ours + alg.aggregate(losses, mask, row_weights=weights[part])
            theirs = theirs + verl.agg_loss(losses, mask.double(), mode, loss_scale_factor=64, **counts)
        agree(ours, theirs, 1e-7)
        agree(ours, alg.aggregate(rows.losses, rows.mask, mode=mode, max_tokens=64))


def test_clipped_value_loss_agrees_with_verl(verl):
    for rows in batches():
        values = rows.values.clone().requires_grad_()
        ours = alg.value_loss(values, rows.targets, rows.mask, old_values=rows.old_values, clip=0.2)
        alg.aggregate(ours, rows.mask).backward()
        leaf = rows.values.clone().requires_grad_()
        theirs, _ = verl.compute_value_loss(leaf, rows.targets, rows.old_values, rows.mask.double(), 0.2)
        theirs.backward()
        agree(alg.aggregate(ours, rows.mask), theirs)
        agree(values.grad, torch.where(rows.mask, leaf.grad, 0.0))
