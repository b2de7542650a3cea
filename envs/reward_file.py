"""A scoring function in a user's own file, without a class and without an import of ours.

The file defines one of these, plain or `async`:

    def reward_fn(messages, answer)                      by its parameters: the conversation with the completion last
    def reward(prompt, completion, **record)             prompt and completion, and every other field of the record
    def reward(prompts, completions, answer, **kwargs)   the batched form of TRL: lists in, a list out

or a class with `reward(record, completion)`, or one with `reset(record)` and `step(action)` for longer episodes. Beside
a function there may be a text `system_prompt`, for data.system_prompt=auto, and a function `target(record)`: a
completion that earns the full reward. Interfaces of other projects: `envs.adapters.forms`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from envs.adapters.forms import Form, only_form, own_names
from envs.adapters.gymnasium_text import GymnasiumEnv
from envs.adapters.reward_functions import DialogueEnv, RewardFunctions
from envs.adapters.rl2 import GenerateEnv
from envs.adapters.rl4llm import InteractionLoopEnv
from envs.adapters.rollouts import RolloutEnv, record_parameter
from envs.adapters.text_steps import SampleStepEnv, TextStepEnv
from envs.async_compat import alike, call, suited
from envs.data.shapes import RecordShape, tool_schemas
from envs.reward_values import entries_of_batch
from envs.task_file import refuse_unknown, run_file
from streamrl.environment import ChatMessage, DrivesGeneration, Env, Record
from streamrl.errors import TaskError

SAME_AS = {"response": "completion", "solution_str": "completion", "ground_truth": "answer", "gt_answer": "answer"}
"""Parameters under other names that libraries use, where the record has no such field."""
GIVEN = ("messages", "prompt", "completion", "answer", "record", "extra_info")

Answer = tuple[Record, str, Sequence[ChatMessage]]
"""A record, the model's answer to it, and the conversation before that."""
Named = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY


def reward_from_file(
    path: str, options: Mapping[str, Any], shape: RecordShape
) -> WrittenReward | RewardFunctions | EnvFactory:
    """The reward in a file, or what makes its environment. Raises TaskError: no such file, an error in it, none."""
    module, file = run_file(path)
    own = own_names(module)
    with_records = [one for one in ("task", "record") if inspect.isfunction(own.get(one))]
    with_records += [kind.__name__ for kind in own.values() if inspect.isclass(kind) and "record" in vars(kind)]
    if with_records:
        raise TaskError(
            f"{file.name} makes its own records ({', '.join(with_records)}) and data.path names others: leave one out."
        )
    return _served(only_form(module, file.name), module, options, shape)


def _served(
    form: Form, module: ModuleType, options: Mapping[str, Any], shape: RecordShape
) -> WrittenReward | RewardFunctions | EnvFactory:
    """Make the environment or the reward of the interface that the file follows."""
    file, first = (module.__file__ or "").rpartition("/")[2], form.found[0]
    match form.kind:
        case "environment":
            return EnvFactory(lambda: _made(first, options, file))
        case "gymnasium":
            return EnvFactory(lambda: GymnasiumEnv(_made(first, options, file), first.__name__))
        case "step" | "env_step":
            refuse_unknown(options, [], file)
            kind = suited(TextStepEnv if form.kind == "step" else SampleStepEnv, first)
            return EnvFactory(lambda: kind(first, f"{file}: {form.kind}", shape))
        case "rollout" | "generate" | "loop":
            return EnvFactory(_driver(form, module, options, shape, file))
        case "dialogue":
            reward, interact = alike(written_reward(first, shape, options, f"{file}: reward_fn"), form.found[1])
            talk = suited(DialogueEnv, reward, interact)
            tools = tool_schemas({"tools": getattr(module, "TOOLS", getattr(module, "TOOL", None))})
            return EnvFactory(lambda: talk(reward, interact, file, shape, tools), needs_turns=True)
        case "rewards":
            made = [_made(one, options, file) if inspect.isclass(one) else one for one in form.found]
            return RewardFunctions(made, getattr(module, "reward_transform_fn", None), file, shape)
        case "reward class":
            return written_reward(_made(first, options, file).reward, shape, {}, f"{file}: {first.__name__}.reward")
    found = written_reward(first, shape, options, f"{file}: {getattr(first, '__name__', 'reward')}")
    found.system_prompt = getattr(module, "system_prompt", None)
    if not isinstance(found.system_prompt, str | None):
        raise TaskError(f"{file}: system_prompt must be a text, got {found.system_prompt!r:.60}.")
    if inspect.isfunction(write := getattr(module, "target", None)):
        found.target = lambda record, answer: write(record)
    return found


def _driver(
    form: Form, module: ModuleType, options: Mapping[str, Any], shape: RecordShape, file: str
) -> Callable[[], DrivesGeneration]:
    """Return a factory of environments with an interaction loop of their own."""
    first = form.found[0]
    if form.kind == "loop":
        if len(form.found) == 1:
            raise TaskError(
                f"{file} defines {form.what} and no reward: add a class with __call__(messages, ground_truth, "
                "**kwargs), it scores the conversation that the loop leaves."
            )
        rewards = _served(form.found[1], module, {}, shape)
        assert isinstance(rewards, RewardFunctions)
        return lambda: InteractionLoopEnv(first, options, rewards, f"{file}: {first.__name__}", shape)
    if inspect.isclass(first):
        return lambda: RolloutEnv(_made(first, options, file).rollout, f"{file}: {first.__name__}.rollout", shape)
    refuse_unknown(options, [], file)
    if form.kind == "generate":
        return lambda: GenerateEnv(first, f"{file}: generate", shape)
    record_parameter(first, f"{file}: rollout")
    return lambda: RolloutEnv(first, f"{file}: rollout", shape)


def written_reward(
    function: Callable[..., Any], shape: RecordShape, options: Mapping[str, Any], name: str
) -> WrittenReward:
    """A user's function as a reward: it gets what its parameters ask for; `options` are parameters, too."""
    return suited(WrittenReward, function)(function, shape, options, name)


def reward_from_module(shape: RecordShape, found: Any, name: str) -> WrittenReward | None:
    """The reward of a function that asks for an answer or what belongs to one; None for anything else."""
    asks = {*GIVEN, *SAME_AS, "prompts", "completions"}
    if inspect.isfunction(found) and asks & inspect.signature(found).parameters.keys():
        return written_reward(found, shape, {}, name)
    return None


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
        self.batched = "completions" in self._known
        if any(p.kind is p.POSITIONAL_ONLY for p in parameters):
            raise TaskError(f"{name} has parameters before a `/`: they are passed by name, so leave the `/` out.")
        if not self._takes_any:
            refuse_unknown(options, self._known, name)

    async def __call__(self, record: Record, completion: str, prompt: Sequence[ChatMessage]) -> Any:
        value = await call(self._function, **self._arguments((record, completion, prompt)))
        return entries_of_batch(value, 1, self.name)[0] if self.batched else value

    async def score_group(self, answers: Sequence[Answer]) -> Sequence[Any]:
        """The batched function's entry for each answer. Raises TaskError for another number of entries."""
        return entries_of_batch(await call(self._function, **self._arguments(*answers)), len(answers), self.name)

    def _arguments(self, *answers: Answer) -> dict[str, Any]:
        record = answers[0][0]
        values = [self._values(*answer) for answer in answers]
        given = values[0]
        if self.batched:
            given = {
                f"{name}s" if name in ("prompt", "completion") else name: [one[name] for one in values]
                for name in given
            }
        given |= self._options
        for name, same in SAME_AS.items():
            if name not in given and same in given:
                given[name] = given[same]
        missing = [name for name in self._needed if name not in given]
        if missing:
            fields = ", ".join(key for key in record if key not in GIVEN)
            raise TaskError(
                f"{self.name} asks for {' and '.join(missing)}, which this record does not have: it may ask for "
                f"{', '.join(GIVEN)}{' and the fields ' + fields if fields else ''}. Where only some records have it, "
                f"give it a default: {missing[0]}=None."
            )
        if self._takes_any:
            return {name: value for name, value in given.items() if name in self._known or self._is_open(name, record)}
        return {name: given[name] for name in self._known if name in given}

    def _values(self, record: Record, completion: str, prompt: Sequence[ChatMessage]) -> dict[str, Any]:
        """Everything that a function may ask for: the record's fields, and ours."""
        opening = [message.as_dict() for message in prompt]
        completion = str(completion)  # what the model wrote, and no more
        reply = {"role": "assistant", "content": completion}
        field = self._shape.prompt_field(record)
        is_text = len(opening) == 1 and isinstance(self._shape.prompt(record), str)
        others = {key: value for key, value in record.items() if key not in (field, "extra_info")}
        extra = record.get("extra_info")
        return {
            **record,
            "messages": [*opening, reply],
            "prompt": prompt[0].content if is_text else opening,
            "completion": [reply] if self.batched and not is_text else completion,
            "answer": self._shape.answer(record),
            "record": dict(record),
            "extra_info": {**others, **(extra if isinstance(extra, Mapping) else {})},
        }

    def _is_open(self, name: str, record: Record) -> bool:
        """Whether `**kwargs` gets it: fields of the record and options, not our other names for the same."""
        return name in record or name in self._options or name in ("answer", "prompts")


@dataclass(frozen=True)
class EnvFactory:
    """Makes an environment for each episode.

    Args:
        make: makes one.
        needs_turns: it is of no use with env.max_turns=1.
    """

    make: Callable[[], Env | DrivesGeneration]
    needs_turns: bool = False

    def __call__(self) -> Env | DrivesGeneration:
        return self.make()


def _made(kind: type, options: Mapping[str, Any], file: str) -> Any:
    known = [key for key in inspect.signature(kind).parameters]
    refuse_unknown(options, known, f"{file}: {kind.__name__}")
    return kind(**options)

