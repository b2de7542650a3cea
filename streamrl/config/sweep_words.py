"""The words of a sweep in hydra's grammar of overrides: which settings vary over which values, and which stay fixed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep
from hydra.errors import HydraException

from streamrl.config.aliases import HYDRA_SWEEPS
from streamrl.config.load import CONFIGS, check_overrides, hydra_overrides, plain_message, settings
from streamrl.errors import ConfigError

OWN_SAMPLERS = {"optuna": "tpe", "basic": "grid"}


@dataclass(frozen=True)
class Axis:
    """The values of one setting: those listed in `values`, or every number from `low` to `high`, both included.

    Attributes:
        values: as words of the command line; empty for an interval.
        step: the distance of two values of a range; None for an interval and for a list.
        log: drawn evenly by order of magnitude.
    """

    values: tuple[str, ...] = ()
    low: float | None = None
    high: float | None = None
    step: float | None = None
    log: bool = False

    @property
    def ends(self) -> tuple[str, str]:
        """The first and the last value."""
        return (self.values[0], self.values[-1]) if self.values else (str(self.low), str(self.high))


@dataclass(frozen=True)
class SweepWords:
    """A sweep as typed: `fixed` words that every run gets, and the `axes` that vary, by setting."""

    fixed: tuple[str, ...]
    axes: Mapping[str, Axis] = field(default_factory=dict)

    def grid(self) -> list[tuple[str, ...]]:
        """The words that vary, of every combination. Raises ConfigError: an interval cannot be listed."""
        for key, axis in self.axes.items():
            if not axis.values:
                raise ConfigError(
                    f"{key} varies over an interval, which a grid cannot list: add hydra/sweeper=optuna to search it, "
                    f"or list its values as {key}={axis.low},{axis.high}"
                )
        listed = [[f"{key}={value}" for value in axis.values] for key, axis in self.axes.items()]
        return list(itertools.product(*listed))

    def examples(self) -> Iterator[tuple[str, ...]]:
        """Words that vary: of the combinations whose every setting has its first or its last value."""
        ends = [[f"{key}={value}" for value in axis.ends] for key, axis in self.axes.items()]
        return itertools.product(*ends)


def parse_sweep(words: Sequence[str]) -> SweepWords:
    """Sort the words of `streamrl launch -m` into those that vary and the others.

    Raises ConfigError: a word that names no setting or is not in hydra's grammar.
    """
    words = [_own_word(word) for word in words]
    check_overrides(words)
    GlobalHydra.instance().clear()
    fixed: list[str] = []
    axes: dict[str, Axis] = {}
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())  # lists the files of glob
        for word, plain in zip(words, hydra_overrides(words), strict=True):
            try:
                [override] = parser.parse_overrides([plain])
                if override.is_sweep_override():
                    axes[override.get_key_element().lstrip("+")] = _axis(override)
                    continue
            except HydraException as error:
                raise ConfigError(
                    f"`{word}` cannot be read, quote it and see docs/search.md: {plain_message(error)}"
                ) from error
            fixed.append(word)
    return SweepWords(tuple(fixed), axes)


def _own_word(word: str) -> str:
    """A word of hydra's sweepers and launchers under the name that it has here."""
    key, _, value = word.partition("=")
    if key not in HYDRA_SWEEPS:
        return word
    return f"{HYDRA_SWEEPS[key]}={OWN_SAMPLERS.get(value, value) if key == 'hydra/sweeper' else value}"


def _axis(override: Override) -> Axis:
    sweep = override._value  # `value()` is for overrides that do not vary
    if isinstance(sweep, IntervalSweep):
        low, high, log = sweep.start, sweep.end, "log" in sweep.tags
        if not low < high or (log and low <= 0):
            above = " above 0" if log else ""
            raise HydraException(f"an interval goes from its smaller end{above} to its larger one, not {low} to {high}")
        if _is_int(override.get_key_element().lstrip("+")):  # hydra takes 1 for 1.0 here
            low, high = math.ceil(low), math.floor(high)
        return Axis((), low, high, None, log)
    values = tuple(override.sweep_string_iterator())
    if isinstance(sweep, RangeSweep) and len(values) > 1 and not sweep.shuffle:
        numbers = [type(sweep.start)(value) for value in values]
        return Axis(values, min(numbers), max(numbers), abs(sweep.step), "log" in sweep.tags)
    return Axis(values)


def _is_int(setting: str) -> bool:
    return any(name == setting and kind.partition("|")[0] == "int" for name, kind, _, _ in settings())
