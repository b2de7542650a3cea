"""The layers: modules import only downward, in no cycle, and no folder or file outgrows one idea."""

from __future__ import annotations

import ast
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("streamrl", "actors", "learner", "envs", "configs")
MAX_FILES, MAX_LINES, MAX_LOOSE_LEARNER_FILES, MAX_FIELDS = 14, 600, 2, 30

LAYERS: tuple[tuple[str, ...], ...] = (
    ("streamrl.errors", "streamrl.version", "streamrl.lag_rule", "configs"),
    ("streamrl.extension", "streamrl.gpus", "streamrl.named_code"),
    ("streamrl.messages",),
    ("streamrl.config", "streamrl.algorithms", "streamrl.metrics", "streamrl.environment", "streamrl.parent_watch",
     "streamrl.process_memory", "streamrl.processes", "streamrl.commands", "streamrl.architectures"),
    ("streamrl.stream",),
    ("streamrl.transport", "streamrl.weights", "streamrl.report", "streamrl.run_dirs"),
    ("envs",),
    ("actors", "learner"),
    ("streamrl.supervise",),
    ("streamrl.launch",),
    ("streamrl.sweep", "streamrl.verbs"),
    ("streamrl.api",),
    ("streamrl.cli", "streamrl"),
)
"""Packages from the lowest layer up. A package imports from itself and from the layers below, never sideways or up."""

INSIDE: dict[str, tuple[tuple[str, ...], ...]] = {
    "learner": (
        ("hub", "ranks"),
        ("broadcaster", "checkpoint", "data", "hub_client"),
        ("model",),
        ("objective", "publish"),
        ("audit", "control", "record", "sources", "trainer"),
        ("fit", "loop"),
        ("setup",),
        ("__main__", "replay", "supervised"),
    ),
    "envs": (
        ("awaiting", "data", "json_handler", "reward_values", "sandbox", "wrapped_task"),
        ("adapters", "rewards"),
        ("task_file", "tools"),
        ("reward_file", "check", "agents"),
        ("data_task",),
        ("tasks",),
        ("registry",),
        ("catalog",),
    ),
}
"""The same inside a package: its folders and loose modules, from the bottom up."""

SIDEWAYS = {
    ("streamrl.weights", "streamrl.transport"),  # the relay is an actor to the hub: it joins through a session
}


@cache
def modules() -> dict[str, Path]:
    """Dotted name -> file, of every module of the product."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def tree(name: str) -> ast.Module:
    return ast.parse(modules()[name].read_text())


@cache
def imports(name: str) -> frozenset[str]:
    """Our own modules that a module imports anywhere in its text: inside functions and under TYPE_CHECKING too."""
    known, found = modules(), set()
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            assert node.level == 0, f"{name}: imports are absolute"
            # `from package import module` is an edge to the module, `from module import name` one to the module too.
            found |= {
                child if (child := f"{node.module}.{alias.name}") in known else node.module for alias in node.names
            }
    return frozenset(found & known.keys())


def package_of(module: str) -> tuple[int, str]:
    """(layer, package) by the longest prefix that names a package."""
    packages = [
        (layer, package) for layer, names in enumerate(LAYERS) for package in names
        if module == package or module.startswith(f"{package}.")
    ]
    assert packages, f"{module} belongs to no package: give it one in LAYERS"
    return max(packages, key=lambda found: len(found[1]))


def cycles(edges: Mapping[str, Collection[str]]) -> list[list[str]]:
    """Strongly connected components of a graph with more than one node (Tarjan)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in sorted(edges[name]):
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            at = stack.index(name)
            component, stack[at:] = stack[at:], []
            if len(component) > 1:
                found.append(sorted(component))

    for name in edges:
        if name not in index:
            visit(name)
    return found


def folder_of(module: str) -> str:
    """The folder of a module, by its dotted name; a module that lies beside the folders of the top level is its own."""
    folder = module if modules()[module].name == "__init__.py" else module.rpartition(".")[0]
    return folder if "." in folder else module


def folder_edges(package: str) -> dict[str, set[str]]:
    """The folders of a package, at any depth, and for each the others of the package that its modules import."""
    edges: dict[str, set[str]] = {}
    for name in modules():
        if name == package or name.startswith(f"{package}."):
            others = {folder_of(other) for other in imports(name)}
            mine = edges.setdefault(folder_of(name), set())
            mine |= {one for one in others if one == package or one.startswith(f"{package}.")} - {folder_of(name)}
    return edges


def test_no_modules_import_each_other_in_a_cycle():
    assert cycles({name: imports(name) for name in modules()}) == []


@pytest.mark.parametrize("package", ["learner", "envs"])
def test_no_folders_import_each_other_in_a_cycle(package):
    assert cycles(folder_edges(package)) == []


@pytest.mark.parametrize("name", sorted(modules()))
def test_a_module_imports_only_downward(name):
    layer, package = package_of(name)
    for other in imports(name):
        other_layer, other_package = package_of(other)
        if package != other_package and (package, other_package) not in SIDEWAYS:
            assert other_layer < layer, f"{name} (layer {layer}) imports {other} (layer {other_layer})"


def part_of(module: str) -> str:
    """The folder or loose module of a package in which a module lies; "" for the package itself."""
    return module.partition(".")[2].partition(".")[0]


@pytest.mark.parametrize("package", INSIDE)
def test_the_parts_of_a_package_import_only_downward(package):
    level = {part: number for number, parts in enumerate(INSIDE[package]) for part in parts}
    edges = {
        (part_of(name), part_of(other)): f"{name} imports {other}"
        for name in modules() for other in imports(name)
        if name.startswith(f"{package}.") and other.startswith(f"{package}.") and part_of(name) != part_of(other)
    }
    assert {part_of(name) for name in modules() if name.startswith(f"{package}.")} == level.keys()
    assert {edge: why for edge, why in edges.items() if level[edge[1]] >= level[edge[0]]} == {}


def test_the_learner_has_at_most_eight_layers():
    assert len(INSIDE["learner"]) <= 8


def test_training_knows_no_hub():
    """Replay, distillation and supervised training use the trainer without a run."""
    reached, waiting = set(), ["learner.trainer"]
    while waiting:
        reached.add(name := waiting.pop())
        waiting += imports(name) - reached
    assert not [name for name in reached if name.startswith(("learner.hub", "streamrl.transport"))]


def fields_and_methods(node: ast.ClassDef) -> tuple[int, int]:
    """Attributes that a class declares or that any of its methods sets on itself, and the methods."""
    fields = {one.target.id for one in node.body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)}
    for one in ast.walk(node):
        if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store):
            fields |= {one.attr} if isinstance(one.value, ast.Name) and one.value.id == "self" else set()
    return len(fields), sum(isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef) for one in node.body)


def test_no_class_holds_more_than_a_reader_can_keep_in_mind():
    sizes = {
        f"{name}.{node.name}": fields_and_methods(node)
        for name in modules() for node in ast.walk(tree(name))
        if isinstance(node, ast.ClassDef)
    }
    whole = {"streamrl.config.schema.Config", "streamrl.metrics.summary.Summary"}  # all settings, all results
    assert {name: num for name, (num, _) in sizes.items() if num > MAX_FIELDS and name not in whole} == {}
    assert max(sizes["learner.trainer.Trainer"]) <= 14


def test_few_modules_take_the_root_config():
    """The others take the sections that they read, so that tests and trainers can make them without a whole run."""
    taking = set()
    for name in modules():
        for node in ast.walk(tree(name)) if name.startswith(("learner", "actors")) else ():
            is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            args = [*node.args.args, *node.args.kwonlyargs] if is_function else []
            notes = [node] if isinstance(node, ast.AnnAssign) else args
            if {ast.unparse(one.annotation) for one in notes if one.annotation} & {"Config", "schema.Config"}:
                taking.add(name)
    assert len(taking) <= 11, sorted(taking)


def test_every_exception_to_the_direction_is_used():
    edges = {(package_of(name)[1], package_of(other)[1]) for name in modules() for other in imports(name)}
    assert SIDEWAYS <= edges


def test_no_folder_holds_more_files_than_a_reader_can_survey():
    folders: dict[Path, int] = {}
    for path in modules().values():
        folders[path.parent] = folders.get(path.parent, 0) + (path.name != "__init__.py")
    assert {str(folder.relative_to(ROOT)): num for folder, num in folders.items() if num > MAX_FILES} == {}
    assert folders[ROOT / "learner"] <= MAX_LOOSE_LEARNER_FILES


def test_no_file_outgrows_one_idea():
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in modules().values()}
    assert {name: num for name, num in lengths.items() if num > MAX_LINES} == {}
