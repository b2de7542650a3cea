"""The conformance suite against the ways from GPU to GPU, on stand-ins for the GPU's parts."""

from __future__ import annotations

import pytest

from streamrl.messages import InstallSource
from tests.unit.weights.conformance import TransportConformance
from tests.unit.weights.device_wires import FakeBroadcastWire, FakeSlotWire


class TestBroadcastOverFakeCommunicators(TransportConformance):
    sources = {InstallSource.NCCL}

    @pytest.fixture
    def wire(self, layout):
        wire = FakeBroadcastWire(layout)
        yield wire
        wire.close()


class TestSlotsOverFakeMemory(TransportConformance):
    sources = {InstallSource.IPC}

    @pytest.fixture
    def wire(self, layout, tmp_path):
        wire = FakeSlotWire(layout, tmp_path)
        yield wire
        wire.close()
