"""One measured run: a real hub process, a trainer that takes every batch at once, and a fleet of actors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import torch

from bench.plane.fleet import VOCAB_SIZE
from learner.hub_client.link import HubLink
from learner.hub_client.process import HubProcess
from learner.hub_client.settings import hub_settings
from learner.publish.publisher import Publisher
from streamrl.config.load import load_config
from streamrl.messages import Lineage, VersionRef
from streamrl.processes import Child
from streamrl.stream.records import RunStarted
from streamrl.transport.keys import KeyDirectory
from streamrl.weights.shm.transport import ShmPublisher

PUBLISH_S = 2.0
"""A version is published this often, and before half of the lead is used up."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Parameters of one run; capacity is two leases an actor."""

    num_actors: int
    group_size: int = 16
    num_tokens: int = 1000
    max_leases: int = 2
    curve: bool = False
    group_s: float = 0.0
    """Mean duration of a group, drawn log-normal with `sigma`; 0 answers at once."""
    sigma: float = 0.0
    install_s: float = 0.0
    durable: bool = False
    """Actors keep what was accepted until a checkpoint has it, as in a run with checkpoints."""
    words: tuple[str, ...] = ()
    """Settings of the run in place of those that load the hub most."""
    num_ranks: int = 1
    """Data-parallel ranks that batches are split over; the plane itself is rank 0."""

    @property
    def groups_per_batch(self) -> int:
        return min(128, max(8, self.num_actors))

    @property
    def eta(self) -> int:
        return -(-2 * self.max_leases * self.num_actors // self.groups_per_batch) + 8


class Plane:
    """Hub, trainer and fleet of one run; use it in a `with` block."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self._home = tempfile.TemporaryDirectory(prefix="plane-")
        self.folder = Path(self._home.name)
        words = [
            "experiment=quickstart", f"rollout.num_prompts_per_step={sizes.groups_per_batch}",
            f"rollout.num_responses_per_prompt={sizes.group_size}", f"staleness.eta={sizes.eta}",
            f"staleness.num_lookahead_groups={4 * sizes.num_actors + 4096}", "trainer.num_steps=1000000",
            "samples.num_per_step=0", f"checkpoint.every_steps={int(sizes.durable)}",
            "publish.probe_every=0", "filter.zero_std=false",
            f"rollout.train.sampling.max_new_tokens={sizes.num_tokens}", "rollout.max_prompt_tokens=64",
            f"learner.max_tokens_per_device={2 * sizes.num_tokens}",
        ]
        self.key = ""
        if sizes.curve:
            keys = KeyDirectory.create(self.folder / "keys")
            self.key = str(keys.add("actor"))
            words.append(f"hub.keys={self.folder}/keys")
        self.config = load_config(list(sizes.words) if sizes.words else words)
        self.version = self.num_batches = self.num_starts = 0
        self.epoch, self.lineage = 1, ()
        self.bind = "tcp://127.0.0.1:0"
        self._start_hub(None)
        self.fleet: subprocess.Popen[bytes] | None = None

    def _start_hub(self, restore: Path | None) -> None:
        run_dir = self.folder / "run"
        run_dir.mkdir(exist_ok=True)
        self._sockets = tempfile.TemporaryDirectory(prefix="plane-")  # a socket's path must be short
        self.num_starts += 1
        settings = hub_settings(
            self.config, started=RunStarted("plane", self.num_starts, self.epoch, self.version, "{}", {}),
            run_dir=run_dir, lineage=self.lineage, dp_ranks=tuple(range(self.sizes.num_ranks)), bind=self.bind,
            rank_endpoint=f"ipc://{self._sockets.name}/ranks",
            shm_dir=self.folder / "shm", vocab_size=VOCAB_SIZE, restore_path=restore,
        )
        limits = msgspec.structs.replace(settings.limits, max_new_tokens=self.sizes.num_tokens)
        settings = msgspec.structs.replace(settings, limits=limits, ledger=replace(settings.ledger, limits=limits))
        with patch.dict(os.environ, {"STREAMRL_LOG": "ERROR"}):  # of the hub's process alone
            self.hub = HubProcess(settings)
        self.link = HubLink(
            settings.rank_endpoint, rank=0, world=self.sizes.num_ranks, version=self.version, check_hub=self.hub.check,
            stop_requested=lambda: False, stall_report_s=1e9, stall_fail_s=0,
        )
        self.link.wait_until_up()
        self.rank_endpoint = settings.rank_endpoint
        self.shm = ShmPublisher(self.folder / "shm", "plane")
        self.publisher = Publisher(
            [("w", torch.zeros(64))], wire_dtype=torch.float32, bucket_bytes=1 << 16, shm=self.shm
        )
        (self.folder / "assets").write_bytes(b"none")
        found = json.loads((run_dir / "hub.json").read_text())
        self.endpoint, self.hub_pid = found["connect"], found["pid"]
        self.publish(first=True)

    def publish(self, *, first: bool = False) -> None:
        done = self.publisher.publish(VersionRef(self.epoch, self.version))
        assert done is not None
        layout = self.publisher.layout if first else None
        self.link.publish(done.manifest, str(done.path), done.nbytes, layout, str(self.folder / "assets"))
        self._published_at, self._published = time.monotonic(), self.version

    def start_fleet(self) -> None:
        sizes = self.sizes
        options = {
            "endpoint": self.endpoint, "num_actors": sizes.num_actors, "group_size": sizes.group_size,
            "num_tokens": sizes.num_tokens, "max_leases": sizes.max_leases, "key": self.key,
            "report": str(self.folder / "fleet.json"), "stop": str(self.folder / "stop"),
            "group_s": sizes.group_s, "sigma": sizes.sigma, "install_s": sizes.install_s,
        }
        self.fleet = Child([sys.executable, "-m", "bench.plane.fleet", json.dumps(options)]).process

    def fleet_report(self) -> dict[str, Any]:
        with suppress(OSError, ValueError):
            return json.loads((self.folder / "fleet.json").read_text())
        return {"linked": 0, "joined": 0, "groups": 0, "outbox": 0, "cpu_s": 0.0, "unsettled": 0}

    def train(self, seconds: float) -> tuple[int, float]:
        """Take batches for so long: (trajectories, seconds until the last of them came)."""
        began = last = time.monotonic()
        num = 0
        while (now := time.monotonic()) - began < seconds:
            share = self.link.next_batch(self.version)
            assert share is not None
            num += len(share.plan)
            last = time.monotonic()
            self.version += 1
            self.num_batches += 1
            self.link.trained(self.version, skipped=False)
            behind = self.version - self._published
            if behind >= self.sizes.eta // 2 or (behind and now - self._published_at > PUBLISH_S):
                self.publish()
                if self.sizes.durable:
                    self.link.freeze(self.version)
                    self.link.saved(self.version)
        return num, last - began

    def train_slowly(self, seconds: float, step_s: float) -> tuple[int, Counter[int]]:
        """Steps of a given length, each published: (batches, lag of every trajectory) of so many seconds."""
        began, first, lags = time.monotonic(), self.version, Counter[int]()
        while time.monotonic() - began < seconds:
            share = self.link.next_batch(self.version)
            assert share is not None
            lags.update(row.head_lag for row in share.plan)
            time.sleep(step_s)
            self.version += 1
            self.link.trained(self.version, skipped=False)
            self.publish()
        return self.version - first, lags

    def counters(self) -> dict[str, float]:
        self.link.refresh_status()
        return dict(self.link.status.counters)

    def hub_cpu_s(self) -> float:
        fields = Path(f"/proc/{self.hub_pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def hub_memory_bytes(self) -> int:
        return int(Path(f"/proc/{self.hub_pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def wait_for_actors(self, timeout_s: float = 120.0) -> float:
        """Until all are linked; seconds."""
        began = time.monotonic()
        while self.fleet_report()["linked"] < self.sizes.num_actors:
            if time.monotonic() - began > timeout_s:
                raise TimeoutError(f"only {self.fleet_report()['linked']} of {self.sizes.num_actors} actors joined")
            self.link.poll()
            time.sleep(0.05)
        return time.monotonic() - began

    def restart_hub(self) -> None:
        """Restarts the hub as after a resume: same ledger and address, another epoch."""
        state = self.link.freeze(self.version)
        path = self.folder / "ledger.bin"
        path.write_bytes(state)
        self.link.shutdown("restart", finished=False)
        self.hub.wait(30.0)
        self.link.close()
        self.shm.close()
        self.lineage = (*self.lineage, Lineage(self.epoch, 0 if self.epoch == 1 else self.version, self.version))
        self.epoch += 1
        self.bind = self.endpoint
        self._start_hub(path)

    def __enter__(self) -> Plane:
        return self

    def __exit__(self, *_: object) -> None:
        (self.folder / "stop").touch()
        if self.fleet is not None:
            with suppress(subprocess.TimeoutExpired):
                self.fleet.wait(20)
            self.fleet.kill()
        self.link.shutdown("done", finished=True)
        self.link.close()
        self.hub.wait(10.0)
        self.hub.abandon()
        self.shm.close()
        self._home.cleanup()
