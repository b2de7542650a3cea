"""The top of a report: which run it is, what came of it, what went wrong; and what older and killed runs lack."""

import json
import os

import pytest

from streamrl.metrics.rows import Rows
from streamrl.metrics.run_record import RunRecord, read_run, run_state
from streamrl.report import headline
from streamrl.report.readme_line import readme_line
from streamrl.report.report import write_report
from streamrl.run_dirs import note_start


def record_of(rows=(), **fields):
    return RunRecord(**{"rows": list(rows), "name": "r", **fields})


def test_the_headline_names_task_model_algorithm_and_date(make_run):
    root = make_run("try-003")
    (root / "config.json").write_text(json.dumps({
        "env": {"name": "x", "path": "/home/me/task.py", "options": {"digits": 3}}, "policy": {
            "tiny": {"enabled": False}, "model_path": "/models/Qwen/Qwen2.5-7B"},
        "loss": {"surrogate": "cispo"}, "advantage": {"estimator": "group"}}))
    (root / "run.json").write_text(json.dumps({"starts": [
        {"command": "streamrl launch algorithm=grpo", "started": "2026-03-04T05:06:07+00:00", "commit": "1a2b3c4+"}]}))

    (root / "notes.md").write_text("lr was <too> high & <script>alert(1)</script>")
    (root / "status.json").write_text(json.dumps({"state": "finished", "notices": ["<img src=x onerror=alert(2)>"]}))

    text = write_report(root).read_text()

    assert "<h1>try-003</h1>" in text
    assert "lr was &lt;too&gt; high" in text and "&lt;img" in text
    assert "<img" not in text and "<script>alert" not in text
    assert "task.py digits=3 · Qwen/Qwen2.5-7B · grpo: cispo with group advantages · 4 Mar 2026, 05:06" in text
    assert "<dd>streamrl launch algorithm=grpo</dd>" in text and "<dd>1a2b3c4+</dd>" in text


@pytest.mark.parametrize(("settings", "expected"), [
    ({"env": {"name": "string.reverse"}, "data": {"path": None}}, "string.reverse"),
    ({"env": {"name": "string.reverse", "path": "my/reward.py"}, "data": {"path": "my/train.jsonl"}},
     "train.jsonl reward.py"),
    ({"env": {"name": "string.reverse"}, "data": {"path": ["a/x.csv", "y.json"]}}, "x.csv y.json"), ({}, "")])
def test_a_task_is_named_by_its_data_its_file_or_its_name(settings, expected):
    assert headline.task(record_of(config=settings)) == expected


def test_the_standard_error_is_that_of_a_share_unless_a_measured_one_is_there():
    rows = [{"step": 1, "eval/score": 0.5, "eval/num_prompts": 100.0},
            {"step": 2, "eval/score": 0.5, "eval/num_prompts": 100.0, "eval/score_stderr": 0.01},
            {"step": 3, "eval/score": -3.0, "eval/num_prompts": 100.0}, {"step": 4, "eval/score": 0.5}]

    assert Rows(rows).evaluations()[2] == pytest.approx([0.05, 0.01, 0.0, 0.0])


def test_bookkeeping_that_is_zero_is_left_out_and_failures_are_not(make_run):
    root = make_run("old")
    healthy = write_report(root).read_text()
    assert "<h1>old</h1>" in healthy and 'class="subtitle"' not in healthy, "of a release that did not note it"
    with (root / "metrics.jsonl").open("a") as file:
        file.write('{"step": 11, "hub/num_episodes_failed": 7}\n')
    failing = write_report(root).read_text()

    assert "reissued" not in healthy and "duplicates" not in healthy and "failed in their environment" not in healthy
    assert "7 episodes failed in their environment" in failing


@pytest.mark.parametrize(("status", "summary_is", "expected"), [
    ("finished", "newer", "finished"), ("stopped", "newer", "stopped"), (None, "newer", "finished"),
    ("stopped", "missing", "killed"),  # the hub outlived a killed learner for a moment
    ("running", "missing", "running"), ("running", "older", "running"),  # resumed
    (None, "missing", "killed"), ("stopped", "older", "killed"),
])
def test_the_state_of_a_run_follows_from_its_files(make_run, status, summary_is, expected):
    root = make_run(finished=summary_is != "missing")
    if summary_is == "older":
        os.utime(root / "summary.json", (1, 1))
    found = {"state": status} if status else {}
    (root / "status.json").write_text(json.dumps(found))

    assert run_state(root, found) == expected


@pytest.mark.parametrize("times", [(1, 2), (2, 1)])
@pytest.mark.parametrize(("status", "epoch_of_metrics", "expected"), [
    ("finished", 3, "finished"), ("stopped", 3, "stopped"), (None, 3, "finished"),
    ("running", 4, "running"), ("stopped", 4, "killed"), (None, 4, "killed"),
])
def test_a_copy_of_a_run_whose_files_have_any_times_has_its_state(make_run, times, status, epoch_of_metrics, expected):
    root = make_run()
    summary, metrics = root / "summary.json", root / "metrics.jsonl"
    summary.write_text(json.dumps({**json.loads(summary.read_text()), "learner_epoch": 3}))
    with metrics.open("a") as file:
        file.write(json.dumps({"step": 11, "run/epoch": float(epoch_of_metrics), "policy/lr": 1e-4}) + "\n")
    found = {"state": status} if status else {}
    (root / "status.json").write_text(json.dumps(found))
    for path, time in zip((summary, metrics), times, strict=True):
        os.utime(path, (time, time))

    assert run_state(root, found) == expected


def test_a_run_whose_last_status_is_old_was_killed(make_run):
    root = make_run(finished=False)
    (root / "status.json").write_text('{"state": "running"}')
    os.utime(root / "status.json", (1, 1))

    record = read_run(root)

    assert record.state == "killed"
    assert "ended without a summary" in headline.title(record)


def test_every_start_of_a_run_is_noted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # no git repository
    note_start(tmp_path, ["streamrl", "launch", "env.options={a: 1}"])
    note_start(tmp_path, ["streamrl", "learner", "checkpoint.resume=true"])

    starts = json.loads((tmp_path / "run.json").read_text())["starts"]

    assert [start["command"] for start in starts] == [
        "streamrl launch 'env.options={a: 1}'", "streamrl learner checkpoint.resume=true"]
    assert starts[0]["commit"] == "" and starts[0]["started"][:2] == "20"


def test_a_part_of_the_metrics_holds_every_evaluation_and_both_ends(make_run):
    root = make_run(num_steps=400)

    rows = read_run(root, max_rows=20).rows

    assert len(rows) <= 30 and (rows[0]["step"], rows[-1]["step"]) == (1, 400)
    assert [row["step"] for row in rows if "eval/score" in row] == [1, 10]


def test_a_run_in_one_line_has_its_usual_rates_its_best_score_and_the_memory_of_the_whole_gpu():
    rates = [(10.0, 5.0), (2000.0, 900.0), (3000.0, 1000.0), (20_000.0, 1100.0)]
    rows = [
        {"step": step, "throughput/generate_tokens_per_s": made, "throughput/train_tokens_per_s": read,
         "system/gpu_allocated_bytes": 1 << 30, "hub/actor_gpu_used_bytes": 12.5 * (1 << 30)}
        for step, (made, read) in enumerate(rates, 1)
    ]
    scores = {0: (0.4, 2.0), 2: (0.95, 93.0), 4: (0.95, 180.0)}
    rows += [{"step": step, "eval/score": score, "run/wall_s": wall_s} for step, (score, wall_s) in scores.items()]
    settings = {"policy": {"model_path": "models/smollm2-135m"}, "env": {"name": "gsm8k"}}

    assert readme_line(record_of(rows, config=settings), "1 NVIDIA H200") == (
        "models/smollm2-135m on 1 NVIDIA H200: 3000 tokens/s generated, 1000 trained; gsm8k from 0.4 to 0.95 in 1m33s; "
        "peak memory 12.5 GiB"
    )
    fell = [*rows, {"step": 5, "eval/score": 0.6, "run/wall_s": 200.0}]
    assert "from 0.4 to 0.95 in 1m33s, 0.6 at the end; " in readme_line(record_of(fell, config=settings), "a laptop")
    on_host = [{"step": 1, "system/rss_bytes": 1 << 30, "hub/actor_rss_bytes": 1 << 29}]
    assert readme_line(record_of(on_host), "2 CPU cores").endswith(
        " on 2 CPU cores: - tokens/s generated, - trained; peak memory 1.5 GiB of the host"
    )
