"""Comparisons without math-verify's parser, and those that need it. The tables are in `test_math_pairs`."""

import sys

import pytest

from envs.rewards.mathematics.equality import grade

SAME = [
    ("1/2", "0.5"), (r"\frac{1}{2}", "0.5"), ("1,000", "1000"), ("x=3", "3"), ("{1,2,3}", "3,2,1"),
    (r"\left(1,2\right)", "(1, 2)"), ("0.1", "1/10"), (r"\$5", "5"), ("3.0", "3"), ("}7{", "}7{"),
]  # fmt: skip
DIFFERENT = [
    ("3", "4"), ("(1,2)", "(2,1)"), ("hello", "3"), ("3", "hello"), ("1,2", "1,2,3"), ("1/3", "0.3333"), ("", "0"),
    ("", ""), ("7", "}7{"), ("}7{", "7"),
]  # fmt: skip


@pytest.fixture(params=["with math-verify", "without"])
def library(request, monkeypatch) -> None:
    if request.param == "without":
        monkeypatch.setitem(sys.modules, "latex2sympy2_extended", None)
        monkeypatch.setitem(sys.modules, "latex2sympy2_extended.latex2sympy2", None)


@pytest.mark.parametrize(("gold", "answer"), SAME)
def test_what_is_the_same_is_the_same_with_and_without_the_library(library: None, gold: str, answer: str) -> None:
    assert grade(gold, answer)


@pytest.mark.parametrize(("gold", "answer"), DIFFERENT)
def test_what_differs_differs_with_and_without_the_library(library: None, gold: str, answer: str) -> None:
    assert not grade(gold, answer)


def test_only_the_library_sees_equal_expressions(monkeypatch) -> None:
    pytest.importorskip("math_verify")
    assert grade(r"\sqrt{8}", r"2\sqrt{2}")
    assert grade("x^2 - 1", "(x-1)(x+1)")
    monkeypatch.setitem(sys.modules, "latex2sympy2_extended.latex2sympy2", None)
    assert not grade(r"\sqrt{8}", r"2\sqrt{2}")
    assert grade("x^2 - 1", "x^2-1")  # nothing reads it: the texts are equal
