"""Fixtures that several rooms use: a small run directory, the environment of child processes."""

from __future__ import annotations

import os
import sys
from contextlib import closing
from pathlib import Path

import pytest

from streamrl.metrics.meter import Meter
from streamrl.metrics.run_record import read_metrics
from streamrl.metrics.sinks import JsonlSink
from streamrl.metrics.summary import summarize
from tests.fakes.programs import write_programs


def _step(meter, step, lag):
    meter.add("run/version", step)
    meter.add("run/wall_s", 2.0 * step)
    meter.add("run/trained_tokens", 100 * step)
    meter.add("reward/mean", step / 10)
    meter.add_histogram("lag/token", {0: 40, lag: 60})
    meter.add_histogram("lag/head", {0: 4, lag: 6})
    meter.add("lag/token_mean", 0.6 * lag)
    meter.add("lag/head_max", lag)
    meter.add("time/step_s", 2.0)
    meter.add("time/wait_s", 0.5)
    meter.add("time/publish_s", 0.1)
    meter.add("throughput/train_tokens_per_s", 50)
    meter.add("throughput/generate_tokens_per_s", 60)
    meter.add("dropped/zero_std", 2)
    meter.add_all({"hub/num_groups_leased": 12 * step, "hub/num_groups_accepted": 11 * step,
                   "hub/num_groups_trained": 10 * step, "hub/num_groups_stale": 1, "hub/tokens_generated": 120 * step})
    if step in (1, 10):
        meter.add("eval/score", 0.05 * step)


@pytest.fixture
def make_run(tmp_path):
    """make_run(name, lag=2, num_steps=10, bound=3, overrides=(), finished=True) -> its directory."""

    def make(name="run-000", *, lag=2, num_steps=10, bound=3, overrides=(), finished=True):
        root = tmp_path / name
        meter = Meter()
        with closing(JsonlSink(root / "metrics.jsonl")) as sink:
            for step in range(1, num_steps + 1):
                _step(meter, step, lag)
                sink.log_metrics(step, meter.flush(step))
        (root / "config.yaml").write_text("loss:\n  surrogate: ppo_clip  # <b>\n")
        (root / "overrides.yaml").write_text("".join(f"- {text}\n" for text in overrides))
        if finished:
            summarize(read_metrics(root / "metrics.jsonl"), run_id=name, max_lag_bound=bound, device="cpu",
                      dtype="float32", seed=42).write(root / "summary.json")
        return root

    return make


@pytest.fixture
def python_env() -> dict[str, str]:
    """Environment for child processes: this repository importable, one thread, no network."""
    root = str(Path(__file__).parents[2])
    return {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """The current directory of the test, with stand-ins for learner and actors."""
    write_programs(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])]))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def no_mesh_of_an_earlier_test():
    """torch caches the layouts of sharded operations with their mesh; the next test may have another process group."""
    yield
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()
