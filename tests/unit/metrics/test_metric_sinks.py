"""Files after a resume, plain lines, and a fan-out that outlives its members."""

import io
import json
import logging
import subprocess
import sys
import types

import pytest

from streamrl.errors import ConfigError
from streamrl.metrics.run_record import read_metrics
from streamrl.metrics.sinks import ConsoleSink, FanOut, JsonlSink, Sink, plain_line
from streamrl.metrics.wandb_sink import open_wandb


class Remembering(Sink):
    def __init__(self):
        self.calls = []

    def log_metrics(self, step, metrics):
        self.calls.append((step, dict(metrics)))

    def finish(self):
        self.calls.append("finished")


class Broken(Sink):
    def log_metrics(self, step, metrics):
        raise OSError("disk full")

    def finish(self):
        raise RuntimeError("no network")


def test_each_line_is_on_disk_as_soon_as_it_is_logged(tmp_path):
    sink = JsonlSink(tmp_path / "run" / "metrics.jsonl")

    sink.log_metrics(1, {"step": 1, "reward/mean": 0.5, "lag/token": {0: 3, 2: 1}})

    assert read_metrics(sink.path) == [{"step": 1, "reward/mean": 0.5, "lag/token": {0: 3, 2: 1}}]
    sink.finish()


def test_a_resumed_run_drops_the_lines_that_it_will_write_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with JsonlSink(path) as sink:
        for step in range(1, 11):
            sink.log_metrics(step, {"reward/mean": 0.1 * step})

    with JsonlSink(path, resume_step=6) as sink:
        sink.log_metrics(7, {"reward/mean": -1.0})

    rows = read_metrics(path)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6, 7]
    assert rows[-1]["reward/mean"] == -1.0


def test_a_line_cut_short_by_a_crash_is_dropped_and_the_next_one_stays_whole(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3, "reward/me')

    assert [row["step"] for row in read_metrics(path)] == [1, 2]
    with JsonlSink(path) as sink:
        sink.log_metrics(3, {})

    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3]


def test_configuration_events_and_tables_lie_beside_the_metrics(tmp_path):
    with JsonlSink(tmp_path / "metrics.jsonl") as sink:
        sink.log_config({"run": {"seed": 3}})
        sink.log_text("actor-0 restarted")
        sink.log_table("samples", ["prompt", "reward"], [["abc", 1.0], ["xyz", 0.0]])

    assert json.loads((tmp_path / "config.json").read_text()) == {"run": {"seed": 3}}
    assert (tmp_path / "events.log").read_text() == "actor-0 restarted\n"
    assert [json.loads(x)["prompt"] for x in (tmp_path / "samples.jsonl").read_text().splitlines()] == ["abc", "xyz"]


def test_a_failing_sink_is_reported_once_and_does_not_silence_the_others(caplog):
    good = Remembering()
    fan = FanOut([Broken(), good])

    with caplog.at_level(logging.WARNING):
        for step in (1, 2, 3):
            fan.log_metrics(step, {"reward/mean": 0.0})
        fan.finish()

    assert [call[0] for call in good.calls[:3]] == [1, 2, 3] and good.calls[3] == "finished"
    assert fan.num_failures == {"Broken.log_metrics": 3, "Broken.finish": 1}
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
    assert first == "step 1/20  version 1"
    assert second == ("step 5/20  version 5  reward 0.431  eval 0.52  lag 1.3/3  train 12.3k tok/s  "
                      "generate 980 tok/s  actors 4  eta 38s")  # 10 s for 4 steps, 15 are left


def test_a_step_without_measurements_still_has_a_line():
    assert plain_line({"step": 3}) == "step 3"


def test_disabled_wandb_needs_no_wandb(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "wandb", None)  # importing it now fails

    assert open_wandb(mode="disabled", project="p", run_id="r", run_dir=tmp_path) is None
    with pytest.raises(ConfigError, match=r"pip install streamrl\[track\]"):
        open_wandb(mode="offline", project="p", run_id="r", run_dir=tmp_path)
    with pytest.raises(ConfigError, match="Unknown wandb mode 'of'"):
        open_wandb(mode="of", project="p", run_id="r", run_dir=tmp_path)


def test_wandb_receives_numbers_by_step_and_histograms_with_their_empty_bins(monkeypatch, tmp_path):
    logged, started = [], {}
    run = types.SimpleNamespace(log=lambda values, step=None: logged.append((step, values)), finish=lambda: None)
    fake = types.ModuleType("wandb")
    fake.init = lambda **options: started.update(options) or run
    fake.Histogram = lambda np_histogram: ("histogram", np_histogram)
    monkeypatch.setitem(sys.modules, "wandb", fake)

    with open_wandb(mode="offline", project="p", run_id="r-1", run_dir=tmp_path) as sink:
        sink.log_metrics(4, {"step": 4, "reward/mean": 0.5, "lag/token": {1: 10, 3: 2}})

    assert logged == [(4, {"reward/mean": 0.5, "lag/token": ("histogram", ([10, 0, 2], [1, 2, 3, 4]))})]
    assert (started["mode"], started["id"], started["resume"]) == ("offline", "r-1", "allow")


def test_a_real_offline_wandb_run_writes_its_files(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")

    with open_wandb(mode="offline", project="p", run_id="r2", run_dir=tmp_path) as sink:
        sink.log_config({"run": {"seed": 3}})
        sink.log_metrics(1, {"reward/mean": 0.5, "lag/token": {0: 10, 2: 2}})
        sink.log_table("samples", ["prompt"], [["abc"]])

    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


def test_the_learners_half_of_metrics_loads_no_heavy_library():
    code = ("import sys, streamrl.metrics.meter, streamrl.metrics.sinks, streamrl.metrics.summary, "
            "streamrl.metrics.wandb_sink, streamrl.report.report; "
            "print([m for m in ('torch', 'wandb', 'rich', 'zmq', 'omegaconf') if m in sys.modules])")

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)

    assert done.stdout.strip() == "[]"
