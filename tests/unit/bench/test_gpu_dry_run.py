"""The benchmark of the GPU paths, on a CPU with small shapes: no import or argument of it is wrong."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FIRST = ("vllm", "one_gpu")
WHOLE_RUNS = ("quickstart", "realsize", "groups")
SECTIONS = {
    "ceilings": 5, "fold": 1, "ipc": 2, "nccl": 3, "shapes": 2, "attention": 1, "shared": 3, "head": 1, "lagzero": 1,
    "install": 6, "fsdp2": 3, "ranks": 6,
}
"""Lines of each; the sections that launch runs are tried by hand: `bench/gpu.sh --dry-run`."""


CALL = re.compile(r'`(?:SECTIONS="([^"]+)" )?LIMIT_S=(\d+) (bench/gpu\.sh)')


def plan(folder: Path, **variables: str) -> list[str]:
    """What the script says of its sections, with a fake Python that runs none."""
    fake = folder / "fake-python"
    fake.write_text("#!/bin/sh\n")
    fake.chmod(0o755)
    done = subprocess.run(
        ["bench/gpu.sh", "--dry-run"], cwd=ROOT, capture_output=True, text=True, timeout=60,
        env={**os.environ, "PYTHON": str(fake), "SITE": str(folder / "none"), **variables},
    )
    assert done.returncode == 0, done.stderr
    return done.stderr.splitlines()


@pytest.mark.timeout(60)
def test_the_documented_calls_begin_every_section_even_if_those_before_take_their_whole_time(tmp_path):
    calls = CALL.findall((ROOT / "docs" / "gpu.md").read_text())

    begun = [plan(tmp_path, SECTIONS=sections, LIMIT_S=limit) for sections, limit, _ in calls]

    assert begun[0] == [f"== {name}" for name in FIRST], "what is worth the most"
    lines = [line for one in begun for line in one]
    assert [line for line in lines if "left out" in line] == [] and all(int(limit) <= 600 for _, limit, _ in calls)
    assert {line.removeprefix("== ") for line in lines} == {*SECTIONS, *FIRST, *WHOLE_RUNS}


@pytest.mark.timeout(60)
def test_a_limit_leaves_out_the_last_sections_and_never_the_first(tmp_path):
    first = [f"== {name}" for name in FIRST]
    said, *begun = plan(tmp_path, LIMIT_S="570")
    assert begun[:2] == first and {one.removeprefix("== ") for one in begun} == {*SECTIONS, *FIRST, *WHOLE_RUNS}
    late = said.partition("these are left out:")[2].split()
    assert {*late} == {*SECTIONS, *WHOLE_RUNS}
    assert plan(tmp_path)[:2] == first


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
