"""Forks of a run on its recorded stream: a table by version for a terminal, and a page with charts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

from streamrl.metrics.text import compact
from streamrl.report.charts import line_chart
from streamrl.report.curves import Curve
from streamrl.report.page import Section, page, table

ESS_FLOOR, PATIENCE = 0.3, 5
"""A fork's evidence ends where its ESS against the recorded log-probs is below this for so many batches in a row."""
COLUMNS = {
    "loss": "policy loss", "grad_norm": "gradient norm", "k1": "KL to the recorded policy (k1, nats)",
    "ratio": "mean token ratio", "ess": "ESS against the recorded log-probs",
}


@dataclass(frozen=True, slots=True)
class Point:
    """Measurements of training on one batch; None where there is none.

    Attributes:
        ess: effective share of all trajectories, those included that a veto removes, against the recorded log-probs.
    """

    version: int
    reward: float | None
    loss: float | None
    grad_norm: float | None
    k1: float | None
    ratio: float | None
    ess: float | None


@dataclass
class Fork:
    """One fork.

    Attributes:
        num_equal, num_compared: versions that have the run's own bits, of those that it published.
        ended: why it stopped before the log did.
    """

    name: str
    points: list[Point] = field(default_factory=list)
    num_equal: int = 0
    num_compared: int = 0
    ended: str = ""

    @property
    def evidence_ends(self) -> bool:
        last = [one.ess for one in self.points[-PATIENCE:]]
        return len(last) == PATIENCE and all(ess is not None and ess < ESS_FLOOR for ess in last)


def text_table(forks: Sequence[Fork]) -> str:
    """A row for each version, with loss, gradient norm, k1 and ESS of each fork; and how each ended."""
    shown = ("loss", "grad_norm", "k1", "ess")
    head = ["version", "reward", *(name for _ in forks for name in ("loss", "grad", "k1", "ESS"))]
    rows = [head, *([version, reward, *cells] for version, reward, cells in _rows(forks, shown))]
    widths = [max(len(row[place]) for row in rows) for place in range(len(head))]
    at = sum(widths[:2]) + 4
    names = " " * at
    for place, fork in enumerate(forks):
        width = sum(widths[2 + 4 * place : 6 + 4 * place]) + 8
        names += f"{fork.name[: width - 2]:<{width}}"
    lines = ["  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join([names.rstrip(), *lines, "", *(f"{fork.name}: {_how(fork)}" for fork in forks)])


def what_if_page(run: str, first: int, forks: Sequence[Fork]) -> str:
    """The page with a chart of each measure, and the table."""
    charts = [
        line_chart(title, _curves(forks, name), x_label="version", y_label="",
                   bound=("evidence ends", ESS_FLOOR) if name == "ess" else None)
        for name, title in COLUMNS.items()
    ]
    figures = "".join(chart.html() for chart in charts if chart)
    header = ["version", "reward", *(f"{fork.name}: {name}" for fork in forks for name in COLUMNS)]
    rows = [[version, reward, *cells] for version, reward, cells in _rows(forks, tuple(COLUMNS))]
    said = table(["fork", "outcome"], [[escape(fork.name), escape(_how(fork))] for fork in forks])
    note = (
        "<p>Every fork trains on the same recorded batches, so the rewards are the run's own; what a fork would have "
        "generated, and how it would have scored, is unknown.</p>"
    )
    title = f"{run}: what if, from version {first} on"
    return page(title, [
        f"<h1>{escape(title)}</h1>{note}", Section("Forks", said).html(),
        Section("Charts", f'<div class="charts">{figures}</div>', "By version").html(),
        Section("Table", table(header, rows), "Numbers").html(),
    ])


def _rows(forks: Sequence[Fork], shown: Sequence[str]) -> list[tuple[str, str, list[str]]]:
    by_version = [{point.version: point for point in fork.points} for fork in forks]
    found = []
    for version in sorted(set().union(*by_version)):
        points = [one.get(version) for one in by_version]
        reward = next(point.reward for point in points if point is not None)
        cells = [compact(getattr(point, name)) if point else "" for point in points for name in shown]
        found.append((str(version), compact(reward), cells))
    return found


def _curves(forks: Sequence[Fork], name: str) -> list[Curve]:
    """A line for each fork, with a dot where its evidence ends."""
    curves = []
    for color, fork in enumerate(forks):
        found = [(point.version, value) for point in fork.points if (value := getattr(point, name)) is not None]
        if not found:
            continue
        xs, ys = zip(*found, strict=True)
        curves.append(Curve(fork.name, xs, ys, color))
        if fork.ended:
            curves.append(Curve(f"{fork.name}: its evidence ends", xs[-1:], ys[-1:], color, dots=True))
    return curves


def _how(fork: Fork) -> str:
    equal = f"{fork.num_equal} of {fork.num_compared} versions bit-equal to the run's"
    return f"{equal}; {fork.ended}" if fork.ended else equal
