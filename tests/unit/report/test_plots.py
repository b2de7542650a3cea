"""Charts as numbers: where pixels are, how many points and bars there are."""

import re
import xml.etree.ElementTree as ElementTree

import pytest

from streamrl.report.plots import (
    BOTTOM,
    HEIGHT,
    LEFT,
    MAX_POINTS,
    RIGHT,
    TOP,
    WIDTH,
    Curve,
    category_bars,
    histogram,
    line_chart,
    smooth,
    thin,
    ticks,
    x_scale,
    y_scale,
)


def svg_of(figure):
    return ElementTree.fromstring(figure).find("svg")


def points_of(path):
    return [tuple(map(float, pair.split(","))) for pair in re.split("[ML]", path.get("d"))[1:]]


def test_scales_map_the_ends_of_the_data_to_the_ends_of_the_plot_and_y_grows_upwards():
    to_x, to_y = x_scale(1, 101), y_scale(-2, 2)

    assert (to_x(1), to_x(101)) == (LEFT, WIDTH - RIGHT)
    assert (to_y(-2), to_y(2)) == (HEIGHT - BOTTOM, TOP)
    assert to_y(0) == (TOP + HEIGHT - BOTTOM) / 2


def test_a_range_without_extent_still_has_a_scale():
    assert x_scale(5, 5)(5) == LEFT


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1.0]), (-3, 7, [-2, 0, 2, 4, 6]), (0, 12345, [0, 2500, 5000, 7500, 10000]),
     (1e-6, 5e-6, [1e-6, 2e-6, 3e-6, 4e-6, 5e-6]), (4, 4, [4])],
)
def test_ticks_are_round_numbers_inside_the_range(low, high, expected):
    assert ticks(low, high) == pytest.approx(expected)


def test_a_curve_has_a_point_for_each_value_at_its_pixel():
    figure = line_chart("Reward", [Curve("mean", [1, 2, 3], [0.0, 5.0, 10.0])], x_label="step", y_label="reward")

    points = points_of(svg_of(figure).find("path"))

    to_y = y_scale(0, 10.6)  # 6 % of room above; amounts have no axis below 0
    assert points == [pytest.approx((x, to_y(y)), abs=0.01)
                      for x, y in zip((LEFT, (LEFT + WIDTH - RIGHT) / 2, WIDTH - RIGHT), (0, 5, 10), strict=True)]


def test_values_that_are_not_finite_leave_the_rest_of_the_curve_intact():
    nan = float("nan")
    figure = line_chart("Loss", [Curve("loss", [1, 2, 3, 4], [1.0, nan, 2.0, nan])], x_label="step", y_label="loss")

    assert len(points_of(svg_of(figure).find("path"))) == 2
    assert line_chart("Loss", [Curve("loss", [1], [nan])], x_label="step", y_label="loss") == ""


def test_the_bound_is_drawn_at_its_value_and_inside_the_plot():
    figure = line_chart("Lag", [Curve("max", [1, 2], [1, 2])], x_label="step", y_label="steps", from_zero=True,
                        bound=("bound 8", 8))

    line = next(e for e in svg_of(figure) if e.get("class") == "bound")
    assert float(line.get("y1")) == float(line.get("y2")) == pytest.approx(y_scale(0, 8 * 1.06)(8), abs=0.01)


def test_axes_carry_their_labels_and_a_legend_appears_only_for_several_curves():
    one = line_chart("T", [Curve("a", [1, 2], [1, 2])], x_label="step", y_label="tokens/s")
    two = line_chart("T", [Curve("a", [1, 2], [1, 2]), Curve("b & c", [1, 2], [1, 2], 1)], x_label="step", y_label="s")

    labels = [e.text for e in svg_of(one) if e.get("class") == "label"]
    assert labels == ["step", "tokens/s"]
    assert 'class="legend"' not in one
    assert "b &amp; c" in two and two.count('class="key') == 2


def test_thinning_a_long_curve_keeps_its_spike():
    ys = [0.0] * 50_000
    ys[31_234] = 9.0

    xs, kept = thin(list(range(50_000)), ys)

    assert len(kept) <= MAX_POINTS + 2
    assert (31_234, 9.0) in zip(xs, kept, strict=True)
    assert xs == sorted(xs)


def test_smoothing_averages_neighbors_and_keeps_a_constant():
    assert smooth([0, 3, 0, 3, 0], 3) == pytest.approx([1.5, 1, 2, 1, 1.5])
    assert smooth([2.0] * 9, 4) == [2.0] * 9


def test_histogram_bars_hold_every_token_and_warn_beyond_the_bound():
    counts = {0: 10, 1: 25, 4: 5}
    svg = svg_of(histogram("Lag", counts, x_label="lag", y_label="tokens", bound=("bound 3", 3)))

    bars = {int(e.get("data-bin")): e for e in svg.iter("rect")}
    assert {k: int(bar.get("data-count")) for k, bar in bars.items()} == counts
    assert [k for k, bar in bars.items() if "over" in bar.get("class")] == [4]
    heights = {k: float(bar.get("height")) for k, bar in bars.items()}
    assert heights[0] / heights[1] == pytest.approx(10 / 25, abs=1e-3)
    assert bars[1].find("title").text == "1: 25 (62.5%)"


def test_histogram_ticks_are_whole_bins():
    svg = svg_of(histogram("Lag", {0: 1, 1: 2}, x_label="lag", y_label="tokens"))

    middle = [e.text for e in svg.iter("text") if e.get("text-anchor") == "middle" and e.get("class") == "tick"]
    assert middle == ["0", "1"]


def test_category_bars_are_ordered_and_in_proportion():
    svg = svg_of(category_bars("Dropped", {"stale": 1, "zero <std>": 4}, unit="run"))

    widths = [float(e.get("width")) for e in svg.iter("rect")]
    assert widths[1] / widths[0] == pytest.approx(0.25, abs=1e-3)
    assert [e.text for e in svg.iter("text")] == ["zero <std>", "4", "stale", "1"]


def test_nothing_measured_draws_nothing():
    assert histogram("Lag", {}, x_label="lag", y_label="tokens") == ""
    assert category_bars("Dropped", {}, unit="run") == ""
    assert line_chart("Reward", [], x_label="step", y_label="reward") == ""
