"""The charts of one run, in the order in which one asks: does it learn, how old is the data, what is slow, what steers.

A chart whose metrics the run does not have is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from streamrl.metrics.eval_scores import score_errors
from streamrl.metrics.run_record import RunRecord
from streamrl.metrics.summary import total_histogram
from streamrl.metrics.text import duration
from streamrl.report.charts.bars import category_bars, histogram
from streamrl.report.charts.curve import Curve, noisy
from streamrl.report.charts.lines import line_chart
from streamrl.report.charts.shares import stacked_shares
from streamrl.report.page import section

LEARNER_TIMES = ("wait", "pack", "logprobs", "values", "score", "advantages", "forward_backward", "optimizer", "critic",
                 "publish", "checkpoint", "eval")
OF_ALL_REWARD = tuple(f"reward/{name}" for name in ("mean", "std", "trained", "num", "recent"))
Chart = Callable[..., str]


def chart_sections(record: RunRecord) -> list[tuple[str, str, str]]:
    """(anchor, title, HTML) of every section that has a chart."""
    return drawn_sections({
        "Learning": learning(record), "Staleness": staleness(record), "Speed": speed(record),
        "Optimization": optimization(record), "System": system(record),
    })


def drawn_sections(sections: Mapping[str, Sequence[Chart]]) -> list[tuple[str, str, str]]:
    """(anchor, title, HTML) of each section by its title; those without a chart are left out."""
    drawn = [(title.lower(), title, section(title.lower(), title, charts(figures)))
             for title, figures in sections.items()]
    return [found for found in drawn if found[2]]


def charts(figures: Sequence[Chart]) -> str:
    """Figures two to a row; the first fills a row if their number is odd. Empty if none has data."""
    drawn = [(figure, text) for figure in figures if (text := figure())]
    if not drawn:
        return ""
    texts = [text for _, text in drawn]
    if len(texts) % 2:
        texts[0] = drawn[0][0](wide=True)
    return f'<div class="charts">{"".join(texts)}</div>'


def learning(record: RunRecord) -> list[Chart]:
    limits = shared_limits(record)
    return [
        lambda **more: line_chart(
            "Evaluation score", evaluation_curves(record), x_label="step", y_label="score", fixed=limits,
            x_end=record.step, note=_error_note(record), **more),
        _line(record, "Loss", "loss", {"supervised/loss": "training", "supervised/held_out_loss": "held out"}),
        _line(record, "Pairs in the right order", "fraction", {"supervised/accuracy": "training",
                                                               "supervised/held_out_accuracy": "held out"}),
        _line(record, "Rewards of the answers", "reward", {"supervised/chosen_reward": "chosen",
                                                           "supervised/rejected_reward": "rejected"}),
        _line(record, "Reward", "reward", {"reward/mean": "sampled", "reward/trained": "trained on, after filters"},
              fixed=limits),
        _line(record, "Spread of the reward", "reward", {"reward/std": "standard deviation"}, from_zero=True),
        _line(record, "Groups with equal rewards, which teach nothing", "fraction",
              {"group/zero_std_fraction": "completed", "group/zero_std_trained": "trained on"}, from_zero=True),
        _line(record, "Groups that were not trained on", "fraction", {
            "group/filtered_fraction": "filtered", "group/stale_fraction": "too old",
            "group/failed_fraction": "failed"}, from_zero=True, unless_zero=True),
        _line(record, "Response length", "tokens", {"rollout/response_tokens/train": "training",
                                                    "eval/response_tokens": "evaluation"}, from_zero=True),
        _line(record, "Cut by a length or turn limit", "fraction", {"rollout/length_clip_ratio/train": "training",
                                                                    "eval/truncated_fraction": "evaluation"},
              from_zero=True, unless_zero=True),
        _line(record, "Parts of the reward", "reward",
              _family(record, "reward/", OF_ALL_REWARD)),
    ]


def staleness(record: RunRecord) -> list[Chart]:
    bound = _bound(record)
    tokens = [(row["step"], row["lag/token"]) for row in record.rows if row.get("lag/token")]
    return [
        lambda **more: stacked_shares("Lag of the trained tokens", tokens, x_label="step",
                                      y_label="share of the tokens", name="lag", **more),
        lambda **_: histogram("Trained tokens by lag, whole run", total_histogram(record.rows, "lag/token"),
                              x_label="lag (optimizer steps)", y_label="tokens", bound=bound),
        _line(record, "Effective sample size", "fraction", {"ess/token": "token", "ess/sequence": "sequence",
                                                            "ess/sequence_clipped": "sequence, clipped"}),
        _line(record, "Drift from the behavior policy", "nats, log scale",
              {"drift/k3": "KL (k3)", "drift/m2": "mean squared log-ratio"}, log=True),
        _line(record, "Mean importance ratio", "ratio", {"ratio/mean_token": "token",
                                                         "ratio/mean_sequence": "sequence"}),
        _line(record, "Largest importance ratio", "ratio, log scale", {"ratio/max": "token"}, log=True),
        _line(record, "Lead and bound of the staleness control", "steps", {"control/max_lag": "bound",
                                                                          "control/eta": "lead"},
              smoothed=False, from_zero=True, unless_constant=True),
        lambda **_: category_bars("Groups not trained on", _totals(record, "dropped/"), unit="whole run"),
    ]


def speed(record: RunRecord) -> list[Chart]:
    actors = _family(record, "actors/", ())
    return [
        _line(record, "Throughput", "tokens/s", {"throughput/train_tokens_per_s": "trained",
                                                 "throughput/generate_tokens_per_s": "generated"}, from_zero=True),
        _line(record, "Generated by each actor", "tokens/s", dict(list(actors.items())[:8]), from_zero=True),
        _line(record, "Idle", "fraction", {
            "time/learner_idle_fraction": "learner waits for data",
            "time/actor_idle_fraction": "engines without a sequence",
            "time/actor_starved_fraction": "of that, without a lease"}, from_zero=True),
        _line(record, "What interrupts generation", "fraction", {
            "time/environment_fraction": "episodes in their environments",
            "time/actor_install_fraction": "engines paused by installs"}, from_zero=True),
        lambda **_: category_bars("Where the learner's time went", _totals(record, "time/", LEARNER_TIMES),
                                  unit="whole run", show=duration),
        _line(record, "Groups in the system", "groups", {
            "hub/num_groups_queued": "wait for training", "hub/num_leases_open": "being generated",
            "hub/num_groups_ready": "wait for an actor"}, from_zero=True),
        _line(record, "From publishing to use", "s, log scale", {"time/visible_s": "until actors sample with it",
                                                      "time/install_s": "of that, the installation"}, log=True),
        _line(record, "Failed episodes", "episodes", {"hub/num_episodes_failed": "since the start"}, smoothed=False,
              from_zero=True, unless_zero=True),
    ]


def optimization(record: RunRecord) -> list[Chart]:
    return [
        _line(record, "Gradient norm", "norm", {"policy/grad_norm": "policy", "critic/grad_norm": "critic"},
              from_zero=True),
        _line(record, "Gradient along that of the step before", "cosine", {"policy/grad_cosine": "policy"}),
        _line(record, "Entropy", "nats", {"entropy/mean": "policy"}, from_zero=True),
        _line(record, "Learning rate", "rate", {"policy/lr": "policy"}, smoothed=False, from_zero=True),
        _line(record, "Clipped tokens", "fraction", {"clip/positive": "positive advantage",
                                                     "clip/negative": "negative advantage"}, from_zero=True),
        _line(record, "KL to the reference model", "nats", {"kl/value": "k3"}, unless_zero=True),
        _line(record, "KL to the teacher", "nats", {"distill/kl": "k3"}, unless_zero=True),
        _line(record, "Weights of the loss", "coefficient", {"kl/coef": "KL", "entropy/coef": "entropy"},
              smoothed=False, unless_zero=True),
        _line(record, "Explained variance of the critic", "fraction", {
            "critic/explained_variance": "of its targets", "critic/return_explained_variance": "of the returns"}),
        _line(record, "Policy loss", "loss", {"policy/loss": "loss"}),
        _line(record, "Shadow algorithms: cosine to the gradient in use", "cosine", _shadows(record, "cosine")),
        _line(record, "Shadow algorithms: norm of the gradient by log-probs", "norm, log scale",
              {**_shadows(record, "grad_norm"), "shadow/grad_norm": "in use"}, log=True),
    ]


def system(record: RunRecord) -> list[Chart]:
    return [
        _line(record, "CPU use", "%", {"system/cpu_percent": "host of the learner, all cores",
                                       "system/learner_cpu_percent": "learner, 100 is one core"}, from_zero=True),
        _line(record, "Memory of the learner", "GB", {
            "system/rss_bytes": "resident", "system/gpu_allocated_bytes": "GPU, peak allocated",
            "system/gpu_reserved_bytes": "GPU, reserved"}, scale=1e-9, from_zero=True, smoothed=False),
    ]


def evaluation_curves(record: RunRecord, name: str = "score", run: int = 0) -> list[Curve]:
    steps, scores, errors = score_errors(record.rows)
    return [Curve(name, steps, scores, run, dots=True, errors=errors if any(errors) else (), run=run)] if steps else []


def shared_limits(record: RunRecord) -> tuple[float, float] | None:
    """0 to 1 if every reward and score is a share, so that the two charts can be compared; else None."""
    values = [value for key in ("eval/score", "reward/mean", "reward/trained") for value in record.series(key)[1]]
    return (0.0, 1.03) if values and all(0 <= value <= 1 for value in values) else None


def _error_note(record: RunRecord) -> str:
    nums = record.series("eval/num_prompts")[1]
    return f"bars: ± 1 standard error, n = {nums[-1]:.0f}" if nums and any(score_errors(record.rows)[2]) else ""


def _line(record: RunRecord, title: str, unit: str, keys: Mapping[str, str], *, smoothed: bool = True,
          scale: float = 1.0, unless_zero: bool = False, unless_constant: bool = False, **options: Any) -> Chart:
    """A line chart of metrics, key -> name; without data, or only 0 or one value if so asked, it is empty."""
    def chart(**more: Any) -> str:
        found: list[tuple[str, list[int], list[float]]] = []
        weights: dict[str, list[float]] = {}
        for key, name in keys.items():
            steps, values = record.series(key)
            if values and name not in [other for other, _, _ in found]:  # an old key and a new one for the same
                found.append((name, steps, [scale * value for value in values]))
                weights[name] = record.weights(key)
        everything = [value for _, _, values in found for value in values]
        if (unless_zero and not any(everything)) or (unless_constant and all(len(set(v)) < 2 for _, _, v in found)):
            return ""
        curves = [
            Curve(name, steps, values, color, weights=weights[name])
            for color, (name, steps, values) in enumerate(found)
        ]
        drawn = [one for curve in curves for one in (noisy(curve) if smoothed else [curve])]
        return line_chart(title, drawn, x_label="step", y_label=unit, robust=True, x_end=record.step, **options, **more)

    return chart


def _bound(record: RunRecord) -> tuple[str, int] | None:
    bound = record.summary.max_lag_bound if record.summary else record.status.get("max_lag")
    return (f"bound {bound}", int(bound)) if bound is not None else None


def _family(record: RunRecord, prefix: str, without: Sequence[str]) -> dict[str, str]:
    return {key: key[len(prefix) :] for key in record.keys() if key.startswith(prefix) and key not in without}


def _shadows(record: RunRecord, key: str) -> dict[str, str]:
    parts = {one: one.split("/") for one in record.keys() if one.startswith("shadow/")}
    named = [(one, name[0]) for one, (_, *name, last) in parts.items() if name and last == key]
    return dict(named[:7])  # beside the one in use, as many as a chart can tell apart


def _totals(record: RunRecord, prefix: str, only: Sequence[str] | None = None) -> dict[str, float]:
    totals = {}
    for key, name in _family(record, prefix, ()).items():
        name = name.removesuffix("_s") if prefix == "time/" else name
        total = sum(record.series(key)[1])
        if total > 0 and (only is None or name in only):
            totals[name.replace("forward_backward", "forward, backward").replace("_", " ")] = total
    return totals
