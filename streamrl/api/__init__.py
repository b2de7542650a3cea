"""The library's entry points for scripts and notebooks: train a run, read a run."""

from __future__ import annotations

from streamrl.api.runs import Metrics, Run, load_run
from streamrl.api.training import train

__all__ = ["Metrics", "Run", "load_run", "train"]
