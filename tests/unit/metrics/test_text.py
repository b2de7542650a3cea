"""Numbers as people read them."""

import pytest

from streamrl.metrics.text import compact, duration, markdown_table, sparkline


@pytest.mark.parametrize(
    ("value", "shown"),
    [(None, "-"), (float("nan"), "-"), (0, "0"), (1.0, "1"), (0.43128, "0.431"), (-0.5, "-0.5"), (999.7, "1000"),
     (1234.5, "1234"), (9999, "9999"), (12345, "12.3k"),
     (999_400, "999k"), (999_600, "1M"), (1.5e6, "1.5M"), (2e-5, "2e-05")],
)
def test_numbers_are_short_and_never_in_powers_unless_tiny(value, shown):
    assert compact(value) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(None, "-"), (0, "0.0s"), (0.064, "64ms"), (9.44, "9.4s"), (42, "42s"), (59.7, "1m00s"), (83, "1m23s"),
     (7500, "2h05m"), (86400 * 3 + 4 * 3600, "3d04h")],
)
def test_durations_use_two_units_at_most(seconds, shown):
    assert duration(seconds) == shown


def test_a_sparkline_rises_with_its_values_and_fits_its_width():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([5.0, 5.0]) == "▄▄"
    assert len(sparkline(list(range(1000)), width=40)) <= 40
    assert sparkline([]) == ""


def test_a_markdown_table_is_padded_to_equal_lines():
    assert markdown_table(["run", "n"], [["a", "10"], ["long name", "7"]]) == (
        "| run       |   n |\n|-----------|----:|\n| a         |  10 |\n| long name |   7 |\n"
    )
