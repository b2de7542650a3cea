"""The tasks that come with streamrl: what `streamrl tasks` lists."""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass, fields
from functools import partial

from envs.agents.verifiers import PREFIX as VERIFIERS
from envs.registry import REGISTERED
from envs.tasks.named import FORMATS, NAMED
from envs.tasks.reasoning import PREFIX, ReasoningTask, config_class, dataset_names
from envs.tasks.search_questions import NAME as SEARCH
from streamrl.commands import status_of
from streamrl.errors import ConfigError
from streamrl.extension import did_you_mean


@dataclass(frozen=True, slots=True)
class Entry:
    """One task: its name for env.name, what it asks, and its options with their defaults."""

    name: str
    sentence: str
    options: str


def entries() -> list[Entry]:
    """The tasks with names of their own. Imports no package of tasks."""
    listed = [_registered(name) for name in REGISTERED]
    formats = [
        Entry(name, f"{one.sentence} Needs data.path.", f"the settings of data and reward; reward.type={one.reward}")
        for name, one in FORMATS.items()
    ]
    every = "answer_format, format_reward, ... and the data set's own: streamrl tasks reasoning_gym.NAME"
    gem = "id, template, num_train, num_test and the environment's own"
    named = Entry("gem", "An environment of the package gem-llm, which must be installed.", gem)
    own = Entry(f"{VERIFIERS}ID", "A taskset of verifiers, in an environment of its own.", "python, num_test, --env.*")
    server = Entry("openenv:URL", "An environment behind a server of OpenEnv.", "action, observation, reset, ...")
    asked = "Questions that are answered by searching, in the form of Search-R1. Needs data.path."
    search = Entry(SEARCH, asked, "num_results, format_reward, instruction; env.tool_use.documents is searched")
    return [*listed, *formats, search, named, own, server,
            Entry(f"{PREFIX}NAME", "Any data set of the reasoning_gym package.", every)]


def lines(words: list[str]) -> list[str]:
    """The printed lines: all tasks, or those whose name or sentence contains every word.

    Raises ConfigError if none does, with the nearest names.
    """
    named = [_dataset(name) for name in words if name.startswith(PREFIX)]
    found = named or [one for one in entries() if all(word in f"{one.name} {one.sentence}".lower() for word in words)]
    if not found:
        names = [*(one.name for one in entries()), *(PREFIX + name for name in dataset_names())]
        raise ConfigError(f"no task contains {' and '.join(words)}.{did_you_mean(words[0], names)} See streamrl tasks.")
    shown: list[str] = []
    for one in found:
        shown += [one.name, f"    {one.sentence}", f"    options: {one.options}"]
    return shown


def main(words: list[str]) -> int:
    """Print them; returns the exit status."""
    print("\n".join(lines([word.lower() for word in words])))
    return 0


def _registered(name: str) -> Entry:
    if name in NAMED:
        one = NAMED[name]
        options = ", ".join(f"{key}={value}" for key, value in one.options.items())
        return Entry(name, one.sentence, f"{options + ', and ' if options else ''}those of {PREFIX}{one.dataset}")
    factory = REGISTERED[name]
    target = getattr(factory, "func", factory)
    sentence = (inspect.getdoc(target) or "").partition("\n")[0]
    parameters = inspect.signature(factory).parameters.values()
    options = ", ".join(f"{p.name}={p.default}" for p in parameters if p.kind is p.KEYWORD_ONLY)
    return Entry(name, sentence, options)


def _dataset(name: str) -> Entry:
    """A data set of the package, which is imported for it. Raises TaskError if there is none of this name."""
    configuration = config_class(name.removeprefix(PREFIX))
    own = [p for p in inspect.signature(ReasoningTask).parameters.values() if p.kind is p.KEYWORD_ONLY]
    options = [f"{p.name}={p.default}" for p in own]
    defaults = configuration()
    names = [f.name for f in fields(configuration) if f.name not in ("seed", "size")]
    options += [f"{key}={getattr(defaults, key)}" for key in names]
    return Entry(name, "A data set of the reasoning_gym package.", ", ".join(options))


if __name__ == "__main__":
    sys.exit(status_of(partial(main, sys.argv[1:])))
