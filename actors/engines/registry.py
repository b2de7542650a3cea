"""Engines by name: one entry of `streamrl.config.rules.ENGINES` adds one, and `package.module:factory` is a user's own.

A factory gets an `EngineSpec` and returns an object that meets `actors.engines.base.Engine`; a class may give it as
`from_spec`. Only the engine that is chosen is imported.
"""

from __future__ import annotations

import copy
from dataclasses import replace

from actors.engines.base import Engine, EngineFactory, EngineSpec
from streamrl.config.rules import ENGINES
from streamrl.errors import ConfigError
from streamrl.extension import import_attribute, resolve

_PROTOCOL = ("name", "max_num_seqs", "installed", "generate", "install", "stats", "close")
_WIRE_CHARS = 32  # what HELLO can carry


def engine_factory(name: str) -> EngineFactory:
    """The factory that `actors.engine` names. Raises ConfigError with the nearest names."""
    found = resolve(name, ENGINES, setting="actors.engine")
    if name in ENGINES:
        found = import_attribute(found, setting="actors.engine")
    return getattr(found, "from_spec", found)


def build_engine(name: str, spec: EngineSpec) -> Engine:
    """The engine that `actors.engine` names; may take minutes. Raises ConfigError if there is none."""
    if name not in ENGINES:  # a user's own: what it sets on its tokenizer changes no prompt
        spec = replace(spec, tokenizer=copy.deepcopy(spec.tokenizer))
    engine = engine_factory(name)(spec)
    if missing := [attribute for attribute in _PROTOCOL if not hasattr(engine, attribute)]:
        raise ConfigError(
            f"actors.engine={name} returned {type(engine).__name__}, which has no {', '.join(missing)}: "
            "see actors/engines/base.py for what an engine must have"
        )
    return engine


def wire_name(name: str) -> str:
    """The engine's name in HELLO: a user's own engine goes by its attribute alone."""
    return name.rpartition(":")[2][:_WIRE_CHARS]
