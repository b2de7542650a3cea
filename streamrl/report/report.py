"""`report.html`: one run on a self-contained page, without script, font or network."""

from __future__ import annotations

import os
from collections.abc import Sequence
from html import escape
from pathlib import Path

from streamrl.metrics.run_record import RunRecord, read_run
from streamrl.metrics.sinks import write_atomic
from streamrl.metrics.summary import series, total_histogram
from streamrl.metrics.text import duration
from streamrl.report.plots import NUM_COLORS, Curve, category_bars, histogram, line_chart, smooth

SMOOTH_SHARE = 20
"""A noisy curve is averaged over 1/20 of its length."""

_STYLE = """
:root { color-scheme: light dark; --page: #fbfbfa; --card: #fff; --ink: #1d1f21; --soft: #63686e; --rule: #e4e5e7;
  --warn: #c0392b; --c0: #1f6fb4; --c1: #d9622b; --c2: #2f9457; --c3: #8a4fb5; --c4: #b08900; --c5: #c2387e;
  --c6: #26949b; --c7: #777c82; }
@media (prefers-color-scheme: dark) { :root { --page: #15171a; --card: #1d2024; --ink: #e7e9ec; --soft: #9aa1a9;
  --rule: #31363c; --warn: #ff7a6b; --c0: #64aef0; --c1: #f39a68; --c2: #6fcf97; --c3: #c298e8; --c4: #e3c04a;
  --c5: #f287ba; --c6: #62cbd2; --c7: #a5abb2; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1rem 3rem; max-width: 72rem; background: var(--page); color: var(--ink);
  font: 16px/1.45 system-ui, -apple-system, "Segoe UI", sans-serif; }
h1 { font-size: 1.45rem; margin: 0 0 1rem; overflow-wrap: anywhere; }
h2 { font-size: 1.05rem; margin: 2rem 0 .75rem; }
p { margin: 0 0 1rem; color: var(--soft); }
.facts { columns: 2 22rem; column-gap: 2.5rem; margin: 0; padding: .3rem 1rem; background: var(--card);
  border: 1px solid var(--rule); border-radius: 8px; }
.facts div { display: flex; gap: 1rem; padding: .4rem 0; break-inside: avoid; }
dt { flex: 0 0 8rem; color: var(--soft); } dd { margin: 0; font-weight: 550; overflow-wrap: anywhere; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 25rem), 1fr)); gap: .75rem; }
figure { margin: 0; background: var(--card); border: 1px solid var(--rule); border-radius: 8px; padding: .7rem .8rem; }
figcaption { font-weight: 600; font-size: .95rem; margin-bottom: .3rem; }
svg { display: block; width: 100%; height: auto; overflow: visible; }
text { font: 12px system-ui, sans-serif; fill: var(--ink); } .tick, .label, .note { fill: var(--soft); }
.note { fill: var(--warn); } .grid { stroke: var(--rule); } .axis { stroke: var(--soft); }
.bound { stroke: var(--warn); stroke-dasharray: 5 4; } .bar { fill: var(--c0); } .bar.over { fill: var(--warn); }
.curve { fill: none; stroke-width: 2; stroke-linejoin: round; } .faint { stroke-width: 1; opacity: .3; }
.legend { display: flex; flex-wrap: wrap; gap: .2rem .9rem; font-size: .8rem; color: var(--soft); }
.key { display: inline-block; width: .8rem; height: .2rem; margin-right: .35rem; vertical-align: middle; }
.scroll { overflow-x: auto; background: var(--card); border: 1px solid var(--rule); border-radius: 8px; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .45rem .7rem; text-align: right; white-space: nowrap; border-top: 1px solid var(--rule); }
thead th { border-top: 0; color: var(--soft); font-weight: 500; } th:first-child, td:first-child { text-align: left; }
details { margin-top: 2rem; } summary { cursor: pointer; color: var(--soft); }
pre { overflow-x: auto; font-size: .8rem; }
""" + "".join(
    f".c{i} {{ stroke: var(--c{i}); }} .dot.c{i} {{ fill: var(--c{i}); }} .k{i} {{ background: var(--c{i}); }}\n"
    for i in range(NUM_COLORS))


def write_report(run_dir: str | os.PathLike[str]) -> Path:
    """Write `report.html` into the run directory; works for finished, running and killed runs.

    Raises:
        FileNotFoundError: the run has no `metrics.jsonl`.
    """
    record = read_run(run_dir)
    out = Path(run_dir) / "report.html"
    config = ""
    if record.config_text:
        config = f"<details><summary>Configuration</summary><pre>{escape(record.config_text)}</pre></details>"
    sections = [_headline(record), *_sections(record), config]
    write_atomic(out, page(f"streamrl run {record.name}", sections))
    return out


def page(title: str, sections: Sequence[str]) -> str:
    """A whole HTML document around the sections."""
    return ('<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n"
            f"<body><h1>{escape(title)}</h1>\n" + "\n".join(s for s in sections if s) + "\n</body></html>\n")


def _headline(record: RunRecord) -> str:
    if record.summary is None:
        step = record.rows[-1]["step"] if record.rows else 0
        return f"<p>No summary yet: the run is at step {step}, or ended early.</p>"
    facts = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in record.summary.headline())
    return f'<dl class="facts">{facts}</dl>'


def _sections(record: RunRecord) -> list[str]:
    parts = {
        "Learning": [
            _line(record, "Reward", "reward", {"reward/mean": "mean"}),
            _line(record, "Evaluation score", "score", {"eval/score": "score"}, smoothed=False, dots=True),
            _line(record, "Response length", "tokens", {"rollout/response_tokens/train": "training",
                                                        "eval/response_tokens": "evaluation"}, from_zero=True),
            _line(record, "Reward parts", "reward", _family(record, "reward/", ("reward/mean", "reward/std"))),
        ],
        "Staleness": [
            _line(record, "Lag", "optimizer steps", {"lag/head_max": "largest head lag",
                                                     "lag/token_mean": "mean token lag"},
                  smoothed=False, from_zero=True, bound=_bound(record)),
            histogram("Trained tokens by lag", total_histogram(record.rows, "lag/token"),
                      x_label="lag (optimizer steps)", y_label="tokens", bound=_bound(record)),
            _line(record, "Effective sample size", "fraction", {"ess/token": "token", "ess/sequence": "sequence",
                                                                "ess/sequence_clipped": "sequence, clipped"}),
            _line(record, "Mean importance ratio", "ratio", {"ratio/mean_token": "token",
                                                             "ratio/mean_sequence": "sequence"}),
            _line(record, "Drift from the behavior policy", "nats", {"drift/k1": "k1", "drift/k3": "k3"}),
            category_bars("Dropped, by reason", _totals(record, "dropped/"), unit="whole run"),
        ],
        "Speed": [
            _line(record, "Throughput", "tokens/s", {"throughput/train_tokens_per_s": "trained",
                                                     "throughput/generate_tokens_per_s": "generated"},
                  from_zero=True),
            _line(record, "Groups in the system", "groups", {"hub/num_groups_queued": "queued",
                                                             "hub/num_leases_open": "leased"}, from_zero=True),
            category_bars("Where the learner's time went", _totals(record, "time/", _LEARNER_TIMES), unit="whole run",
                          show=duration),
        ],
        "Optimization": [
            _line(record, "Policy loss", "loss", {"policy/loss": "loss"}),
            _line(record, "Gradient norm", "norm", {"policy/grad_norm": "policy", "critic/grad_norm": "critic"},
                  from_zero=True),
            _line(record, "Entropy", "nats", {"entropy/mean": "policy"}),
            _line(record, "Clipped tokens", "fraction", {"clip/positive": "positive advantage",
                                                         "clip/negative": "negative advantage"}, from_zero=True),
            _line(record, "KL to the reference", "nats", {"kl/value": "k3"}),
            _line(record, "Critic", "fraction", {"critic/explained_variance": "explained variance"}),
        ],
    }
    return [charts(title, figures) for title, figures in parts.items()]


_LEARNER_TIMES = ("wait", "pack", "logprobs", "values", "advantages", "forward_backward", "optimizer", "critic",
                  "publish", "checkpoint", "eval")


def charts(title: str, figures: Sequence[str]) -> str:
    """A heading and its figures; empty if no figure is."""
    drawn = "".join(figures)
    return f'<h2>{escape(title)}</h2><div class="charts">{drawn}</div>' if drawn else ""


def _line(record: RunRecord, title: str, unit: str, keys: dict[str, str], *, smoothed: bool = True,
          dots: bool = False, from_zero: bool = False, bound: tuple[str, float] | None = None) -> str:
    curves: list[Curve] = []
    for color, (key, name) in enumerate(keys.items()):
        curves += curves_of(name, *series(record.rows, key), color, smoothed, dots)
    return line_chart(title, curves, x_label="step", y_label=unit, from_zero=from_zero, bound=bound)


def curves_of(name: str, xs: list[int], ys: list[float], color: int, smoothed: bool, dots: bool = False) -> list[Curve]:
    """A curve; of a noisy one the raw data and, last, its moving average."""
    window = len(xs) // SMOOTH_SHARE
    if not smoothed or window < 2:
        return [Curve(name, xs, ys, color, dots=dots)]
    return [Curve(name, xs, ys, color, faint=True), Curve(name, xs, smooth(ys, window), color)]


def _bound(record: RunRecord) -> tuple[str, int] | None:
    if record.summary is None:
        return None
    return f"bound {record.summary.max_lag_bound}", record.summary.max_lag_bound


def _family(record: RunRecord, prefix: str, without: Sequence[str]) -> dict[str, str]:
    return {key: key[len(prefix) :] for key in record.keys() if key.startswith(prefix) and key not in without}


def _totals(record: RunRecord, prefix: str, only: Sequence[str] | None = None) -> dict[str, float]:
    totals = {}
    for key, name in _family(record, prefix, ()).items():
        name = name.removesuffix("_s") if prefix == "time/" else name
        total = sum(series(record.rows, key)[1])
        if total > 0 and (only is None or name in only):
            totals[name if only is None else name.replace("_", " ")] = total
    return totals
