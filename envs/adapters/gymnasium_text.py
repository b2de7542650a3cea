"""Text environments with Gymnasium's methods, told by their form: nothing of Gymnasium is imported.

    reset(seed=None, options=None) -> (observation, info)
    step(action) -> (observation, reward, terminated, truncated, info)

Observations and actions are texts. Each observation is a message of the user, the answer to it is the action.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from typing import Any, Protocol

from envs.adapters.forms import parameters_of
from envs.reward_values import number
from streamrl.environment import ChatMessage, Record, Step
from streamrl.errors import TaskError, describe

NUM_TRAIN, NUM_TEST = 1_000_000, 200
LAST_SEED = 2**31 - 1


class TextEnv(Protocol):
    """The environment that is played; `reset` may lack one or both of its parameters."""

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[str, Any]:
        """Begin another episode."""
        ...

    def step(self, action: str) -> tuple[str, float, bool, bool, Any]:
        """Play an action."""
        ...


class GymnasiumEnv:
    """Plays one episode of such an environment.

    Args:
        env: made for this episode.
        name: class or id, for messages.
        message: an observation as the text of the user's message.
    """

    def __init__(self, env: TextEnv, name: str, message: Callable[[str], str] = str) -> None:
        self._env, self._name, self._message = env, name, message

    def reset(self, record: Record) -> Sequence[ChatMessage]:
        """`seed` is the record's, `options` the whole record."""
        given = {"seed": record.get("seed"), "options": dict(record)}
        takes = parameters_of(self._env.reset)
        takes_all = any(one.kind is one.VAR_KEYWORD for one in signature(self._env.reset).parameters.values())
        answer = self._env.reset(**{key: value for key, value in given.items() if takes_all or key in takes})
        if not isinstance(answer, tuple) or len(answer) != 2:
            raise TaskError(f"{self._name}.reset returned {answer!r:.80}: return (observation, info).")
        return [self._said(answer[0], "reset")]

    def step(self, action: str) -> Step:
        answer = self._env.step(action)
        if not isinstance(answer, tuple) or len(answer) != 5:
            raise TaskError(
                f"{self._name}.step returned {answer!r:.80}: return (observation, reward, terminated, truncated, info)."
            )
        observation, reward, terminated, truncated, _ = answer
        earned = number(reward, f"{self._name}.step, reward,")
        if terminated or truncated:
            return Step(earned, truncated=bool(truncated) and not terminated)
        return Step(earned, done=False, messages=[self._said(observation, "step")])

    @property
    def close(self) -> Callable[[], Any]:
        """Call the environment's own, if it has one."""
        return self._env.close  # type: ignore[attr-defined]

    def _said(self, observation: Any, method: str) -> ChatMessage:
        if not isinstance(observation, str):
            raise TaskError(
                f"{self._name}.{method} returned the observation {observation!r:.60} ({type(observation).__name__}): "
                "only texts can be shown to a language model; write it as one."
            )
        return ChatMessage("user", self._message(observation))


class SeededTask:
    """A task whose records are seeds: the environment makes its own prompts.

    Args:
        name: of the task.
        make_env: a fresh environment for each episode.
        num_train: seeds of the training split, from 0 upwards.
        num_test: seeds of the test split, from 2**31 - 2 downwards.
    """

    def __init__(
        self, name: str, make_env: Callable[[], Any], num_train: int = NUM_TRAIN, num_test: int = NUM_TEST
    ) -> None:
        self.name, self.env = name, make_env
        self._num = {"train": num_train, "test": num_test}

    def num_records(self, split: str) -> int:
        return self._num["train" if split == "train" else "test"]

    def record(self, split: str, index: int) -> Record:
        return {"seed": index if split == "train" else LAST_SEED - 1 - index}


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
    """The task of one environment of the GEM package (gem-llm), of which `gem.make`, `reset` and `step` are used.

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
