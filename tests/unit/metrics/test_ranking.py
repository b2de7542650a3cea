"""Ranking: the number that counts, its good end, and where pruned, unfinished and failed runs stand."""

from dataclasses import replace

import pytest

from streamrl.errors import ConfigError
from streamrl.metrics.ranking import Objective, Outcome, outcome, pruned_at
from streamrl.metrics.run_record import FAILURE, RunRecord, read_run
from streamrl.metrics.summary import Summary


@pytest.fixture
def summary(make_run) -> Summary:
    return read_run(make_run()).summary


def record(name: str, state: str, summary: Summary | None = None, rows: tuple[dict, ...] = ()) -> RunRecord:
    return RunRecord(rows, name=name, summary=summary, state=state)


def test_finished_runs_come_first_by_their_number(summary):
    def scored(name: str, state: str, score: float | None) -> RunRecord:
        return record(name, state, replace(summary, eval_score_last=score))

    runs = [
        record("failed", "failed", rows=({"step": 1, "eval/score": 1.0},)), scored("interrupted", "stopped", 0.95),
        scored("pruned", "pruned", 0.9), scored("silent", "finished", None), scored("low", "finished", 0.2),
        scored("high", "finished", 0.8), scored("diverged", "finished", float("nan")),
    ]

    def names(objective: Objective) -> list[str]:
        return [runs[i].name for i in objective.order(runs)]

    assert names(Objective()) == ["high", "low", "silent", "diverged", "pruned", "interrupted", "failed"]
    assert names(Objective(maximize=False))[:3] == ["low", "high", "silent"]
    assert outcome(record("killed", "killed")) == Outcome.unfinished
    assert str(Objective(maximize=False)) == "eval_score_last, lowest first"


def test_a_metric_with_a_slash_counts_by_its_last_value():
    run = record("run", "killed", rows=({"step": 1, "reward/mean": 0.1}, {"step": 2, "reward/mean": 0.3}, {"step": 3}))

    assert Objective("reward/mean").value(run) == 0.3
    assert Objective("reward/mean").intermediate(run.rows) == [(1, 0.1), (2, 0.3)]


def test_an_evaluation_counts_at_the_version_that_it_scored():
    rows = [{"step": 43, "eval/score": 0.5, "eval/version": 40.0}]

    assert Objective().intermediate(rows) == [(40, 0.5)]
    assert Objective("tokens_per_s_train").intermediate(rows) == []


@pytest.mark.parametrize("metric", ["eval_score", "no/such_metric", "device"])
def test_a_metric_that_no_run_has_is_refused(metric):
    with pytest.raises(ConfigError, match=f"sweep.metric={metric} is no"):
        Objective(metric)


def test_a_pruned_run_and_one_that_failed_before_its_first_step_are_known_by_their_files(make_run, tmp_path):
    (tmp_path / FAILURE).write_text("status 2: error: no such model\n")

    pruned = make_run()
    replace(read_run(pruned).summary, stopped=pruned_at(4)).write(pruned / "summary.json")

    assert outcome(read_run(pruned)) == Outcome.pruned and read_run(pruned).summary.eval_score_best == 0.5
    found = read_run(tmp_path)
    assert (found.rows, found.failure, outcome(found)) == ([], "status 2: error: no such model", Outcome.failed)
