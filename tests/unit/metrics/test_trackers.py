"""Trackers: chosen by name, a user's own by its module, each only installed where it is chosen."""

import fcntl
import posixpath
import random
import re
import sys
import threading
import types
from contextlib import closing

import pytest

from streamrl.errors import ConfigError
from streamrl.metrics.names import member
from streamrl.metrics.sinks import FanOut, Sink, TrackedRun, dense_histogram
from streamrl.metrics.trackers import mlflow
from streamrl.metrics.trackers.registry import open_trackers
from tests.kit.each import each

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


@each("seed", range(30))
def test_wandb_takes_histograms_over_any_range_of_lags(seed):
    rng = random.Random(seed)
    high = rng.choice([1, 511, 512, 513, 5_000, 10**7])
    bins = {0: 3, high: 2} | {rng.randint(0, high): rng.randint(1, 9) for _ in range(rng.randint(0, 2_000))}
    counts, edges = dense_histogram(bins)
    assert len(counts) == len(edges) - 1 <= 512, "see wandb.Histogram.MAX_LENGTH"
    assert sum(counts) == sum(bins.values()) and edges[0] == 0 and edges[-1] > high
    assert high > 511 or counts == [bins.get(k, 0) for k in range(high + 1)]
    means = dense_histogram(dict.fromkeys(bins, 0.25))[0]
    assert {one for one in means if one} == {0.25}, "a mean of means is no sum"


@each("seed", range(200))
def test_mlflow_takes_any_name_that_a_task_or_a_file_of_settings_gives(seed):
    rng = random.Random(seed)
    word = "".join(rng.choices("a.@, é/$", k=rng.choice([0, 1, 2, 3, 300])))
    for key in (member("reward", word), f"eval/{word}/score", f"env.options.{word}"):
        name = mlflow._name(key)
        assert re.fullmatch(r"[A-Za-z0-9_.\-: /]{1,250}", name) and posixpath.normpath(name) == name, key
    assert mlflow._name("reward/format-ok.v2") == "reward/format-ok.v2"


class ServedSink(Sink):
    """A tracker whose server answers nothing until it is there."""

    waits = True

    def __init__(self, *, fails: bool) -> None:
        self.called, self.server, self._fails = [], threading.Event(), fails

    def log_metrics(self, step, metrics):
        self.called.append(step)
        assert self.server.wait(30)
        if self._fails:
            raise OSError("no route")

    def where(self):
        return "there"

    def close(self):
        self.called.append("closed")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("fails", [False, True])
def test_a_tracker_whose_server_does_not_answer_holds_up_no_step(fails):
    sink = ServedSink(fails=fails)
    sinks = FanOut([sink])
    for step in range(1, 6):
        sinks.log_metrics(step, {"reward/mean": 0.5})  # returns, though nothing answers
    assert sinks.places() == ["there"]

    closing_it = threading.Thread(target=sinks.close)
    closing_it.start()
    while not sinks._lines[id(sink)]._closes:
        assert closing_it.is_alive()
    sink.server.set()
    closing_it.join(30)

    # While it closes, a server that fails once is not asked by all that wait.
    assert sink.called == ([1, "closed"] if fails else [1, 2, 3, 4, 5, "closed"])
    assert sinks.num_failures == ({"ServedSink.log_metrics": 1} if fails else {})


def test_runs_at_once_open_a_store_of_mlflow_one_after_the_other(monkeypatch, tmp_path):
    opened = []

    class Client:
        def __init__(self, tracking_uri):
            with (tmp_path / "mlflow.lock").open() as file, pytest.raises(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            opened.append(tracking_uri)

        def get_experiment_by_name(self, name):
            return None if len(opened) == 1 else types.SimpleNamespace(experiment_id="7")

        def create_experiment(self, name, artifacts):
            opened.append("of another run")
            raise RuntimeError("RESOURCE_ALREADY_EXISTS")

        def search_runs(self, experiments, *_, **__):
            assert experiments == ["7"]
            return []

        def create_run(self, *_, **__):
            return types.SimpleNamespace(info=types.SimpleNamespace(run_id="1"))

    monkeypatch.setitem(sys.modules, "mlflow", types.SimpleNamespace(MlflowClient=Client))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    (tmp_path / "run").mkdir()

    (sink,) = open_trackers(["mlflow"], TrackedRun("r-1", tmp_path / "run", "p", None, {}))

    assert sink.waits and opened == [f"sqlite:///{tmp_path}/mlflow.db", "of another run"]


@pytest.mark.parametrize("resume_step", [None, 7])
def test_a_tracker_that_does_not_open_is_named_and_ends_no_run_that_goes_on(monkeypatch, tmp_path, caplog, resume_step):
    def init(**_):
        raise RuntimeError("Run initialization\nhas timed out")

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    run = TrackedRun("r-1", tmp_path, "p", resume_step, {"wandb": {"mode": "online"}, "options": {}})
    told = r"tracking\.trackers=wandb cannot be opened \(.*Run initialization has timed out\)"

    if resume_step is None:
        with pytest.raises(ConfigError, match=told + ".*leave it out"):
            open_trackers(["wandb"], run)
    else:
        (sink,) = open_trackers(["wandb"], run)
        sink.log_metrics(8, {})
        assert re.search(told + ": the run goes on without it", caplog.text)
