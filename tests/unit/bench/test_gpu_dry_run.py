"""The benchmark of the GPU paths, on a CPU with small shapes: no import or argument of it is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SECTIONS = {
    "ceilings": 5, "fold": 1, "ipc": 2, "nccl": 3, "shapes": 2, "attention": 1, "head": 1, "lagzero": 1, "install": 6,
    "fsdp2": 3,
}
"""Lines of each; the sections that launch runs are tried by hand: `bench/gpu.sh --dry-run`."""


@pytest.mark.timeout(300)
def test_every_section_does_its_work_with_small_shapes_on_a_cpu(python_env):
    words = [word for name in SECTIONS for word in ("--only", name)]
    done = subprocess.run(
        [sys.executable, "-m", "bench.gpu", "--dry-run", *words], cwd=ROOT, env=python_env, capture_output=True,
        text=True, timeout=280,
    )

    assert done.returncode == 0, done.stderr[-3000:]
    names = [json.loads(line)["name"] for line in done.stdout.splitlines() if line.startswith("{")]
    assert {name: sum(one.startswith(f"gpu.{name}.") for one in names) for name in SECTIONS} == SECTIONS
