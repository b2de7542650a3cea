"""The shell around the slots: real threads and sockets, with files where a GPU's memory would be."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from streamrl.messages import Layout, Manifest, Offer, VersionRef
from streamrl.weights.document import NotAvailable, Superseded
from streamrl.weights.gpu import ipc as ipc_module
from streamrl.weights.gpu.ipc import RESTS_S, IpcBufferReader, IpcBufferReceiver, IpcBufferServer, PeerBackoff
from streamrl.weights.manifest import document_nbytes
from streamrl.weights.transport import receive
from tests.fakes.device_memory import FakeDeviceMemory
from tests.unit.weights.conftest import random_bytes
from tests.unit.weights.device_wires import Memory, device_manifest

pytestmark = pytest.mark.timeout(60)
NEVER_S = 600.0


def until(condition: Callable[[], object]) -> None:
    """Look again and again; the test's own time limit ends it."""
    while not condition():
        threading.Event().wait(0.01)


class Slots:
    """A broadcaster's slots, and readers of them."""

    def __init__(self, folder, context, layout: Layout) -> None:
        self.layout, self.body = layout, random_bytes(document_nbytes(layout), 1)
        self.manifest = device_manifest(layout, VersionRef(1, 1), None, self.body)
        self.document = Memory(layout, self.body)
        self._folder, self._context = folder, context
        self._home = tempfile.TemporaryDirectory(prefix="slots-")
        self._servers: list[IpcBufferServer] = []

    def serve(self, deadline_s: float) -> IpcBufferServer:
        self._servers.append(IpcBufferServer(
            FakeDeviceMemory(self._folder), self._context, f"ipc://{self._home.name}/{len(self._servers)}",
            slot_bytes=max(self.layout.bucket_bytes), deadline_s=deadline_s,
        ))
        self._servers[-1].publish(self.manifest.ref, self.document)
        return self._servers[-1]

    def reader(self) -> IpcBufferReader:
        return IpcBufferReader(FakeDeviceMemory(self._folder), self._context)

    def read(
        self, reader: IpcBufferReader, server: IpcBufferServer, manifest: Manifest | None = None,
        cancelled: threading.Event | None = None,
    ) -> bytes:
        manifest = manifest or self.manifest
        offer = Offer("ipc", server.endpoint, len(self.body), manifest=manifest, slots=server.ticket)
        document = receive(
            IpcBufferReceiver(offer, reader), manifest, self.layout, cancelled=cancelled or threading.Event(),
            deadline=time.monotonic() + NEVER_S,
        ).document
        return document._buffer.cpu().numpy().tobytes()

    def close(self) -> None:
        for server in self._servers:
            server.close()
        self._home.cleanup()


@pytest.fixture
def slots(tmp_path, context, layout) -> Iterator[Slots]:
    one = Slots(tmp_path, context, layout)
    yield one
    one.close()


def test_a_reader_without_memory_to_check_a_bucket_in_frees_its_place_at_once(slots, monkeypatch):
    server = slots.serve(deadline_s=NEVER_S)

    def out_of_memory(index: int, *_) -> None:
        if index == len(slots.layout.bucket_bytes) - 2:  # the last one lies in its slot already: no word will miss it
            raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(ipc_module, "check_device_bucket", out_of_memory)
        slots.read(slots.reader(), server)

    until(lambda: server._ring._sent is None)  # its deadline is further away than this test's own limit
    assert slots.read(slots.reader(), server) == slots.body


def test_a_reader_without_memory_for_a_document_asks_for_no_slot_and_not_again(tmp_path, context, caplog):
    reader = IpcBufferReader(FakeDeviceMemory(tmp_path), context)
    for _ in range(2):
        with pytest.raises(NotAvailable, match="memory for a document"):
            reader.allocate(1 << 60)
    assert caplog.text.count("no weights by ipc from now on") == 1
    assert reader.allocate(8).numel() == 8  # a smaller model


def test_a_broadcaster_that_says_nothing_is_left_out_for_a_while_and_its_successor_is_asked_at_once(slots, monkeypatch):
    server = slots.serve(deadline_s=0.2)
    hangs = threading.Event()
    slots.document.before_fill = lambda index: hangs.wait(NEVER_S)
    reader = slots.reader()
    with pytest.raises(NotAvailable, match="bucket 0 .* did not arrive in time"):
        slots.read(reader, server)

    monkeypatch.setattr(reader.context, "socket", lambda kind: pytest.fail("it was asked again"))
    with pytest.raises(NotAvailable, match="did not answer and is skipped for 30 s"):
        slots.read(reader, server)
    monkeypatch.undo()

    slots.document.before_fill = lambda index: None
    assert slots.read(reader, slots.serve(deadline_s=NEVER_S)) == slots.body
    hangs.set()


def test_a_silence_is_noticed_although_every_fetch_of_it_is_abandoned_for_a_newer_version(slots):
    """A version every few seconds: none of them waits long enough to find out by itself."""
    server = slots.serve(deadline_s=0.5)
    hangs = threading.Event()
    slots.document.before_fill = lambda index: hangs.wait(NEVER_S)
    reader = slots.reader()

    def newer_version() -> str:
        cancelled = threading.Event()
        timer = threading.Timer(0.2, cancelled.set)
        timer.start()
        try:
            slots.read(reader, server, cancelled=cancelled)
        except (Superseded, NotAvailable) as error:
            return str(error)
        finally:
            timer.cancel()

    until(lambda: "is skipped" in newer_version())
    hangs.set()


def test_waiting_for_one_peer_says_nothing_of_another_and_a_word_ends_a_silence():
    one = PeerBackoff()
    assert not one.waited("a", 6, 10, 0.0) and not one.waited("b", 6, 10, 1.0)
    assert not one.waited("b", 3, 10, 2.0)
    one.heard("a")
    one.heard("b")
    assert not one.waited("b", 9, 10, 3.0) and not one.rests("b", 3.0)
    assert one.waited("b", 1, 10, 4.0) and one.rests("b", 4.0) and not one.rests("a", 4.0)
    assert not one.rests("b", 4.0 + RESTS_S)


def test_slots_whose_copy_does_not_end_are_stuck_and_slots_without_work_are_not(slots):
    server = slots.serve(deadline_s=0.2)
    hangs = threading.Event()
    slots.document.before_fill = lambda index: hangs.wait(NEVER_S)
    assert not server.stuck
    with pytest.raises(NotAvailable):
        slots.read(slots.reader(), server)
    until(lambda: server.stuck)
    hangs.set()
    until(lambda: not server.stuck)
    server.close()
    assert server.stuck
