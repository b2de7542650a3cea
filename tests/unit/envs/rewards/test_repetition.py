"""Only real repetition is called so."""

import pytest

from envs.rewards.forms import repeats_itself

SENTENCE = "this sentence has a good deal more than eight words in it"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", False),
        ("no no no no no no", False),
        ("a b c d e f g h " * 6, True),
        ("a b c d e f g h " * 5, False),
        (". ".join([SENTENCE] * 4), True),
        (". ".join([SENTENCE] * 3), False),
        (" ".join(map(str, range(1000))), False),
    ],
)
def test_repetition(text: str, found: bool) -> None:
    assert repeats_itself(text) is found
