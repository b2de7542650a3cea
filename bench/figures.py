"""The two pictures of measurements in the README, drawn from the committed records.

    score_by_age.svg    final score by the age of the data in real runs: mean and standard deviation over seeds
    beside_trl.svg      samples per second of streamrl and TRL in alternating runs: bars are medians, dots are runs

Run: python -m bench.figures [--out FOLDER]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib

from bench.staleness.summary import Spread
from bench.staleness_real.cells import fresh_arm

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "bench" / "results"
IMAGES = ROOT / "docs" / "images"
AGES = (
    ("tiny model, strings, rate 3e-4", 3e-4, sorted((RECORDS / "staleness_real").glob("ages-*.jsonl"))),
    ("SmolLM2-135M, sums, rate 2e-5", 2e-5, sorted((RECORDS / "staleness_real").glob("smollm2-lags-*.jsonl"))),
)
"""Panels of the first picture: title, learning rate, records."""
SHOWN = {"uncorrected": "no correction", "tis": "truncated ratio (TIS)", "stream_default": "stream_default (default)",
         "vtrace": "vtrace"}
PEERS = (
    ("tiny model, strings", RECORDS / "peers" / "044c182f48ed-20261128T235014.jsonl"),
    ("SmolLM2-135M, sums", RECORDS / "peers" / "044c182f48ed-20261128T235514.jsonl"),
)
"""Panels of the second: title and record, each of three runs on a quiet machine."""
SYSTEMS = {"ours": "streamrl", "ours_sync": "streamrl, synchronous", "trl": "TRL"}


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=IMAGES, help="folder of the pictures; docs/images")
    out = parser.parse_args(words).out
    out.mkdir(parents=True, exist_ok=True)
    draw_ages({title: scores_by_lag(records(paths), rate) for title, rate, paths in AGES}, out / "score_by_age.svg")
    draw_peers({title: rates_of_peers(records([path])) for title, path in PEERS}, out / "beside_trl.svg")
    return 0


def records(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """The lines of these files."""
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def scores_by_lag(results: Sequence[Mapping[str, Any]], rate: float) -> dict[str, dict[int, Spread]]:
    """Arm -> lag -> final scores at a learning rate. At lag 0 all arms without a critic share their runs."""
    scores: dict[tuple[str, int], list[float]] = {}
    for one in results:
        if one.get("valid", True) and one["rate"] == rate:
            scores.setdefault((one["arm"], one["lag"]), []).append(one["end"])
    lags = sorted({lag for _, lag in scores})
    found = {arm: {lag: scores.get((fresh_arm(arm) if lag == 0 else arm, lag)) for lag in lags} for arm in SHOWN}
    return {arm: {lag: Spread(tuple(ends)) for lag, ends in by_lag.items() if ends} for arm, by_lag in found.items()
            if all(by_lag.values())}


def rates_of_peers(lines: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """System -> samples per second of its runs, as shares of the median of TRL's faster configuration."""
    runs = {name.split(".")[2]: one["samples"] for one in lines
            if (name := one["name"]).startswith("peers.") and name.endswith(".samples_per_s")}
    runs["trl"] = max((values for name, values in runs.items() if name.startswith("trl_")), key=median)
    return {name: [value / median(runs["trl"]) for value in runs[name]] for name in SYSTEMS}


def draw_ages(panels: Mapping[str, Mapping[str, Mapping[int, Spread]]], path: Path) -> None:
    """A panel for each task: a line for each correction."""
    figure, all_axes = _figure(len(panels))
    for axes, (title, arms) in zip(all_axes, panels.items(), strict=True):
        lags = sorted({lag for by_lag in arms.values() for lag in by_lag})
        for name, by_lag in arms.items():
            spreads = by_lag.values()
            axes.errorbar([lags.index(lag) for lag in by_lag], [one.mean for one in spreads],
                          [one.deviation for one in spreads], marker="o", capsize=3, label=SHOWN[name],
                          color=f"C{list(SHOWN).index(name)}")
        axes.set(title=title, xlabel="optimizer steps between sampling and training", ylim=(0, 1.02))
        axes.set_xticks(range(len(lags)), lags)
    all_axes[0].set_ylabel("score on held-out prompts")
    named = {name: line for axes in all_axes for line, name in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(named.values(), named.keys(), loc="outside upper center", ncols=4)
    _save(figure, path)


def draw_peers(panels: Mapping[str, Mapping[str, Sequence[float]]], path: Path) -> None:
    """A panel for each task: a bar for each system, a dot for each run."""
    figure, all_axes = _figure(len(panels))
    for axes, (title, systems) in zip(all_axes, panels.items(), strict=True):
        for place, values in enumerate(systems.values()):
            axes.bar(place, median(values), color=("C0", "C9", "0.7")[place], width=0.6)
            axes.plot([place] * len(values), values, "k.", markersize=5)
            axes.annotate(f"{median(values):.1f}", (place - 0.28, median(values)), va="bottom", ha="left")
        axes.set_xticks(range(len(systems)), [SYSTEMS[name] for name in systems])
        axes.set(title=title, ylim=(0, 1.15 * max(max(values) for values in systems.values())))
    all_axes[0].set_ylabel("samples per second, TRL = 1")
    _save(figure, path)


def _figure(num_panels: int) -> tuple[Any, Sequence[Any]]:
    matplotlib.use("Agg")
    from matplotlib import pyplot

    # Text stays text, and no random ids or dates: the same records give the same file.
    pyplot.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "streamrl", "font.size": 9})
    figure, axes = pyplot.subplots(1, num_panels, figsize=(8.4, 3.1), layout="constrained", squeeze=False)
    for one in axes[0]:
        one.grid(alpha=0.3, axis="y")
        one.set_axisbelow(True)
    return figure, axes[0]


def _save(figure: Any, path: Path) -> None:
    from matplotlib import pyplot

    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
