"""A short run of the chaos bench, and three broken builds that its checker must catch. `make chaos` is the long one."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.chaos.crash_points import NAMES, POINTS, find
from tests.chaos.mutants import MUTANTS
from tests.chaos.nemesis import WEIGHTS, schedule

pytestmark = [pytest.mark.flow, pytest.mark.timeout(240)]
ROOT = Path(__file__).parents[2]


def run(*words: str) -> tuple[int, dict]:
    """A process of its own: the bench forks, which a test process with threads must not."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.chaos.run", *words], cwd=ROOT, capture_output=True, text=True, timeout=200,
    )
    lines = done.stdout.strip().splitlines()
    assert lines, done.stderr[-3000:]
    return done.returncode, json.loads(lines[-1] if len(lines) == 1 else lines[0]) | {"error": done.stderr[-3000:]}


def test_no_guarantee_breaks_under_faults_of_every_sort():
    code, found = run("--first-seed", "1", "--seconds", "8", "--faults", "14")
    assert code == 0, found
    assert found["counts"]["trajectories"] > 1000 and found["faults"] == 14 and found["counts"]["starts"] >= 1


@pytest.mark.parametrize(
    ("mutant", "kinds", "num", "rules"),
    [
        ("dedupe", "duplicate", 30, {"G1"}),
        ("fencing", "twin", 6, {"fence"}),
        ("fsync", "power_cut", 5, {"G2", "G5"}),
        ("skipped_batch", "kill_learner", 4, {"G2"}),
    ],
)
def test_the_checker_notices_what_is_missing(mutant, kinds, num, rules):
    code, found = run("--first-seed", "3", "--seconds", "5", "--faults", str(num), "--mutant", mutant, "--only", kinds)
    assert code == 1 and {rule for rule, _ in found["violations"]} & rules, found


def test_every_mutant_has_a_test():
    mark = test_the_checker_notices_what_is_missing.pytestmark[0]
    assert {row[0] for row in mark.args[1]} == set(MUTANTS)


def test_a_seed_replays_its_schedule_and_fifty_seeds_cover_every_fault_and_crash_point():
    assert schedule(4, 14.0, 22) == schedule(4, 14.0, 22) != schedule(5, 14.0, 22)
    faults = [fault for seed in range(50) for fault in schedule(seed, 14.0, 22)]
    assert len(faults) > 1000 and {fault.kind for fault in faults} == set(WEIGHTS)
    points = Counter(fault.point for fault in faults if fault.point)
    assert set(points) == set(NAMES)


@pytest.mark.parametrize("point", POINTS, ids=lambda point: point.name)
def test_a_crash_point_names_a_function_that_is_there(point):
    owner, attribute = find(point.module, point.target)
    assert callable(getattr(owner, attribute))
