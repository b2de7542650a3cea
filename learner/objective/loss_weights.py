"""Weights that move during a run: of the KL term, the entropy bonus and each constraint, and the upper clip.

    controls = LossWeights(config.kl, config.entropy, config.constraint, config.loss)
    the objective reads  controls.kl_coef, .entropy_coef, .clip_high, .multipliers     constant within a step
    after finish()       controls.record(meter); controls.update(meter, num_steps=...) same totals: same on all ranks
    a checkpoint holds   controls.to_plain()                                           numbers only

The rules are pure functions of `streamrl.algorithms`; this class keeps their states between steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from learner.objective import kl_options
from streamrl.algorithms import clip_high_update, entropy_coef_update, kl_schedule
from streamrl.algorithms.types import ConstraintState, KlState
from streamrl.config.schema import ConstraintConfig, ConstraintMethod, EntropyAdapt, EntropyConfig, KlConfig, LossConfig
from streamrl.metrics.meter import Meter

MEASURED = {"kl": "kl/value", "entropy": "entropy/mean"}
"""Name of a constraint -> the metric that it bounds."""
SENSES = {"kl": "max", "entropy": "min"}


class LossWeights:
    """Current weights and the states behind them.

    Args:
        kl, entropy, constraint, loss: settings, checked by `learner.objective.kl_options.check_regularizers`.
        num_steps: steps done before the first one here (for a schedule).
    """

    def __init__(
        self, kl: KlConfig, entropy: EntropyConfig, constraint: ConstraintConfig, loss: LossConfig, *,
        num_steps: int = 0,
    ) -> None:
        self._kl, self._entropy, self._constraint, self._settings = kl, entropy, constraint, loss
        self._kl_options, self._entropy_options = kl_options.controller_options(kl), kl_options.entropy_options(entropy)
        self._method_options = kl_options.method_options(constraint)
        self._limits = kl_options.constraint_limits(constraint)
        self._kl_state = KlState(kl_options.starting_coef(kl))
        self._bonus, self.clip_high = loss.entropy_coef, loss.clip_high
        self._last: dict[str, float] = {}  # newest measurement of each name in MEASURED
        self._duals = {name: ConstraintState() for name in self._limits}
        self._follow_schedule(num_steps)

    @property
    def kl_coef(self) -> float:
        """Weight of the KL term; 0 with kl.mode=off."""
        return self._kl_state.coef

    @property
    def entropy_coef(self) -> float:
        """Weight of the entropy bonus; with an adaptive one 0 while the last measured entropy is above the target."""
        adapts = self._entropy.adapt is EntropyAdapt.coef
        above = adapts and self._last.get("entropy", 0.0) > self._entropy_options["target"]
        return 0.0 if above else self._bonus

    @property
    def multipliers(self) -> dict[str, float]:
        """Weight of each constraint's error per token, by name (kl, entropy)."""
        return {name: self._multiplier(name) for name in self._limits}

    def _multiplier(self, name: str) -> float:
        sign = 1.0 if SENSES[name] == "max" else -1.0
        error = (self._last[name] - self._limits[name]) * sign if name in self._last else 0.0
        if self._constraint.method is ConstraintMethod.penalty:
            # The slope of weight * relu(e)^2 at the last mean: the gradient of constraint_penalty, micro-batch by
            # micro-batch, though none of them knows the mean.
            return 2.0 * self._method_options["weight"] * max(0.0, error)
        return 0.0 if self._constraint.one_sided and error <= 0.0 else self._duals[name].multiplier

    @property
    def read_every_token(self) -> bool:
        """Some term, or what moves its weight, depends on tokens whose advantage is 0."""
        entropy = self._entropy.adapt is not EntropyAdapt.none or self._settings.entropy_coef > 0.0
        return entropy or self._kl.mode != "off" or bool(self._limits) or self._settings.behavior_penalty > 0.0

    def record(self, meter: Meter) -> None:
        """Log the weights that this step used; call it before `update`."""
        if self._kl.mode != "off":
            meter.add("kl/coef", self.kl_coef)
        if self._bonus or self._entropy.adapt is EntropyAdapt.coef:
            meter.add("entropy/coef", self.entropy_coef)
        if self._entropy.adapt is EntropyAdapt.clip_high:
            meter.add("clip/high", self.clip_high)
        for name, multiplier in self.multipliers.items():
            meter.add(f"constraint/{name}", multiplier)

    def update(self, meter: Meter, *, num_steps: int, frozen: bool = False) -> None:
        """Move all weights by this step's global means; what was not measured moves nothing.

        Args:
            meter: of the whole step, the same on every rank; read for kl/value, entropy/mean, policy/num_trajectories.
            num_steps: steps (batches) done by now.
            frozen: hold the multipliers of constraints: what the data says of them is too stale (low ESS).
        """
        # A skipped step, or one without tokens, measures nothing; a controller fed with 0 would run away.
        values = {name: meter.value(key) for name, key in MEASURED.items()}
        measured = {name: value for name, value in values.items() if value is not None}
        self._last |= measured
        if "kl" in measured and self._kl_moves:
            options = dict(self._kl_options)
            if self._kl.controller == "horizon":
                options["num_trajectories"] = int(meter.value("policy/num_trajectories") or 0)
            self._kl_state = kl_options.CONTROLLERS[self._kl.controller](self._kl_state, measured["kl"], **options)
        if "entropy" in measured and self._entropy.adapt is EntropyAdapt.coef:
            self._bonus = entropy_coef_update(self._bonus, measured["entropy"], **self._entropy_options)
        elif "entropy" in measured and self._entropy.adapt is EntropyAdapt.clip_high:
            self.clip_high = clip_high_update(self.clip_high, measured["entropy"], **self._entropy_options)
        rule = kl_options.DUAL_METHODS.get(self._constraint.method)
        for name, dual in self._duals.items():
            if rule is not None and name in measured:
                self._duals[name] = rule(
                    dual, measured[name], self._limits[name], sense=SENSES[name], frozen=frozen, **self._method_options
                )
        self._follow_schedule(num_steps)

    @property
    def _kl_moves(self) -> bool:
        """A controller moves the weight of the KL term by what was measured."""
        return self._kl.controller in kl_options.CONTROLLERS and self._kl.mode != "off"

    def _follow_schedule(self, num_steps: int) -> None:
        if self._kl.controller == "schedule" and self._kl.mode != "off":
            self._kl_state = KlState(
                kl_schedule(num_steps, start=kl_options.starting_coef(self._kl), **self._kl_options)
            )

    def to_plain(self) -> dict[str, Any]:
        """All states as JSON holds them."""
        return {
            "kl": asdict(self._kl_state), "entropy_coef": self._bonus, "clip_high": self.clip_high,
            "last": dict(self._last), "constraints": {name: asdict(state) for name, state in self._duals.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `to_plain()`."""
        # A weight that no controller moved is no state: the setting of the resumed run counts.
        if self._kl_moves:
            self._kl_state = KlState(**state["kl"])
        if self._entropy.adapt is EntropyAdapt.coef:
            self._bonus = float(state["entropy_coef"])
        if self._entropy.adapt is EntropyAdapt.clip_high:
            self.clip_high = float(state["clip_high"])
        self._last = {name: float(value) for name, value in state["last"].items()}
        for name in self._duals:
            if name in state["constraints"]:
                self._duals[name] = ConstraintState(**state["constraints"][name])
