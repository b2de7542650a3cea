"""Experiment trackers by name: an entry in `TRACKERS` adds one, `tracking.trackers` chooses.

A factory takes a `TrackedRun` and returns a `Sink`. A library is imported inside its factory only, so that a tracker
that is not chosen need not be installed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from importlib.util import find_spec

from streamrl.errors import ConfigError, describe, in_one_line, install_extra
from streamrl.extension import resolve_function
from streamrl.metrics.sinks import Sink, TrackedRun
from streamrl.metrics.trackers.mlflow import open_mlflow
from streamrl.metrics.trackers.tensorboard import TensorBoardSink
from streamrl.metrics.trackers.trackio import open_trackio
from streamrl.metrics.trackers.wandb import open_wandb

log = logging.getLogger("streamrl.learner")
TrackerFactory = Callable[[TrackedRun], Sink]

TRACKERS: dict[str, TrackerFactory] = {
    "tensorboard": TensorBoardSink, "mlflow": open_mlflow, "trackio": open_trackio, "wandb": open_wandb,
}


def check_trackers(names: Iterable[str]) -> None:
    """Raise ConfigError for the first tracker that is unknown, or whose package of the same name is missing."""
    for name in names:
        resolve_function(name, TRACKERS, setting="tracking.trackers")
        if name in TRACKERS and find_spec(name) is None:
            raise ConfigError(
                f"tracking.trackers={name}, but the package is not installed; install it with "
                f"{install_extra(_extra(name))}, or leave it out."
            )


def open_trackers(names: Iterable[str], run: TrackedRun) -> list[Sink]:
    """Open each named tracker once.

    Args:
        names: keys of `TRACKERS`, or a user's own factory as `package.module:attribute`.
    Raises:
        ConfigError: an unknown name, or a library that is not installed.
    """
    return [_opened(name, run) for name in dict.fromkeys(names)]


def _extra(name: str) -> str:
    return "mlflow" if name == "mlflow" else "track"  # many packages, which the others do without


def _opened(name: str, run: TrackedRun) -> Sink:
    factory = resolve_function(name, TRACKERS, setting="tracking.trackers")
    if name not in TRACKERS:
        return _opened_own(name, factory, run)
    try:
        return factory(run)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"tracking.trackers={name} needs {error.name}, which is not installed; install it with "
            f"{install_extra(_extra(name))}, or leave it out."
        ) from error
    except Exception as error:  # of its own classes
        told = f"tracking.trackers={name} cannot be opened ({in_one_line(error)})"
        if run.resume_step is None:
            raise ConfigError(f"{told}: see that its server answers and takes you, or leave it out.") from error
        log.warning("%s: the run goes on without it.", told)
        return Sink()


def _opened_own(name: str, factory: TrackerFactory, run: TrackedRun) -> Sink:
    try:
        found = factory(run)
    except Exception as error:
        raise ConfigError(f"tracking.trackers={name} cannot be opened, see its code: {describe(error)}") from error
    if not isinstance(found, Sink):
        raise ConfigError(
            f"tracking.trackers={name} gave {found!r:.60}: return an object of a class derived from "
            f"{Sink.__module__}.Sink"
        )
    return found
