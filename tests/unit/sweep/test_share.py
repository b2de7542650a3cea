"""How jobs that run at once share a machine: threads, and GPUs in turn. (No GPU takes part.)"""

from __future__ import annotations

import pytest

from streamrl.sweep.sweep import shares


@pytest.mark.parametrize(
    ("num_jobs", "given", "threads"), [(2, "", "4"), (3, "", "2"), (16, "", "1"), (2, "1", "1"), (2, "64", "4")]
)
def test_cores_are_divided_and_a_smaller_number_that_was_set_stays(num_jobs, given, threads):
    assert shares(num_jobs, 8, [], {"OMP_NUM_THREADS": given}) == [{"OMP_NUM_THREADS": threads}] * num_jobs
    assert shares(1, 8, ["0", "1"], {}) == [{}], "one job alone is not limited"


@pytest.mark.parametrize(
    ("gpus", "num_jobs", "seen"),
    [
        (["0", "1"], 2, ["0", "1"]),
        (["0", "1", "2", "3"], 2, ["0,2", "1,3"]),
        (["0", "1", "2"], 2, ["0,2", "1"]),
        (["5", "7"], 4, ["5", "7", "5", "7"]),
        (["GPU-abc"], 2, ["GPU-abc", "GPU-abc"]),
    ],
)
def test_gpus_are_dealt_in_turn(gpus, num_jobs, seen):
    assert [place["CUDA_VISIBLE_DEVICES"] for place in shares(num_jobs, 8, gpus, {})] == seen
