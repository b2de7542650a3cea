"""The actors slow down and recover: lag 4, then 48, then 4 again; with fixed lag bounds and with the controllers.

Time is counted in ticks: in one tick the actors finish one batch. A batch that is trained on at tick t was sampled with
the weights of tick t - delay(t). Its lag is the number of updates since then, so a learner that never waits has lag =
delay. A bound drops batches beyond it, which costs an update and lets the lag shrink: the price of a low bound is paid
in ticks. All controllers are those of `streamrl.algorithms`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bench.pieces import drift_bins
from bench.staleness.arms import ARMS, check
from bench.staleness.history import History
from bench.staleness.learner import LAG_EDGES, M2_TARGET, Learner
from bench.staleness.policy import Shape, generate
from bench.staleness.simulate import sample, sampling_ticks
from bench.staleness.task import Luck, Task, scores
from streamrl.algorithms import (
    BreakerState,
    DriftModel,
    LagBound,
    fit_drift,
    lag_for_ess,
    oscillation,
    predict_m2,
    step_breaker,
    step_lag_bound,
    update_drift,
)

ESS_TARGET = 0.5  # of the trajectory ratio truncated at 2
LARGEST_BOUND = 64
_FORGET = 0.97  # of the calibration of the effective number of tokens, per update


@dataclass(frozen=True, slots=True)
class Driver:
    """One run under the changing delay. `bound` None: no bound; "adaptive": the controllers choose it."""

    bound: int | str | None
    lr: float
    seed: int


@dataclass(frozen=True, slots=True)
class StepChange:
    """The delay over time, and the runs that live through it."""

    arm: str
    drivers: tuple[Driver, ...]
    num_ticks: int = 900
    low: int = 4
    high: int = 48
    task: Task = field(default_factory=Task)
    eval_every: int = 25

    def delay(self, tick: int) -> int:
        """Low for a sixth of the ticks, high for a half, low for the last third."""
        return self.high if self.num_ticks <= 6 * tick < 4 * self.num_ticks else self.low


@dataclass(slots=True)
class Trace:
    """Record of one driver, a point per `eval_every` ticks; means and extremes since the previous point."""

    driver: Driver
    scores: list[float] = field(default_factory=list)
    lags: list[float] = field(default_factory=list)  # largest lag trained on; 0 if nothing was
    bounds: list[float] = field(default_factory=list)
    ess_sequence: list[float] = field(default_factory=list)  # lowest of the batches trained on; 1 if none was
    num_updates: list[int] = field(default_factory=list)  # since the start
    modes: list[str] = field(default_factory=list)  # of the breaker


class LagControl:
    """Lag bound of one run, from measured drift: ESS target -> lag, slowly followed, with a circuit breaker on top."""

    def __init__(self) -> None:
        self._drift: DriftModel | None = None
        self._bound = LagBound(smoothed=float(LARGEST_BOUND), value=LARGEST_BOUND)
        self._xx = self._xy = 0.0
        self.breaker = BreakerState()

    @property
    def bound(self) -> int:
        """Largest lag to train on now: halved when the breaker is cautious, 1 while it drains."""
        return {"normal": self._bound.value, "cautious": max(1, self._bound.value // 2), "drain": 1}[self.breaker.mode]

    def observe(
        self, log_ratios: Tensor, lags: Tensor, *, ess: float, step_scale: float, norm: float, lag: int
    ) -> None:
        """One update has been made on log-ratios [R, L] of those lags; take the bound one step further."""
        mask = torch.ones_like(log_ratios, dtype=torch.bool)
        self._drift = update_drift(self._drift, drift_bins(log_ratios, lags, mask, edges=LAG_EDGES))
        tokens = self._effective_tokens(float(log_ratios.square().mean()), ess, log_ratios.shape[1])
        target = lag_for_ess(fit_drift(self._drift), ess_target=ESS_TARGET, num_effective_tokens=tokens)
        self._bound = step_lag_bound(self._bound, min(target, float(LARGEST_BOUND)), high=LARGEST_BOUND)
        # As in the learner: a drift that swings back within its budget is no trouble.
        swing = oscillation(self._drift, float(lag)) if predict_m2(self._drift, float(lag)) > M2_TARGET else 0.0
        self.breaker = step_breaker(
            self.breaker, ess=ess, step_scale=step_scale, grad_norm=norm, queue_lag=float(lag), oscillation=swing
        )

    def idle(self, lag: int) -> None:
        """No update at this tick: a draining breaker looks at the age of what waits."""
        if self.breaker.mode == "drain":
            self.breaker = step_breaker(
                self.breaker, ess=1.0, step_scale=1.0, grad_norm=self.breaker.grad_norm_ewma, oscillation=0.0,
                queue_lag=float(lag),
            )  # fmt: skip

    def _effective_tokens(self, m2: float, ess: float, num_tokens: int) -> float:
        """Tokens that count in ESS = exp(-n m2): regression of -log ESS on m2 through 0, forgotten over updates."""
        self._xx = _FORGET * self._xx + m2 * m2
        self._xy = _FORGET * self._xy - m2 * math.log(max(ess, 1e-6))
        return max(self._xy / self._xx, 1e-3) if self._xx > 0.0 else float(num_tokens)


def run(plan: StepChange) -> list[Trace]:
    """Every driver of the plan through the change of delay and back."""
    drivers, task = plan.drivers, plan.task
    check(ARMS[plan.arm], max_lag=plan.high)
    shape, seeds = Shape(task.num_tokens), [driver.seed for driver in drivers]
    adaptive = [driver.bound == "adaptive" for driver in drivers]
    learner = Learner(ARMS[plan.arm], task, shape, seeds, [driver.lr for driver in drivers], scaled=adaptive)
    luck, history = Luck(task, seeds), History(plan.high + 1, learner.parameters.detach())
    controls = [LagControl() if chosen else None for chosen in adaptive]
    versions, traces = torch.zeros(len(drivers), dtype=torch.int64), [Trace(driver) for driver in drivers]
    window = _Window(len(drivers))
    for tick in range(plan.num_ticks):
        history.push(learner.parameters.detach(), versions)
        delays = torch.full_like(versions, plan.delay(tick))
        experience = sample(
            shape, history, luck, sampling_ticks(tick, delays, task.num_tokens, mixed=False), step=versions
        )
        lags = experience.lags[:, 0]
        active = torch.tensor([bound is None or lag <= bound for bound, lag in _pairs(drivers, controls, lags)])
        facts = learner.update(experience, active)
        ess, norms, scales = facts.ess_of("sequence_clipped").tolist(), facts.norms.tolist(), facts.step_scale.tolist()
        for member, control in enumerate(controls):
            if control is not None and bool(active[member]):
                ages = experience.lags[member].expand_as(facts.log_ratios[member])
                control.observe(facts.log_ratios[member], ages, ess=ess[member], step_scale=scales[member],
                                norm=norms[member], lag=int(lags[member]))  # fmt: skip
            elif control is not None:
                control.idle(int(lags[member]))
        versions = versions + active
        window.add(active.tolist(), lags.tolist(), ess)
        if (tick + 1) % plan.eval_every == 0:
            _evaluate(learner, luck, traces, controls, window, versions)
            window = _Window(len(drivers))
    return traces


def _pairs(
    drivers: Sequence[Driver], controls: Sequence[LagControl | None], lags: Tensor
) -> list[tuple[int | None, int]]:
    """The bound in force and the lag of the batch on offer, for every run."""
    bounds = [c.bound if c is not None else d.bound for d, c in zip(drivers, controls, strict=True)]
    return list(zip(bounds, lags.tolist(), strict=True))  # type: ignore[arg-type]


class _Window:
    """Largest lag and lowest ESS of the batches trained on since the last evaluation."""

    def __init__(self, num_drivers: int) -> None:
        self.lags, self.ess = [0] * num_drivers, [1.0] * num_drivers

    def add(self, active: Sequence[bool], lags: Sequence[int], ess: Sequence[float]) -> None:
        for member, (trained, lag, value) in enumerate(zip(active, lags, ess, strict=True)):
            if trained:
                self.lags[member] = max(self.lags[member], lag)
                self.ess[member] = min(self.ess[member], value)


def _evaluate(
    learner: Learner, luck: Luck, traces: Sequence[Trace], controls: Sequence[LagControl | None], window: _Window,
    versions: Tensor,
) -> None:
    prompts, noise = luck.evaluation()
    weights = learner.weights()
    tokens, _ = generate(learner.shape, lambda _: weights, prompts, noise)
    found = scores(prompts, tokens).mean(1).tolist()
    for member, (trace, control) in enumerate(zip(traces, controls, strict=True)):
        fixed = LARGEST_BOUND if trace.driver.bound is None else trace.driver.bound
        trace.scores.append(found[member])
        trace.lags.append(window.lags[member])
        trace.ess_sequence.append(window.ess[member])
        trace.bounds.append(float(control.bound if control is not None else fixed))
        trace.num_updates.append(int(versions[member]))
        trace.modes.append(control.breaker.mode if control is not None else "off")
