"""The ladder from math-verify down to equal texts, and the comparer that needs no library."""

import pytest

from envs.rewards.math_equality import HALF, grade, plain_equal

SAME = [
    ("1/2", "0.5"), (r"\frac{1}{2}", "0.5"), ("1,000", "1000"), ("x=3", "3"), ("{1,2,3}", "3,2,1"),
    (r"\left(1,2\right)", "(1, 2)"), ("0.1", "1/10"), (r"\$5", "5"), ("3.0", "3"),
]  # fmt: skip
DIFFERENT = [
    ("3", "4"), ("(1,2)", "(2,1)"), ("hello", "3"), ("3", "hello"), ("1,2", "1,2,3"), ("1/3", "0.3333"), ("", "0"),
]  # fmt: skip


@pytest.mark.parametrize(("gold", "answer"), SAME)
def test_what_is_the_same_is_the_same_with_and_without_the_library(gold: str, answer: str) -> None:
    assert grade(gold, answer) == 1.0
    assert plain_equal(gold, answer)


@pytest.mark.parametrize(("gold", "answer"), DIFFERENT)
def test_what_differs_differs_with_and_without_the_library(gold: str, answer: str) -> None:
    assert grade(gold, answer) == 0.0
    assert not plain_equal(gold, answer)


def test_only_the_library_sees_equal_expressions() -> None:
    pytest.importorskip("math_verify")
    assert grade(r"\sqrt{8}", r"2\sqrt{2}") == 1.0
    assert grade("x^2 - 1", "(x-1)(x+1)") == 1.0
    assert not plain_equal(r"\sqrt{8}", r"2\sqrt{2}")


def test_an_answer_that_cannot_be_read_but_is_written_alike_earns_half() -> None:
    pytest.importorskip("math_verify")
    assert grade("7", "}7{") == HALF
    assert grade("}7{", "7") == 1.0  # the gold answer cannot be read: equal texts are all there is
