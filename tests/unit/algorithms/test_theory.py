"""What the estimators converge to, on small random decision processes, by exact enumeration and by sampling."""

import itertools

import pytest
import torch

import streamrl.algorithms as alg
from tests.kit.each import each

D = torch.float64
SEEDS = range(3)


class Process:
    """A random decision process with behavior mu and policy pi; P [S, A, S], r [S, A]."""

    def __init__(self, seed, num_states=3, num_actions=2, gamma=0.8):
        generator = torch.Generator().manual_seed(seed)

        def simplex(*shape):
            return torch.rand(*shape, generator=generator, dtype=D).add(0.1).log().mul(1.5).softmax(-1)

        self.S, self.A, self.gamma = num_states, num_actions, gamma
        self.P, self.mu, self.pi = simplex(self.S, self.A, self.S), simplex(self.S, self.A), simplex(self.S, self.A)
        self.r = torch.randn(self.S, self.A, generator=generator, dtype=D)

    def value(self, policy):
        transition = torch.einsum("sa,sat->st", policy, self.P)
        return torch.linalg.solve(torch.eye(self.S, dtype=D) - self.gamma * transition, (policy * self.r).sum(1))

    def action_value(self, policy):
        return self.r + self.gamma * self.P @ self.value(policy)

    def clipped_policy(self, rho_bar):
        """pi_rho: proportional to min(rho_bar mu, pi)."""
        weight = torch.minimum(rho_bar * self.mu, self.pi)
        return weight / weight.sum(1, keepdim=True)

    def operator(self, value, rho_bar, c_bar):
        """V + (I - gamma C)^{-1} delta: the expected V-trace step over an infinite trajectory."""
        ratio = self.pi / self.mu
        delta = (self.mu * ratio.clamp(max=rho_bar) * (self.action_reward(value) - value[:, None])).sum(1)
        trace = torch.einsum("sa,sat->st", self.mu * ratio.clamp(max=c_bar), self.P)
        return value + torch.linalg.solve(torch.eye(self.S, dtype=D) - self.gamma * trace, delta)

    def action_reward(self, value):
        return self.r + self.gamma * self.P @ value


class Enumeration:
    """Every trajectory of a few steps from every state, as rows with their probability under mu."""

    def __init__(self, process, horizon):
        steps = [range(process.S)] + [range(process.A), range(process.S)] * horizon
        paths = torch.tensor(list(itertools.product(*steps)))
        self.process = process
        self.states, self.actions = paths[:, 0::2], paths[:, 1::2]  # [N, T + 1], [N, T]
        now, then = self.states[:, :-1], self.states[:, 1:]
        self.behavior = process.mu[now, self.actions].log()
        self.policy = process.pi[now, self.actions].log()
        self.rewards = process.r[now, self.actions]
        self.mask = torch.ones_like(self.behavior, dtype=torch.bool)
        self.probability = (self.behavior + process.P[now, self.actions, then].log()).sum(1).exp()

    def per_start(self, first_token):
        """Expectation under mu, given the first state, of one number per row."""
        total = torch.zeros(self.process.S, dtype=D)
        return total.index_add(0, self.states[:, 0], self.probability * first_token)

    def per_start_and_action(self, first_token):
        index = self.states[:, 0] * self.process.A + self.actions[:, 0]
        total = torch.zeros(self.process.S * self.process.A, dtype=D)
        mass = total.index_add(0, index, self.probability)
        return (total.index_add(0, index, self.probability * first_token) / mass).view(self.process.S, self.process.A)

    def vtrace(self, value, **knobs):
        return alg.vtrace(
            self.behavior, self.policy, self.rewards, value[self.states[:, :-1]], self.mask,
            bootstrap_values=value[self.states[:, -1]], gamma=self.process.gamma, **knobs,
        )  # fmt: skip

    def retrace_q(self, q, **knobs):
        expected = (self.process.pi * q).sum(1)
        return alg.retrace_q(
            self.behavior, self.policy, self.rewards, q[self.states[:, :-1], self.actions],
            expected[self.states[:, :-1]], self.mask, bootstrap_values=expected[self.states[:, -1]],
            gamma=self.process.gamma, **knobs,
        )  # fmt: skip


def iterate(step, start, max_steps=400):
    """The fixed point, once it moves no more."""
    for _ in range(max_steps):
        before, start = start, step(start)
        if (start - before).abs().max() < 1e-12:
            break
    return start


@each("seed", SEEDS)
@pytest.mark.parametrize("rho_bar", [0.5, 1.0, 5.0, 1e9])
def test_1_vtrace_converges_to_the_value_of_the_clipped_policy(rho_bar, seed):
    process = Process(seed)
    rows, c_bar = Enumeration(process, horizon=3), min(1.0, rho_bar)

    limit = iterate(
        lambda v: rows.per_start(rows.vtrace(v, rho_bar=rho_bar, c_bar=c_bar).targets[:, 0]), torch.zeros(3, dtype=D)
    )

    assert (limit - process.value(process.clipped_policy(rho_bar))).abs().max() < 1e-9
    if rho_bar == 1e9:
        assert (limit - process.value(process.pi)).abs().max() < 1e-9


@each("seed", SEEDS)
@pytest.mark.parametrize("lam", [1.0, 0.7])
def test_2_retrace_converges_to_the_action_values_of_the_policy(lam, seed):
    process = Process(seed)
    rows = Enumeration(process, horizon=3)

    limit = iterate(
        lambda q: rows.per_start_and_action(rows.retrace_q(q, lam=lam).targets[:, 0]), torch.zeros(3, 2, dtype=D)
    )

    assert (limit - process.action_value(process.pi)).abs().max() < 1e-9


@each("seed", SEEDS)
def test_3_the_mean_of_sampled_targets_is_the_operators_result(seed):
    process, num_rows, length = Process(seed, num_states=4, num_actions=3), 10_000, 40
    generator = torch.Generator().manual_seed(seed)
    value = torch.randn(4, generator=generator, dtype=D)
    states, actions = [torch.zeros(num_rows, dtype=torch.int64)], []
    for _ in range(length):
        actions.append(torch.multinomial(process.mu[states[-1]], 1, generator=generator).squeeze(1))
        states.append(torch.multinomial(process.P[states[-1], actions[-1]], 1, generator=generator).squeeze(1))
    at, act = torch.stack(states, 1), torch.stack(actions, 1)
    now = at[:, :-1]

    for rho_bar, c_bar in ((1.0, 1.0), (2.0, 1.0)):
        targets = alg.vtrace(
            process.mu[now, act].log(), process.pi[now, act].log(), process.r[now, act], value[now],
            torch.ones_like(now, dtype=torch.bool), bootstrap_values=value[at[:, -1]], gamma=process.gamma,
            rho_bar=rho_bar, c_bar=c_bar,
        ).targets[:, 0]  # fmt: skip
        error = float(targets.std()) / num_rows**0.5
        expected = float(process.operator(value, rho_bar, c_bar)[0])
        # 0.8^40 of the tail is cut off, 1e-4
        assert abs(float(targets.mean()) - expected) < 3 * error + 1e-3
        assert error < 0.06


# 5. Policy gradients of a three-token, three-symbol policy, by enumeration of its 27 sequences.

SEQUENCES = torch.tensor(list(itertools.product(range(3), repeat=3)))


def sequence_logprobs(logits):
    """Log-probs of each token of each sequence, [27, 3]; logits [3 positions, 4 previous symbols (3 = none), 3]."""
    previous = torch.cat([torch.full((27, 1), 3), SEQUENCES[:, :2]], dim=1)
    positions = torch.arange(3).expand(27, 3)
    return logits[positions, previous].log_softmax(-1).gather(-1, SEQUENCES[..., None]).squeeze(-1)


def exact_and_estimated(seed, loss_of):
    """Gradient of E_pi[R], and minus that of E_mu[loss] with another mu at every position."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, 4, 3, generator=generator, dtype=D, requires_grad=True)
    rewards = torch.randn(27, generator=generator, dtype=D)
    # Position t is sampled by its own older version: mixed versions in one trajectory.
    versions = [logits.detach() + 0.5 * torch.randn(3, 4, 3, generator=generator, dtype=D) for _ in range(3)]
    behavior = torch.stack([sequence_logprobs(v)[:, t] for t, v in enumerate(versions)], dim=1)
    policy = sequence_logprobs(logits)
    (exact,) = torch.autograd.grad((policy.sum(1).exp() * rewards).sum(), logits)
    mask = torch.ones(27, 3, dtype=torch.bool)
    losses = loss_of(behavior, sequence_logprobs(logits), rewards, mask)
    (estimated,) = torch.autograd.grad((behavior.sum(1).exp()[:, None] * losses).sum(), logits)
    return exact, -estimated


@each("seed", range(5))
def test_5_uncapped_sequence_weights_give_the_exact_gradient_with_a_version_per_token(seed):
    exact, estimated = exact_and_estimated(
        seed, lambda mu, pi, r, m: alg.seq_tis(mu, pi, alg.broadcast_rows(r, m), m, cap=1e9).losses
    )

    assert (exact - estimated).abs().max() < 1e-12
