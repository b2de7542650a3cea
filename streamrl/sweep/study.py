"""The search: Optuna proposes trials, receives their results and decides which to prune. The only door to Optuna."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from streamrl.config.schema import Pruner, SweepConfig
from streamrl.errors import ConfigError, describe, install_extra
from streamrl.extension import resolve_function
from streamrl.sweep.words import Axis

if TYPE_CHECKING:
    from optuna import Study, Trial
    from optuna.distributions import BaseDistribution
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler

GRID = "grid"
STORAGE = "study.log"


def check_search(settings: SweepConfig) -> None:
    """Raise ConfigError for a search that cannot be done, before anything is started."""
    if settings.sampler == GRID:
        return
    resolve_function(settings.sampler, SAMPLERS, setting="sweep.sampler")
    if importlib.util.find_spec("optuna") is None:
        raise ConfigError(f"sweep.sampler={settings.sampler} needs Optuna; install it with {install_extra('search')}")


def _tpe(*, seed: int, num_startup_trials: int) -> BaseSampler:
    from optuna.samplers import TPESampler

    return TPESampler(seed=seed, n_startup_trials=num_startup_trials)


def _random(*, seed: int, num_startup_trials: int) -> BaseSampler:
    from optuna.samplers import RandomSampler

    return RandomSampler(seed=seed)


SAMPLERS: Mapping[str, Callable[..., BaseSampler]] = {"tpe": _tpe, "random": _random}
"""A factory of one's own takes the same keywords and gives a sampler of Optuna."""


class Search:
    """A study whose every step stands in a file of the sweep's directory, so that another process can go on with it."""

    def __init__(self, directory: Path, axes: Mapping[str, Axis], settings: SweepConfig, seed: int) -> None:
        import optuna
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend

        optuna.logging.set_verbosity(logging.WARNING)
        self._spaces = {key: _distribution(key, axis) for key, axis in axes.items()}
        storage = JournalStorage(JournalFileBackend(str(directory / STORAGE)))
        self._axes, self._directory = axes, directory
        known = optuna.get_all_study_names(storage)  # the directory may have had another name
        self._study: Study = optuna.create_study(
            storage=storage, study_name=known[0] if known else directory.name, direction=settings.direction.name,
            load_if_exists=True, pruner=_pruner(settings),
        )
        if (found := self._study.direction.name.lower()) != settings.direction.name:
            raise ConfigError(
                f"sweep.dir={directory} holds a search with sweep.direction={found}, not {settings.direction.name}: "
                "give the same one, or choose another directory"
            )
        past = self._study.get_trials(deepcopy=False)
        if any(one.params.keys() != axes.keys() for one in past):
            self._refuse_other_axes()
        # A seed used twice would draw the first trials again.
        self._study.sampler = _sampler(settings, seed + len(past))
        self._num_left = settings.num_trials - len(past)
        self._trials: dict[int, Trial] = {}
        running = optuna.trial.TrialState.RUNNING
        self._interrupted = [one for one in past if one.state == running]

    def next(self) -> tuple[int, tuple[str, ...]] | None:
        """Number and words of the next trial, those first that an earlier process left unfinished; None at the end."""
        if self._interrupted:
            from optuna import Trial

            frozen = self._interrupted.pop(0)
            trial = Trial(self._study, frozen._trial_id)
        elif self._num_left > 0:
            self._num_left -= 1
            try:
                trial = self._study.ask(self._spaces)
            except ValueError as error:  # a list of other values
                self._refuse_other_axes(error)
        else:
            return None
        self._trials[trial.number] = trial
        return trial.number, tuple(f"{key}={_word(trial.params[key])}" for key in self._axes)

    def should_prune(self, number: int, step: int, value: float) -> bool:
        """Record a value during a run; True if the run is behind the others."""
        trial = self._trials[number]
        known = self._study.get_trials(deepcopy=False)[number].intermediate_values
        if step not in known:  # a resumed run repeats steps
            trial.report(value, step)
        return trial.should_prune()

    def report_end(self, number: int, value: float | None, *, pruned: bool) -> None:
        """The end of a trial; one without a value has failed."""
        from optuna.trial import TrialState

        if pruned:
            self._study.tell(number, state=TrialState.PRUNED)
        elif value is None:
            self._study.tell(number, state=TrialState.FAIL)
        else:
            self._study.tell(number, value)

    def _refuse_other_axes(self, cause: Exception | None = None) -> NoReturn:
        raise ConfigError(
            f"sweep.dir={self._directory} holds a search of other settings or values: give the same ones, or choose "
            "another directory"
        ) from cause


def _sampler(settings: SweepConfig, seed: int) -> BaseSampler:
    from optuna.samplers import BaseSampler

    make = resolve_function(settings.sampler, SAMPLERS, setting="sweep.sampler")
    try:
        found = make(seed=seed, num_startup_trials=settings.num_startup_trials)
    except Exception as error:
        if settings.sampler in SAMPLERS:
            raise
        raise ConfigError(
            f"sweep.sampler={settings.sampler} must take seed and num_startup_trials, see its code: {describe(error)}"
        ) from error
    if not isinstance(found, BaseSampler):
        raise ConfigError(f"sweep.sampler={settings.sampler} gave {found!r:.60}: return a sampler of Optuna.")
    return found


def _pruner(settings: SweepConfig) -> BasePruner:
    from optuna.pruners import MedianPruner, NopPruner, SuccessiveHalvingPruner

    if settings.pruner == Pruner.median:
        return MedianPruner(n_startup_trials=settings.num_startup_trials)
    return SuccessiveHalvingPruner() if settings.pruner == Pruner.asha else NopPruner()


def _distribution(key: str, axis: Axis) -> BaseDistribution:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if axis.low is None or axis.high is None:
        return CategoricalDistribution(axis.values)
    if axis.log and axis.low <= 0:
        raise ConfigError(
            f"{key} is searched by order of magnitude from {axis.low}: begin above 0, or leave tag(log) out"
        )
    step = None if axis.log else axis.step  # Optuna takes one of both
    if isinstance(axis.low, int):
        return IntDistribution(axis.low, axis.high, log=axis.log, step=int(step or 1))
    return FloatDistribution(axis.low, axis.high, log=axis.log, step=step)


def _word(value: Any) -> str:
    return value if isinstance(value, str) else repr(value)
