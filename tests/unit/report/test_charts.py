"""Charts as numbers: where pixels are, how many points and bars there are."""

import re
import xml.etree.ElementTree as ElementTree

import pytest

from streamrl.report.charts import (
    MAX_COLUMNS,
    SMALL,
    WIDE,
    bands_of,
    category_bars,
    charts_html,
    histogram,
    line_chart,
    stacked_shares,
    summed,
)
from streamrl.report.curves import MAX_POINTS, Curve, Scale, limits_of, log_ticks, noisy, smooth, thin, ticks


def lines(*curves, **options):
    return line_chart("Title", curves, x_label="step", y_label="unit", **options)


def svg_of(chart):
    return ElementTree.fromstring(chart.html()).find("svg")


def curves_of(chart):
    return [e for e in svg_of(chart).iter("path") if e.get("class").startswith("curve")]


def points_of(path):
    return [tuple(map(float, pair.split(","))) for pair in re.split("[ML]", path.get("d"))[1:]]


def test_scales_map_the_ends_of_the_data_to_the_ends_of_the_plot_and_y_grows_upwards():
    to_x, to_y = SMALL.x_scale(1, 101), SMALL.y_scale(-2, 2)

    assert (to_x(1), to_x(101)) == (SMALL.left, SMALL.width - SMALL.right)
    assert (to_y(-2), to_y(2)) == (SMALL.base, SMALL.top)
    assert to_y(0) == (SMALL.top + SMALL.base) / 2
    assert SMALL.x_scale(5, 5)(5) == SMALL.left, "a range without extent has a scale, too"


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1.0]), (-3, 7, [-2, 0, 2, 4, 6]), (0, 12345, [0, 2500, 5000, 7500, 10000]),
     (1e-6, 5e-6, [1e-6, 2e-6, 3e-6, 4e-6, 5e-6]), (4, 4, [4])],
)
def test_ticks_are_round_numbers_inside_the_range(low, high, expected):
    assert ticks(low, high) == pytest.approx(expected)


def test_a_curve_has_a_point_for_each_value_at_its_pixel():
    figure = lines(Curve("mean", [1, 2, 3], [0.0, 5.0, 10.0]))

    points = points_of(curves_of(figure)[0])

    to_x, to_y = SMALL.x_scale(0, 3), SMALL.y_scale(0, 10.6)  # 6 % of room above; amounts have no axis below 0
    assert points == [pytest.approx((to_x(x), to_y(y)), abs=0.01) for x, y in ((1, 0), (2, 5), (3, 10))]


def test_the_x_axis_begins_with_a_tick_at_zero():
    svg = svg_of(lines(Curve("mean", [40, 80], [0.1, 0.2])))

    x_ticks = [e.text for e in svg.iter("text") if e.get("class") == "tick" and e.get("text-anchor") == "middle"]
    assert x_ticks == ["0", "20", "40", "60", "80"]


def test_values_that_are_not_finite_leave_the_rest_of_the_curve_intact():
    nan = float("nan")
    figure = lines(Curve("loss", [1, 2, 3, 4], [1.0, nan, 2.0, nan]))

    assert len(points_of(curves_of(figure)[0])) == 2
    assert lines(Curve("loss", [1], [nan])) is None


def test_the_bound_is_drawn_at_its_value_and_inside_the_plot():
    figure = lines(Curve("max", [1, 2], [1, 2]), from_zero=True, bound=("bound 8", 8))

    line = next(e for e in svg_of(figure) if e.get("class") == "bound")
    assert float(line.get("y1")) == float(line.get("y2")) == pytest.approx(SMALL.y_scale(0, 8 * 1.06)(8), abs=0.01)


def test_axes_carry_their_labels_and_a_legend_appears_only_for_several_curves():
    one = lines(Curve("a", [1, 2], [1, 2]))
    both = lines(Curve("a", [1, 2], [1, 2]), Curve("b & c", [1, 2], [1, 2], 1))

    labels = [e.text for e in svg_of(one) if "label" in e.get("class", "")]
    assert labels == ["step", "unit"]
    assert 'class="legend"' not in one.html()
    first, second = curves_of(lines(Curve("a", [1, 2], [1, 2], 0), Curve("b", [1, 2], [1, 2], 1)))
    assert first.get("d") == second.get("d") and first.get("class") != second.get("class"), "one is dashed"
    assert "b &amp; c" in both.html() and both.html().count('class="key') == 2


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
    middle = [e.text for e in svg.iter("text") if e.get("text-anchor") == "middle" and e.get("class") == "tick"]
    assert middle == ["0", "1", "2", "3", "4"], "whole bins"


def test_category_bars_are_ordered_and_in_proportion():
    svg = svg_of(category_bars("Dropped", {"stale": 1, "zero <std>": 4}, unit="run"))

    widths = [float(e.get("width")) for e in svg.iter("rect")]
    assert widths[1] / widths[0] == pytest.approx(0.25, abs=1e-3)
    assert [e.text for e in svg.iter("text")] == ["zero <std>", "4", "stale", "1"]


def test_a_few_outliers_do_not_set_the_axis_and_are_counted():
    ys = [1.0 + 0.001 * (i % 10) for i in range(200)]
    ys[3] = 57.0

    limits = limits_of([ys])
    figure = lines(Curve("token", list(range(200)), ys), robust=True)

    assert limits.high < 1.02 and limits.num_outside == 1 and limits.above == 57.0 and limits.below is None
    assert "1 point outside the axis, up to 57" in figure.html()
    assert limits_of([ys], robust=False).high > 57
    short = limits_of([[0.1, 0.2, 9.0]])
    assert short.high > 9 and short.num_outside == 0


def test_a_logarithmic_axis_has_ticks_at_powers_of_ten_and_no_place_for_zero():
    figure = lines(Curve("k3", [1, 2, 3, 4], [0.0, 1e-06, 0.0001, 0.01]), log=True)

    points = points_of(curves_of(figure)[0])
    assert len(points) == 3
    assert points[0][1] - points[1][1] == pytest.approx(points[1][1] - points[2][1], abs=0.02), "equal factors"
    assert {"1e-6", "1e-4", "0.01"} <= {e.text for e in svg_of(figure).iter("text")}
    assert Scale(1, 100, 0, 10, log=True)(10) == pytest.approx(5)
    assert lines(Curve("k3", [1], [0.0]), log=True) is None


@pytest.mark.parametrize(("low", "high", "expected"), [(1e-6, 1e-2, [1e-6, 1e-5, 1e-4, 1e-3, 1e-2]),
                                                      (1.5, 30, [2, 5, 10, 20]), (3, 4, [3])])
def test_log_ticks_are_powers_of_ten_or_their_halves(low, high, expected):
    assert log_ticks(low, high) == pytest.approx(expected)


def test_error_bars_reach_one_standard_error_up_and_down():
    figure = lines(Curve("score", [0, 10], [0.2, 0.5], dots=True, errors=[0.02, 0.1]), fixed=(0.0, 1.0))

    bars = next(e for e in svg_of(figure).iter("path") if e.get("class").startswith("errors")).get("d")
    to_y = SMALL.y_scale(0, 1)
    ends = [tuple(map(float, part)) for part in re.findall(r"M[\d.]+,([\d.]+)V([\d.]+)", bars)]
    assert ends == [pytest.approx((to_y(low), to_y(high)), abs=0.01) for low, high in ((0.18, 0.22), (0.4, 0.6))]


def test_curves_carry_their_data_for_the_script_and_names_are_escaped():
    figure = lines(Curve('<a "b">', [1, 2], [0.25, 1e-07]))

    (curve,) = curves_of(figure)
    assert (curve.get("data-name"), curve.get("data-x"), curve.get("data-y")) == ('<a "b">', "1,2", "0.25,1e-07")
    assert "<a " not in figure.html()


def test_the_first_of_an_odd_number_fills_a_row_and_is_drawn_for_a_phone_too():
    chart = lines(Curve("a", [1, 2], [1, 2]))

    drawn = [[svg.get("viewBox").split()[2] for svg in figure.findall("svg")]
             for figure in ElementTree.fromstring(charts_html([chart, None, chart, chart]))]
    assert drawn == [[str(SMALL.width), str(WIDE)], [str(SMALL.width)], [str(SMALL.width)]]
    assert "wide" not in charts_html([chart, chart]) and charts_html([None]) == ""


def test_shares_of_lags_are_stacked_up_to_one():
    figure = stacked_shares("Lag", [(1, {0: 10}), (2, {0: 5, 2: 15}), (3, {})], x_label="step", y_label="share",
                            name="lag")

    areas = [e for e in svg_of(figure).iter("path") if e.get("class").startswith("area")]
    data = [(e.get("data-name"), e.get("data-from"), e.get("data-y")) for e in areas]
    assert data == [("lag 0", "0,0", "1,0.25"), ("lag 2", "1,0.25", "1,1")], "lag 1 never occurs; step 3 has no token"
    assert ">lag 0 <b>50%</b>" in figure.html()
    one = stacked_shares("Lag", [(1, {0: 3})], x_label="step", y_label="share", name="lag")
    assert 'data-y="1,1"' in one.html(), "a run of one step has an area, too"


def test_many_lags_fall_into_bands_that_double():
    assert bands_of([0, 3]) == [(0, 0), (1, 1), (2, 2), (3, 3)]
    bands = bands_of([0, 500])
    assert bands[:4] == [(0, 0), (1, 1), (2, 3), (4, 7)] and bands[-1][1] == 500
    assert all(later[0] == earlier[1] + 1 for earlier, later in zip(bands, bands[1:], strict=False))


def test_neighboring_steps_are_summed_and_none_is_lost():
    columns = summed([(step, {step % 3: 1}) for step in range(1000)])

    assert len(columns) <= MAX_COLUMNS and columns[-1][0] == 999
    assert sum(sum(counts.values()) for _, counts in columns) == 1000


def test_a_noisy_curve_is_its_raw_data_and_its_average():
    raw, average = noisy(Curve("r", list(range(100)), [float(i % 2) for i in range(100)]))

    assert raw.faint and not average.faint
    assert all(abs(y - 0.5) < 0.11 for y in average.ys[5:-5])
    assert noisy(Curve("r", [1, 2], [1.0, 2.0])) == [Curve("r", [1, 2], [1.0, 2.0])]


def test_nothing_measured_draws_nothing():
    assert histogram("Lag", {}, x_label="lag", y_label="tokens") is None
    assert stacked_shares("Lag", [(1, {})], x_label="step", y_label="share", name="lag") is None
    assert category_bars("Dropped", {}, unit="run") is None and lines() is None
