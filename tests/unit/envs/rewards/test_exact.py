"""Values are equal or they are not, however near to each other; what takes too much to compute is undecided."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.rewards.mathematics.equality import grade

pytest.importorskip("math_verify")
sympy = pytest.importorskip("sympy")
exact = pytest.importorskip("envs.rewards.mathematics.exact")

LEAVES = st.integers(-9, 99).map(lambda n: (f"({n})", Fraction(n))) | st.tuples(
    st.integers(1, 99), st.integers(1, 99)
).map(lambda pair: (rf"\frac{{{pair[0]}}}{{{pair[1]}}}", Fraction(*pair)))
JOINED = {
    "sum": lambda a, b: (f"({a[0]} + {b[0]})", a[1] + b[1]),
    "difference": lambda a, b: (f"({a[0]} - {b[0]})", a[1] - b[1]),
    "product": lambda a, b: (rf"{a[0]} \cdot {b[0]}", a[1] * b[1]),
    "quotient": lambda a, b: (rf"\frac{{{a[0]}}}{{{b[0]}}}", a[1] / b[1]) if b[1] else a,
}
TREES = st.recursive(
    LEAVES, lambda inner: st.builds(lambda how, a, b: JOINED[how](a, b), st.sampled_from(sorted(JOINED)), inner, inner),
    max_leaves=5,
)  # fmt: skip


def latex(value: Fraction) -> str:
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


@given(TREES, st.integers(1, 80))
@settings(max_examples=30, deadline=None)
def test_rational_expressions_are_exact(tree: tuple[str, Fraction], places: int) -> None:
    text, value = tree
    assert grade(latex(value), text), (text, value)
    assert not grade(latex(value + Fraction(1, 10**places)), text)


@given(st.integers(2, 9), st.integers(50, 2000), st.integers(-2, 2), st.integers(-2, 2))
@settings(max_examples=25, deadline=None)
def test_whole_numbers_near_each_other(base: int, power: int, first: int, second: int) -> None:
    gold, answer = (rf"{base}^{{{power}}} + ({add})" for add in (first, second))
    assert grade(gold, answer) is (first == second)
    assert grade(gold, rf"{base}^{{{power - 1}}} \cdot {base} + {second + 9} - 9") is (first == second)


@given(st.integers(2, 30), st.integers(2, 30), st.integers(20, 300))
@settings(max_examples=15, deadline=None)
def test_roots_are_equal_or_differ_by_a_power_of_ten(a: int, b: int, places: int) -> None:
    gold, same = rf"(\sqrt{{{a}}} + \sqrt{{{b}}})^2", rf"{a + b} + 2\sqrt{{{a * b}}}"
    assert grade(gold, same)
    assert not grade(gold, rf"{same} + 10^{{-{places}}}")


@given(st.integers(30, 100_000))
@settings(max_examples=12, deadline=None)
def test_what_is_small_is_not_zero(power: int) -> None:
    for gold, answer in (("0", rf"e^{{-{power}}}"), ("1", rf"1 - e^{{-{power}}}"), ("1", rf"1 - 2^{{-{power}}}")):
        assert not grade(gold, answer) and not grade(answer, gold)


def unevaluated(text: str) -> object:
    return sympy.sympify(text, {"f": sympy.Function("f")}, evaluate=False)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("text", [
    "9**9**9", "9**9**9**9", "factorial(10**9)", "binomial(10**12, 10**11)", "sqrt(9**9**9)", "exp(10**30)",
    "exp(exp(exp(10)))", "2**100000 * 3**100000 * 5**100000", "gamma(pi * 10**20)", "tanh(9**9)", "pi**(10**8)",
    "Sum(9**9**9, (k, 1, 3))", "1/0", "pi - 9**9**9",
])  # fmt: skip
def test_what_takes_too_much_is_undecided(text: str) -> None:
    with pytest.raises(exact.UndecidedError):
        exact.same(sympy.Integer(1), unevaluated(text))


@pytest.mark.parametrize(
    ("gold", "answer", "equal"),
    [
        ("x**2 - 1", "(x - 1)*(x + 1)", True),
        ("sqrt(x**2)", "x", False),
        ("sqrt(x**3)", "x*sqrt(x)", True),  # where both are real
        ("sqrt(-x**2 - 1)", "2*sqrt(-x**2 - 1)", False),
        ("asin(x)", "pi/2 - acos(x)", True),
        ("f(x) + 1", "1 + f(x)", True),
        ("f(2)", "f(3)", False),
        ("floor(x)", "floor(x + 1/10)", False),
        ("floor(x + 1)", "floor(x) + 1", True),
        ("Max(x, 3)", "x", False),
        ("1", "cos(10**(-40))", False),
        ("1", "cos(1 - cos(10**(-40)))", False),
        ("1", "cos(1 - cos(1 - cos(10**(-40))))", False),
        ("0", "sqrt(2)*sqrt(2) - 2", True),
        ("1", "cos(sqrt(2)*sqrt(2) - 2)", True),
        ("0", "sin(pi)", True),
        ("pi", "pi + exp(-300)", False),
        ("x**y", "y**x", False),
        ("factorial(n)", "n*factorial(n - 1)", True),
    ],
)
def test_functions_are_compared_at_several_points(gold: str, answer: str, equal: bool) -> None:
    assert exact.same(unevaluated(gold), unevaluated(answer)) is equal
