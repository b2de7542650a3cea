"""From strict to lenient, and no further."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.rewards.output_match import matches


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
