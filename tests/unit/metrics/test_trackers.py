"""Trackers: chosen by name, a user's own by its module, each only installed where it is chosen."""

import sys
import types
from contextlib import closing

import pytest

from streamrl.errors import ConfigError
from streamrl.metrics.sinks import FanOut, TrackedRun
from streamrl.metrics.trackers.registry import open_trackers

OWN = """
import json

from streamrl.metrics.sinks import Sink


class FileTracker(Sink):
    def __init__(self, run):
        self.file = open(run.run_dir / run.settings["options"]["file"], "a")
        self.file.write(f"{run.project} {run.run_id} {run.resume_step}\\n")

    def log_config(self, config):
        self.file.write(f"seed {config['run']['seed']}\\n")

    def log_metrics(self, step, metrics):
        self.file.write(f"{step} {json.dumps(metrics)}\\n")

    def close(self):
        self.file.close()
"""


def tracked(tmp_path, **options) -> TrackedRun:
    settings = {"wandb": {"mode": "offline"}, "options": options}
    return TrackedRun("r-1", tmp_path, "p", None, settings)


def test_a_users_own_tracker_is_named_by_its_module_and_gets_every_step(tmp_path, monkeypatch):
    (tmp_path / "my_tracker.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    run = tracked(tmp_path, file="numbers.txt")

    with closing(FanOut(open_trackers(["my_tracker:FileTracker"], run))) as sinks:
        sinks.log_config({"run": {"seed": 3}})
        sinks.log_metrics(1, {"reward/mean": 0.5})

    assert (tmp_path / "numbers.txt").read_text().splitlines() == ["p r-1 None", "seed 3", '1 {"reward/mean": 0.5}']
    assert sinks.num_failures == {}


def test_an_unknown_tracker_is_refused_with_those_that_exist(tmp_path):
    with pytest.raises(ConfigError, match=r"tracking\.trackers=wandbb is unknown\. Did you mean wandb\?"):
        open_trackers(["wandbb"], tracked(tmp_path))


def test_a_tracker_needs_its_library_only_if_it_is_chosen(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "wandb", None)  # importing it now fails

    assert open_trackers([], tracked(tmp_path)) == []
    with pytest.raises(ConfigError, match=r"needs wandb, which is not installed; install it .*streamrl\[track\]"):
        open_trackers(["wandb"], tracked(tmp_path))


def test_wandb_receives_numbers_by_step_and_histograms_with_their_empty_bins(monkeypatch, tmp_path):
    logged, started = [], []
    run = types.SimpleNamespace(log=lambda values, step=None: logged.append((step, values)), finish=lambda: None)
    fake = types.ModuleType("wandb")
    fake.init = lambda **options: started.append(options) or run
    fake.Histogram = lambda np_histogram: ("histogram", np_histogram)
    monkeypatch.setitem(sys.modules, "wandb", fake)

    (sink,) = open_trackers(["wandb", "wandb"], tracked(tmp_path))  # named twice, opened once
    sink.log_metrics(4, {"step": 4, "reward/mean": 0.5, "lag/token": {1: 10, 3: 2}})
    sink.close()

    assert logged == [(4, {"reward/mean": 0.5, "lag/token": ("histogram", ([10, 0, 2], [1, 2, 3, 4]))})]
    assert [(one["mode"], one["id"], one["resume"]) for one in started] == [("offline", "r-1", "allow")]
    assert started[0]["name"] == tmp_path.name


@pytest.mark.parametrize("mode", ["online", "offline"])
@pytest.mark.parametrize("can", [True, False])
def test_a_resumed_record_of_wandb_is_set_back_where_it_can_be(monkeypatch, tmp_path, mode, can):
    started = []

    def init(**options):
        started.append(options)
        if "resume_from" in options and not can:
            raise RuntimeError("this account has no rewinding")
        return types.SimpleNamespace(log=lambda *_, **__: None, finish=lambda: None)

    fake = types.ModuleType("wandb")
    fake.init = init
    monkeypatch.setitem(sys.modules, "wandb", fake)
    run = TrackedRun("r-1", tmp_path, "p", 7, {"wandb": {"mode": mode}, "options": {}})

    open_trackers(["wandb"], run)

    asked = [(one.get("resume_from"), one.get("resume")) for one in started]
    back, on = ("r-1?_step=7", None), (None, "allow")
    assert asked == ([on] if mode == "offline" else [back] if can else [back, on])
    assert {(one["id"], one["project"]) for one in started} == {("r-1", "p")}
