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
from streamrl.config.composition import check_choice, directories_of, group_values, hydra_words_in, is_file, loader_of
from streamrl.config.hydra_words import SPACE, own_words
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

    def listed(self, points: int) -> tuple[str, ...]:
        """The values in order, of an interval so many: evenly spaced, with `log` by order of magnitude."""
        low, high = self.low, self.high
        if low is None or high is None or self.values:
            return self.values
        found: list[float] = []
        for place in range(points):
            share = place / (points - 1)
            if self.log:
                value = low * (high / low) ** share
            else:
                value = low + (high - low) * share
            found.append(value)
        found[-1] = high
        if isinstance(low, int):
            found = [round(one) for one in found]
        return tuple(dict.fromkeys(map(repr, found)))


@dataclass(frozen=True)
class SweepWords:
    """A sweep as typed: `fixed` words that every run gets, and the `axes` that vary, by setting."""

    fixed: tuple[str, ...]
    axes: Mapping[str, Axis] = field(default_factory=dict)

    def grid(self, points: int | None = None) -> list[tuple[str, ...]]:
        """The words that vary, of every combination.

        Args:
            points: values to list of an interval, its ends among them.
        Raises:
            ConfigError: an interval, and no number of `points`.
        """
        for key, axis in self.axes.items():
            if not axis.values and points is None:
                raise ConfigError(
                    f"{key} varies over an interval, which a grid cannot list: add sweep.num_grid_points=5 for so many "
                    f"values of it, or hydra/sweeper=optuna to search it, or list them as {key}={axis.low},{axis.high}"
                )
        listed = [[f"{key}={value}" for value in axis.listed(points or 2)] for key, axis in self.axes.items()]
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
    words = _with_spaces(words)
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


def _with_spaces(words: Sequence[str]) -> list[str]:
    """The words with those that files of the group `search` hold, as hydra.sweeper.params, in place of these files.

    What is also typed is as typed. Raises ConfigError: no such file, or one that holds something else.
    """
    directories, typed = directories_of(words), [word for word in words if not word.startswith(SPACE)]
    for name in (word.removeprefix(SPACE) for word in words if word.startswith(SPACE)):
        check_choice("search", name, directories)
        found = own_words(hydra_words_in(values := group_values("search", name, directories)))
        if values:
            raise ConfigError(f"search={name} holds {', '.join(values)}: write what varies under hydra.sweeper.params")
        keys = {word.partition("=")[0].lstrip("+") for word in typed}
        check_names(found)
        typed += [word for word in found if word.partition("=")[0] not in keys]
    return typed


def _axis(override: Override) -> Axis:
    sweep = override._value  # `value()` is for overrides that do not vary
    if isinstance(sweep, IntervalSweep):
        low, high, log = sweep.start, sweep.end, "log" in sweep.tags
        if not (low < high and math.isfinite(high - low)) or (log and low <= 0):
            above = " above 0" if log else ""
            raise HydraException(f"an interval goes from its smaller end{above} to its larger one, not {low} to {high}")
        if kinds().get(override.get_key_element().lstrip("+"), "").startswith("int"):  # hydra takes 1 for 1.0 here
            low, high = math.ceil(low), math.floor(high)
            if low > high:
                raise HydraException(f"no whole number lies from {sweep.start} to {sweep.end}")
        return Axis((), low, high, None, log)
    values = tuple(override.sweep_string_iterator())
    if not values:
        raise HydraException("this range holds no value")
    if isinstance(sweep, RangeSweep) and len(values) > 1 and not sweep.shuffle:
        whole = all(value.lstrip("-").isdigit() for value in values)  # range(0,1,0.1) begins with 0.0
        numbers = [int(value) if whole else float(value) for value in values]
        return Axis(values, min(numbers), max(numbers), abs(sweep.step), "log" in sweep.tags)
    return Axis(values)
