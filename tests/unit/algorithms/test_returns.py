"""Estimators with a value function against O(T^2) sums, and the parts of a critic."""

import pytest
import torch

import streamrl.algorithms as alg
from tests.kit.each import each

from . import slow
from .rows import action_lists, on_rows, random_rows

SEEDS = range(8)


def agree(left, right, at=1e-12):
    assert torch.allclose(left, right, rtol=at, atol=at), (left - right).abs().max()


def slow_rows(rows, function, *names):
    """`function(row lists..., row index)` on every non-empty row, put back on the tokens."""
    results = [function(i, *lists) if lists[0] else ([], []) for i, lists in enumerate(action_lists(rows, *names))]
    if isinstance(results[0], tuple):
        return tuple(on_rows(rows, [result[k] for result in results]) for k in range(2))
    return on_rows(rows, [result if isinstance(result, list) else [] for result in results])


def log_ratio_rows(seed, **knobs):
    rows = random_rows(seed, **knobs)
    return rows.change(log_ratios=rows.policy - rows.behavior)


def call(function, rows, **knobs):
    return function(
        rows.behavior, rows.policy, rows.rewards, rows.values, rows.mask, bootstrap_values=rows.bootstrap, **knobs
    )


VTRACE_KNOBS = [
    {},
    {"lam": 0.9},
    {"rho_bar": 2.0, "c_bar": 1.0, "lam": 0.95},
    {"rho_bar": 0.5, "c_bar": 0.3},
    {"rho_bar": 3.0, "c_bar": 1.5, "rho_bar_pg": 2.0},
    {"leak": 0.4, "rho_bar_pg": 1.0},
    {"trace_temperature": 5.0},
    {"lam": 0.0},
]


@each("seed", SEEDS)
@pytest.mark.parametrize("knobs", VTRACE_KNOBS)
def test_vtrace_is_the_sum_of_the_paper(knobs, seed):
    rows = log_ratio_rows(seed)
    renamed = {"kappa" if k == "trace_temperature" else k: v for k, v in knobs.items()}

    fast = call(alg.vtrace, rows, gamma=rows.gamma, **knobs)

    targets, advantages = slow_rows(
        rows,
        lambda i, log_ratios, r, v, g: slow.vtrace(log_ratios, r, v, float(rows.bootstrap[i]), g, **renamed),
        "log_ratios", "rewards", "values", "gamma",
    )  # fmt: skip
    agree(fast.targets, targets)
    agree(fast.advantages, advantages)


@each("seed", SEEDS)
@pytest.mark.parametrize("lam, target_rho_bar", [(1.0, None), (0.9, None), (0.0, None), (1.0, 1.0), (0.8, 2.0)])
def test_retrace_v_is_the_sum_of_the_paper(lam, target_rho_bar, seed):
    rows = log_ratio_rows(seed)

    fast = call(alg.retrace_v, rows, gamma=rows.gamma, lam=lam, target_rho_bar=target_rho_bar)

    targets, advantages = slow_rows(
        rows,
        lambda i, log_ratios, r, v, g: slow.retrace_v(
            log_ratios, r, v, float(rows.bootstrap[i]), g, lam=lam, target_rho_bar=target_rho_bar
        ),
        "log_ratios", "rewards", "values", "gamma",
    )  # fmt: skip
    agree(fast.targets, targets)
    agree(fast.advantages, advantages)


@each("seed", SEEDS)
@pytest.mark.parametrize("lam", [1.0, 0.9, 0.0])
def test_retrace_q_is_the_sum_of_the_paper(lam, seed):
    rows = log_ratio_rows(seed)

    fast = alg.retrace_q(
        rows.behavior, rows.policy, rows.rewards, rows.values, rows.expected_q, rows.mask,
        bootstrap_values=rows.bootstrap, gamma=rows.gamma, lam=lam,
    )  # fmt: skip

    targets = slow_rows(
        rows,
        lambda i, log_ratios, r, q, e, g: slow.retrace_q(log_ratios, r, q, e, float(rows.bootstrap[i]), g, lam=lam),
        "log_ratios", "rewards", "values", "expected_q", "gamma",
    )  # fmt: skip
    agree(fast.targets, targets)
    agree(fast.advantages, torch.where(rows.mask, targets - rows.expected_q, 0.0))


@each("seed", SEEDS)
@pytest.mark.parametrize("lam", [1.0, 0.95, 0.0])
def test_gae_and_td_lambda_are_their_sums(lam, seed):
    rows = random_rows(seed)
    knobs = {"bootstrap_values": rows.bootstrap, "gamma": rows.gamma, "lam": lam}

    advantages = slow_rows(
        rows, lambda i, r, v, g: slow.gae(r, v, float(rows.bootstrap[i]), g, lam=lam), "rewards", "values", "gamma"
    )
    targets = slow_rows(
        rows,
        lambda i, r, v, g: slow.td_lambda(r, v, float(rows.bootstrap[i]), g, lam=lam),
        "rewards", "values", "gamma",
    )  # fmt: skip

    for result in (alg.gae(rows.rewards, rows.values, rows.mask, **knobs), alg.td_lambda(
        rows.rewards, rows.values, rows.mask, **knobs
    )):  # fmt: skip
        agree(result.advantages, advantages)
        agree(result.targets, targets)


@each("seed", SEEDS)
@pytest.mark.parametrize("alpha", [0.05, 0.5, 2.0])
def test_gae_may_take_a_lambda_by_length_and_another_one_for_its_targets(alpha, seed):
    rows = random_rows(seed)

    result = alg.gae(
        rows.rewards, rows.values, rows.mask, bootstrap_values=rows.bootstrap, gamma=rows.gamma, length_alpha=alpha,
        target_lam=0.8,
    )

    def by_length(i, r, v, g):
        return slow.gae(r, v, float(rows.bootstrap[i]), g, lam=max(0.0, 1 - 1 / (alpha * len(r))))

    agree(result.advantages, slow_rows(rows, by_length, "rewards", "values", "gamma"))
    def fitted(i, r, v, g):
        return slow.td_lambda(r, v, float(rows.bootstrap[i]), g, lam=0.8)

    agree(result.targets, slow_rows(rows, fitted, "rewards", "values", "gamma"))


@each("seed", SEEDS)
@pytest.mark.parametrize("n", [1, 2, 3, 8, 9, 40])
@pytest.mark.parametrize("bootstrap", [True, False])
def test_n_step_is_its_sum(n, bootstrap, seed):
    rows = random_rows(seed)

    fast = alg.n_step(
        rows.rewards,
        rows.values,
        rows.mask,
        bootstrap_values=rows.bootstrap,
        gamma=rows.gamma,
        n=n,
        bootstrap=bootstrap,
    )

    targets = slow_rows(
        rows,
        lambda i, r, v, g: slow.n_step(r, v, float(rows.bootstrap[i]), g, n=n, use_bootstrap=bootstrap),
        "rewards", "values", "gamma",
    )  # fmt: skip
    agree(fast.targets, targets)
    agree(fast.advantages, torch.where(rows.mask, targets - rows.values, 0.0))


@each("seed", SEEDS)
def test_clipped_is_is_its_sum(seed):
    rows = log_ratio_rows(seed)

    fast = call(alg.clipped_is, rows, gamma=rows.gamma, eps=0.3)

    targets, advantages = slow_rows(
        rows,
        lambda i, log_ratios, r, v, g: slow.clipped_is(log_ratios, r, v, float(rows.bootstrap[i]), g, eps=0.3),
        "log_ratios", "rewards", "values", "gamma",
    )  # fmt: skip
    agree(fast.targets, targets)
    agree(fast.advantages, advantages)


@each("seed", SEEDS)
@pytest.mark.parametrize("knobs", [{}, {"lam": 0.9}, {"lam": 0.0}, {"rho_bar": 2.0, "c_bar": 1.5}, {"rho_bar_pg": 1.0}])
def test_vtrace_critic_free_is_its_product(knobs, seed):
    rows = log_ratio_rows(seed)

    fast = alg.vtrace_critic_free(rows.behavior, rows.policy, rows.scores, rows.baselines, rows.mask, **knobs)

    expected = slow_rows(
        rows,
        lambda i, log_ratios: slow.critic_free(log_ratios, float(rows.scores[i]), float(rows.baselines[i]), **knobs),
        "log_ratios",
    )
    agree(fast, expected)


@each("seed", SEEDS)
@pytest.mark.parametrize("trace", ["product", "geometric"])
@pytest.mark.parametrize("knobs", [{}, {"lam": 0.9, "rho_bar": 2.0, "rho_bar_pg": 1.5}])
def test_vtrace_segments_is_vtrace_on_sums(knobs, trace, seed):
    rows = log_ratio_rows(seed)
    full = {"lam": 1.0, "rho_bar": 1.0, "c_bar": 1.0, "rho_bar_pg": None} | knobs

    fast = alg.vtrace_segments(
        rows.behavior, rows.policy, rows.rewards, rows.values, rows.mask, rows.segment_ids,
        bootstrap_values=rows.bootstrap, gamma=0.9, trace=trace, **knobs,
    )  # fmt: skip

    targets, advantages = slow_rows(
        rows,
        lambda i, log_ratios, r, v, s: slow.segments(
            log_ratios, r, v, s, float(rows.bootstrap[i]), 0.9, geometric=trace == "geometric", **full
        ),
        "log_ratios", "rewards", "values", "segment_ids",
    )  # fmt: skip
    agree(fast.targets, targets)
    agree(fast.advantages, advantages)
    # targets may be 0 by chance nowhere in random data, so starts are where they stand
    assert torch.equal(fast.starts, targets != 0)


@each("seed", SEEDS)
def test_extreme_ratios_are_clamped_where_the_slow_truth_clamps_them(seed):
    rows = log_ratio_rows(seed, drift=15.0)
    knobs = {"rho_bar": 1e12, "c_bar": 1e12}

    fast = alg.vtrace_segments(
        rows.behavior, rows.policy, rows.rewards, rows.values, rows.mask, rows.segment_ids,
        bootstrap_values=rows.bootstrap, gamma=0.9, **knobs,
    )  # fmt: skip
    tokens = call(alg.vtrace, rows, gamma=rows.gamma)

    targets, _ = slow_rows(
        rows,
        lambda i, log_ratios, r, v, s: slow.segments(
            log_ratios, r, v, s, float(rows.bootstrap[i]), 0.9, lam=1.0, rho_bar_pg=None, geometric=False, **knobs
        ),
        "log_ratios", "rewards", "values", "segment_ids",
    )  # fmt: skip
    agree(fast.targets, targets, at=1e-10)
    targets, _ = slow_rows(
        rows,
        lambda i, log_ratios, r, v, g: slow.vtrace(log_ratios, r, v, float(rows.bootstrap[i]), g),
        "log_ratios", "rewards", "values", "gamma",
    )  # fmt: skip
    agree(tokens.targets, targets)


@each("seed", SEEDS)
def test_9_dueling_q_averages_to_the_value(seed):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    raw = torch.randn(3, 4, 5, generator=generator, dtype=torch.float64)
    logprobs = torch.randn(3, 4, 5, generator=generator, dtype=torch.float64).log_softmax(-1)

    per_action = [alg.dueling_q(values, raw, logprobs, torch.full((3, 4), a))[0] for a in range(5)]

    agree(sum(logprobs.exp()[..., a] * per_action[a] for a in range(5)), values)
    agree(alg.dueling_q(values, raw, logprobs, torch.zeros(3, 4, dtype=torch.int64))[1], values)
    agree(per_action[2] - per_action[1], raw[..., 2] - raw[..., 1])


def test_dueling_q_can_be_trained_but_moves_no_policy():
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(2, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    raw = torch.randn(2, 3, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    logprobs = torch.randn(2, 3, 4, generator=generator, dtype=torch.float64).log_softmax(-1).requires_grad_()
    tokens = torch.tensor([[0, 1, 2], [3, 0, 1]])

    assert torch.autograd.gradcheck(lambda v, a: alg.dueling_q(v, a, logprobs.detach(), tokens), (values, raw))
    alg.dueling_q(values, raw, logprobs, tokens)[0].sum().backward()
    assert logprobs.grad is None


@each("seed", SEEDS)
def test_value_loss_is_the_larger_of_two_halved_squares(seed):
    rows = random_rows(seed)

    plain = alg.value_loss(rows.values, rows.targets, rows.mask)
    clipped = alg.value_loss(rows.values, rows.targets, rows.mask, old_values=rows.old_values, clip=0.3)

    for i, j in rows.mask.nonzero().tolist():
        v, g, old = (float(t[i, j]) for t in (rows.values, rows.targets, rows.old_values))
        moved = old + max(-0.3, min(0.3, v - old))
        assert float(plain[i, j]) == pytest.approx((v - g) ** 2 / 2)
        assert float(clipped[i, j]) == pytest.approx(max((v - g) ** 2, (moved - g) ** 2) / 2)


def test_value_loss_gradient():
    rows = random_rows(0)
    values = rows.values.clone().requires_grad_()

    for knobs in ({}, {"old_values": rows.old_values, "clip": 0.3}):
        assert torch.autograd.gradcheck(lambda v, k=knobs: alg.value_loss(v, rows.targets, rows.mask, **k), (values,))


def test_a_long_row_is_linear_work():
    # 48k tokens through every recursion in well under the test's deadline: no O(T^2) hides in the package.
    rows = random_rows(0, num_rows=6, width=8_192)
    call(alg.vtrace, rows, gamma=0.99)
    call(alg.retrace_v, rows, gamma=0.99)
    result = alg.vtrace_critic_free(rows.behavior, rows.policy, rows.scores, rows.baselines, rows.mask)
    assert torch.isfinite(result).all()
