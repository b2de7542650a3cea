"""From strict to lenient, and no further."""

import pytest

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
