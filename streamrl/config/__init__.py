"""The settings. Numbers with bounds, for the fields of the schema; msgspec checks them."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

LARGEST = 1e300
"""Beyond it is infinity, which no clock, sum or weight can be; NaN is within no bounds."""
Number = Annotated[float, Meta(gt=-LARGEST, lt=LARGEST)]
Positive = Annotated[float, Meta(gt=0, lt=LARGEST)]
PositiveInt = Annotated[int, Meta(ge=1)]
NonNegative = Annotated[float, Meta(ge=0, lt=LARGEST)]
Cap = Annotated[float, Meta(gt=0)]
"""A bound that infinity turns off."""
Seconds = Annotated[float, Meta(gt=0, le=2e6)]
"""Up to 23 days, the longest time that poll takes."""
SecondsOrZero = Annotated[float, Meta(ge=0, le=2e6)]
Count = Annotated[int, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]
