"""Inputs of a run: files by absolute paths, models found, and sizes that follow from the number of records."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from envs.check import check_task
from envs.data.chat_template import template_of_settings
from envs.data.sources import absolute
from envs.data_task import DataTask
from envs.registry import task_of
from learner.checkpoint.checkpoint import ResumeState, find_resume_state, surviving_lineage
from learner.checkpoint.run_lock import RunLock, lock_run_dir
from learner.model.config_file import policy_vocab_size
from learner.model.paths import keep_tiny_model, model_directory
from learner.ranks.mesh import Ranks
from learner.setup.model_hub import find_models
from learner.setup.preflight import check_settings, checked_eval_sets, models_of
from streamrl.config.eval_sets import EvalSet
from streamrl.config.schema import Config
from streamrl.environment import Task
from streamrl.messages import Lineage

log = logging.getLogger("streamrl.learner")


def prepare_inputs(config: Config, device: torch.device) -> None:
    """Make every file absolute and find every model; then refuse what this device cannot run. Raises ConfigError."""
    if config.env.path is not None:  # actors read it too, perhaps from another working directory
        config.env.path = str(Path(config.env.path).resolve())
    config.reward.model.path = absolute(config.reward.model.path)
    for key in ("path", "test_path"):
        setattr(config.data, key, absolute(getattr(config.data, key)))
    config.data.chat_template = template_of_settings(config.data.chat_template)  # actors may have no such file
    config.eval.datasets = {name: _absolute_set(given) for name, given in config.eval.datasets.items()}
    find_models(models_of(config), log.info, allow=config.actors.allow)
    check_settings(config, device)


@dataclass(frozen=True)
class Inputs:
    """The inputs that a run starts from.

    Attributes:
        eval_sets: none asks for more prompts than it has.
        past: the run so far, if this learner resumes one.
        start: counts the starts of the learner.
        learner_epoch: under which versions are published; it goes on over a start that recovers the same weights.
        version: that this start begins with.
        lineage: which epoch has which versions; the last entry is this one's.
        lock: on the run's directory; rank 0 has it.
    """

    task: Task
    eval_sets: list[EvalSet]
    model_dir: Path
    vocab_size: int
    past: ResumeState
    start: int
    learner_epoch: int
    version: int
    lineage: tuple[Lineage, ...]
    lock: RunLock | None


def open_inputs(config: Config, run_dir: Path, ranks: Ranks) -> Inputs:
    """Lock the directory, load the task, find the model and what a predecessor saved; a collective call."""
    lock = lock_run_dir(run_dir) if ranks.rank == 0 else None
    epoch = int(ranks.maximum(float(lock.learner_epoch if lock else 0)))
    task = task_of(config)
    if not config.launch.debug:  # else its first episode may stand in a debugger
        check_task(task, limit_s=config.env.step_timeout_s)  # fails here by name, not in an actor an hour later
    sets = fit_to_records(config, task)
    model_dir = starting_model(config, task, ranks, run_dir if config.checkpoint.resume else None)
    if config.policy.tiny.enabled:
        keep_tiny_model(model_dir, run_dir, task, ranks, max_positions=config.learner.max_row_tokens)
    past = find_resume_state(
        run_dir, ranks, resume=config.checkpoint.resume, name=config.run.name,
        num_minibatches=config.learner.num_minibatches, num_epochs=config.learner.num_epochs,
    )
    return Inputs(
        task, sets, model_dir, policy_vocab_size(model_dir), past, epoch, epoch, past.version,
        surviving_lineage(past, epoch), lock,
    )


def starting_model(config: Config, task: Task, ranks: Ranks, run_dir: Path | None) -> Path:
    """The folder of the model that the run starts from, made first if it is a tiny one; a collective call.

    Args:
        run_dir: of a run that goes on, or is trained again.
    """
    return model_directory(
        config.policy, task, ranks, seed=config.run.seed, num_threads=config.run.num_threads,
        max_positions=config.learner.max_row_tokens, run_dir=run_dir,
    )


def _absolute_set(given: Any) -> Any:
    """An entry of `eval.datasets` with files of this machine made absolute, as the run's own are."""
    if not isinstance(given, Mapping):
        return absolute(given)
    made = {key: _absolute_set(value) if key in ("data", "env") else value for key, value in given.items()}
    made |= {key: absolute(made[key]) for key in ("path", "test_path") if key in made}
    if "chat_template" in made:
        made["chat_template"] = template_of_settings(made["chat_template"])
    return made


def fit_to_records(config: Config, task: Task) -> list[EvalSet]:
    """Set what follows from the number of records: the steps of `trainer.num_epochs`, the size of evaluations.

    Returns:
        the evaluation sets, none asked for more prompts than it has.
    """
    source = getattr(task, "base", task)  # of a task with tools around it
    if isinstance(source, DataTask):
        log.info("data: %s", source.dataset)
    num_train, epochs = task.num_records("train"), config.trainer.num_epochs
    if epochs is not None:
        config.trainer.num_steps = max(1, math.ceil(epochs * num_train / config.rollout.num_prompts_per_step))
        log.info("trainer.num_epochs=%g over %d records: %d steps of %d prompts", epochs, num_train,
                 config.trainer.num_steps, config.rollout.num_prompts_per_step)
    return [one if one.name else _cut_to(one, task.num_records("test")) for one in checked_eval_sets(config)]


def _cut_to(one: EvalSet, num_records: int) -> EvalSet:
    """The run's own set without a prompt twice; the config keeps the number that was asked for, for later readers."""
    asked = one.config.eval
    return replace(one, config=replace(one.config, eval=replace(
        asked, num_samples=min(asked.num_samples, num_records))))
