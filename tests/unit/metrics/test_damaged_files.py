"""A full disk or a crash leaves no torn line in the middle of a file, and no reader stumbles over one."""

import json
import logging
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from streamrl.metrics.files import append_lines, read_lines, write_atomic
from streamrl.metrics.ranking import Objective
from streamrl.metrics.run_record import read_metrics, read_run
from streamrl.metrics.samples import FILE_NAME, Sample, SampleFile, read_samples
from streamrl.metrics.sinks import JsonlSink
from streamrl.report.compare import write_comparison
from streamrl.report.index import write_index, write_pages
from streamrl.report.report import write_report
from tests.kit.system import full_disk

ROOT = Path(__file__).parents[3]


def sample(step: int) -> Sample:
    return Sample(kind="train", step=step, version=0, lag=0, prompt="1+1=", answer="2", reward=1.0, score=1.0,
                  num_tokens=2, group=1, member=0, record=7)


def metrics_appender(folder: Path) -> tuple[Path, Callable[[int], None]]:
    sink = JsonlSink(folder / "metrics.jsonl")
    return sink.path, lambda step: sink.log_metrics(step, {"reward/mean": 0.5})


def samples_appender(folder: Path) -> tuple[Path, Callable[[int], None]]:
    file = SampleFile(folder, max_bytes=1 << 20)
    return file.path, lambda step: file.append([sample(step)])


def plain_appender(folder: Path) -> tuple[Path, Callable[[int], None]]:
    path = folder / "lines.jsonl"
    return path, lambda step: append_lines(path, json.dumps({"step": step, "text": "é" * 20}).encode() + b"\n")


@pytest.mark.parametrize("appender", [metrics_appender, samples_appender, plain_appender])
def test_a_disk_that_is_full_at_any_byte_of_a_line_leaves_whole_lines_only(tmp_path, appender):
    path, append = appender(tmp_path)
    append(1)
    size = path.stat().st_size
    for cut in range(size + 1):
        with full_disk(size + cut), suppress(OSError):
            append(2)
        written = [json.loads(line)["step"] for line in path.read_bytes().splitlines()]
        assert written == ([1, 2] if cut == size else [1]) and path.read_bytes().endswith(b"\n")
    append(3)
    assert [json.loads(line)["step"] for line in path.read_bytes().splitlines()] == [1, 2, 3]


def test_what_a_process_that_died_in_a_line_has_left_is_cut_off_by_the_next_one(tmp_path):
    path, append = plain_appender(tmp_path)
    append(1)
    whole = path.read_bytes()
    for cut in range(1, len(whole)):
        path.write_bytes(whole + whole[:cut])
        append(2)
        assert [json.loads(line)["step"] for line in path.read_bytes().splitlines()] == [1, 2]
    path.write_bytes(b"x" * 200_000)  # not one line
    append(4)
    assert json.loads(path.read_bytes())["step"] == 4


def test_a_file_is_replaced_whole_or_stays_as_it_was(tmp_path):
    path = tmp_path / "config.yaml"
    write_atomic(path, "before")
    with full_disk(3), pytest.raises(OSError):
        write_atomic(path, "after")
    assert path.read_text() == "before" and [one.name for one in tmp_path.iterdir()] == ["config.yaml"]


def test_nothing_else_in_the_product_appends_to_a_file_that_is_read_back():
    """Logs of processes are for people; every other file that grows goes through `append_lines`."""
    found = {str(path.relative_to(ROOT)) for room in ("streamrl", "learner", "actors") for path in
             (ROOT / room).rglob("*.py") if re.search(r"""open\((?:[^()\n]*, )?["']a\+?b?["']""", path.read_text())}
    assert found == {
        "streamrl/metrics/files.py", "streamrl/processes.py", "streamrl/sweep/job.py",  # logs
        "streamrl/run_dirs.py", "learner/checkpoint/run_lock.py", "actors/engines/vllm/process.py",  # locks
    }


# --- readers ---------------------------------------------------------------------------------------------------------

DAMAGE = {
    "torn in the middle": lambda whole: whole[0][:-30] + b"".join(whole[1:]),
    "not text": lambda whole: b"\xff\xfe\x00\n" + b"".join(whole),
    "no object": lambda whole: b"3\nnull\n[]\n" + b"".join(whole),
    "deep": lambda whole: b"[" * 100_000 + b"\n" + b"".join(whole),
    "a step that is no number": lambda whole: b'{"step": "one", "kind": 3}\n' + b"".join(whole),
    "a value that is no number": lambda whole: b'{"step": 1, "kind": "train", "reward/mean": null}\n' + b"".join(whole),
}


@pytest.mark.parametrize("how", DAMAGE)
@pytest.mark.parametrize("name", ["metrics.jsonl", FILE_NAME])
def test_every_reader_passes_over_damaged_lines_and_names_them(make_run, caplog, name, how):
    root = make_run(num_steps=4)
    file = SampleFile(root, max_bytes=1 << 20)
    file.append([sample(step) for step in range(1, 5)])
    read = {"metrics.jsonl": lambda: [row["step"] for row in read_metrics(root / name)],
            FILE_NAME: lambda: [one.step for one in read_samples(root)]}[name]
    assert read() == [1, 2, 3, 4]
    whole = (root / name).read_bytes().splitlines(keepends=True)
    (root / name).write_bytes(DAMAGE[how](whole))
    good = [3, 4] if how == "torn in the middle" else [1, 2, 3, 4]

    with caplog.at_level(logging.WARNING):
        assert read() == good
    assert f"{name}:1 (" in caplog.text
    page = write_report(root).read_text()
    assert f"Left out, because damaged: {name}:1 (" in page and "Throughput" in page
    assert read_run(root, max_rows=10).rows, "what the index reads of it"
    (resumed,) = [sink for sink in [JsonlSink(root / "metrics.jsonl", resume_step=3)]]
    SampleFile(root, max_bytes=1 << 20, resume_step=3)
    assert read() == [step for step in good if step <= 3], "a resumed run drops what is damaged, too"
    assert list(read_lines(resumed.path, json.loads)), "and nothing of it is left"


ODD = [None, True, -1, 10**400, float("inf"), float("nan"), 1e308, "x", [1], {}, {"a": 1}, {"1": "x"}]


def places(value, path=()):
    """The path of every field at any depth."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield (*path, key)
        yield from places(inner, (*path, key))


def put(value, path, odd):
    """A copy with another value at the path."""
    if not path:
        return odd
    copy = value.copy()
    copy[path[0]] = put(value[path[0]], path[1:], odd)
    return copy


CONFIG = {"env": {"path": "a.py", "name": "n", "options": {"k": 1}}, "data": {"path": "d.jsonl"},
          "versions": {"a": "1"}, "policy": {"tiny": {"enabled": False}, "model_path": "m"},
          "trainer": {"num_steps": 2}, "loss": {"surrogate": "ppo"}, "advantage": {"estimator": "group"}}
STARTS = {"starts": [{"command": "streamrl launch algorithm=grpo", "started": "2026-01-01T00:00:00", "commit": "a"}]}
STATUS = {"state": "running", "max_lag": 4, "notices": ["x"], "version": 2, "total_steps": 2}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["metrics.jsonl", "summary.json", "config.json", "run.json", "status.json"])
def test_a_field_of_a_strangers_run_may_hold_anything(make_run, tmp_path, name, caplog):
    """A report, a comparison and the index are written: a field of another type is left out, or shown."""
    root, other = make_run("odd-001", num_steps=2), make_run("good-001", num_steps=2)
    more = {"eval/version": 1, "eval/score_stderr": 0.1, "eval/num_prompts": 9, "policy/num_skipped_steps": 1,
            "hub/num_episodes_failed": 1, "run/version": 2, "run/wall_s": 1.0, "drift/k3": 0.1, "ratio/max": 1.0}
    rows = [json.dumps(row | more) + "\n" for row in map(json.loads, (root / "metrics.jsonl").open())]
    (root / "metrics.jsonl").write_text("".join(rows))
    for file, content in (("config.json", CONFIG), ("run.json", STARTS), ("status.json", STATUS)):
        (root / file).write_text(json.dumps(content))
    summary = json.loads((root / "summary.json").read_text()) | {"kind": "sft"}
    if name == "status.json":
        (root / "summary.json").unlink()
    whole = summary if name == "summary.json" else json.loads((root / name).read_text().splitlines()[-1])
    paths = list(places(whole))
    assert len(paths) > 4
    for at, path in enumerate(paths):
        for odd in ODD[at % 6 :: 6]:  # each of them at many fields
            text = json.dumps(put(whole, path, odd))
            (root / name).write_text(text if name.endswith(".json") else "".join(rows) + f"{text}\n{text}\n")
            write_report(root)
            write_comparison([root, other], tmp_path / "c.html", Objective())
            assert "good-001" in write_index(tmp_path).read_text(), (path, odd)


def test_a_page_that_cannot_be_made_costs_a_run_nothing(make_run, monkeypatch, caplog):
    root = make_run("good-001")
    monkeypatch.setattr("streamrl.report.index.write_report", lambda run: 1 / 0)
    write_pages(root, None, ended_well=False)
    assert "a page could not be written: division by zero" in caplog.text


@pytest.mark.parametrize("make_bad", [
    lambda root: [path.write_bytes(b"") for path in root.iterdir()],
    lambda root: ((root / "metrics.jsonl").unlink(), (root / "metrics.jsonl").mkdir()),
    lambda root: [path.write_bytes(bytes(range(256)) * 40) for path in root.iterdir()],
])
def test_the_index_lists_a_run_that_it_cannot_read_beside_the_others(make_run, tmp_path, make_bad):
    make_run("good-001")
    make_bad(make_run("bad-001"))

    page = write_index(tmp_path, reports=True).read_text()

    assert "good-001" in page and "bad-001" in page and "2 runs" in page
