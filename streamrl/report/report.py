"""`report.html`: one run on a page that needs nothing but itself, and the charts that reports and comparisons share.

The charts stand in the order in which one asks: does it learn, how old is the data, what is slow, what steers. A chart
whose metrics the run does not have is left out.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path

from streamrl.metrics.files import write_atomic
from streamrl.metrics.run_record import RunRecord, read_run
from streamrl.metrics.samples import read_samples
from streamrl.metrics.summary import MEASURED, in_words
from streamrl.metrics.text import compact, duration
from streamrl.report import headline
from streamrl.report.charts import Chart, category_bars, charts_html, histogram, line_chart, stacked_shares
from streamrl.report.curves import Curve, noisy, thin
from streamrl.report.page import Section, page, sectioned
from streamrl.report.samples import samples_html

LEARNER_TIMES = ("wait", "pack", "logprobs", "values", "score", "advantages", "forward_backward", "optimizer", "critic",
                 "publish", "checkpoint", "eval")
OF_ALL_REWARD = tuple(f"reward/{name}" for name in ("mean", "std", "trained", "num", "recent"))


@dataclass(frozen=True, slots=True)
class Lines:
    """A line chart of metrics, of one run or over several.

    Attributes:
        names: key -> name of its curve, or a function of the run that gives them; of a comparison the first alone.
        from_zero, log: see `line_chart`.
        as_score: has the limits of the evaluations.
        unless_zero, unless_constant: without a chart where all values are 0, or every metric has one value.
    """

    title: str
    unit: str
    names: Mapping[str, str] | Callable[[RunRecord], Mapping[str, str]]
    smoothed: bool = True
    scale: float = 1.0
    from_zero: bool = False
    log: bool = False
    as_score: bool = False
    unless_zero: bool = False
    unless_constant: bool = False

    def __call__(self, record: RunRecord) -> Chart | None:
        """The chart of one run."""
        curves: list[Curve] = []
        for key, name in (self.names(record) if callable(self.names) else self.names).items():
            steps, values = record.series(key)
            if values and name not in [other.name for other in curves]:  # an old key and a new one for the same
                scaled = [self.scale * value for value in values]
                curves.append(Curve(name, steps, scaled, len(curves), weights=record.weights(key)))
        if self.unless_zero and not any(value for curve in curves for value in curve.ys):
            return None
        if self.unless_constant and all(len(set(curve.ys)) < 2 for curve in curves):
            return None
        drawn = [one for curve in curves for one in (noisy(curve) if self.smoothed else [curve])]
        return line_chart(self.title, drawn, x_label="step", y_label=self.unit, from_zero=self.from_zero, log=self.log,
                          robust=True, fixed=shared_limits(record) if self.as_score else None, x_end=record.step)

    def over(self, records: Sequence[RunRecord], labels: Sequence[str]) -> Chart | None:
        """One curve for each run, smoothed without the raw data."""
        (key, *_), curves = self.names, []
        for run, (record, label) in enumerate(zip(records, labels, strict=True)):
            curve = Curve(label, *record.series(key), color=run, run=run, weights=record.weights(key))
            curves.append(replace(noisy(curve)[-1] if self.smoothed else curve, faint=False))
        return line_chart(self.title, curves, x_label="step", y_label=self.unit, from_zero=self.from_zero,
                          log=self.log, robust=True, legend=False)


def _evaluations(record: RunRecord) -> Chart | None:
    nums = record.series("eval/num_prompts")[1]
    note = f"bars: ± 1 standard error, n = {nums[-1]:.0f}" if nums and any(record.evaluations()[2]) else ""
    return line_chart("Evaluation score", evaluation_curves(record), x_label="step", y_label="score",
                      fixed=shared_limits(record), x_end=record.step, note=note)


def _lag_shares(record: RunRecord) -> Chart | None:
    tokens = [(row["step"], row["lag/token"]) for row in record.rows if row.get("lag/token")]
    return stacked_shares("Lag of the trained tokens", tokens, x_label="step", y_label="share of the tokens",
                          name="lag")


def _lag_histogram(record: RunRecord) -> Chart | None:
    bound = record.summary.max_lag_bound if record.summary else record.status.get("max_lag")
    return histogram("Trained tokens by lag, whole run", record.histogram("lag/token"),
                     x_label="lag (optimizer steps)", y_label="tokens",
                     bound=(f"bound {bound}", bound) if isinstance(bound, int) else None)


def _drops(record: RunRecord) -> Chart | None:
    return category_bars("Groups not trained on", _totals(record, "dropped/"), unit="whole run")


def _learner_times(record: RunRecord) -> Chart | None:
    return category_bars("Where the learner's time went", _totals(record, "time/", LEARNER_TIMES), unit="whole run",
                         show=duration)


SECTIONS: Mapping[str, Sequence[Callable[[RunRecord], Chart | None]]] = {
    "Learning": (
        _evaluations,
        Lines("Loss", "loss", {"supervised/loss": "training", "supervised/held_out_loss": "held out"}),
        Lines("Pairs in the right order", "fraction", {"supervised/accuracy": "training",
                                                       "supervised/held_out_accuracy": "held out"}),
        Lines("Rewards of the answers", "reward", {"supervised/chosen_reward": "chosen",
                                                   "supervised/rejected_reward": "rejected"}),
        Lines("Reward", "reward", {"reward/mean": "sampled", "reward/trained": "trained on, after filters"},
              as_score=True),
        Lines("Spread of the reward", "reward", {"reward/std": "standard deviation"}, from_zero=True),
        Lines("Groups with equal rewards, which teach nothing", "fraction",
              {"group/zero_std_fraction": "completed", "group/zero_std_trained": "trained on"}, from_zero=True),
        Lines("Groups that were not trained on", "fraction", {
            "group/filtered_fraction": "filtered", "group/stale_fraction": "too old",
            "group/failed_fraction": "failed"}, from_zero=True, unless_zero=True),
        Lines("Response length", "tokens", {"rollout/response_tokens/train": "training",
                                            "eval/response_tokens": "evaluation"}, from_zero=True),
        Lines("Cut by a length or turn limit", "fraction", {"rollout/length_clip_ratio/train": "training",
                                                            "eval/truncated_fraction": "evaluation"},
              from_zero=True, unless_zero=True),
        Lines("Parts of the reward", "reward", lambda record: _family(record, "reward/", OF_ALL_REWARD)),
    ),
    "Staleness": (
        _lag_shares,
        _lag_histogram,
        Lines("Effective sample size", "fraction", {"ess/token": "token", "ess/sequence": "sequence",
                                                    "ess/sequence_clipped": "sequence, clipped"}),
        Lines("Drift from the behavior policy", "nats, log scale",
              {"drift/k3": "KL (k3)", "drift/m2": "mean squared log-ratio"}, log=True),
        Lines("Mean importance ratio", "ratio", {"ratio/mean_token": "token", "ratio/mean_sequence": "sequence"}),
        Lines("Largest importance ratio", "ratio, log scale", {"ratio/max": "token"}, log=True),
        Lines("Lead and bound of the staleness control", "steps", {"control/max_lag": "bound", "control/eta": "lead"},
              smoothed=False, from_zero=True, unless_constant=True),
        _drops,
    ),
    "Speed": (
        Lines("Throughput", "tokens/s", {"throughput/train_tokens_per_s": "trained",
                                         "throughput/generate_tokens_per_s": "generated"}, from_zero=True),
        Lines("Generated by each actor", "tokens/s",
              lambda record: dict(list(_family(record, "actors/").items())[:8]), from_zero=True),
        Lines("Idle", "fraction", {
            "time/learner_idle_fraction": "learner waits for data",
            "time/actor_idle_fraction": "engines without a sequence",
            "time/actor_starved_fraction": "of that, without a lease"}, from_zero=True),
        Lines("What interrupts generation", "fraction", {
            "time/environment_fraction": "episodes in their environments",
            "time/actor_install_fraction": "engines paused by installs"}, from_zero=True),
        _learner_times,
        Lines("Groups in the system", "groups", {
            "hub/num_groups_queued": "wait for training", "hub/num_leases_open": "being generated",
            "hub/num_groups_ready": "wait for an actor"}, from_zero=True),
        Lines("From publishing to use", "s, log scale", {"time/visible_s": "until actors sample with it",
                                                         "time/install_s": "of that, the installation"}, log=True),
        Lines("Failed episodes", "episodes", {"hub/num_episodes_failed": "since the start"}, smoothed=False,
              from_zero=True, unless_zero=True),
    ),
    "Optimization": (
        Lines("Gradient norm", "norm", {"policy/grad_norm": "policy", "critic/grad_norm": "critic"}, from_zero=True),
        Lines("Gradient along the previous step's", "cosine", {"policy/grad_cosine": "policy"}),
        Lines("Entropy", "nats", {"entropy/mean": "policy"}, from_zero=True),
        Lines("Learning rate", "rate", {"policy/lr": "policy"}, smoothed=False, from_zero=True),
        Lines("Clipped tokens", "fraction", {"clip/positive": "positive advantage",
                                             "clip/negative": "negative advantage"}, from_zero=True),
        Lines("KL to the reference model", "nats", {"kl/value": "k3"}, unless_zero=True),
        Lines("KL to the teacher", "nats", {"distill/kl": "k3"}, unless_zero=True),
        Lines("Weights of the loss", "coefficient", {"kl/coef": "KL", "entropy/coef": "entropy"}, smoothed=False,
              unless_zero=True),
        Lines("Explained variance of the critic", "fraction", {
            "critic/explained_variance": "of its targets", "critic/return_explained_variance": "of the returns"}),
        Lines("Policy loss", "loss", {"policy/loss": "loss"}),
        Lines("Shadow algorithms: cosine to the gradient in use", "cosine", lambda record: _shadows(record, "cosine")),
        Lines("Shadow algorithms: norm of the gradient by log-probs", "norm, log scale",
              lambda record: {**_shadows(record, "grad_norm"), "shadow/grad_norm": "in use"}, log=True),
    ),
    "System": (
        Lines("CPU and GPU use", "%", {
            "system/cpu_percent": "host of the learner, all cores", "system/gpu_percent": "GPU of the learner",
            "system/learner_cpu_percent": "learner, 100 is one core", "hub/actor_cpu_percent": "busiest actor's host",
            "hub/actor_gpu_percent": "busiest actor's GPU"}, from_zero=True),
        Lines("Memory of the learner", "GB", {
            "system/rss_bytes": "resident", "system/gpu_allocated_bytes": "GPU, peak allocated",
            "system/gpu_reserved_bytes": "GPU, reserved"}, scale=1e-9, from_zero=True, smoothed=False),
    ),
}


def write_report(run_dir: str | os.PathLike[str]) -> Path:
    """Write `report.html` into the run directory; works for finished, running and killed runs.

    Raises:
        RunNotFoundError: the run has no `metrics.jsonl`.
    """
    record, damaged = read_run(run_dir), list[str]()
    said, out = samples_html(read_samples(run_dir, damaged)), Path(run_dir) / "report.html"
    write_atomic(out, report_page(replace(record, damaged=[*record.damaged, *damaged]), said))
    return out


def report_page(record: RunRecord, said: str = "") -> str:
    """The page: result first, then the curves, then what the model said (HTML), then what one looks up."""
    charts = [Section(title, charts_html(draw(record) for draw in drawn)) for title, drawn in SECTIONS.items()]
    return page(record.name, [
        headline.title(record), headline.tiles(record), headline.messages(record),
        sectioned([*charts, Section("Samples", said), Section("Details", headline.details(record))], [record]),
    ])


def evaluation_curves(record: RunRecord, name: str = "score", run: int = 0) -> list[Curve]:
    steps, scores, errors = record.evaluations()
    return [Curve(name, steps, scores, run, dots=True, errors=errors if any(errors) else (), run=run)] if steps else []


def shared_limits(record: RunRecord) -> tuple[float, float] | None:
    """0 to 1 if every reward and score is a share, so that the two charts can be compared; else None."""
    values = [value for key in ("eval/score", "reward/mean", "reward/trained") for value in record.series(key)[1]]
    return (0.0, 1.03) if values and all(0 <= value <= 1 for value in values) else None


def _family(record: RunRecord, prefix: str, without: Sequence[str] = ()) -> dict[str, str]:
    return {key: key[len(prefix) :] for key in record.keys() if key.startswith(prefix) and key not in without}


def _shadows(record: RunRecord, key: str) -> dict[str, str]:
    parts = {one: one.split("/") for one in record.keys() if one.startswith("shadow/")}
    named = [(one, name[0]) for one, (_, *name, last) in parts.items() if name and last == key]
    return dict(named[:7])  # beside the one in use, as many as a chart can tell apart


def _totals(record: RunRecord, prefix: str, only: Sequence[str] | None = None) -> dict[str, float]:
    totals = {}
    for key, name in _family(record, prefix).items():
        name = name.removesuffix("_s") if prefix == "time/" else name
        total = sum(record.series(key)[1])
        if total > 0 and (only is None or name in only):
            totals[name.replace("forward_backward", "forward, backward").replace("_", " ")] = total
    return totals


# --- a run in five lines, and as a small picture for a notebook -------------------------------------------------------

MAX_POINTS = 200
STYLE = (
    ".streamrl-run{font:13px sans-serif}.streamrl-run pre{background:none;margin:0}"
    ".streamrl-run figcaption{font-weight:bold}"
    ".streamrl-run figure{display:inline-block;width:400px;margin:8px 12px 0 0}"
    ".streamrl-run .newest{float:right}.streamrl-run text{font:12px sans-serif;fill:currentColor}"
    ".streamrl-run .grid,.streamrl-run .axis{stroke:#8886}.streamrl-run .curve{fill:none;stroke:#2a78d6;stroke-width:2}"
    ".streamrl-run .faint{stroke-width:1;opacity:.3}.streamrl-run .errors{stroke:#2a78d6;opacity:.6}"
    ".streamrl-run .dots{stroke:#2a78d6;stroke-width:6;stroke-linecap:round}"
)


def run_text(record: RunRecord, directory: Path) -> str:
    """Describe a run: name and state, model and task, steps, evaluation and report."""
    report = directory / "report.html"
    about = " on ".join(part for part in (headline.model(record), headline.task(record)) if part)
    rows = [
        ("run", f"{record.name}, {headline.STATES.get(record.state, record.state)}"), ("model", about or "-"),
        ("steps", _steps(record)), ("evaluation", _evaluation(record)),
        ("report", str(report)) if report.exists() else ("directory", str(directory)),
    ]
    return "\n".join(f"{label:<11} {value}" for label, value in rows)


def run_html(record: RunRecord, directory: Path) -> str:
    """The same lines, with the curves of evaluation and reward."""
    limits = shared_limits(record)
    steps, scores, errors = record.evaluations()
    every = max(1, math.ceil(len(steps) / MAX_POINTS))
    steps, scores, errors = steps[::every], scores[::every], errors[::every]
    evaluation = [Curve("score", steps, scores, dots=True, errors=errors if any(errors) else ())]
    reward = noisy(Curve("reward", *thin(*record.judged("reward/mean"), MAX_POINTS)))
    charts = [line_chart(title, curves, x_label="step", y_label=unit, fixed=limits, x_end=record.step)
              for title, unit, curves in (("Evaluation score", "score", evaluation), ("Reward", "reward", reward))]
    return (f'<div class="streamrl-run"><style>{STYLE}</style><pre>{escape(run_text(record, directory))}</pre>'
            f'{"".join(chart.html() for chart in charts if chart)}</div>')


def _steps(record: RunRecord) -> str:
    total, wall_s = record.setting("trainer.num_steps"), record.last("run/wall_s", math.nan)
    took = f" in {duration(wall_s)}" if math.isfinite(wall_s) else ""
    return f"{record.step}" + (f" of {total}" if total else "") + took


def _evaluation(record: RunRecord) -> str:
    scores = record.evaluations()[1]
    if scores:
        return f"{compact(scores[0])} → {compact(scores[-1])}, best {compact(max(scores))}"
    held_out = [(label, values[0], values[-1]) for name, label in MEASURED.items()
                if name.startswith("held_out") and (values := record.values(f"supervised/{name}"))]
    return in_words([*record.set_scores(), *held_out]) or "none"
