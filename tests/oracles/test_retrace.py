"""Retrace (arXiv:1606.02647) against rlax and, as a lambda-return with lambda_t = c_{t+1}, torchrl.

In rlax the arrays q and c start at the second token of the row: the first action's value and ratio play no part.
"""

import numpy
import pytest
import torch

import streamrl.algorithms as alg

from .compare import agree, batches, row_by_row, shifted

FIELDS = ("policy", "behavior", "rewards", "values", "gamma")


def ours_q(rows, lam):
    """`values` serve as Q here, as one of the many random fields of the batch."""
    return alg.retrace_q(
        rows.behavior, rows.policy, rows.rewards, rows.values, rows.expected_q, rows.mask,
        bootstrap_values=rows.bootstrap, gamma=rows.gamma, lam=lam,
    )  # fmt: skip


def ours_v(rows, **knobs):
    return alg.retrace_v(
        rows.behavior, rows.policy, rows.rewards, rows.values, rows.mask,
        bootstrap_values=rows.bootstrap, gamma=rows.gamma, **knobs,
    )  # fmt: skip


@pytest.mark.parametrize("lam", [0.0, 0.9, 1.0])
def test_q_targets_agree_with_the_general_off_policy_returns_of_rlax(rlax, lam):
    def oracle(policy, behavior, rewards, q, gamma, expected_q, bootstrap):
        cuts = lam * numpy.minimum(1.0, numpy.exp(policy - behavior))
        return (
            rlax.general_off_policy_returns_from_q_and_v(
                q[1:], shifted(expected_q, bootstrap), rewards, gamma, cuts[1:]
            ),
        )

    for rows in batches():
        (targets,) = row_by_row(rows, oracle, *FIELDS, "expected_q")
        agree(ours_q(rows, lam).targets, targets)


@pytest.mark.parametrize("lam", [0.9, 1.0])
def test_q_errors_agree_with_continuous_retrace_of_rlax(rlax, lam):
    """It returns errors, targets minus Q."""

    def oracle(policy, behavior, rewards, q, gamma, expected_q, bootstrap):
        return (
            rlax.retrace_continuous(
                q, q[1:], shifted(expected_q, bootstrap), rewards, gamma, (policy - behavior)[1:], lam
            )
            + q,
        )

    for rows in batches():
        (targets,) = row_by_row(rows, oracle, *FIELDS, "expected_q")
        agree(ours_q(rows, lam).targets, targets)


def test_retrace_over_a_small_action_set_agrees_with_rlax_from_tables_of_q_and_pi(rlax):
    """It takes whole tables and computes the expectation itself, and adds 1e-8 to mu: agreement is 1e-6, not 1e-12.

    One row of five actions out of four, terminated: the state after the last one has value 0.
    """
    generator = torch.Generator().manual_seed(0)
    length, num_actions, lam = 5, 4, 0.9

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    for _ in range(5):
        q, pi, mu = normal(length, num_actions), normal(length, num_actions), normal(length, num_actions)
        pi, mu = pi.softmax(1), mu.softmax(1)
        actions = torch.multinomial(mu, 1, generator=generator)
        rewards, gamma = normal(length), torch.full((length,), 0.9, dtype=torch.float64)
        behavior, policy, chosen = (table.gather(1, actions)[:, 0] for table in (mu.log(), pi.log(), q))

        def after(table):
            return torch.cat([table[1:], torch.zeros_like(table[:1])]).numpy()

        following = numpy.append(actions[1:, 0].numpy(), 0)
        errors = rlax.retrace(
            q.numpy(), after(q), actions[:, 0].numpy(), following, rewards.numpy(), gamma.numpy(), after(pi),
            numpy.append(behavior[1:].exp().numpy(), 1.0), lam,
        )  # fmt: skip

        result = alg.retrace_q(
            behavior[None], policy[None], rewards[None], chosen[None], (pi * q).sum(1)[None],
            torch.ones(1, length, dtype=torch.bool), bootstrap_values=torch.zeros(1), gamma=0.9, lam=lam,
        )  # fmt: skip
        agree(result.targets[0] - chosen, errors, 1e-6)


@pytest.mark.parametrize("lam", [0.9, 1.0])
def test_v_targets_agree_with_lambda_returns_of_rlax_at_lambda_equal_to_the_next_cut(rlax, lam):
    """The last lambda multiplies V_{T+1} twice and may be anything."""

    def oracle(policy, behavior, rewards, values, gamma, bootstrap):
        cuts = lam * numpy.minimum(1.0, numpy.exp(policy - behavior))
        returns = rlax.lambda_returns(rewards, gamma, shifted(values, bootstrap), shifted(cuts, 0.123))
        own = numpy.minimum(1.0, numpy.exp(policy - behavior))
        return returns, values + own * (numpy.array(returns) - values)

    for rows in batches():
        plain, truncated = row_by_row(rows, oracle, *FIELDS)
        agree(ours_v(rows, lam=lam).targets, plain)
        agree(ours_v(rows, lam=lam, target_rho_bar=1.0).targets, truncated)


def test_v_targets_agree_with_td_lambda_of_torchrl_at_lambda_equal_to_the_next_cut(torchrl):
    def oracle(policy, behavior, rewards, values, gamma, bootstrap):
        done = torch.zeros(1, len(values), 1, dtype=torch.bool)
        done[0, -1] = True
        cuts = 0.9 * numpy.minimum(1.0, numpy.exp(policy - behavior))
        discounts, lambdas, following, paid = (
            torch.from_numpy(array).view(done.shape)
            for array in (gamma, shifted(cuts, 0.5), shifted(values, bootstrap), rewards)
        )
        cut_off = torch.zeros_like(done)  # not terminated: the bootstrap value counts
        return (torchrl.td_lambda_return_estimate(discounts, lambdas, following, paid, done, cut_off).flatten(),)

    for rows in batches():
        (targets,) = row_by_row(rows, oracle, *FIELDS)
        agree(ours_v(rows, lam=0.9).targets, targets)
