"""One whole session in bytes: `python -m tests.contract.protocol_session` prints the site's page.

Both ends are real: the hub's handlers and ledger, and the actor's session. What would differ from run to run (times,
ports, tokens) is given.
"""

import json
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import zmq

from learner.hub.context.connections import Connections
from learner.hub.context.hub_context import HubContext
from learner.hub.context.weight_server import WeightServer
from learner.hub.handlers.actors import ActorHandler
from learner.hub.handlers.broadcaster import BroadcastHandler
from learner.hub.setup import open_ledger
from streamrl import messages
from streamrl.config.load import load_config
from streamrl.messages import (
    FROM_WEIGHTS,
    TO_ACTOR,
    TO_HUB,
    TO_WEIGHTS,
    Group,
    Installed,
    InstallSource,
    Lease,
    Leases,
    Member,
    MemberStatus,
    Message,
    Outcome,
    Pull,
    PullMode,
    ReturnReason,
    Span,
    Turn,
    VersionRef,
    Welcome,
)
from streamrl.messages.codec import Decoder, encode, pack_ids, pack_logprobs
from streamrl.stream.records import StepTaken
from streamrl.transport.session import ActorSession, Deliver, Effect, Send
from tests.conform.__main__ import RUN, settings_of
from tests.conform.requirements import REQUIREMENTS
from tests.conform.weights import Model

MODEL = Model([("weight", "float32", (3, 2))], bytes(range(24)), msgspec.msgpack.encode({"config.json": b"{}"}))
SETTINGS = (*RUN, "rollout.num_prompts_per_step=1", "run.seed=1", "hub.heartbeat_s=1")
KINDS = {
    "actor to hub": TO_HUB, "hub to actor": TO_ACTOR, "actor to weights": TO_WEIGHTS, "weights to actor": FROM_WEIGHTS,
}
DECODERS = {way: Decoder(kinds) for way, kinds in KINDS.items()}
HEAD = """# One session in bytes

Every frame of a short session, as `python -m tests.contract.protocol_session` writes it from the hub's own handlers
and ledger and an actor's own session. Under each name stand the fields of the body, then the frame, of
which the first 16 bytes are the preamble. [Protocol](protocol.md) says what they mean. The task of this run has one
setting, its model 24 bytes in three buckets. The [tables of messages](#messages) stand at the end.
"""
PARTS = (
    "VersionRef Lineage Limits Lease Sampling Member SequenceStart Span Turn Rejection Layout TensorSpec Manifest "
    "Probe Probed Base Offer NcclTicket NcclState IpcBufferTicket"
).split()
ENUMS = (
    "ActorState Purpose Outcome ReturnReason MemberStatus RejectReason InstallSource StopReason PullMode ChunkStatus"
).split()
"""Structs inside messages, and the enums of their fields, in the order of the tables."""


@dataclass
class Session:
    """Records what passes between an actor and a hub; `now` is the clock of both."""

    run_dir: Path
    now: float = 1.0
    frames: list[tuple[str, bytes, str, bytes]] = field(default_factory=list)
    welcome: Welcome | None = None
    leases: list[Lease] = field(default_factory=list)
    note: str = ""

    def __post_init__(self) -> None:
        settings = settings_of(load_config([*SETTINGS, "hub.bind=tcp://127.0.0.1:0"]), self.run_dir, MODEL, 64)
        limits = msgspec.structs.replace(settings.limits, heartbeat_s=1.0, hub_silent_s=3.0)
        task = '{"env": {"name": "sum"}}'
        started = msgspec.structs.replace(settings.started, run_id="demo-1")
        settings = msgspec.structs.replace(settings, started=started, limits=limits, welcome_task=task)
        self._zmq = zmq.Context()
        self.weights = WeightServer(self._zmq, settings, "learner")
        self.weights.pull_token, self.weights.endpoint = bytes(range(16)), "tcp://learner:5602"
        ledger, self.log = open_ledger(settings)
        self.hub = HubContext(settings, ledger, self.log, Connections(), self.weights, self, Counter())  # type: ignore[arg-type]
        self._broadcast = BroadcastHandler(self.hub, None)
        self.handler = ActorHandler(self.hub, self._broadcast)
        self.actor = ActorSession(
            "box-1", 7, engine="uniform", max_leases=1, transports=("zmq",), software="foreign 1",
        )

    def publish(self, version: int) -> None:
        message = MODEL.publication(self.run_dir, VersionRef(1, version), first=not version)
        self.weights.publish(message, self.now)
        self.hub.ledger.publish(message.manifest)
        self._broadcast.published(message, self.now)

    def to_actor(self, routing_id: bytes, message: Message, *, protocol: int = 1) -> bool:
        """The hub's way out."""
        self._add("hub to actor", bytes(encode(message)))
        if isinstance(message, Leases):
            self.leases += message.grants
        self.by_actor(self.actor.received(message, self.now))
        return True

    def by_actor(self, effects: list[Effect]) -> None:
        """Carry out what the actor's session asks for."""
        for effect in effects:
            if isinstance(effect, Send):
                frame = bytes(effect.frame)
                self._add("actor to hub", frame)
                self.handler.received(b"box-1", [frame], self.now)
            elif isinstance(effect, Deliver) and isinstance(effect.event, Welcome):
                self.welcome = effect.event

    def pull(self, mode: PullMode, length: int, note: str) -> None:
        self.note = note
        pull = Pull(self.weights.pull_token, VersionRef(1, 0), mode, 0, 0, length)
        self._add("actor to weights", bytes(encode(pull)))
        assert self.weights._chunks is not None
        chunk, payload = self.weights._chunks.answer(pull)
        self._add("weights to actor", bytes(encode(chunk)), bytes(payload))

    def _add(self, way: str, frame: bytes, payload: bytes = b"") -> None:
        self.frames.append((way, frame, self.note, payload))
        self.note = ""

    def sync(self) -> None:
        """Wait until the log has what happened, and the actor knows it."""
        self.log.flush(self.now)
        while self.log.durable < self.hub.ledger.journal.next_sequence - 1:
            time.sleep(0.001)
            self.log.flush(self.now)
        self.handler.flush_acks(self.now)  # once: it lets time pass between two
        assert not len(self.actor.outbox)

    def close(self) -> None:
        self.log.close()
        self.weights.socket.close()
        self._zmq.term()


def play(one: Session) -> None:
    """One session from HELLO to BYE."""
    one.publish(0)
    one.note = "The first message of a process. It comes again, with back-off, until there is an answer."
    one.by_actor(one.actor.start(one.now))
    assert one.welcome is not None and one.welcome.manifest is not None and one.welcome.layout is not None
    one.pull(PullMode.ASSETS, len(MODEL.assets), "The model's small files: a MessagePack map of name to bytes.")
    one.pull(PullMode.FULL, 8, "Bucket 0 of the weights, in one piece. Buckets 1 and 2 follow in the same way.")
    one.now += 0.2
    manifest = one.welcome.manifest
    one.note = "All buckets have their digests, the root is right, and the engine generates with this version."
    one.actor.progress.free = one.actor.progress.max_leases = 1
    one.by_actor(one.actor.report_installed(
        Installed(manifest.ref, manifest.root, True, InstallSource.ZMQ, 0.125, 0.0, 0.0, 0.0, 24, ""), one.now,
    ))
    one.note = "One lease, because one is free: two answers to one prompt."
    one.handler.grant(one.now)
    one.now += 0.5
    one.note = "The answers: three tokens each, drawn by version 0 of learner epoch 1."
    one.by_actor(one.actor.submit(answer_to(one.leases[0], manifest.ref), one.now))
    one.note = "The running ledger holds it. It stays in the outbox."
    one.handler.flush_acks(one.now)
    one.now += 0.1
    one.note = "The log on the hub's disk holds it: now it may be forgotten."
    one.sync()
    assert one.hub.ledger.cut_batch(0) is not None
    one.hub.ledger.end_batch(StepTaken(1, False))
    one.note = "The learner has trained on it. What an install is worth to report looks as above."
    one.publish(1)
    one.actor.progress.free = 0
    one.note = "The actor wants to leave."
    one.by_actor(one.actor.drain("SIGTERM", one.now))
    one.note = "Nothing is open any more."
    one.by_actor(one.actor.tick(one.now))


def answer_to(lease: Lease, ref: VersionRef) -> Group:
    members = tuple(
        Member(
            index, MemberStatus.FINISHED, pack_ids([10, 11]) if index == 0 else b"", pack_ids([5 + index, 6, 2]),
            pack_logprobs([-0.5, -0.25, -1.0]), ((0, 3),), (Span(ref.learner_epoch, ref.version, 0, 3),),
            (Turn(0, 3, 1.0 - index),), 1.0 - index, {}, "stop",
        ) for index in lease.members
    )
    return Group(
        0, 0, lease.group_id, lease.attempt, Outcome.COMPLETE, ReturnReason.NONE, "", lease.sampling, members, {},
    )


def page() -> str:
    """The whole page."""
    with tempfile.TemporaryDirectory() as run_dir:
        one = Session(Path(run_dir))
        try:
            play(one)
        finally:
            one.close()
    return HEAD + "".join(_section(number, *frame) for number, frame in enumerate(one.frames, 1)) + tables()


def tables() -> str:
    """Every message, struct and enum of the protocol, and what the examination of an actor requires."""
    kinds = {(kind, cls) for known in KINDS.values() for kind, cls in known.items()}
    rows = [
        f"{kind} | `{cls.__name__}` | {', '.join(way for way, known in KINDS.items() if known.get(kind) is cls)} | "
        f"{_fields(cls)}" for kind, cls in sorted(kinds, key=lambda one: (one[0], one[1].__name__))
    ]
    values = {name: ", ".join(f"{one.value} `{one.name}`" for one in getattr(messages, name)) for name in ENUMS}
    return (
        _table("Messages", "kind | name | direction | fields, in order", rows)
        + _table("Parts of messages", "struct | fields, in order",
                 [f"`{name}` | {_fields(getattr(messages, name))}" for name in PARTS])
        + _table("Enums", "enum | values", [f"`{name}` | {text}" for name, text in values.items()])
        + _table("Requirements of an actor", "`python -m tests.conform` asks | what must hold",
                 [f"`{name}` | {sentence}" for name, sentence in REQUIREMENTS.items()])
    )


def _table(title: str, head: str, rows: list[str]) -> str:
    line = "|".join("---" for _ in head.split(" | "))
    return f"\n## {title}\n\n| {head} |\n|{line}|\n" + "".join(f"| {row} |\n" for row in rows)


def _fields(cls: type[msgspec.Struct]) -> str:
    return ", ".join(f"`{one.name}`" for one in msgspec.structs.fields(cls))


def _section(number: int, way: str, frame: bytes, note: str, payload: bytes) -> str:
    message = DECODERS[way].decode(frame)
    fields = "\n".join(f"{name} = {_shown(getattr(message, name))}" for name in message.__struct_fields__)
    second = f"\nIts second frame, the payload:\n\n```text\n{_hex(payload)}\n```\n" if payload else ""
    return (f"\n## {number}. {type(message).__name__}, {way}\n\n" + (f"{note}\n\n" if note else "")
            + f"```text\n{fields}\n```\n\n```text\n{_hex(frame)}\n```\n{second}")


def _hex(raw: bytes) -> str:
    return "\n".join(raw[start : start + 32].hex(" ") for start in range(0, len(raw), 32))


def _shown(value: Any) -> str:
    """A field as a reader wants it: structs as arrays, bytes in hexadecimal."""
    if isinstance(value, bytes):
        return f"<{value.hex()}>"
    if isinstance(value, msgspec.Struct):
        return _shown(tuple(_of(value)))
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(_shown, value))}]"
    if isinstance(value, (str, dict)):
        return json.dumps(value)
    if value is None or isinstance(value, bool):
        return {None: "nil", True: "true", False: "false"}[value]
    return f"{value:g}" if isinstance(value, float) else str(int(value))


def _of(value: msgspec.Struct) -> Iterator[Any]:
    return (getattr(value, name) for name in value.__struct_fields__)


if __name__ == "__main__":
    print(page(), end="")
