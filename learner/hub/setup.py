"""A ledger from settings: the task's prompts, the filters, and what checkpoint and log know of the run so far."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

from envs.data.shapes import too_long
from envs.registry import task_of
from learner.hub.context.run_log import RunLog
from learner.hub.context.settings import HubSettings
from learner.hub.ledger.apply import commit
from learner.hub.ledger.ledger import Ledger
from learner.hub.ledger.snapshots import read_snapshot
from learner.hub.ledger.tables.evals import EvalSource
from learner.hub.ledger.tables.filters import GroupFilter, accuracy_range, first_of, zero_std
from learner.hub.ledger.tables.prompts import PromptStream
from streamrl.config.schema import FilterConfig
from streamrl.environment import Task
from streamrl.errors import TaskError
from streamrl.messages.actors import MAX_RECORD_BYTES
from streamrl.stream.records import Record
from streamrl.stream.segments import read_records
from streamrl.stream.writer import LogWriter
from streamrl.transport.peers import LogLimit

log = logging.getLogger("streamrl.hub")
_limited_log = LogLimit(log)


def open_ledger(settings: HubSettings) -> tuple[Ledger, RunLog]:
    """Make a fresh ledger, or the one that a checkpoint and the log after it give; and open the log to append to it."""
    run_dir = Path(settings.run_dir)
    ledger = make_ledger(settings, partial(read_records, run_dir) if settings.started.start > 1 else None)
    for why in ledger.refused_on_resume:
        log.warning("a group of the log cannot be trained and is generated again: %s", why)
    writer = LogWriter(
        run_dir, next_sequence=ledger.journal.first_waiting, fsync=settings.stream.fsync.value,
    )
    commit(ledger, settings.started)
    return ledger, RunLog(settings.stream, run_dir, writer, ledger)


def make_ledger(
    settings: HubSettings, records: Callable[..., Iterable[tuple[int, Record]]] | None = None
) -> Ledger:
    """Make a fresh ledger, or with records of a log the one that they and the checkpoint give."""
    task = task_of(settings)

    prompts = PromptStream(
        task.num_records("train"), seed=settings.run_seed, record=partial(record_of, task, "train"),
        shuffle=settings.data.shuffle,
    )
    arguments = dict(
        settings=settings.ledger, run_id=settings.run_id, learner_epoch=settings.learner_epoch,
        run_seed=settings.run_seed, prompts=prompts, sampling=settings.sampling,
        eval_sources=eval_sources(settings, task),
        keep_group=group_filter(settings.filter, settings.trained_scores) if settings.filter.refill else None,
    )
    if records is None:
        return Ledger(version=settings.started.version, lineage=settings.lineage, **arguments)
    state = None if settings.restore_path is None else Path(settings.restore_path).read_bytes()
    known = partial(records, complete_from=read_snapshot(state).next_sequence if state is not None else 1)
    return Ledger.restore(state, lineage=settings.lineage, records=known, **arguments)


def record_of(task: Task, split: str, index: int) -> bytes:
    """Read the record at an index, modulo their number. Raises TaskError for one that cannot be leased."""
    record = dict(task.record(split, index % task.num_records(split)))
    text = json.dumps(record).encode()
    if len(text) > MAX_RECORD_BYTES:
        raise TaskError(f"record {index + 1}: {too_long(record)}: shorten that field, or leave the record out")
    return text


def _eval_record(task: Task, index: int) -> bytes | None:
    """Read a held-out record; None if it cannot be leased: its question stays without an answer."""
    try:
        return record_of(task, "test", index)
    except TaskError as error:
        _limited_log.warning("this record is skipped: %s", error)
        return None


def eval_sources(settings: HubSettings, task: Task) -> dict[str, EvalSource]:
    """Collect the run's own held-out records, under "", and every set of `eval.datasets`."""
    sources = {"": EvalSource(partial(_eval_record, task), settings.eval_sampling)}
    for one in settings.eval_sets:
        own = (one.env, one.data, one.reward) == (settings.env, settings.data, settings.reward)
        asked = task if own else task_of(one)
        sources[one.name] = EvalSource(partial(_eval_record, asked), one.sampling)
    return sources


def group_filter(config: FilterConfig, trained_scores: Sequence[str]) -> GroupFilter | None:
    """Join all filters to one, which gives the reason to drop a complete group; None keeps every group."""
    filters: list[GroupFilter] = []
    if config.zero_std:
        filters.append(zero_std(config.min_std, scores=trained_scores))
    if config.accuracy_range is not None:
        filters.append(accuracy_range(*config.accuracy_range))
    return first_of(*filters) if filters else None
