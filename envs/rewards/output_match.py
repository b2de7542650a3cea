"""Does what a program printed, or a function of it returned, match what is expected? From strict to lenient.

Numbers are compared as they are written, never as floats: two whole numbers are equal or they are not, however large.
Numbers with a decimal point or an exponent may differ as printed floats do, at every depth of a list or an object.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal
from typing import Any

REL_TOL, ABS_TOL = Decimal("1e-5"), Decimal("1e-8")
"""The tolerances of numpy.allclose, for two numbers of which neither is written as an integer."""
WHOLE_TOL = Decimal("1e-4")
"""At most so far may a decimal be from an integer: 3.0000004 is 3, and 1000000.4 is not 1000000."""
_INTEGER = re.compile(r"([+-]?)0*(\d+)", re.ASCII)
_DECIMAL = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,15})?", re.ASCII)
_INFINITE = re.compile(r"([+-]?)inf(?:inity)?", re.IGNORECASE)
_ROUNDED = Context(prec=40, Emax=MAX_EMAX, Emin=MIN_EMIN, traps=[])
"""For differences: numbers may have a million digits, and any exponent."""


@dataclass(frozen=True, slots=True)
class _Written:
    """A number of JSON as it is written, NaN and Infinity included."""

    text: str


def matches(output: str, expected: str, *, any_order: bool = False) -> bool:
    """Equal, from strict to lenient: whole texts, lines, words of lines, numbers of lines.

    Args:
        any_order: also accept the words of each line in another order; wrong for tasks where the order is the answer.
    """
    if output.strip() == expected.strip():
        return True
    left, right = _lines(output), _lines(expected)
    if len(left) != len(right):
        return False
    if left == right or all(_same_numbers(a, b) for a, b in zip(left, right, strict=True)):
        return True
    return any_order and all(sorted(a) == sorted(b) for a, b in zip(left, right, strict=True))


def same_value(returned: str, expected: str) -> bool:
    """Whether a returned value, as JSON, is the expected one, or the only item of an expected list.

    Types count: 1 is neither true nor "1"; but 3.0 is 3. An expected text that is no JSON is a text.
    """
    value, right = _read(returned), _read(expected)
    return _same(value, right) or (isinstance(right, list) and len(right) == 1 and _same(value, right[0]))


def close(left: str, right: str) -> bool:
    """Whether two words are equal, or numbers that are equal as far as printed floats show them."""
    if left == right:
        return True
    whole = [_INTEGER.fullmatch(word) for word in (left, right)]
    if whole[0] and whole[1]:
        return whole[0][2] == whole[1][2] and (whole[0][2] == "0" or _is_below(left) == _is_below(right))
    if not (_DECIMAL.fullmatch(left) and _DECIMAL.fullmatch(right)):
        endless = [_INFINITE.fullmatch(word) for word in (left, right)]
        return all(endless) and _is_below(left) == _is_below(right)
    a, b = Decimal(left), Decimal(right)
    if a == b:
        return True
    size = _ROUNDED.max(_ROUNDED.abs(a), _ROUNDED.abs(b))
    most = _ROUNDED.max(_ROUNDED.multiply(REL_TOL, size), ABS_TOL)
    if any(whole):
        most = _ROUNDED.min(most, WHOLE_TOL)
    return _ROUNDED.abs(_ROUNDED.subtract(a, b)) <= most


def _lines(text: str) -> list[list[str]]:
    return [line.split() for line in text.strip().splitlines() if line.strip()]


def _same_numbers(left: list[str], right: list[str]) -> bool:
    return len(left) == len(right) and all(close(a, b) for a, b in zip(left, right, strict=True))


def _is_below(number: str) -> bool:
    return number.startswith("-")


def _read(text: str) -> Any:
    """The JSON value of a text with its numbers as they are written; the text itself if it is none."""
    try:
        return json.loads(text, parse_int=_Written, parse_float=_Written, parse_constant=_Written)
    except (ValueError, RecursionError):
        return text


def _same(value: Any, expected: Any) -> bool:
    pairs = [(value, expected)]  # not recursive: a program may return a list of any depth
    while pairs:
        left, right = pairs.pop()
        if type(left) is not type(right):
            return False
        if isinstance(left, list):
            if len(left) != len(right):
                return False
            pairs += zip(left, right, strict=True)
        elif isinstance(left, dict):
            if left.keys() != right.keys():
                return False
            pairs += ((left[key], right[key]) for key in left)
        elif not close(left.text, right.text) if isinstance(left, _Written) else left != right:
            return False
    return True
