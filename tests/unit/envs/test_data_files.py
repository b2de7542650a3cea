"""Every kind of file gives the same records; a part is held out by its prompts; several files are mixed by weight."""

from __future__ import annotations

import csv
import json
import os
from collections import Counter

import pytest

from envs.data.dataset import open_dataset
from envs.data.lines import JsonLines
from envs.data.sources import absolute, open_source, split_of
from streamrl.config.schema import DataConfig, OnBadRecord
from streamrl.errors import DataChangedError, TaskError

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


def test_lines_are_found_whatever_their_ends_and_blanks(tmp_path, monkeypatch):
    monkeypatch.setattr("envs.data.lines.CHUNK_BYTES", 64)  # smaller than the file: reads end inside of lines
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
    assert "3 of 60 records are passed over: a.jsonl, record 4: not JSON" in caplog.text
    assert "record 6: no prompt" in caplog.text and "record 9: field 'question' is empty" in caplog.text

