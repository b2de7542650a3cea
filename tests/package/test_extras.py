"""Each extra that a command may lack is named, with how to get it, by the function that first needs its package."""

import sys
import tomllib
from importlib.metadata import requires
from pathlib import Path

import pytest

from envs.agents.task import _Clients
from envs.data.shapes import RecordShape
from envs.data.sources import _library
from envs.rewards.registry import REWARDS
from envs.tasks.reasoning import package
from envs.tools.search import TextIndex
from learner.model.adapter.lora import check_quantization
from streamrl.config.schema import LoraBase, RewardConfig, SweepConfig
from streamrl.config.schema_system import SweepLauncher
from streamrl.errors import StreamrlError
from streamrl.metrics.trackers.registry import check_trackers
from streamrl.stream.export import _parquet
from streamrl.sweep.cluster import Cluster
from streamrl.sweep.study import check_search

pytestmark = pytest.mark.timeout(60)
PYPROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
EXTRAS = PYPROJECT["optional-dependencies"]


def reward(name: str) -> object:
    return REWARDS[name](RewardConfig(), RecordShape(None, None))


NEEDED = {
    **{f"reward.type={name}": ("tasks", "math_verify", lambda name=name: reward(name))
       for name in ("math", "boxed", "think_answer_tags")},
    "env.name=sums": ("tasks", "reasoning_gym", package),
    "env.name=tool.search": ("tasks", "bm25s", lambda: TextIndex(["a text"])),
    "data.path=x.parquet": ("data", "datasets", _library),
    "stream --export x.parquet": ("data", "pyarrow", lambda: _parquet([], Path("x.parquet"))),
    "sweep.sampler=tpe": ("search", "optuna", lambda: check_search(SweepConfig(sampler="tpe"))),
    "hydra/launcher=submitit_slurm": (
        "slurm", "submitit", lambda: Cluster(SweepConfig(launcher=SweepLauncher.submitit_slurm), "name")
    ),
    "env.agent takes client": ("agents", "openai", lambda: _Clients("client")),
    "policy.lora.base_quantization": ("qlora", "bitsandbytes", lambda: check_quantization(LoraBase.nf4)),
    **{f"tracking.trackers={name}": (extra, name, lambda name=name: check_trackers([name]))
       for name, extra in (("wandb", "track"), ("tensorboard", "track"), ("trackio", "track"), ("mlflow", "mlflow"))},
}


@pytest.mark.parametrize("command", NEEDED)
def test_a_missing_package_is_answered_with_its_extra(monkeypatch, command):
    extra, module, use = NEEDED[command]
    monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed

    with pytest.raises(StreamrlError) as refused:
        use()

    assert f"pip install 'streamrl[{extra}]' (in a clone: pip install -e '.[{extra}]')" in str(refused.value)


def test_the_extra_named_for_a_package_lists_it():
    for extra, module, _ in NEEDED.values():
        names = " ".join(EXTRAS[extra]).replace("-", "_")
        brings = {"pyarrow": "datasets"}.get(module, module)
        assert brings in names, f"{extra} does not list {module}"
    assert any(line.startswith("pyarrow") for line in requires("datasets") or ())
