"""Are two mathematical answers the same? math-verify where it is installed, a plain comparer beside it."""

from __future__ import annotations

import contextlib
import math
import re
from fractions import Fraction
from typing import Any

HALF = 0.5
"""What an answer earns that math-verify cannot read but that is written as the right one is."""
_FRACTION = re.compile(r"\\[dt]?frac\{([^{}]+)\}\{([^{}]+)\}")
_DROPPED = re.compile(r"\\left|\\right|\\!|\\,|\\;|\\ |\\\$|\$|\\%|%|\\text\{[^{}]*\}|\^\\circ|\^\{\\circ\}|\s")


def grade(gold: str, answer: str) -> float:
    """1 if `answer` is the same as `gold`, HALF if only their texts are and `answer` cannot be parsed, else 0.

    math-verify reads both; where it reads neither right, texts are compared without spaces, braces and commas. If the
    gold answer cannot be parsed, equal texts are the whole reward.
    """
    parsed_gold, parsed_answer = _parse(gold), _parse(answer)
    if parsed_gold and parsed_answer and _verify(parsed_gold, parsed_answer):
        return 1.0
    if _bare(gold) == _bare(answer):
        return HALF if parsed_gold and not parsed_answer else 1.0
    unread = not parsed_gold or not parsed_answer
    return float(unread and plain_equal(gold, answer))


def plain_equal(gold: str, answer: str) -> bool:
    """The same without math-verify: equal texts, equal numbers, or lists of these.

    The order counts inside of ( ) and [ ], a point or an interval, and not in a bare list or a set.
    """
    left, right = _split(gold), _split(answer)
    if len(left) != len(right):
        return False
    if _plain(gold)[:1] in ("(", "["):
        return all(map(_same, left, right))
    for item in left:
        match = next((other for other in right if _same(item, other)), None)
        if match is None:
            return False
        right.remove(match)
    return True


def _same(left: str, right: str) -> bool:
    if left == right:
        return True
    numbers = _number(left), _number(right)
    return None not in numbers and math.isclose(numbers[0] or 0.0, numbers[1] or 0.0, rel_tol=1e-8)


def _number(text: str) -> float | None:
    try:
        return float(Fraction(text))
    except (ValueError, ZeroDivisionError, OverflowError):
        return None


def _split(text: str) -> list[str]:
    """Items of a list; a comma before three digits belongs to the number."""
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", _plain(text))
    return [item for item in text.strip("()[]{}").split(",") if item]


def _plain(text: str) -> str:
    text = _FRACTION.sub(r"\1/\2", text)
    text = _DROPPED.sub("", text).rstrip(".")
    return text[text.index("=") + 1 :] if re.match(r"[a-zA-Z]=", text) else text


def _bare(text: str) -> str:
    return re.sub(r"[\s{},]", "", text)


def _parse(text: str) -> list[Any]:
    """What math-verify reads in this text; empty if it cannot, or is not installed."""
    try:
        from math_verify import LatexExtractionConfig, parse
    except ImportError:
        return []
    boxed = text if "\\boxed{" in text else f"\\boxed{{{text}}}"
    with contextlib.suppress(Exception):  # a parser of arbitrary text: whatever it raises, the text is not readable
        return parse(boxed, extraction_config=[LatexExtractionConfig()], parsing_timeout=None)
    return []


def _verify(gold: list[Any], answer: list[Any]) -> bool:
    from math_verify import verify

    with contextlib.suppress(Exception):
        return bool(verify(gold, answer, timeout_seconds=None))
    return False
