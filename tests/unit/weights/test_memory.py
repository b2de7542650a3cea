from __future__ import annotations

import gc
import threading

import numpy as np
import torch

from streamrl.weights.document import DocumentMemory


def address(memory: memoryview) -> int:
    return np.frombuffer(memory, np.uint8).ctypes.data


def test_memory_comes_back_only_when_the_last_tensor_is_gone():
    memory = DocumentMemory()
    first = memory.take(1 << 20)
    where = address(first)
    tensor = torch.from_numpy(np.frombuffer(first[4096:8192], np.uint8)).view(torch.float32).view(32, 32)
    tensor.fill_(7.0)
    del first
    gc.collect()

    second = memory.take(1 << 20)
    second[:] = b"\1" * len(second)

    assert address(second) != where and torch.all(tensor == 7.0)  # the first one is still read
    del tensor
    assert address(memory.take(1 << 20)) == where


def test_unreferenced_memory_is_used_again_and_one_size_does_not_serve_another():
    memory = DocumentMemory()
    where = address(memory.take(1 << 20))

    again = memory.take(1 << 20)
    other = memory.take(1 << 16)

    assert address(again) == where and len(other) == 1 << 16


def test_two_threads_never_get_the_same_memory():
    memory, clashes = DocumentMemory(), []

    def work(mark: int) -> None:
        for _ in range(200):
            mine = np.frombuffer(memory.take(1 << 12), np.uint8)
            mine[:] = mark
            if not (mine == mark).all():
                clashes.append(mark)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert clashes == []
