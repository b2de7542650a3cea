"""Does a program's output match the expected one? From strict to lenient, as the judges of programming contests do."""

from __future__ import annotations

import math

REL_TOL, ABS_TOL = 1e-5, 1e-8  # those of numpy.allclose


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


def _lines(text: str) -> list[list[str]]:
    return [line.split() for line in text.strip().splitlines() if line.strip()]


def _same_numbers(left: list[str], right: list[str]) -> bool:
    """Word by word equal, or close as floats; two integers must be equal."""
    return len(left) == len(right) and all(_close(a, b) for a, b in zip(left, right, strict=True))


def _close(left: str, right: str) -> bool:
    if left == right:
        return True
    try:
        a, b = float(left), float(right)
    except ValueError:
        return False
    both_integers = left.lstrip("+-").isdigit() and right.lstrip("+-").isdigit()
    return a == b if both_integers else math.isclose(a, b, rel_tol=REL_TOL, abs_tol=ABS_TOL)
