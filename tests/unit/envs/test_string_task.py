"""String tasks: every operation against a slow transcription, disjoint splits, honest rewards."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.check import check_task
from envs.tasks.strings import ALPHABET, OPERATIONS, StringTask, partial_credit
from streamrl.errors import TaskError

EXAMPLES = {
    "copy": ("bead", "bead"),
    "reverse": ("bead", "daeb"),
    "rotate": ("bead", "eadb"),
    "swap": ("beads", "ebdas"),
    "sort": ("bead", "abde"),
    "unique": ("abbaca", "abc"),
    "pair_sum": ("bci", "jej"),  # 1+8=9, 2+2=4, 8+1=9
}
words = st.text("abcdef", max_size=8)


@pytest.mark.parametrize("operation", sorted(OPERATIONS))
def test_each_operation_transforms_its_example(operation):
    text, answer = EXAMPLES[operation]

    assert OPERATIONS[operation](text, ALPHABET) == answer


@pytest.mark.parametrize("operation", sorted(OPERATIONS))
def test_every_operation_makes_a_task_that_passes_the_start_up_check(operation):
    check_task(StringTask(operation))


def test_a_record_depends_on_split_index_and_seed_and_on_nothing_else():
    first, second = StringTask(), StringTask()
    forwards = [first.record("train", i) for i in range(50)]
    backwards = [second.record("train", i) for i in reversed(range(50))]

    assert forwards == backwards[::-1]
    assert forwards != [StringTask(seed=1).record("train", i) for i in range(50)]
    assert forwards != [first.record("test", i) for i in range(50)]


def test_no_string_is_in_both_splits_even_where_strings_are_few():
    task = StringTask(alphabet="abc", min_length=1, max_length=7)
    train = {task.record("train", i)["prompt"] for i in range(3000)}
    test = {task.record("test", i)["prompt"] for i in range(300)}

    assert len(train) > 500
    assert len(test) > 50
    assert not train & test
    reseeded = StringTask(alphabet="abc", min_length=1, max_length=7, seed=9)
    assert not train & {reseeded.record("test", i)["prompt"] for i in range(300)}


def test_all_lengths_between_the_bounds_occur():
    task = StringTask(min_length=2, max_length=5)

    assert {len(task.record("train", i)["prompt"]) for i in range(200)} == {2, 3, 4, 5}


def test_the_score_is_exact_match_and_the_reward_is_the_share_of_right_positions():
    task = StringTask("reverse")
    record = {"prompt": "abcd", "answer": "dcba"}

    said = ("dcba", "dcbb", "dc", "dcbaaaaa", "")
    right, one_wrong, short, long, empty = (task.reward(record, text) for text in said)

    assert (right.reward, right.score) == (1.0, 1.0)
    assert (one_wrong.reward, one_wrong.score) == (0.75, 0.0)
    assert (short.reward, long.reward, empty.reward) == (0.5, 0.5, 0.0)
    assert right.done


@given(words, words)
def test_partial_credit_is_one_only_for_the_exact_answer(answer, completion):
    credit = partial_credit(answer, completion)

    assert 0.0 <= credit <= 1.0
    assert (credit == 1.0) == (answer == completion)
    assert credit == partial_credit(completion, answer)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"operation": "revers"}, "choose one of"),
        ({"min_length": 5, "max_length": 4}, "min_length <= max_length"),
        ({"alphabet": "aab"}, "distinct"),
        ({"alphabet": "ab", "max_length": 3}, "too few strings"),
    ],
)
def test_impossible_settings_are_refused_with_a_reason(arguments, said):
    with pytest.raises(TaskError, match=said):
        StringTask(**arguments)
