"""A run's log opened for training again: the trainer of the run at a version, and the batches from there on."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from envs.registry import task_of
from learner.checkpoint.checkpoint import Checkpoint, ResumeState, checkpoint_at, write_checkpoint
from learner.control.staleness import StalenessControl
from learner.loop.retrain import Retrained, retrain
from learner.loop.steering import Steering
from learner.model.adapter.lora import AdapterOf
from learner.model.config_file import policy_vocab_size
from learner.objective.plan import BatchPlan
from learner.objective.statistics import StepStatistics
from learner.publish.publisher import WeightDigests
from learner.ranks.mesh import Ranks
from learner.setup.device import environment, start_ranks
from learner.setup.inputs import fit_to_records, prepare_inputs, starting_model
from learner.setup.publishing import published_parameters
from learner.setup.trainer import load_trainer, make_staleness
from learner.sources.log import LogSource
from learner.trainer import Trainer
from streamrl.commands import say
from streamrl.config.load import load_run_config, settings_then, to_plain
from streamrl.config.overrides import leaves, read_files
from streamrl.config.schema import Config
from streamrl.errors import ControlError
from streamrl.parent_watch import program
from streamrl.stream.history import History, LoggedBatch
from streamrl.stream.records import RunStarted
from streamrl.stream.segments import ANYWHERE, read_records

log = logging.getLogger("streamrl.replay")


@dataclass
class OpenedRun:
    """A run without hub and actors: what its learner was at `version`, and the log after it.

    Attributes:
        version: of the trainer now; it moves as it trains.
        history: all of the log that is there.
        settings: those of its starts, by the version from which on they trained; empty: `config` holds for all.
        since: the one of these versions whose settings hold now.
    """

    run_dir: Path
    config: Config
    model_dir: Path
    vocab_size: int
    history: History
    trainer: Trainer
    staleness: StalenessControl
    adapter: AdapterOf | None = None
    settings: Mapping[int, Config] = field(default_factory=dict)
    since: int = 0

    @property
    def version(self) -> int:
        return self.trainer.version

    @property
    def ranks(self) -> Ranks:
        return self.trainer.ranks

    def batches(self, *, upto: int | None = None) -> list[LoggedBatch]:
        """Batches that were trained from the present version on, up to the one that leads to `upto`."""
        return [
            one for one in self.history.batches
            if one.cut.version >= self.version and one.trained and (upto is None or one.cut.version < upto)
        ]

    def train(
        self, *, upto: int | None = None, compare: bool = True, without: frozenset[int] = frozenset(),
        on_planned: Callable[[BatchPlan, StepStatistics], None] | None = None,
    ) -> Iterator[Retrained]:
        """Train on the log's batches; each is yielded once it is trained, compared with the run if asked.

        Args:
            on_planned: called with the plan of each batch before it is trained.
        """
        for change in sorted(self.settings):
            if change > self.since and (upto is None or change < upto):
                yield from self._train(change, compare, without, on_planned)
                if self.version >= change:
                    self._change(change)
        yield from self._train(upto, compare, without, on_planned)

    def _train(
        self, upto: int | None, compare: bool, without: frozenset[int],
        on_planned: Callable[[BatchPlan, StepStatistics], None] | None,
    ) -> Iterator[Retrained]:
        history = replace(self.history, batches=self.batches(upto=upto))
        source = LogSource(
            history, self.ranks, vocab_size=self.vocab_size, max_tokens=self.trainer.settings.max_tokens,
            check_rewards=self.trainer.objective.reward_rules.check, without=without,
        )
        steering = Steering(self.staleness, self.ranks, self.trainer.clock)
        with closing(self._digests()) as digests:
            yield from retrain(
                self.trainer, source, steering, published=self.history.published if compare else {}, digests=digests,
                on_planned=on_planned,
            )

    def _change(self, since: int) -> None:
        """Go on as a start of the run with other settings did, from a checkpoint."""
        ranks, folder = self.ranks, b""
        if ranks.rank == 0:
            folder = tempfile.mkdtemp(prefix="streamrl-").encode()
        where = Path(ranks.bytes_from_rank_zero(folder).decode())
        try:
            saved = self.save(where)
            config = deepcopy(self.settings[since])
            del self.trainer, self.adapter  # before the next one's networks are made
            gc.collect()
            other = open_run(self.run_dir, config=config, begin=saved, ranks=ranks)
            ranks.barrier()
        finally:
            if ranks.rank == 0:
                shutil.rmtree(where, ignore_errors=True)
        self.config, self.trainer, self.staleness, self.adapter, self.since = (
            other.config, other.trainer, other.staleness, other.adapter, since
        )

    def difference(self) -> str | None:
        """The difference to the weights that the run published as this version, "" if none; None: it did not."""
        with closing(self._digests()) as digests:
            manifest = self.history.published.get(self.version)
            return None if manifest is None else digests.difference(self.version, manifest)

    def save(self, folder: Path) -> Checkpoint:
        """A checkpoint of now in a folder, for `open_run(begin=...)`; a collective call."""
        trainer, adapter = self.trainer, self.adapter
        moves = bool(trainer.settings.sync_reference_every)
        write_checkpoint(
            folder, self.version, trainer.networks.tensors(reference_moves=moves), self.ranks, blobs={}, num_keep=1,
            extra={
                "adapter": adapter.to_plain() if adapter is not None else None,
                "controls": {**trainer.objective.to_plain(), "staleness": self.staleness.to_json()},
            },
        )
        saved = checkpoint_at(folder, self.version)
        assert saved is not None
        return saved

    def _digests(self) -> WeightDigests:
        return WeightDigests(
            published_parameters(self.trainer.networks.policy, self.config.policy.lora), self.ranks,
            wire_dtype=self.trainer.settings.wire_dtype, bucket_bytes=self.config.publish.bucket_bytes,
        )

    def other_environment(self) -> list[str]:
        """List differences from the environments of all starts: with any, weights need not be equal bit by bit."""
        now = environment(self.ranks)
        return sorted({
            f"{name} {then} then, {now.get(name, 'nothing')} now"
            for start in self.history.starts for name, then in start.environment.items() if now.get(name) != then
        })


def open_run(
    run_dir: Path, words: Sequence[str] = (), *, at_most: int = 0, ranks: Ranks | None = None,
    config: Config | None = None, own: Config | None = None, begin: Checkpoint | None = None,
) -> OpenedRun:
    """Open a run at its newest checkpoint up to version `at_most`, else at the model that it started from.

    Args:
        words: settings that replace the run's own.
        config: all settings, in place of the run's own and `words`.
        own: the run's own, where `config` are these with others on top: what a resume changed is changed there, too.
        begin: the checkpoint to open it at.
    Raises:
        ControlError: it has no log, or none that reaches back to a version that is there.
        LogError: its log is damaged.
    """
    history, settings = History.read(run_dir), dict[int, Config]()
    if config is None:
        config = load_run_config(run_dir, words)
        typed = [word.lstrip("+~").partition("=")[0] for word in read_files(words)]
        settings = _of_starts(config, typed, history) if "algorithm" not in typed else {}
    elif own is not None:
        was = dict(leaves(to_plain(own)))
        settings = _of_starts(config, [k for k, v in leaves(to_plain(config)) if was.get(k, was) != v], history)
    checkpoint = begin or _begin(run_dir, history, at_most)
    since = max((one for one in settings if one <= (checkpoint.version if checkpoint else 0)), default=0)
    config = deepcopy(settings.get(since, config))
    ranks = ranks or start_ranks(config.run, config.learner)
    torch.manual_seed(config.run.seed)
    prepare_inputs(config, ranks.device)
    task = task_of(config)
    fit_to_records(config, task)
    model_dir = starting_model(config, task, ranks, run_dir)
    past = ResumeState(history.starts[-1].run_id) if checkpoint is None else ResumeState(
        history.starts[-1].run_id, checkpoint.version, checkpoint=checkpoint
    )
    staleness = make_staleness(config, past.controls)
    trainer, adapter = load_trainer(config, model_dir, past, staleness, ranks)
    return OpenedRun(
        run_dir, config, model_dir, policy_vocab_size(model_dir), history, trainer, staleness, adapter, settings,
        since,
    )


def _of_starts(config: Config, keep: Sequence[str], history: History) -> dict[int, Config]:
    """The settings of a run by the version from which on they held; the first ones also hold for what was before."""
    found, last = dict[int, Config](), None
    for number, (version, told) in enumerate(history.settings().items()):
        then = settings_then(config, told, keep, f"the log of {history.run_dir}")
        if then != last:
            found[version if number else 0] = last = then
    return found


def _begin(run_dir: Path, history: History, at_most: int) -> Checkpoint | None:
    """The checkpoint to begin from; None for the starting model."""
    checkpoint = checkpoint_at(run_dir, at_most)
    if checkpoint is None and history.first > 1:
        first = min((one.cut.version for one in history.batches), default=0)
        raise ControlError(
            f"the log of {run_dir} begins with the batch for version {first}, and no checkpoint up to version "
            f"{at_most} exists to begin from: ask for a version from {first} on, or keep more (stream.max_gb, "
            "checkpoint.num_keep)"
        )
    if not history.starts:
        raise ControlError(f"the log of {run_dir} holds no start of the run: it cannot be trained again")
    return checkpoint


def notifier(ranks: Ranks) -> Callable[[str], None]:
    """Print lines on the first rank alone."""
    return say if ranks.rank == 0 else lambda text: None


def join_ranks(run_dir: Path, module: str, words: Sequence[str]) -> None:
    """This process becomes the ranks of the run, each of which runs the module again, unless it is one already.

    As many as the run had: sums over ranks have another order for another number. Raises ConfigError: the run's
    settings cannot be used with these words, which one process says better than several.
    """
    load_run_config(run_dir, words)
    records = read_records(run_dir, complete_from=ANYWHERE) if run_dir.is_dir() else ()
    starts = [body for _, body in records if isinstance(body, RunStarted)]
    noted = starts[-1].environment.get("ranks", "1") if starts else "1"
    if (num := int(noted) if noted.isdecimal() else 1) > 1 and "RANK" not in os.environ:
        command = [
            *program("torch.distributed.run"), f"--nproc_per_node={num}", "--standalone", "-m", module, *sys.argv[1:],
        ]
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.execv(command[0], command)


def group_ids(word: str) -> frozenset[int]:
    """The numbers of `--without 17,18`."""
    try:
        return frozenset(int(one) for one in word.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{word} is no list of group numbers: give --without 17,18") from None


def require_groups(batches: Iterable[LoggedBatch], without: frozenset[int]) -> None:
    """Raise ControlError for a group that none of the batches holds."""
    there = {row.group_id for one in batches for row in one.cut.plan} if without else set()
    if missing := sorted(without - there):
        raise ControlError(
            f"--without: no batch that is trained here holds group {missing[0]}; streamrl stream RUN --kind group "
            "lists the groups of a run with the version that each was trained at"
        )
