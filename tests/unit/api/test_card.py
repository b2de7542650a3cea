"""A run, its metrics and its summary print small in a terminal and in a notebook."""

import json
from dataclasses import replace

import pytest

import streamrl
from streamrl.config.load import load_config, to_plain
from streamrl.report.report import run_html


@pytest.fixture
def run_dir(make_run):
    root = make_run(num_steps=10)
    config = to_plain(load_config(["experiment=quickstart", "trainer.num_steps=10"]))
    (root / "config.json").write_text(json.dumps({**config, "versions": {"python": "3.11"}}))
    return root


def test_a_run_is_five_lines(run_dir):
    assert repr(streamrl.load_run(run_dir)).splitlines() == [
        "run         run-000, finished", "model       tiny model (2 layers of width 64) on string.reverse",
        "steps       10 of 10 in 20s", "evaluation  0.05 → 0.5, best 0.5", f"directory   {run_dir}",
    ]
    (run_dir / "report.html").touch()
    assert repr(streamrl.load_run(run_dir)).splitlines()[-1] == f"report      {run_dir}/report.html"


def test_a_run_without_evaluation_or_summary_prints_too(make_run):
    root = make_run(num_steps=3, finished=False)
    rows = [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]
    kept = [{key: value for key, value in row.items() if not key.startswith(("eval/", "reward/"))} for row in rows]
    (root / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
    (root / "config.json").write_text(json.dumps(to_plain(load_config(["experiment=quickstart"]))))

    run = streamrl.load_run(root)

    assert "evaluation  none" in repr(run) and "ended without a summary" in repr(run)
    assert "<svg" not in run._repr_html_()
    with pytest.raises(AttributeError, match="no 'steps' yet: it is killed, without a summary"):
        _ = run.steps


def test_a_notebook_shows_both_curves_in_little_room(run_dir):
    run = streamrl.load_run(run_dir)
    shown = run._repr_html_()
    assert shown.count("<svg") == 4 and "Evaluation score" in shown and "Reward" in shown  # each with its plot inside
    assert "<script" not in shown and "http" not in shown
    rows = [{"step": step, "reward/mean": (step * 7919 % 1000) / 1000, "eval/score": (step * 7919 % 997) / 997,
             "eval/num_prompts": 200} for step in range(1, 50_001)]
    assert len(run_html(replace(run.record, rows=rows), run_dir)) < 50_000


def test_metrics_and_summary_are_short_and_escape_nothing_of_their_use(run_dir):
    run = streamrl.load_run(run_dir)
    assert len(repr(run.metrics)) < 300 and f"{len(run.metrics)} metrics of 10 steps: step, " in repr(run.metrics)
    assert repr(run.summary) == run.summary.table().rstrip() and "tokens trained" in repr(run.summary)
    assert (run.steps, run.run_id, run.table()) == (10, run.summary.run_id, run.summary.table())


def test_names_are_escaped(run_dir):
    config = json.loads((run_dir / "config.json").read_text())
    config["env"]["name"] = "<b>evil</b>"
    (run_dir / "config.json").write_text(json.dumps(config))
    assert "<b>evil" not in streamrl.load_run(run_dir)._repr_html_()


def test_an_unknown_name_of_a_run_is_an_attribute_error(run_dir):
    with pytest.raises(AttributeError, match="a run has no 'stepz'"):
        _ = streamrl.load_run(run_dir).stepz
