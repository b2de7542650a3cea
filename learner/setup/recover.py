"""Recovery of a run whose learner died: the batches that the log has after the checkpoint are trained again."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from learner.hub.ledger.snapshots import read_snapshot
from learner.loop.retrain import Retrained, retrain
from learner.loop.steering import Steering
from learner.objective.statistics import TrainedBatch
from learner.publish.publisher import WeightDigests
from learner.setup.inputs import Inputs
from learner.setup.publishing import published_parameters
from learner.sources.log import LogSource
from learner.trainer import Trainer
from streamrl.config.schema import LoraConfig
from streamrl.errors import StreamrlError
from streamrl.messages import Lineage
from streamrl.metrics.files import read_lines
from streamrl.stream.history import History
from streamrl.stream.segments import segments

log = logging.getLogger("streamrl.learner")

TELL_S = 10.0


@dataclass(frozen=True)
class Recovered:
    """State that this start took over from the log.

    Attributes:
        again_from: the version from which batches were trained again; -1 if the log had none.
        equal: every version that the run had published came out the same, bit by bit.
        unended: batches whose end the log does not know: the hub is told.
        unrecorded: (step, what it measured) of steps without a row of metrics.
    """

    again_from: int = -1
    equal: bool = True
    unended: tuple[Retrained, ...] = ()
    unrecorded: tuple[tuple[int, TrainedBatch], ...] = ()
    wall_s: float = 0.0
    trained_tokens: int = 0


def history_after(given: Inputs, run_dir: Path) -> History:
    """The log after the checkpoint that the run resumes from. Raises StreamrlError: it is damaged."""
    if not segments(run_dir):
        return History(run_dir)
    first = 1
    if given.past.checkpoint is not None:
        first = max(1, read_snapshot(given.past.checkpoint.blobs["ledger"]).next_sequence)
    try:
        return History.read(run_dir, first)
    except StreamrlError as error:
        raise StreamrlError(
            f"the log of the run is damaged, so what was trained after its checkpoint cannot be recovered: {error}"
        ) from error


def recover(
    lora: LoraConfig, bucket_bytes: int, given: Inputs, history: History | None, run_dir: Path, trainer: Trainer,
    steering: Steering, stopped: Callable[[], bool],
) -> tuple[Inputs, Recovered]:
    """Train the batches of the log again, before anybody else takes part; a collective call.

    Args:
        lora, bucket_bytes: as versions are published.
        history: the log after the checkpoint; on rank 0.
    Returns:
        the inputs with the version, the epoch and the lineage that follow; and what came of it.
    """
    ranks, begin = trainer.ranks, trainer.version
    num = int(ranks.from_rank_zero(float(len(history.batches) if history is not None else 0)))
    log.info("training %d batches of the log again, from version %d on: nothing that was trained is lost", num, begin)
    source = LogSource(
        history, ranks, vocab_size=given.vocab_size, max_tokens=trainer.settings.max_tokens,
        check_rewards=trainer.objective.reward_rules.check,
    )
    last = _last_row(run_dir / "metrics.jsonl") if ranks.rank == 0 else {}
    recorded = int(ranks.from_rank_zero(float(last.get("step", 0))))
    unended, unrecorded, differences = [], [], []
    with closing(WeightDigests(
        published_parameters(trainer.networks.policy, lora), ranks,
        wire_dtype=trainer.settings.wire_dtype, bucket_bytes=bucket_bytes,
    )) as digests:
        tell_at = time.monotonic() + TELL_S
        for done, one in enumerate(retrain(
            trainer, source, steering, published=history.published if history is not None else {}, digests=digests
        ), start=1):
            if done == num or time.monotonic() >= tell_at:
                tell_at = time.monotonic() + TELL_S
                log.info("batch %d of %d of the log: version %d", done, num, one.version)
            differences += filter(None, one.versions.values())
            if one.logged.step is None:
                unended.append(one)
            if one.trained is not None and trainer.step > recorded:
                unrecorded.append((trainer.step, one.trained))
            if ranks.maximum(float(stopped())):
                raise StreamrlError(
                    f"stopped at version {trainer.version}, while the log was trained again: streamrl resume starts "
                    "there again"
                )
    for text in differences[:1]:
        log.warning("%s from what the run published: its history goes on under a new epoch", text)
    equal = not differences
    after = _inputs_after(given, history, trainer, equal=equal)
    return after, Recovered(
        begin, equal, tuple(unended), tuple(unrecorded), float(last.get("run/wall_s", 0.0)),
        int(last.get("run/trained_tokens", 0)),
    )


def _last_row(path: Path) -> dict[str, Any]:
    """The last row of metrics of the steps before this start; empty without any."""
    rows = [row for _, row in read_lines(path, json.loads) if "run/wall_s" in row and "policy/num_tokens" in row]
    return rows[-1] if rows else {}


def _inputs_after(given: Inputs, history: History | None, trainer: Trainer, *, equal: bool) -> Inputs:
    """The epoch goes on where the weights are the same; else a new one begins at the version that was reached."""
    version, ranks = trainer.version, trainer.ranks
    rows = [Lineage(row.learner_epoch, row.first, min(row.last, given.past.version)) for row in given.past.lineage]
    for start in history.starts if history is not None else ():
        if not rows or rows[-1].learner_epoch != start.learner_epoch:
            rows.append(Lineage(start.learner_epoch, start.version, start.version))
    rows[-1:] = [Lineage(row.learner_epoch, row.first, version) for row in rows[-1:]]
    # A row ends where the next one begins, however far its own learner came.
    ended = [
        Lineage(row.learner_epoch, row.first, min(row.last, later.first))
        for row, later in zip(rows, rows[1:], strict=False)
    ]
    rows = ended + rows[-1:]
    if not equal or not rows:
        rows.append(Lineage(given.start, version, version))
    agreed = msgspec.msgpack.decode(
        ranks.bytes_from_rank_zero(msgspec.msgpack.encode(rows)), type=tuple[Lineage, ...]
    )
    return replace(given, version=version, learner_epoch=agreed[-1].learner_epoch, lineage=agreed)
