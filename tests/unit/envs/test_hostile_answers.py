"""Text of a model is never run in the actor, stalls nothing and earns nothing: every data set, every reward.

The answers come from `hostile.py`: they would make a file or set a variable, or keep an evaluator busy for years.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from envs.data.shapes import RecordShape
from envs.rewards.registry import REWARDS, make_reward
from envs.tasks.reasoning import OWN_SCORERS, WRONG, ReasoningTask, dataset_names, score_countdown
from streamrl.config.load import load_config
from streamrl.environment import ChatMessage, Step
from tests.unit.envs.hostile import FORMS, MARK, STALLS, in_every_form, marks

# Looked for and not imported: only the tests themselves have half a second for it.
pytestmark = pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="needs reasoning_gym")

EVALUATE = {
    "countdown", "puzzle24", "string_insertion", "spiral_matrix", "binary_matrix", "n_queens", "simple_integration",
    "intermediate_integration", "polynomial_multiplication",
}
"""Data sets whose scorer in the package evaluates the answer."""
NOT_DRAWN = {"acre", "list_functions", "composite"}
"""Fixed lists of questions, and one that needs options."""
SIMILAR = 0.5
"""Some scorers pay for similar texts, or for texts that contain the answer: less than this."""


@pytest.mark.timeout(900)
def test_no_data_set_runs_an_answer_stalls_on_it_or_pays_for_it(tmp_path):
    (tmp_path / "marks").mkdir()
    subprocess.run(
        [sys.executable, "-m", "tests.unit.envs.hostile", tmp_path / "marks", tmp_path / "found.jsonl"], check=True,
        timeout=800, env=os.environ | {"PYTHONHASHSEED": "0"}, capture_output=True,
    )  # fmt: skip
    found = {one["name"]: one for one in map(json.loads, (tmp_path / "found.jsonl").read_text().splitlines())}

    assert found.keys() == set(dataset_names())
    refused = {name for name, one in found.items() if "refused" in one}
    assert refused <= NOT_DRAWN
    for name in found.keys() - refused:
        one = found[name]
        assert one["marks"] == [] and one["environment"] is None, name
        assert one["right"] == one["package"], name  # the right answer earns what the package pays for it
        most = 0.02 if name in EVALUATE else SIMILAR
        assert max(one["scores"].values()) < most or name == "game_of_life_halting", (name, one["scores"])


def test_only_a_scorer_that_compares_texts_is_called_in_the_actor():
    from reasoning_gym.factory import DATASETS, ProceduralDataset

    for name in set(dataset_names()) - NOT_DRAWN:
        own = DATASETS[name][0].score_answer is not ProceduralDataset.score_answer
        assert ReasoningTask(name).may_block == (own and name not in OWN_SCORERS), name


KINDS = sorted(set(REWARDS) - {"judge", "model"})  # these send the text to a service
FORM = {"boxed": 2, "math": 2, "think_answer_tags": 3, "code": 4}
"""Where a reward looks for an answer first, by its place in FORMS; the others look between the tags of an answer."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", KINDS)
def test_no_reward_runs_an_answer_stalls_on_it_or_pays_for_it(kind, tmp_path):
    stalls = [FORMS[FORM.get(kind, 1)].format(text) for text in STALLS[::3]]  # each may cost a process
    assert_unpaid(kind, [*in_every_form(marks(str(tmp_path / "marks"))), *stalls], tmp_path)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", KINDS)
def test_no_reward_stalls_on_an_answer_in_any_form(kind, tmp_path):
    assert_unpaid(kind, in_every_form(STALLS), tmp_path)


def assert_unpaid(kind, texts, tmp_path):
    (tmp_path / "marks").mkdir()
    words = ["reward.type=" + kind, "reward.timeout_s=0.3", "reward.code.case_timeout_s=0.5", "reward.num_workers=1"]
    reward = make_reward(load_config(["experiment=quickstart", "data.path=x.jsonl", *words]).reward, RecordShape())
    record = {"question": "1 + 1 = ?", "answer": "271828", "test_cases": {"inputs": ["1"], "outputs": ["2"]}}
    for text in texts:
        step = reward(record, text, [ChatMessage("user", "1 + 1 = ?")])
        paid = step.reward if isinstance(step, Step) else step
        assert paid <= (1.0 if kind == "tags" else 0.0), text[:80]  # `tags` is paid for the form alone

    assert list((tmp_path / "marks").iterdir()) == [] and MARK not in os.environ


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("(3 + 5) * 2", 1), ("2*(5+3)", 1), ("2 × (3 + 5)", 1), ("16", WRONG), ("(3 + 5) * 2 * 1", WRONG), ("", 0),  # noqa: RUF001
        ("3 + 5 + 2", WRONG), ("(3 + 5) * 2 = 16", 0), ("abs((3 + 5) * 2)", 0), ("3 + ", 0), ("2 / (3 - 3) + 5", 0),
        *((text, 0) for text in (*marks("x"), *STALLS[:6])),
    ],
)  # fmt: skip
def test_an_answer_to_countdown_is_read_by_the_calculator(answer, score):
    assert score_countdown(answer, {"metadata": {"numbers": [3, 5, 2], "target": 16}}) == score


@pytest.mark.parametrize(
    ("answer", "numbers", "target", "score"),
    [
        ("100 / 3 * 9", [100, 3, 9], 300, 1),
        ("999 + 1 / 700", [999, 1, 700], 999, WRONG),  # nearer than 1e-5 of it
        ("7 * (1 + 1 / 99999)", [7, 1, 1, 99999], 7, WRONG),
    ],
)
def test_a_solution_of_countdown_makes_the_target_exactly(answer, numbers, target, score):
    assert score_countdown(answer, {"metadata": {"numbers": numbers, "target": target}}) == score


def test_an_answer_that_the_scorer_cannot_read_earns_nothing_and_is_counted(caplog):
    task = ReasoningTask("prime_factorization", answer_format="text", format_reward=0.1)
    record = task.record("train", 0)
    for text in ("no product", "2 x"):
        step = task.reward(record, text)
        assert (step.reward, step.score, step.parts["unscored"]) == (0.1, 0.0, 1.0)

    right = task.reward(record, record["answer"])
    assert (right.score, right.parts["unscored"]) == (1.0, 0.0)
    assert [line.message for line in caplog.records if "could not score an answer" in line.message] == caplog.messages
    assert len(caplog.messages) == 1 and "invalid literal" in caplog.messages[0]
