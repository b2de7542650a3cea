from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from streamrl.errors import RunLockedError, WeightsError
from streamrl.messages import VersionRef
from streamrl.weights.shm import directory as rundir
from streamrl.weights.shm.directory import LOCK_NAME, RunDirectory, document_directory, remove_dead, remove_run_dir
from streamrl.weights.shm.transport import ShmPublisher

OWNER = """
import sys
from streamrl.messages import VersionRef
from streamrl.weights.manifest import make_layout
from streamrl.weights.shm.transport import ShmPublisher

layout = make_layout([("w", "uint8", (1000,))], 100)
publisher = ShmPublisher(sys.argv[1], "run-7")
for version in range(3):
    writer = publisher.begin(VersionRef(1, version), layout)
    writer.append(bytes(1000))
    writer.commit()
publisher.begin(VersionRef(1, 3), layout).append(bytes(500))
print("half way through version 3", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def owner(tmp_path, python_env):
    """A learner that was caught in the middle of a publish; alive until the test kills it."""
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path / "docs")], env=python_env, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stdin is not None
    assert process.stdout.readline().startswith("half way")
    yield process
    process.kill()
    process.wait(timeout=10)
    process.stdin.close()
    process.stdout.close()


def test_kill_9_of_the_learner_and_a_hub_that_notices_leave_nothing(owner, tmp_path):
    docs = tmp_path / "docs"
    assert {path.name for path in docs.iterdir()} == {"w.1.1", "w.1.2", "w.1.3.tmp", LOCK_NAME}

    assert not remove_run_dir(docs, "run-7", wait_s=0.05), "a living owner's documents were removed"
    assert (docs / "w.1.2").exists()
    owner.send_signal(signal.SIGKILL)

    assert remove_run_dir(docs, "run-7", wait_s=10.0)
    assert not docs.exists()


def test_cleanup_touches_neither_living_owners_nor_other_runs(owner, tmp_path):
    docs = tmp_path / "docs"

    assert not remove_run_dir(docs, "run-7")
    owner.kill()
    owner.wait(timeout=10)
    with pytest.raises(RunLockedError, match="belongs to run 'run-7'"):
        remove_run_dir(docs, "run-8")
    assert (docs / "w.1.2").exists()

    assert remove_run_dir(docs, "run-7")
    assert not docs.exists()
    assert remove_run_dir(docs, "run-7")  # nothing is left of it


def test_a_restarted_learner_takes_over_what_a_dead_one_left(owner, tmp_path):
    docs = tmp_path / "docs"
    with pytest.raises(RunLockedError, match="living process"):
        RunDirectory(docs, "run-7", wait_s=0.05)
    owner.kill()
    owner.wait(timeout=10)

    with ShmPublisher(docs, "run-7"):
        assert [path.name for path in docs.iterdir()] == [LOCK_NAME]
    assert not docs.exists()


def test_a_foreign_file_survives_and_so_does_its_directory(tmp_path):
    docs = tmp_path / "docs"
    owner = RunDirectory(docs, "run-7")
    (docs / "notes.txt").write_text("mine")

    owner.release()
    owner.release()

    assert [path.name for path in docs.iterdir()] == ["notes.txt"]


def test_a_directory_without_a_lock_is_removed_only_when_it_is_empty(tmp_path):
    empty, foreign = tmp_path / "empty", tmp_path / "foreign"
    empty.mkdir()
    foreign.mkdir()
    (foreign / "w.1.1").write_bytes(b"somebody's")

    assert remove_run_dir(empty, "run-7")
    assert not remove_run_dir(foreign, "run-7")
    assert (foreign / "w.1.1").exists()


def test_a_successor_that_races_with_the_cleaner_ends_up_with_a_directory_of_its_own(tmp_path):
    docs = tmp_path / "docs"
    stop = threading.Event()

    def clean() -> None:
        while not stop.is_set():
            remove_run_dir(docs, "run-7")

    cleaners = [threading.Thread(target=clean) for _ in range(2)]
    for cleaner in cleaners:
        cleaner.start()
    try:
        for _ in range(50):
            owner = RunDirectory(docs, "run-7", wait_s=10.0)
            assert (docs / LOCK_NAME).read_text() == "run-7"
            (docs / "w.1.1").write_bytes(b"document")
            assert (docs / "w.1.1").read_bytes() == b"document"
            owner.release()
    finally:
        stop.set()
        for cleaner in cleaners:
            cleaner.join(timeout=10)


def test_a_link_planted_in_place_of_the_directory_is_refused(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "docs").symlink_to(tmp_path / "elsewhere")

    with pytest.raises(RunLockedError, match="not a directory of this user"):
        RunDirectory(tmp_path / "docs", "run-7")


def test_documents_go_to_shared_memory_or_loudly_to_the_run_folder(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(rundir, "SHM_ROOT", tmp_path)
    assert document_directory("run-7", "runs/7") == tmp_path / "streamrl-run-7"
    assert not caplog.records

    monkeypatch.setattr(rundir, "SHM_ROOT", tmp_path / "nowhere")
    assert document_directory("run-7", "runs/7") == Path("runs/7/weights")
    assert "run folder" in caplog.text


@pytest.mark.parametrize("run_id", ["", "../x", "a/b", ".hidden", "x" * 65])
def test_a_run_id_that_is_a_path_is_refused(run_id):
    with pytest.raises(WeightsError, match="cannot name a directory"):
        document_directory(run_id, "runs")


def test_the_lock_is_not_inherited_by_children_that_outlive_the_learner(tmp_path, python_env):
    owner = RunDirectory(tmp_path / "docs", "run-7")
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=python_env, close_fds=False)
    os.close(owner._fd)  # what the kernel does when the owner dies

    assert remove_run_dir(tmp_path / "docs", "run-7", wait_s=10.0)
    child.communicate(b"\n", timeout=30)


def test_versions_of_two_epochs_have_two_names(tmp_path, layout):
    with ShmPublisher(tmp_path / "docs", "run-7") as publisher:
        for epoch in (1, 2):
            writer = publisher.begin(VersionRef(epoch, 5), layout)
            writer.append(bytes(1888))
            assert writer.commit().name == f"w.{epoch}.5"


def test_what_runs_left_that_are_dead_with_their_hubs_is_swept_and_nothing_else(tmp_path, python_env):
    dead, living = (tmp_path / f"streamrl-{name}" for name in ("run-7", "run-8"))
    script = OWNER.replace('"run-7"', "sys.argv[2]")
    owners = [
        subprocess.Popen([sys.executable, "-c", script, str(path), path.name.removeprefix("streamrl-")], env=python_env,
                         text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for path in (dead, living)
    ]
    (tmp_path / "streamrl-empty").mkdir()
    (tmp_path / "streamrl-link").symlink_to(living)
    (tmp_path / "other").mkdir()
    try:
        for owner in owners:
            assert owner.stdout.readline().startswith("half way")
        owners[0].kill()
        owners[0].wait(timeout=10)

        assert sorted(path.name for path in remove_dead(tmp_path)) == ["streamrl-empty", "streamrl-run-7"]
        assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "streamrl-link", "streamrl-run-8"]
        assert (living / "w.1.2").exists()
    finally:
        for owner in owners:
            owner.kill()
            owner.wait(timeout=10)
            owner.stdin.close()
            owner.stdout.close()
