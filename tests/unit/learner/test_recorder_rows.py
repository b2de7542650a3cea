"""What a row of metrics holds of the hub's counters, and of evaluations."""

import json
import logging
import math
import os
from itertools import permutations

import pytest

from learner.record.recorder import EVALUATIONS, Recorder, hub_keys
from streamrl.config.load import load_config
from streamrl.config.schema import EvalConfig
from streamrl.errors import ConfigError
from streamrl.messages import EvalResult, HubStatus
from streamrl.metrics.meter import Meter
from streamrl.metrics.run_record import read_metrics, read_run
from streamrl.metrics.sinks import FanOut


def test_counters_get_their_names_and_sums_that_only_make_means_stay_out():
    row = hub_keys(HubStatus(3, {"num_actors": 2.0, "mean_pause_s": 0.5, "arrived_reward": 9.0, "odd": math.nan}, ()))

    assert row == {"hub/num_actors": 2.0, "time/install_pause_s": 0.5}


TWICE = EvalConfig(num_responses=2)


def result(dataset: str = "", version: int = 4, **changes) -> EvalResult:
    """Two prompts with two answers each; the first is right once."""
    values = dict(
        eval_id=1, version=version, num_prompts=2, score=0.25, reward=0.5, mean_tokens=3.0, truncated_fraction=0.0,
        scores={"score": 0.25, "format": 1.0}, prompt_scores=((1.0, 0.0), (0.0, 0.0)), dataset=dataset,
        prompt_answers=(("4", "5"), ("6", "6")), versions=(version, version),
    )
    return EvalResult(**{**values, **changes})


@pytest.fixture
def recorded(tmp_path):
    """A recorder, and what it has written: the last row, and the lines of the evaluations."""
    recorder = Recorder(
        load_config(["experiment=quickstart"]), tmp_path, "r", resume_step=None, wall_s=0.0, trained_tokens=0,
        device="cpu", dtype="float32",
    )

    def written():
        recorder.write(4, {})
        file = tmp_path / EVALUATIONS
        lines = file.read_text().splitlines() if file.exists() else []
        return read_metrics(tmp_path / "metrics.jsonl")[-1], [json.loads(line) for line in lines]

    return recorder, written


def test_each_set_has_keys_and_a_line_of_its_own_with_the_estimates_of_its_answers(recorded):
    recorder, written = recorded
    recorder.evaluated(result(), TWICE)
    recorder.evaluated(result("hard", score=0.75, reward=0.75), TWICE)
    row, lines = written()

    assert (row["eval/score"], row["eval/hard/score"]) == (0.25, 0.75)
    assert (row["eval_parts/format"], row["eval_parts/hard.format"]) == (1.0, 1.0)
    for prefix in ("eval", "eval/hard"):
        found = [row[f"{prefix}/{key}"] for key in ("pass_at_1", "pass_at_k", "maj_at_k", "version")]
        assert found == [0.25, 0.5, 0.25, 4.0]
        errors = [row[f"{prefix}/{key}_stderr"] for key in ("score", "pass_at_1", "pass_at_k", "maj_at_k")]
        assert errors == pytest.approx([0.25, 0.25, 0.5, 0.25])
    assert [(line["dataset"], line["version"], line["sampled_by"]) for line in lines] == [
        ("", 4, [4, 4]), ("hard", 4, [4, 4])
    ]
    assert lines[1]["estimates"]["maj@2"] == [0.25, 0.25, 2]


@pytest.mark.parametrize("scores", [((1.0,),), ((1.0, 0.0, 1.0),), ((), ())])
@pytest.mark.parametrize("reward", [1.0, math.nan, math.inf, 1e300])
def test_a_value_that_cannot_be_known_costs_its_step_no_other_value(recorded, scores, reward):
    recorder, written = recorded
    answers = tuple(tuple("4" for _ in one) for one in scores)
    found = result(num_prompts=1, score=1.0, reward=reward, prompt_scores=scores, prompt_answers=answers)
    recorder.evaluated(found, EvalConfig(num_responses=4))  # of one prompt there is no error, of too few no pass@4
    row, _ = written()

    assert (row["step"], row["eval/score"], row["eval/version"]) == (4, 1.0, 4.0)
    assert "eval/pass_at_k" not in row and "eval/score_stderr" not in row
    assert row.get("eval/reward") == (1.0 if reward == 1.0 else None)


def test_one_answer_to_each_prompt_has_no_pass_at_k(recorded):
    recorder, written = recorded
    one = result(prompt_scores=((1.0,), (0.0,)), prompt_answers=(("4",), ("6",)), mean_turns=2.5)
    recorder.evaluated(one, EvalConfig())
    row, lines = written()
    assert not any("pass_at" in key or "maj_at" in key for key in row)
    assert list(lines[0]["estimates"]) == ["avg@1"] and row["eval/num_turns"] == 2.5


def test_the_row_has_the_newer_of_two_evaluations_whichever_ended_first(recorded):
    recorder, written = recorded
    recorder.evaluated(result(version=8, score=0.9), TWICE)
    recorder.evaluated(result(version=4, score=0.1), TWICE)
    row, lines = written()
    assert (row["eval/version"], row["eval/score"], len(lines)) == (8.0, 0.9, 2)


@pytest.mark.parametrize("order", list(permutations([("", 4), ("", 8), ("", 12), ("hard", 8), ("hard", 12)]))[::17])
def test_every_evaluation_has_a_row_however_many_ended_in_one_step(recorded, tmp_path, order):
    recorder, _ = recorded
    for dataset, version in order:
        recorder.evaluated(result(dataset, version, score=version / 16), TWICE)
    recorder.step(13, Meter(), HubStatus(13, {}, ()), version=13, epoch=2)
    recorder.close(13, HubStatus(13, {}, ()), version=13, epoch=2)
    record = read_run(tmp_path)

    assert record.series("eval/score") == ([4, 8, 12], [0.25, 0.5, 0.75])
    assert record.series("eval/hard/score") == ([8, 12], [0.5, 0.75])
    assert [(row["step"], row["run/epoch"], row["run/version"]) for row in record.rows] == [(13, 2.0, 13.0)] * 4
    assert record.summary.eval_score_best == record.summary.eval_score_last == 0.75
    assert read_run(tmp_path, max_rows=2).series("eval/score") == record.series("eval/score")


def test_an_evaluation_that_was_not_waited_for_says_so_and_without_an_answer_has_no_row(recorded, caplog):
    recorder, written = recorded
    with caplog.at_level(logging.WARNING, "streamrl.learner"):
        recorder.evaluated(result(num_prompts=0, num_unanswered=4, score=math.nan), TWICE)
    row, lines = written()
    assert "4 answers were skipped" in caplog.text and "eval.pin_s=1800" in caplog.text
    assert "eval/score" not in row and lines == []


def test_a_full_disk_under_the_records_does_not_end_the_run(recorded, tmp_path, caplog):
    recorder, _ = recorded
    names = (EVALUATIONS, f".summary.json.{os.getpid()}", f".report.html.{os.getpid()}")
    for name in names:
        (tmp_path / name).unlink(missing_ok=True)
        (tmp_path / name).symlink_to("/dev/full")

    recorder.evaluated(result(), TWICE)
    recorder.step(4, Meter(), HubStatus(4, {}, ()), version=4, epoch=1)
    summary = recorder.close(4, HubStatus(4, {}, ()), version=4, epoch=1)

    assert summary.steps == 4 and not (tmp_path / "summary.json").exists()
    assert f"{EVALUATIONS} was not written" in caplog.text and "summary.json was not written" in caplog.text


@pytest.mark.shows("tracking.artifacts")
@pytest.mark.parametrize("artifacts", [True, False])
def test_trackers_get_the_model_and_the_record_at_the_end_if_asked_for(recorded, tmp_path, monkeypatch, artifacts):
    recorder, written = recorded
    taken = []
    monkeypatch.setattr(FanOut, "log_artifact", lambda self, path: taken.append(path.name))
    recorder._config.tracking.artifacts = artifacts
    (tmp_path / "model").mkdir()
    written()
    recorder.close(4, None, version=4, epoch=1)
    assert taken == ["model", "config.yaml", "summary.json", "report.html"] * artifacts
    with pytest.raises(ConfigError, match=r"tracking.artifacts=true with tracking.trackers=\['tensorboard'\]"):
        load_config(["experiment=quickstart", "tracking.trackers=[tensorboard]", "tracking.artifacts=true"])
