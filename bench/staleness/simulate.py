"""Stale-by-k training in one process: at tick n the actors sample from the learner's exact weights of k ticks ago.

All randomness comes from the members' seeds, and a process uses one thread: the same plan gives the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bench.pieces import token_logprobs
from bench.staleness.arms import ARMS, check
from bench.staleness.history import History
from bench.staleness.learner import Experience, Facts, Learner
from bench.staleness.policy import Shape, features, forward, generate, shifted, split
from bench.staleness.task import Luck, Task, scores

DENOMINATORS = ("recorded", "first", "last")
"""What divides the ratio: the recorded log-prob, or (wrong) a recomputation by the version of one token of the row."""


@dataclass(frozen=True, slots=True)
class Member:
    """One run: a forced lag, a learning rate, a seed."""

    lag: int
    lr: float
    seed: int


@dataclass(frozen=True, slots=True)
class Plan:
    """One job: an arm and the members that are trained together.

    Attributes:
        mixed: token i of L is sampled from version n - k + floor(i k / L) instead of n - k.
        denominator: one of DENOMINATORS; all but "recorded" are negative controls.
    """

    arm: str
    members: tuple[Member, ...]
    num_steps: int
    mixed: bool = False
    denominator: str = "recorded"
    task: Task = field(default_factory=Task)
    eval_every: int = 25


@dataclass(slots=True)
class Curve:
    """Record of one member. Scores are on fresh prompts, at `eval_every`, 2 `eval_every`, ... updates."""

    member: Member
    scores: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)  # nats per token, mean of -log p of the sampled digits
    ess_token: list[float] = field(default_factory=list)  # the lowest since the previous evaluation
    ess_sequence: list[float] = field(default_factory=list)  # trajectory ratio truncated at 2; as above
    clipped: list[float] = field(default_factory=list)  # share of tokens, at the evaluation
    m2: list[float] = field(default_factory=list)


def train(plan: Plan) -> list[Curve]:
    """Train every member of the plan; one curve per member."""
    members, task = plan.members, plan.task
    lags = torch.tensor([member.lag for member in members])
    arm = ARMS[plan.arm]
    check(arm, max_lag=int(lags.max()))
    shape = Shape(task.num_tokens)
    seeds = [member.seed for member in members]
    learner = Learner(arm, task, shape, seeds, [member.lr for member in members])
    luck = Luck(task, seeds)
    history = History(int(lags.max()) + 1, learner.parameters.detach())
    curves, window = [Curve(member) for member in members], Window()
    for step in range(plan.num_steps):
        history.push(learner.parameters.detach(), torch.full_like(lags, step))
        ticks = sampling_ticks(step, lags, task.num_tokens, mixed=plan.mixed)
        experience = sample(shape, history, luck, ticks, step=step, denominator=plan.denominator)
        window.add(learner.update(experience))
        if (step + 1) % plan.eval_every == 0:
            evaluate(learner, luck, curves, window)
            window = Window()
    return curves


def sampling_ticks(tick: int, lags: Tensor, num_tokens: int, *, mixed: bool) -> Tensor:
    """The tick whose weights sample each token, int64 [E, L]; never before 0."""
    progress = torch.arange(num_tokens) if mixed else torch.zeros(num_tokens, dtype=torch.int64)
    return (tick - lags[:, None] + progress * lags[:, None] // num_tokens).clamp(min=0)


def sample(
    shape: Shape, history: History, luck: Luck, ticks: Tensor, *, step: int | Tensor, denominator: str = "recorded"
) -> Experience:
    """A batch of every member, token i from its weights at `ticks[:, i]`; `step` (int or [E]) counts the lag."""
    prompts, noise = luck.training()
    constant = bool((ticks == ticks[:, :1]).all())
    first = split(shape, history.weights_at(ticks[:, 0]))

    def weights_at(position: int) -> dict[str, Tensor]:
        return first if constant else split(shape, history.weights_at(ticks[:, position]))

    tokens, behavior = generate(shape, weights_at, prompts, noise)
    if denominator != "recorded":
        chosen = first if denominator == "first" else split(shape, history.weights_at(ticks[:, -1]))
        logits = forward(shape, chosen, features(shape, prompts, shifted(tokens)))
        behavior = token_logprobs(logits.flatten(0, 1), tokens.flatten(0, 1)).unflatten(0, tokens.shape[:2])
    versions = torch.stack([history.versions_at(column) for column in ticks.unbind(1)], dim=1)
    now = step[:, None] if isinstance(step, Tensor) else step
    return Experience(prompts, tokens, behavior, now - versions)


class Window:
    """Facts of the updates since the last evaluation."""

    def __init__(self) -> None:
        self._facts: list[Facts] = []

    def add(self, facts: Facts) -> None:
        self._facts.append(facts)

    def lowest(self, name: str) -> list[float]:
        """The lowest ESS of that name, one per member."""
        return torch.stack([facts.ess_of(name) for facts in self._facts]).amin(0).tolist()

    def mean(self, name: str) -> list[float]:
        """Mean of a field of `Facts`, one per member."""
        return torch.stack([getattr(facts, name) for facts in self._facts]).mean(0).tolist()


def evaluate(learner: Learner, luck: Luck, curves: Sequence[Curve], window: Window) -> None:
    """Score the current weights on fresh prompts by sampling, and append one point to every curve."""
    prompts, noise = luck.evaluation()
    weights = learner.weights()
    tokens, logprobs = generate(learner.shape, lambda _: weights, prompts, noise)
    found = {
        "scores": scores(prompts, tokens).mean(1).tolist(),
        "entropies": (-logprobs).flatten(1).mean(1).tolist(),
        "ess_token": window.lowest("token"),
        "ess_sequence": window.lowest("sequence_clipped"),
        "clipped": window.mean("clipped"),
        "m2": window.mean("m2"),
    }
    for name, values in found.items():
        for curve, value in zip(curves, values, strict=True):
            getattr(curve, name).append(value)
