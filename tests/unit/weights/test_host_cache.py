"""Actors of one host pull a version once between them, whichever of them dies, stops or lies."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from streamrl.errors import WeightsError
from streamrl.messages import Announce, InstallSource, Offer
from streamrl.weights.document import Superseded
from streamrl.weights.manifest import make_manifest
from streamrl.weights.pull import host_cache as host_share
from streamrl.weights.pull.chunk_server import ChunkServer
from streamrl.weights.pull.host_cache import HostShare, has_room, turn
from streamrl.weights.shm.directory import LOCK_NAME
from streamrl.weights.transport import WeightSource

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def root(tmp_path) -> Path:
    """Stands for shared memory."""
    path = tmp_path / "shm"
    path.mkdir()
    return path


@pytest.fixture
def member(context, limits, token, root):
    """member(run_id) -> an actor of this host as far as weights go; they all leave at the end."""
    made: list[WeightSource] = []

    def make(run_id: str = "run") -> WeightSource:
        one = WeightSource(context, pull_token=token, limits=limits)
        del one.factories["shm"]
        one.share = HostShare(run_id, root)
        made.append(one)
        return one

    yield make
    for one in made:
        one.close()


@pytest.fixture
def hub(serve, token, publish, layout):
    """hub(version, bytes_per_s) -> (router, manifest, offers, body) of a version that is served from afar."""

    def start(version: int = 1, *, bytes_per_s: float | None = None, tamper=None):
        manifest, path, body = publish(layout, version)
        server = ChunkServer(pull_token=token, bytes_per_s=bytes_per_s, max_chunk_bytes=64)
        server.add(manifest, path, layout)
        router = serve(server, tamper)
        return router, manifest, (Offer("zmq", router.endpoint, len(body)),), body

    return start


def whole(fetched) -> bytes:
    return bytes(fetched.document.view(0, fetched.document.nbytes))


def test_many_members_pull_a_version_once_and_all_get_it_whole(hub, member, layout, root):
    router, manifest, offers, body = hub()
    members = [member() for _ in range(6)]

    with ThreadPoolExecutor(len(members)) as threads:
        fetched = list(threads.map(lambda one: one.fetch(manifest, offers, layout), members))

    assert {whole(one) for one in fetched} == {body}
    assert sorted(one.source for one in fetched) == [InstallSource.SHM] * 5 + [InstallSource.ZMQ]
    assert router.answered == sum(-(-size // 64) for size in layout.bucket_bytes), "every chunk left the hub once"


def test_the_last_member_removes_what_they_shared_and_mappings_outlive_it(hub, member, layout, root):
    _, manifest, offers, body = hub()
    first, last = member(), member()
    first.fetch(manifest, offers, layout)
    held = last.fetch(manifest, offers, layout)

    first.close()
    assert len(list(root.iterdir())) == 1
    last.close()

    assert list(root.iterdir()) == [] and whole(held) == body


def test_versions_that_are_no_longer_needed_are_removed(hub, member, layout, root):
    one = member()
    for version in (1, 2, 3, 4):
        _, manifest, offers, _ = hub(version)
        one.fetch(manifest, offers, layout)

    (directory,) = root.iterdir()
    documents = sorted(path.name for path in directory.iterdir() if path.name.count(".") == 3)
    assert [name.split(".")[2] for name in documents] == ["3", "4"]


def test_other_weights_under_the_same_number_never_meet(hub, member, layout, publish):
    _, manifest, offers, body = hub()
    other, _, _ = publish(layout, 1, epoch=2)
    namesake = make_manifest(layout, manifest.ref, None, other.digests)
    member().fetch(manifest, offers, layout)

    with pytest.raises(WeightsError, match="digest"):
        member().fetch(namesake, offers, layout)  # the hub serves what it has: the shared file is not even looked at
    assert whole(member().fetch(manifest, offers, layout)) == body


@pytest.mark.parametrize("damage", ["other bytes", "cut", "no document", "empty"])
def test_a_file_with_other_bytes_is_removed_and_pulled_again(hub, member, layout, damage):
    _, manifest, offers, body = hub()
    first, second = member(), member()
    first.fetch(manifest, offers, layout)
    path = first.share.document_path(manifest)
    raw = bytearray(path.read_bytes())
    path.unlink()
    if damage == "other bytes":
        raw[500] ^= 1
    path.write_bytes({"cut": raw[:900], "no document": os.urandom(len(raw)), "empty": b""}.get(damage, bytes(raw)))

    found = second.fetch(manifest, offers, layout)

    assert whole(found) == body and found.source == InstallSource.ZMQ
    assert whole(member().fetch(manifest, offers, layout)) == body


PULL = """
import sys, time
from pathlib import Path
import msgspec, zmq
from streamrl.messages import Announce, Layout, Limits
from streamrl.weights.pull.host_cache import HostShare
from streamrl.weights.transport import WeightSource
announce = msgspec.msgpack.decode(Path(sys.argv[1]).read_bytes(), type=Announce)
layout = msgspec.msgpack.decode(Path(sys.argv[2]).read_bytes(), type=Layout)
source = WeightSource(zmq.Context(), pull_token=b"0123456789abcdef", limits=Limits(chunk_bytes=64, pull_window=4))
del source.factories["shm"]
source.share = HostShare("run", Path(sys.argv[3]))
source.fetch(announce.manifest, announce.offers, layout)
print("done", flush=True)
time.sleep(600)
"""


@pytest.fixture
def child(tmp_path, python_env, root, layout):
    """child(manifest, offers) -> another process of this host that pulls that version."""
    children: list[subprocess.Popen] = []

    def start(manifest, offers) -> subprocess.Popen:
        (tmp_path / "announce").write_bytes(msgspec.msgpack.encode(Announce(manifest, offers)))
        (tmp_path / "layout").write_bytes(msgspec.msgpack.encode(layout))
        words = [sys.executable, "-c", PULL, tmp_path / "announce", tmp_path / "layout", root]
        children.append(subprocess.Popen([str(word) for word in words], env=python_env, stdout=subprocess.PIPE))
        return children[-1]

    yield start
    for process in children:
        process.kill()
        process.wait()
        process.stdout.close()


class Stuck:
    """A hub that answers the first few PULLs and then keeps its pullers waiting, until it is told to go on."""

    def __init__(self, num_answers: int) -> None:
        self.num_answers, self.reached, self.open = num_answers, threading.Event(), False

    def __call__(self, count, chunk, payload):
        if count >= self.num_answers:
            self.reached.set()
            return (chunk, payload) if self.open else None
        return chunk, payload


def test_when_the_puller_is_killed_another_member_takes_over(hub, member, child, layout):
    stuck = Stuck(9)
    _, manifest, offers, body = hub(tamper=stuck)
    puller = child(manifest, offers)
    assert stuck.reached.wait(200)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(member().fetch, manifest, offers, layout)
        puller.kill()
        stuck.open = True
        found = waiting.result(200)

    assert whole(found) == body and found.source == InstallSource.ZMQ


def test_a_puller_that_is_stopped_is_not_waited_for(hub, member, child, layout, monkeypatch):
    monkeypatch.setattr(host_share, "STOPPED_S", 1.5)
    stuck = Stuck(9)
    _, manifest, offers, body = hub(tamper=stuck)
    puller = child(manifest, offers)
    assert stuck.reached.wait(200)
    os.kill(puller.pid, signal.SIGSTOP)
    stuck.open = True

    found = member().fetch(manifest, offers, layout)

    assert whole(found) == body and found.source == InstallSource.ZMQ


def test_what_dead_members_left_is_removed_by_the_next_one_of_any_run(hub, member, child, layout, root):
    _, manifest, offers, _ = hub()
    dead = child(manifest, offers)
    assert dead.stdout.readline() == b"done\n"
    dead.kill()
    dead.wait()
    assert len(list(root.iterdir())) == 1

    member("another-run").fetch(manifest, offers, layout)

    assert [path.name.rpartition(".")[2] for path in root.iterdir()] == ["another-run"]


def test_an_empty_directory_of_a_member_that_died_at_once_is_removed(hub, member, layout, root):
    (root / f"streamrl-share.{os.getuid()}.dead").mkdir()
    _, manifest, offers, _ = hub()
    member("alive").fetch(manifest, offers, layout)

    assert [path.name.rpartition(".")[2] for path in root.iterdir()] == ["alive"]


def test_a_living_member_is_left_alone_by_the_janitor(hub, member, layout, root):
    _, manifest, offers, _ = hub()
    member("one").fetch(manifest, offers, layout)
    member("two").fetch(manifest, offers, layout)

    assert {path.name.rpartition(".")[2] for path in root.iterdir()} == {"one", "two"}
    assert all((path / LOCK_NAME).exists() for path in root.iterdir())


def test_a_waiting_fetch_can_be_superseded(hub, member, layout, root):
    stuck = Stuck(3)
    _, manifest, offers, _ = hub(tamper=stuck)
    cancelled = threading.Event()
    with ThreadPoolExecutor(2) as threads:
        both = [threads.submit(member().fetch, manifest, offers, layout, cancelled=cancelled) for _ in range(2)]
        assert stuck.reached.wait(20)
        cancelled.set()
        for one in both:
            with pytest.raises(Superseded):
                one.result(20)


def test_without_room_everybody_pulls_for_himself(hub, member, layout, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr(host_share, "SpareFile", full)
    _, manifest, offers, body = hub()
    found = [member().fetch(manifest, offers, layout) for _ in range(2)]

    assert [whole(one) for one in found] == [body, body]
    assert [one.source for one in found] == [InstallSource.ZMQ] * 2


def test_where_there_was_no_room_no_process_waits_again_and_one_warning_is_enough(
    hub, member, layout, monkeypatch, caplog,
):
    def full(*_):
        raise OSError(errno.ENOSPC, "no room")

    one = member()
    _, first, offers, _ = hub(1)
    with monkeypatch.context() as patch:
        patch.setattr(host_share, "SpareFile", full)
        one.fetch(first, offers, layout)
    _, second, offers, body = hub(2)
    with turn(one.share.document_path(second)) :  # another member pulls, and never ends
        found = one.fetch(second, offers, layout, deadline_s=200)

    assert whole(found) == body and found.source == InstallSource.ZMQ
    assert caplog.text.count("pulls for itself from now on") == 1


def test_a_file_that_others_retire_while_it_is_written_is_no_full_disk(hub, member, layout, monkeypatch, caplog):
    class Retired(host_share.DocumentWriter):
        def commit(self):
            for path in one.share.path.glob("w.*.tmp"):
                path.unlink()
            super().commit()

    one = member()
    _, first, offers, body = hub(1)
    with monkeypatch.context() as patch:
        patch.setattr(host_share, "DocumentWriter", Retired)
        assert whole(one.fetch(first, offers, layout)) == body
    assert not one.share.full and "no room" not in caplog.text

    _, second, offers, _ = hub(2)
    one.fetch(second, offers, layout)
    assert member().fetch(second, offers, layout).source == InstallSource.SHM


def test_a_document_that_another_member_could_leave_is_used_where_there_was_no_room(hub, member, layout):
    _, manifest, offers, _ = hub()
    one, other = member(), member()
    one.share.no_room("it was full for a moment")
    other.fetch(manifest, offers, layout)

    assert one.fetch(manifest, offers, layout).source == InstallSource.SHM


def test_without_room_members_pull_at_the_same_time_from_the_first_version_on(hub, member, layout, serve, monkeypatch):
    monkeypatch.setattr(host_share, "has_room", lambda path, nbytes: False)
    stuck = Stuck(3)
    router, manifest, offers, body = hub(tamper=stuck)
    slow, other = member(), member()
    slow.limits = msgspec.structs.replace(slow.limits, chunk_timeout_s=200.0)
    cancelled = threading.Event()
    with ThreadPoolExecutor(1) as threads:
        pulls = threads.submit(slow.fetch, manifest, offers, layout, cancelled=cancelled, deadline_s=200)
        try:
            assert stuck.reached.wait(100)
            near = (Offer("zmq", serve(router.server).endpoint, len(body)),)
            assert whole(other.fetch(manifest, near, layout, deadline_s=100)) == body
            assert not pulls.done()
        finally:
            cancelled.set()
        with pytest.raises(Superseded):
            pulls.result(100)


def test_room_is_what_the_file_system_says(root):
    assert has_room(root, 1) and not has_room(root, 1 << 60)


def test_a_host_without_shared_memory_shares_nothing(hub, context, token, limits, layout, tmp_path):
    _, manifest, offers, body = hub()
    one = WeightSource(context, pull_token=token, limits=limits)
    one.share = HostShare("run", tmp_path / "missing" / "shm")

    assert whole(one.fetch(manifest, offers, layout)) == body
    one.close()


def test_members_that_come_and_go_at_once_never_lose_a_document(root, hub, layout, context, token, limits):
    """Joining, sharing and leaving race with each other: everybody gets the whole document, nothing stays behind."""
    _, manifest, offers, body = hub()

    def life(_: int) -> bytes:
        one = WeightSource(context, pull_token=token, limits=limits)
        del one.factories["shm"]
        one.share = HostShare("run", root)
        try:
            return whole(one.fetch(manifest, offers, layout))
        finally:
            one.close()

    began = time.monotonic()
    with ThreadPoolExecutor(8) as threads:
        while time.monotonic() - began < 3:
            assert set(threads.map(life, range(16))) == {body}

    assert list(root.iterdir()) == []


def test_old_versions_go_and_the_base_of_adapters_stays(tmp_path):
    for epoch, version in ((0, 0), (1, 1), (1, 2), (1, 3)):
        (tmp_path / f"w.{epoch}.{version}.{'0' * 16}").write_bytes(b"")
    host_share.retire(tmp_path)
    assert sorted(path.name[:5] for path in tmp_path.iterdir()) == ["w.0.0", "w.1.2", "w.1.3"]
