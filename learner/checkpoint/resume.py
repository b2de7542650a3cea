"""The state that a run resumes from: its name, its newest good checkpoint, its surviving versions."""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from learner.checkpoint.checkpoint import Checkpoint, find_checkpoint
from learner.checkpoint.run_lock import write_durably
from learner.ranks.mesh import Ranks
from streamrl.errors import ConfigError
from streamrl.messages import Lineage
from streamrl.metrics.files import text_of

log = logging.getLogger("streamrl.learner")


@dataclass(frozen=True)
class ResumeState:
    """The run so far, from its checkpoint; the defaults are a run that has none."""

    run_id: str
    version: int = 0
    lineage: tuple[Lineage, ...] = ()
    wall_s: float = 0.0
    trained_tokens: int = 0
    checkpoint: Checkpoint | None = None

    @property
    def controls(self) -> Mapping[str, Any]:
        """State of the controllers, by name; empty without a checkpoint, or in one older than they are."""
        return self.checkpoint.extra.get("controls", {}) if self.checkpoint is not None else {}


def find_resume_state(
    run_dir: Path, ranks: Ranks, *, resume: bool, name: str = "", num_minibatches: int = 1, num_epochs: int = 1
) -> ResumeState:
    """The state to resume from; a collective call.

    Args:
        resume: look for a checkpoint.
        name: what the id of a new run begins with.
        num_minibatches, num_epochs: of a batch, which a resumed run must have as many of.
    Raises:
        CheckpointError: there are checkpoints, and none of them is good.
        ConfigError: the checkpoint belongs to another run, or to one with other optimizer steps a batch.
    """
    found = find_checkpoint(run_dir, ranks) if resume else None
    file, own = run_dir / "run_id", ""
    if ranks.rank == 0:
        own = text_of(file).strip()
        if not re.fullmatch(r"[\w.-]+", own):  # a new run, or a file that was damaged
            safe = "".join(c if c.isalnum() or c in "._-" else "-" for c in name.lower())[:48]
            own = found.extra["run_id"] if found is not None else f"{safe}-{secrets.token_hex(4)}"
            write_durably(file, own.encode())
    run_id = ranks.bytes_from_rank_zero(own.encode()).decode()
    if found is None:
        if resume:
            log.warning("no checkpoint in %s yet: starting from version 0, and what the log has since", run_dir)
        return ResumeState(run_id)
    extra: Mapping[str, Any] = found.extra
    if extra["run_id"] != run_id:
        raise ConfigError(f"{found.path} belongs to run {extra['run_id']}, {run_dir} to {run_id}: do not mix them")
    steps, before = num_minibatches * num_epochs, extra.get("steps_per_batch", 1)
    if steps != before:  # versions would no longer tell how many batches were trained
        raise ConfigError(
            f"learner.num_minibatches={num_minibatches} x learner.num_epochs="
            f"{num_epochs} are {steps} optimizer steps per batch, and {found.path} was trained with "
            f"{before}: resume with as many, or start a new run from its exported model."
        )
    lineage = tuple(Lineage(*row) for row in extra["lineage"])
    log.info("resuming from %s (version %d)", found.path, found.version)
    return ResumeState(run_id, found.version, lineage, extra["wall_s"], int(extra["trained_tokens"]), found)


def surviving_lineage(past: ResumeState, epoch: int) -> tuple[Lineage, ...]:
    """The known versions after a restart: earlier epochs cut at the restored version, then this epoch."""
    cut = (Lineage(row.learner_epoch, row.first, min(row.last, past.version)) for row in past.lineage)
    return (*cut, Lineage(epoch, past.version, past.version))
