"""A trace of chosen steps, by torch.profiler: operations, kernels, and the stages that `StepClock` times."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from learner.ranks.mesh import Ranks
from streamrl.metrics.files import if_it_can_be_written

log = logging.getLogger("streamrl.learner")


@contextmanager
def profiled(step: int, chosen: Collection[int], run_dir: Path, ranks: Ranks) -> Iterator[None]:
    """Record the block, if it is a chosen step, as a Chrome trace in profile/ of the run directory."""
    if step not in chosen:
        yield
        return
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if ranks.device.type == "cuda" else [])]
    with profile(activities=activities) as recorded:
        yield
    path = run_dir / "profile" / f"step-{step:06d}-rank-{ranks.rank}.json"
    with if_it_can_be_written("the profile"):
        path.parent.mkdir(exist_ok=True)
        recorded.export_chrome_trace(str(path))
        log.info("step %d is in %s: open it at https://ui.perfetto.dev", step, path)
