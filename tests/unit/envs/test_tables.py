"""Tables give the records that JSON Lines of the same give, and no unused column keeps them from being read."""

from __future__ import annotations

import datetime
import json
import logging
import math
from decimal import Decimal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from envs.data.dataset import open_dataset
from envs.data.shapes import RecordShape, tool_schemas
from envs.data.sources import open_source
from envs.reward_file import written_reward
from streamrl.config.schema import DataConfig
from streamrl.errors import TaskError

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
datasets = pytest.importorskip("datasets")

TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=4)
KINDS = st.recursive(  # of a column: every value that it holds is of this kind, and may lack fields
    st.sampled_from([TEXTS, st.integers(-(2**40), 2**40), st.booleans(), st.sampled_from([0.5, -2.25])]),
    lambda inner: st.one_of(
        inner.map(lambda kind: st.lists(kind, max_size=2)),
        st.dictionaries(st.sampled_from("abcd"), inner, min_size=1, max_size=3).map(
            lambda fields: st.fixed_dictionaries({}, optional=fields)
        ),
    ),
    max_leaves=5,
)
RECORDS = st.dictionaries(st.sampled_from(["tools_", "extra", "cases", "level"]), KINDS, max_size=3).flatmap(
    lambda fields: st.lists(
        st.fixed_dictionaries({"question": st.just("?"), "answer": TEXTS}, optional=fields), min_size=1, max_size=4
    )
)


def table(rows):
    made = pa.array(rows)
    return pa.Table.from_arrays(made.flatten(), names=[field.name for field in made.type])


def writable(kind) -> bool:
    """Parquet has no form for a struct without fields."""
    if pa.types.is_struct(kind):
        return kind.num_fields > 0 and all(writable(field.type) for field in kind)
    return writable(kind.value_type) if pa.types.is_list(kind) else True


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(rows=RECORDS)
def test_a_table_gives_the_records_that_lines_of_json_give(rows, tmp_path_factory):
    made, folder = table(rows), tmp_path_factory.mktemp("rows")
    if not all(writable(field.type) for field in made.schema):
        return
    datasets.Dataset(made).save_to_disk(str(folder / "saved"))
    pq.write_table(made, folder / "a.parquet")
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    datasets.config.HF_DATASETS_CACHE = folder / "cache"

    for name in ("a.jsonl", "saved", "a.parquet"):
        source = open_source(str(folder / name), setting="data.path")
        assert [source.row(at) for at in range(len(source))] == rows, name
        assert list(source.field("answer")) == [row["answer"] for row in rows]


def test_schemas_messages_and_cases_have_no_fields_of_their_neighbors(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    schemas = [
        {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": fields}}}
        for name, fields in (("a", {"city": {"type": "string"}}), ("b", {"n": {"type": "integer", "minimum": 1}}))
    ]
    call = {"function": {"name": "b", "arguments": {"n": 2}}}
    rows = [
        {"messages": [{"role": "user", "content": "Rain?"}], "tools": schemas[:1], "extra_info": {"level": 1}},
        {"messages": [
            {"role": "user", "content": "More?"}, {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "3", "name": "b"}, {"role": "user", "content": "So?"}],
         "tools": schemas[1:], "extra_info": {"hint": "x"}, "test_cases": {"inputs": ["1"], "outputs": ["2"]}},
    ]
    pq.write_table(table(rows), tmp_path / "a.parquet")
    source = open_source(str(tmp_path / "a.parquet"), setting="data.path")

    for at, row in enumerate(rows):
        found = source.row(at)
        assert tool_schemas(found) == row["tools"] and found["extra_info"] == row["extra_info"]
        assert RecordShape().messages(found) == RecordShape().messages(row)
        assert found.get("test_cases") == row.get("test_cases")


def test_columns_of_any_type_do_not_keep_a_file_from_being_read(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    odd = {
        "day": datetime.date(2026, 1, 2), "at": datetime.datetime(2026, 1, 2, 3, 4), "clock": datetime.time(3, 4),
        "took": datetime.timedelta(seconds=90), "price": Decimal("1.10"), "raw": b"\x00\xff",
        "stats": {"mean": math.nan, "of": [1.5, math.nan], "picture": b"1"}, "score": math.inf,
    }
    rows = [{"question": f"{n}?", "answer": "4", **odd} for n in range(12)]
    pq.write_table(table(rows), tmp_path / "a.parquet")
    with caplog.at_level(logging.WARNING):
        record = open_dataset(DataConfig(path=str(tmp_path / "a.parquet"))).train[0]

    assert record == {
        "question": record["question"], "answer": "4", "day": "2026-01-02", "at": "2026-01-02T03:04:00",
        "clock": "03:04:00", "took": "0:01:30", "price": "1.10", "stats": {"of": [1.5, None]},
    }
    assert "the bytes in raw, stats are left out" in caplog.text


def test_images_that_nothing_asks_for_are_not_decoded(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rows = {"question": ["1?", "2?"], "answer": ["1", "2"], "image": [{"bytes": b"no image", "path": "a.png"}] * 2}
    kinds = datasets.Features({
        "question": datasets.Value("string"), "answer": datasets.Value("string"), "image": datasets.Image()
    })
    datasets.Dataset.from_dict(rows, features=kinds).save_to_disk(str(tmp_path / "saved"))

    source = open_source(str(tmp_path / "saved"), setting="data.path")

    assert source.row(0) == {"question": "1?", "answer": "1", "image": {"path": "a.png"}}


def test_a_reward_that_asks_for_what_only_some_records_have_is_told_to_give_it_a_default():
    def reward(completion, level):
        return 1.0

    asked = written_reward(reward, RecordShape(), {}, "r.py: reward")
    with pytest.raises(TaskError, match="asks for level.*give it a default: level=None"):
        asked._arguments(({"prompt": "?"}, "a", []))
