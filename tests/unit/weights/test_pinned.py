"""Copies between host and device memory through two buffers: here both sides are the host."""

from __future__ import annotations

import pytest
import torch

from streamrl.weights.gpu.pinned import Download, Upload, upload

CPU = torch.device("cpu")


@pytest.mark.parametrize("nbytes", [1, 7, 64, 1 << 20])
@pytest.mark.parametrize("through_buffers", [False, True])
def test_pieces_join_to_the_bytes_of_the_parts_though_a_buffer_is_filled_while_another_is_read(
    nbytes, through_buffers
):
    parts = [(0, torch.randn(9)), (36, torch.empty(0)), (100, torch.randn(33).to(torch.bfloat16)), (166, torch.ones(1))]
    expected, found = bytearray(200), bytearray(200)
    for start, tensor in parts:
        data = tensor.view(torch.uint8).numpy().tobytes()
        expected[start : start + len(data)] = data
    download = Download(CPU, nbytes=nbytes, through_buffers=through_buffers)

    for start, data in download.pieces(parts):
        found[start : start + len(data)] = data

    assert found == expected
    assert len(download._buffers) == 2 * through_buffers


def test_the_next_piece_is_under_way_while_one_is_used():
    asked = []

    def parts():
        for number in range(3):
            asked.append(number)
            yield 4 * number, torch.full((1,), float(number))

    pieces = Download(CPU, through_buffers=True).pieces(parts())

    first = next(pieces)
    assert asked == [0, 1] and torch.frombuffer(bytearray(first[1]), dtype=torch.float32).item() == 0.0
    assert [torch.frombuffer(bytearray(data), dtype=torch.float32).item() for _, data in pieces] == [1.0, 2.0]


def test_an_upload_casts():
    target, upload = torch.empty(2, 3, dtype=torch.bfloat16), Upload(CPU)
    upload.copy(torch.arange(6.0).view(3, 2).t(), target)
    upload.finish()

    assert torch.equal(target, torch.arange(6.0).view(3, 2).t().to(torch.bfloat16))


class FakeLateStream:
    """Stands for a stream of a GPU that copies as late as it may: when an event after the copy is waited for."""

    def __init__(self):
        self.waiting, self.num_waits = [], 0

    def record_event(self):
        return FakeLateEvent(self, len(self.waiting))

    def synchronize(self):
        FakeLateEvent(self, len(self.waiting)).synchronize()


class FakeLateEvent:
    def __init__(self, stream, number):
        self._stream, self._number = stream, number

    def synchronize(self):
        self._stream.num_waits += 1
        for place, copy in enumerate(self._stream.waiting[: self._number]):
            copy()
            self._stream.waiting[place] = lambda: None


class FakeDevicePiece:
    """Stands for memory of a GPU, to which the stream copies late."""

    def __init__(self, memory, stream):
        self._memory, self._stream = memory, stream

    def copy_(self, buffer, *, non_blocking):
        assert non_blocking
        self._stream.waiting.append(lambda: self._memory.copy_(buffer))


def test_no_pinned_buffer_is_written_again_before_its_copy_has_ended():
    stream, uploads = FakeLateStream(), Upload(CPU, nbytes=8)
    uploads._stream, uploads._buffers = stream, [torch.empty(8, dtype=torch.uint8) for _ in range(2)]
    data, found = torch.arange(45, dtype=torch.uint8), torch.zeros(45, dtype=torch.uint8)

    for start in range(0, 45, 8):
        uploads._copy_piece(data[start : start + 8], FakeDevicePiece(found[start : start + 8], stream))
    assert stream.num_waits == 4, "six pieces, two buffers"
    uploads.finish()

    assert torch.equal(found, data)


class FakePinnedTensor(torch.Tensor):
    """Stands for a tensor of the host on a machine with a GPU: notes how it travels."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.Tensor.pin_memory:
            return args[0].clone().as_subclass(FakePinnedTensor)
        if func is torch.Tensor.to:
            return args[0], args[1:], kwargs
        return super().__torch_function__(func, types, args, kwargs)


def test_an_upload_to_a_gpu_is_pinned_and_not_waited_for_and_on_a_cpu_nothing_is_copied():
    numbers = torch.arange(3)

    pinned, to, how = upload(numbers.as_subclass(FakePinnedTensor), torch.device("cuda"))

    assert to == (torch.device("cuda"),) and how == {"non_blocking": True}
    assert pinned.data_ptr() != numbers.data_ptr() and pinned.as_subclass(torch.Tensor).tolist() == [0, 1, 2]
    assert upload(numbers, CPU) is numbers
