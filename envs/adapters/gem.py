"""`env.name=gem env.options.id=game:GuessTheNumber-v0-easy`: the environments of the GEM package (gem-llm).

Only `gem.make`, `reset(seed)` and `step(text)` of it are used. It is imported when such a task is made.
"""

from __future__ import annotations

import threading
from typing import Any

from envs.adapters.gymnasium_text import NUM_TEST, NUM_TRAIN, GymnasiumEnv, SeededTask
from streamrl.environment import ChatMessage, Record
from streamrl.errors import TaskError, describe

_RESET = threading.Lock()
"""GEM seeds the generators of the whole process and draws the game from them: one reset at a time."""


class GemEnv(GymnasiumEnv):
    """A game whose draws stand between its seed and the end of its reset."""

    def reset(self, record: Record) -> list[ChatMessage]:
        with _RESET:
            return list(super().reset(record))


def gem_task(
    id: str, template: str = "{observation}", num_train: int = NUM_TRAIN, num_test: int = NUM_TEST, **options: Any
) -> SeededTask:
    """The task of one environment of GEM.

    Args:
        id: e.g. game:GuessTheNumber-v0-easy.
        template: the user's message, with {observation} in it.
        num_train: seeds of the training split.
        num_test: seeds of the test split.
        options: of the environment, as of `gem.make`.
    Raises:
        TaskError: the package is missing, a template without {observation}, or GEM refuses the id or the options.
    """
    try:
        import gem
    except ImportError as error:
        raise TaskError(f"env.name=gem needs the package gem-llm ({error}): pip install gem-llm.") from error
    if "{observation}" not in template:
        raise TaskError(f"env.options.template={template!r:.60} must have {{observation}} where the game's text goes.")

    def make() -> GemEnv:
        return GemEnv(gem.make(id, **options), id, lambda text: template.replace("{observation}", text))

    try:
        with _RESET:
            make()
    except Exception as error:
        raise TaskError(f"env.options.id={id}: GEM cannot make it with options {options}: {describe(error)}") from error
    return SeededTask(id, make, num_train, num_test)
