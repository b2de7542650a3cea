"""Records and rewards that a call from Python brings are written as files, or refused with their place."""

import json
from pathlib import Path

import numpy as np
import pytest

from streamrl.api.inputs import Inputs
from streamrl.errors import ConfigError

RECORDS = [{"prompt": "1 + 1 = ?", "answer": "2"}, {"prompt": [{"role": "user", "content": "é"}], "answer": None}]


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def as_dataset():
    datasets = pytest.importorskip("datasets")
    return datasets.Dataset.from_list([{"prompt": "a", "answer": 1}, {"prompt": "b", "answer": 2}])


def as_frame():
    return pytest.importorskip("pandas").DataFrame({"prompt": ["a", "b"], "answer": [1, 2]})


@pytest.mark.parametrize("make", [as_dataset, as_frame, lambda: iter([{"prompt": "a", "answer": 1},
                                                                     {"prompt": "b", "answer": 2}])])
def test_data_sets_frames_and_iterators_are_rows(make, tmp_path):
    assert Inputs(None, make()).write(tmp_path) == [f"data.path={tmp_path}/train.jsonl"]
    assert lines(tmp_path / "train.jsonl") == [{"prompt": "a", "answer": 1}, {"prompt": "b", "answer": 2}]


def test_records_and_held_out_records_and_a_function_are_files(tmp_path):
    def exact(completion, answer):
        return float(completion == answer)

    words = Inputs(exact, {"train": RECORDS, "test": RECORDS[:1]}).write(tmp_path / "in puts")

    assert words == [f"env.path='{tmp_path}/in puts/reward.py'", f"data.path='{tmp_path}/in puts/train.jsonl'",
                     f"data.test_path='{tmp_path}/in puts/test.jsonl'"]
    assert lines(tmp_path / "in puts" / "train.jsonl") == RECORDS
    assert "def exact(completion, answer):" in (tmp_path / "in puts" / "reward.py").read_text()


@pytest.mark.parametrize(("reward", "data", "words"), [
    ("my_reward.py", "train.jsonl", ["env.path='my_reward.py'", "data.path='train.jsonl'"]),
    (Path("my_reward.py"), Path("t.jsonl"), ["env.path='my_reward.py'", "data.path='t.jsonl'"]),
    ("math", None, ["reward.type='math'"]),
    ({"math": 1.0, "length": 0.5}, None, ["reward.weights={math:1.0,length:0.5}"]),
])
def test_what_is_no_object_is_a_setting_and_writes_nothing(reward, data, words, tmp_path):
    assert Inputs(reward, data).write(tmp_path / "none") == words
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(("data", "why"), [
    ([{"prompt": "a"}, {"prompt": "b", "answer": {3}}], r"record 2 of data: its field 'answer' is \{3\}"),
    ([{"prompt": "a", "answer": np.int64(3)}], "record 1 of data: its field 'answer' is np.int64"),
    ([{"prompt": "a", "x": float("nan")}], "record 1 of data: its field 'x' is nan"),
    ([{"prompt": "a", "x": [1, {"y": object()}]}], "record 1 of data: its field 'x'"),
    ([{"prompt": "a", 3: "x"}], "record 1 of data: the name of its field 3 must be a text"),
    (["what is 1 + 1?"], "record 1 of data is a str"),
    ([("a", "b")], "record 1 of data is a tuple"),
    ([], "data holds no records"),
    (7, "data is a int: give a list of dictionaries"),
    ({"train": RECORDS, "test": [{"prompt": {1, 2}}]}, r"record 1 of data\['test'\]: its field 'prompt'"),
    ({"prompt": ["a"], "answer": ["b"]}, "data is a mapping with 'prompt', 'answer': give records under 'train'"),
    ({"train": RECORDS, "validation": RECORDS}, "'validation'"),
])
def test_what_no_file_can_hold_is_named_with_its_record_and_field(data, why):
    with pytest.raises(ConfigError, match=why):
        Inputs(None, data)


def test_a_list_of_rewards_is_answered_with_what_to_write():
    with pytest.raises(ConfigError, match="reward is a list: give one function that returns a mapping"):
        Inputs([len, len], None)


@pytest.mark.parametrize(("reward", "data", "why"), [
    ({"exact": len}, None, r"reward\['exact'\] is <built-in function len>: a mapping has the weight of each reward"),
    ({"math": 1.0, "exact": "${oc.env:HOME}"}, None, r"reward\['exact'\] is '\$\{oc"),
    ("math${oc.env:HOME}", None, r"a setting cannot hold \$\{"), ("${oc.env:HOME}.py", None, r"cannot hold \$\{"),
    (None, "${oc.env:HOME}.jsonl", r"a setting cannot hold \$\{"), (None, Path("???"), "never \\?\\?\\? alone"),
])
def test_a_text_that_would_be_read_as_another_one_is_refused(reward, data, why):
    with pytest.raises(ConfigError, match=why):
        Inputs(reward, data)


def test_weights_may_be_scalars_of_numpy():
    assert Inputs({"math": np.float32(0.5), "length": np.int64(2)}, None).write(Path("none")) == [
        "reward.weights={math:0.5,length:2.0}"
    ]
