"""A learner without a model: real lock, hub, link, checkpoints and documents; its step is a function of the batch."""

import logging
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
import xxhash

from learner.checkpoint.checkpoint import find_checkpoint, save_checkpoint
from learner.checkpoint.run_lock import lock_run_dir
from learner.hub.ledger.snapshots import LedgerSnapshot, read_snapshot
from learner.hub.ledger.tables.groups import GroupState
from learner.hub_client.link import HubLink
from learner.hub_client.settings import hub_settings
from learner.model.policy import policy_parameters
from learner.publish.publisher import Publisher
from learner.ranks.mesh import Ranks
from streamrl.errors import StreamrlError
from streamrl.messages import TO_HUB, Group, Lineage, MemberStatus, VersionRef
from streamrl.messages.codec import Decoder
from streamrl.stream.history import History as Log
from streamrl.stream.records import GroupArrived, GroupMoved, RunStarted
from streamrl.stream.segments import read_records
from streamrl.weights.shm.transport import ShmPublisher
from tests.chaos import crash_points, disk
from tests.chaos.history import History
from tests.chaos.hub import ForkedHub
from tests.chaos.mutants import MUTANTS
from tests.chaos.processes import ChaosSpec

VOCAB_SIZE = 100
NUM_WEIGHTS = 512
TIMES = {"heartbeat_s": 0.25, "hub_silent_s": 1.0, "hello_timeout_s": 1.0, "ack_timeout_s": 1.0, "chunk_timeout_s": 1.0}
"""Shorter than the product's, so that a run of seconds sees time-outs."""
_GROUPS = Decoder({4: TO_HUB[4]}, max_bytes=1 << 32)


def main(spec: ChaosSpec) -> int:
    spec.log_to("learner")
    history = History(spec.history, "learner")
    disk.journal(spec.disk_journal)
    if spec.mutant:
        MUTANTS[spec.mutant]("learner")
    crash_points.arm("learner", spec.armed, history)
    stops: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stops.append(number))
    try:
        FakeLearner(spec, history, stops).run()
    except StreamrlError as error:
        logging.getLogger("chaos").warning("the learner ends: %s", error)
        return 1
    return 0


class FakeLearner:
    """One life of it, from its lock to its end."""

    def __init__(self, spec: ChaosSpec, history: History, stops: list[int]) -> None:
        self.spec, self.history, self.stops = spec, history, stops
        self.lock = lock_run_dir(spec.run_dir)
        self.model = torch.nn.Linear(NUM_WEIGHTS, 1, bias=False)
        torch.nn.init.zeros_(self.model.weight)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5, momentum=0.9)
        self.version, self.lineage, restore_path, ended, first = 0, (), None, {}, 1
        found = find_checkpoint(spec.run_dir)
        if found is not None:
            found.restore(self.model, self.optimizer, Ranks())
            self.version, restore_path = found.version, found.path / "ledger.bin"
            self.lineage = tuple(Lineage(*one) for one in found.extra["lineage"])
            snapshot = _snapshot(restore_path.read_bytes())
            ended, first = _ended(snapshot), snapshot.next_sequence
        log = Log.read(spec.run_dir, first)
        unended = self.train_again(log)
        ended["dropped"] = [*ended.get("dropped", ()), *_dropped(spec.run_dir, first)]
        ended.setdefault("done_below", 0)
        self.first = self.version + len(unended)
        self.lineage = (*_lineage(self.lineage, log, self.first), Lineage(self.epoch, self.first, self.first))
        settings = hub_settings(
            spec.config, started=RunStarted("chaos", self.epoch, self.epoch, self.first, "{}", {}),
            run_dir=spec.run_dir, lineage=self.lineage, dp_ranks=(0,), bind=f"tcp://{spec.near}:{spec.hub_port}",
            rank_endpoint=f"ipc://{spec.folder}/ranks", shm_dir=spec.folder / "shm", vocab_size=VOCAB_SIZE,
            restore_path=restore_path,
        )
        settings = msgspec.structs.replace(settings, limits=msgspec.structs.replace(settings.limits, **TIMES))
        history.add("start", epoch=self.epoch, version=self.version, max_lag=settings.ledger.lag.max_lag,
                    digest=self.digest(), unended=len(unended), **ended)
        for frames in unended:
            self.train(frames)
        self.hub = ForkedHub(spec, settings)
        self.link = HubLink(
            settings.rank_endpoint, rank=0, world=1, version=self.version, check_hub=self.hub.check,
            stop_requested=lambda: bool(self.stops), stall_report_s=5, stall_fail_s=0,
        )
        self.link.wait_until_up()
        for number in range(len(unended)):
            self.link.trained(self.first - len(unended) + number + 1, skipped=False)
        self.publisher = Publisher(
            policy_parameters(self.model), wire_dtype=torch.float32, bucket_bytes=1 << 10,
            shm=ShmPublisher(spec.folder / "shm", "chaos"), fence=self.lock.check,
        )

    @property
    def epoch(self) -> int:
        return self.lock.learner_epoch

    def run(self) -> None:
        self.publish(first=True)
        while (batch := self.link.next_batch(self.version)) is not None:
            self.train(batch.groups)
            self.link.trained(self.version, skipped=False)
            self.publish()
            if self.version % self.spec.steps_per_checkpoint == 0:
                self.save()
        self.finish()

    def train_again(self, log: Log) -> list[list[bytes]]:
        """Train what the log has after the checkpoint; the frames of batches whose end it does not know are left."""
        unended = []
        for one in log.batches:
            frames = [arrived.frame for arrived in log.arrivals(one)]
            if one.step is None:
                unended.append(frames)
            else:
                self.step([_content(_GROUPS.decode(frame)) for frame in frames])
                self.version += 1
        return unended

    def train(self, groups: Sequence[bytes]) -> None:
        """One step on a batch, which the history has."""
        frames = [_content(_GROUPS.decode(frame)) for frame in groups]
        self.step(frames)
        self.history.add(
            "train", epoch=self.epoch, version=self.version, frames=[one["frame"] for one in frames],
            refs=sorted({ref for one in frames for ref in one["refs"]}), digest=self.digest(),
        )
        self.version += 1

    def step(self, frames: Sequence[Mapping[str, Any]]) -> None:
        """A gradient that depends on every delivery of the batch, and on nothing else."""
        seed = xxhash.xxh3_64_intdigest(repr([one["frame"] for one in frames]).encode()) >> 1
        generator = torch.Generator().manual_seed(seed)
        self.model.weight.grad = torch.randn(self.model.weight.shape, generator=generator)
        self.optimizer.step()

    def publish(self, *, first: bool = False) -> None:
        assets = self.spec.folder / "assets.msgpack"
        assets.write_bytes(b"no model")
        done = self.publisher.publish(VersionRef(self.epoch, self.version))
        assert done is not None
        self.history.add("publish", epoch=self.epoch, version=self.version, root=done.manifest.root.hex(),
                         content=content_digest(self.model.weight.detach()))
        self.link.publish(
            done.manifest, str(done.path), done.nbytes, self.publisher.layout if first else None, str(assets)
        )

    def save(self) -> None:
        state = self.link.freeze(self.version)
        lineage = (*self.lineage[:-1], Lineage(self.epoch, self.first, self.version))
        save_checkpoint(
            self.spec.run_dir, self.version, self.model, self.optimizer, Ranks(),
            extra={"learner_epoch": self.epoch, "lineage": [msgspec.structs.astuple(one) for one in lineage]},
            blobs={"ledger": state}, num_keep=2, lock=self.lock,
        )
        self.history.add("saved", epoch=self.epoch, version=self.version)
        self.link.saved(self.version)
        self.frozen = state

    def finish(self) -> None:
        """Save, say what the ledger still holds, and end the run; actors learn what became durable on the way."""
        self.history.add("closing")
        self.save()
        self.history.add("end", **_at_the_end(_snapshot(self.frozen), self.spec.run_dir))
        deadline = time.monotonic() + 0.5  # actors learn of the last checkpoint before they are stopped
        while time.monotonic() < deadline:
            self.link.refresh_status()
        self.link.shutdown("done", finished=True)
        self.hub.wait()
        self.link.close()

    def digest(self) -> str:
        return content_digest(self.model.weight.detach())


def content_digest(weights: torch.Tensor) -> str:
    return xxhash.xxh3_64_hexdigest(weights.contiguous().numpy().tobytes())


def _content(group: Any) -> dict[str, Any]:
    """What the history says of a frame, read from the frame itself."""
    assert isinstance(group, Group)
    members = [one for one in group.members if one.status != MemberStatus.ABORTED]
    return {
        "frame": [group.incarnation, group.seq, group.group_id, [one.index for one in members]],
        "refs": {(span.learner_epoch, span.version) for one in members for span in one.versions},
    }


def _snapshot(data: bytes) -> LedgerSnapshot:
    return read_snapshot(data, run_id="chaos", learner_epoch=1 << 31)


def _ended(snapshot: LedgerSnapshot) -> dict[str, Any]:
    """Which groups have ended in a checkpoint: all below a number, and of those above it the ones that were dropped."""
    dropped = [row.group_id for row in snapshot.settled if row.state is GroupState.DROPPED]
    return {"done_below": snapshot.done_below, "dropped": dropped}


def _dropped(run_dir: Path, first: int) -> list[int]:
    """Groups that the log says were dropped after the checkpoint."""
    moves = (one for _, one in read_records(run_dir, first) if isinstance(one, GroupMoved))
    return [one.group_id for one in moves if one.state == GroupState.DROPPED]


def _lineage(lineage: tuple[Lineage, ...], log: Log, version: int) -> tuple[Lineage, ...]:
    """Which epochs made which of the versions that the log leads to."""
    rows = [*lineage]
    for start in log.starts:
        if not rows or rows[-1].learner_epoch != start.learner_epoch:
            rows = [*(Lineage(one.learner_epoch, one.first, min(one.last, start.version)) for one in rows[:-1]),
                    *(Lineage(one.learner_epoch, one.first, start.version) for one in rows[-1:]),
                    Lineage(start.learner_epoch, start.version, start.version)]
    return (*rows[:-1], *(Lineage(one.learner_epoch, one.first, version) for one in rows[-1:]))


def _at_the_end(snapshot: LedgerSnapshot, run_dir: Path) -> dict[str, Any]:
    wanted = {sequence for record in snapshot.live for sequence in record.sequences}
    frames = [
        one.frame for sequence, one in read_records(run_dir, snapshot.first_sequence)
        if sequence in wanted and isinstance(one, GroupArrived)
    ]
    return {
        "next_id": snapshot.next_id, "live": [record.group_id for record in snapshot.live],
        "held": [_content(_GROUPS.decode(frame))["frame"] for frame in frames],
    }
