"""Equality of two expressions: the same number, or the same function of their symbols. Nothing is decided by a float.

    both rational    by rational arithmetic
    else             by their difference, with so many digits as the largest and smallest values in them call for: what
                     is left then is more than a rounding, or nothing
    with symbols     both of it at several points

What would take more digits, or longer whole numbers, than the bounds below is not computed: it is undecided.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import mpmath
import sympy
from sympy.core.function import AppliedUndef
from sympy.functions.combinatorial.factorials import binomial, factorial, factorial2

MAX_BITS = 1 << 17
"""Most bits of a whole number; 9999! has 118,445."""
MAX_DIGITS = 5_000
"""Most digits of an irrational number: 1 - exp(-500) takes 2,000."""
SURE_DIGITS = 60
"""Digits beyond those that the values call for."""
MAX_NODES = 2_000
_SIGNS = ((1, 1, 1), (1, 1, 1), (-1, 1, -1), (1, -1, -1), (-1, -1, 1))
"""Signs of the symbols at the points; every other point lies within 1."""
_PIECEWISE = (sympy.floor, sympy.ceiling, sympy.Max, sympy.Min, sympy.sign)
_NUM_PIECES = 100
"""Points for functions that may be equal at most of them."""
_SAME_NAME = frozenset(
    "sin cos tan cot sec csc asin acos atan acot asec acsc sinh cosh tanh coth sech csch asinh acosh atanh acoth erf "
    "erfc gamma factorial binomial zeta re im conjugate arg sign".split()
)
_GROWING = frozenset("exp sinh cosh tanh coth sech csch erf erfc gamma factorial".split())
"""Functions whose values are as far from 0, or 1, as their arguments say."""
_CONSTANTS = {
    sympy.pi: "pi", sympy.E: "e", sympy.GoldenRatio: "phi", sympy.EulerGamma: "euler", sympy.Catalan: "catalan"
}
_IMAGINARY = (sympy.I, sympy.Symbol("i"))
_DONE_FIRST = (sympy.Sum, sympy.Product, sympy.Integral, sympy.Limit)


class UndecidedError(Exception):
    """The value takes too much to compute, or there is none."""


def same(gold: sympy.Expr, answer: sympy.Expr) -> bool:
    """Whether both are equal for all values of their symbols. Raises UndecidedError: too large, or no number."""
    if gold == answer:
        return True
    gold, answer = _done(gold), _done(answer)
    unknown = sorted({*_unknown(gold), *_unknown(answer)}, key=str)
    pieces = bool(unknown) and (gold.has(*_PIECEWISE) or answer.has(*_PIECEWISE))
    looks = [_look(gold, answer, point) for point in _points(unknown, _NUM_PIECES if pieces else len(_SIGNS))]
    real = [equal for equal, is_real in looks if is_real]
    return all(real) if real else all(equal for equal, _ in looks)


def _done(expression: sympy.Expr) -> sympy.Expr:
    """Sums, products, integrals and limits worked out, if nothing in them is too large."""
    if not expression.has(*_DONE_FIRST):
        return expression
    value = _Value({})
    for node in sympy.preorder_traversal(expression):
        if isinstance(node, sympy.Expr):
            value.rational(node)
    return expression.doit()


def _unknown(expression: sympy.Expr) -> set[Any]:
    return (expression.free_symbols | expression.atoms(AppliedUndef)) - set(_IMAGINARY)


def _points(unknown: list[Any], num_points: int) -> list[Mapping[Any, Fraction]]:
    if not unknown:
        return [{}]
    points = []
    for number in range(num_points):
        sizes = [Fraction(1009 + 388 * index + 67 * number, 701 + 30 * index) for index in range(len(unknown))]
        signs = _SIGNS[number % len(_SIGNS)]
        points.append({name: signs[index % 3] * sizes[index] ** (-1) ** number for index, name in enumerate(unknown)})
    return points


def _look(gold: Any, answer: Any, point: Mapping[Any, Fraction]) -> tuple[bool, bool]:
    """Whether both have one value there, and whether it says anything: roots of negative numbers are not meant."""
    left, right = _Value(point), _Value(point)
    exact = left.rational(gold), right.rational(answer)
    if None not in exact:
        return exact[0] == exact[1], True
    digits, needed = 0, SURE_DIGITS
    while digits < needed:  # each time with what the values of the time before call for
        digits, left.digits, right.digits = needed, 0.0, 0.0
        with mpmath.workdps(2 * digits):
            values = left.number(gold), right.number(answer)
            equal = bool(abs(values[0] - values[1]) < mpmath.mpf(10) ** -digits)
        needed = SURE_DIGITS + 2 * math.ceil(left.digits + right.digits)
        if needed > MAX_DIGITS:
            raise UndecidedError(f"the difference takes {needed} digits")
    is_real = not point or gold.has(*_IMAGINARY) or answer.has(*_IMAGINARY) or not all(map(_is_complex, values))
    return equal, is_real


def _is_complex(value: Any) -> bool:
    return abs(mpmath.im(value)) > abs(value) * mpmath.mpf(10) ** -20


class _Value:
    """Values of the parts of an expression at a point.

    Attributes:
        digits: how many decimal digits its numbers have, and its values lie away from 1, all together.
    """

    def __init__(self, point: Mapping[Any, Fraction]) -> None:
        self.digits, self._num_nodes = 0.0, 0
        self._point = point
        self._rationals: dict[Any, Fraction | None] = {}

    def rational(self, node: Any) -> Fraction | None:
        """The value if rational arithmetic gives it. Raises UndecidedError if it is too long."""
        if node not in self._rationals:
            self._num_nodes += 1
            if self._num_nodes > MAX_NODES:
                raise UndecidedError(f"more than {MAX_NODES} parts")
            found = self._point[node] if node in self._point else self._from_parts(node)
            if found is not None:
                _check_bits(_bits(found))
            self._rationals[node] = found
        return self._rationals[node]

    def _from_parts(self, node: Any) -> Fraction | None:
        if isinstance(node, sympy.Rational):
            return Fraction(int(node.p), int(node.q))
        if isinstance(node, sympy.Float):
            return Fraction(str(node))
        combine = _RATIONAL.get(type(node))
        if combine is None or isinstance(node, AppliedUndef):
            return None
        parts = [self.rational(part) for part in node.args]
        return None if None in parts else combine(*parts)

    def number(self, node: Any) -> Any:
        """The value with the digits that mpmath has now."""
        known = self.rational(node)
        if known is not None:
            self.digits += _bits(known) * math.log10(2)
            return mpmath.mpf(known.numerator) / known.denominator
        if node in _IMAGINARY:
            return mpmath.mpc(0, 1)
        if node in _CONSTANTS:
            return +getattr(mpmath, _CONSTANTS[node])
        value = self._function(node, [self.number(part) for part in node.args])
        if not mpmath.isfinite(value):
            raise UndecidedError(f"{type(node).__name__} has no value there")
        magnitude = _magnitude(value)
        self.digits += abs(magnitude) if magnitude > -mpmath.mp.dps / 2 else 0.0  # below it may be a rounding
        return value

    def _function(self, node: Any, args: list[Any]) -> Any:
        name = type(node).__name__
        if name in _GROWING:
            self._grow(abs(args[0]) * (1 + abs(_magnitude(args[0]))))
        if isinstance(node, sympy.Add):
            return mpmath.fsum(args)
        if isinstance(node, sympy.Mul):
            return mpmath.fprod(args)
        if isinstance(node, sympy.Pow):
            return self._power(*args, self.rational(node.args[1]))
        if name in _SAME_NAME:
            return getattr(mpmath, name)(*args)
        match node:
            case sympy.exp():
                return mpmath.exp(args[0])
            case sympy.log():
                return mpmath.log(args[0]) / (mpmath.log(args[1]) if len(args) == 2 else 1)
            case sympy.Abs():
                return abs(args[0])
            case sympy.UnevaluatedExpr():
                return args[0]
            case sympy.Max() | sympy.Min() if not any(map(mpmath.im, args)):
                return max(args) if isinstance(node, sympy.Max) else min(args)
            case sympy.floor() | sympy.ceiling() if abs(args[0] - mpmath.nint(args[0])) > mpmath.mpf(10) ** -20:
                return mpmath.floor(args[0]) if isinstance(node, sympy.floor) else mpmath.ceil(args[0])
        raise UndecidedError(f"{name} is not computed")

    def _power(self, base: Any, exponent: Any, rational: Fraction | None) -> Any:
        if base == 0:
            if mpmath.re(exponent) > 0:
                return mpmath.mpf(0)
            raise UndecidedError("a power of 0")
        self._grow(abs(exponent) * (abs(mpmath.log(abs(base))) + abs(mpmath.arg(base))))
        if rational is not None and rational.denominator % 2 and mpmath.im(base) == 0 and base < 0:
            return (-1) ** (rational.numerator % 2) * abs(base) ** exponent  # the cube root of -8 is -2
        return mpmath.power(base, exponent)

    def _grow(self, digits: Any) -> None:
        if digits > MAX_DIGITS:
            raise UndecidedError("a value too large or too small")
        self.digits += float(digits)


def _magnitude(value: Any) -> float:
    """The decimal logarithm of the absolute value, roughly; 0 of 0."""
    return 0.0 if value == 0 else float(mpmath.mag(value)) * math.log10(2)


def _bits(value: Fraction) -> int:
    return value.numerator.bit_length() + value.denominator.bit_length() - 1


def _check_bits(num_bits: float) -> None:
    if num_bits > MAX_BITS:
        raise UndecidedError(f"a number of {num_bits:.3g} bits")


def _sum(*parts: Fraction) -> Fraction:
    return sum(parts, Fraction(0))


def _product(*parts: Fraction) -> Fraction:
    _check_bits(sum(map(_bits, parts)) / 3)  # a quotient of factorials gets shorter
    return math.prod(parts, start=Fraction(1))


def _power(base: Fraction, exponent: Fraction) -> Fraction | None:
    if exponent.denominator > 1:
        root = _root(base, exponent.denominator)
        return None if root is None else _power(root, Fraction(exponent.numerator))
    if base == 0 and exponent < 0:
        return None
    longest = max(abs(base.numerator), base.denominator)
    if longest == 1:
        return base ** (exponent.numerator % 2) if base else Fraction(exponent == 0)
    _check_bits(abs(exponent.numerator) * math.log2(longest))
    return base**exponent.numerator


def _root(base: Fraction, degree: int) -> Fraction | None:
    """The rational root, negative of negative numbers; None if it is irrational."""
    if base < 0 and degree % 2 == 0:
        return None
    found = [sympy.integer_nthroot(abs(part), degree) for part in (base.numerator, base.denominator)]
    if not all(exact for _, exact in found):
        return None
    return Fraction(int(found[0][0]) * (-1 if base < 0 else 1), int(found[1][0]))


def _factorial(value: Fraction, step: int = 1) -> Fraction | None:
    if value.denominator > 1 or value < 0:
        return None
    _check_bits(math.lgamma(value.numerator + 1) / math.log(2) / step)
    return Fraction(math.prod(range(value.numerator, 0, -2)) if step == 2 else math.factorial(value.numerator))


def _binomial(top: Fraction, bottom: Fraction) -> Fraction | None:
    if top.denominator > 1 or bottom.denominator > 1 or not 0 <= bottom <= top:
        return None
    _check_bits(min(bottom, top - bottom).numerator * top.numerator.bit_length())
    return Fraction(math.comb(top.numerator, bottom.numerator))


_RATIONAL: dict[type, Any] = {
    sympy.Add: _sum, sympy.Mul: _product, sympy.Pow: _power, factorial: _factorial, binomial: _binomial,
    factorial2: lambda value: _factorial(value, 2), sympy.Abs: abs, sympy.UnevaluatedExpr: lambda value: value,
    sympy.floor: lambda value: Fraction(math.floor(value)), sympy.ceiling: lambda value: Fraction(math.ceil(value)),
    sympy.Max: max, sympy.Min: min,
}
