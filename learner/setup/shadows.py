"""Shadow algorithms by name: whose settings each has, and which of them this run's batches can answer for."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence
from dataclasses import replace

from learner.objective.objective import Objective
from learner.objective.options import surrogate_options
from learner.objective.regularizers import Regularizers
from learner.objective.shadow import Shadow
from learner.objective.token_batch import POLICY, PROXIMAL, SQUARE_NORMS, VALUES
from streamrl.algorithms import SURROGATES, find_surrogate
from streamrl.config.composition import group_files
from streamrl.config.load import algorithm_preset
from streamrl.config.schema import AdvantageConfig, ConstraintConfig, DistillConfig, KlConfig, LossConfig
from streamrl.errors import ConfigError
from streamrl.extension import did_you_mean

MISSING = {
    VALUES: "values, and this run trains no such critic", SQUARE_NORMS: "the gradient norms of advantage.baseline=opob",
    PROXIMAL: "the averaged policy of loss.anchor=ewma",
    POLICY: "the whole batch before its first optimizer step: set learner.num_minibatches=1",
}
"""Need of an objective -> what a run without it lacks."""


def make_shadows(
    names: Sequence[str], objective: Objective, kl: KlConfig, constraint: ConstraintConfig, *, max_lag: int,
    num_minibatches: int, distill: DistillConfig | None = None,
) -> tuple[Shadow, ...]:
    """Shadows of a run that trains by `objective`.

    Args:
        names: presets of configs/algorithm, keys of the table of surrogates, or a user's own surrogates.
        kl, constraint, distill: of the run; its regularizers are everyone's.
    Raises:
        ConfigError: an unknown name, one given twice, or an algorithm that needs what this run does not compute.
    """
    controls, shadows = objective.regularizers.controls, []
    for name in names:
        advantage, loss, options = _settings(name, objective)
        try:
            # One optimizer step: only the batch's first is compared.
            made = Objective(
                advantage, loss, max_new_tokens=objective.max_new_tokens, max_lag=max_lag,
                regularizers=Regularizers(kl, constraint, loss, controls, distill),
            )
        except ConfigError as error:
            raise ConfigError(f"shadow.algorithms={name} cannot be compared here, leave it out: {error}") from error
        _check_needs(name, made, objective, {POLICY} if num_minibatches == 1 else ())
        shadows.append(Shadow(name.rpartition(":")[2], made, options))
    labels = [shadow.name for shadow in shadows]
    if len(set(labels)) < len(labels):
        raise ConfigError(f"shadow.algorithms={list(names)} names one twice, but metrics carry the name: leave one out")
    return tuple(shadows)


def _settings(name: str, objective: Objective) -> tuple[AdvantageConfig, LossConfig, dict[str, object]]:
    """Advantages, loss, constants: a preset's own, or the run's with another surrogate and that one's constants."""
    presets = sorted(group_files("algorithm"))
    if name in presets:
        preset = algorithm_preset(name)
        return preset.advantage, preset.loss, surrogate_options(preset.loss)
    if ":" not in name and name not in SURROGATES:
        raise ConfigError(
            f"shadow.algorithms={name} is unknown: choose presets ({', '.join(presets)}) or surrogates "
            f"({', '.join(SURROGATES)}), or your own as package.module:function."
            + did_you_mean(name, [*presets, *SURROGATES])
        )
    surrogate = find_surrogate(name)
    run, default, widest = objective.loss, LossConfig(), surrogate.max_clip or 1.0
    loss = replace(
        run, surrogate=name, options={}, cap=None, dual_clip=None, anchor=None, ewma_decay=default.ewma_decay,
        clip_decay=None, correction=default.correction, clip_low=min(run.clip_low, widest),
        clip_high=min(run.clip_high, widest),
        avg_level="seq-mean-token-mean" if surrogate.whole_row else run.avg_level,
    )
    # Every constant by name, since a `fit` of the surrogate has defaults of its own.
    parameters = inspect.signature(surrogate.function).parameters
    usual = {knob: parameters[knob].default for knob in surrogate.knobs}
    own = {knob: value for knob, value in usual.items() if value is not inspect.Parameter.empty}
    return objective.advantage, loss, surrogate_options(loss) | own


def _check_needs(name: str, shadow: Objective, objective: Objective, after: Collection[str]) -> None:
    """Refuse an algorithm that reads more than the run computes; `after` is what its own forward pass gives."""
    missing = shadow.needs - (objective.needs - {POLICY}) - set(after)
    if VALUES in shadow.needs and shadow.estimator.of_actions != objective.estimator.of_actions:
        missing |= {VALUES}
    if missing:
        what = "; ".join(MISSING.get(need, need) for need in sorted(missing))
        raise ConfigError(
            f"shadow.algorithms={name} needs {what}. A shadow reads what the run computes anyway: leave it out, or "
            "train with what it needs"
        )
