"""A name, a module path or a file becomes a `Task`, or an error that says what was found and what to do.

    string.reverse              a registered task; `envs.catalog` lists them
    reasoning_gym.chain_sum     a dataset of the reasoning_gym package
    gem                         an environment of the GEM package, named by its id
    verifiers:my-taskset        a taskset of verifiers, in an environment of its own
    openenv:http://HOST:PORT    an environment behind a server of OpenEnv
    my_package.tasks:MyTask     a class (or a function that returns a task) on the import path
    path="my_task.py"           a file that need not be on the import path

With `data.path` the records come from files, and `envs.data_task` puts the task together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from envs.adapters.gymnasium_text import gem_task
from envs.agents.task import with_agent
from envs.agents.verifiers import PREFIX as VERIFIERS
from envs.agents.verifiers import VerifiersTask
from envs.data_task import TaskSettings, task_from_data
from envs.task_file import NO_TASK, PARTS, construct, task_from_file
from envs.tasks.by_field import FieldTask
from envs.tasks.named import FORMATS, NAMED
from envs.tasks.reasoning import PREFIX, ReasoningTask, dataset_names
from envs.tasks.search_questions import NAME as SEARCH
from envs.tasks.search_questions import search_file
from envs.tasks.strings import OPERATIONS, StringTask, ToolArithmetic
from envs.tools.task import with_tools
from streamrl.config.schema import Config, DataConfig, EnvConfig, RewardConfig
from streamrl.environment import Task
from streamrl.errors import ConfigError, TaskError
from streamrl.extension import did_you_mean, import_attribute

REGISTERED: dict[str, Callable[..., Task]] = {
    **{f"string.{op}": partial(StringTask, op) for op in OPERATIONS},
    ToolArithmetic.name: ToolArithmetic,
    **{name: partial(ReasoningTask, one.dataset, **one.options) for name, one in NAMED.items()},
}
EXAMPLES = {
    "game.guess_number": "games.py", "game.maze": "games.py env.options.game=maze", SEARCH: "search_world.py",
}
"""Names of tasks that are files of `examples/tasks` in the source, and how they are given."""


def task_of(settings: TaskSettings) -> Task:
    """The task of a run, with its agent or tools. Raises TaskError: see `load_task`, `envs.data_task`, `envs.tools`."""
    task, env = _tasks_by_field(settings) if settings.env.tasks else _plain_task(settings), settings.env
    ways = [f"env.{name}" for name in ("agent", "agent_command", "tools") if getattr(env, name)]
    if len(ways) > 1:
        raise TaskError(f"{' and '.join(ways)} each decide what the model reads: leave one of them out")
    if env.agent is not None or env.agent_command is not None:
        return with_agent(task, env)
    return with_tools(task, env) if env.tools else task


def _tasks_by_field(settings: TaskSettings) -> FieldTask:
    """The tasks of `env.tasks`, each with the run's settings under its own. Raises TaskError: see `FieldTask`."""
    from streamrl.config.load import with_settings  # its library is large, and few runs need it

    env, tasks = settings.env, {}
    run = Config(env=replace(env, tasks={}), data=settings.data, reward=settings.reward)
    if settings.data.path is None:
        raise TaskError("env.tasks says how records of a file are played: give data.path=train.jsonl, too.")
    for name, values in env.tasks.items():
        if not isinstance(values, Mapping) or set(values) - {"env", "reward"}:
            raise TaskError(
                f"env.tasks.{name} is {values!r:.60}: give settings of env and reward, as {{reward: {{type: math}}}}"
            )
        own = {**values, "env": {**values.get("env", {}), "tasks": {}}}
        try:
            tasks[str(name)] = _plain_task(with_settings(run, own, whole=False))
        except (ConfigError, TaskError) as error:
            raise TaskError(f"env.tasks.{name}: {error}") from error
    return FieldTask(tasks, env.task_field)


def _plain_task(settings: TaskSettings) -> Task:
    env, data, reward = settings.env, settings.data, settings.reward
    if data.path is not None:
        if env.name == SEARCH and env.path is None and reward.type is None and not reward.weights:
            return construct(partial(search_file, settings), dict(env.options), env.name)
        return task_from_data(_with_format(settings))
    if env.path is None and env.name in FORMATS:
        raise TaskError(f"env.name={env.name} says how records of a file are scored: give data.path=train.jsonl, too.")
    if reward.type is not None:
        raise TaskError(f"reward.type={reward.type} scores the records of a file: give data.path=train.jsonl, too.")
    return load_task(env.name, path=env.path, options=dict(env.options))


@dataclass(frozen=True, slots=True)
class _Sections:
    env: EnvConfig
    data: DataConfig
    reward: RewardConfig


def _with_format(settings: TaskSettings) -> TaskSettings:
    """The settings with the reward that env.name stands for, if nothing else says how answers are scored."""
    env, reward = settings.env, settings.reward
    if env.name not in FORMATS or env.path is not None or reward.type is not None or reward.weights:
        return settings
    return _Sections(env, settings.data, replace(reward, type=FORMATS[env.name].reward))


def load_task(name: str, *, path: str | None = None, options: Mapping[str, Any] | None = None) -> Task:
    """The task that the settings ask for.

    Args:
        name: a registered name, `reasoning_gym.<dataset>`, or `package.module:Class`; unused when `path` is given.
        path: a Python file with the user's own task; see `envs.task_file` for the forms that it may take.
        options: keyword arguments of the task; unknown ones are refused by name.
    Raises:
        TaskError: nothing by that name, an option that it does not have, or an error in the user's code.
    """
    if path is not None:
        return task_from_file(path, options or {})
    return construct(_factory(name), options or {}, name)


def _factory(name: str) -> Callable[..., Any]:
    if name in REGISTERED:
        return REGISTERED[name]
    if name == "gem":
        return gem_task
    if name.startswith(PREFIX):
        return partial(ReasoningTask, name.removeprefix(PREFIX))
    if name.startswith(VERIFIERS):
        return partial(VerifiersTask, name.removeprefix(VERIFIERS))
    if name.startswith("openenv:"):
        from envs.adapters.openenv import OpenEnvTask  # its library takes a while to load, and few runs need it

        return partial(OpenEnvTask, name.removeprefix("openenv:"))
    if name in EXAMPLES:
        own = ", or data.path for questions of your own" if name == SEARCH else ""
        raise TaskError(
            f"env.name={name} is an example: give env.path=examples/tasks/{EXAMPLES[name]} in the folder of streamrl's "
            f"source{own}."
        )
    if ":" not in name:
        # The package is only imported for the spelling check of a name that failed already.
        others = ("gem", *FORMATS, "openenv:http://HOST:PORT", f"{VERIFIERS}ID")
        candidates = [*REGISTERED, *others, *(PREFIX + dataset for dataset in dataset_names())]
        raise TaskError(
            f"Unknown task {name!r}.{did_you_mean(name, candidates)} Registered: {', '.join(sorted(REGISTERED))}; also "
            f"{', '.join(others)}, reasoning_gym.<dataset>, package.module:Class, or your own file with "
            "env.path=my_task.py."
        )
    try:
        factory = import_attribute(name, setting="env.name")
    except ConfigError as error:
        raise TaskError(f"{error} A file of your own can also be given with env.path.") from error
    if not callable(factory):
        raise TaskError(f"task {name!r} is a {type(factory).__name__}: name a class or a function that returns a task.")
    if isinstance(factory, type) and (lacking := [part for part in PARTS if not hasattr(factory, part)]):
        raise TaskError(f"task {name} is a class without {' and '.join(lacking)}, {NO_TASK}")
    return factory
