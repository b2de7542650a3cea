"""How jobs that run at once share a machine: threads, and GPUs in turn. (No GPU takes part.)"""

from __future__ import annotations

import pytest

from streamrl.sweep.sweep import shares


def test_one_job_alone_is_not_limited():
    assert shares(1, 8, ["0", "1"], {}) == [{}]


@pytest.mark.parametrize(("num_jobs", "cores", "threads"), [(2, 8, "4"), (3, 8, "2"), (16, 8, "1")])
def test_cores_are_divided(num_jobs, cores, threads):
    places = shares(num_jobs, cores, [], {})
    assert places == [{"OMP_NUM_THREADS": threads}] * num_jobs


def test_a_smaller_number_of_threads_that_was_set_stays():
    assert shares(2, 8, [], {"OMP_NUM_THREADS": "1"})[0]["OMP_NUM_THREADS"] == "1"
    assert shares(2, 8, [], {"OMP_NUM_THREADS": "64"})[0]["OMP_NUM_THREADS"] == "4"


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
