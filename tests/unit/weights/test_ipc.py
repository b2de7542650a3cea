"""The shell around the slots: real threads and sockets, with files where a GPU's memory would be."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from streamrl.messages import Layout, Manifest, Offer, VersionRef
from streamrl.weights import ipc as ipc_module
from streamrl.weights.ipc import SlotReader, SlotReceiver, SlotServer
from streamrl.weights.manifest import document_nbytes
from tests.fake_slots import FakeSlotMemory
from tests.unit.weights.conftest import random_bytes
from tests.unit.weights.device_wires import Memory, device_manifest

pytestmark = pytest.mark.timeout(60)
NEVER_S = 600.0


def until(condition: Callable[[], object]) -> None:
    """Look again and again; the test's own time limit ends it."""
    while not condition():
        threading.Event().wait(0.01)


class Slots:
    """A sender's slots, and readers of them."""

    def __init__(self, folder, context, layout: Layout) -> None:
        self.layout, self.body = layout, random_bytes(document_nbytes(layout), 1)
        self.manifest = device_manifest(layout, VersionRef(1, 1), None, self.body)
        self.document = Memory(layout, self.body)
        self._folder, self._context = folder, context
        self._home = tempfile.TemporaryDirectory(prefix="slots-")
        self._servers: list[SlotServer] = []

    def serve(self, deadline_s: float) -> SlotServer:
        self._servers.append(SlotServer(
            FakeSlotMemory(self._folder), self._context, f"ipc://{self._home.name}/{len(self._servers)}",
            slot_bytes=max(self.layout.bucket_bytes), deadline_s=deadline_s,
        ))
        self._servers[-1].publish(self.manifest.ref, self.document)
        return self._servers[-1]

    def reader(self) -> SlotReader:
        return SlotReader(FakeSlotMemory(self._folder), self._context)

    def read(
        self, reader: SlotReader, server: SlotServer, manifest: Manifest | None = None,
        cancelled: threading.Event | None = None,
    ) -> bytes:
        manifest = manifest or self.manifest
        offer = Offer("ipc", server.endpoint, len(self.body), manifest=manifest, slots=server.ticket)
        document, _, _ = SlotReceiver(offer, reader).receive(
            manifest, self.layout, cancelled=cancelled or threading.Event(), deadline=time.monotonic() + NEVER_S
        )
        return document.host_bytes()

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

    until(lambda: server._ring._pass is None)  # its deadline is further away than this test's own limit
    assert slots.read(slots.reader(), server) == slots.body
