"""The files of a log: whole records or none, damage named by its place, a writer that never loses and never waits."""

from __future__ import annotations

import os
import resource
import signal
from contextlib import contextmanager
from pathlib import Path

import pytest

from streamrl.stream.history import History
from streamrl.stream.records import (
    HEADER,
    BatchCut,
    GroupArrived,
    GroupMoved,
    LogError,
    Record,
    RunStarted,
    RunStopped,
    StepTaken,
    encode,
)
from streamrl.stream.segments import SEGMENT_HEADER, read_records, segments, write_mark
from streamrl.stream.writer import LogWriter

pytestmark = pytest.mark.timeout(60)
START = RunStarted("run", 1, 1, 0, "{}", {})


def size_of(record: Record) -> int:
    """Bytes of one record in a file."""
    return HEADER.size + len(b"".join(encode(1, record)))


def written(folder: Path, *records: Record, **options) -> Path:
    """The last file of a log that got these records."""
    writer = LogWriter(folder, **options)
    for one in records:
        writer.append(one)
    writer.close()
    return segments(folder)[-1].path


def arrived(number: int, nbytes: int = 40) -> GroupArrived:
    return GroupArrived("a", 1, number, number, 0, bytes(nbytes))


def test_what_is_appended_is_read_in_order_over_starts_and_files(tmp_path):
    written(tmp_path, START, arrived(1), segment_bytes=1)
    written(tmp_path, RunStopped("done", True))

    found = list(read_records(tmp_path))

    assert found == [(1, START), (2, arrived(1)), (3, RunStopped("done", True))]
    assert list(read_records(tmp_path, 3)) == found[2:]


def test_a_record_that_is_torn_at_any_byte_is_cut_off_and_its_number_used_again(tmp_path):
    path = written(tmp_path, START, arrived(1), arrived(2, 7))
    whole, last = path.read_bytes(), size_of(arrived(2, 7))
    write_mark(path.parent, 2)
    for cut in range(1, last + 1):
        path.write_bytes(whole[:-cut])
        assert [sequence for sequence, _ in read_records(tmp_path)] == [1, 2], cut

    path.write_bytes(whole[:-1])
    written(tmp_path, RunStopped("again", False))

    assert [sequence for sequence, _ in read_records(tmp_path)] == [1, 2, 3]
    assert list(read_records(tmp_path))[-1] == (3, RunStopped("again", False))


@pytest.mark.parametrize("tail", [bytes(3), bytes(200), b"never came whole"])
def test_an_end_whose_bytes_never_came_is_cut_off_too(tmp_path, tail):
    path = written(tmp_path, START, arrived(1))
    with path.open("ab") as file:
        file.write(tail)
    assert [sequence for sequence, _ in read_records(tmp_path)] == [1, 2]

    written(tmp_path, RunStopped("again", False))

    assert [sequence for sequence, _ in read_records(tmp_path)] == [1, 2, 3]


def test_damage_before_the_end_is_named_with_file_and_byte(tmp_path):
    path = written(tmp_path, START, arrived(1), arrived(2))
    data = bytearray(path.read_bytes())
    at = SEGMENT_HEADER.size + size_of(START) + 20
    data[at] ^= 1
    path.write_bytes(data)

    named = rf"{path.name}, byte {SEGMENT_HEADER.size + size_of(START)}: record 2"
    with pytest.raises(LogError, match=named):
        list(read_records(tmp_path))
    with pytest.raises(LogError, match=named):
        LogWriter(tmp_path)


def test_files_that_are_missing_in_between_are_named(tmp_path):
    for number in range(3):
        written(tmp_path, arrived(number))
    segments(tmp_path)[1].path.unlink()

    with pytest.raises(LogError, match="00000001.seg.* ends with record 1, .* one after it is missing"):
        list(read_records(tmp_path))


def test_old_files_go_only_as_far_as_they_are_not_needed(tmp_path):
    writer = LogWriter(tmp_path, segment_bytes=1)
    for number in range(1, 6):
        writer.append(arrived(number))
        while writer.durable < number:
            os.sched_yield()
    assert [one.first for one in segments(tmp_path)] == [1, 2, 3, 4, 5]

    assert writer.remove_before(4, to_bytes=1 << 30) == 0
    assert writer.remove_before(4) == 3
    writer.close()

    assert [sequence for sequence, _ in read_records(tmp_path, 4)] == [4, 5]


@contextmanager
def largest_file(nbytes: int):
    """No file of this process may grow beyond: a write fails as on a full disk."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_nothing_is_lost_and_nothing_is_durable_while_the_disk_is_full(tmp_path):
    writer = LogWriter(tmp_path)
    writer.append(START)
    while not writer.durable:
        os.sched_yield()
    with largest_file(4096):
        for number in range(1, 4):
            writer.append(arrived(number, 3000))
        while not writer.failure:
            os.sched_yield()
        assert writer.durable < 4
    writer.close()

    assert (writer.durable, writer.failure) == (4, "")
    assert [sequence for sequence, _ in read_records(tmp_path)] == [1, 2, 3, 4]


def test_a_history_leaves_out_what_a_start_from_an_older_version_has_abandoned(tmp_path):
    cut = [BatchCut(version, (), (), (0,)) for version in range(3)]
    steps = [StepTaken(version + 1, False) for version in range(3)]
    written(
        tmp_path, START, cut[0], steps[0], cut[1], steps[1], GroupMoved(1, 0), cut[2],
        RunStarted("run", 2, 2, 1, "{}", {}), cut[1], steps[1],
    )

    history = History.read(tmp_path)

    assert [(one.cut.version, one.step) for one in history.batches] == [(0, steps[0]), (1, steps[1])]
    assert [one.sequence for one in history.batches] == [2, 9]


def test_a_batch_that_a_start_skipped_at_its_first_version_stays(tmp_path):
    cut, skipped = BatchCut(1, (), (), (0,)), StepTaken(1, True, "gradients are not finite")
    written(
        tmp_path, START, BatchCut(0, (), (), (0,)), StepTaken(1, False), cut, RunStarted("run", 2, 1, 1, "{}", {}),
        skipped, cut, StepTaken(2, False),
    )

    history = History.read(tmp_path)

    found = [(one.sequence, one.step and one.step.skipped) for one in history.batches]
    assert found == [(2, False), (4, True), (7, False)]
