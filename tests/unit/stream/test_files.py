"""The files of a log: whole records or none, damage named by its place, a writer that never loses and never waits."""

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
from streamrl.stream.segments import read_records, segments, write_mark
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

    for tail in (bytes(3), bytes(200), b"never came whole"):  # a block whose bytes never came
        path.write_bytes(whole[:-last] + tail)
        assert [sequence for sequence, _ in read_records(tmp_path)] == [1, 2], tail
    path.write_bytes(whole[:-1])
    written(tmp_path, RunStopped("again", False))

    assert [sequence for sequence, _ in read_records(tmp_path)] == [1, 2, 3]
    assert list(read_records(tmp_path))[-1] == (3, RunStopped("again", False))


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
    again, skipped = RunStarted("run", 2, 2, 1, "{}", {}), StepTaken(1, True, "gradients are not finite")
    (tmp_path / "b").mkdir()
    written(tmp_path, START, cut[0], steps[0], cut[1], steps[1], GroupMoved(1, 0), cut[2], again, cut[1], steps[1])
    written(tmp_path / "b", START, cut[0], steps[0], cut[1], again, skipped, cut[1], steps[1])

    abandoned, kept = History.read(tmp_path).batches, History.read(tmp_path / "b").batches

    assert [(one.sequence, one.cut.version, one.step) for one in abandoned] == [(2, 0, steps[0]), (9, 1, steps[1])]
    found = [(one.sequence, one.step and one.step.skipped) for one in kept]
    assert found == [(2, False), (4, True), (7, False)], "a batch that a start skipped at its first version stays"
