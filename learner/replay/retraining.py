"""The steps of `streamrl verify` that need the run's weights: batches trained again, answers scored again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from envs.registry import task_of
from learner.audit.audit import Audit
from learner.checkpoint.checkpoint import checkpoint_at
from learner.data.trajectories import Trajectory, check_groups, read_groups
from learner.hub.observers.trust import DRAWS_BY_SEED, MAX_OTHER_DRAWS
from learner.loop.retrain import Retrained
from learner.objective.statistics import Agreements
from learner.replay.consistency import metrics_rows, same
from learner.replay.opened import OpenedRun, open_run
from streamrl.environment import DrivesGeneration
from streamrl.messages import GroupOrigin
from streamrl.stream.history import History

GROUPS_PER_BATCH = 8
"""So many groups are scored for each batch that is trained again."""


@dataclass
class Findings:
    """The results of one level: what disagrees, and how much was looked at."""

    disagreements: list[str] = field(default_factory=list)
    num: int = 0
    largest: float = 0.0


class Retraining:
    """The run of an unpacked bundle, trained from the nearest point that is there up to what is asked for.

    Args:
        words: settings that replace the run's own.
    """

    def __init__(self, run_dir: Path, words: list[str], notify: Callable[[str], None]) -> None:
        self._dir, self._words, self._notify = run_dir, words, notify
        self._history = History.read(run_dir)
        self._rows = metrics_rows(run_dir)
        self._run: OpenedRun | None = None
        self.step, self.loss, self.draw = Findings(), Findings(), Findings()
        self.batches: list[int] = []
        """Versions that the chosen batches were trained at."""
        self.other: list[str] = []
        """List differences between the environments of then and now: with any, other weights prove nothing."""
        self.draws_by_seed = False

    def check(self, num: int, random: Random, *, steps: bool, answers: bool) -> None:
        """Train `num` random batches again, and score the answers of random groups under their versions."""
        trained = [one for one in self._history.batches if one.trained and one.step is not None]
        chosen = random.sample(trained, min(num, len(trained))) if steps else []
        self.batches = sorted(one.cut.version for one in chosen)
        groups = self._groups(random, num * GROUPS_PER_BATCH) if answers else {}
        for version in sorted({*self.batches, *groups}):
            run = self._at(version)
            for row in groups.get(version, ()):
                self._score(run, row)
            if version in self.batches:
                self._train(run, version + run.trainer.settings.steps_per_batch)

    def _at(self, version: int) -> OpenedRun:
        """The run at a version: from a checkpoint, or from where it is."""
        checkpoint = checkpoint_at(self._dir, version)
        nearest = checkpoint.version if checkpoint is not None else 0
        if self._run is None or nearest > self._run.version:
            self._notify(f"opening the run at or before version {version}")
            self._run = open_run(self._dir, self._words, at_most=version)
            self.other = self._run.other_environment()
            self._compared(self._run.version, self._run.difference())
        self._train(self._run, version)
        return self._run

    def _train(self, run: OpenedRun, upto: int) -> None:
        for one in run.train(upto=upto):
            self._notify(f"trained up to version {one.version}")
            for version, text in one.versions.items():
                self._compared(version, text)
            if one.trained is not None and not one.trained.result.skipped:
                self._metrics(one)

    def _compared(self, version: int, text: str) -> None:
        if version in self._history.published:
            self.step.num += 1
            self.step.disagreements += [text] if text else []

    def _metrics(self, one: Retrained) -> None:
        """Compare measurements of a step that was trained again with its row of metrics."""
        assert one.trained is not None and self._run is not None
        row = self._rows.get(one.version // self._run.trainer.settings.steps_per_batch)
        if row is None:
            return
        result = one.trained.result
        measured: Mapping[str, Any] = one.trained.measured.flush(int(row["step"])) | {
            "policy/grad_norm": result.grad_norm, "policy/lr": result.lr,
        }
        for name, value in measured.items():
            if name in row and not name.startswith("time/") and value is not None and not same(row[name], value):
                self.step.disagreements.append(
                    f"metrics.jsonl, step {row['step']}: {name} is {row[name]}, training again gives {value}"
                )

    def _groups(self, random: Random, num: int) -> dict[int, list[list[Trajectory]]]:
        """Rows of random groups by the one version that sampled all of their tokens, where training begins by then."""
        found: dict[int, list[list[Trajectory]]] = {}
        run = self._at(self._history.batches[0].cut.version)
        steps = run.trainer.settings.steps_per_batch
        first = run.version
        every = [
            (batch, one) for batch in self._history.batches if batch.trained for one in self._history.arrivals(batch)
        ]
        for batch, one in random.sample(every, len(every)):
            check_groups([one.frame], version=batch.cut.version, vocab_size=run.vocab_size)
            rows = read_groups([one.frame], [GroupOrigin(one.actor_id, one.prompt_index)])
            versions = {int(version) for row in rows for version in set(row.versions[row.mask].tolist())}
            version = min(versions, default=-1)
            if len(versions) == 1 and version >= first and (version - first) % steps == 0:
                found.setdefault(version, []).append(rows)
                num -= 1
            if not num:
                break
        return found

    def _score(self, run: OpenedRun, rows: list[Trajectory]) -> None:
        """Log-probs and draws of a group's tokens under the weights that the trainer has now."""
        config, trainer = run.config, run.trainer
        driven = isinstance(task_of(config).env(), DrivesGeneration)
        self.draws_by_seed = config.actors.engine in DRAWS_BY_SEED and not driven
        audit = Audit(
            trainer.networks.policy, run.ranks, trainer.with_wire_precision, share=1.0, seed=config.run.seed,
            max_lag=0, max_tokens=trainer.settings.max_tokens, redraws=self.draws_by_seed,
        )
        agreements = Agreements(rows)
        audit.published(run.version)
        audit.score(rows, agreements)
        for one in agreements.take(run.ranks):
            name = f"group {rows[0].group_id} of {one.actor_id}, version {run.version}"
            self.loss.num += one.num_tokens
            self.loss.largest = max(self.loss.largest, one.difference)
            if not one.difference <= config.publish.probe_tolerance:
                self.loss.disagreements.append(
                    f"{name}: log-probs differ by {one.difference:.3g} in the mean of {one.num_tokens} tokens, allowed "
                    f"are {config.publish.probe_tolerance:g} (publish.probe_tolerance)"
                )
            self.draw.num += one.num_drawn
            if one.num_other > MAX_OTHER_DRAWS * one.num_drawn:
                self.draw.disagreements.append(
                    f"{name}: {one.num_other} of {one.num_drawn} tokens are not what their seeds draw"
                )
