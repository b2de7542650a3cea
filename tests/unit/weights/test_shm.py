from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
import threading
import time

import msgspec
import pytest

from streamrl.errors import WeightsError
from streamrl.messages import Layout, Manifest, Offer, VersionRef
from streamrl.weights.document import Document, NotAvailable
from streamrl.weights.manifest import make_layout, make_manifest
from streamrl.weights.shm.directory import SPARE_NAME
from streamrl.weights.shm.transport import ShmPublisher, ShmReceiver, shm_offer
from streamrl.weights.transport import receive as fetch

NEVER = threading.Event()


def receive(offer: Offer, manifest: Manifest, layout: Layout) -> Document:
    return fetch(ShmReceiver(offer), manifest, layout, cancelled=NEVER, deadline=time.monotonic() + 30).document


def test_bytes_may_come_in_pieces_of_any_size(layout, shm, publish):
    manifest, _, body = publish(layout, 1)

    writer = shm.begin(VersionRef(2, 1), layout)
    pieces = [body[:1], body[1:399], body[399:1201], b"", body[1201:]]
    for piece in pieces:
        writer.append(piece)

    assert tuple(writer.digests()) == manifest.digests


def test_nothing_is_visible_before_the_commit_nor_after_an_abort(layout, shm):
    writer = shm.begin(VersionRef(1, 1), layout)
    writer.append(bytes(1887))
    with pytest.raises(WeightsError, match="1887 of 1888 bytes"):
        writer.commit()
    with pytest.raises(WeightsError, match="1889 bytes were written"):
        writer.append(b"xy")
    assert not (shm.directory / "w.1.1").exists()

    writer.abort()
    writer.abort()

    assert not [path for path in shm.directory.iterdir() if path.name.startswith("w.")]


def test_old_versions_retire_and_their_readers_keep_them(layout, shm, publish):
    first, first_path, body = publish(layout, 1)
    reader = receive(shm_offer(first_path), first, layout)
    stale_offer = shm_offer(first_path)

    for version in (2, 3):
        publish(layout, version)
    shm.settle()

    assert sorted(path.name for path in shm.directory.iterdir()) == ["owner.lock", "w.1.2", "w.1.3", SPARE_NAME]
    assert reader.tensors()["embed"].numpy().tobytes() == body[:660]
    with pytest.raises(NotAvailable, match="cannot be opened"):
        receive(stale_offer, first, layout)


def test_a_file_of_the_right_name_with_another_probe_is_not_the_hubs_shared_memory(layout, publish):
    manifest, path, _ = publish(layout, 1)
    offer = shm_offer(path)

    for probe in (bytes(16), b"", offer.probe[:15]):
        with pytest.raises(NotAvailable, match="not the hub's shared memory"):
            receive(msgspec.structs.replace(offer, probe=probe), manifest, layout)


@pytest.mark.parametrize("name", ["/nowhere/w.1.1", "", "/", "bad\0name"])
def test_an_offer_that_leads_nowhere_is_passed_over(name, layout, publish):
    manifest, path, _ = publish(layout, 1)

    with pytest.raises(NotAvailable):
        receive(msgspec.structs.replace(shm_offer(path), name=name), manifest, layout)


def test_a_pipe_in_place_of_the_document_blocks_no_reader(layout, publish, tmp_path):
    manifest, path, _ = publish(layout, 1)
    os.mkfifo(tmp_path / "pipe")

    with pytest.raises(NotAvailable):
        receive(msgspec.structs.replace(shm_offer(path), name=str(tmp_path / "pipe")), manifest, layout)


def test_a_version_is_never_written_twice(layout, shm, publish):
    publish(layout, 1)

    with pytest.raises(WeightsError, match="never rewritten"):
        shm.begin(VersionRef(1, 1), layout)


def test_no_room_anywhere_is_heard_before_the_first_byte(shm):
    huge = make_layout([("w", "float32", (1 << 48,))], 1 << 40)  # 1 PiB: refused by any file system there is

    with pytest.raises((WeightsError, OSError), match="no room|too large"):
        shm.begin(VersionRef(1, 1), huge)

    assert [path.name for path in shm.directory.iterdir()] == ["owner.lock"]


@pytest.fixture
def full_shm(monkeypatch):
    """No file below a directory `shm` gets room; a small file system cannot be mounted without privileges."""
    reserve = os.posix_fallocate

    def full(fd: int, offset: int, length: int) -> None:
        if "/shm/" in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        reserve(fd, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", full)


def test_full_shared_memory_falls_back_to_the_run_folder_loudly(layout, tmp_path, full_shm, caplog):
    with ShmPublisher(tmp_path / "shm", "run-7", keep_versions=1, fallback=tmp_path / "run" / "weights") as publisher:
        for version in (1, 2):
            writer = publisher.begin(VersionRef(1, version), layout)
            writer.append(bytes(1888))
            manifest = make_manifest(layout, VersionRef(1, version), None, writer.digests())
            path = writer.commit()
        publisher.settle()

        assert path == tmp_path / "run" / "weights" / "w.1.2"
        assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
        assert "has no room for version 1:1" in caplog.text
        receive(shm_offer(path), manifest, layout)
        assert not (tmp_path / "run" / "weights" / "w.1.1").exists()

    assert not (tmp_path / "run" / "weights").exists() and not (tmp_path / "shm").exists()


def test_a_fallback_that_is_the_same_directory_is_no_fallback(layout, tmp_path, full_shm):
    with ShmPublisher(tmp_path / "shm", "run-7", fallback=tmp_path / "shm") as publisher:
        with pytest.raises(WeightsError, match="no room for version 1:1"):
            publisher.begin(VersionRef(1, 1), layout)


def test_the_next_slot_is_made_ahead_and_a_slot_of_another_size_is_thrown_away(layout, shm, publish):
    publish(layout, 1)
    shm.settle()
    spare = (shm.directory / SPARE_NAME).stat().st_ino

    assert publish(layout, 2)[1].stat().st_ino == spare
    shm.settle()
    larger = make_layout([("w", "uint8", (5000,))], 1000)
    manifest, path, body = publish(larger, 3)

    assert receive(shm_offer(path), manifest, larger).tensors()["w"].numpy().tobytes() == body


WRITER = """
import random, sys
import msgspec
from streamrl.messages import VersionRef
from streamrl.weights.manifest import make_layout, make_manifest
from streamrl.weights.shm.directory import SPARE_NAME
from streamrl.weights.shm.transport import ShmPublisher, shm_offer

layout = make_layout([("w", "uint8", (600_000,))], 200_000)
with ShmPublisher(sys.argv[1], "loop", keep_versions=2) as publisher:
    parent = None
    for version in range(60):
        ref = VersionRef(1, version)
        writer = publisher.begin(ref, layout)
        for _ in range(3):
            writer.append(random.Random(version).randbytes(200_000))
        manifest = make_manifest(layout, ref, parent, writer.digests())
        parent = ref
        print(msgspec.msgpack.encode((manifest, shm_offer(writer.commit()))).hex(), flush=True)
    sys.stdin.readline()
"""


def test_a_reader_beside_a_busy_publisher_never_sees_a_half_written_document(tmp_path, python_env):
    layout = make_layout([("w", "uint8", (600_000,))], 200_000)
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path / "docs")], env=python_env, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )
    assert writer.stdin is not None and writer.stdout is not None
    verified = retired = 0
    for line in iter(writer.stdout.readline, ""):
        manifest, offer = msgspec.msgpack.decode(bytes.fromhex(line), type=tuple[Manifest, Offer])
        for path in (tmp_path / "docs").glob("w.1.*[0-9]"):  # final names, announced or not
            with contextlib.suppress(FileNotFoundError):
                body = path.read_bytes()[64:]
                assert body[:200_000] == body[200_000:400_000] == body[400_000:], path
        try:
            tensor = receive(offer, manifest, layout).tensors()["w"].view(3, -1)
        except NotAvailable:
            retired += 1  # overtaken by two versions: allowed; damaged bytes would be a WeightsError
            continue
        assert bool((tensor[0] == tensor[1]).all() and (tensor[1] == tensor[2]).all())
        verified += 1
        if manifest.ref.version == 59:
            writer.communicate("\n", timeout=30)
            break

    assert verified + retired == 60 and verified > 0
    assert writer.wait(timeout=30) == 0 and not (tmp_path / "docs").exists()
