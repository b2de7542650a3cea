"""Names that files written for other projects import from there.

A file may say `from RL2.datasets import Sample, base_generate` although nothing of that project but the environment is
used. Where the project is not installed, these few names stand in for it while the file is loaded.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from envs.adapters import rl2, rl4llm

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
"""By module: the names that may be imported from it."""


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
