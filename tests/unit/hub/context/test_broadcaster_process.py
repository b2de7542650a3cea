"""The broadcaster process as the hub sees it: one that dies, is stopped, hangs or survives kill costs no version."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from learner.hub.context.broadcaster_process import START_S, BroadcasterProcess, BroadcasterWatch
from learner.hub.context.settings import HubSettings
from streamrl.messages import Announce, BroadcastDocument, IpcBufferTicket
from tests.kit.system import until
from tests.unit.hub.broadcast_harness import ScriptedBroadcaster

NEAR = ("ipc", "zmq")
ROOT = Path(__file__).parents[4]

SENDER = """
import os, sys
from pathlib import Path
import zmq
from learner.broadcaster.service import BroadcasterService
from streamrl.weights.gpu.ipc import IpcBufferServer
from tests.fakes.device_memory import FakeDeviceMemory
endpoint, folder, slot_bytes, deadline_s = sys.argv[1:]
context = zmq.Context()
slots = IpcBufferServer(
    FakeDeviceMemory(Path(folder), "gpu-7"), context, f"ipc://{folder}/{os.getpid()}", slot_bytes=int(slot_bytes),
    deadline_s=float(deadline_s),
)
BroadcasterService(
    context, endpoint, broadcaster=None, slots=slots, init_deadline_s=20.0, bucket_deadline_s=float(deadline_s),
    pinned=False,
).run(lambda: os.getppid() == 1)
"""


class RealBroadcaster:
    """The broadcaster's loop in a process of its own, with files where a GPU's memory would be."""

    def __init__(self, settings: HubSettings, folder: str) -> None:
        words = [settings.rank_endpoint, folder, settings.publish.bucket_bytes, settings.publish.nccl_bucket_deadline_s]
        self.process = subprocess.Popen([sys.executable, "-c", SENDER, *map(str, words)], cwd=ROOT)

    def alive(self) -> bool:
        return self.exit_status() is None

    def exit_status(self) -> int | None:
        return self.process.poll()

    def kill(self) -> None:
        self.process.kill()


@pytest.fixture
def real_broadcasters():
    made: list[RealBroadcaster] = []
    with tempfile.TemporaryDirectory(prefix="slots-") as folder:

        def make(settings: HubSettings) -> RealBroadcaster:
            made.append(RealBroadcaster(settings, folder))
            return made[-1]

        yield make
        for one in made:
            one.process.kill()
            one.process.wait()


def sockets(announce: Announce) -> list[str]:
    return [offer.name for offer in announce.offers if offer.transport == "ipc"]


def test_a_broadcaster_process_that_is_stopped_is_ended_and_its_successor_is_offered(harness, real_broadcasters):
    one = harness("publish.nccl_bucket_deadline_s=1", make_broadcaster=real_broadcasters)
    first, devices = one.broadcaster(), one.hub.server.broadcast
    until(lambda: devices._up is not None)
    near = one.actor("near", transports=NEAR, device="gpu-7")
    one.publish()
    (socket,) = sockets(near.receive(Announce))

    os.kill(first.process.pid, signal.SIGSTOP)
    second = one.broadcaster()
    until(lambda: devices._up is not None and devices._up.socket != socket)

    one.publish()
    assert sockets(near.receive(Announce)) == [devices._up.socket]
    until(lambda: not first.alive())
    assert first.process.returncode == -signal.SIGKILL and second.alive()
    assert devices.metrics()["num_sender_restarts"] == 1


class Undying(ScriptedBroadcaster):
    """In the hands of a driver: told to end, and there all the same."""

    def __init__(self, settings: HubSettings, slots: IpcBufferTicket | None = None) -> None:
        super().__init__(settings, slots)
        self.ended = False

    def alive(self) -> bool:
        return not self.ended


def test_a_broadcaster_that_will_not_die_is_replaced_all_the_same_and_reaped_when_it_does(harness):
    one = harness("publish.nccl_bucket_deadline_s=0.1", make_broadcaster=Undying)
    first = one.broadcaster()
    second = one.broadcaster()

    assert first.killed.is_set() and second.receive(BroadcastDocument).manifest.ref.version == 0
    devices = one.hub.server.broadcast
    assert first in devices._ended
    first.ended = True
    until(lambda: first not in devices._ended)


def test_ending_a_real_broadcaster_process_waits_for_nothing_and_leaves_no_zombie(harness):
    broadcaster = BroadcasterProcess(harness().broadcaster().settings)
    assert broadcaster.alive()

    broadcaster.kill()
    assert broadcaster._process.returncode is None, "the hub did not wait for its end"
    until(lambda: not broadcaster.alive())
    assert not Path(f"/proc/{broadcaster._process.pid}").exists()


def watch_at(*seconds: float) -> BroadcasterWatch:
    """One that ticks every tenth of a second between these times; it has heard its broadcaster at the first."""
    one = BroadcasterWatch(15.0)
    one.started()
    one.tick(seconds[0])
    one.heard()
    for first, last in zip(seconds, seconds[1:], strict=False):
        for tick in range(1, round((last - first) * 10) + 1):
            one.tick(first + tick / 10)
    return one


def test_silence_is_counted_from_the_last_report():
    one = watch_at(100.0, 114.9)
    assert not one.hangs
    one.heard()
    one.tick(115.9)
    assert not one.hangs and one.silent_s == pytest.approx(1.0)
    assert watch_at(100.0, 115.2).hangs


def test_a_hub_that_was_stopped_itself_replaces_no_broadcaster():
    one = watch_at(100.0, 101.0)
    one.tick(10_000.0)
    assert not one.hangs


def test_before_its_first_word_a_broadcaster_has_the_time_to_load_its_libraries():
    one = watch_at(100.0, 114.0)
    one.started()
    for tick in range(int(START_S)):
        one.tick(115.0 + tick)
        assert not one.hangs
    one.tick(115.0 + START_S + 1)
    assert one.hangs
