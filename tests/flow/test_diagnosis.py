"""The diagnosis of a real run that is limited by each of its parts in turn."""

import io

from rich.console import Console

from streamrl.metrics.diagnosis import diagnosis_of
from streamrl.report.live.panel import NUM_RECENT_STEPS, ViewState, render
from tests.flow.phases import PHASES, STEPS_PER_PHASE
from tests.flow.processes import RunHarness

SETTLED = 4
"""Last steps of a phase: the first ones still train on what the phase before has left."""
PHASED = (
    f"trainer.num_steps={len(PHASES) * STEPS_PER_PHASE}", "actors.engine=tests.flow.phases:engine",
    "env.name=tests.flow.phases:PhasedTask", "policy.optimizer.name=tests.flow.phases:optimizer", "launch.num_actors=1",
    "actors.num_concurrent=8", "env.num_threads=4", "staleness.eta=4", "hub.heartbeat_s=0.2", "eval.num_samples=4",
    "policy.tiny.num_warm_start_steps=0", "publish.probe_every=0", "checkpoint.export_hf=false",
    "checkpoint.every_steps=0", "objectives.combine=weighted_sum", "objectives.components={score:1,brevity:1}",
    "objectives.reference_point={score:-1,brevity:-100}",
)


def test_each_part_that_is_made_slow_is_named(harness: RunHarness):
    launch = harness.launch(*PHASED)

    assert harness.finish(launch, 200) == 0, harness.logs()
    harness.check_metric_keys()
    rows, summary = harness.metrics(), harness.summary()
    for number, phase in enumerate(PHASES, start=1):
        until = [row for row in rows if row["step"] <= number * STEPS_PER_PHASE]
        found = diagnosis_of(until, SETTLED)
        assert found is not None and found.bottleneck == phase, (found, until[-1])
        assert found.text.startswith(f"{phase}-bound")
        assert (found.more_actors is not None and found.more_actors > 0) == (phase in ("generation", "environment"))
    whole = diagnosis_of(rows)
    assert whole is not None
    assert summary["diagnosis"] == whole.text and whole.text in (harness.path / "launch.log").read_text()
    assert f"Bottleneck: {whole.text}" in (harness.run_dir / "report.html").read_text()
    view = ViewState(state="training", rows=rows)
    console = Console(record=True, width=80, file=io.StringIO())
    console.print(render(view, width=80))
    recent = diagnosis_of(rows, NUM_RECENT_STEPS)
    assert recent is not None and recent.text in console.export_text()
