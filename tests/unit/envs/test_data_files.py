"""Every kind of file gives the same records; a part is held out by its prompts; several files are mixed by weight."""

import asyncio
import csv
import datetime
import inspect
import json
import logging
import math
import os
import random
from collections import Counter
from decimal import Decimal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from envs.check import check_task
from envs.data import dataset
from envs.data.dataset import open_dataset
from envs.data.shapes import PROMPT_KEYS, RecordShape, tool_schemas
from envs.data.sources import JsonLines, absolute, open_source, split_of
from envs.registry import task_of
from envs.reward_file import written_reward
from learner.supervised.records import AnswerShape
from streamrl.config.load import from_plain, load_config, to_plain
from streamrl.config.schema import DataConfig, OnBadRecord
from streamrl.environment import Step
from streamrl.errors import DataChangedError, TaskError
from tests.kit.each import each

ROWS = [{"question": f"{a} + é = ?", "answer": str(2 * a), "level": str(a % 3)} for a in range(60)]


def write(path, rows=ROWS):
    """The rows in the file format that the name says."""
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    if path.suffix in (".jsonl", ".ndjson"):
        path.write_text(lines)
    elif path.name == "lines.json":
        path.write_text(lines)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows, ensure_ascii=False), encoding="utf-8-sig")
    elif path.suffix in (".csv", ".tsv"):
        with path.open("w", encoding="utf-8-sig", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), delimiter="\t" if path.suffix == ".tsv" else ",")
            writer.writeheader()
            writer.writerows(rows)
    else:
        datasets = pytest.importorskip("datasets")
        table = datasets.Dataset.from_list(rows)
        if path.suffix == ".parquet":
            table.to_parquet(str(path))
        elif path.suffix == ".arrow":
            table.save_to_disk(str(path.parent / "made"))
            next((path.parent / "made").glob("*.arrow")).rename(path)
        elif path.name == "splits":
            datasets.DatasetDict({"train": table, "test": table.select(range(5))}).save_to_disk(str(path))
        else:
            table.save_to_disk(str(path))
    return path


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """The library's cache in the test's own folder."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "DOWNLOADED_DATASETS_PATH", tmp_path / "cache")


def read(dataset, split="train"):
    records = getattr(dataset, split)
    return [records[i] for i in range(len(records))]


@pytest.mark.parametrize(
    "name",
    ["a.jsonl", "a.ndjson", "a.json", "lines.json", "a.csv", "a.tsv", "a.parquet", "a.arrow", "folder", "train@splits"],
)
def test_every_kind_of_file_gives_the_same_records_and_the_same_split(tmp_path, name):
    split, file = split_of(name)
    path = write(tmp_path / file)
    dataset = open_dataset(DataConfig(path=f"{split}@{path}" if split else str(path)))
    reference = open_dataset(DataConfig(path=str(write(tmp_path / "reference.jsonl"))))

    assert read(dataset) == read(reference) and read(dataset, "test") == read(reference, "test")
    assert len(read(dataset, "test")) == 12  # a fifth: 3 % would be too few to tell anything


def test_a_split_of_a_folder_is_named_before_an_at_sign(tmp_path):
    path = write(tmp_path / "splits")
    dataset = open_dataset(DataConfig(path=str(path), test_path=f"test@{path}"))

    assert (len(dataset.train), len(dataset.test)) == (60, 5)
    assert "5 training prompts are among them" in str(dataset)
    with pytest.raises(TaskError, match="no split 'dev'; it has train, test"):
        open_source(f"dev@{path}", setting="data.path")


def test_a_folder_of_data_files_is_one_data_set(tmp_path):
    (tmp_path / "files").mkdir()
    write(tmp_path / "files" / "train.jsonl")

    assert len(open_source(str(tmp_path / "files"), setting="data.path")) == 60


def test_paths_are_made_absolute_and_hub_names_stay(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a.jsonl")

    assert absolute(["a.jsonl", "train@a.jsonl", "openai/gsm8k", "test@openai/gsm8k"]) == [
        str(tmp_path / "a.jsonl"), f"train@{tmp_path / 'a.jsonl'}", "openai/gsm8k", "test@openai/gsm8k",
    ]


# --- lines -----------------------------------------------------------------------------------------------------------

@each("seed", range(20))
def test_blank_lines_of_any_length_are_no_records(tmp_path, monkeypatch, seed):
    rng = random.Random(seed)
    monkeypatch.setattr("envs.data.sources.CHUNK_BYTES", rng.choice([1, 7, 64, 1 << 24]))
    rows = [rng.choice(['{"prompt": "1 + 1 = ?"}', '  {"prompt": "indented"}', '{"a":1}']) for _ in range(9)]
    blanks = ["".join(rng.choices(" \t\r\x0b\x0c", k=rng.choice([0, 1, 15, 16, 17, 200]))) for _ in range(30)]
    lines = rows + blanks
    rng.shuffle(lines)
    bom = rng.choice([b"", b"\xef\xbb\xbf"])
    (tmp_path / "a.jsonl").write_bytes(bom + "\n".join(lines).encode() + rng.choice([b"", b"\n", b" " * 40]))

    source = JsonLines(tmp_path / "a.jsonl", "a.jsonl")

    assert [source.row(i) for i in range(len(source))] == [json.loads(line) for line in lines if line.strip()]


def test_lines_are_found_whatever_their_ends_and_blanks(tmp_path, monkeypatch):
    monkeypatch.setattr("envs.data.sources.CHUNK_BYTES", 64)  # smaller than the file: reads end inside of lines
    texts = [json.dumps(row, ensure_ascii=index % 2 == 0) for index, row in enumerate(ROWS)]
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf\n" + "\r\n  \r\n".join(texts).encode())
    source = JsonLines(tmp_path / "a.jsonl", "a.jsonl")

    assert [source.row(i) for i in range(len(source))] == ROWS
    assert list(source.field("question")) == [row["question"] for row in ROWS]
    assert source.where(2) == "a.jsonl, record 3 (line 6)"


def in_place(path, change):
    """Other bytes in the same file, as a process that writes to it leaves them; the time is another one in any case."""
    before = path.stat()
    with path.open("r+b") as file:
        content = change(file.read())
        file.seek(0)
        file.truncate()
        file.write(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1_000_000))


def other_file(path, change):
    """A new file under the same name, as editors and git leave it; who has the old one open goes on reading that."""
    (path.parent / "new").write_bytes(change(path.read_bytes()))
    os.replace(path.parent / "new", path)


CHANGES = {
    "cut to nothing": (in_place, lambda old: b""),
    "cut in the middle": (in_place, lambda old: old[: len(old) // 2]),
    "as long as before": (in_place, lambda old: old.replace(b"4", b"7")),
    "one record more in front": (in_place, lambda old: old[:58] + old),
    "only touched": (in_place, lambda old: old),
    "records behind the others": (in_place, lambda old: old + old),
    "replaced": (other_file, lambda old: old.replace(b"4", b"7")),
}


@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "lines.json", "a.json", "a.csv", "a.parquet", "a.arrow"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_changes_during_a_run_gives_the_records_of_its_start_or_an_error(tmp_path, name, change):
    path = write(tmp_path / name)
    dataset = open_dataset(DataConfig(path=str(path), test_ratio=0))
    before = read(dataset)
    do, how = CHANGES[change]
    if path.suffix == ".arrow" and do is in_place and change != "only touched":
        pytest.skip("a mapped file is not written to here: its time alone is what is looked at, in the case before")
    do(path, how)

    num_refused = 0
    for index, record in enumerate(before):
        try:
            assert dataset.train[index] == record
        except DataChangedError as error:
            assert str(error).startswith(f"{path.name}, record {index + 1}: ") and "was changed while" in str(error)
            num_refused += 1
    is_read_by_offset = path.suffix in (".jsonl", ".ndjson") or path.name == "lines.json"
    harmless = do is other_file or change in ("only touched", "records behind the others")
    assert (num_refused > 0) == (is_read_by_offset and not harmless or path.suffix == ".arrow" and do is in_place)


def test_a_long_prompt_is_found_at_the_start_wherever_it_stands(tmp_path, monkeypatch):
    monkeypatch.setattr("envs.data.dataset.NUM_CHECKED", 2)
    rows = [*ROWS, {"question": "x" * (1 << 20), "answer": "1"}, {"question": "é" * 300_000, "answer": "1"}]
    path = write(tmp_path / "a.jsonl", rows)

    with pytest.raises(TaskError, match=r"^a.jsonl, record 61: it has 1,.* bytes as JSON, 1,.* in field 'question'"):
        open_dataset(DataConfig(path=str(path)))
    skipping = open_dataset(DataConfig(path=str(path), on_bad_record=OnBadRecord.skip, test_ratio=0))
    assert read(skipping) == ROWS


def test_half_a_character_is_found_at_the_start_wherever_it_stands(tmp_path, monkeypatch):
    monkeypatch.setattr("envs.data.dataset.NUM_CHECKED", 2)
    prompts = ["a\ud83d", [{"role": "user", "content": "\ude00"}]]
    (tmp_path / "a.json").write_text(json.dumps([*ROWS, *({"question": one, "answer": "1"} for one in prompts)]))

    with pytest.raises(TaskError, match="^a.json, record 61: field 'question' holds half a character, '.ud83d'"):
        open_dataset(DataConfig(path=str(tmp_path / "a.json")))
    skipping = open_dataset(DataConfig(path=str(tmp_path / "a.json"), on_bad_record=OnBadRecord.skip, test_ratio=0))
    assert read(skipping) == ROWS


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "tsv", "parquet"])
def test_a_field_may_be_as_long_as_a_record(tmp_path, kind):
    rows = [*ROWS, {"question": "long", "answer": "1" * 900_000, "level": "hard"}]
    dataset = open_dataset(DataConfig(path=str(write(tmp_path / f"a.{kind}", rows)), test_ratio=0))
    assert read(dataset)[-1] == rows[-1]


# --- which records ---------------------------------------------------------------------------------------------------

def test_the_same_prompt_is_never_on_both_sides_and_the_order_of_the_file_does_not_matter(tmp_path):
    twice = [*ROWS, *({**row, "answer": "other"} for row in ROWS)]
    forward = open_dataset(DataConfig(path=str(write(tmp_path / "a.jsonl", twice)), test_ratio=0.25))
    backward = open_dataset(DataConfig(path=str(write(tmp_path / "b.jsonl", twice[::-1])), test_ratio=0.25))
    prompts = {split: Counter(one["question"] for one in read(forward, split)) for split in ("train", "test")}

    assert not set(prompts["train"]) & set(prompts["test"])
    assert set(prompts["test"].values()) == {2} and sum(prompts["test"].values()) == 30
    assert prompts["test"] == Counter(one["question"] for one in read(backward, "test"))


@pytest.mark.shows("data.num_samples")
def test_the_first_records_can_be_taken_alone(tmp_path):
    path = str(write(tmp_path / "a.jsonl"))

    assert read(open_dataset(DataConfig(path=path, num_samples=7, test_ratio=0))) == ROWS[:7]


@pytest.mark.shows("data.weights")
@pytest.mark.parametrize(
    ("weights", "counts"), [(None, (50, 10)), ([1.0, 1.0], (50, 50)), ([5.0, 1.0], (50, 10)), ([1.0, 2.0], (50, 100))]
)
def test_several_files_are_mixed_by_their_weights(tmp_path, weights, counts):
    one, two = write(tmp_path / "one.jsonl", ROWS[:50]), write(tmp_path / "two.csv", ROWS[50:])
    dataset = open_dataset(DataConfig(path=[str(one), str(two)], weights=weights, test_ratio=0))
    found = Counter(record["question"] for record in read(dataset))

    assert sum(found[row["question"]] for row in ROWS[:50]) == counts[0]
    assert sum(found[row["question"]] for row in ROWS[50:]) == counts[1]
    assert len(found) == 60, "every record comes at least once in a pass"


@pytest.mark.parametrize("weights", [[1.0, 1.3], [1.0, 0.45], [7.0, 1.0], [1.0, 3.99], [1.0, 1.0]])
def test_a_file_in_any_order_is_repeated_evenly(tmp_path, weights):
    one, two = write(tmp_path / "one.jsonl", ROWS[:47]), write(tmp_path / "two.csv", ROWS[47:])
    dataset = open_dataset(DataConfig(path=[str(one), str(two)], weights=weights, test_ratio=0))
    found = Counter(record["question"] for record in read(dataset))

    for rows in (ROWS[:47], ROWS[47:]):
        counts = [found[row["question"]] for row in rows]
        assert max(counts) - min(counts) <= 1, "no record counts more than once above another"
        so_far = [sum(counts[:num]) - num * sum(counts) / len(counts) for num in range(len(counts) + 1)]
        assert max(map(abs, so_far)) <= 1, "the first records of a sorted file are no more frequent than its last"


def test_a_prompt_in_two_files_is_held_out_of_both(tmp_path):
    paths = [str(write(tmp_path / name)) for name in ("one.jsonl", "two.json")]
    dataset = open_dataset(DataConfig(path=paths))

    assert not {r["question"] for r in read(dataset)} & {r["question"] for r in read(dataset, "test")}
    assert "one.jsonl, two.json: 100 records to train on, 20 held out" == str(dataset)


def test_a_record_is_the_callers_own_copy(tmp_path):
    for name in ("a.jsonl", "a.json", "a.csv", "a.parquet"):
        dataset = open_dataset(DataConfig(path=str(write(tmp_path / name)), test_ratio=0))
        dataset.train[0]["question"] = "changed"
        assert dataset.train[0]["question"] == ROWS[0]["question"], name


@pytest.mark.shows("data.on_bad_record")
def test_bad_records_are_refused_or_passed_over_by_name(tmp_path, caplog):
    lines = [json.dumps(row) for row in ROWS]
    lines[3], lines[5], lines[8] = '{"question": ', '{"answer": "4"}', '{"question": "", "answer": "4"}'
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(lines))

    with pytest.raises(TaskError, match="a.jsonl, record 4: not JSON.*data.on_bad_record=skip"):
        open_dataset(DataConfig(path=str(path)))
    dataset = open_dataset(DataConfig(path=str(path), test_ratio=0, on_bad_record=OnBadRecord.skip))

    assert len(dataset.train) == 57
    assert "3 of 60 records were skipped: a.jsonl, record 4: not JSON" in caplog.text
    assert "record 6: no prompt" in caplog.text and "record 9: field 'question' is empty" in caplog.text


# --- Tables give the records that JSON Lines of the same give, and no unused column keeps them from being read

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


# --- Records from a file and a reward from a file are a task that plays like any other ---------

BASE = to_plain(load_config(["experiment=quickstart"]))
REWARD = "def reward_fn(messages, answer):\n    return float(messages[-1]['content'].strip() == answer)\n"


@pytest.fixture
def task(tmp_path, monkeypatch):
    """task(*words, reward=...) over 100 sums in train.jsonl, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    sums = [{"question": f"{a} + {a} = ?", "answer": str(2 * a), "source": "sums"} for a in range(100)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(one) + "\n" for one in sums))

    def make(*words, reward=REWARD):
        (tmp_path / "reward.py").write_text(reward)
        scored = () if any(word.startswith("reward.type") for word in words) else ("env.path=reward.py",)
        return task_of(from_plain(BASE, ["data.path=train.jsonl", *scored, *words]))

    return make


def played(task, completion, record=None) -> Step:
    """The step of one episode."""
    env = task.env()
    env.reset(task.record("train", 0) if record is None else record)
    result = env.step(completion)
    return asyncio.run(result) if inspect.isawaitable(result) else result


@pytest.mark.shows("data.path", "reward.type")
@pytest.mark.parametrize("words", [(), ("reward.type=exact",)])
def test_a_file_and_a_reward_are_a_task(task, words):
    made = task(*words)
    check_task(made)
    record = made.record("train", 0)

    assert made.env().reset(record)[0].content == record["question"]
    assert made.target(record) == record["answer"]
    assert (played(made, record["answer"]).reward, played(made, "no").reward) == (1.0, 0.0)


@pytest.mark.parametrize(("reward", "right", "wrong"), [
    ("boxed", "So \\boxed{6}", "So \\boxed{7}"),
    ("think_answer_tags", "<think> 3 + 3 </think><answer> 6 </answer>", "<think> ? </think><answer> 7 </answer>"),
])
def test_one_message_with_a_gt_answer_is_a_record_of_mathematics(task, tmp_path, reward, right, wrong):
    rows = [{"messages": {"role": "user", "content": f"{a} + 3 = ?"}, "gt_answer": str(a + 3)} for a in range(3, 40)]
    (tmp_path / "math.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = task("data.path=math.jsonl", f"reward.type={reward}", "data.test_ratio=0")
    check_task(made)

    opened = made.env().reset(made.record("train", 0))
    assert [(one.role, one.content) for one in opened] == [("user", "3 + 3 = ?")]
    assert (played(made, right).reward, played(made, wrong).reward) == (1.0, 0.0)


@pytest.mark.shows("data.test_ratio")
@pytest.mark.parametrize(("words", "num"), [((), 20), (("data.test_ratio=0.3",), 30), (("data.test_ratio=0",), 100)])
def test_a_part_of_the_file_is_held_out(task, words, num):
    made = task(*words)
    prompts = {split: {made.record(split, i)["question"] for i in range(made.num_records(split))}
               for split in ("train", "test")}

    assert made.num_records("test") == num
    assert len(prompts["train"] | prompts["test"]) == 100
    assert len(prompts["train"] & prompts["test"]) == (100 if num == 100 else 0)


@pytest.mark.shows("data.test_path")
def test_held_out_records_may_come_from_a_file_of_their_own(task, tmp_path):
    (tmp_path / "test.jsonl").write_text('{"question": "9 + 0 = ?", "answer": "9"}\n')
    made = task("data.test_path=test.jsonl")

    assert (made.num_records("train"), made.num_records("test")) == (100, 1)
    assert made.record("test", 0)["question"] == "9 + 0 = ?"


@pytest.mark.shows("data.prompt_key", "data.answer_key")
def test_the_fields_of_prompt_and_answer_can_be_named(task):
    made = task("data.prompt_key=source", "data.answer_key=question", "data.test_ratio=0")
    record = made.record("train", 0)

    assert made.env().reset(record)[0].content == "sums"
    assert played(made, record["question"]).reward == 1.0


def test_an_actor_plays_records_without_the_file(task, tmp_path):
    record = task().record("train", 0)
    (tmp_path / "train.jsonl").unlink()

    assert played(task(), record["answer"], record).reward == 1.0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("env.path=null",), "nothing says how answers are scored: give env.path=reward.py"),
        (("reward.type=exact", "env.path=reward.py"), "both score answers: leave one of them out"),
        (("reward.type=exact", "data.path=null"), "give data.path=train.jsonl, too"),
        (("reward.type=exakt",), "Did you mean exact?"),
    ],
)
def test_parts_that_do_not_make_a_task_are_named(task, words, said):
    with pytest.raises(Exception, match=said):
        task(*words)


def test_a_file_with_records_of_its_own_is_not_mixed_with_a_data_file(task):
    with pytest.raises(TaskError, match="makes its own records"):
        task(reward=REWARD + "def record(split, index):\n    return {}\n")


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "csv"])
def test_an_instruction_is_followed_by_its_input(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(dataset, "NUM_CHECKED", 2)  # the others are read by their fields alone
    rows = [{"instruction": "Add.", "input": f"{n} and 1" if n % 3 else "", "output": str(n + 1)} for n in range(9)]
    path = tmp_path / f"a.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif kind == "csv":
        path.write_text("instruction,input,output\n" + "".join(",".join(row.values()) + "\n" for row in rows))
    else:
        datasets = pytest.importorskip("datasets")
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
        datasets.Dataset.from_list(rows).to_parquet(str(path))
    found = dataset.open_dataset(DataConfig(path=str(path), test_ratio=0.3))
    records = [found.train[at] for at in range(len(found.train))]

    expected = {"Add."} | {f"Add.\n\n{n} and 1" for n in range(9) if n % 3}
    held_out = {RecordShape().messages(found.test[at])[0].content for at in range(len(found.test))}
    assert {RecordShape().messages(record)[0].content for record in records} | held_out == expected
    assert not held_out & {RecordShape().prompt(record) for record in records} and len(held_out) in (2, 3)
    for record in records:
        question, answer = AnswerShape().messages(record)
        assert (question.content, answer.content) == (RecordShape().prompt(record), record["output"])
        assert RecordShape(prompt_key="instruction").prompt(record) == "Add."
        assert RecordShape(prompt_key="input").prompt(record) == record["input"]


@given(
    names=st.lists(st.sampled_from(PROMPT_KEYS), min_size=2, max_size=2, unique=True),
    as_messages=st.booleans(), contained=st.booleans(),
)
def test_a_record_with_two_prompts_is_refused_unless_one_holds_the_other(names, as_messages, contained):
    first, second = sorted(names, key=PROMPT_KEYS.index)
    if (first, second) == ("instruction", "input"):
        return
    text = "Answer: what is 2 + 2?"
    record = {
        second: "what is 2 + 2?" if contained else "what is 3 + 3?",
        first: [{"role": "user", "content": text}] if as_messages else text,
    }
    if contained:
        assert RecordShape().messages(record)[0].content == text
        return
    with pytest.raises(TaskError, match=f"'{first}' and '{second}' may both .* data.prompt_key={first}"):
        RecordShape().check(record)
    assert RecordShape(prompt_key=second).messages(record)[0].content == "what is 3 + 3?"
