"""A scoring function in a user's own file, without a class and without an import of ours.

The file defines one of these, plain or `async`:

    def reward_fn(messages, answer)                      by its parameters: the conversation with the completion last
    def reward(prompt, completion, **record)             prompt and completion, and every other field of the record
    def reward(prompts, completions, answer, **kwargs)   the batched form of TRL: lists in, a list out

or a class with `reward(record, completion)`, or one with `reset(record)` and `step(action)` for longer episodes. Beside
a function there may be a text `system_prompt`, for data.system_prompt=auto, and a function `target(record)`: a
completion that earns the full reward.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from envs.data.shapes import RecordShape
from envs.reward_values import only_of_batch
from envs.task_file import REWARD_NAMES, refuse_unknown, run_file
from streamrl.environment import ChatMessage, Env, Record
from streamrl.errors import TaskError

SAME_AS = {"response": "completion", "solution_str": "completion", "ground_truth": "answer", "gt_answer": "answer"}
"""Parameters under other names that libraries use, where the record has no such field."""
GIVEN = ("messages", "prompt", "completion", "answer", "record", "extra_info")
FORMS = (
    "Define a function reward_fn(messages, answer) or reward(prompt, completion, **record), or a class with "
    "reset(record) and step(action)."
)

Named = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY


def reward_from_file(
    path: str, options: Mapping[str, Any], shape: RecordShape
) -> WrittenReward | EnvFactory:
    """The reward in a file, or what makes its environment. Raises TaskError: no such file, an error in it, none."""
    module, file = run_file(path)
    found = {name: getattr(module, name) for name in REWARD_NAMES if callable(getattr(module, name, None))}
    own = {key: value for key, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__}
    classes = [value for value in own.values() if inspect.isclass(value)]
    players = [kind for kind in classes if _has(kind, "reset", "step")]
    scorers = [kind for kind in classes if _has(kind, "reward") and kind not in players]
    with_records = [one for one in ("task", "record") if inspect.isfunction(own.get(one))]
    with_records += [kind.__name__ for kind in classes if "record" in vars(kind)]
    if with_records:
        raise TaskError(
            f"{file.name} makes its own records ({', '.join(with_records)}) and data.path names others: leave one out."
        )
    candidates = [*found.values(), *players, *scorers]
    if len(candidates) != 1:
        raise TaskError(_no_single_reward(file, module, candidates))
    chosen = candidates[0]
    if chosen in players:
        return EnvFactory(chosen, options, file.name)
    if chosen in scorers:
        scorer = _made(chosen, options, file.name)
        return written_reward(scorer.reward, shape, {}, f"{file.name}: {chosen.__name__}.reward")
    reward = written_reward(chosen, shape, options, f"{file.name}: {getattr(chosen, '__name__', 'reward')}")
    reward.system_prompt = getattr(module, "system_prompt", None)
    if not isinstance(reward.system_prompt, str | None):
        raise TaskError(f"{file.name}: system_prompt must be a text, got {reward.system_prompt!r:.60}.")
    if inspect.isfunction(write := getattr(module, "target", None)):
        reward.target = lambda record, answer: write(record)
    return reward


def written_reward(
    function: Callable[..., Any], shape: RecordShape, options: Mapping[str, Any], name: str
) -> WrittenReward:
    """A user's function as a reward: it gets what its parameters ask for; `options` are parameters, too."""
    kind = AsyncWrittenReward if inspect.iscoroutinefunction(function) else WrittenReward
    return kind(function, shape, options, name)


class WrittenReward:
    """Calls a user's function with what it asks for by name."""

    def __init__(
        self, function: Callable[..., Any], shape: RecordShape, options: Mapping[str, Any], name: str
    ) -> None:
        self.name = name
        self.system_prompt: str | None = None
        self.target: Callable[[Record, Any], str] | None = None
        self._function, self._shape, self._options = function, shape, dict(options)
        parameters = list(inspect.signature(function).parameters.values())
        self._takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self._needed = [p.name for p in parameters if p.kind in Named and p.default is p.empty]
        self._known = [p.name for p in parameters if p.kind in Named]
        self._batched = "completions" in self._known
        if any(p.kind is p.POSITIONAL_ONLY for p in parameters):
            raise TaskError(f"{name} has parameters before a `/`: they are passed by name, so leave the `/` out.")
        if not self._takes_any:
            refuse_unknown(options, self._known, name)

    def __call__(self, record: Record, completion: str, prompt: Sequence[ChatMessage]) -> Any:
        return self._result(self._function(**self._arguments(record, completion, prompt)))

    def _result(self, value: Any) -> Any:
        return only_of_batch(value, self.name) if self._batched else value

    def _arguments(self, record: Record, completion: str, prompt: Sequence[ChatMessage]) -> dict[str, Any]:
        given = self._values(record, completion, prompt)
        if self._batched:
            given = {f"{name}s" if name in ("prompt", "completion") else name: [value] for name, value in given.items()}
        given |= self._options
        for name, same in SAME_AS.items():
            if name not in given and same in given:
                given[name] = given[same]
        missing = [name for name in self._needed if name not in given]
        if missing:
            fields = ", ".join(key for key in record if key not in GIVEN)
            raise TaskError(
                f"{self.name} asks for {' and '.join(missing)}, which this record does not have: it may ask for "
                f"{', '.join(GIVEN)}{' and the fields ' + fields if fields else ''}."
            )
        if self._takes_any:
            return {name: value for name, value in given.items() if name in self._known or self._is_open(name, record)}
        return {name: given[name] for name in self._known if name in given}

    def _values(self, record: Record, completion: str, prompt: Sequence[ChatMessage]) -> dict[str, Any]:
        """Everything that a function may ask for: the record's fields, and ours."""
        opening = [{"role": message.role, "content": message.content} for message in prompt]
        reply = {"role": "assistant", "content": completion}
        field = self._shape.prompt_field(record)
        is_text = len(opening) == 1 and isinstance(self._shape.prompt(record), str)
        others = {key: value for key, value in record.items() if key not in (field, "extra_info")}
        extra = record.get("extra_info")
        return {
            **record,
            "messages": [*opening, reply],
            "prompt": prompt[0].content if is_text else opening,
            "completion": [reply] if self._batched and not is_text else completion,
            "answer": self._shape.answer(record),
            "record": dict(record),
            "extra_info": {**others, **(extra if isinstance(extra, Mapping) else {})},
        }

    def _is_open(self, name: str, record: Record) -> bool:
        """Whether `**kwargs` gets it: fields of the record and options, not our other names for the same."""
        return name in record or name in self._options or name in ("answer", "prompts")


class AsyncWrittenReward(WrittenReward):
    """The same for a function with `async def`."""

    async def __call__(self, record: Record, completion: str, prompt: Sequence[ChatMessage]) -> Any:
        return self._result(await self._function(**self._arguments(record, completion, prompt)))


class EnvFactory:
    """Makes the environments of a user's class, with the options that it takes."""

    def __init__(self, kind: type, options: Mapping[str, Any], file: str) -> None:
        self._kind, self._options, self._file = kind, options, file

    def __call__(self) -> Env:
        return _made(self._kind, self._options, self._file)


def _has(kind: type, *methods: str) -> bool:
    return all(callable(getattr(kind, method, None)) for method in methods)


def _made(kind: type, options: Mapping[str, Any], file: str) -> Any:
    known = [key for key in inspect.signature(kind).parameters]
    refuse_unknown(options, known, f"{file}: {kind.__name__}")
    return kind(**options)


def _no_single_reward(file: Path, module: ModuleType, candidates: Sequence[Any]) -> str:
    if candidates:
        names = ", ".join(one.__name__ for one in candidates)
        return f"{file.name} defines more than one reward: {names}. Leave one of them, or name the others differently."
    own = sorted(
        key for key, value in vars(module).items()
        if not key.startswith("_") and getattr(value, "__module__", None) == module.__name__
    )
    return f"{file.name} defines no reward. Found: {', '.join(own) or 'nothing'}. {FORMS}"
