"""From strict to lenient, and no further."""

import json
import random
from collections import Counter
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.rewards.output_match import close, matches, same_value


@pytest.mark.parametrize(
    ("output", "expected", "same"),
    [
        ("1 2\n3\n", "1 2\n3", True),
        (" 1  2 \n\n3", "1 2\n3", True),
        ("1.0000001 x", "1.0 x", True),
        ("1.1", "1.0", False),
        ("1000001", "1000000", False),  # integers are equal or not, however large
        ("1 2", "2 1", False),
        ("1\n2", "1 2", False),
        ("", "1", False),
        ("nan", "1", False),
        ("nan", "nan", True),
        ("9007199254740993", "9007199254740992", False),
        ("9007199254740993", "9007199254740993.0", True),
        ("9007199254740993", "9007199254740992.0", False),
        ("12345678901234567890", "1.2345678901234567e19", False),  # a float where integer arithmetic was the task
        ("1" + "0" * 400, "1" + "0" * 399 + "1", False),
        ("1" + "0" * 400, "1e400", True),
        ("1e400", "1e401", False),
        ("1e400", "inf", False),
        ("-inf", "inf", False),
        ("Infinity", "inf", True),
        ("1e-400", "-1e-400", True),  # as near to 0 as printed floats show
        ("1e999999999999999", "1", False),
        ("-7", "7", False),
        ("-0", "0", True),
        ("007", "7", True),
        ("1_0", "10", False),
        ("３", "3", False),  # noqa: RUF001  (a digit of another script)
        ("3.0000004", "3", True),
        ("1000000.4", "1000000", False),
        ("0x10", "16", False),
        ("YES", "yes", False),
    ],
)
def test_outputs(output: str, expected: str, same: bool) -> None:
    assert matches(output, expected) is same


def test_another_order_of_words_only_where_it_is_asked_for() -> None:
    assert matches("2 1\n3", "1 2\n3", any_order=True)
    assert not matches("2 1\n4", "1 2\n3", any_order=True)


WORDS = st.lists(st.sampled_from(["1", "2", "a", "bc"]), min_size=1, max_size=5)


@given(WORDS, WORDS)
def test_in_any_order_a_line_has_the_same_words_equally_often(output: list[str], expected: list[str]) -> None:
    same = Counter(output) == Counter(expected)
    assert matches(" ".join(output), " ".join(expected), any_order=True) is same


HUGE = st.integers(-(10**40), 10**40) | st.integers(0, 9).map(lambda last: 10**5000 + last)


def digits(value: int) -> str:
    """Like `str`, without Python's limit on the number of digits."""
    return f"{Decimal(value):f}"


@given(HUGE, st.integers(-3, 3))
def test_integers_near_each_other_are_the_same_only_if_they_are(value: int, apart: int) -> None:
    first, second = digits(value), digits(value + apart)
    assert matches(first, second) is (apart == 0)
    assert same_value(f"[[{first}], 1]", f"[[{second}], 1]") is (apart == 0)


@given(st.fractions(), st.fractions())
def test_decimals_differ_by_the_tolerance_and_no_more(left: Fraction, right: Fraction) -> None:
    written = [f"{float(value)!r}" for value in (left, right)]
    a, b = (Fraction(text) for text in written)
    most = max(Fraction("1e-5") * max(abs(a), abs(b)), Fraction("1e-8"))
    assert close(*written) is (abs(a - b) <= most)


@pytest.mark.parametrize(
    ("returned", "expected", "same"),
    [
        ("0.30000000000000004", "0.3", True),
        ("[0.30000000000000004, [1]]", "[0.3, [1]]", True),
        ('{"a": [0.30000000000000004]}', '{"a": [0.3]}', True),
        ('{"a": 1, "b": 2}', '{"b": 2, "a": 1}', True),
        ("[0.31]", "[0.3]", False),
        ("3.0", "3", True),
        ("3", "[3]", True),
        ("[3]", "3", False),
        ("[[3]]", "[3]", False),
        ("1", "true", False),
        ("true", "1", False),
        ("[true]", "[1]", False),
        ("0", "false", False),
        ("0", "null", False),
        ('"1"', "1", False),
        ('"ab"', "ab", True),
        ('"0.30000000000000004"', '"0.3"', False),
        ("NaN", "NaN", True),
        ('"NaN"', "NaN", False),
        ("Infinity", "1e400", False),
        ("[]", "{}", False),
        ("[1, 2]", "[1]", False),
        ('{"a": 1}', '{"b": 1}', False),
        ("[" * 100_000, "[]", False),
    ],
)
def test_returned_values(returned: str, expected: str, same: bool) -> None:
    assert same_value(returned, expected) is same


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3), max_leaves=6,
)  # fmt: skip
OTHERS = [None, True, False, 0, 1, "1", [], {}, [1], 10**20, 10**20 + 1]


@given(VALUES, st.sampled_from(OTHERS), st.sampled_from(OTHERS), st.randoms(use_true_random=False))
def test_containers_are_the_same_if_all_that_they_hold_is(value: object, one: object, two: object, rng: random.Random):
    shapes = [lambda x: [value, x], lambda x: {"k": x, "v": value}, lambda x: [[[x]], value]]
    shape = rng.choice(shapes)
    first, second = json.dumps(shape(one)), json.dumps(shape(two))
    assert same_value(first, second) is (first == second)
