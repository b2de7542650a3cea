"""A file written in whole blocks holds exactly the bytes that were appended, whatever failed in between."""

import errno
import os
import random
from pathlib import Path

import pytest

from streamrl.stream.records import Form, GroupArrived, decode, encode
from streamrl.stream.writer import BLOCK, STAGED, BlockFile

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def file(tmp_path):
    file = BlockFile(tmp_path / "file")
    yield file
    file.close()


def read(file: BlockFile) -> bytes:
    return Path(f"/proc/self/fd/{file._fd}").read_bytes()


def test_parts_of_every_size_follow_each_other_and_zeros_fill_the_block(file):
    chance, whole = random.Random(5), b""
    for size in (0, 1, 16, BLOCK - 17, 1, BLOCK, 3 * BLOCK + 5, STAGED, STAGED - 1, 2 * STAGED + 7, 9):
        parts = [chance.randbytes(size), chance.randbytes(size // 3)]
        file.append(parts)
        whole += b"".join(parts)
        assert file.end == len(whole)
        assert read(file) == whole + bytes(-len(whole) % BLOCK)


def test_a_closed_file_has_no_zeros_at_its_end(tmp_path):
    file = BlockFile(tmp_path / "file")
    file.append([b"abc"], sync=True)
    file.close()
    assert (tmp_path / "file").read_bytes() == b"abc"


@pytest.mark.parametrize("fails", ["pwrite", "fdatasync"])
def test_an_append_that_failed_halfway_is_made_again_at_the_same_place(file, monkeypatch, fails):
    file.append([b"a" * 5000], sync=True)
    real, calls = getattr(os, fails), []

    def full(*words):
        calls.append(words)
        if fails == "fdatasync" or len(calls) == 2:
            raise OSError(errno.ENOSPC, "full")
        return real(*words)

    monkeypatch.setattr(os, fails, full)
    with pytest.raises(OSError, match="full"):
        file.append([b"b" * STAGED, b"c" * 10], sync=True)
    monkeypatch.undo()
    file.cut()
    assert read(file) == b"a" * 5000 and file.end == 5000

    file.append([b"d" * 10], sync=True)

    assert read(file).rstrip(b"\0") == b"a" * 5000 + b"d" * 10


def test_a_write_cut_short_is_an_error(file, monkeypatch):
    monkeypatch.setattr(os, "pwrite", lambda *words: 512)
    with pytest.raises(OSError, match="512 of 4096 bytes"):
        file.append([b"a"])


def test_a_file_system_that_refuses_direct_writes_gets_plain_ones(file, monkeypatch):
    real, refused = os.pwrite, []

    def picky(number, data, at):
        if file._direct:
            refused.append(at)
            raise OSError(errno.EINVAL, "not aligned enough")
        return real(number, data, at)

    monkeypatch.setattr(os, "pwrite", picky)
    file._direct = True
    file.append([b"abc"])
    file.append([b"def"])
    assert (refused, read(file)[:6]) == ([0], b"abcdef")


@pytest.mark.parametrize("refused", ["", "stale by 3 groups", "é" * 300])
@pytest.mark.parametrize("size", [0, 1, 255, 70_000])
def test_a_group_that_is_encoded_in_parts_is_what_an_encoder_gives(size, refused):
    group = GroupArrived("actor", 1 << 60, 2, 3, 4, os.urandom(size), refused, (1 << 64) - 1 if refused else 0)
    parts, form = encode(7, group), Form(5)
    data = b"".join([form.pack(7, group.KIND, sum(map(len, parts)) - 8, 3), *parts])
    header = form.header(data, 0)
    assert header == (len(data), group.KIND, 7, 3) and form.whole(data, 0, header)
    assert decode(data, form, header) == group
