"""The charts of the experiment as files that stand alone: SVG with its own colors and its own legend."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.staleness.summary import by, mean
from streamrl.report.charts import SMALL, Chart, line_chart
from streamrl.report.curves import NUM_COLORS, Curve

_ColorS = ("#1f6fb4", "#d9622b", "#2f9457", "#8a4fb5", "#b08900", "#c2387e", "#26949b", "#777c82")
_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#1d1f21}.tick,.label{fill:#63686e}.note{fill:#c0392b}"
    ".grid{stroke:#e4e5e7}.axis{stroke:#63686e}.bound{stroke:#c0392b;stroke-dasharray:5 4}"
    ".curve{fill:none;stroke-width:2;stroke-linejoin:round}.dots{stroke-width:6;stroke-linecap:round}"
    + "".join(f".c{i}{{stroke:{c}}}.dot.c{i},.k{i}{{fill:{c}}}" for i, c in enumerate(_ColorS))
)
WIDTH, HEIGHT = SMALL.width, SMALL.height
RATIO_ONLY = ("none", "token_tis", "seq_tis", "icepop", "decoupled_ppo", "vespo", "vtrace_critic_free", "impala")
TRUST_REGION = (
    "none", "stream_default", "m2po", "dppo_tv", "vtrace_critic_free_clip", "vtrace_critic_clip", "retrace_v_clip",
)  # fmt: skip
FIRST_SCREEN = {
    "stream_default": "stream_default", "decoupled_ppo": "decoupled PPO", "token_tis": "truncated ratio (TIS)",
    "none": "no correction", "impala": "impala",
}
SHOWN = ("none", "token_tis", "seq_tis", "vtrace_critic_free", "impala", "dppo_tv", "stream_default", "m2po")

Runs = Sequence[Mapping[str, Any]]


def write_charts(parts: Mapping[str, Runs], folder: Path, *, eval_every: int) -> None:
    """Write every chart of the experiment into `folder`."""
    lag = max(record["lag"] for record in parts["A"])
    charts = {
        "score_by_lag": _by_age("Final score by the age of the data (simulation, 3 seeds)", parts["A"]),
        "score_by_lag_ratio_only": _by_lag("Final score: ratio corrections without a bound", parts["A"], RATIO_ONLY),
        "score_by_lag_trust_region": _by_lag("Final score: updates bounded around mu", parts["A"], TRUST_REGION),
        f"learning_at_lag_{lag}": _over_time(f"Score at lag {lag}", parts["A"], lag, "scores", eval_every),
        f"ess_at_lag_{lag}": _over_time(f"Lowest trajectory ESS at lag {lag}", parts["A"], lag, "ess_sequence",
                                        eval_every),
        "step_change_score": _driven("Score while the delay goes 4, 48, 4", parts["D"], "scores", eval_every),
        "step_change_lag": _driven("Largest lag trained on", parts["D"], "lags", eval_every),
    }  # fmt: skip
    for name, chart in charts.items():
        assert chart is not None, f"{name} has no value"
        (folder / f"{name}.svg").write_text(standalone(chart.html()))


def standalone(figure: str) -> str:
    """The SVG of a figure of `streamrl.report.charts`, with style, title and legend inside."""
    found = re.search(r"<svg [^>]*>(.*)</svg>", figure, re.S)
    title = re.search(r"<figcaption>(.*?)</figcaption>", figure, re.S)
    assert found is not None and title is not None, "not a figure of streamrl.report.charts"
    names = re.findall(r'class="key k(\d)"></i>(.*?)(?: <b>.*?</b>)?</span>', figure)
    rows = math.ceil(len(names) / 2)
    legend = "".join(
        f'<rect class="k{color}" x="{12 + 210 * (i % 2)}" y="{HEIGHT + 4 + 18 * (i // 2)}" width="12" height="4"/>'
        f'<text x="{30 + 210 * (i % 2)}" y="{HEIGHT + 10 + 18 * (i // 2)}">{name}</text>'
        for i, (color, name) in enumerate(names)
    )
    height = HEIGHT + 18 * rows + 26
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 -24 {WIDTH} {height}" width="{WIDTH}" height="{height}">'
        f'<style>{_STYLE}</style><rect y="-24" width="{WIDTH}" height="{height}" fill="#fff"/>'
        f'<text x="2" y="-8" font-weight="600">{title.group(1)}</text>{found.group(1)}{legend}</svg>\n'
    )


def _by_lag(title: str, records: Runs, arms: Sequence[str]) -> Chart | None:
    finals = by(records, "arm", "lag")
    curves = []
    for color, arm in enumerate(arms):
        points = sorted((lag, spread.mean) for (name, lag), spread in finals.items() if name == arm)
        xs = [math.log2(1 + lag) for lag, _ in points]
        curves.append(Curve(arm, xs, [score for _, score in points], color, dots=True))
    return line_chart(title, curves, x_label="log2(1 + lag): 0, 1, 4, 8, 16, 32, 64 updates", y_label="score",
                      from_zero=True)  # fmt: skip


def _by_age(title: str, records: Runs) -> Chart | None:
    finals = by(records, "arm", "lag")
    curves = []
    for color, (arm, name) in enumerate(FIRST_SCREEN.items()):
        points = sorted((lag, spread.mean) for (one, lag), spread in finals.items() if one == arm)
        curves.append(Curve(name, [lag for lag, _ in points], [score for _, score in points], color, dots=True))
    return line_chart(title, curves, x_label="lag: updates between sampling and training", y_label="score",
                      from_zero=True)  # fmt: skip


def _over_time(title: str, records: Runs, lag: int, field: str, eval_every: int) -> Chart | None:
    curves = []
    for color, arm in enumerate(SHOWN):
        runs = [record[field] for record in records if record["arm"] == arm and record["lag"] == lag]
        curves.append(_mean_curve(arm, runs, color, eval_every))
    return line_chart(title, curves, x_label="updates", y_label="mean over seeds", from_zero=True)


def _driven(title: str, records: Runs, field: str, eval_every: int) -> Chart | None:
    curves, bounds = [], (None, 4, "adaptive")
    for arm in sorted({record["arm"] for record in records}):
        for bound in bounds:
            runs = [record[field] for record in records if record["arm"] == arm and record["bound"] == bound]
            name = f"{arm}, {'no bound' if bound is None else bound if bound == 'adaptive' else f'bound {bound}'}"
            curves.append(_mean_curve(name, runs, len(curves) % NUM_COLORS, eval_every))
    return line_chart(title, curves, x_label="ticks", y_label="mean over seeds", from_zero=True)


def _mean_curve(name: str, runs: Sequence[Sequence[float]], color: int, eval_every: int) -> Curve:
    ys = [mean(column) for column in zip(*runs, strict=True)]
    return Curve(name, [eval_every * (i + 1) for i in range(len(ys))], ys, color)
