"""Memory and processor of a learner rank, as the operating system and CUDA know them."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable

import psutil
import torch

from streamrl.gpus import VISIBLE, gpu_of, gpu_use

GPU_EVERY_S = 10.0
"""Seconds between two questions to the driver, which takes longer to answer than a step may wait."""
HOST_EVERY_S = 0.5
"""Seconds between two questions to the operating system, which take as long as a twentieth of a tiny model's step."""


class ProcessUse:
    """Samples for each step; a share of processor time is of the time since the operating system was asked before."""

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._asked_at, self._of_host = clock, -math.inf, dict[str, float]()
        self._device, self._process = device, psutil.Process()
        self._process.cpu_percent(), psutil.cpu_percent()  # the first call only starts the clock
        self._gpu_percent = 0.0
        if device.type == "cuda":
            threading.Thread(target=self._watch_gpu, name="gpu-use", daemon=True).start()

    def _watch_gpu(self) -> None:
        gpu = gpu_of(str(self._device))
        visible = os.environ if gpu is None else {VISIBLE: gpu.index}
        while True:
            self._gpu_percent, _ = gpu_use(visible)
            time.sleep(GPU_EVERY_S)

    def sample(self) -> dict[str, float]:
        """This rank's `system/*` metrics."""
        if self._clock() - self._asked_at >= HOST_EVERY_S:
            self._asked_at = self._clock()
            memory = self._process.memory_info()
            self._of_host = {
                "system/rss_bytes": float(memory.rss),
                "system/learner_cpu_percent": self._process.cpu_percent(),
                "system/cpu_percent": psutil.cpu_percent(),
                "system/memory_percent": psutil.virtual_memory().percent,
            }
        found = dict(self._of_host)
        if self._device.type == "cuda":
            found["system/gpu_allocated_bytes"] = float(torch.cuda.max_memory_allocated(self._device))
            torch.cuda.reset_peak_memory_stats(self._device)  # the next sample's peak is that of its own step
            found["system/gpu_reserved_bytes"] = float(torch.cuda.memory_reserved(self._device))
            found["system/gpu_percent"] = self._gpu_percent
        return found
