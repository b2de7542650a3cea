"""Code and secrets of an actor's machine that settings name: a hub may use those that the actor's own words allow.

A hub sends its settings to all that join. What they name by `package.module:attribute` or by a file is imported, which
runs it; what they name as an environment variable is sent to an address. So each such name must stand in the actor's
own words too: as a setting, or in `actors.allow`. `streamrl launch` gives its actors the names of its own settings.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from streamrl.errors import ConfigError


def named_code(settings: Mapping[str, Any], *, verifiers: bool = False) -> Iterator[tuple[str, str]]:
    """(setting, name) of all that these plain settings name on an actor's machine.

    Args:
        verifiers: the settings are laid over others, which have a taskset of verifiers.
    """
    verifiers = verifiers or any(text.startswith("verifiers:") for text in _texts(settings))
    env, reward, actors = (_section(settings, name) for name in ("env", "reward", "actors"))
    if env.get("path") is not None:
        yield "env.path", str(env["path"])
    for way in ("agent", "agent_command"):
        if env.get(way) not in (None, "outside"):
            yield f"env.{way}", str(env[way])
    use = _section(env, "tool_use")
    for setting, names in (
        ("env.name", [env.get("name")]), ("env.tools", env.get("tools")), ("env.tool_use.parser", [use.get("parser")]),
        ("reward.type", [reward.get("type")]), ("reward.weights", reward.get("weights")),
        ("actors.engine", [actors.get("engine")]), ("actors.transports", actors.get("transports")),
    ):  # fmt: skip
        yield from ((setting, str(name)) for name in names or () if ":" in str(name))
    for service in ("judge", "model"):
        if (variable := _section(reward, service).get("api_key_env")) is not None:
            yield f"reward.{service}.api_key_env", str(variable)
    if (variable := _section(actors, "endpoint").get("admin_key_env")) is not None:
        yield "actors.endpoint.admin_key_env", str(variable)
    # vLLM imports some of its arguments, which and in what form depends on its version; choices are single words.
    # Options of a taskset of verifiers name its interpreter and functions; sections of tasks inherit the taskset.
    options = _section(env, "options") if verifiers else {}
    for setting, section in (("actors.vllm", _section(actors, "vllm")), ("env.options", options)):
        yield from ((setting, text) for text in _texts(section) if any(mark in text for mark in ".:/"))
    for prefix, tables in (("eval.datasets", _section(_section(settings, "eval"), "datasets")),
                           ("env.tasks", _section(env, "tasks"))):
        for name, one in tables.items():
            if isinstance(one, Mapping):
                named = named_code(one, verifiers=verifiers)
                yield from ((f"{prefix}.{name}.{setting}", code) for setting, code in named)


def refuse_references(settings: Any) -> None:
    """Raise ConfigError for a reference such as ${oc.env:HOME} in a hub's settings: it would read this machine's.

    The learner sends values, so honest settings hold none.
    """
    if reference := next((text for text in _texts(settings) if "${" in text), None):
        raise ConfigError(f"the hub's settings hold the reference {reference!r:.80}: leave ${{...}} out of them")


def check_allowed(settings: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raise ConfigError for the first name in a run's settings that this actor's own words do not allow."""
    names = [*_section(own, "actors").get("allow", ()), *(name for _, name in named_code(own))]
    for setting, name in named_code(settings):
        if name not in names and not (setting.endswith("env.path") and _same_file(name, names)):
            raise ConfigError(
                f"the hub asks for {setting}={name}, code or a secret of this machine that this actor may not use: if "
                f"you trust the hub, start the actor with {shlex.join(allow_words((name,)))}"
            )


def allow_words(names: Iterable[str]) -> list[str]:
    """The word that allows an actor these names; none if there are none."""
    unique = list(dict.fromkeys(names))
    return [f"actors.allow={json.dumps(unique, ensure_ascii=False)}"] if unique else []


def words_for_actors(settings: Mapping[str, Any]) -> list[str]:
    """The words that the actors of a run with these settings get on their command line."""
    return allow_words(name for _, name in named_code(settings))


def _same_file(path: str, allowed: list[str]) -> bool:
    return any(_resolved(path) == _resolved(one) for one in allowed if one.endswith(".py"))


def _resolved(path: str) -> Path:
    return Path(path).expanduser().resolve()


def _section(settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = settings.get(name)
    return found if isinstance(found, Mapping) else {}


def _texts(value: Any) -> Iterator[str]:
    """Every text in nested values, keys of mappings too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from _texts(key)
            yield from _texts(one)
    elif isinstance(value, list):
        for one in value:
            yield from _texts(one)
