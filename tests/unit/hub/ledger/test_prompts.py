"""The order of prompts: a permutation a pass, computed and resumable."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.hub.ledger.tables.prompts import PromptStream, permuted
from streamrl.messages.seeding import member_seed
from tests.unit.hub.factories import STEADY


def record(index: int) -> bytes:
    return b"%d" % index


@STEADY
@given(st.integers(1, 300), st.integers(0, 2**64 - 1))
def test_every_record_comes_once_a_pass(size, seed):
    stream = PromptStream(size, seed, record)

    drawn = [stream.at(position) for position in range(2 * size)]

    assert sorted(one.prompt_index for one in drawn[:size]) == list(range(size))
    assert sorted(one.prompt_index for one in drawn[size:]) == list(range(size))
    assert [one.pass_index for one in drawn] == [0] * size + [1] * size


def test_passes_and_seeds_differ():
    def order(seed: int, pass_index: int) -> list[int]:
        stream = PromptStream(100, seed, record)
        return [stream.at(100 * pass_index + i).prompt_index for i in range(100)]

    assert order(1, 0) == order(1, 0)
    assert order(1, 0) != order(1, 1) and order(1, 0) != order(2, 0) and order(1, 0) != list(range(100))


def test_without_shuffling_the_order_is_the_records_own():
    stream = PromptStream(3, 9, record, shuffle=False)

    assert [(one.prompt_index, one.pass_index) for one in map(stream.at, range(4))] == [
        (0, 0), (1, 0), (2, 0), (0, 1)
    ]


@pytest.mark.parametrize("size", [1, 2, 10**6, 10**9 + 7])
def test_large_tasks_need_no_table(size):
    seen = {permuted(index, size, 5) for index in range(min(size, 2000))}

    assert len(seen) == min(size, 2000) and max(seen) < size


def test_neighbors_are_scattered():
    size = 10**6
    first = [permuted(index, size, 5) for index in range(4000)]

    assert abs(sum(first) / len(first) / size - 0.5) < 0.03  # three standard errors are 0.014
    assert sum(abs(a - b) < 1000 for a, b in zip(first, first[1:], strict=False)) < 40  # 8 expected


def test_a_task_without_records_is_refused():
    with pytest.raises(ValueError, match="num_records=0"):
        PromptStream(0, 1, record)


def test_member_seeds_do_not_collide():
    seeds = {member_seed(run, group, member) for run in range(3) for group in range(200) for member in range(16)}

    assert len(seeds) == 3 * 200 * 16 and all(0 <= seed < 2**64 for seed in seeds)
