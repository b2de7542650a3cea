"""Rank 0's record of the run: one row per step into the sinks, the summary and the report at the end."""

from __future__ import annotations

import logging
import math
import platform
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.metadata import version as package_version
from pathlib import Path
from typing import Any

import msgspec
import torch

from learner.record.hub_counts import HubCounts
from learner.record.pareto import ParetoArchive
from streamrl.config.load import to_plain, to_yaml
from streamrl.config.rules import largest_max_lag, tracker_names
from streamrl.config.schema import Config, EvalConfig, ObjectivesConfig
from streamrl.messages import EvalResult, HubStatus
from streamrl.metrics.eval_scores import Estimate, estimates
from streamrl.metrics.files import append_lines, if_it_can_be_written, write_atomic
from streamrl.metrics.meter import Meter
from streamrl.metrics.names import ARRIVED, member, of_set
from streamrl.metrics.run_record import read_metrics
from streamrl.metrics.samples import Sample
from streamrl.metrics.sinks import ConsoleSink, FanOut, JsonlSink, Sink, TrackedRun, storable
from streamrl.metrics.summary import Summary, results_of, summarize
from streamrl.metrics.trackers.registry import open_trackers
from streamrl.named_code import sign
from streamrl.report.report import write_report

log = logging.getLogger("streamrl.learner")

EVALUATIONS = "evaluations.jsonl"
"""In the run directory: one line for each evaluation, with the scores of every prompt's answers."""
ARTIFACTS = ("model", "adapter", "critic", "config.yaml", "summary.json", "report.html")
"""Parts of the run directory that `tracking.artifacts` gives to trackers."""
_RENAMED = {
    "tokens_per_s_generate": "throughput/generate_tokens_per_s", "mean_install_s": "time/install_s",
    "mean_pause_s": "time/install_pause_s", "mean_visible_s": "time/visible_s",
}


MAX_ACTORS = 32
"""More have no metric of their own: a row would outgrow its use."""


class Recorder:
    """Writer of rows, summary and report; of a resumed run, `wall_s` is what earlier parts took, and `counters` are
    the hub's at the start; `kind` is the trainer of a run that is not RL."""

    def __init__(
        self, config: Config, run_dir: Path, run_id: str, *, resume_step: int | None, wall_s: float,
        trained_tokens: int, device: str, dtype: str, counters: Mapping[str, float] | None = None, kind: str = "",
    ) -> None:
        self._config, self._run_dir, self._run_id = config, run_dir, run_id
        self._device, self._dtype, self._kind = device, dtype, kind
        self._wall_before, self._began = wall_s, time.monotonic()
        self.trained_tokens = trained_tokens
        self._waiting: dict[str, float] = {}
        self._ended: dict[tuple[int, str], dict[str, float]] = {}  # version and set: an evaluation without a row
        self._newest: list[Sample] = []
        write_atomic(run_dir / "config.yaml", to_yaml(config))
        sign(run_dir / "config.yaml")
        self._hub_counts = HubCounts(counters)
        self._archive = _archive(config.objectives, run_dir)
        sinks: list[Sink] = [JsonlSink(run_dir / "metrics.jsonl", resume_step)]
        if config.launch.debug or not config.launch.in_process:  # else the terminal is the live display's
            sinks.append(ConsoleSink(config.trainer.num_steps))
        tracking = config.tracking
        run = TrackedRun(run_id, run_dir, tracking.project, resume_step, to_plain(tracking))
        self._sinks = FanOut([*sinks, *open_trackers(tracker_names(config), run)])
        self._sinks.log_config({**to_plain(config), "versions": _versions()})

    @property
    def wall_s(self) -> float:
        """Seconds since the run began, resumed parts included."""
        return self._wall_before + time.monotonic() - self._began

    def evaluated(self, result: EvalResult, settings: EvalConfig) -> None:
        """Note a result for the next rows and for the file of evaluations; `settings` are those of its set."""
        name = f" on {result.dataset}" if result.dataset else ""
        if result.num_unanswered:
            log.warning(
                "evaluation of version %d%s: %d answers were skipped, because newer versions had waited for "
                "eval.pin_s=%g; raise it, or ask fewer prompts", result.version, name, result.num_unanswered,
                settings.pin_s,
            )
        if not result.num_prompts:
            return
        log.info(
            "evaluation of version %d%s: %.3f over %d prompts", result.version, name, result.score, result.num_prompts
        )
        if self._archive is not None and not result.dataset:
            with if_it_can_be_written("the Pareto archive"):
                self._waiting.update(self._archive.add(result.version, {"reward": result.reward, **result.scores}))
        found = estimates(
            result.prompt_scores, result.prompt_answers, num_responses=settings.num_responses,
            solved=settings.solved_score,
        )
        keys = eval_keys(result, found, settings.num_responses)
        self._ended.setdefault((result.version, result.dataset), keys)
        with if_it_can_be_written(EVALUATIONS):
            append_lines(self._run_dir / EVALUATIONS, msgspec.json.encode({
                "dataset": result.dataset, "version": result.version, "score": result.score,
                "estimates": {name: [one.value, one.stderr, one.num_prompts] for name, one in found.items()},
                "scores": result.prompt_scores, "named": result.scores, "sampled_by": result.versions,
                "num_unanswered": result.num_unanswered,
            }) + b"\n")

    def step(self, step: int, meter: Meter, status: HubStatus | None, *, version: int, epoch: int) -> None:
        """Flush one step's row; `status` is None in a run without a hub."""
        row = meter.flush(step)
        tokens = float(row.get("policy/num_tokens", 0.0))
        self.trained_tokens += int(tokens)
        seconds = float(row.get("time/step_s", 0.0))
        if seconds > 0:
            row["throughput/train_tokens_per_s"] = tokens / seconds
            row["throughput/trajectories_per_s"] = float(row.get("policy/num_trajectories", 0.0)) / seconds
            if not self._kind:  # whose data are at hand
                row["time/learner_idle_fraction"] = float(row.get("time/wait_s", 0.0)) / seconds
        num_trained = float(row.get("policy/num_groups", 0.0))
        of_hub = {**self._counted(status, num_trained), **actor_rates(status)} if status is not None else {}
        self.write(step, {**row, **self._run_keys(version, epoch), **of_hub})

    def _counted(self, status: HubStatus, num_trained: float = 0.0) -> dict[str, float]:
        return {**self._hub_counts.since_last(status.counters, num_trained=num_trained), **hub_keys(status)}

    def write(self, step: int, row: Mapping[str, Any]) -> None:
        row = {key: value for key, value in row.items() if key != "step"}
        of_run = {key: value for key, value in row.items() if key.startswith("run/")}
        first, *later = self._rows_of_evaluations()
        self._sinks.log_metrics(step, storable({**row, **self._waiting, **first}))
        self._waiting.clear()
        for evaluations in later:
            self._sinks.log_metrics(step, storable({**of_run, **evaluations}))

    def _rows_of_evaluations(self) -> list[dict[str, float]]:
        """Evaluations that have ended since the last row: at most one of each set in a row, the newest last."""
        rows, num_of_set = [dict[str, float]()], Counter[str]()
        for version, dataset in sorted(self._ended):
            if num_of_set[dataset] == len(rows):
                rows.append({})
            rows[num_of_set[dataset]].update(self._ended[version, dataset])
            num_of_set[dataset] += 1
        self._ended.clear()
        return rows

    def samples(self, step: int, samples: Sequence[Sample], *, last: bool = False) -> None:
        """Give trackers a table with every evaluation: its transcripts, and the samples of the newest step."""
        trained = [one for one in samples if one.kind == "train"]
        self._newest = [one for one in trained if one.step == trained[-1].step] if trained else self._newest
        evaluated = [one for one in samples if one.kind == "eval"]
        if evaluated or (last and self._newest):
            self._sinks.log_samples(step, [*evaluated, *self._newest])
            self._newest = []

    def _run_keys(self, version: int, epoch: int) -> dict[str, float]:
        return {
            "run/version": float(version), "run/epoch": float(epoch), "run/wall_s": self.wall_s,
            "run/trained_tokens": float(self.trained_tokens),
        }

    def close(
        self, step: int, status: HubStatus | None, *, version: int, epoch: int, stopped: str = "", failed: str = ""
    ) -> Summary:
        """The last row (an evaluation may still wait for one), summary.json and report.html.

        Args:
            stopped: why the run ends before its last step.
            failed: the error that ends it.
        """
        if status is not None:
            self.write(step, {**self._run_keys(version, epoch), **self._counted(status)})
        counters = status.counters if status is not None else {}
        rows = read_metrics(self._run_dir / "metrics.jsonl")
        summary = summarize(
            rows, run_id=self._run_id, run=self._run_dir.resolve().name,
            max_lag_bound=largest_max_lag(self._config), device=self._device, dtype=self._dtype,
            seed=self._config.run.seed, steps=step, wall_s=self.wall_s,
            num_lag_violations=int(counters.get("num_lag_violations", 0)),
            first_failure=status.first_failure if status is not None else "",
            stopped=stopped, failed=failed, tracked=tuple(self._sinks.places()),
            extra={
                "num_groups_dropped": int(counters.get("num_groups_dropped", 0)), "learner_epoch": epoch,
                **({"kind": self._kind, **results_of(rows)} if self._kind else {}),
            },
        )
        with if_it_can_be_written("summary.json"):
            summary.write(self._run_dir / "summary.json")
        with if_it_can_be_written("the report"):
            log.info("report: %s", write_report(self._run_dir))
        for name in ARTIFACTS if self._config.tracking.artifacts else ():
            if (path := self._run_dir / name).exists():
                self._sinks.log_artifact(path)
        self._sinks.close()
        return summary


def eval_keys(result: EvalResult, found: Mapping[str, Estimate], num_responses: int) -> dict[str, float]:
    """An evaluation under the names of its metrics; `found` are its estimates, as avg@4 and pass@4."""
    keys = {
        "eval/score": result.score, "eval/score_stderr": found[f"avg@{num_responses}"].stderr,
        "eval/reward": result.reward, "eval/response_tokens": result.mean_tokens,
        "eval/truncated_fraction": result.truncated_fraction, "eval/num_turns": result.mean_turns,
        "eval/num_prompts": float(result.num_prompts), "eval/version": float(result.version),
    }
    if num_responses > 1:
        for key, name in (("pass_at_1", "pass@1"), ("pass_at_k", f"pass@{num_responses}"),
                          ("maj_at_k", f"maj@{num_responses}")):
            keys |= {f"eval/{key}": found[name].value, f"eval/{key}_stderr": found[name].stderr}
    prefix = f"{result.dataset}." if result.dataset else ""
    parts = {member("eval_parts", prefix + name): value for name, value in result.scores.items() if name != "score"}
    return {of_set(key, result.dataset): value for key, value in keys.items()} | parts


def hub_keys(status: HubStatus) -> dict[str, float]:
    """The hub's counters under their metric names."""
    return {
        _RENAMED.get(name, f"hub/{name}"): value for name, value in status.counters.items()
        if (name in _RENAMED or math.isfinite(value)) and not name.startswith(ARRIVED)
    }


def actor_rates(status: HubStatus) -> dict[str, float]:
    """`actors/<id>`: what each actor generates, of at most `MAX_ACTORS`."""
    return {member("actors", actor_id): rate for actor_id, _, rate, _ in sorted(status.actors)[:MAX_ACTORS]}


def _archive(objectives: ObjectivesConfig, run_dir: Path) -> ParetoArchive | None:
    """None for one component, which has no front but only a best evaluation."""
    if len(objectives.components) < 2:
        return None
    return ParetoArchive(
        run_dir / "pareto.json", objectives.components, size=objectives.archive_size,
        reference=objectives.reference_point if 2 <= len(objectives.reference_point) <= 4 else {},
    )


def _versions() -> dict[str, str]:
    names = ("torch", "transformers", "pyzmq", "msgspec", "numpy")
    return {"python": platform.python_version(), **{name: package_version(name) for name in names},
            "threads": str(torch.get_num_threads())}
