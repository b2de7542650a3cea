"""The words of a sweep in hydra's grammar of overrides: which settings vary over which values, and which stay fixed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep
from hydra.errors import HydraException

from streamrl.config.catalog import kinds
from streamrl.config.composition import directories_of, is_file, loader_of
from streamrl.config.overrides import check_names, quoted
from streamrl.errors import ConfigError


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
    check_names(words)
    fixed: list[str] = []
    axes: dict[str, Axis] = {}
    parser = OverridesParser.create(config_loader=loader_of(directories_of(words)))  # lists the files of glob
    for word in words:
        if is_file(word):
            fixed.append(word)
            continue
        try:
            [override] = parser.parse_overrides([quoted(word)])
            if override.is_sweep_override():
                axes[override.get_key_element().lstrip("+")] = _axis(override)
                continue
        except HydraException as error:
            raise ConfigError(
                f"`{word}` cannot be read, quote it and see docs/search.md: {str(error).partition(chr(10))[0]}"
            ) from error
        fixed.append(word)
    return SweepWords(tuple(fixed), axes)


def _axis(override: Override) -> Axis:
    sweep = override._value  # `value()` is for overrides that do not vary
    if isinstance(sweep, IntervalSweep):
        low, high, log = sweep.start, sweep.end, "log" in sweep.tags
        if not low < high or (log and low <= 0):
            above = " above 0" if log else ""
            raise HydraException(f"an interval goes from its smaller end{above} to its larger one, not {low} to {high}")
        if kinds().get(override.get_key_element().lstrip("+"), "").startswith("int"):  # hydra takes 1 for 1.0 here
            low, high = math.ceil(low), math.floor(high)
        return Axis((), low, high, None, log)
    values = tuple(override.sweep_string_iterator())
    if isinstance(sweep, RangeSweep) and len(values) > 1 and not sweep.shuffle:
        numbers = [type(sweep.start)(value) for value in values]
        return Axis(values, min(numbers), max(numbers), abs(sweep.step), "log" in sweep.tags)
    return Axis(values)
