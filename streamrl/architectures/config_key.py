"""A model's configuration as a key: what depends on the architecture alone is checked once in a process."""

from __future__ import annotations

from typing import Any


class ConfigKey:
    """Equal to another of the same class and text."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.name = type(config).__name__.removesuffix("Config")
        self._text = f"{self.name} {config.to_json_string(use_diff=False)}"

    def __hash__(self) -> int:
        return hash(self._text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ConfigKey) and self._text == other._text
