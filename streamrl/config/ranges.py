"""Ranges of settings, declared at the field: `clip: float = ranged(0.2, gt=0)`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Range:
    """The values that a setting may take; a bound that is None is open. `why` gives the reason of a bound."""

    gt: float | None = None
    ge: float | None = None
    lt: float | None = None
    le: float | None = None
    why: str = ""

    def __contains__(self, value: float) -> bool:
        above = (self.gt is None or value > self.gt) and (self.ge is None or value >= self.ge)
        return above and (self.lt is None or value < self.lt) and (self.le is None or value <= self.le)

    def __str__(self) -> str:
        low, high = self.ge if self.gt is None else self.gt, self.le if self.lt is None else self.lt
        text = f"at least {low}" if self.gt is None else f"greater than {low}"
        if high is not None:
            text = f"in {'(' if self.ge is None else '['}{low}, {high}{')' if self.le is None else ']'}"
        return f"must be {text}" + (f": {self.why}" if self.why else "")


def ranged(default: T, *, gt: float | None = None, ge: float | None = None, lt: float | None = None,
           le: float | None = None, why: str = "") -> T:
    """A dataclass field whose value must lie in a range; None, where the type allows it, always may."""
    return dataclasses.field(default=default, metadata={"range": Range(gt, ge, lt, le, why)})


def out_of_range(section: Any, prefix: str = "") -> Iterator[str]:
    """A message for every setting below `section` that is outside of its range: key, value, range, reason."""
    for item in dataclasses.fields(section):
        value, name = getattr(section, item.name), f"{prefix}{item.name}"
        if dataclasses.is_dataclass(value):
            yield from out_of_range(value, f"{name}.")
        elif (allowed := item.metadata.get("range")) is not None and value is not None and value not in allowed:
            yield f"{name}={value} {allowed}"
