"""Shared by the GPU tests: the reason to skip, and child processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
needs_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and none is visible here"),
]


def start(script: str, *words: str, **environment: str) -> subprocess.Popen[str]:
    """A Python process of its own; what it says on stderr is ours."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))  # wheels may lie beside torch
    return subprocess.Popen(
        [sys.executable, "-c", script, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", **environment},
    )


def finish(process: subprocess.Popen[str], timeout_s: float = 120.0) -> str:
    """Output of the child. Fails the test if it failed or takes too long; either way it is gone afterwards."""
    try:
        out, _ = process.communicate(timeout=timeout_s)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, f"exit {process.returncode}: {out[-2000:]}"
    return out
