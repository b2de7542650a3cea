"""The walls of the house: who may import whom, checked in the source and in fresh interpreters."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("streamrl", "actors", "learner", "envs", "configs")
FILES = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))
FORBIDDEN = {
    "streamrl": {"actors", "learner", "envs"},
    "actors": {"learner"},
    "learner": {"actors"},
    "envs": {"actors", "learner", "torch", "vllm", "zmq"},
}
ALLOWED = {("streamrl/api/trainer.py", "learner")}
"""Training in the caller's own process; it is imported when `streamrl.Trainer` is first named."""
FLOOR_0 = ("streamrl/errors.py", "streamrl/messages/codec.py", "streamrl/messages/validate.py",
           *sorted(f"streamrl/messages/{path.name}" for path in (ROOT / "streamrl/messages").glob("*.py")))
TRACKERS = {  # each in the module that is named after its library
    path.stem: {str(path.relative_to(ROOT))} for path in (ROOT / "streamrl/metrics/trackers").glob("*.py")
    if path.stem not in ("__init__", "registry")
}
PICKLE_FAMILY = {"pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
ONE_DOOR = TRACKERS | {
    "bitsandbytes": {"learner/model/optimizer.py", "learner/model/adapter/quantize.py"},
    "peft": {"learner/model/adapter/lora.py", "learner/model/adapter/quantize.py"},
    "hydra": {"streamrl/config/load.py", "streamrl/config/sweep_words.py"},
    "optuna": {"streamrl/sweep/study.py"},
    "omegaconf": {"streamrl/config/load.py"},
}


@cache
def imports(path: Path) -> frozenset[str]:
    """Modules of every import in a file, those inside functions too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return frozenset(found)


def tops(path: Path) -> set[str]:
    return {name.partition(".")[0] for name in imports(path)}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_file_imports_against_the_plan(path):
    name = str(path.relative_to(ROOT))
    forbidden = {top for top in tops(path) & FORBIDDEN.get(path.relative_to(ROOT).parts[0], set())}
    assert {(name, top) for top in forbidden} <= ALLOWED
    assert not tops(path) & PICKLE_FAMILY


@pytest.mark.parametrize("name", FLOOR_0)
def test_the_ground_floor_knows_no_torch_and_no_other_room(name):
    path = ROOT / name
    ours = {i for i in imports(path) if i.startswith("streamrl")}
    assert "torch" not in tops(path)
    known = {"streamrl", "streamrl.errors", "streamrl.messages", "streamrl.messages.codec"}
    assert all(i in known or i.startswith("streamrl.messages.") for i in ours)


def test_the_algorithms_are_pure():
    for path in (ROOT / "streamrl/algorithms").rglob("*.py"):
        ours = {i for i in imports(path) if i.startswith("streamrl") and not i.startswith("streamrl.algorithms")}
        foreign = ours - {"streamrl.errors", "streamrl.extension", "streamrl.lag_rule"}
        assert not foreign and not tops(path) & {"logging", "zmq", "time"}, path


@pytest.mark.parametrize("library", ONE_DOOR)
def test_heavy_libraries_have_one_door(library):
    users = {str(path.relative_to(ROOT)) for path in FILES if library in tops(path)}
    assert users <= ONE_DOOR[library]


IN_SANDBOX = {ROOT / "envs/sandbox/supervisor.py"}
"""Runs as a process of its own, which gave up its privileges first; nothing imports it."""


def test_nothing_reads_the_wall_clock_or_runs_foreign_code():
    banned = {("time", "time"), ("torch", "load")}
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                assert (node.value.id, node.attr) not in banned, f"{path}:{node.lineno}"
                assert node.attr not in ("recv_pyobj", "send_pyobj", "all_gather_object", "broadcast_object_list"), path
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("eval", "exec") or path in IN_SANDBOX, f"{path}:{node.lineno}"
            if isinstance(node, ast.Call) and re.fullmatch(r"Auto\w+\.from_pretrained", ast.unparse(node.func)):
                # Without the word a terminal is asked whether the model's own code may run.
                assert "trust_remote_code" in [word.arg for word in node.keywords], f"{path}:{node.lineno}"
            if isinstance(node, ast.keyword) and node.arg in ("trust_remote_code", "allow_pickle"):
                assert isinstance(node.value, ast.Constant) and node.value.value is False, f"{path}:{node.lineno}"


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("learner.hub.server", {"torch", "transformers", "hydra"}),
        ("streamrl", {"torch", "transformers", "zmq", "hydra"}),
        ("streamrl.cli", {"torch", "transformers", "actors", "learner"}),
        ("streamrl.transport.client", {"torch", "hydra"}),
        ("envs.registry", {"torch", "zmq", "reasoning_gym"}),
        ("learner.trainer", {"zmq", "hydra", "learner.hub", "learner.hub_client", "actors"}),
    ],
)
def test_a_fresh_interpreter_stays_slim(module, absent):
    code = f"import sys, {module}; print(*{{'.'.join(m.split('.')[:n]) for m in sys.modules for n in (1, 2)}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert not absent & set(done.stdout.split())


def test_no_file_has_a_name_that_says_nothing():
    nothing = {"utils", "util", "common", "helpers", "helper", "manager", "misc"}
    assert not [path for path in FILES if path.stem in nothing]
