"""Coverage of `make test` without the slow tests: every package, every algorithm, and real processes of each kind."""

import ast
from functools import cache
from pathlib import Path

from tests.contract.test_plan import ROOT
from tests.slow import SLOW, is_slow

TESTS = ROOT / "tests"
PACKAGES = sorted(
    path.parent.relative_to(ROOT).as_posix().replace("/", ".")
    for top in ("streamrl", "actors", "learner", "envs") for path in (ROOT / top).rglob("__init__.py")
)
REAL = {
    "a launched run": "test_launch.py::test_a_launched_run_trains_and_leaves_a_report_and_a_model",
    "Ctrl-C": "test_launch.py::test_ctrl_c_at_any_moment_leaves_nothing_behind_and_says_how_to_resume",
    "a killed launcher": "test_launch.py::test_a_killed_launcher_takes_its_children_with_it",
    "a killed hub": "test_hub_death.py::test_a_killed_hub_ends_the_learner_with_its_name_and_leaves_no_socket",
    "a function and records in Python": "test_python_training.py::"
    "test_a_function_and_a_list_train_in_silence_and_the_run_goes_on",
    "a data file and a reward file": "test_data_files.py::"
    "test_a_file_and_a_reward_train_for_an_epoch_past_long_prompts_and_bad_values",
    "device transports": "test_device_transports.py::"
    "test_versions_reach_two_actors_by_one_broadcast_each_and_the_epoch_is_reused",
    "a killed learner": "test_resume.py::test_actors_that_outlive_a_learner_take_on_the_settings_of_the_resumed_run",
}
"""One flow test of each kind; the others are slow."""


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(path.read_text())))


@cache
def names_in(path: Path) -> frozenset[str]:
    """The names of the tests that a file defines, in classes too."""
    return frozenset(
        node.name for node in nodes(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    )


def imported(path: Path) -> set[str]:
    """Modules that a file imports, and what it takes from them."""
    found: set[str] = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def in_make_test(path: Path) -> bool:
    file = path.relative_to(TESTS).as_posix()
    return any(not is_slow(file, test) for test in names_in(path))


def test_each_slow_test_exists_and_has_a_reason():
    for file, listed in SLOW.items():
        tests = {} if isinstance(listed, str) else listed
        assert (TESTS / file).is_file() and {test.partition("[")[0] for test in tests} <= names_in(TESTS / file), file
        assert all(len(reason.split()) >= 3 for reason in tests.values() or [listed]), file


def test_every_package_and_every_algorithm_is_tested_by_make_test():
    files = [path for path in TESTS.rglob("test_*.py") if in_make_test(path)]
    used = {name for path in files for name in imported(path)}
    used |= imported(ROOT / "streamrl/algorithms/__init__.py")  # which passes on every name of its packages
    folders = {path.parent.relative_to(TESTS / "unit").as_posix() for path in files if TESTS / "unit" in path.parents}
    assert [
        package for package in PACKAGES
        if package.replace(".", "/") not in folders and not any(f"{name}.".startswith(f"{package}.") for name in used)
    ] == []
    whole = [file for file, listed in SLOW.items() if isinstance(listed, str)]
    assert not [file for file in whole if file.startswith(("contract/", "unit/algorithms/", "unit/messages/"))]


def test_one_flow_test_of_each_kind_is_in_make_test():
    for kind, key in REAL.items():
        file, _, test = key.partition("::")
        assert test in names_in(TESTS / "flow" / file) and not is_slow(f"flow/{file}", test), kind
