"""Engines by name: one entry of ENGINES adds one, and `actors.engine=package.module:factory` takes a user's own.

A factory gets an `EngineSpec` and returns an object that meets `actors.engines.base.Engine`.
"""

from __future__ import annotations

from actors.engines.base import Engine, EngineFactory, EngineSpec
from actors.engines.native.engine import NativeEngine
from actors.engines.scripted import ScriptedEngine
from actors.engines.vllm.engine import VllmEngine
from streamrl.errors import ConfigError
from streamrl.extension import resolve

ENGINES: dict[str, EngineFactory] = {
    "native": NativeEngine.from_spec,
    "vllm": VllmEngine,
    "scripted": ScriptedEngine.from_spec,
}

_PROTOCOL = ("name", "max_num_seqs", "installed", "generate", "install", "stats", "close")
_WIRE_CHARS = 32  # what HELLO can carry


def engine_factory(name: str) -> EngineFactory:
    """The factory that `actors.engine` names. Raises ConfigError with the nearest names."""
    return resolve(name, ENGINES, setting="actors.engine")


def build_engine(name: str, spec: EngineSpec) -> Engine:
    """The engine that `actors.engine` names; may take minutes. Raises ConfigError if there is none."""
    engine = engine_factory(name)(spec)
    if missing := [attribute for attribute in _PROTOCOL if not hasattr(engine, attribute)]:
        raise ConfigError(
            f"actors.engine={name} returned {type(engine).__name__}, which has no {', '.join(missing)}: "
            "see actors/engines/base.py for what an engine must have"
        )
    return engine


def wire_name(name: str) -> str:
    """What HELLO calls the engine: a user's own by its attribute alone."""
    return name.rpartition(":")[2][:_WIRE_CHARS]
