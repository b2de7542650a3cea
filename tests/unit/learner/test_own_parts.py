"""A broken part of the user's own (package.module:attribute) ends in a sentence, wherever a setting takes one."""

import pytest
import torch
from torch import nn

from envs.registry import task_of
from learner.model.optimizer import check_optimizer, make_optimizer, make_schedule
from streamrl.algorithms.corrections import apply_correction
from streamrl.algorithms.registry import find_correction
from streamrl.config.load import load_config
from streamrl.config.schema import OptimizerConfig, ScheduleConfig, SweepConfig
from streamrl.errors import StreamrlError
from streamrl.extension import resolve
from streamrl.metrics.sinks import TrackedRun
from streamrl.metrics.trackers.registry import check_trackers, open_trackers
from streamrl.sweep.study import Search, check_search
from streamrl.sweep.words import Axis

MODULE = """
import torch
from torch.optim.lr_scheduler import LambdaLR
number = 3
def no_arguments(): pass
def many(a, b, c, d, e): pass
def nothing(*given, **more): pass
def raises(*given, **more): raise KeyError("of my own")
async def awaited(*given, **more): pass
def nan(optimizer, num_training_steps): return LambdaLR(optimizer, lambda step: float("nan"))
def late(optimizer, num_training_steps): return LambdaLR(optimizer, lambda step: 1 / (num_training_steps - step))
def negative(optimizer, num_training_steps): return LambdaLR(optimizer, lambda step: 5.0 - step)
def iterates(module, lr): return torch.optim.SGD(module, lr=lr)
def needs(module, lr, mine): return torch.optim.SGD(module.parameters(), lr=lr)
"""


def optimizer(name, _):
    check_optimizer(OptimizerConfig(name=name), setting="policy.optimizer")
    make_optimizer(nn.Linear(2, 2), OptimizerConfig(name=name))


def schedule(name, _):
    make_schedule(OptimizerConfig(), ScheduleConfig(name=name), num_steps=9)


def tracker(name, folder):
    check_trackers([name])
    open_trackers([name], TrackedRun("id", folder, "p", None, {}))


def tool(name, _):
    task_of(load_config(["experiment=quickstart", f"env.tools=[{name}]", "env.max_turns=2"]))


def parser(name, _):
    words = ["env.tools=[calculator]", "env.max_turns=2", f"env.tool_use.parser={name}"]
    task_of(load_config(["experiment=quickstart", *words]))


def sampler(name, folder):
    settings = SweepConfig(sampler=name)
    check_search(settings)
    Search(folder, {"a": Axis(("1", "2"))}, settings, seed=1)


def correction(name, _):
    apply_correction(find_correction(name), torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool))


USES = {
    optimizer: ("number", "no_arguments", "many", "nothing", "raises", "awaited", "iterates", "needs"),
    schedule: ("number", "no_arguments", "many", "nothing", "raises", "awaited", "nan", "late", "negative"),
    tracker: ("number", "no_arguments", "many", "nothing", "raises", "awaited"),
    tool: ("number", "many", "nothing", "raises", "awaited"),
    parser: ("number", "awaited"),  # the others show in the check of the task
    sampler: ("number", "no_arguments", "many", "nothing", "raises", "awaited"),
    correction: ("number", "nothing", "awaited"),  # the dry run tells of the others
}


@pytest.mark.filterwarnings("ignore:coroutine")
def test_a_part_of_ones_own_that_cannot_be_used_is_refused_with_its_name(tmp_path, monkeypatch):
    (tmp_path / "wrong_parts.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    found = {}
    for use, names in USES.items():
        for name in names:
            folder = tmp_path / f"{use.__name__}-{name}"
            folder.mkdir()
            try:
                use(f"wrong_parts:{name}", folder)
                found[use.__name__, name] = "accepted"
            except StreamrlError as error:
                if f"wrong_parts:{name}" not in str(error):
                    found[use.__name__, name] = f"not named: {error}"
            except Exception as error:
                found[use.__name__, name] = repr(error)

    assert found == {}


@pytest.mark.parametrize(("name", "says"), [
    ("torch.optim:AdamW", r"is a class, .*return AdamW\(module\.parameters\(\), lr=lr\)"),
    ("builtins:dict", "shows no arguments"),
])
def test_an_optimizers_class_is_no_builder(name, says):
    with pytest.raises(StreamrlError, match=rf"policy\.optimizer\.name={name} {says}"):
        optimizer(name, None)


@pytest.mark.parametrize(
    "code", ["import sys; sys.exit(0)", "import argparse; argparse.ArgumentParser().parse_args(['x'])"]
)
def test_a_script_that_ends_the_process_while_it_is_imported_is_refused(tmp_path, monkeypatch, code):
    (tmp_path / "a_script.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(StreamrlError, match=r"a_script failed .*SystemExit.* under `if __name__ == \"__main__\":`"):
        resolve("a_script:f", {}, setting="loss.surrogate")
    with pytest.raises(StreamrlError, match=r"a_script\.py failed .*SystemExit.* under `if __name__ == \"__main__\":`"):
        task_of(load_config(["experiment=quickstart", f"env.path={tmp_path / 'a_script.py'}"]))
