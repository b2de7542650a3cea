"""Comparison of the parts of a run's record with each other: its log, versions, metrics, evaluations, summary.

Nothing is trained here: records that were edited together, as a reward in its frame, its batch and its row of metrics,
agree. What the weights and the task say of them is for the other levels of `streamrl verify`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from learner.data.trajectories import check_groups, read_groups
from streamrl.config.load import from_plain, run_settings, to_plain
from streamrl.config.overrides import leaves
from streamrl.config.rules import steps_per_batch
from streamrl.errors import WireError
from streamrl.messages import PlanRow
from streamrl.metrics.files import read_lines, read_object
from streamrl.stream.history import History, LoggedBatch
from streamrl.stream.records import Evaluated, RunStarted, StepTaken
from streamrl.stream.segments import ANYWHERE, read_records
from streamrl.weights.manifest import root_of

OF_THE_START = {"run.dir", "checkpoint.resume"}
"""Settings of a start, which may differ from one to the next."""


@dataclass
class Compared:
    """Disagreements in words, and how many things were compared."""

    disagreements: list[str]
    num_rewards: int = 0
    num_versions: int = 0
    num_rows: int = 0
    num_evaluations: int = 0

    def expect(self, where: str, name: str, recorded: Any, found: Any) -> None:
        """Note it unless both are the same."""
        if not same(recorded, found):
            self.disagreements.append(f"{where}: {name} is {recorded}, {found} follows from the log")


def same(recorded: Any, found: Any) -> bool:
    """Whether a recorded value is the one that was found; numbers up to the rounding of sums."""
    if isinstance(recorded, int | float) and isinstance(found, int | float):
        return math.isclose(recorded, found, rel_tol=1e-9, abs_tol=1e-12)
    if isinstance(recorded, Mapping) and isinstance(found, Mapping):
        found = {str(key): value for key, value in found.items()}
        return recorded.keys() == found.keys() and all(same(recorded[key], found[key]) for key in recorded)
    return recorded == found


def compare_records(run_dir: Path) -> Compared:
    """Compare all parts with each other. Raises LogError: the log is damaged."""
    found = Compared([])
    history = History.read(run_dir)
    config = run_settings(run_dir)
    _settings(found, run_dir, history, to_plain(config))
    for version, manifest in history.published.items():
        root = root_of(manifest.layout_digest, manifest.ref, manifest.digest_kind, manifest.digests)
        found.expect(f"version {version}", "its root digest", manifest.root.hex()[:8], root.hex()[:8])
        found.num_versions += 1
    rows, steps = metrics_rows(run_dir), steps_per_batch(config)
    for batch in history.batches:
        if batch.trained:
            _batch(found, history, batch)
    _versions(found, history, steps)
    _rows(found, rows, history, steps)
    _evaluations(found, run_dir)
    return found


def metrics_rows(run_dir: Path) -> dict[int, dict[str, Any]]:
    """The row of metrics of each trained step."""
    lines = read_lines(run_dir / "metrics.jsonl", json.loads)
    return {int(row["step"]): row for _, row in lines if row.get("policy/num_skipped_steps") == 0}


def _settings(found: Compared, run_dir: Path, history: History, settings: Mapping[str, Any]) -> None:
    last = history.starts[-1]
    then = dict(leaves(to_plain(from_plain(json.loads(last.settings)))))  # with those that came since then
    now = dict(leaves(settings))
    for name in sorted((then.keys() | now.keys()) - OF_THE_START):
        if then.get(name) != now.get(name):
            found.disagreements.append(f"config.yaml: {name} differs from the log's last start")
    summary = read_object(run_dir / "summary.json")
    if summary:
        found.expect("summary.json", "run_id", summary.get("run_id"), last.run_id)


def _batch(found: Compared, history: History, batch: LoggedBatch) -> None:
    """The plan of a batch against the frames that it was made from."""
    cut, where = batch.cut, f"the batch for version {batch.cut.version}"
    arrivals = history.arrivals(batch)
    frames = [one.frame for one in arrivals]
    try:
        check_groups(frames, version=cut.version)
        read = read_groups(frames)
    except WireError as error:
        found.disagreements.append(f"{where}: {error}")
        return
    planned = {(one.group_id, one.index): one for one in cut.plan}
    found.expect(where, "its trajectories", sorted(planned), sorted((one.group_id, one.index) for one in read))
    for one in read:
        if (plan := planned.get((one.group_id, one.index))) is None:
            continue
        name = f"{where}, group {one.group_id} member {one.index}"
        found.expect(name, "reward", plan.reward, one.reward)
        found.expect(name, "num_tokens", plan.num_tokens, one.num_tokens)
        found.expect(name, "num_action_tokens", plan.num_action_tokens, one.num_action_tokens)
        found.num_rewards += 1


def _versions(found: Compared, history: History, steps: int) -> None:
    """Every batch begins where the one before ended, and leads to a version that was published or follows."""
    expected = None
    for batch in history.batches:
        where = f"the batch for version {batch.cut.version}"
        if expected is not None:
            found.expect(where, "the version before it", batch.cut.version, expected)
        if batch.step is not None:
            expected = batch.cut.version + (0 if batch.step.skipped else steps)
            found.expect(where, "the version after it", batch.step.version, expected)
    last = history.batches[-1].cut.version + steps
    for version, manifest in history.published.items():
        found.expect(f"version {version}", "the version of its manifest", manifest.ref.version, version)
        if version > last:
            found.disagreements.append(f"version {version} was published, the last batch leads to {last}")


def _rows(found: Compared, rows: Mapping[int, Any], history: History, steps: int) -> None:
    """No row is missing, and none is of a step that was not trained; those before the log's beginning are not seen."""
    known = {one.step.version // steps: one for one in history.batches if one.step is not None and not one.step.skipped}
    for step in sorted(one for one in rows if one not in known and one >= min(known, default=0)):
        found.disagreements.append(f"metrics.jsonl, step {step}: the log has no such step")
    for step, batch in known.items():
        if step in rows:
            _row(found, batch.step, batch.cut.plan, rows[step])
        else:
            found.disagreements.append(f"metrics.jsonl lacks step {step}, which the log has")


def _row(found: Compared, step: StepTaken, plan: Sequence[PlanRow], row: Mapping[str, Any]) -> None:
    where = f"metrics.jsonl, step {row['step']}"
    num_tokens = sum(one.num_action_tokens for one in plan)
    for name, value in {
        "run/version": step.version, "policy/grad_norm": step.grad_norm,
        "policy/num_groups": len({one.group_id for one in plan}), "policy/num_trajectories": len(plan),
        "policy/num_tokens": num_tokens, "reward/trained": fmean(one.reward for one in plan),
        "length/consumed": num_tokens / len(plan),
    }.items():
        found.expect(where, name, row.get(name), value)
    found.num_rows += 1


def _evaluations(found: Compared, run_dir: Path) -> None:
    logged, late, lost = dict[tuple[str, int], Evaluated](), set[tuple[str, int]](), set[tuple[str, int]]()
    for _, one in read_records(run_dir, complete_from=ANYWHERE):
        if isinstance(one, Evaluated):
            logged[one.dataset, one.version] = one
            late.add((one.dataset, one.version))
        elif isinstance(one, StepTaken | RunStarted):
            lost |= late if isinstance(one, RunStarted) else set()
            late.clear()
    for _, line in read_lines(run_dir / "evaluations.jsonl", json.loads):
        name = f"evaluations.jsonl, version {line['version']}" + (f" on {line['dataset']}" if line["dataset"] else "")
        one = logged.get((line["dataset"], line["version"]))
        late.discard((line["dataset"], line["version"]))
        lost.discard((line["dataset"], line["version"]))
        if one is not None:
            found.expect(name, "score", line["score"], one.score)
            found.num_evaluations += 1
    for _, row in read_lines(run_dir / "metrics.jsonl", json.loads):
        one = logged.get(("", int(row.get("eval/version", -1))))
        if one is not None and "eval/score" in row:
            found.expect(f"metrics.jsonl, step {row['step']}", "eval/score", row["eval/score"], one.score)
    summary = read_object(run_dir / "summary.json")
    # A learner that was killed has not heard what its hub noted last; one that went on, or reached its end, has.
    unheard = lost | late if summary.get("stopped") or summary.get("failed") else lost
    own = sorted(version for name, version in logged.keys() - unheard if not name)
    if own and "eval_score_last" in summary:
        found.expect("summary.json", "eval_score_last", summary["eval_score_last"], logged["", own[-1]].score)
