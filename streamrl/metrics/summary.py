"""`summary.json`: a whole run in one flat object, derived from `metrics.jsonl`."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec

from streamrl.errors import CheckpointError
from streamrl.metrics.diagnosis import diagnosis_of, learner_idle
from streamrl.metrics.files import read_object_of, write_atomic
from streamrl.metrics.rows import Rows
from streamrl.metrics.text import compact, duration, with_error

REISSUED_SHARE = 0.02
"""The share of reissued leases, of all groups, from which they are worth a line in the terminal."""
SUPERVISED = {"sft": "SFT", "dpo": "DPO", "train-reward-model": "reward model"}
"""Trainers other than RL, by their commands."""
MEASURED = {
    "loss": "loss", "held_out_loss": "held-out loss", "accuracy": "accuracy", "held_out_accuracy": "held-out accuracy",
}
"""Names of the metrics that tell their results, without `supervised/`."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Summary:
    """The end of a run. Counts are of the whole run, resumed parts included; None means never measured."""

    run_id: str
    steps: int
    wall_s: float
    eval_score_first: float | None
    eval_score_last: float | None
    lag_mean: float
    """Optimizer steps, over all trained tokens."""
    lag_max: int
    """Largest head lag that was trained on."""
    max_lag_bound: int
    num_lag_violations: int
    """Trajectories trained on beyond the bound; 0 unless the program is wrong."""
    num_groups_leased: int
    num_groups_accepted: int
    num_groups_trained: int
    num_groups_stale: int
    num_duplicates_dropped: int
    num_leases_reissued: int
    num_actor_restarts: int
    trained_tokens: int
    tokens_per_s_train: float
    tokens_per_s_generate: float
    learner_wait_s: float
    publish_s_mean: float
    device: str
    dtype: str
    seed: int
    num_leases_retried: int = 0
    """The part of the reissued leases whose episodes failed in their environment."""
    num_episodes_failed: int = 0
    first_failure: str = ""
    """The first failed episode, in words; of a resumed run, of its last part."""
    run: str = ""
    """Name of the run: its directory's. `run_id` is for programs."""
    eval_score_best: float | None = None
    """Highest of all evaluations."""
    stopped: str = ""
    """Why the run ended before its last step, such as "SIGTERM" or "pruned at step 40"; empty if it did them all."""
    failed: str = ""
    """The error that ended the run; empty if none did."""
    learner_idle_fraction: float | None = None
    """Share of its time that the learner waited for a batch, without the first steps."""
    eval_stderr_first: float | None = None
    """Standard errors of `eval_score_first` and `eval_score_last`, over prompts."""
    eval_stderr_last: float | None = None
    warnings: Sequence[str] = ()
    """Problems that a reader of the results must know, from `warnings_of`."""
    diagnosis: str = ""
    """The bottleneck of the run, from `streamrl.metrics.diagnosis`; empty if it was too short to tell."""
    sandbox_level: int = 0
    """The lowest level of sandbox (docs/sandbox.md) that programs of the model have had; 0 if there were none."""
    tracked: Sequence[str] = ()
    """For each tracker the command that opens the run's record, or where it is."""
    eval_sets: Sequence[tuple[str, float, float]] = ()
    """Name, first and last score of each set of `eval.datasets`."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Anything else; written at the top level after the rest. Runs that are not RL have `kind` and `results_of`."""

    def __post_init__(self) -> None:
        taken = sorted(set(self.extra) & {f.name for f in fields(self)})
        if taken:
            raise ValueError(f"extra may not hold the summary's own fields: {', '.join(taken)}.")

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write JSON atomically: fields in their order, then `extra`."""
        values = {**{name: getattr(self, name) for name in REQUIRED}, **self.extra}
        write_atomic(Path(path), json.dumps(values, indent=2) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Summary:
        """Read what `write` wrote; unknown keys become `extra`.

        Raises:
            CheckpointError: the file cannot be read, is not JSON, or lacks a field or has one of another type.
        """
        data = read_object_of(Path(path))
        missing = [f.name for f in fields(cls) if f.default is MISSING and f.name != "extra" and f.name not in data]
        if missing:
            raise CheckpointError(f"{path} lacks {', '.join(missing)}: it is not a summary of this release.")
        known = {name: data.pop(name) for name in REQUIRED if name in data}
        try:
            return msgspec.convert({**known, "extra": data}, cls)
        except (msgspec.ValidationError, OverflowError) as error:
            raise CheckpointError(f"{path} is no summary ({error}): was it edited? Restore it") from error

    def __repr__(self) -> str:
        return self.table().rstrip()

    def table(self) -> str:
        """The headline as lines for the terminal."""
        rows = self.headline()
        width = max(len(label) for label, _ in rows)
        return "\n".join(f"{label.ljust(width)}  {value}" for label, value in rows) + "\n"

    def headline(self) -> list[tuple[str, str]]:
        """(label, value) pairs, most asked for first."""
        steps = f"{self.steps}, {self.stopped}" if self.stopped else str(self.steps)
        begun = [
            ("run", self.run or self.run_id), *([("failed", self.failed)] if self.failed else []),
            *(("warning", text) for text in self.warnings),
        ]
        ended = [
            ("device", f"{self.device}, {self.dtype}, seed {self.seed}"), *([("id", self.run_id)] if self.run else []),
            *(("tracker", place) for place in self.tracked),
        ]
        if kind := self.extra.get("kind"):
            results = [
                (label, f"{compact(self.extra[f'{name}_first'])} → {compact(self.extra[f'{name}_last'])}")
                for name, label in MEASURED.items() if f"{name}_last" in self.extra
            ]
            return [
                *begun, ("trainer", SUPERVISED.get(kind, kind)), *results, ("steps", steps),
                ("wall time", duration(self.wall_s)), ("tokens trained", compact(self.trained_tokens)),
                ("tokens/s", compact(self.tokens_per_s_train)), *ended,
            ]
        violations = f", {self.num_lag_violations} beyond it" if self.num_lag_violations else ""
        reissued = max(0, self.num_leases_reissued - self.num_leases_retried)
        recovered = ", ".join(f"{count} {what}" for count, what in (
            # A few of them are an actor's pause on a busy machine; the report has them all.
            (reissued if reissued > REISSUED_SHARE * self.num_groups_leased else 0, "leases reissued"),
            (self.num_duplicates_dropped, "duplicates dropped"), (self.num_actor_restarts, "actor restarts"),
        ) if count)  # nothing of it happens in most runs
        stale = f", {self.num_groups_stale} stale" if self.num_groups_stale else ""
        idle = self.learner_idle_fraction
        failures = [("failures", f"{self.num_episodes_failed} episodes failed: {self.first_failure or 'see the logs'}")]
        own = (f"{with_error(self.eval_score_first, self.eval_stderr_first)} → "
               f"{with_error(self.eval_score_last, self.eval_stderr_last)}")
        return [
            *begun,
            ("evaluation", (self.eval_score_last is None and in_words(self.eval_sets)) or own),
            ("steps", steps),
            ("wall time", duration(self.wall_s)),
            ("lag", f"mean {compact(self.lag_mean)}, max {self.lag_max}, bound {self.max_lag_bound}{violations}"),
            ("groups", f"{self.num_groups_trained} trained of {self.num_groups_leased} leased{stale}"),
            *(failures if self.num_episodes_failed else []),
            *([("recovered", recovered)] if recovered else []),
            ("tokens trained", compact(self.trained_tokens)),
            ("tokens/s", f"{compact(self.tokens_per_s_train)} trained, "
                         f"{compact(self.tokens_per_s_generate)} generated"),
            ("learner waited", f"{idle:.0%} of its time" if idle is not None else "-"),
            *([("bottleneck", self.diagnosis)] if self.diagnosis else []),
            *([("sandbox", f"level {self.sandbox_level}")] if self.sandbox_level else []),
            ("publish", f"{duration(self.publish_s_mean)} on average"),
            *ended,
        ]


def in_words(sets: Sequence[tuple[str, float, float]]) -> str:
    """First and last result of each name, for a run that evaluates no set of its own."""
    return ", ".join(f"{name} {compact(first)} → {compact(last)}" for name, first, last in sets)


def warnings_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Problems of a run that went on in spite of them: an evaluation that fell, noise for rewards or values."""
    found, table = [], Rows(rows)
    _, scores, errors = table.evaluations()
    if len(scores) > 1 and scores[0] - scores[-1] > 2 * math.hypot(errors[0], errors[-1]):
        before, after = with_error(scores[0], errors[0]), with_error(scores[-1], errors[-1])
        found.append(f"evaluation fell from {before} to {after}; lower policy.optimizer.lr")
    spreads, means = table.values("reward/std"), table.values("reward/mean")
    if len(spreads) >= ENOUGH_STEPS and not any(spreads) and min(means) == max(means):
        found.append(f"every reward was {compact(means[0])}: equal rewards teach nothing; see streamrl samples")
    longest = _longest(table.values("critic/explained_variance"), lambda value: value < 0)
    if longest >= STEPS_IN_A_ROW:
        found.append(f"the critic predicted worse than a constant for {longest} steps in a row: its advantages were "
                     "noise; raise critic.num_steps, or take an estimator without a critic")
    aligned = _longest(table.values("policy/grad_cosine"), lambda value: value > ALIGNED_COSINE)
    if aligned >= STEPS_IN_A_ROW:
        found.append(f"the gradients of {aligned} steps in a row pointed along the one before (cosine above "
                     f"{ALIGNED_COSINE}): steps overshoot; lower policy.optimizer.lr or staleness.eta")
    if table.last("hub/sandbox_level", 0.0) == 1.0:
        found.append(WEAK_SANDBOX)
    return found


def _longest(values: Sequence[float], holds: Callable[[float], bool]) -> int:
    """The most values in a row for which this holds."""
    return max((len(list(run)) for held, run in groupby(values, key=holds) if held), default=0)


WEAK_SANDBOX = (
    "programs of the model ran at sandbox level 1, which limits but does not isolate: they could read the files of the "
    "actor's user and use the network; install bubblewrap, and allow user namespaces"
)
STEPS_IN_A_ROW = 20
"""With an explained variance below 0, or with aligned gradients; fewer happen while both still learn."""
ALIGNED_COSINE = 0.5
ENOUGH_STEPS = 3
"""With a reward; fewer may be equal by chance."""
REQUIRED = tuple(f.name for f in fields(Summary) if f.name != "extra")
"""Keys of every `summary.json`, in order."""

_COUNTERS = ("num_groups_leased", "num_groups_accepted", "num_groups_trained", "num_groups_stale",
             "num_duplicates_dropped", "num_leases_reissued", "num_actor_restarts", "num_leases_retried",
             "num_episodes_failed")


def summarize(rows: Sequence[Mapping[str, Any]], *, run_id: str, max_lag_bound: int, device: str, dtype: str, seed: int,
              extra: Mapping[str, Any] | None = None, **known: Any) -> Summary:
    """The summary that follows from the lines of `metrics.jsonl`; fields given by name win.

    Rates are totals over the run's wall time, so waiting and evaluation count as time.
    """
    table = Rows(rows)
    tokens, heads = table.histogram("lag/token"), table.histogram("lag/head")
    _, scores, errors = table.evaluations()
    wall_s = float(table.last("run/wall_s", 0.0))
    trained = int(table.last("run/trained_tokens", sum(table.values("policy/num_tokens"))))
    publish = table.values("time/publish_s")
    per_s = 1.0 / wall_s if wall_s else 0.0
    diagnosis = diagnosis_of(rows)
    found: dict[str, Any] = {
        "steps": int(rows[-1]["step"]) if rows else 0,
        "wall_s": wall_s,
        "eval_score_first": scores[0] if scores else None,
        "eval_score_last": scores[-1] if scores else None,
        "eval_score_best": max(scores, default=None),
        "eval_sets": table.set_scores(),
        "eval_stderr_first": errors[0] if scores else None,
        "eval_stderr_last": errors[-1] if scores else None,
        "warnings": warnings_of(rows),
        "lag_mean": sum(k * n for k, n in tokens.items()) / max(1, sum(tokens.values())),
        "lag_max": int(max([0, *heads, *table.values("lag/head_max")])),
        "num_lag_violations": sum(n for k, n in heads.items() if k > max_lag_bound),
        **{name: int(table.total(f"hub/{name}")) for name in _COUNTERS},
        "trained_tokens": trained,
        "tokens_per_s_train": trained * per_s,
        "tokens_per_s_generate": table.total("hub/tokens_generated") * per_s,
        "learner_wait_s": float(sum(table.values("time/wait_s"))),
        "learner_idle_fraction": learner_idle(rows),
        "diagnosis": diagnosis.text if diagnosis else "",
        "sandbox_level": int(table.last("hub/sandbox_level", 0.0)),
        "publish_s_mean": sum(publish) / len(publish) if publish else 0.0,
    }
    return Summary(run_id=run_id, max_lag_bound=max_lag_bound, device=device, dtype=dtype, seed=seed,
                   extra=dict(extra or {}), **{**found, **known})


def results_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Results of a run that is not RL, first and last; of training the last is the mean of the last twentieth."""
    found: dict[str, float] = {}
    table = Rows(rows)
    for name in MEASURED:
        values = table.values(f"supervised/{name}")
        if values:
            tail = values[-1:] if name.startswith("held_out") else values[-max(1, len(values) // 20) :]
            found |= {f"{name}_first": values[0], f"{name}_last": sum(tail) / len(tail)}
    return found
