"""Mutated frames and raw bytes at the ports of a real hub process, beside an honest actor that must be answered."""

import json
import os
import random
import socket
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import zmq

from learner.hub_client.link import HubLink
from learner.hub_client.process import HubProcess
from learner.hub_client.settings import hub_settings
from learner.publish.publisher import Publisher
from streamrl.errors import WireError
from streamrl.messages import (
    RANK_TO_HUB,
    TO_ACTOR,
    ActorHeartbeat,
    ActorState,
    Hello,
    HubHeartbeat,
    Message,
    VersionRef,
    Welcome,
)
from streamrl.messages.codec import Decoder, encode
from streamrl.weights.shm.transport import ShmPublisher
from tests.chaos.fuzz import MAX_GROWTH_BYTES, mixed
from tests.unit.config.setting_harness import config_of
from tests.unit.hub.factories import run_started

_RANKS = Decoder(RANK_TO_HUB)
PATIENCE_MS = 20_000
NUM_IDLE = 32
"""Connections that never say a word, and as many that stop in the middle of the greeting."""


class FuzzedHub:
    """A hub process with a published version, and the honest ends of its sockets."""

    def __init__(self, folder: Path) -> None:
        home = tempfile.mkdtemp(prefix="fuzz-")
        self.rank_endpoint = f"ipc://{home}/ranks"
        (folder / "run").mkdir()
        settings = hub_settings(
            config_of(), started=run_started("fuzz"), run_dir=folder / "run", lineage=(), dp_ranks=(0,),
            bind="tcp://127.0.0.1:0", rank_endpoint=self.rank_endpoint, shm_dir=folder / "shm", vocab_size=100,
            restore_path=None,
        )
        with patch.dict(os.environ, {"STREAMRL_LOG": "CRITICAL"}):  # of the hub's process alone
            self.process = HubProcess(settings)
        self.link = HubLink(
            self.rank_endpoint, rank=0, world=1, version=0, check_hub=self.process.check, stop_requested=lambda: False,
            stall_report_s=60, stall_fail_s=0,
        )
        self.link.wait_until_up()
        self.shm = ShmPublisher(folder / "shm", "fuzz")
        publisher = Publisher([("w", torch.zeros(8))], wire_dtype=torch.float32, bucket_bytes=1024, shm=self.shm)
        done = publisher.publish(VersionRef(1, 0))
        assert done is not None
        (folder / "assets").write_bytes(b"assets")
        self.link.publish(done.manifest, str(done.path), done.nbytes, publisher.layout, str(folder / "assets"))
        self.link.refresh_status()
        addresses = json.loads((folder / "run" / "hub.json").read_text())
        self.actor_endpoint, self.weights_endpoint = addresses["connect"], addresses["weights"]
        self.pid = addresses["pid"]
        self.context = zmq.Context()

    def dealer(self, endpoint: str) -> zmq.Socket:
        made = self.context.socket(zmq.DEALER)
        made.setsockopt(zmq.LINGER, 0)
        made.connect(endpoint)
        return made

    def memory_bytes(self) -> int:
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def num_files(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def close(self) -> None:
        self.link.shutdown("done", finished=True)
        self.link.close()
        self.process.abandon()
        self.shm.close()
        self.context.destroy(linger=0)


class HonestActor:
    """Joins and sends heartbeats; each must be answered."""

    def __init__(self, hub: FuzzedHub) -> None:
        self._hub, self._decoder, self._beat = hub, Decoder(TO_ACTOR), 0
        self._socket = hub.dealer(hub.actor_endpoint)
        self._join()

    def _join(self) -> None:
        self._socket.send(encode(Hello(
            protocol_min=1, protocol_max=1, actor_id="honest", incarnation=7, run_id=None, engine="fake",
            software="fuzz", max_leases=0, transports=("zmq",), installed=None, held=(), outbox=(), next_seq=1,
        )))
        self._receive(Welcome)

    def ask(self) -> float:
        """Seconds until its heartbeat is answered."""
        self._beat += 1
        began = time.monotonic()
        self._socket.send(encode(ActorHeartbeat(7, self._beat, ActorState.RUNNING, 0, 0, None, 0, (), 0, 0)))
        self._receive(HubHeartbeat)
        return time.monotonic() - began

    def _receive(self, kind: type[Message]) -> None:
        while True:
            assert self._socket.poll(PATIENCE_MS), f"the hub sent no {kind.__name__} for {PATIENCE_MS / 1000:g} s"
            message = self._decoder.decode(self._socket.recv())
            if isinstance(message, kind):
                return


def fuzz_ports(seed: int, seconds: float, num_frames: int = 1 << 60) -> dict[str, Any]:
    """Frames at all three ports and raw bytes at the two public ones; what was sent and how the hub bore it.

    Raises AssertionError: the hub ended, stopped answering, or grew by more than 64 MiB.
    """
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="fuzz-run-") as folder:
        hub = FuzzedHub(Path(folder))
        try:
            honest, frames, rng = HonestActor(hub), mixed(seed), random.Random(seed)
            idle = [_raw(one) for one in (hub.actor_endpoint, hub.weights_endpoint) for _ in range(NUM_IDLE // 2)]
            began_bytes, slowest = _warm(hub, honest, frames), 0.0
            deadline, number = time.monotonic() + seconds, 0
            while number < num_frames and time.monotonic() < deadline:
                for name, endpoint in (("actors", hub.actor_endpoint), ("weights", hub.weights_endpoint),
                                       ("ranks", hub.rank_endpoint)):
                    number += _burst(hub.dealer(endpoint), frames, rng, counts, name)
                for endpoint in (hub.actor_endpoint, hub.weights_endpoint):
                    _noise(endpoint, rng)
                    counts["raw connections"] += 1
                slowest = max(slowest, honest.ask())
                hub.process.check()
            grown = hub.memory_bytes() - began_bytes
            assert grown <= MAX_GROWTH_BYTES, f"the hub grew by {grown} bytes over {number} frames"
            hub.link.refresh_status()
            for one in idle:
                one.close()
            refused = {key: value for key, value in hub.link.status.counters.items() if "wire_errors" in key and value}
            return {**counts, "frames": number, "growth_bytes": grown, "open_files": hub.num_files(),
                    "slowest_heartbeat_s": round(slowest, 3), "refused": refused}
        finally:
            hub.close()


def _warm(hub: FuzzedHub, honest: HonestActor, frames: Any) -> int:
    """Memory after the first frames: what the interpreter and libzmq take once is no growth."""
    rng, counts = random.Random(0), Counter[str]()
    for name, endpoint in (("actors", hub.actor_endpoint), ("weights", hub.weights_endpoint),
                           ("ranks", hub.rank_endpoint)) * 5:
        _burst(hub.dealer(endpoint), frames, rng, counts, name)
    honest.ask()
    return hub.memory_bytes()


def _burst(dealer: zmq.Socket, frames: Any, rng: random.Random, counts: Counter[str], name: str) -> int:
    """One connection: a few hundred messages, some of several frames or none; then it is closed."""
    num = 300
    try:
        for _ in range(num):
            parts = [next(frames) for _ in range(1 if rng.random() < 0.95 else rng.randint(2, 4))]
            if rng.random() < 0.01 or (name == "ranks" and _is_command(parts)):
                parts = [b""]
            dealer.send_multipart(parts)
        counts[name] += num
        dealer.poll(5)  # so that it is connected and sent before it closes
    finally:
        dealer.close(linger=1000)
    return num


def _is_command(parts: list[bytes]) -> bool:
    """Whether the hub would obey: its own learner is who may end it."""
    try:
        _RANKS.decode(parts[0])
    except WireError:
        return False
    return len(parts) == 1


def _raw(endpoint: str) -> socket.socket:
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    made = socket.create_connection((host, int(port)), timeout=10)
    return made


def _noise(endpoint: str, rng: random.Random) -> None:
    """Bytes that are no ZMTP: noise, half a greeting, or a greeting and then noise."""
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)
    with _raw(endpoint) as made:
        made.settimeout(1)
        try:
            made.sendall(rng.choice((
                rng.randbytes(100), greeting[:20], greeting[:64] + rng.randbytes(200), b"GET / \n"
            )))
            made.recv(64)
        except OSError:
            pass
