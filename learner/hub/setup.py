"""From settings to a ledger: the task's prompts, the filters, and what a predecessor left."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from envs.registry import load_task
from learner.hub.ledger.filters import GroupFilter, accuracy_range, first_of, zero_std
from learner.hub.ledger.ledger import Ledger, LedgerSettings
from learner.hub.ledger.prompts import PromptStream
from learner.hub.settings import HubSettings
from streamrl.environment import Task
from streamrl.messages.validate import GroupBounds

log = logging.getLogger("streamrl.hub")


def build_ledger(settings: HubSettings) -> Ledger:
    """A fresh ledger, or the one that the checkpoint of `settings.version` holds."""
    task = load_task(settings.task.name, path=settings.task.path, options=dict(settings.task.options))
    limits = settings.limits
    bounds = GroupBounds(limits.vocab_size, limits.max_prompt_tokens, limits.max_new_tokens)
    prompts = prompt_stream(task, settings.run_seed, settings.task.shuffle)
    arguments = dict(
        settings=LedgerSettings(**settings.ledger, bounds=bounds),  # type: ignore[arg-type]
        run_id=settings.run_id, learner_epoch=settings.learner_epoch, run_seed=settings.run_seed, prompts=prompts,
        sampling=settings.sampling, eval_sampling=settings.eval_sampling, keep_group=group_filter(settings),
        eval_record=lambda index: record_json(task, "test", index),
    )
    if settings.restore_path is None:
        return Ledger(version=settings.version, lineage=settings.lineage, **arguments)
    state = Path(settings.restore_path).read_bytes()
    return Ledger.restore(state, lineage=settings.lineage, **arguments)


def record_json(task: Task, split: str, index: int) -> bytes:
    return json.dumps(dict(task.record(split, index % task.num_records(split)))).encode()


def prompt_stream(task: Task, seed: int, shuffle: bool) -> PromptStream:
    return PromptStream(
        task.num_records("train"), seed=seed, record=lambda index: record_json(task, "train", index), shuffle=shuffle
    )


def group_filter(settings: HubSettings) -> GroupFilter:
    """All filters in one: the reason to drop a complete group, or None."""
    filters: list[GroupFilter] = []
    if settings.zero_std_min is not None:
        filters.append(zero_std(settings.zero_std_min, scores=settings.trained_scores))
    if settings.accuracy_range is not None:
        filters.append(accuracy_range(*settings.accuracy_range))
    return first_of(*filters)
