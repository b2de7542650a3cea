"""Files after a resume, plain lines, and a fan-out that outlives its members."""

import io
import json
import logging
import subprocess
import sys
from contextlib import closing

import pytest

from streamrl.metrics.run_record import read_metrics
from streamrl.metrics.sinks import ConsoleSink, FanOut, JsonlSink, Sink, plain_line


class Remembering(Sink):
    def __init__(self):
        self.calls = []

    def log_metrics(self, step, metrics):
        self.calls.append((step, dict(metrics)))

    def close(self):
        self.calls.append("closed")


class Broken(Sink):
    def log_metrics(self, step, metrics):
        raise OSError("disk full")

    def close(self):
        raise RuntimeError("no network")


def test_a_resumed_run_drops_the_lines_that_it_will_write_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with closing(JsonlSink(path)) as sink:
        sink.log_config({"run": {"seed": 3}})
        for step in range(1, 11):
            sink.log_metrics(step, {"step": step, "reward/mean": 0.1 * step, "lag/token": {0: 3, 2: 1}})
            assert read_metrics(path)[-1] == {"step": step, "reward/mean": 0.1 * step, "lag/token": {0: 3, 2: 1}}
    assert json.loads((tmp_path / "config.json").read_text()) == {"run": {"seed": 3}}

    with closing(JsonlSink(path, resume_step=6)) as sink:
        sink.log_metrics(7, {"reward/mean": -1.0})

    rows = read_metrics(path)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6, 7]
    assert rows[-1]["reward/mean"] == -1.0


def test_a_failing_sink_is_reported_once_and_does_not_silence_the_others(caplog):
    good = Remembering()
    fan = FanOut([Broken(), good])

    with caplog.at_level(logging.WARNING):
        for step in (1, 2, 3):
            fan.log_metrics(step, {"reward/mean": 0.0})
        fan.close()

    assert [call[0] for call in good.calls[:3]] == [1, 2, 3] and good.calls[3] == "closed"
    assert fan.num_failures == {"Broken.log_metrics": 3, "Broken.close": 1}
    assert sum("disk full" in (r.exc_text or "") for r in caplog.records) == 1
    assert "Broken.log_metrics failed 3 times" in caplog.text


def test_the_console_writes_one_plain_line_a_step_with_the_time_left():
    now = iter([100.0, 110.0])
    out = io.StringIO()
    sink = ConsoleSink(total_steps=20, stream=out, clock=lambda: next(now))

    sink.log_metrics(1, {"run/version": 1})
    sink.log_metrics(5, {
        "run/version": 5, "reward/mean": 0.4312, "eval/score": 0.52, "lag/token_mean": 1.26, "lag/head_max": 3,
        "throughput/train_tokens_per_s": 12345.0, "throughput/generate_tokens_per_s": 980.0, "hub/num_actors": 4.0,
    })

    first, second = out.getvalue().splitlines()
    assert first == "step 1/20"
    assert second == ("step 5/20  reward 0.431  eval 0.52  lag 1.3/3  train 12.3k tok/s  "
                      "generate 980 tok/s  actors 4  38s left")  # 10 s for 4 steps, 15 are left


@pytest.mark.parametrize(("row", "more", "line"), [
    ({"step": 3}, (), "step 3"), ({"step": 3, "reward/trained": 0.25}, (), "step 3  reward 0.25"),
    ({"step": 3, "reward/mean": 0.5, "reward/trained": 0.25}, (), "step 3  reward 0.5"),
    ({"step": 3, "run/version": 2, "reward/mean": 0.5}, (9, 4.0), "step 3/9  version 2  reward 0.5  4s left"),
    ({"step": 9, "run/version": 9, "eval/score": 0.75, "hub/num_actors": 2.0,
      "throughput/generate_tokens_per_s": 5.0}, (9, 0.0), "step 9/9  eval 0.75"),
])
def test_a_line_tells_what_its_row_holds_and_the_row_after_the_last_step_its_evaluation(row, more, line):
    assert plain_line(row, *more) == line


def test_the_learners_half_of_metrics_loads_no_heavy_library():
    code = ("import sys, streamrl.metrics.meter, streamrl.metrics.sinks, streamrl.metrics.summary, "
            "streamrl.metrics.trackers.registry, streamrl.report.report; "
            "print([m for m in ('torch', 'wandb', 'rich', 'zmq', 'omegaconf') if m in sys.modules])")

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)

    assert done.stdout.strip() == "[]"
