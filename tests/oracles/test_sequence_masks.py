"""Off-policy sequence masking (arXiv:2512.02556) and VESPO's weight (arXiv:2602.10693) against TRL.

TRL answers per row, [B, 1], for one advantage a row; ours are per token, so the advantages here are constant in a row.
"""

import pytest
import torch

import streamrl.algorithms as alg

from .compare import agree, batches, value_and_gradient


def per_row(rows):
    """An advantage for each row, half of them negative, on all its tokens, and the log-ratios."""
    advantages = torch.linspace(-1, 1, rows.mask.shape[0], dtype=torch.float64)[:, None]
    return advantages, advantages.expand(rows.mask.shape), (rows.policy - rows.behavior)


@pytest.mark.parametrize("delta", [0.0, 0.1, 0.5])
def test_off_policy_sequence_mask_agrees_with_trl(trl, delta):
    dropped = negatives = 0
    for rows in batches(drift=1.5):
        column, advantages, ell = per_row(rows)
        theirs = trl.get_off_policy_mask(column, rows.policy, rows.behavior, rows.mask.double(), delta)
        keep = alg.opsm_keep(ell, advantages, rows.mask, delta=delta)
        assert torch.equal(keep, rows.mask & theirs.bool())
        dropped += int((rows.mask & ~keep).sum())
        negatives += int((rows.mask & (advantages < 0)).sum())
    assert 0 < dropped < negatives


@pytest.mark.parametrize("knobs", [{}, {"k_pos": 1.0, "lam_pos": 2.0, "k_neg": 2.0, "lam_neg": 4.0}])
def test_vespo_agrees_with_the_gamma_weights_of_trl(trl, knobs):
    """It clamps the sum of log-ratios at log 1e-8 from below where we clamp at -20: no difference at this drift."""
    theirs_knobs = {name.replace("lam", "lambda"): value for name, value in knobs.items()}
    for rows in batches(drift=0.3):
        column, advantages, ell = per_row(rows)
        phi = trl.get_gamma_weights(column, ell, rows.mask.double(), None, **theirs_knobs)
        policy = rows.policy

        def ours(leaf, rows=rows, advantages=advantages):
            return alg.vespo(rows.behavior, leaf, advantages, rows.mask, **knobs).losses.sum()

        def theirs(leaf, rows=rows, advantages=advantages, phi=phi):
            return (-phi * advantages * leaf * rows.mask).sum()

        for mine, expected in zip(value_and_gradient(ours, policy), value_and_gradient(theirs, policy), strict=True):
            agree(mine, expected)
