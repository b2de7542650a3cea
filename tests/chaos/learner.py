"""A learner without a model: real lock, hub, link, checkpoints and documents; its step is a function of the batch."""

from __future__ import annotations

import logging
import signal
import time
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
from learner.model.parameters import policy_parameters
from learner.publish.publisher import Publisher
from learner.ranks.mesh import Ranks
from streamrl.errors import StreamrlError
from streamrl.messages import TO_HUB, BatchShare, Group, Lineage, MemberStatus, VersionRef
from streamrl.messages.codec import Decoder
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
        self.version, self.lineage, restore_path, ended = 0, (), None, {}
        found = find_checkpoint(spec.run_dir)
        if found is not None:
            found.restore(self.model, self.optimizer, Ranks())
            self.version, restore_path = found.version, found.path / "ledger.bin"
            self.lineage = tuple(Lineage(*one) for one in found.extra["lineage"])
            ended = _ended(_snapshot(restore_path.read_bytes()))
        self.first = self.version
        settings = hub_settings(
            spec.config, run_id="chaos", run_dir=spec.run_dir, learner_epoch=self.epoch, version=self.version,
            lineage=self.lineage, dp_ranks=(0,), bind=f"tcp://{spec.near}:{spec.hub_port}",
            rank_endpoint=f"ipc://{spec.folder}/ranks", shm_dir=spec.folder / "shm", vocab_size=VOCAB_SIZE,
            restore_path=restore_path,
        )
        settings = msgspec.structs.replace(settings, limits=msgspec.structs.replace(settings.limits, **TIMES))
        history.add("start", epoch=self.epoch, version=self.version, max_lag=settings.ledger.lag.max_lag,
                    digest=self.digest(), **ended)
        self.hub = ForkedHub(spec, settings)
        self.link = HubLink(
            settings.rank_endpoint, rank=0, world=1, version=self.version, check_hub=self.hub.check,
            stop_requested=lambda: bool(self.stops), stall_report_s=5, stall_fail_s=0,
        )
        self.link.wait_until_up()
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
            self.train(batch)
            self.link.trained(self.version, skipped=False)
            self.publish()
            if self.version % self.spec.steps_per_checkpoint == 0:
                self.save()
        self.finish()

    def train(self, batch: BatchShare) -> None:
        """A gradient that depends on every delivery of the batch, and on nothing else."""
        frames = [_content(_GROUPS.decode(frame)) for frame in batch.groups]
        seed = xxhash.xxh3_64_intdigest(repr([one["frame"] for one in frames]).encode()) >> 1
        generator = torch.Generator().manual_seed(seed)
        self.model.weight.grad = torch.randn(self.model.weight.shape, generator=generator)
        self.optimizer.step()
        self.history.add(
            "train", epoch=self.epoch, version=self.version, frames=[one["frame"] for one in frames],
            refs=sorted({ref for one in frames for ref in one["refs"]}), digest=self.digest(),
        )
        self.version += 1

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
        lineage = (*self.lineage, Lineage(self.epoch, self.first, self.version))
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
        self.history.add("end", **_at_the_end(_snapshot(self.frozen)))
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


def _at_the_end(snapshot: LedgerSnapshot) -> dict[str, Any]:
    return {
        "next_id": snapshot.next_id, "live": [record.group_id for record in snapshot.live],
        "held": [_content(_GROUPS.decode(frame))["frame"] for record in snapshot.live for frame in record.frames],
    }
