"""The trackers with their real packages, offline: what was logged is read back from the record itself."""

import json
import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from streamrl.metrics.samples import Sample
from streamrl.metrics.sinks import FanOut, TrackedRun
from streamrl.metrics.trackers.registry import open_trackers
from streamrl.metrics.trackers.sample_tables import COLUMNS, markdown_of, rows_of

pytestmark = pytest.mark.timeout(180)

SAMPLES = [
    Sample(kind="eval", step=2, version=2, lag=0, prompt="1+1=?", answer="2 | <b>two</b>\nend", reward=1.0, score=1.0,
           num_tokens=3, group=0, member=0, record=5, fate="eval", parts={"format": 0.5}),
    Sample(kind="train", step=2, version=0, lag=1, prompt="2+2=?", answer="5", reward=0.0, score=0.0, num_tokens=1,
           group=9, member=3, record=8, advantage=-0.25, actor="a0"),
]
CONFIG = {"run": {"seed": 3}, "policy": {"optimizer": {"lr": 1e-4}}, "stop": [], "long": "x" * 2000}


def tracked(run_dir: Path, resume_step: int | None = None) -> TrackedRun:
    run_dir.mkdir(exist_ok=True)
    return TrackedRun("r-12ab", run_dir, "project", resume_step, {"wandb": {"mode": "offline"}, "options": {}})


def record(name: str, run_dir: Path, *steps: int, resume_step: int | None = None) -> list[str]:
    """A run's calls in their order; where to look."""
    with closing(FanOut(open_trackers([name], tracked(run_dir, resume_step)))) as sinks:
        sinks.log_config(CONFIG)
        for step in steps:
            sinks.log_metrics(step, {"reward/mean": step / 4, "lag/token": {1: 10, 3: 2}, "empty": {},
                                     "lag/head": {0: 1, 5_000: 2}, "reward/..": 0.5})
            sinks.log_samples(step, SAMPLES)
        (run_dir / "model").mkdir(exist_ok=True)
        for path in (run_dir / "model" / "weights.bin", run_dir / "config.yaml"):
            path.write_text("a: 1\n")
        for path in (run_dir / "model", run_dir / "config.yaml"):
            sinks.log_artifact(path)
        places = sinks.places()
    assert sinks.num_failures == {}
    return places


def test_tensorboard_shows_curves_histograms_configuration_and_samples(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (place,) = record("tensorboard", tmp_path / "run", 1, 2, 3)
    record("tensorboard", tmp_path / "run", 2, 3, 4, resume_step=1)

    read = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    read.Reload()
    scalars = read.Scalars("reward/mean")
    assert [(one.step, one.value) for one in scalars] == [(1, 0.25), (2, 0.5), (3, 0.75), (4, 1.0)], "none twice"
    histogram = read.Histograms("lag/token")[0].histogram_value
    counts = dict(zip(histogram.bucket_limit, histogram.bucket, strict=True))
    assert {limit - 0.5: count for limit, count in counts.items() if count} == {1: 10, 3: 2} and histogram.num == 12
    text = read.Tensors("samples/text_summary")[0].tensor_proto.string_val[0].decode()
    assert text == markdown_of(SAMPLES)
    assert '"seed": 3' in read.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    assert place == f"tensorboard --logdir {tmp_path}"


@pytest.mark.filterwarnings("ignore")  # of SQLAlchemy and pandas, about how MLflow uses them
def test_mlflow_keeps_one_run_with_parameters_metrics_and_a_table(tmp_path, monkeypatch):
    pytest.importorskip("mlflow", reason="make mlflow installs and tests it")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    from mlflow import MlflowClient

    (place,) = record("mlflow", tmp_path / "run", 1, 2)
    store = f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)  # then it does not matter where the run is
    (tmp_path / "elsewhere").mkdir()
    record("mlflow", tmp_path / "elsewhere" / "run", 3, resume_step=2)

    client = MlflowClient(tracking_uri=store)
    (run,) = client.search_runs([client.get_experiment_by_name("project").experiment_id])
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    assert run.data.params["policy.optimizer.lr"] == "0.0001" and len(run.data.params["long"]) == 500
    history = client.get_metric_history(run.info.run_id, "reward/mean")
    assert [(one.step, one.value) for one in history] == [(1, 0.25), (2, 0.5), (3, 0.75)]
    table = json.loads(Path(client.download_artifacts(run.info.run_id, "samples/step-000002.json")).read_text())
    assert table["columns"] == list(COLUMNS) and table["data"] == rows_of(SAMPLES)
    for artifact in ("model/weights.bin", "config.yaml"):
        assert Path(client.download_artifacts(run.info.run_id, artifact)).read_text() == "a: 1\n"
    assert place.startswith(f"mlflow ui --backend-store-uri {store}")


RECORD = """
import json
import sys
from pathlib import Path
from tests.unit.metrics.test_real_trackers import record
name, run_dir = sys.argv[1], Path(sys.argv[2])
(run_dir.parent / "another").mkdir()
if name == "trackio":
    record(name, run_dir.parent / "another" / run_dir.name, 1)
places = record(name, run_dir, 1, 2) + record(name, run_dir, 3, resume_step=2)
if name == "trackio":
    from trackio.sqlite_storage import SQLiteStorage
    another, own = sorted(SQLiteStorage.get_run_records("project"), key=lambda one: one["created_at"])
    print(len(SQLiteStorage.get_logs("project", "run", run_id=another["id"])), "rows of another run")
    for row in SQLiteStorage.get_logs("project", "run", run_id=own["id"]):
        print(json.dumps(row))
print(*places, sep="\\n")
"""


def record_elsewhere(name: str, run_dir: Path, **environment: str) -> list[str]:
    """In a process of its own: these packages read their environment when they are imported, or leave threads."""
    done = subprocess.run(
        [sys.executable, "-c", RECORD, name, str(run_dir)], capture_output=True, text=True, timeout=150,
        env={**os.environ, **environment}, cwd=Path(__file__).parents[3],
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_trackio_keeps_one_run_in_its_own_directory(tmp_path):
    data = tmp_path / "trackio data"

    printed = record_elsewhere("trackio", tmp_path / "run", TRACKIO_DIR=str(data))

    assert printed.count(f"TRACKIO_DIR='{data}' trackio show --project project") == 2
    assert "2 rows of another run" in printed, "of the same name"
    rows = [json.loads(line) for line in printed if line.startswith("{")]
    rewards = [(row["step"], row["reward/mean"]) for row in rows if "reward/mean" in row]
    assert rewards == [(1, 0.25), (2, 0.5), (3, 0.75)]
    tables = [row["samples"] for row in rows if "samples" in row]
    assert len(tables) == 3 and tables[0]["_value"][1]["prompt"] == "2+2=?"


def test_wandb_writes_a_record_that_can_be_synced(tmp_path):
    data = tmp_path / "data"
    printed = record_elsewhere("wandb", tmp_path / "run", WANDB_SILENT="true", WANDB_DATA_DIR=str(data))

    synced = [Path(line.removeprefix("wandb sync ")) for line in printed if line.startswith("wandb sync ")]
    assert len(synced) == 2 and all(list(path.glob("*.wandb")) for path in synced)
    tables = list((tmp_path / "run" / "wandb").rglob("*.table.json"))
    assert json.loads(tables[0].read_text())["columns"] == list(COLUMNS)
    written = next(synced[0].glob("*.wandb")).read_bytes()
    assert b"r-12ab-model" in written and b"r-12ab-config.yaml" in written


def test_a_table_shows_what_a_model_said_and_renders_none_of_it():
    head, rule, first, second = markdown_of(SAMPLES).splitlines()

    assert head.count(" | ") == len(COLUMNS) - 1 and set(rule) <= set("| -")
    assert "2 &#124; &#60;b&#62;two&#60;/b&#62;<br>end" in first and first.count("|") == len(COLUMNS) + 1
    assert "format 0.5" in first and "-0.25" in second
