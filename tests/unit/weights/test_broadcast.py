"""Broadcasts over FakeCommunicators: members in threads and in processes, hangs, kills, and what is left behind."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch

from streamrl.errors import ConfigError, WeightsError
from streamrl.messages import Layout, NcclState, NcclTicket, Offer, VersionRef
from streamrl.weights.document import NotAvailable
from streamrl.weights.gpu import broadcast as broadcast_module
from streamrl.weights.gpu import nccl
from streamrl.weights.gpu.broadcast import Broadcaster, BroadcastMember, BroadcastReceiver
from streamrl.weights.gpu.nccl import (
    CommunicatorError,
    CommunicatorStuck,
    CupyCommunicator,
    CupyNccl,
    GuardedCommunicator,
    Threads,
    named_errors,
)
from streamrl.weights.manifest import document_nbytes
from streamrl.weights.transport import receive
from tests.fakes.communicator import FakeLibrary
from tests.unit.weights.conftest import random_bytes
from tests.unit.weights.device_wires import Memory, device_manifest

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.timeout(120)


class States:
    """What a member reports, and a way to wait for it."""

    def __init__(self) -> None:
        self.seen: list[NcclState] = []
        self._changed = threading.Condition()

    def __call__(self, state: NcclState) -> None:
        with self._changed:
            self.seen.append(state)
            self._changed.notify_all()

    def wait(self, what) -> NcclState:
        with self._changed:
            assert self._changed.wait_for(lambda: any(what(state) for state in self.seen), 30)
        return self.seen[-1]


class Group:
    """A broadcaster and members in threads; the test is the hub."""

    def __init__(self, layout: Layout, num_members: int = 2) -> None:
        self.layout, self.library = layout, FakeLibrary()
        self.sender = Broadcaster(self.library, "cpu")
        self.libraries = [FakeLibrary() for _ in range(num_members)]
        self.states = [States() for _ in range(num_members)]
        self.members = [
            BroadcastMember(library, "cpu", states)
            for library, states in zip(self.libraries, self.states, strict=True)
        ]
        self.offers: dict[VersionRef, list[Offer]] = {}
        self.bodies: dict[VersionRef, bytes] = {}

    def invite(self, epoch: int, unique_id: bytes, version: int = 1, *, deadline_s: float = 20.0) -> VersionRef:
        """Announce a version by this epoch to every member."""
        ref, world = VersionRef(1, version), len(self.members) + 1
        self.bodies[ref] = random_bytes(document_nbytes(self.layout), version)
        manifest = device_manifest(self.layout, ref, None, self.bodies[ref])
        tickets = [NcclTicket(epoch, unique_id, world, rank, deadline_s, deadline_s) for rank in range(1, world)]
        self.offers[ref] = [Offer("nccl", "", 0, manifest=manifest, nccl=ticket) for ticket in tickets]
        for member, ticket in zip(self.members, tickets, strict=True):
            member.invite(manifest, self.layout, ticket)
        return ref

    def form(self, epoch: int, version: int = 1) -> VersionRef:
        unique_id = self.sender.name()
        ref = self.invite(epoch, unique_id, version)
        self.sender.form(epoch, len(self.members) + 1, unique_id, 20.0)
        for states in self.states:
            states.wait(lambda state: state.formed == epoch)
        return ref

    def send(self, ref: VersionRef, deadline_s: float = 20.0) -> None:
        self.sender.send(ref, Memory(self.layout, self.bodies[ref]), deadline_s=deadline_s)

    def receive(self, place: int, ref: VersionRef) -> bytes:
        offer = self.offers[ref][place]
        fetched = receive(
            BroadcastReceiver(offer, self.members[place]), offer.manifest, self.layout, cancelled=threading.Event(),
            deadline=time.monotonic() + 30.0,
        )
        return fetched.document._buffer.numpy().tobytes()

    def close(self) -> None:
        self.sender.stop()
        for member in self.members:
            member.close()
        self.sender.close()


@pytest.fixture
def group(layout) -> Iterator[Group]:
    one = Group(layout)
    yield one
    one.close()


def test_an_unwanted_version_is_received_all_the_same_and_the_next_one_by_the_same_epoch(group):
    """A member whose installer looks the other way must not hold up the rest."""
    first = group.form(1)
    group.send(first)
    assert group.receive(1, first) == group.bodies[first]

    second = group.invite(1, b"not asked for again", 2)
    assert group.receive(1, first) == group.bodies[first], "until another has come the last one is kept"
    group.send(second)
    for place in (0, 1):
        assert group.receive(place, second) == group.bodies[second]
        with pytest.raises(NotAvailable, match="its epoch has ended"):
            group.receive(place, first)
    assert [[state.formed for state in states.seen] for states in group.states] == [[0, 1]] * 2, "formed once"
    assert [member.threads.num_abandoned for member in group.members] == [0, 0]


def test_an_epoch_that_failed_on_a_rank_is_not_joined_again(group):
    ref = group.form(1)
    group.members[0].uninvite(ref)
    group.states[0].wait(lambda state: state.failed == 1)
    later = group.invite(1, b"no group has this name", 2)
    with pytest.raises(NotAvailable, match="failed here before"):
        group.receive(0, later)

    third = group.form(2, 3)
    group.send(third)
    assert [group.receive(place, third) for place in (0, 1)] == [group.bodies[third]] * 2


def test_a_broadcast_of_another_version_than_the_one_announced_is_refused(group):
    ref = group.form(1)
    group.bodies[VersionRef(1, 9)] = group.bodies[ref]
    with pytest.raises(CommunicatorError):
        group.send(VersionRef(1, 9), deadline_s=0.5)
    with pytest.raises(WeightsError, match="version 1:9 was broadcast, 1:1 was announced"):
        group.receive(0, ref)


def test_a_newer_epoch_frees_a_member_from_one_that_hangs(group):
    group.form(1)  # and now the broadcaster says nothing
    ref = group.form(2, 2)
    group.send(ref)

    assert [group.receive(place, ref) for place in (0, 1)] == [group.bodies[ref]] * 2
    assert [member.threads.num_abandoned for member in group.members] == [0, 0]


def test_an_invitation_withdrawn_ends_the_wait_at_once(group):
    ref = group.form(1)
    waiting = threading.Timer(0.1, lambda: group.members[0].uninvite(ref))
    waiting.start()

    with pytest.raises(NotAvailable, match="was canceled"):
        group.receive(0, ref)
    group.states[0].wait(lambda state: state.failed == 1)


def test_a_member_that_falls_silent_ends_the_broadcast_by_its_deadline(group):
    ref = group.form(1)
    group.members[1].close()

    with pytest.raises(CommunicatorError):
        group.send(ref, deadline_s=0.5)
    assert group.sender.threads.num_abandoned == 0
    with pytest.raises(CommunicatorError):  # a communicator that failed is never used again
        group.send(ref)


def test_a_damaged_bucket_is_named_and_the_others_are_not_disturbed(group):
    def flip(data: bytearray) -> None:
        if len(data) == 400:
            data[3] ^= 1

    ref = group.form(1)
    group.libraries[0].damage = flip
    group.send(ref)

    with pytest.raises(WeightsError, match="bucket 0 of 5 of version 1:1 has digest"):
        group.receive(0, ref)
    assert group.receive(1, ref) == group.bodies[ref]
    assert group.states[0].wait(lambda state: state.failed == 1).formed == 0


def test_a_member_that_runs_out_of_memory_ends_one_epoch_and_comes_back_to_none(group, monkeypatch):
    ref, whole = group.form(1), broadcast_module.empty_document
    monkeypatch.setattr(broadcast_module, "empty_document", lambda nbytes, device: whole(1 << 60, device))
    with pytest.raises(CommunicatorError):
        group.send(ref, deadline_s=1.0)

    for place, states in enumerate(group.states):
        states.wait(lambda state: state.failed == 1 and state.broken)
        with pytest.raises(NotAvailable, match="no memory for a document"):
            group.receive(place, ref)
    monkeypatch.undo()
    group.invite(2, group.sender.name(), 2)
    for states, member in zip(group.states, group.members, strict=True):
        states.wait(lambda state: state.failed == 2)
        assert member.broken and states.seen[-1].broken


@pytest.mark.parametrize(("free", "broken"), [(None, False), (2.0, False), (1.9, True)])
def test_a_member_without_room_for_two_documents_says_so_before_it_is_invited(free, broken):
    nbytes, states = 1 << 20, States()
    member = BroadcastMember(
        FakeLibrary(), "cpu", states, free=lambda device: None if free is None else int(free * nbytes)
    )
    member.expect(nbytes)
    if broken:
        states.wait(lambda state: state.broken)
    member.close()
    assert member.broken == broken


def test_a_hung_connection_is_abandoned_counted_and_makes_the_member_useless_until_it_ends(layout, monkeypatch):
    monkeypatch.setattr("streamrl.weights.gpu.broadcast.GRACE_S", 0.1)
    one = Group(layout, 1)
    release = threading.Event()
    one.libraries[0].connect = lambda *args: release.wait()
    ref = one.invite(1, one.sender.name(), deadline_s=0.2)

    with pytest.raises(WeightsError):
        one.receive(0, ref)
    assert one.states[0].wait(lambda state: state.broken).failed == 1
    assert one.members[0].threads.num_abandoned == 1

    release.set()
    one.states[0].wait(lambda state: not state.broken and state.failed == 1)
    assert one.members[0].threads.num_abandoned == 0
    one.close()


def test_an_abort_that_hangs_is_more_than_a_process_can_live_with(monkeypatch):
    monkeypatch.setattr(nccl, "ABORT_DEADLINE_S", 0.5)
    library, threads = FakeLibrary(), Threads()
    unique_id = library.unique_id()
    other = threading.Thread(target=lambda: FakeLibrary().connect(2, unique_id, 1).test(), daemon=True)
    other.start()
    guard = GuardedCommunicator(library, threads, rank=0, world=2, unique_id=unique_id, what="epoch 1")
    guard.form(20.0)
    library.abort_hangs.set()

    with pytest.raises(CommunicatorStuck, match="restart this process"):
        guard.broadcast(torch.zeros(8, dtype=torch.uint8), 0.2)
    assert threads.num_abandoned == 1


def test_stop_ends_a_call_in_progress_from_another_thread():
    library, threads = FakeLibrary(), Threads()
    unique_id = library.unique_id()
    threading.Thread(target=lambda: FakeLibrary().connect(2, unique_id, 1).test(), daemon=True).start()
    guard = GuardedCommunicator(library, threads, rank=0, world=2, unique_id=unique_id, what="epoch 1")
    guard.form(20.0)
    threading.Timer(0.1, guard.stop).start()

    with pytest.raises(CommunicatorError, match="stopped"):
        guard.broadcast(torch.zeros(8, dtype=torch.uint8), 60.0)
    assert threads.num_abandoned == 0


MEMBER = """
import os, sys, threading, time, msgspec, torch
from streamrl.messages import Layout, Offer
from streamrl.weights.gpu.broadcast import BroadcastMember, BroadcastReceiver
from streamrl.weights.transport import receive
from tests.fakes.communicator import FakeLibrary

torch.set_num_threads(1)
layout = msgspec.msgpack.decode(bytes.fromhex(sys.stdin.readline()), type=Layout)
def say(*words):  # in one write: two threads speak
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

member = BroadcastMember(FakeLibrary(), "cpu", lambda state: say("state", state.formed, state.failed))
say("ready now")
for line in sys.stdin:
    offer = msgspec.msgpack.decode(bytes.fromhex(line), type=Offer)
    came = BroadcastReceiver(offer, member)
    try:
        fetched = receive(came, offer.manifest, layout, cancelled=threading.Event(), deadline=time.monotonic() + 20)
        say("body", fetched.document._buffer.numpy().tobytes().hex())
    except Exception as error:
        say("error", type(error).__name__)
"""


class MemberProcess:
    def __init__(self, layout: Layout, environment: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", MEMBER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
            cwd=ROOT,
        )
        self.tell(layout)
        self.hear("ready")

    def tell(self, message: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.msgpack.encode(message).hex() + "\n")
        self.process.stdin.flush()

    def hear(self, word: str) -> str:
        assert self.process.stdout is not None
        while not (line := self.process.stdout.readline()).startswith(word):
            assert line, "the member ended"
        return line.split(maxsplit=1)[1].strip()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.mark.timeout(300)
def test_a_member_process_killed_in_the_middle_of_a_broadcast_costs_a_deadline_and_a_new_epoch(layout, python_env):
    library = FakeLibrary()
    sender = Broadcaster(library, "cpu")
    members = [MemberProcess(layout, python_env) for _ in range(2)]
    bodies = {version: random_bytes(document_nbytes(layout), version) for version in (1, 2)}
    manifests = {v: device_manifest(layout, VersionRef(1, v), None, body) for v, body in bodies.items()}

    def invite(epoch: int, version: int, unique_id: bytes, *who: MemberProcess) -> None:
        for rank, member in enumerate(who, start=1):
            ticket = NcclTicket(epoch, unique_id, len(who) + 1, rank, 30.0, 5.0)
            member.tell(Offer("nccl", "", 0, manifest=manifests[version], nccl=ticket))

    def send(version: int, deadline_s: float = 10.0) -> None:
        sender.send(VersionRef(1, version), Memory(layout, bodies[version]), deadline_s=deadline_s)

    def kill_in_the_third(rank: int, nbytes: int) -> None:
        calls.append(nbytes)
        if len(calls) == 3:  # the header and a bucket have come everywhere
            members[1].process.send_signal(signal.SIGKILL)
            members[1].process.wait()

    try:
        invite(1, 1, unique_id := sender.name(), *members)
        sender.form(1, 3, unique_id, 30.0)
        send(1)
        assert [member.hear("body") for member in members] == [bodies[1].hex()] * 2

        calls: list[int] = []
        library.on_broadcast = kill_in_the_third
        invite(1, 2, b"", *members)
        with pytest.raises(CommunicatorError):
            send(2, deadline_s=1.0)
        assert members[0].hear("error") in ("CommunicatorError", "NotAvailable") and len(calls) == 3
        invite(2, 2, unique_id := sender.name(), members[0])
        sender.form(2, 2, unique_id, 30.0)
        send(2)
        assert members[0].hear("body") == bodies[2].hex()
    finally:
        sender.close()
        for member in members:
            member.close()


# --- the door to cupy -------------------------------------------------------------------------------------------------


def test_nccl_without_a_gpu_is_refused_by_name():
    with pytest.raises(ConfigError, match="device here is cpu"):
        CupyNccl("cpu")


def test_nccl_without_cupy_says_what_to_install(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "cupy", None)

    with pytest.raises(ConfigError, match=r"pip install 'streamrl\[nccl\]'"):
        CupyNccl("cuda")


def test_all_calls_of_a_communicator_are_made_by_one_thread_that_ends_with_it():
    library, callers = FakeLibrary(), []
    unique_id, connect = library.unique_id(), library.connect

    def noted(*place):
        callers.append(threading.current_thread())
        inner = connect(*place)
        broadcast = inner.broadcast
        inner.broadcast = lambda buffer: (callers.append(threading.current_thread()), broadcast(buffer))
        return inner

    library.connect = noted
    guard = GuardedCommunicator(library, Threads(), rank=0, world=1, unique_id=unique_id, what="epoch 1")
    guard.form(30.0)
    for _ in range(3):
        guard.broadcast(torch.zeros(4, dtype=torch.uint8), 30.0)
    guard.close()

    assert len(callers) == 4 and len(set(callers)) == 1
    callers[0].join(30)
    assert not callers[0].is_alive()


class FakeStream:
    """Waits for its kernel, which only an abort ends."""

    cuda_stream = 0

    def __init__(self, *_: object) -> None:
        self.waiting, self.ended = threading.Event(), threading.Event()

    def wait_stream(self, _other: object) -> None:
        pass

    def synchronize(self) -> None:
        self.waiting.set()
        assert self.ended.wait(30)


def test_an_aborted_communicator_is_not_asked_for_its_error(monkeypatch):
    """Its memory may be gone: the abort ends the kernel that a broadcast waits for before it has freed everything."""
    stream, freed, asked = FakeStream(), threading.Event(), []
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)

    def abort() -> None:
        stream.ended.set()
        assert freed.wait(30)

    inner = SimpleNamespace(bcast=lambda *_: None, abort=abort, check_async_error=lambda: asked.append(1))
    one = CupyCommunicator(SimpleNamespace(NCCL_UINT8=1), inner, torch.device("cpu"), 2)
    outcome: list[Exception] = []

    def receive() -> None:
        try:
            one.broadcast(torch.zeros(4, dtype=torch.uint8))
        except WeightsError as error:
            outcome.append(error)

    threads = [threading.Thread(target=work, daemon=True) for work in (receive, one.abort)]
    threads[0].start()
    assert stream.waiting.wait(30)
    threads[1].start()
    threads[0].join(30)
    freed.set()
    threads[1].join(30)

    assert "aborted" in str(outcome[0]) and not asked


@pytest.mark.parametrize(("number", "words"), [(6, "NCCL error 6 .remote error"), (7, "NCCL error 7 .operation in")])
def test_errors_of_nccl_that_cupy_cannot_name_keep_their_number(number, words):
    with pytest.raises(WeightsError, match=words), named_errors():
        raise KeyError(number)
    with pytest.raises(KeyError), named_errors():
        raise KeyError("another")
