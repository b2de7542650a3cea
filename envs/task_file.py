"""A user's own Python file becomes a task.

The file holds one of these, and the loader finds out which:

1. a function `task(**options)` that returns a task: it decides, whatever else the file defines;
2. exactly one class with `record` and `reward`, or with the whole `Task` protocol;
3. two functions, `record(split, index)` and `reward(record, completion)`; functions `target(record)` and
   `messages(record)` and the names `num_train`, `num_test` and `name` are taken up if they are there;
4. an environment of another project that makes its own prompts (`envs.adapters.forms`): records are seeds then.

Errors in the file are shown with the line of the file, not with lines of the loader.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from hashlib import blake2b
from importlib.machinery import SourceFileLoader
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from envs.adapters import rl2, rl4llm
from envs.adapters.forms import REWARDS, Form, forms_of, own_names
from envs.adapters.gymnasium_text import NUM_TEST, NUM_TRAIN, GymnasiumEnv, SeededTask
from envs.adapters.rl2 import GenerateEnv
from envs.adapters.rollouts import RolloutEnv
from envs.adapters.text_steps import StartingTextStepEnv
from envs.async_compat import alike, suited
from envs.data.shapes import RecordShape
from streamrl.environment import SingleTurnTask, Task
from streamrl.errors import TaskError, describe
from streamrl.extension import did_you_mean, script_hint

STANDING_IN: Mapping[str, Mapping[str, Any]] = {
    "RL2.datasets": {
        "Sample": rl2.Sample, "base_generate": rl2.base_generate, "initialize_state_dict": rl2.initialize_state_dict,
        "add_llm_response": rl2.add_llm_response, "add_env_response": rl2.add_env_response,
    },
    "RL2.utils.communication": {"async_request": rl2.async_request},
    "rl4llm.core.base_env": {
        name: getattr(rl4llm, name)
        for name in ("BaseRewardFunction", "ChatMessage", "BaseMDPEnv", "EnvState", "SampleState")
    },
    "rl4llm.core.base_inference_client": {"InferenceClient": rl4llm.InferenceClient},
}
"""By module: the names that files written for other projects import from it, where that project is not installed."""


@contextmanager
def origins_importable() -> Iterator[None]:
    """Inside, the modules above can be imported; those that are installed are the real ones."""
    roots = {name.partition(".")[0] for name in STANDING_IN}
    missing = {root for root in roots if root not in sys.modules and find_spec(root) is None}
    added = []
    for name, names in STANDING_IN.items():
        parts = name.split(".")
        if parts[0] not in missing:
            continue
        for length in range(1, len(parts) + 1):
            path = ".".join(parts[:length])
            if path not in sys.modules:
                sys.modules[path] = module = ModuleType(path)
                module.__path__ = []  # a package, so that what it lacks is a ModuleNotFoundError with its whole name
                added.append(path)
        vars(sys.modules[name]).update(names)
    try:
        yield
    finally:
        for name in added:
            sys.modules.pop(name, None)


FORMS = (
    "Define one class with record(split, index) and reward(record, completion), derived from streamrl.SingleTurnTask, "
    "or these two as functions, or a function task(**options) that returns the task."
)
PARTS = ("num_records", "record", "env")
NO_TASK = "not a task: it must have name, num_records, record and env (derive it from streamrl.SingleTurnTask)."


def task_from_file(path: str, options: Mapping[str, Any]) -> Task:
    """Run the file and make its task. Raises TaskError for a missing file, an error inside it, or no clear task."""
    module, file = run_file(path)
    return construct(_find_factory(module, file), options, file.name)


def run_file(path: str, *, setting: str = "env.path") -> tuple[ModuleType, Path]:
    """Run a user's file. Raises TaskError for a missing file or an error inside it, with the line of the file."""
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise TaskError(f"{setting}={path!r}: no such file (looked at {file}).")
    return _run(file), file


def construct(factory: Callable[..., Any], options: Mapping[str, Any], name: str) -> Task:
    """`factory(**options)`. Raises TaskError: unknown or missing options, an error of the factory, or no task."""
    try:
        parameters = inspect.signature(factory).parameters
    except ValueError:
        raise TaskError(f"{name} is not a task: it is built into Python and shows no arguments.") from None
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    known = [key for key, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if not takes_any:
        refuse_unknown(options, known, name)
    missing = [key for key in known if parameters[key].default is inspect.Parameter.empty and key not in options]
    if missing:
        raise TaskError(f"task {name}: missing option {', '.join(missing)}: set env.options.{missing[0]}=...")
    try:
        task = factory(**options)
    except TaskError:
        raise
    except (Exception, SystemExit) as error:
        raise TaskError(f"task {name} could not be made with options {dict(options)}: {describe(error)}") from error
    if not isinstance(task, Task):
        lacking = " and ".join(key for key in ("name", *PARTS) if not hasattr(task, key))
        raise TaskError(f"task {name} is a {type(task).__name__}, {NO_TASK} It lacks {lacking}.")
    return task


def refuse_unknown(options: Mapping[str, Any], known: list[str], name: str) -> None:
    """Raise TaskError for the first option that is not in `known`, with the nearest and all valid names."""
    for key in options:
        if key not in known:
            valid = ", ".join(sorted(known)) or "none"
            raise TaskError(f"task {name} has no option {key!r}.{did_you_mean(key, known)} Valid options: {valid}.")


def _run(file: Path) -> ModuleType:
    name = f"{file.stem}_{blake2b(str(file).encode(), digest_size=4).hexdigest()}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or not isinstance(spec.loader, SourceFileLoader):
        raise TaskError(
            f"env.path={str(file)!r} is not a Python file: its name must end in .py (records are given with data.path)."
        )
    spec.loader = _Source(name, str(file))
    module = importlib.util.module_from_spec(spec)
    # Dataclasses in the file look their module up here while it runs.
    sys.modules[name] = module
    # A file next to it may be imported by name. Last: neither it nor this file stands in front of a package.
    if is_new := str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    try:
        with origins_importable():
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise TaskError(f"{file.name} failed while it was loaded: {describe(error)}{script_hint(error)}") from error
    finally:
        if is_new:
            sys.path.remove(str(file.parent))
    return module


class _Source(SourceFileLoader):
    """Runs a file by its text: what lies in `__pycache__` next to it is neither signed nor what a person has read."""

    def path_stats(self, path: str) -> Mapping[str, Any]:
        raise OSError(path)  # without them no bytecode is read or written


def _find_factory(module: ModuleType, file: Path) -> Callable[..., Any]:
    own = own_names(module)
    functions = {key: value for key, value in own.items() if inspect.isfunction(value)}
    if "task" in functions:
        return functions["task"]
    kinds = [value for value in own.values() if inspect.isclass(value)]
    classes = [kind for kind in kinds if not _lacks(kind) and not inspect.isabstract(kind)]
    has_pair = "record" in functions and "reward" in functions
    if len(classes) + has_pair > 1:
        found = [f"class {c.__name__}" for c in classes] + ["record + reward"] * has_pair
        raise TaskError(f"{file.name} defines more than one task: {', '.join(found)}. Add a function task(**options).")
    if classes:
        return classes[0]
    if has_pair:
        optional = {key: getattr(module, key) for key in ("name", "num_train", "num_test") if hasattr(module, key)}
        parts = ("record", "reward", "target", "messages")
        pair = {key: staticmethod(functions[key]) for key in parts if key in functions}
        return type("FunctionTask", (SingleTurnTask,), {"name": file.stem, **optional, **pair})
    forms = forms_of(module)
    if len(forms) == 1:
        return _seeded(forms[0], module, file)
    if forms:
        what = ", ".join(form.what for form in forms)
        raise TaskError(f"{file.name} defines no task, and more than one reward or environment: {what}. Leave one.")
    found = ", ".join(sorted(key for key in own if not key.startswith("_"))) or "nothing"
    lacking = "".join(
        f" {kind.__name__} lacks {' and '.join(_lacks(kind))}." for kind in kinds if len(_lacks(kind)) < len(PARTS)
    )
    raise TaskError(f"{file.name} defines no task. Found: {found}.{lacking} {FORMS}")


def _seeded(form: Form, module: ModuleType, file: Path) -> Callable[..., Any]:
    """Return a factory of tasks for an environment without records. Raises TaskError for one that needs records."""
    sizes = {key: getattr(module, key, size) for key, size in (("num_train", NUM_TRAIN), ("num_test", NUM_TEST))}
    if form.kind == "gymnasium":
        (kind,) = form.found

        def make(**options: Any) -> Task:
            return SeededTask(kind.__name__, lambda: GymnasiumEnv(kind(**options), kind.__name__), **sizes)

        make.__signature__ = inspect.signature(kind)  # type: ignore[attr-defined]
        return make
    if form.kind == "step" and form.found[1] is not None:
        step, start = form.found
        step, start = alike(step, start)
        plays = suited(StartingTextStepEnv, step, start)
        return lambda: SeededTask(file.stem, lambda: plays(step, f"{file.name}: step", None, start), **sizes)
    if form.kind in ("rollout", "generate") and inspect.isfunction(form.found[0]):
        (function,) = form.found
        driver = RolloutEnv if form.kind == "rollout" else GenerateEnv
        made = partial(driver, function, f"{file.name}: {form.kind}", RecordShape())
        return lambda: SeededTask(file.stem, made, **sizes)
    if form.kind in REWARDS:
        raise TaskError(
            f"{file.name} scores answers but holds no prompts: give it records with data.path=train.jsonl, or define "
            "record(split, index), too."
        )
    raise TaskError(
        f"{file.name} holds no prompts, only {form.what}: give it records with data.path=train.jsonl, or define "
        "record(split, index), too."
    )


def _lacks(cls: type) -> list[str]:
    return [key for key in PARTS if not callable(getattr(cls, key, None))]
