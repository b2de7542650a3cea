"""Evaluations whose learner ended before their result was recorded: asked for again, once, by its successor."""

import json
from types import SimpleNamespace

import pytest

from learner.hub.ledger.tables.evals import EvalTable
from learner.loop.evaluations import Evaluations
from learner.loop.run import Run
from learner.replay.consistency import Compared, _evaluations
from streamrl.config.eval_sets import eval_sets
from streamrl.stream.records import Evaluated, StepTaken
from streamrl.stream.writer import LogWriter
from tests.unit.config.setting_harness import config_of
from tests.unit.hub.factories import run_started


def evaluations_of(sets, every_steps=5, hub=None) -> Evaluations:
    samples = SimpleNamespace(eval_prompts=lambda num: ())
    return Evaluations(sets, hub, samples, None, SimpleNamespace(), every_steps=every_steps)


def named(*names: str):
    return [SimpleNamespace(name=name, config=config_of("eval.num_samples=4")) for name in names]


@pytest.mark.parametrize(("recorded", "sets", "step", "lost"), [
    ([], [""], 4, False),  # none was due
    ([], [""], 5, True),  # also where the checkpoint is of that very step, or the learner was told to stop
    ([], [""], 7, True),
    ([("", 5)], [""], 7, False),
    ([("", 6)], [""], 7, False),  # a later version answered it
    ([("", 5)], [""], 10, True),
    ([("", 8)], [""], 7, True),  # of a branch that this start has left
    ([("", 5)], ["", "hard"], 7, True),
    ([("hard", 5)], ["", "hard"], 7, True),
    ([("hard", 5), ("", 7)], ["", "hard"], 7, False),
    ([("easy", 5), ("hard", 5)], ["easy", "hard"], 7, False),
    ([], [], 7, False),
])
@pytest.mark.parametrize("steps_per_batch", [1, 3])
def test_the_record_tells_which_set_has_no_result(tmp_path, recorded, sets, step, lost, steps_per_batch):
    rows = [{"dataset": dataset, "version": version * steps_per_batch} for dataset, version in recorded]
    strange = [[], "text", {"version": [5], "dataset": {}}, {"dataset": ""}]
    lines = "".join(json.dumps(row) + "\n" for row in [*strange, *rows])
    (tmp_path / "evaluations.jsonl").write_text(lines + '{"dataset": "", "version": 7}')  # cut short by a crash
    asked = evaluations_of(named(*sets))

    assert asked.lost(tmp_path, step, steps_per_batch=steps_per_batch) is lost
    assert not evaluations_of(named(*sets), 0).lost(tmp_path, step, steps_per_batch=steps_per_batch)
    assert asked.lost(tmp_path / "none", step, steps_per_batch=steps_per_batch) is (bool(sets) and step >= 5)


@pytest.mark.parametrize(("words", "step"), [((), 7), ((), 10), (("trainer.eval_only=true",), 7)])
def test_a_lost_one_is_never_asked_for_twice_also_at_the_end_of_the_run(words, step):
    table = EvalTable(3)
    hub = SimpleNamespace(
        evals=[], evaluate=lambda one, version, num, keep, responses, name, **_: table.request(
            one, version, num, keep, responses, name
        ),
    )
    config = config_of("trainer.num_steps=10", *words)
    run = SimpleNamespace(
        config=config, step=step, version=step, eval_lost=True, leave_device=lambda: None,
        evaluations=evaluations_of(eval_sets(config), hub=hub),
    )

    Run.evaluate_at_start(run)
    assert table.any_waiting() is (step < 10 and not words)
    run.version = 10 if not words else step
    run.evaluations.start(run.version)  # as `finish` does

    assert table.get(run.version) is not None


@pytest.mark.parametrize(("last", "stopped", "score", "agrees"), [
    ("at the end", "stopped: SIGTERM", 0.5, True),  # no learner has heard of the evaluation of version 2
    ("at the end", "", 0.5, False),  # this one reached its end, and has
    ("before a start", "", 0.5, True),  # its successor has not heard either
    ("before a step", "stopped: SIGTERM", 0.5, False),  # it went on, and has recorded it with the step
    ("before a start", "stopped: SIGTERM", 0.4, False),  # another number than that of any evaluation
])
def test_only_what_no_learner_can_have_heard_may_be_missing_in_the_record_of_evaluations(
    tmp_path, last, stopped, score, agrees
):
    writer = LogWriter(tmp_path)
    after = {"at the end": [], "before a step": [StepTaken(3, False)], "before a start": [
        run_started(start=2, version=2), StepTaken(3, False)
    ]}[last]
    for one in (run_started(), Evaluated(0, "", 0.5), StepTaken(1, False), StepTaken(2, False), Evaluated(2, "", 0.75),
                *after):
        writer.append(one)
    writer.close()
    (tmp_path / "evaluations.jsonl").write_text(json.dumps({"version": 0, "dataset": "", "score": 0.5}) + "\n")
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "eval/version": 0, "eval/score": 0.5}) + "\n")
    (tmp_path / "summary.json").write_text(json.dumps({"stopped": stopped, "eval_score_last": score}))
    found = Compared([])
    _evaluations(found, tmp_path)
    assert (not found.disagreements) == agrees and found.num_evaluations == 1
