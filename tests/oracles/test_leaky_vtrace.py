"""Leaky V-trace (arXiv:2002.12928) against rlax; its alpha is our `leak`, and c_bar is 1 there."""

import numpy
import pytest

import streamrl.algorithms as alg

from .compare import agree, batches, row_by_row, shifted

FIELDS = ("policy", "behavior", "rewards", "values", "gamma")


def ours(rows, **knobs):
    return alg.vtrace(
        rows.behavior, rows.policy, rows.rewards, rows.values, rows.mask,
        bootstrap_values=rows.bootstrap, gamma=rows.gamma, **knobs,
    )  # fmt: skip


@pytest.mark.parametrize("leak", [0.0, 0.3, 1.0])
def test_targets_and_advantages_agree_with_rlax(rlax, leak):
    """Advantages at lambda 1 only: below it rlax bootstraps from a mixture (see test_vtrace)."""

    def oracle(policy, behavior, rewards, values, gamma, bootstrap):
        step = (values, shifted(values, bootstrap), rewards, gamma, numpy.exp(policy - behavior), leak)
        mixed = rlax.leaky_vtrace_td_error_and_advantage(*step, 0.9, 2.0, 1.5)
        full = rlax.leaky_vtrace_td_error_and_advantage(*step, 1.0, 2.0, 1.5)
        return mixed.errors + values, full.errors + values, full.pg_advantage, full.q_estimate - values

    for rows in batches():
        mixed, full, published, without = row_by_row(rows, oracle, *FIELDS)
        agree(ours(rows, leak=leak, lam=0.9, rho_bar=2.0).targets, mixed)
        agree(ours(rows, leak=leak, rho_bar=2.0).targets, full)
        agree(ours(rows, leak=leak, rho_bar=2.0, rho_bar_pg=1.5).advantages, published)
        agree(ours(rows, leak=leak, rho_bar=2.0).advantages, without)
