"""Estimators with a value function against O(T^2) sums, and against each other."""

from __future__ import annotations

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


def on_policy(rows):
    return rows.change(policy=rows.behavior)


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


# Identities of the specification, by their numbers there.


@each("seed", SEEDS)
@pytest.mark.parametrize("lam", [1.0, 0.9])
def test_1_on_policy_vtrace_is_td_lambda_and_gae(lam, seed):
    rows = on_policy(random_rows(seed))

    trace = call(alg.vtrace, rows, gamma=0.9, lam=lam)

    td = alg.td_lambda(rows.rewards, rows.values, rows.mask, bootstrap_values=rows.bootstrap, gamma=0.9, lam=lam)
    gae = alg.gae(rows.rewards, rows.values, rows.mask, bootstrap_values=rows.bootstrap, gamma=0.9, lam=lam)
    agree(trace.targets, td.targets)
    agree(torch.where(rows.mask, trace.targets - rows.values, 0.0), gae.advantages)


@each("seed", SEEDS)
def test_2_vtrace_targets_are_truncated_steps_of_retrace_for_equal_bars_only(seed):
    # e_t = rhohat_t A_t solves V-trace's recursion for every lam, because c_t = lam rhohat_t when both bars are 1; the
    # advantages agree at lam 1 only, because V-trace's bootstraps from v_{t+1} whatever lam is.
    rows = random_rows(seed)
    ratio = (rows.policy - rows.behavior).exp()

    def gaps(lam, rho_bar):
        trace = call(alg.vtrace, rows, gamma=0.9, lam=lam, rho_bar=rho_bar)
        retrace = call(alg.retrace_v, rows, gamma=0.9, lam=lam)
        other = rows.values + ratio.clamp(max=rho_bar) * retrace.advantages
        return (
            float((trace.targets - torch.where(rows.mask, other, 0.0)).abs().max()),
            float((trace.advantages - retrace.advantages).abs().max()),
        )

    assert max(gaps(1.0, 1.0)) < 1e-12
    assert gaps(0.9, 1.0)[0] < 1e-12 and gaps(0.9, 1.0)[1] > 1e-3
    assert gaps(0.3, 1.0)[0] < 1e-12 and gaps(0.3, 1.0)[1] > 1e-3
    assert gaps(1.0, 2.0)[0] > 1e-3


@each("seed", SEEDS)
def test_3_n_step_covers_both_ends_of_gae(seed):
    rows = random_rows(seed)
    knobs = {"bootstrap_values": rows.bootstrap, "gamma": rows.gamma}
    inputs = (rows.rewards, rows.values, rows.mask)

    agree(alg.n_step(*inputs, n=9, **knobs).advantages, alg.gae(*inputs, lam=1.0, **knobs).advantages)
    agree(alg.n_step(*inputs, n=1, **knobs).advantages, alg.gae(*inputs, lam=0.0, **knobs).advantages)


@each("seed", SEEDS)
def test_4_retrace_v_is_gae_on_policy_and_vtrace_off_policy(seed):
    rows = random_rows(seed)
    fresh = on_policy(rows)
    gae = alg.gae(rows.rewards, rows.values, rows.mask, bootstrap_values=rows.bootstrap, gamma=0.9, lam=0.9)
    agree(call(alg.retrace_v, fresh, gamma=0.9, lam=0.9).advantages, gae.advantages)
    agree(call(alg.retrace_v, fresh, gamma=0.9, lam=0.9).targets, gae.targets)

    retrace, trace = call(alg.retrace_v, rows, gamma=0.9, target_rho_bar=1.0), call(alg.vtrace, rows, gamma=0.9)
    agree(retrace.targets, trace.targets)
    agree(retrace.advantages, trace.advantages)


@each("seed", SEEDS)
@pytest.mark.parametrize(
    "knobs", [{}, {"rho_bar_pg": 1.0}, {"rho_bar": 2.0}, {"lam": 0.9, "rho_bar": 3.0, "c_bar": 2.0}]
)
def test_5_critic_free_is_vtrace_with_a_constant_value(knobs, seed):
    rows = random_rows(seed)
    constant = rows.change(
        values=rows.baselines[:, None].expand(rows.mask.shape),
        rewards=alg.place_terminal(rows.scores, rows.mask),
        bootstrap=torch.zeros_like(rows.bootstrap),
    )

    fast = alg.vtrace_critic_free(rows.behavior, rows.policy, rows.scores, rows.baselines, rows.mask, **knobs)

    agree(fast, call(alg.vtrace, constant, **knobs).advantages)
    if not knobs:
        agree(fast, call(alg.retrace_v, constant).advantages)


@each("seed", SEEDS)
def test_5_with_the_own_ratio_it_is_the_full_suffix_product(seed):
    rows = random_rows(seed)
    clipped = torch.where(rows.mask, (rows.policy - rows.behavior).clamp(max=0.0), 0.0)
    suffix = clipped.flip(1).cumsum(1).flip(1).exp() * (rows.scores - rows.baselines)[:, None]

    fast = alg.vtrace_critic_free(rows.behavior, rows.policy, rows.scores, rows.baselines, rows.mask, rho_bar_pg=1.0)

    agree(fast, torch.where(rows.mask, suffix, 0.0))


@each("seed", SEEDS)
def test_6_leak_0_and_huge_bars_are_per_decision_importance_sampling(seed):
    rows = random_rows(seed)
    leaky, open_bars = call(alg.vtrace, rows, leak=0.0), call(alg.vtrace, rows, rho_bar=1e9, c_bar=1e9)

    agree(leaky.targets, open_bars.targets)
    # Per-decision IS without values: sum_t (prod_{i=s..t} rho_i) r_t.
    plain = rows.change(values=torch.zeros_like(rows.values), bootstrap=torch.zeros_like(rows.bootstrap))

    def per_decision(i, log_ratios, rewards):
        n = len(rewards)
        ratio = [2.718281828459045**x for x in log_ratios]
        return [sum(slow.prod(ratio[s : t + 1]) * rewards[t] for t in range(s, n)) for s in range(n)]

    rows = rows.change(log_ratios=rows.policy - rows.behavior)
    expected = slow_rows(rows, per_decision, "log_ratios", "rewards")
    agree(call(alg.vtrace, plain, leak=0.0).targets, expected, at=1e-10)


@each("seed", SEEDS)
def test_7_segments_of_one_token_are_vtrace_and_one_segment_is_one_step(seed):
    rows = random_rows(seed)
    inputs = (rows.behavior, rows.policy, rows.rewards, rows.values, rows.mask)
    each = torch.arange(9).expand(rows.mask.shape)

    segments = alg.vtrace_segments(*inputs, each, bootstrap_values=rows.bootstrap, gamma=0.9, rho_bar=2.0)
    tokens = call(alg.vtrace, rows, gamma=0.9, rho_bar=2.0)
    agree(segments.targets, tokens.targets)
    agree(segments.advantages, tokens.advantages)

    zero = torch.zeros_like(rows.bootstrap)
    whole = alg.vtrace_segments(*inputs, torch.zeros_like(each), bootstrap_values=zero, gamma=0.9)
    for i in range(5):
        m = rows.mask[i]
        ratio = min(1.0, float((rows.policy - rows.behavior)[i][m].sum().exp()))
        value = float(rows.values[i][m][0])
        expected = value + ratio * (float(rows.rewards[i][m].sum()) - value)
        assert float(whole.targets[i].sum()) == pytest.approx(expected, abs=1e-12)


@each("seed", SEEDS)
def test_8_retrace_with_the_one_step_q_collapses_to_td_0(seed):
    rows = random_rows(seed)
    td = alg.gae(rows.rewards, rows.values, rows.mask, bootstrap_values=rows.bootstrap, gamma=0.9, lam=0.0)
    one_step_q = torch.where(rows.mask, td.targets, 0.0)

    result = alg.retrace_q(
        rows.behavior, rows.policy, rows.rewards, one_step_q, rows.values, rows.mask,
        bootstrap_values=rows.bootstrap, gamma=0.9,
    )  # fmt: skip

    agree(result.advantages, td.advantages)


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


@pytest.mark.parametrize(
    "function, knobs, message",
    [
        (alg.vtrace, {"rho_bar": 1.0, "c_bar": 2.0}, "c_bar=2.0 and rho_bar=1.0"),
        (alg.vtrace, {"lam": 1.5}, "lam=1.5"),
        (alg.vtrace, {"gamma": -0.1}, "gamma=-0.1"),
        (alg.vtrace, {"leak": 2.0}, "leak=2.0"),
        (alg.vtrace, {"trace_temperature": 0.0}, "trace_temperature=0.0"),
        (alg.vtrace, {"rho_bar_pg": 0.0}, "rho_bar_pg=0.0"),
        (alg.retrace_v, {"lam": -1.0}, "lam=-1.0"),
        (alg.retrace_v, {"target_rho_bar": -1.0}, "target_rho_bar=-1.0"),
        (alg.clipped_is, {"eps": -0.1}, "eps=-0.1"),
    ],
)
def test_impossible_knobs_are_named(function, knobs, message):
    with pytest.raises(ValueError, match=message):
        call(function, random_rows(0), **knobs)


def test_other_impossible_knobs():
    rows = random_rows(0)
    with pytest.raises(ValueError, match="old_values and clip"):
        alg.value_loss(rows.values, rows.targets, rows.mask, clip=0.2)
    with pytest.raises(ValueError, match="n=0"):
        alg.n_step(rows.rewards, rows.values, rows.mask, bootstrap_values=rows.bootstrap, n=0)
    with pytest.raises(ValueError, match="trace="):
        alg.vtrace_segments(
            rows.behavior, rows.policy, rows.rewards, rows.values, rows.mask, rows.segment_ids,
            bootstrap_values=rows.bootstrap, trace="mean",
        )  # fmt: skip
    with pytest.raises(ValueError, match="gamma"):
        alg.vtrace_segments(
            rows.behavior, rows.policy, rows.rewards, rows.values, rows.mask, rows.segment_ids,
            bootstrap_values=rows.bootstrap, gamma=rows.gamma,
        )  # fmt: skip
    with pytest.raises(ValueError, match=r"\[3, 4, 5\].*\[3, 4, 6\]"):
        alg.dueling_q(torch.zeros(3, 4), torch.zeros(3, 4, 5), torch.zeros(3, 4, 6), torch.zeros(3, 4).long())


def test_a_long_row_is_linear_work():
    # 48k tokens through every recursion in well under the test's deadline: no O(T^2) hides in the package.
    rows = random_rows(0, num_rows=6, width=8_192)
    call(alg.vtrace, rows, gamma=0.99)
    call(alg.retrace_v, rows, gamma=0.99)
    result = alg.vtrace_critic_free(rows.behavior, rows.policy, rows.scores, rows.baselines, rows.mask)
    assert torch.isfinite(result).all()
