"""The floor plan: modules import only downward, in no circle, and no folder or file outgrows one idea."""

from __future__ import annotations

import ast
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("streamrl", "actors", "learner", "envs", "configs")
MAX_FILES, MAX_LINES, MAX_LOOSE_LEARNER_FILES = 14, 400, 10

FLOORS: tuple[tuple[str, ...], ...] = (
    ("streamrl.errors", "streamrl.version", "streamrl.lag_rule", "configs"),
    ("streamrl.extension", "streamrl.gpus", "streamrl.named_code"),
    ("streamrl.messages",),
    ("streamrl.config", "streamrl.algorithms", "streamrl.metrics", "streamrl.environment", "streamrl.parent_watch",
     "streamrl.process_memory", "streamrl.processes", "streamrl.architectures"),
    ("streamrl.transport", "streamrl.weights", "streamrl.report", "streamrl.run_dirs"),
    ("envs",),
    ("actors", "learner"),
    ("streamrl.supervise",),
    ("streamrl.launch", "streamrl.slurm"),
    ("streamrl.sweep", "streamrl.verbs"),
    ("streamrl.api",),
    ("streamrl.cli", "streamrl"),
)
"""Rooms from the ground floor up. A room imports from itself and from the floors below, never sideways or up."""

INSIDE: dict[str, tuple[tuple[str, ...], ...]] = {
    "learner": (
        ("hub", "ranks"),
        ("broadcaster", "checkpoint", "data", "hub_client"),
        ("model",),
        ("objective", "publish"),
        ("audit", "control", "record", "sources", "trainer"),
        ("loop",),
        ("setup",),
        ("__main__",),
    ),
    "envs": (
        ("data", "json_handler", "reward_values", "sandbox"),
        ("adapters", "rewards"),
        ("task_file", "tools"),
        ("reward_file", "check"),
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
def imports(name: str) -> frozenset[str]:
    """Our own modules that a module imports anywhere in its text: inside functions and under TYPE_CHECKING too."""
    known, found = modules(), set()
    for node in ast.walk(ast.parse(known[name].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            assert node.level == 0, f"{name}: imports are absolute"
            # `from package import module` is an edge to the module, `from module import name` one to the module too.
            found |= {
                child if (child := f"{node.module}.{alias.name}") in known else node.module for alias in node.names
            }
    return frozenset(found & known.keys())


def room_of(module: str) -> tuple[int, str]:
    """(floor, room) by the longest prefix that names a room."""
    rooms = [
        (floor, room) for floor, names in enumerate(FLOORS) for room in names
        if module == room or module.startswith(f"{room}.")
    ]
    assert rooms, f"{module} belongs to no room: give it one in FLOORS"
    return max(rooms, key=lambda found: len(found[1]))


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
    """The folder of a module, by its dotted name; the modules that lie in a package beside its folders are one node."""
    return module if modules()[module].name == "__init__.py" else module.rpartition(".")[0]


def folder_edges(package: str) -> dict[str, set[str]]:
    """The folders of a package, at any depth, and for each the others of the package that its modules import."""
    edges: dict[str, set[str]] = {}
    for name in modules():
        if name == package or name.startswith(f"{package}."):
            others = {folder_of(other) for other in imports(name)}
            mine = edges.setdefault(folder_of(name), set())
            mine |= {one for one in others if one == package or one.startswith(f"{package}.")} - {folder_of(name)}
    return edges


def test_no_modules_import_each_other_in_a_circle():
    assert cycles({name: imports(name) for name in modules()}) == []


@pytest.mark.parametrize("package", ["learner.hub"])
def test_no_folders_import_each_other_in_a_circle(package):
    assert cycles(folder_edges(package)) == []


@pytest.mark.parametrize("name", sorted(modules()))
def test_a_module_imports_only_downward(name):
    floor, room = room_of(name)
    for other in imports(name):
        other_floor, other_room = room_of(other)
        if room != other_room and (room, other_room) not in SIDEWAYS:
            assert other_floor < floor, f"{name} (floor {floor}) imports {other} (floor {other_floor})"


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


def test_every_exception_to_the_direction_is_used():
    edges = {(room_of(name)[1], room_of(other)[1]) for name in modules() for other in imports(name)}
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
