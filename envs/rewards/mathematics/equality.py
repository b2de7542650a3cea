"""Are two mathematical answers the same? Texts are taken apart here, and math-verify judges expressions.

Everything is a function of two texts: nothing keeps state, and nothing limits time (`math_worker` does).
"""

from __future__ import annotations

import contextlib
import re
from fractions import Fraction
from typing import Any

from envs.rewards.mathematics.text import bare, choice, clean, number, parts, without_choice, words
from envs.rewards.mathematics.units import PERCENT, quantity

_NAME = r"(?:\\?[a-zA-Z]+|\\text\{[^{}]*\})(?:_\w|_\{\w+\})?'?(?:\([a-z](?:, ?[a-z])*\))?|\([a-z](?:, ?[a-z])+\)"
_ASSIGNMENT = re.compile(rf"({_NAME})\s*(?:=|\\in(?![a-zA-Z]))\s*(.+)")
_RELATION = re.compile(r"\\le(?![a-zA-Z])|\\ge(?![a-zA-Z])|[<>]")
_EQUALS = re.compile(r"(?<![<>!\\])=")
_MISREAD = re.compile(r"(?<!_)\d\s+\d|\d_|:.*:|\\pmod|\\cdots|\\ldots|\.\.\.")
"""Notation that math-verify's parser takes for something else: 1 2 for a sum, 11_2 for 11, 1:2:3 for one number."""
_FACTORS = re.compile(r"(?<![\w^.\\])(\d+(?:\.\d+)?)\s*(?=[({])|(?<=\))\s*(?=\()")
"""2(4) and (2)(4) are products, and its sums."""
_RANGE = re.compile(r"(\d+)\s*-+\s*(\d+)")
_TOLERANCE = 1e-9
_UNORDERED = {",", "{}", "cup"}


def grade(gold: str, answer: str) -> bool:
    """Whether `answer` is the same as `gold`.

    Numbers are compared exactly, lists item by item, and expressions by math-verify. Texts are compared where one of
    them cannot be read.
    """
    gold, answer = clean(gold), clean(answer)
    return bool(gold) and _same(gold, answer)


def _same(gold: str, answer: str) -> bool:
    if bare(gold) == bare(answer):
        return True
    if None not in (letters := (choice(gold), choice(answer))):
        return letters[0] == letters[1]
    answer = without_choice(answer)
    if (texts := (words(gold), words(answer))) != (None, None):
        return texts[0] == texts[1]
    if (intervals := _intervals(gold, answer)) is not None:
        return intervals
    named, given = _assignment(gold), _assignment(answer)
    if named or given:
        return _same_equations(gold, answer, named, given)
    (kind, golds), (given_kind, givens) = parts(gold), parts(answer)
    if (kind, given_kind) == (",", ",") and len(givens) == 1 < len(golds):
        givens = answer.split(",")  # 100,200 may be two numbers, if two are asked for
    if len(golds) != len(givens) or not _alike(kind, given_kind):
        return False
    if (kind, given_kind) == (",", ",") and len(golds) == 1:
        return _same_equations(golds[0], givens[0], None, None)
    if {kind, given_kind} <= _UNORDERED:
        return _same_sets(golds, givens)
    return _names_differ(golds) and _names_differ(givens) and all(map(_same, golds, givens))


def _names_differ(items: list[str]) -> bool:
    """Whether this may be a point: x=1, x=2 are two values of one name."""
    names = [found[0] for item in items if (found := _assignment(item))]
    return len(set(names)) == len(names)


def _alike(kind: str, given: str) -> bool:
    """Brackets must agree; a bare list may stand for a set, and for a point in the order of its items."""
    return kind == given or {kind, given} in ({",", "{}"}, {",", "()"})


def _same_sets(golds: list[str], givens: list[str]) -> bool:
    left = list(givens)
    for gold in golds:
        match = next((given for given in left if _same(gold, given)), None)
        if match is None:
            return False
        left.remove(match)
    return True


def _intervals(gold: str, answer: str) -> bool | None:
    """Compare inequalities in one variable as intervals, also with a written interval; None if there are none."""
    found = _interval(gold), _interval(answer)
    if found == (None, None):
        return None
    if None not in found:
        return found[0][0] == found[1][0] and _same(found[0][1], found[1][1])
    other, text = (gold, found[1][1]) if found[0] is None else (answer, found[0][1])
    return parts(other)[0] in ("()", "(]", "[)", "[]") and _same(other, text)


def _interval(text: str) -> tuple[str, str] | None:
    """x > 5 as ("x", "(5, \\infty)"), and -1 < x \\le 3 as ("x", "(-1, 3]")."""
    signs, sides = _RELATION.findall(text), [side.strip() for side in _RELATION.split(text)]
    if not signs or not all(sides) or len({sign in ("<", r"\le") for sign in signs}) != 1:
        return None
    if signs[0] in (">", r"\ge"):
        signs, sides = ["<" if sign == ">" else r"\le" for sign in reversed(signs)], sides[::-1]
    if len(sides) == 2:
        is_name = [re.fullmatch(r"\\?[a-zA-Z]+", side) is not None for side in sides]
        if is_name == [True, False]:
            signs, sides = ["<", *signs], [r"-\infty", *sides]
        elif is_name == [False, True]:
            signs, sides = [*signs, "<"], [*sides, r"\infty"]
    if len(sides) != 3 or not re.fullmatch(r"\\?[a-zA-Z]+", sides[1]):
        return None
    return sides[1], f"{'([' [signs[0] != '<']}{sides[0]}, {sides[2]}{')]' [signs[1] != '<']}"


def _assignment(text: str) -> tuple[str, str] | None:
    """The name and the value of x = 5, x = 2 + 3 = 5 or x \\in [0, 1]; None for another equation, and for a list."""
    found = _ASSIGNMENT.fullmatch(text)
    return (bare(found[1]), found[2]) if found and parts(text)[1] == [text] else None


def _same_equations(gold: str, answer: str, named: tuple[str, str] | None, given: tuple[str, str] | None) -> bool:
    """x = 5 is 5, and y = 2x + 1 is 2x + 1; an equation that names no value is only another equation."""
    if named and given and named[0] == given[0]:
        return _same(_last_side(named[1]), given[1])
    if named and not _EQUALS.search(answer):
        return _same(_last_side(named[1]), answer)
    if given and not _EQUALS.search(gold):
        return _same(gold, given[1])
    sides = _EQUALS.split(answer)
    if len(sides) > 1 and not _EQUALS.search(gold):
        return all(_same(gold, side.strip()) for side in sides)
    return _same_quantities(gold, answer)


def _last_side(text: str) -> str:
    return _EQUALS.split(text)[-1].strip()


def _same_quantities(gold: str, answer: str) -> bool:
    """A unit that only one of them has is left out, and two that differ are wrong; a percent sign is one hundredth."""
    (gold, unit), (answer, given) = quantity(gold), quantity(answer)
    percent, given_percent = unit == PERCENT, given == PERCENT
    if percent != given_percent:
        left, right = number(gold), number(answer)
        if left is None or right is None or (unit and given):
            return False
        if percent:  # the question asks for percent: 50% may be given as 50 or as 0.5
            return right in (left, left / 100)
        return left == right / 100 or (left == right and left > 1)
    return not (unit and given and unit != given) and _same_values(gold, answer)


def _same_values(gold: str, answer: str) -> bool:
    numbers = number(gold), number(answer)
    if None not in numbers:
        return numbers[0] == numbers[1]
    parsed_gold, parsed_answer = _parse(gold), _parse(answer)
    if parsed_gold is None or parsed_answer is None:
        return bare(gold) == bare(answer)
    return _verify(parsed_gold, parsed_answer)


def _parse(text: str) -> Any:
    """Parse with math-verify, with exact numbers; None if it cannot, or is not installed."""
    ends = _RANGE.fullmatch(text)
    if _MISREAD.search(text) or (ends and int(ends[1]) < int(ends[2])):  # 3-5 is no difference
        return None
    try:
        from latex2sympy2_extended.latex2sympy2 import ConversionConfig, NormalizationConfig, latex2sympy
        from sympy import Derivative, Float, I, Rational, Symbol
    except ImportError:
        return None
    rules = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=False, boxed="none")
    with contextlib.suppress(Exception):  # a parser of arbitrary text: whatever it raises, the text is not readable
        found = latex2sympy(
            _FACTORS.sub(r"\1 \\cdot ", text), is_real=None,
            normalization_config=rules, conversion_config=ConversionConfig(lowercase_symbols=False)
        )
        if found.has(Derivative):
            return None  # dy/dx is no derivative to be taken, which would be zero
        exact = {value: Rational(str(value)) for value in found.atoms(Float)}
        return found.subs(exact | {Symbol("i"): I}) if exact or Symbol("i") in found.free_symbols else found
    return None


def _verify(gold: Any, answer: Any) -> bool:
    from math_verify import verify

    with contextlib.suppress(Exception):
        return bool(verify([gold], [answer], timeout_seconds=None)) and not _far_apart(gold, answer)
    return False


def _far_apart(gold: Any, answer: Any) -> bool:
    """Whether values differ at some point: math-verify takes all that is nearer to zero than 1e-15 for equal."""
    from sympy import Expr

    if not isinstance(gold, Expr) or not isinstance(answer, Expr):
        return False
    names = sorted(gold.free_symbols | answer.free_symbols, key=str)
    point = {name: Fraction(7 + 4 * index, 3) for index, name in enumerate(names)}
    with contextlib.suppress(Exception):  # no number comes out: math-verify decides
        left, right = (complex(value.subs(point).evalf(30)) for value in (gold, answer))
        return abs(left - right) > _TOLERANCE * max(abs(left), abs(right))
    return False
