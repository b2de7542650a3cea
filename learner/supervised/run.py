"""A run of a trainer other than RL: batches from a file, optimizer steps, held-out loss, checkpoints, the record.

There is no hub: the run directory has what one of RL has, but for its log. The records of a step follow from its
number, so a resumed run trains on what the one before would have.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from envs.data.chat_template import template_of_settings
from envs.data.dataset import Dataset, Mixture, open_dataset
from envs.data.shapes import tool_schemas
from learner.checkpoint.checkpoint import ResumeState, checkpoint_home, find_resume_state
from learner.checkpoint.run_lock import lock_run_dir
from learner.checkpoint.saving import Checkpoints, SaveRetries, Saving
from learner.checkpoint.shards import reshard, training_tensors
from learner.data.packing import MicroBatch, equalize, pack
from learner.data.trajectories import Trajectory
from learner.model.adapter.lora import AdapterOf, check_resumed, describe_adapter
from learner.model.gradients import BatchResult, optimizer_step, reduce_gradients
from learner.model.optimizer import Schedule, make_optimizer, make_schedule
from learner.model.paths import compute_dtype, wire_dtype
from learner.model.policy import keep_gathered
from learner.publish.export import export_model, used_template
from learner.ranks.clock import StepClock
from learner.ranks.mesh import Ranks
from learner.ranks.stop_flag import StopFlag
from learner.record.memory import memory_profiled
from learner.record.profile import profiled
from learner.record.recorder import Recorder
from learner.setup.model_hub import find_models
from learner.setup.preflight import check_folders
from learner.setup.publishing import background_of
from learner.setup.trainer import check_starting_model, load_networks
from learner.sources.skipped import SkippedSteps
from learner.supervised.methods import (
    Dpo,
    Method,
    RewardModel,
    Sft,
    check_losses,
    export_reward_model,
    load_reward_network,
    needs_reference,
)
from learner.supervised.records import Encoder, places_from, places_of, plain_template, shape_of, start_after, start_of
from streamrl.architectures.positions import num_positions
from streamrl.config.schema import Config, OnBadRecord
from streamrl.errors import ConfigError, TaskError
from streamrl.metrics.meter import Meter
from streamrl.metrics.summary import Summary

log = logging.getLogger("streamrl.learner")
MAX_NUM_EMPTY = 64
"""Records without anything to train on, one after the other, that end a run."""


class NoHub:
    """A checkpoint's ledger where there is none."""

    def freeze(self, version: int) -> bytes:
        return b""

    def saved(self, version: int) -> None:
        pass


@dataclass
class Run:
    """One process's share of it."""

    config: Config
    kind: str
    run_dir: Path
    model_dir: Path
    ranks: Ranks
    stop: StopFlag
    past: ResumeState
    learner_epoch: int
    data: Dataset
    method: Method
    optimizer: torch.optim.Optimizer
    adapter: AdapterOf | None
    clock: StepClock
    schedule: Schedule
    recorder: Recorder | None
    skipped: SkippedSteps
    step: int
    checkpoints: Checkpoints | None = None
    num_dropped: int = 0
    num_empty: int = 0
    start: tuple[int, int] = (0, 0)
    """Pass of the next batch, and how many of its records were read before; batches of a resumed run may differ."""

    def train(self) -> bool:
        """Train until the steps are done (True) or a stop is requested (False)."""
        assert self.checkpoints is not None
        if self.step == 0 and self.config.eval.at_start:
            self.record(self.held_out())
        while self.step < self.config.trainer.num_steps:
            if self.ranks.maximum(float(self.stop())):
                return False
            self.clock.begin_step()
            with profiled(self.step + 1, self.config.run.profile_steps, self.run_dir, self.ranks):
                measured = self.train_step()
            self.step += 1
            if self._evaluates():
                measured |= self.held_out()
            self.record(measured)
            self.checkpoints.save_if_due(self.step)
        return True

    def train_step(self) -> dict[str, float]:
        """Take one optimizer step; returns its measurements."""
        config = self.config
        with self.clock.timed("pack"):
            size, data = config.rollout.num_prompts_per_step, config.data
            num, self.start = len(self.data.train), start_after(self.start, size, len(self.data.train))
            places = places_from(self.start, size, num, seed=config.run.seed, shuffle=data.shuffle)
            self.start = self.start[0], self.start[1] + size
            rows = self.rows(self.data.train, places, "training")
            micro_batches = self.packed(rows, config.learner.max_row_tokens)
        with self.clock.timed("forward_backward"):
            measured = self.passes(micro_batches, rows, gradients=True)
        with self.clock.timed("optimizer"):
            result = optimizer_step(
                self.method.network, self.optimizer, self.schedule, step=self.step,
                max_grad_norm=config.policy.optimizer.max_grad_norm, ranks=self.ranks,
            )
        self.skipped.stepped(BatchResult((result,)))
        tokens, num_rows, dropped = self.ranks.all_reduce(
            [float(sum(row.num_action_tokens for row in rows)), float(len(rows)), float(self.num_dropped)]
        )
        self._check_any(int(num_rows), int(dropped))
        return {f"supervised/{name}": value for name, value in measured.items()} | {
            "policy/grad_norm": result.grad_norm, "policy/lr": result.lr, "policy/num_tokens": tokens,
            "policy/num_trajectories": num_rows, "policy/num_skipped_steps": float(result.skipped),
            "supervised/num_dropped": dropped,
        }

    def _check_any(self, num_rows: int, dropped: int) -> None:
        """Raise TaskError where MAX_NUM_EMPTY records in a row, or all of a short run, leave nothing to train on."""
        config, self.num_empty = self.config, 0 if num_rows else self.num_empty + dropped
        left = config.trainer.num_steps - max(0, self.past.version)
        if self.num_empty >= min(MAX_NUM_EMPTY, left * config.rollout.num_prompts_per_step):
            raise TaskError(
                f"the last {self.num_empty} records leave nothing to train on: their prompts fill the "
                f"{side_limit(config, self.kind)} tokens that data.max_tokens, learner.max_tokens_per_device or the "
                "model's positions allow, or are damaged; raise the least of these"
            )

    def rows(self, records: Mixture, places: Sequence[int], what: str) -> list[Trajectory]:
        """This rank's records, encoded; a record with nothing to train on is dropped and counted. A collective call.

        Raises TaskError: a record of some rank is bad; on every rank, or the others would end by a lost connection.
        """
        found, bad, self.num_dropped = [], "", 0
        for place in places[self.ranks.dp_rank :: self.ranks.mesh.dp_size]:
            row = None
            try:
                row = self.method.row(place, records[place])
            except TaskError as error:
                if self.config.data.on_bad_record is OnBadRecord.error:
                    bad = f"{what} record {place}: {error}; or set data.on_bad_record=skip"
                    break
            if row is None:
                self.num_dropped += 1
            else:
                found.append(row)
        for told in filter(None, self.ranks.gather_bytes(bad.encode())):
            raise TaskError(told.decode())
        return found

    def packed(self, rows: list[Trajectory], max_tokens: int) -> list[MicroBatch]:
        return equalize(pack(rows, max_tokens), self.ranks)

    def passes(
        self, micro_batches: Sequence[MicroBatch], rows: Sequence[Trajectory], *, gradients: bool
    ) -> dict[str, float]:
        """Forward passes, and with `gradients` backward ones, over rows of all ranks; means over their units."""
        own = float(sum(self.method.units(row) for row in rows))
        (total,) = self.ranks.all_reduce([own])
        count = max(1.0, total)
        network, sums = self.method.network, dict[str, torch.Tensor]()
        for at, micro in enumerate(micro_batches):
            last = at == len(micro_batches) - 1
            reduce_gradients(network, last or not self.config.learner.reduce_once)
            with torch.set_grad_enabled(gradients):
                loss, measured = self.method.loss(micro.to(self.ranks.device))
            if gradients:  # FSDP2 divides by the number of shares
                (loss * (self.ranks.mesh.dp_size / count)).backward()
            else:
                reshard(network)
            for name, value in {"loss": loss.detach(), **measured}.items():
                sums[name] = sums[name] + value.double() if name in sums else value.double()
        means = [value / count for value in self.ranks.all_reduce([float(value) for value in sums.values()])]
        return dict(zip(sums, means, strict=True)) if total else {}  # a mean of nothing is not 0

    def _evaluates(self) -> bool:
        every = self.config.eval.every_steps
        return self.step == self.config.trainer.num_steps or bool(every and self.step % every == 0)

    def held_out(self) -> dict[str, float]:
        """Loss of the held-out records, the first `eval.num_samples`; nothing if there are none."""
        num = min(self.config.eval.num_samples, len(self.data.test))
        if not num:
            return {}
        with self.clock.timed("eval"):
            rows = self.rows(self.data.test, range(num), "held-out")
            passes = self.packed(rows, self.config.learner.max_inference_row_tokens)
            measured = self.passes(passes, rows, gradients=False)
        return {f"supervised/held_out_{name}": measured[name] for name in ("loss", "accuracy") if name in measured}

    def record(self, measured: dict[str, float]) -> None:
        """Write one row of metrics; the slowest rank's times."""
        times = self.clock.take()
        of_ranks = zip(*self.ranks.gather_world(list(times.values())), strict=True)
        slowest = {key: max(values) for key, values in zip(times, of_ranks, strict=True)}
        if self.recorder is not None:
            meter = Meter()
            meter.add_all({**measured, **slowest, "meter/num_nonfinite": 0.0})
            self.recorder.step(self.step, meter, None, version=self.step, epoch=self.learner_epoch)

    def remembered(self) -> dict[str, Any]:
        """The facts that a resumed run needs in addition to the tensors."""
        recorder = self.recorder
        return {
            "run_id": self.past.run_id, "learner_epoch": self.learner_epoch, "steps_per_batch": 1, "lineage": [],
            "wall_s": recorder.wall_s if recorder else 0.0, "kind": self.kind,
            "trained_tokens": recorder.trained_tokens if recorder else 0,
            "adapter": self.adapter.to_plain() if self.adapter is not None else None, "controls": {},
            "start": list(self.start), "start_model": str(self.model_dir.resolve()),
        }

    def finish(self, *, completed: bool) -> Summary | None:
        """Checkpoint, export, summary (of rank 0) and report; collective."""
        assert self.checkpoints is not None
        self.checkpoints.save(self.step, last=True)
        self.checkpoints.saving.settle()
        if completed and self.config.checkpoint.export_hf:
            log.info("the trained model is in %s", self.export(self.run_dir / "model"))
        return self.close(stopped="" if completed else f"stopped: {self.stop.reason}")

    def close(self, **how: str) -> Summary | None:
        """The record's end; `how` the run ended. The summary is rank 0's."""
        if self.recorder is None:
            return None
        return self.recorder.close(self.step, None, version=self.step, epoch=self.learner_epoch, **how)

    def export(self, folder: Path) -> Path:
        """Write the model as a Hugging Face checkpoint."""
        template = used_template(self.config.data)
        if isinstance(self.method, RewardModel):
            return export_reward_model(
                self.method.network, self.model_dir, folder, self.ranks, padding=self.method.padding,
                chat_template=template,
            )
        lora = self.config.policy.lora if self.adapter is not None else None
        dtype = wire_dtype(self.config.publish.dtype, self.ranks.device)
        return export_model(
            self.method.network, self.model_dir, folder, self.ranks, lora=lora, dtype=dtype, chat_template=template
        )


@dataclass(frozen=True)
class Opened:
    """The inputs of a run, opened before it has a directory: the model to start from, and records that it can read."""

    model_dir: Path
    dataset: Dataset
    encoder: Encoder


def side_limit(config: Config, kind: str) -> int:
    """Most tokens of a conversation, or of each side of a pair, that is trained on.

    Raises ConfigError: a packed row cannot hold what `data.max_tokens` allows, or the model has fewer positions.
    """
    budget = min(config.learner.max_row_tokens, config.learner.max_inference_row_tokens)
    # Both sides of a pair are packed as one row; a reward model's have a token more each, at which it is read.
    room = budget if kind == "sft" else budget // 2 - (kind == "train-reward-model")
    wanted = config.data.max_tokens
    if wanted is not None and wanted > room:
        raise ConfigError(
            f"data.max_tokens={wanted} is more than the {room} tokens that fit into learner.max_tokens_per_device="
            f"{config.learner.max_tokens_per_device}{'' if kind == 'sft' else ', with both sides of a pair in it'}: "
            "lower the one or raise the other"
        )
    for setting, path in (("policy", config.policy.model_path), ("reference", config.reference.model_path)):
        positions = None if path is None else num_positions(path)
        if positions is None:
            continue
        positions -= kind == "train-reward-model"
        if wanted is not None and wanted > positions:
            raise ConfigError(
                f"data.max_tokens={wanted} is more than the {positions} tokens for which {setting}.model_path={path} "
                "has positions: lower it, or take another model"
            )
        room = min(room, positions)
    return room if wanted is None else wanted


def check_start(config: Config, kind: str) -> None:
    """Check the settings and the model's files, before there is a run directory. Raises ConfigError."""
    if config.policy.model_path is None or config.data.path is None:
        missing = "policy.model_path" if config.policy.model_path is None else "data.path"
        raise ConfigError(f"streamrl {kind} needs {missing}=...: the model to start from, and a file of records")
    if kind == "train-reward-model" and config.policy.lora.rank is not None:
        raise ConfigError("policy.lora.rank trains an adapter of a policy: leave it out for a reward model")
    if kind == "dpo":
        check_losses(config.dpo, config.reference)
    config.data.chat_template = template_of_settings(config.data.chat_template)
    models = {"policy.model_path": config.policy, "reference.model_path": config.reference}
    find_models(models, log.info, allow=config.actors.allow)
    check_folders(config, log.info)
    side_limit(config, kind)


def open_records(config: Config, kind: str) -> Opened:
    """Check the records, of which the first is rendered; of settings that `check_start` has seen.

    Raises ConfigError, TaskError.
    """
    assert config.policy.model_path is not None
    model_dir, data = Path(config.policy.model_path), config.data
    shape = shape_of(data, pairs=kind != "sft")
    dataset = open_dataset(data, shape)
    log.info("data: %s", dataset)
    places_of(0, config.rollout.num_prompts_per_step, len(dataset.train), seed=0, shuffle=False)  # enough records
    if config.trainer.num_epochs is not None:
        per_pass = len(dataset.train) // config.rollout.num_prompts_per_step
        config.trainer.num_steps = max(1, math.ceil(config.trainer.num_epochs * per_pass))
    encoder = Encoder(model_dir, data)
    if kind == "train-reward-model" and not encoder.chat:  # it is exported with what it was trained on
        data.chat_template, data.apply_chat_template = plain_template(encoder.tokenizer), True
        encoder = Encoder(model_dir, data)
    if data.on_bad_record is OnBadRecord.error:
        for messages in shape.conversations(first := dataset.train[0]):
            encoder.encode(messages, tool_schemas(first))
    return Opened(model_dir, dataset, encoder)


def build_run(
    config: Config, kind: str, records: Opened, run_dir: Path, stop: StopFlag, ranks: Ranks, resources: ExitStack
) -> Run:
    """Everything from the lock on the directory to the first step; a collective call. Raises ConfigError, TaskError."""
    torch.manual_seed(config.run.seed)
    model_dir = records.model_dir
    lock = lock_run_dir(run_dir) if ranks.rank == 0 else None
    if lock is not None:
        resources.callback(lock.release)
    epoch = int(ranks.maximum(float(lock.learner_epoch if lock else 0)))
    past = find_resume_state(run_dir, ranks, resume=config.checkpoint.resume, name=config.run.name)
    before = past.checkpoint.extra.get("kind") if past.checkpoint is not None else kind
    if before != kind:
        raise ConfigError(f"{run_dir} is a run of {before or 'RL'}, not of {kind}: choose another run.dir")
    adapter = describe_adapter(config.policy.lora, model_dir, ranks)
    if past.checkpoint is not None:
        check_resumed(past.checkpoint.extra.get("adapter"), adapter, ranks)
        if adapter is None:
            check_starting_model(
                past.checkpoint.extra.get("start_model"), model_dir, ranks,
                is_reference=kind == "dpo" and needs_reference(config.dpo) and config.reference.model_path is None,
            )
    start = _resumed_start(config, past, len(records.dataset.train))
    method, optimizer = make_method(config, kind, records, past, ranks)
    clock = StepClock(ranks.activity)
    dtype = compute_dtype(config.policy.dtype, ranks.device)
    recorder = None if ranks.rank else Recorder(
        config, run_dir, past.run_id, resume_step=past.version, wall_s=past.wall_s, device=ranks.device.type,
        trained_tokens=past.trained_tokens, dtype=str(dtype).removeprefix("torch."), kind=kind,
    )
    schedule = make_schedule(
        config.policy.optimizer, config.policy.scheduler, num_steps=config.trainer.num_steps,
        lr_scale=config.policy.lora.lr_scale if adapter else 1.0,
    )
    run = Run(
        config, kind, run_dir, model_dir, ranks, stop, past, epoch, records.dataset, method, optimizer, adapter, clock,
        schedule, recorder, SkippedSteps(run_dir, limit=config.learner.num_max_skipped_steps), past.version,
        start=start,
    )
    saving = Saving(
        run_dir, NoHub(), ranks, num_keep=config.checkpoint.num_keep, lock=lock,
        home=checkpoint_home(config.checkpoint.directory, past.run_id, run_dir),
        background=background_of(config.checkpoint.beside_training, ranks, "checkpoint"),
        version=past.version if past.checkpoint is not None else -1,
    )
    resources.callback(saving.close)
    resources.enter_context(memory_profiled(config.run.memory_interval_s, run_dir, ranks))
    run.checkpoints = Checkpoints(
        saving, SaveRetries(config.checkpoint.grace_s), ranks, clock, every_s=60.0 * config.checkpoint.every_minutes,
        every_steps=config.checkpoint.every_steps, steps_per_batch=1, remembered=run.remembered,
        tensors=lambda: training_tensors(method.network, optimizer),
    )
    return run


def _resumed_start(config: Config, past: ResumeState, num_records: int) -> tuple[int, int]:
    """Where the next batch begins; of a resumed run the steps of `trainer.num_epochs` follow from it."""
    size, epochs = config.rollout.num_prompts_per_step, config.trainer.num_epochs
    extra = past.checkpoint.extra if past.checkpoint is not None else {}
    number, read = extra.get("start") or start_of(past.version, size, num_records)
    if epochs is not None and past.checkpoint is not None:
        per_pass, of_this = num_records // size, max(0, num_records - read) // size
        left = math.ceil(epochs * per_pass) - (number + 1) * per_pass + of_this
        config.trainer.num_steps = past.version + max(0, left)
    return number, read


def make_method(
    config: Config, kind: str, records: Opened, past: ResumeState, ranks: Ranks
) -> tuple[Method, torch.optim.Optimizer]:
    """The method with its networks as the starting model or the predecessor's checkpoint has them; collective."""
    model_dir, encoder, max_tokens = records.model_dir, records.encoder, side_limit(config, kind)
    if kind == "train-reward-model":
        network = load_reward_network(
            model_dir, config.learner, ranks, dtype=compute_dtype(config.policy.dtype, ranks.device),
            gradient_checkpointing=config.policy.gradient_checkpointing,
        )
        if not config.learner.reshard_after_forward:
            keep_gathered(network)
        optimizer = make_optimizer(network, config.policy.optimizer)
        if past.checkpoint is not None:
            past.checkpoint.restore(network, optimizer, ranks)
        return RewardModel(network, encoder, config.data, max_tokens=max_tokens), optimizer
    compares = kind == "dpo" and needs_reference(config.dpo)
    networks = load_networks(config, model_dir, past, ranks, with_critic=False, with_reference=compares)
    if kind == "sft":
        return Sft(networks.policy, encoder, config.data, max_tokens=max_tokens), networks.optimizer
    method = Dpo(networks.policy, networks.reference, encoder, config.data, config.dpo, max_tokens=max_tokens)
    return method, networks.optimizer
