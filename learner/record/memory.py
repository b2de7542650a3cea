"""Memory of a learner rank, sampled by a thread; smallest, largest, mean and deviation as a JSON file."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import psutil
import torch

from learner.ranks.mesh import Ranks
from streamrl.metrics.files import if_it_can_be_written, write_atomic


def memory_now(device: torch.device) -> dict[str, float]:
    """Memory of this process, and of its GPU; 0 without one."""
    process, cuda, on_gpu = psutil.Process(), torch.cuda, device.type == "cuda"
    return {
        "rss_bytes": float(process.memory_info().rss), "rss_percent": process.memory_percent(),
        "gpu_allocated_bytes": float(cuda.memory_allocated(device)) if on_gpu else 0.0,
        "gpu_reserved_bytes": float(cuda.memory_reserved(device)) if on_gpu else 0.0,
        "gpu_peak_bytes": float(cuda.max_memory_allocated(device)) if on_gpu else 0.0,
    }


@contextmanager
def memory_profiled(interval_s: float | None, run_dir: Path, ranks: Ranks) -> Iterator[None]:
    """Sample during the block, and leave profile/memory-rank-N.json in the run directory; None does nothing."""
    if interval_s is None:
        yield
        return
    samples, names, stop = array("d"), list[str](), threading.Event()

    def work() -> None:
        while True:
            now = memory_now(ranks.device)
            samples.extend(now.values())
            names[:] = now
            if stop.wait(interval_s):
                return

    thread = threading.Thread(target=work, name="memory", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        values = np.array(samples).reshape(-1, len(names))
        spread = {"min": values.min(0), "max": values.max(0), "avg": values.mean(0), "std": values.std(0)}
        found = {name: {kind: float(of[at]) for kind, of in spread.items()} for at, name in enumerate(names)}
        path = run_dir / "profile" / f"memory-rank-{ranks.rank}.json"
        with if_it_can_be_written("the profile of memory"):
            path.parent.mkdir(exist_ok=True)
            content = msgspec.json.encode({"num_samples": len(values), **found})
            write_atomic(path, msgspec.json.format(content))
