"""fold128 on a host in numpy: the reference for the one of devices."""

from __future__ import annotations

import numpy as np

from streamrl.weights.gpu.device_document import pack


def fold128_numpy(data: bytes | bytearray | memoryview | np.ndarray) -> bytes:
    """16 bytes for a bucket of any length."""
    raw = np.frombuffer(data, dtype=np.uint8)
    words = np.zeros((len(raw) + 3) // 4, dtype="<u4")
    words.view(np.uint8)[: len(raw)] = raw
    wide = words.astype(np.uint64)
    index = np.arange(1, len(words) + 1, dtype=np.uint64)
    return pack(int(wide.sum(dtype=np.uint64)), int((wide * index).sum(dtype=np.uint64)))
