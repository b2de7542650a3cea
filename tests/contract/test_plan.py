"""The plan: the lines there may be, imports that only go down and in no cycle, one door for each heavy library."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from statistics import median

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("streamrl", "actors", "learner", "envs", "configs")
MAX_FILES, MAX_LINES, MAX_LOOSE_LEARNER_FILES, MAX_FIELDS = 14, 600, 2, 30
MAX_PRODUCT_LINES, MAX_TEST_LINES, MAX_MEDIAN_LENGTH = 82_072, 82_372, 48
"""The budget. A change that adds lines takes others away; raising a number is no developer's decision."""

LAYERS: tuple[tuple[str, ...], ...] = (
    ("streamrl.errors", "streamrl.version", "streamrl.lag_rule", "configs"),
    ("streamrl.extension", "streamrl.gpus", "streamrl.named_code", "streamrl.parent_watch"),
    ("streamrl.messages",),
    ("streamrl.config", "streamrl.algorithms", "streamrl.metrics", "streamrl.environment",
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
        ("async_compat", "call_clock", "data", "family_forms", "json_service", "reward_values", "sandbox"),
        ("thoughts",),
        ("adapters", "rewards"),
        ("task_file", "tools"),
        ("reward_file", "check", "agents"),
        ("data_task",),
        ("tasks",),
        ("registry",),
        ("catalog", "expected"),
    ),
}
"""The same inside a package: its folders and loose modules, from the bottom up."""

SIDEWAYS = {
    ("streamrl.weights", "streamrl.transport"),  # the relay is an actor to the hub: it joins through a session
}

OUT_OF_BOUNDS = {"streamrl": {"actors", "learner", "envs"}, "envs": {"torch", "vllm", "zmq"}}
"""What a package must not import beside what LAYERS forbids: `streamrl.launch` starts processes."""
IN_PROCESS = {
    ("streamrl.api.trainer", "learner"), ("streamrl.supervise.one_process", "learner"),
    ("streamrl.supervise.one_process", "actors"),
}
"""Training, and whole runs, in the caller's own process; each is imported when it is first asked for."""
PICKLE_FAMILY = {"pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
TRACKERS = {path.stem for path in (ROOT / "streamrl/metrics/trackers").glob("*.py")} - {"__init__", "registry"}
ONE_DOOR = {
    **{name: {f"streamrl.metrics.trackers.{name}"} for name in TRACKERS},  # each is named after its library
    "bitsandbytes": {"learner.model.optimizer", "learner.model.adapter.lora"},
    "peft": {"learner.model.adapter.lora"},
    "hydra": {"streamrl.config.composition", "streamrl.config.overrides", "streamrl.sweep.words"},
    "triton": {"learner.model.scoring.kernel", "streamrl.weights.gpu.fold_kernel"},
    "optuna": {"streamrl.sweep.study"},
    "submitit": {"streamrl.sweep.cluster", "streamrl.sweep.trial"},
    "omegaconf": {f"streamrl.config.{name}" for name in ("composition", "load", "overrides")},
}
IN_SANDBOX = "envs.sandbox.supervisor"
"""Runs as a process of its own, which gave up its privileges first; nothing imports it."""


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
def all_imports(name: str) -> frozenset[str]:
    """Modules that a module imports anywhere in its text: inside functions and under TYPE_CHECKING too."""
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
    return frozenset(found)


def imports(name: str) -> frozenset[str]:
    """Our own modules among them."""
    return all_imports(name) & modules().keys()


def tops(name: str) -> set[str]:
    """The packages that a module imports from, ours and others'."""
    return {other.partition(".")[0] for other in all_imports(name)}


def num_lines(*patterns: str) -> int:
    """Lines of the text files that git tracks, or would: what is new counts before it is committed."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--deduplicate", *patterns]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=30)
    contents = [path.read_bytes() for name in done.stdout.splitlines() if (path := ROOT / name).is_file()]
    return sum(content.count(b"\n") for content in contents if b"\0" not in content)


def test_the_tree_stays_within_its_budget():
    product, tests = {package: num_lines(package) for package in PACKAGES}, num_lines("tests/*.py")
    for name, num in (*product.items(), ("product", sum(product.values())), ("tests", tests)):
        print(f"{name:10}{num:8,}")
    assert sum(product.values()) <= MAX_PRODUCT_LINES and tests <= MAX_TEST_LINES
    lines = [line for path in modules().values() for line in path.read_text().splitlines() if line.strip()]
    assert median(map(len, lines)) <= MAX_MEDIAN_LENGTH, "denser lines are no smaller program"


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


def test_no_folders_import_each_other_in_a_cycle():
    assert [cycle for package in PACKAGES for cycle in cycles(folder_edges(package))] == []


def test_a_module_imports_only_downward():
    offenders = []
    for name in modules():
        layer, package = package_of(name)
        for other in imports(name):
            other_layer, other_package = package_of(other)
            if package != other_package and (package, other_package) not in SIDEWAYS and other_layer >= layer:
                offenders.append(f"{name} (layer {layer}) imports {other} (layer {other_layer})")
    assert offenders == []


def test_no_module_imports_what_its_package_must_not():
    offenders = {
        (name, top) for name in modules()
        for top in tops(name) & (PICKLE_FAMILY | OUT_OF_BOUNDS.get(name.partition(".")[0], set()))
    }
    assert offenders == IN_PROCESS


def test_messages_and_errors_know_no_torch_and_nothing_of_ours():
    ground = {name for name in modules() if f"{name}.".startswith(("streamrl.errors.", "streamrl.messages."))}
    assert {
        (name, other) for name in ground for other in all_imports(name)
        if other == "torch" or other.startswith(("torch.", "streamrl.")) and other not in {*ground, "streamrl"}
    } == set()


def test_the_algorithms_are_pure():
    allowed = {"streamrl", "streamrl.errors", "streamrl.extension", "streamrl.lag_rule"}
    offenders = {
        (name, other) for name in modules() if name.startswith("streamrl.algorithms") for other in all_imports(name)
        if other.startswith("streamrl") and not other.startswith("streamrl.algorithms") and other not in allowed
        or other.partition(".")[0] in ("logging", "zmq", "time")
    }
    assert offenders == set()


def test_heavy_libraries_have_one_door():
    users = {library: {name for name in modules() if library in tops(name)} for library in ONE_DOOR}
    assert {library: names - ONE_DOOR[library] for library, names in users.items() if names - ONE_DOOR[library]} == {}


def _runs_foreign_code(node: ast.AST, in_sandbox: bool) -> bool:
    """Whether a node reads the wall clock, unpickles, evaluates text or loads code that came with a model."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return (node.value.id, node.attr) in {("time", "time"), ("torch", "load")} or node.attr in (
            "recv_pyobj", "send_pyobj", "all_gather_object", "broadcast_object_list"
        )
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("eval", "exec"):
        return not in_sandbox
    if isinstance(node, ast.Call) and re.fullmatch(r"Auto\w+\.from_pretrained", ast.unparse(node.func)):
        # Without the word a terminal is asked whether the model's own code may run.
        return "trust_remote_code" not in [word.arg for word in node.keywords]
    if isinstance(node, ast.keyword) and node.arg in ("trust_remote_code", "allow_pickle"):
        return not (isinstance(node.value, ast.Constant) and node.value.value is False)
    return False


def test_nothing_reads_the_wall_clock_or_runs_foreign_code():
    assert [
        f"{name}:{node.lineno}: {ast.unparse(node)}"
        for name in modules() for node in ast.walk(tree(name)) if _runs_foreign_code(node, name == IN_SANDBOX)
    ] == []


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
    assert not [path for path in modules().values() if path.stem in nothing]


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


@pytest.mark.parametrize(
    ("title", "max_calls", "max_packages", "max_files", "max_lines"),
    [("The training step", 40, 14, 16, 3_300), ("The weight sync", 30, 12, 24, 4_300)],
)
def test_a_path_is_short_enough_to_follow(title, max_calls, max_packages, max_files, max_lines):
    """A list of docs/architecture.md: real functions, few enough of them, in files that one can read."""
    text = (ROOT / "docs/architecture.md").read_text().partition(f"## {title}\n")[2].partition("\n## ")[0]
    calls = [line.split()[:2] for line in text.partition("```text\n")[2].partition("```")[0].splitlines()]
    missing = [
        f"{module}:{name}" for module, name in calls
        if name.rpartition(".")[2] not in {
            node.name for node in ast.walk(tree(module))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        }
    ]
    assert missing == []
    packages = {module.rpartition(".")[0] for module, _ in calls}
    assert len(calls) <= max_calls and len(packages) <= max_packages, (len(calls), sorted(packages))
    files, named = [], text.rpartition("Fifteen files")[2]
    for names, folder in re.findall(r"((?:`\w+\.py`,?\s)+)of\s`([\w/]+)`", named):
        files += [f"{folder}/{name}" for name in re.findall(r"\w+\.py", names)]
    files += re.findall(r"`(\w+/[\w/]+\.py)`", named)
    lengths = {name: len((ROOT / name).read_text().splitlines()) for name in files}
    assert {module.replace(".", "/") + ".py" for module, _ in calls if title == "The weight sync"} <= lengths.keys()
    assert 10 < len(lengths) <= max_files and sum(lengths.values()) <= max_lines, lengths
