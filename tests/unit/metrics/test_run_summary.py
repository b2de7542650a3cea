"""summary.json: its keys, its round trip, and its numbers from the lines of a run."""

import json
from dataclasses import replace

import pytest

from streamrl.errors import CheckpointError
from streamrl.metrics.rows import Rows
from streamrl.metrics.run_record import RunRecord, read_metrics
from streamrl.metrics.summary import Summary, summarize, warnings_of
from streamrl.report.report import run_text

PROMISED = """run_id steps wall_s eval_score_first eval_score_last lag_mean lag_max max_lag_bound num_lag_violations
    num_groups_leased num_groups_accepted num_groups_trained num_groups_stale num_duplicates_dropped
    num_leases_reissued num_actor_restarts trained_tokens tokens_per_s_train tokens_per_s_generate learner_wait_s
    publish_s_mean device dtype seed num_leases_retried num_episodes_failed first_failure run eval_score_best
    stopped failed learner_idle_fraction eval_stderr_first eval_stderr_last warnings diagnosis sandbox_level
    tracked eval_sets""".split()


def test_a_summary_file_holds_every_promised_key_in_order_and_extras_after_them(make_run):
    root = make_run()
    assert list(json.loads((root / "summary.json").read_text())) == PROMISED

    with_extra = summarize(read_metrics(root / "metrics.jsonl"), run_id="r", max_lag_bound=3, device="cpu",
                           dtype="float32", seed=1, extra={"command": "quickstart"})
    with_extra.write(root / "summary.json")
    loaded = Summary.load(root / "summary.json")
    loaded.write(root / "summary.json")
    assert Summary.load(root / "summary.json") == loaded, "the round trip"
    with pytest.raises(ValueError, match="steps"):
        replace(with_extra, extra={"steps": 9})

    assert list(json.loads((root / "summary.json").read_text())) == [*PROMISED, "command"]


def test_numbers_follow_from_the_lines_of_the_run(make_run):
    s = Summary.load(make_run(lag=2) / "summary.json")

    assert (s.steps, s.wall_s, s.trained_tokens) == (10, 20.0, 1000)
    assert (s.eval_score_first, s.eval_score_last) == (0.05, 0.5)
    assert s.lag_mean == pytest.approx(0.6 * 2)  # 40 tokens at 0, 60 at 2, every step
    assert (s.lag_max, s.num_lag_violations) == (2, 0)
    assert (s.num_groups_leased, s.num_groups_accepted, s.num_groups_trained, s.num_groups_stale) == (120, 110, 100, 1)
    assert (s.tokens_per_s_train, s.tokens_per_s_generate) == (50.0, 60.0)
    assert (s.learner_wait_s, s.publish_s_mean) == (pytest.approx(5.0), pytest.approx(0.1))
    rows = [{"step": i, "hub/num_actor_restarts": n} for i, n in enumerate([1, 3, 3, 0, 2])]
    assert Rows(rows).total("hub/num_actor_restarts") == 5, "a counter that restarted at zero keeps its total"


@pytest.mark.parametrize("own", [{}, {"eval/score": 0.5, "eval/score_stderr": 0.0}])
def test_a_run_that_evaluates_named_sets_alone_says_their_scores(tmp_path, own):
    rows = [{"step": 1, "eval/hard/score": 0.1, "eval/easy/score": 0.25, "eval/hard/version": 0},
            {"step": 2, **own, "eval/hard/score": 0.75}, {"step": 3}]
    summary = summarize(rows, run_id="r", max_lag_bound=3, device="cpu", dtype="float32", seed=1)
    summary.write(tmp_path / "summary.json")

    assert Summary.load(tmp_path / "summary.json").eval_sets == summary.eval_sets == [
        ("hard", 0.1, 0.75), ("easy", 0.25, 0.25)]
    words = "0.5 → 0.5" if own else "hard 0.1 → 0.75, easy 0.25 → 0.25"
    assert ("evaluation", words) in summary.headline()
    record = RunRecord(rows=rows, name="r", summary=summary)
    best = ", best 0.5" if own else ""
    assert f"evaluation  {words}{best}\n" in run_text(record, tmp_path)
    old = json.loads((tmp_path / "summary.json").read_text())
    del old["eval_sets"]
    (tmp_path / "summary.json").write_text(json.dumps(old))
    assert Summary.load(tmp_path / "summary.json").eval_sets == ()


@pytest.mark.parametrize("accuracy", [{}, {"supervised/held_out_accuracy": 0.5}])
def test_a_run_of_another_trainer_says_its_held_out_results(tmp_path, accuracy):
    rows = [{"step": 0, "supervised/held_out_loss": 3.0, **accuracy}, {"step": 1, "supervised/loss": 2.0},
            {"step": 2, "supervised/held_out_loss": 1.5}]

    said = ", held-out accuracy 0.5 → 0.5" if accuracy else ""
    record = RunRecord(rows=rows, name="r")
    assert f"evaluation  held-out loss 3 → 1.5{said}\n" in run_text(record, tmp_path)


def test_a_run_without_a_single_step_has_a_summary():
    s = summarize([], run_id="r", max_lag_bound=1, device="cpu", dtype="float32", seed=1)

    assert (s.steps, s.eval_score_first, s.tokens_per_s_train) == (0, None, 0.0)
    assert "run " in s.table()


def test_a_file_that_is_not_a_summary_is_refused_by_name(tmp_path):
    path = tmp_path / "summary.json"
    path.write_text('{"run_id": "r"}')
    with pytest.raises(CheckpointError, match="lacks steps"):
        Summary.load(path)
    path.write_text("{")
    with pytest.raises(CheckpointError, match="not JSON"):
        Summary.load(path)


def test_the_table_for_the_terminal_answers_the_first_questions(make_run):
    summary = Summary.load(make_run(lag=4, bound=3) / "summary.json")
    table = summary.table()

    assert "0.05 → 0.5" in table
    assert "mean 2.4, max 4, bound 3, 60 beyond it" in table
    assert "100 trained of 120 leased, 1 stale" in table
    assert "recovered" not in table, "nothing was"
    assert "learner waited  25% of its time" in table
    named = replace(summary, run="quick-003", failed="KeyError: 'answer'").headline()
    assert (named[0], named[1], named[-1][0]) == (("run", "quick-003"), ("failed", "KeyError: 'answer'"), "id")


def test_failed_episodes_are_a_row_of_their_own_and_no_recovery(make_run):
    rows = read_metrics(make_run() / "metrics.jsonl")
    known = {"run_id": "r", "max_lag_bound": 3, "device": "cpu", "dtype": "float32", "seed": 1}
    clean = dict(summarize(rows, **known, num_leases_reissued=5).headline())
    failed = dict(summarize(
        rows, **known, num_leases_reissued=308, num_leases_retried=306, num_episodes_failed=473, num_groups_leased=50,
        first_failure="task mine: ValueError: no",
    ).headline())

    assert "failures" not in clean and clean["recovered"].startswith("5 leases reissued")
    assert failed["failures"] == "473 episodes failed: task mine: ValueError: no"
    assert failed["recovered"].startswith("2 leases reissued")
    few = dict(summarize(rows, **known, num_leases_reissued=5, num_groups_leased=1000).headline())
    assert "recovered" not in few, "on a busy machine"


@pytest.mark.parametrize(
    ("first", "last", "warned"),
    [((0.25, 0.03), (0.0, 0.0), True), ((0.25, 0.03), (0.2, 0.03), False), ((0.25, 0.03), (0.99, 0.01), False),
     ((0.9, 0.02), (0.8, 0.03), True), ((0.9, 0.02), (0.8, 0.06), False)],
)
def test_an_evaluation_that_fell_by_more_than_its_error_is_told(first, last, warned):
    rows = [{"step": step, "eval/score": score, "eval/score_stderr": error}
            for step, (score, error) in ((1, first), (9, last))]

    summary = summarize(rows, run_id="r", max_lag_bound=3, device="cpu", dtype="float32", seed=1)

    assert (summary.table().count("lower policy.optimizer.lr") == 1) is warned == bool(summary.warnings)
    assert f"{first[0]} ± {first[1]} → " in summary.table()


@pytest.mark.parametrize(
    ("stds", "means", "warned"),
    [([0.0] * 3, [0.0] * 3, True), ([0.0] * 9, [1.0] * 9, True), ([0.0] * 2, [0.0] * 2, False),
     ([0.1, 0.0, 0.0, 0.0], [0.5, 1.0, 1.0, 1.0], False), ([0.0] * 3, [0.0, 0.0, 1.0], False), ([], [], False)],
)
def test_rewards_that_were_always_equal_are_told(stds, means, warned):
    rows = [{"step": step, "reward/std": std, "reward/mean": mean}
            for step, (std, mean) in enumerate(zip(stds, means, strict=True), start=1)]

    told = warnings_of(rows)

    assert bool(told) is warned and all("equal rewards teach nothing" in text for text in told)


@pytest.mark.parametrize(
    ("key", "values", "warned"),
    [("critic/explained_variance", [-0.1] * 20, True), ("critic/explained_variance", [0.5] + [-0.1] * 25 + [0.3], True),
     ("critic/explained_variance", [-0.1] * 19 + [0.0] + [-0.1] * 19, False), ("critic/explained_variance", [], False),
     ("policy/grad_cosine", [0.6] * 20, True), ("policy/grad_cosine", [0.0] * 5 + [0.9] * 25, True),
     ("policy/grad_cosine", [0.9] * 19 + [0.5] + [0.9] * 19, False)],
)
def test_a_critic_worse_than_a_constant_and_gradients_along_each_other_are_told_if_it_lasts(key, values, warned):
    told = warnings_of([{"step": step, key: one} for step, one in enumerate(values)])

    text = "the critic predicted worse than" if key.startswith("critic") else "pointed along the one before"
    assert bool(told) is warned and all(text in one for one in told)
