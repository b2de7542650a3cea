"""A real hub in a thread, a real model in shared memory, and real sockets that talk to both."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import zmq
from transformers import AutoModelForCausalLM

from learner.hub.context.broadcaster_process import BroadcasterProcess
from learner.hub.context.settings import HubSettings
from learner.hub.server import HubServer
from learner.hub_client.link import HubLink
from learner.hub_client.settings import hub_settings
from learner.model.paths import wire_dtype
from learner.model.policy import policy_parameters
from learner.model.tiny import make_tiny_model
from learner.publish.publisher import Publisher
from learner.ranks.mesh import Ranks
from streamrl.config.load import from_plain, load_config, to_plain
from streamrl.config.schema import Config
from streamrl.messages import TO_ACTOR, Hello, Manifest, Message, Probe, VersionRef, Welcome
from streamrl.messages.codec import Decoder, encode
from streamrl.transport.keys import ActorKey
from streamrl.transport.sockets import actor_dealer
from streamrl.weights.assets import pack_assets
from streamrl.weights.shm.transport import ShmPublisher
from streamrl.weights.transport import device_transports
from tests.unit.hub.factories import run_started

BASE = to_plain(load_config(["experiment=quickstart", "rollout.num_prompts_per_step=2", "hub.dead_after_s=60"]))
CHARACTERS = "abcdefghij"
VOCAB_SIZE = 4 + len(CHARACTERS)
PATIENCE_MS = 20_000


def config_of(*words: str) -> Config:
    """A small quickstart with these overrides."""
    return from_plain(BASE, words)


def tiny_model(directory: Path, seed: int = 0, *, characters: str = CHARACTERS) -> Path:
    return make_tiny_model(
        directory, characters=characters, hidden_size=16, num_layers=1, num_heads=2, max_positions=512, seed=seed
    )


class LiveHub:
    """A hub as a learner of `config` would start it, and that learner's connection to it. Use it in a `with` block."""

    def __init__(
        self, path: Path, config: Config, *, vocab_size: int = VOCAB_SIZE,
        start_broadcaster: Callable[[HubSettings], BroadcasterProcess] = BroadcasterProcess, bind: str | None = None,
    ) -> None:
        self.path, self.config = path, config
        self._home = tempfile.TemporaryDirectory(prefix="hub-")  # the path of a local socket must be short
        self.link_endpoint = endpoint = f"ipc://{self._home.name}/ranks"
        self.server = HubServer(hub_settings(
            config, started=run_started(), run_dir=path, lineage=(), dp_ranks=(0,),
            bind=bind or config.hub.bind, rank_endpoint=endpoint, shm_dir=path / "shm", vocab_size=vocab_size,
            restore_path=None,
        ), start_broadcaster=start_broadcaster)
        self._gone = threading.Event()
        self._thread = threading.Thread(target=self.server.run, args=(self._gone.is_set,), name="hub")
        self._thread.start()
        self.link = HubLink(
            endpoint, rank=0, world=1, version=0, check_hub=lambda: None, stop_requested=lambda: False,
            stall_report_s=60, stall_fail_s=0,
        )
        self.link.wait_until_up()
        self.shm = ShmPublisher(path / "shm", "run", config.publish.num_keep_versions)
        self._publisher: Publisher | None = None
        self.context = zmq.Context()

    def publish(self, version: int, model_dir: Path, probe: Probe | None = None) -> Manifest:
        """Make this model's weights the version, and its files the assets; waits until the hub has them."""
        if self._publisher is None:
            assets = self.path / "assets.msgpack"
            assets.write_bytes(pack_assets(model_dir))
            self._publisher = Publisher(
                policy_parameters(AutoModelForCausalLM.from_pretrained(model_dir)),
                wire_dtype=wire_dtype(self.config.publish.dtype, Ranks().device),
                bucket_bytes=self.config.publish.bucket_bytes, shm=self.shm,
                fold=bool(device_transports(self.config.publish.transports, setting="publish.transports")),
            )
            layout, assets_path = self._publisher.layout, str(assets)
        else:
            layout, assets_path = None, ""
        done = self._publisher.publish(VersionRef(1, version))
        assert done is not None
        manifest = msgspec.structs.replace(done.manifest, probe=probe)
        self.link.publish(manifest, str(done.path), done.nbytes, layout, assets_path, done.device_manifest)
        self.link.refresh_status()
        return done.manifest

    def connect(self, key: ActorKey | None = None) -> Peer:
        return Peer(actor_dealer(self.context, self.server.endpoint, key=key))

    def __enter__(self) -> LiveHub:
        return self

    def __exit__(self, *_: object) -> None:
        self._gone.set()
        self._thread.join(timeout=20)
        self.link.close()
        self.server.close()
        self.shm.close()
        self.context.destroy(linger=0)
        self._home.cleanup()


class Peer:
    """An actor's socket, without the actor."""

    def __init__(self, socket: zmq.Socket) -> None:
        self._socket, self._decoder = socket, Decoder(TO_ACTOR)

    def send(self, message: Message) -> None:
        self._socket.send(encode(message))

    def close(self) -> None:
        self._socket.close(linger=0)

    def receive(self, kind: type[Message]) -> Any:
        """The next message of this kind."""
        while True:
            assert self._socket.poll(PATIENCE_MS), f"no {kind.__name__} arrived"
            message = self._decoder.decode(self._socket.recv())
            if isinstance(message, kind):
                return message

    def received_before(self, end: type[Message], kind: type[Message]) -> list[Any]:
        """Every message of this kind that comes before the next one of kind `end`."""
        found = []
        while not isinstance(message := self.receive(Message), end):
            found += [message] if isinstance(message, kind) else []
        return found

    def join(self, actor_id: str = "a1") -> Welcome:
        self.hello(actor_id)
        return self.receive(Welcome)

    def hello(self, actor_id: str, incarnation: int = 11) -> None:
        self.send(Hello(
            protocol_min=1, protocol_max=1, actor_id=actor_id, incarnation=incarnation, run_id=None, engine="test",
            software="test", max_leases=4, transports=("zmq",), installed=None, held=(), outbox=(), next_seq=1,
        ))
