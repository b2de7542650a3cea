"""Copies between host and device memory through two buffers: here both sides are the host."""

from __future__ import annotations

import pytest
import torch

from streamrl.weights.gpu.pinned import Download, Upload

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
