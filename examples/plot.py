"""The evaluation curves of runs as one SVG or PNG: what the pictures of the examples were made with.

    python examples/plot.py runs/first-run-001 --out curve.svg
    python examples/plot.py runs/sweep-20261122-090308/* --label staleness.eta loss.surrogate --out curves.svg

Needs matplotlib, which comes with the extra `tasks`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

Points = list[tuple[int, float]]


def evaluations(run_dir: Path, metric: str = "eval/score") -> Points:
    """(step, score) of every evaluation of a run."""
    rows = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [(row["step"], row[metric]) for row in rows if metric in row]


def label(run_dir: Path, settings: list[str]) -> str:
    """The values of some settings of a run; its name without any."""
    if not settings:
        return run_dir.name
    config = json.loads((run_dir / "config.json").read_text())
    return ", ".join(f"{name.rpartition('.')[2]} {_value(config, name)}" for name in settings)


def _value(config: Any, name: str) -> Any:
    for part in name.split("."):
        config = config[part]
    return config


def plot(curves: Mapping[str, Points], out: Path) -> None:
    """One line for each label."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    # Text stays text, and no random ids or dates: the same run gives the same file.
    pyplot.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "streamrl", "font.size": 9})
    figure, axes = pyplot.subplots(figsize=(5.5, 3), layout="constrained")
    for name, points in curves.items():
        axes.plot(*zip(*points, strict=True), marker=".", label=name)
    axes.set(xlabel="optimizer steps", ylabel="score on held-out prompts", ylim=(0, 1.02))
    axes.grid(alpha=0.3)
    if len(curves) > 1:
        figure.legend(loc="outside upper center", ncols=2, fontsize=8)
    figure.savefig(out, metadata={"Date": None} if out.suffix == ".svg" else None)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("runs", nargs="+", type=Path, help="run directories; a folder that holds no run is left out")
    parser.add_argument("--label", nargs="*", default=[], help="settings that name a run in the legend")
    parser.add_argument("--metric", default="eval/score", help="eval/NAME/score for a set of eval.datasets")
    parser.add_argument("--out", type=Path, required=True, help="the file to write: .svg or .png")
    chosen = parser.parse_args()
    runs = [path for path in chosen.runs if (path / "metrics.jsonl").exists()]
    plot({label(path, chosen.label): evaluations(path, chosen.metric) for path in runs}, chosen.out)
    print(chosen.out)


if __name__ == "__main__":
    main()
