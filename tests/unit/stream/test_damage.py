"""A log that lost bytes: what a crash leaves is cut and kept, what was acknowledged is read or named, never deleted."""

import fcntl
import os
import random
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import xxhash

from streamrl.errors import ControlError
from streamrl.stream.history import History
from streamrl.stream.records import OLD_HEADER, TRAILER, GroupArrived, LogError, Record, RunStarted, RunStopped, encode
from streamrl.stream.segments import (
    COMMIT_BYTES,
    MARK,
    OLD_MAGIC,
    OLD_SEGMENT_HEADER,
    DamagedLogError,
    read_mark,
    read_records,
    scan,
    segments,
    write_mark,
)
from streamrl.stream.writer import LogWriter
from streamrl.verbs.stream import stream

pytestmark = pytest.mark.timeout(60)
START = RunStarted("run", 1, 1, 0, "{}", {})


def arrived(number: int, nbytes: int = 900) -> GroupArrived:
    return GroupArrived("a", 1, number, number, 0, random.Random(number).randbytes(nbytes))


def committed(folder: Path, *commits: Sequence[Record], **options) -> Path:
    """The last file of a log that got these records, those of a commit at once; it was killed, not closed."""
    writer = LogWriter(folder, **options)
    for commit in commits:
        with writer._changed:
            last = [writer.append(one) for one in commit][-1]
        while writer.durable < last:
            os.sched_yield()
    copy = folder.parent / f"{folder.name}.copy"
    shutil.copytree(folder, copy)
    writer.close()
    shutil.rmtree(folder)
    copy.rename(folder)
    return segments(folder)[-1].path


def old_log(folder: Path, *records: Record) -> Path:
    """A log as releases before this form wrote it."""
    path = folder / "stream" / "00000001.seg"
    path.parent.mkdir(parents=True)
    data = OLD_SEGMENT_HEADER.pack(OLD_MAGIC, 1)
    for sequence, body in enumerate(records, start=1):
        content = b"".join(encode(sequence, body)[:-1])
        whole = OLD_HEADER.pack(len(content), body.KIND, sequence) + content
        data += whole + TRAILER.pack(xxhash.xxh3_64_intdigest(whole))
    path.write_bytes(data)
    return path


def numbers(folder: Path) -> list[int]:
    return [sequence for sequence, _ in read_records(folder)]


def places(folder: Path) -> list[tuple[int, int]]:
    """(place, bytes) of each record."""
    return [(place.at, place.size) for place, _ in scan(folder)]


def damage(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


def flip(path: Path, at: int, bit: int = 0) -> None:
    damage(path, at, bytes([path.read_bytes()[at] ^ 1 << bit]))


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((folder / "stream").iterdir())}


@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize("make", [committed, old_log])
def test_a_flipped_bit_anywhere_in_a_header_is_damage_and_recovery_changes_nothing(tmp_path, make, marked):
    whole = [START, *map(arrived, range(1, 5))]
    path = make(tmp_path / "run", *([one] for one in whole)) if make is committed else make(tmp_path / "run", *whole)
    if not marked:
        (path.parent / MARK).unlink(missing_ok=True)
    at = places(tmp_path / "run")[2][0]
    why = "records up to 5" if marked and make is committed else "record [45] follows"
    for bit in range(8 * (33 if make is committed else 13)):
        flip(path, at + bit // 8, bit % 8)
        before = content(tmp_path / "run")
        with pytest.raises(DamagedLogError, match=f"{path.name}, byte {at}: record 3 is damaged, and {why}"):
            numbers(tmp_path / "run")
        with pytest.raises(DamagedLogError, match="streamrl stream RUN --repair"):
            LogWriter(tmp_path / "run")
        assert content(tmp_path / "run") == before
        flip(path, at + bit // 8, bit % 8)
    assert numbers(tmp_path / "run") == [1, 2, 3, 4, 5]


def test_a_log_of_earlier_releases_is_read_and_goes_on_in_the_new_form(tmp_path):
    records = [START, arrived(1), RunStopped("done", True)]
    old_log(tmp_path, *records)
    assert [body for _, body in read_records(tmp_path)] == records
    assert History.read(tmp_path).starts == [START]

    committed(tmp_path, [arrived(2)])

    assert [body for _, body in read_records(tmp_path)] == [*records, arrived(2)]


@pytest.mark.parametrize("files", [1, 2])
@pytest.mark.parametrize("num", [1, 2, 3])
def test_what_was_on_the_disk_cannot_be_truncated_in_silence(tmp_path, num, files):
    path = committed(tmp_path, [START], *([arrived(one)] for one in range(1, 4)))
    if files == 2:
        path = committed(tmp_path, *([arrived(one)] for one in range(4, 7)))
    at, last = places(tmp_path)[-num][0], 4 if files == 1 else 7
    for end in (at, at + 5, at + 50, 30, 0):
        with path.open("r+b") as file:
            file.truncate(end)
        before = content(tmp_path)
        with pytest.raises(LogError, match="were on the disk"):
            numbers(tmp_path)
        with pytest.raises(LogError, match="were on the disk"):
            LogWriter(tmp_path)
        assert content(tmp_path) == before
    for one in path.parent.glob("*.seg"):
        one.unlink()
    with pytest.raises(LogError, match=f"no record is left of the {last} that were on the disk"):
        segments(tmp_path)


def test_a_hole_in_the_last_write_is_cut_and_kept_though_whole_records_follow_in_it(tmp_path):
    path = committed(tmp_path, [START], [arrived(one) for one in range(1, 5)])
    write_mark(path.parent, 1)  # the second write was not acknowledged
    (_, _), (second, _), (at, size), *_ = places(tmp_path)
    damage(path, at, bytes(size))
    torn = path.read_bytes()[at:].rstrip(b"\0")
    assert numbers(tmp_path) == [1, 2]

    committed(tmp_path, [RunStopped("again", False)])

    assert [*read_records(tmp_path)][1:] == [(2, arrived(1)), (3, RunStopped("again", False))]
    assert content(tmp_path)[f"00000001.cut-{at}"] == torn


@pytest.mark.parametrize("marked", [True, False])
def test_a_hole_before_a_later_write_is_damage_with_or_without_a_mark(tmp_path, marked):
    path = committed(tmp_path, [START], [arrived(one) for one in range(1, 4)], [arrived(4)])
    write_mark(path.parent, 5 if marked else 0)
    at, size = places(tmp_path)[2]
    damage(path, at, bytes(size))
    said = "records up to 5 were on the disk" if marked else "record 5 follows it"
    with pytest.raises(DamagedLogError, match=f"byte {at}: record 3 is damaged, and {said}"):
        LogWriter(tmp_path)


def test_a_cut_of_more_than_one_write_is_refused(tmp_path):
    path = committed(tmp_path, [START])
    write_mark(path.parent, 1)
    for size, refused in ((COMMIT_BYTES, False), (COMMIT_BYTES + 1, True)):
        damage(path, places(tmp_path)[0][0] + places(tmp_path)[0][1], b"x" * size)
        if refused:
            with pytest.raises(DamagedLogError, match="more than one write of the log"):
                LogWriter(tmp_path)
        else:
            assert numbers(tmp_path) == [1]


def test_records_that_an_actor_or_another_file_brings_are_no_records_of_this_one(tmp_path):
    other = committed(tmp_path / "other", [START], [arrived(one) for one in range(1, 9)])
    path = committed(tmp_path / "run", [START])
    inside = other.read_bytes()[places(tmp_path / "other")[4][0] :]
    damage(path, sum(places(tmp_path / "run")[0]), b"torn" + inside)
    assert numbers(tmp_path / "run") == [1]


def test_writes_are_as_large_as_may_be_cut_at_most(tmp_path):
    writer = LogWriter(tmp_path)
    with writer._changed:
        for number in range(1, 5):
            writer.append(arrived(number, COMMIT_BYTES // 3))
        assert [one.sequence for one in writer._next_batch()] == [1, 2]
    writer.close()
    assert writer.durable == 4 == read_mark(tmp_path / "stream") and numbers(tmp_path) == [1, 2, 3, 4]


@pytest.mark.parametrize("what", ["record", "header", "empty file", "tail", "every file"])
def test_a_repair_cuts_at_the_damage_keeps_all_bytes_and_the_log_goes_on(tmp_path, capsys, what):
    run = tmp_path / "run"
    path = committed(run, *([arrived(one)] for one in range(1, 7)), segment_bytes=2500)
    (run / "run.json").write_text("{}")
    (run / "metrics.jsonl").write_text("")
    files = [one.path for one in segments(run)]
    assert len(files) == 2
    whole = b"".join(one.read_bytes() for one in files)
    match what:
        case "record":
            flip(files[0], places(run)[1][0] + 40)
        case "header":
            flip(files[1], 9)
        case "empty file":
            files[0].write_bytes(b"")
        case "tail":
            os.truncate(path, sum(places(run)[-1]) - 1)
        case "every file":
            for one in files:
                one.rename(tmp_path / one.name)
    assert stream([str(run), "--repair"]) == 0
    said = capsys.readouterr().out
    left = numbers(run)
    assert left == {"record": [1], "header": [1, 2, 3], "tail": [1, 2, 3, 4, 5]}.get(what, [])
    assert f"{left[-1] if left else 0} is its last record now" in said
    if what in ("record", "header"):
        assert sum(len(data.rstrip(b"\0")) for name, data in content(run).items() if name != MARK) >= len(
            whole.rstrip(b"\0")) - 2 * 4096
    assert stream([str(run), "--repair"]) == 0 and "no damage" in capsys.readouterr().out

    committed(run, [RunStopped("again", False)])

    assert numbers(run)[-1] == (left[-1] if left else 0) + 1


def test_what_a_dead_hub_wrote_is_synced_before_it_is_relied_on(tmp_path, monkeypatch):
    path = committed(tmp_path, [START], [arrived(1)], fsync="never")
    synced, fdatasync = [], os.fdatasync
    monkeypatch.setattr("streamrl.stream.writer.os.fdatasync", lambda file: (
        synced.append(os.fstat(file).st_ino), fdatasync(file)))
    writer = LogWriter(tmp_path)
    assert writer.durable == 2 and synced == [path.stat().st_ino]
    writer.close()


def test_records_that_only_a_checkpoint_knows_are_missing_and_no_damage(tmp_path):
    committed(tmp_path, [START], [arrived(1)])
    committed(tmp_path, [RunStarted("run", 2, 1, 3, "{}", {}), arrived(9)], next_sequence=8)
    assert [one for one, _ in read_records(tmp_path, 2, complete_from=8)] == [2, 8, 9]
    assert [one for one, _ in read_records(tmp_path, 8)] == [8, 9]
    with pytest.raises(LogError, match="begins at record 8, the one before ends at 2"):
        list(read_records(tmp_path, 2, complete_from=7))
    assert History.read(tmp_path).first == 8


def test_a_running_log_is_not_repaired(tmp_path):
    committed(tmp_path, [START])
    (tmp_path / "run.json").write_text("{}")
    with (tmp_path / "LOCK").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ControlError, match="is running"):
            stream([str(tmp_path), "--repair"])
