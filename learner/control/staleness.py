"""Staleness control: bounds on lag, step size and publishing, decided once a batch from what the batch measured.

    drift by lag, ESS  ->  lead (eta) and bound (max_lag)      rule: ess | goodput | fixed
    this batch's ESS   ->  factor on the learning rate         policy.scheduler.ess_rule
    ESS, gradient norm, oscillation  ->  circuit breaker       normal, cautious, drain
    drift since the last publish     ->  publish now or later  publish.when

The step's global totals are equal on all ranks, so ranks decide alike without communication, and rank 0 tells the hub.
Rules: `streamrl.algorithms.staleness`.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import msgspec

from learner.objective.token_batch import LagPolicy
from streamrl.algorithms import (
    fit_drift,
    goodput,
    lag_for_ess,
    lr_scale,
    oscillation,
    predict_m2,
    should_publish,
    spread_budget,
    step_breaker,
    step_goodput,
    step_lag_bound,
    update_drift,
)
from streamrl.algorithms.types import BreakerState, DriftBins, DriftFit, DriftModel, GoodputState, LagBound
from streamrl.config.schema import (
    AdaptiveRule,
    EssRule,
    LossConfig,
    OpsmWhen,
    PublishWhen,
    SchedulerConfig,
    StalenessConfig,
    StalenessMode,
)
from streamrl.lag_rule import LagRule
from streamrl.metrics.meter import Meter

EDGES = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 192, 256, 384, 512, 1024, 4096)
"""Bin k holds lags from EDGES[k] to EDGES[k + 1] - 1."""
LEAST_ESS = 0.05
"""Below this an ESS no longer tells how far it has collapsed: it enters the calibration as this."""


@dataclass(frozen=True, slots=True)
class DriftTracker:
    """Drift by lag and the calibration of `ESS = exp(-n_eff m2)`, both forgotten over `half_life` steps.

    The numbers come from the step's global totals, so all ranks hold the same tracker.

    Attributes:
        model: None before the first batch.
        products, squares: discounted sums of `m2 * log(1 / ESS)` and `m2^2`; their quotient is n_eff.
    """

    half_life: float
    model: DriftModel | None = None
    products: float = 0.0
    squares: float = 0.0

    def observed(self, m2_by_lag: Mapping[int, tuple[float, float]], ess: float | None) -> DriftTracker:
        """The tracker after one more batch: lag -> (sum of squared log-ratios, tokens), and its ESS, if it has one."""
        bins = to_bins(m2_by_lag)
        count = sum(bins.count)
        if not count:
            return self
        model = update_drift(self.model, bins, half_life=self.half_life)
        products, squares = self.products, self.squares
        if ess is not None:
            m2 = sum(m2 * n for m2, n in zip(bins.m2, bins.count, strict=True)) / count
            keep = 0.5 ** (1.0 / self.half_life)
            loss = -math.log(min(1.0, max(LEAST_ESS, ess)))
            products, squares = keep * products + m2 * loss, keep * squares + m2 * m2
        return DriftTracker(self.half_life, model, products, squares)

    @property
    def fit(self) -> DriftFit:
        """The power law of drift over lag; flat without data."""
        return fit_drift(self.model) if self.model is not None else DriftFit(0.0, 0.0, 1.0, 0.0)

    @property
    def num_effective_tokens(self) -> float:
        """n_eff: tokens of a trajectory that lose samples as if they were independent; 0 while nothing drifts."""
        return self.products / self.squares if self.squares > 0.0 else 0.0

    def m2_at(self, lag: float) -> float:
        """Predicted mean squared log-ratio at `lag`, never falling with it; 0 without data."""
        return predict_m2(self.model, lag) if self.model is not None else 0.0

    def m2_table(self, largest_lag: int) -> tuple[float, ...]:
        """`m2_at` of lag 0 to `largest_lag`; empty without data."""
        return tuple(self.m2_at(lag) for lag in range(largest_lag + 1)) if self.model is not None else ()

    def drift_over(self, num_steps: int) -> float:
        """Predicted drift that `num_steps` optimizer steps add to what the engines disagree by anyway."""
        return max(0.0, self.m2_at(num_steps) - self.m2_at(0))

    def oscillation_at(self, lag: float) -> float:
        return oscillation(self.model, lag) if self.model is not None else 0.0

    def lag_for(self, ess_target: float) -> float:
        """The largest lag whose predicted ESS is the target; inf while nothing drifts."""
        tokens = self.num_effective_tokens
        return lag_for_ess(self.fit, ess_target=ess_target, num_effective_tokens=tokens) if tokens > 0.0 else math.inf

    def spread_for(self, m2_target: float) -> int | None:
        """The largest difference of lags inside a group that the budget allows; None without data."""
        return spread_budget(self.model, m2_target=m2_target) if self.model is not None else None


def to_bins(m2_by_lag: Mapping[int, tuple[float, float]]) -> DriftBins:
    """Sums by lag as bins of lag. The standard error is a Gaussian's: `m2 sqrt(2 / count)`."""
    num_bins = len(EDGES) - 1
    lags, counts, squares = ([0.0] * num_bins for _ in range(3))
    for lag, (total, count) in m2_by_lag.items():
        which = bisect_right(EDGES, lag) - 1
        if count > 0 and 0 <= which < num_bins:
            lags[which] += lag * count
            counts[which] += count
            squares[which] += total
    sizes = [max(count, 1.0) for count in counts]
    m2 = [square / size for square, size in zip(squares, sizes, strict=True)]
    return DriftBins(
        lag=tuple(lags[k] / sizes[k] if counts[k] else float(EDGES[k]) for k in range(num_bins)),
        count=tuple(counts), m2=tuple(m2),
        standard_error=tuple(m2[k] * math.sqrt(2.0 / sizes[k]) for k in range(num_bins)),
    )


log = logging.getLogger("streamrl.learner")

ESS = "ess/sequence_clipped"
"""Effective share of the batch's trajectories, with the weights of single ones cut at the cap."""
MODES = ("normal", "cautious", "drain")
CAUTIOUS_OPSM = 0.5
"""Factor on the threshold of off-policy sequence masking while the circuit breaker is not normal."""
_BREAKER_FLOOR = 0.1  # what `step_breaker` takes for a learning rate at its floor


class StalenessControl:
    """The control of one run; without `staleness.adaptive.enabled` eta and max_lag stay as they are set.

    Args:
        rule: lag rule of these settings.
        soft_max_lag: the lag beyond which tokens are masked or discounted, where the mode does so.
        every_steps: batches from one publication to the next.
    """

    def __init__(
        self, staleness: StalenessConfig, loss: LossConfig, scheduler: SchedulerConfig, when: PublishWhen, *,
        rule: LagRule, soft_max_lag: int, every_steps: int = 1,
    ) -> None:
        self._adaptive, self._scheduler = staleness.adaptive, scheduler
        self._needs_m2 = loss.zscore_bound is not None
        self._publish_on_drift, self._every_steps = when is PublishWhen.drift, every_steps
        self._opsm_on_drift = loss.opsm_delta is not None and loss.opsm_when is OpsmWhen.over_budget
        self._eta, self._mode, self._decay = rule.eta, staleness.mode, staleness.decay
        self._rule, self._steps = rule, rule.steps_per_batch
        self._soft_slack = soft_max_lag - self._steps * self._eta
        # The lag bound is steered in batches, as a number of at least 1; its distance to eta never changes.
        self._offset = max(-(-self._soft_slack // self._steps), 1 - self._adaptive.min_eta)
        self._bound = LagBound(float(self._eta + self._offset), self._eta + self._offset)
        self._goodput = GoodputState(self._eta)
        self._breaker = BreakerState()
        self.tracker = DriftTracker(self._adaptive.half_life_steps)
        self._mean_lag = 0.0
        self._scale = 1.0
        self._published: int | None = None

    # --- what holds now -----------------------------------------------------------------------------------------------

    @property
    def eta(self) -> int:
        """Allowed lead in batches: the rule's, halved while cautious, 0 while draining."""
        lead = self._rule_eta()
        return {"normal": lead, "cautious": lead // 2, "drain": 0}[self.mode]

    @property
    def max_lag(self) -> int:
        """The bound at which a group is refused."""
        return self._rule.at_eta(self.eta).max_lag

    @property
    def soft_max_lag(self) -> int:
        """The lag beyond which tokens are masked or discounted, where the mode does so, at a batch's last step."""
        return max(0, self._steps * self.eta + self._soft_slack)

    @property
    def bounds(self) -> tuple[int, int] | None:
        """(eta, max_lag) for the hub; None if nothing can move them."""
        return (self.eta, self.max_lag) if self._adaptive.enabled else None

    @property
    def mode(self) -> str:
        """State of the circuit breaker: normal, cautious or drain."""
        return self._breaker.mode

    @property
    def frozen(self) -> bool:
        """Whether dual variables stop integrating: measurements are too stale to add up."""
        return self.mode != "normal"

    @property
    def opsm_on(self) -> bool:
        """Whether off-policy sequence masking is due: the drift at the mean lag is over its budget."""
        return self.tracker.m2_at(self._mean_lag) > self._adaptive.m2_target

    @property
    def lag_policy(self) -> LagPolicy:
        """The lag policy of the next batch's objective."""
        soft = max(0, self.soft_max_lag - self._steps + 1)  # the objective uses the lag at the first step
        return LagPolicy(
            mask_beyond=soft if self._mode is StalenessMode.mask_old_tokens else None,
            discount_beyond=soft if self._mode is StalenessMode.reweight else None,
            decay=self._decay, drift_exceeded=self.opsm_on, spread_budget=self.spread_budget,
            opsm_scale=CAUTIOUS_OPSM if self.frozen else 1.0,
            m2_by_lag=self.tracker.m2_table(self.max_lag) if self._needs_m2 else (),
        )

    @property
    def spread_budget(self) -> int | None:
        """The largest difference of head lags that one group's baseline may span; None does not limit it."""
        if not (self._adaptive.enabled and self._adaptive.group_spread):
            return None
        return self.tracker.spread_for(self._adaptive.m2_target)

    @property
    def reads_ratios(self) -> bool:
        """Whether something moves by the batch's ratios, ESS or drift; otherwise they are only reported."""
        by_ess = self._scheduler.ess_rule is not EssRule.none
        return self._adaptive.enabled or by_ess or self._publish_on_drift or self._opsm_on_drift or self._needs_m2

    # --- once a step --------------------------------------------------------------------------------------------------

    def lr_scale(self, meter: Meter) -> float:
        """Factor on the learning rate for the batch that `meter` has measured; 1 where there is no ESS."""
        ess, rule = meter.value(ESS), self._scheduler.ess_rule
        idle = ess is None or rule is EssRule.none
        self._scale = 1.0 if idle else lr_scale(ess, rule=rule.name, floor=self._scheduler.ess_floor)
        return self._scale

    def update(self, meter: Meter, *, grad_norm: float, step_s: float) -> None:
        """Take in a finished step.

        Args:
            meter: the step's global totals.
            grad_norm: before clipping; not finite if the step was skipped.
            step_s: seconds since the step before, the same on all ranks.
        """
        ess = meter.value(ESS)
        self.tracker = self.tracker.observed(meter.bins("drift/m2_by_lag"), ess)
        mean_lag = meter.value("lag/token_mean")
        self._mean_lag = self._mean_lag if mean_lag is None else mean_lag
        if not self._adaptive.enabled:
            return
        before = (self.mode, self.eta)
        if self._adaptive.breaker:
            self._step_breaker(ess, grad_norm, meter.value("lag/queue") or 0.0)
        if ess is not None:
            self._step_rule(ess, meter.value("policy/num_groups") or 0.0, step_s)
        self._report(before, ess, grad_norm)

    def publish_due(self, version: int, *, asked_for: bool = False) -> bool:
        """Tell whether to publish this version: always, every so many batches, or once the drift since the last
        one is large enough.

        Actors that generate from an older version lose lead. At most half of the lead may be lost so, or they would get
        no leases and training would stop. `asked_for`: an evaluation waits for this very version.
        """
        if self._published is None:
            return True
        behind = version - self._published
        if behind <= 0:
            return False
        if self._every_steps > 1 and not asked_for and behind < self._steps * min(self._every_steps, self.eta + 1):
            return False
        if asked_for or not self._publish_on_drift or self.tracker.model is None:
            return True
        drift = self.tracker.drift_over(behind)
        return behind > self._steps * (self.eta // 2) or should_publish(drift, m2_target=self._adaptive.m2_target)

    def published(self, version: int) -> None:
        self._published = version

    def starves(self, version: int) -> bool:
        """Tell whether the batch that trains at `version` cannot come from actors with the version published last."""
        lead = 0 if self._rule.force is not None else self.eta
        return self._published is not None and version - self._published > self._steps * lead

    def add_metrics(self, meter: Meter) -> None:
        """Add the bounds that hold from now on, and the measurements that led to them."""
        meter.add_all({
            "lr/scale": self._scale, "control/eta": self.eta, "control/max_lag": self.max_lag,
            "control/mode": MODES.index(self.mode), "drift/exponent": self.tracker.fit.exponent,
            "drift/oscillation": self.tracker.oscillation_at(self._mean_lag),
        })

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """The state, as plain values."""
        return {
            "bound": asdict(self._bound), "goodput": asdict(self._goodput), "breaker": asdict(self._breaker),
            "tracker": asdict(self.tracker), "mean_lag": self._mean_lag, "eta": self._rule_eta(), "start": self._eta,
            "rule": self._adaptive.rule.name if self._adaptive.enabled else "", "offset": self._offset,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `to_json()`, with the lead of now if it is set otherwise.

        Bounds that the settings no longer allow are moved inside them.
        """
        tracker = msgspec.convert(state["tracker"], DriftTracker)
        self.tracker = replace(tracker, half_life=self._adaptive.half_life_steps)
        self._breaker = msgspec.convert(state["breaker"], BreakerState)
        self._mean_lag = float(state["mean_lag"])
        if not (self._adaptive.enabled and self._adaptive.breaker):
            self._breaker = BreakerState()
        if not self._adaptive.enabled or self._adaptive.rule is AdaptiveRule.fixed:
            return
        if state.get("start", self._eta) != self._eta:  # absent, as the others, in a checkpoint of an earlier release
            return
        bound, goodput = msgspec.convert(state["bound"], LagBound), msgspec.convert(state["goodput"], GoodputState)
        shift, own = self._offset - state.get("offset", self._offset), self._adaptive.rule.name
        if state.get("rule", own) != own:  # it goes on from where another rule has led
            eta, shift = int(state["eta"]), self._offset
            bound, goodput = LagBound(float(eta), eta), GoodputState(eta)
        low, high = self._adaptive.min_eta + self._offset, self._adaptive.max_eta + self._offset
        smoothed, value = (min(high, max(low, one + shift)) for one in (bound.smoothed, bound.value))
        self._bound, self._goodput = LagBound(smoothed, int(value)), self._within(goodput)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _rule_eta(self) -> int:
        rule = self._adaptive.rule
        if not self._adaptive.enabled or rule is AdaptiveRule.fixed:
            return self._eta
        return self._goodput.eta if rule is AdaptiveRule.goodput else self._bound.value - self._offset

    def _step_rule(self, ess: float, num_groups: float, step_s: float) -> None:
        adaptive = self._adaptive
        if adaptive.rule is AdaptiveRule.ess:
            high = adaptive.max_eta + self._offset
            wanted = (self.tracker.lag_for(adaptive.ess_target) - self._soft_slack) / self._steps + self._offset
            self._bound = step_lag_bound(  # a target beyond the bound reaches it in finite time
                self._bound, min(wanted, 2.0 * high), low=adaptive.min_eta + self._offset, high=high
            )
        elif adaptive.rule is AdaptiveRule.goodput and self.mode == "normal" and step_s > 0.0:
            value = goodput(num_groups / step_s, ess)  # means nothing at another lead than the one on trial
            self._goodput = self._within(step_goodput(self._goodput, value, num_steps=adaptive.num_trial_steps))

    def _within(self, climb: GoodputState) -> GoodputState:
        """A trial outside the bounds goes the other way; with no other way there is none."""
        low, high = self._adaptive.min_eta, self._adaptive.max_eta
        if low <= climb.eta <= high:
            return climb
        turned = climb.eta - 2 * climb.direction
        if low <= turned <= high:
            return replace(climb, eta=turned, direction=-climb.direction)
        return GoodputState(min(high, max(low, climb.eta)), climb.direction)

    def _step_breaker(self, ess: float | None, grad_norm: float, queue_lag: float) -> None:
        floor, scale = self._scheduler.ess_floor, self._scale
        # A drift within its budget may swing as it likes: at a few hundred tokens that is mostly noise.
        swing = self.tracker.oscillation_at(self._mean_lag) if self.opsm_on else 0.0
        self._breaker = step_breaker(
            self._breaker, ess=1.0 if ess is None else ess, grad_norm=grad_norm, oscillation=swing,
            step_scale=min(scale, _BREAKER_FLOOR) if scale <= floor < 1.0 else scale, queue_lag=queue_lag,
        )

    def _report(self, before: tuple[str, int], ess: float | None, grad_norm: float) -> None:
        if before[0] != self.mode:
            level = logging.INFO if MODES.index(self.mode) < MODES.index(before[0]) else logging.WARNING
            log.log(
                level, "staleness control: %s -> %s at ESS %.2f, gradient norm %.3g, oscillation %.2f; eta %d -> %d",
                before[0], self.mode, math.nan if ess is None else ess, grad_norm,
                self.tracker.oscillation_at(self._mean_lag), before[1], self.eta,
            )
        elif before[1] != self.eta:
            log.info("staleness control: eta %d -> %d, max_lag %d", before[1], self.eta, self.max_lag)
