"""The library's entry points for scripts and notebooks: train a run, go on with one, read one."""

from __future__ import annotations

from streamrl.api.runs import Metrics, Run, load_run
from streamrl.api.training import resume, train

__all__ = ["Metrics", "Run", "load_run", "resume", "train"]
