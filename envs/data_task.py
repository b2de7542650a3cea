"""Records from `data.path` and a way to score them are a task."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import PurePath
from typing import Any, Protocol

from envs.agents.task import Unscored
from envs.async_compat import call, suited
from envs.data.dataset import Dataset, open_dataset, paths_of
from envs.data.shapes import RecordShape, tool_schemas
from envs.reward_file import EnvFactory, reward_from_file, reward_from_module
from envs.reward_values import as_step
from envs.rewards.registry import make_reward
from streamrl.config.schema import DataConfig, EnvConfig, RewardConfig
from streamrl.environment import ChatMessage, Env, Record, RewardFunction, Step
from streamrl.errors import TaskError


class TaskSettings(Protocol):
    """The sections of a config that make a task."""

    env: EnvConfig
    data: DataConfig
    reward: RewardConfig


class DataTask:
    """A task over data files, opened when a record is first asked for: an actor gets its records with the leases.

    Args:
        settings: `data.*`; its path is set.
        shape: reads a record's prompt and answer.
        make_env: a fresh environment for each episode.
        reward: what it scores with, if it does; its `target` says what a right completion looks like.
    """

    def __init__(
        self, settings: DataConfig, shape: RecordShape, make_env: Callable[[], Env],
        reward: RewardFunction | None = None,
    ) -> None:
        self.name = "+".join(PurePath(path).name for path in paths_of(settings.path))
        self._settings, self._shape, self._make_env, self._reward = settings, shape, make_env, reward
        self.stop: Sequence[str] = getattr(reward, "stop", ())
        """Texts that end an answer, unless rollout.*.sampling.stop says others."""
        self.ignore_eos: bool = getattr(reward, "ignore_eos", False)
        """Whether nothing else ends it, unless rollout.*.sampling says so."""
        for optional in ("set_up", "tear_down"):
            if hasattr(reward, optional):
                setattr(self, optional, getattr(reward, optional))

    @cached_property
    def dataset(self) -> Dataset:
        return open_dataset(self._settings)

    @property
    def system_prompt(self) -> str | None:
        """The system prompt of data.system_prompt=auto: it tells the model which form its answer must have."""
        return getattr(self._reward, "system_prompt", None)

    def num_records(self, split: str) -> int:
        return len(self.dataset.train if split == "train" else self.dataset.test)

    def record(self, split: str, index: int) -> Record:
        return (self.dataset.train if split == "train" else self.dataset.test)[index]

    def env(self) -> Env:
        return self._make_env()

    def answer(self, record: Record) -> Any:
        """The record's own answer as it stands there; None if it has none."""
        return self._shape.answer(record)

    def target(self, record: Record) -> str | None:
        """The record's answer in the form that the reward looks for; None if it has none."""
        answer = self._shape.answer(record)
        if answer is None or answer == "":
            return None
        write = getattr(self._reward, "target", None)
        return str(answer) if write is None else write(record, answer)

    def answer_forms(self, record: Record) -> Sequence[str]:
        """Completions of which one should be paid, that of `target` first; none where the reward reads no answer."""
        target = self.target(record) if getattr(self._reward, "reads_answer", self._reward is not None) else None
        if target is None or getattr(self._reward, "target", None) is not None:
            return [] if target is None else [target]
        return [target, f"\\boxed{{{target}}}", f"<think> </think><answer> {target} </answer>"]

    def is_no_answer(self, record: Record) -> bool:
        """Whether the reward compares mathematics, and finds a whole text where the answer should be."""
        looks = getattr(self._reward, "is_no_answer", None)
        return looks is not None and looks(record)


def task_from_data(settings: TaskSettings) -> DataTask:
    """The task that data.path, and env.path, reward.type or env.name make together. Raises TaskError."""
    env, data, reward = settings.env, settings.data, settings.reward
    shape = RecordShape(data.prompt_key, data.answer_key)
    named = reward.type or ", ".join(reward.weights)
    if env.path is None and not named:
        if env.agent is not None or env.agent_command is not None:
            return DataTask(data, shape, lambda: Unscored(shape))
        raise TaskError(
            f"data.path={data.path} holds questions, but nothing says how answers are scored: give env.path=reward.py "
            "with a function reward_fn(messages, answer), or reward.type=exact."
        )
    if env.path is not None and named:
        raise TaskError(f"env.path={env.path} and the reward {named} both score answers: leave one of them out.")
    if env.path is None:
        function = make_reward(reward, shape, data.system_prompt, partial(reward_from_module, shape))
        return DataTask(data, shape, player(function, f"reward {named}", shape), function)
    found = reward_from_file(env.path, dict(env.options), shape)
    if isinstance(found, EnvFactory):
        if found.needs_turns and env.max_turns == 1:
            raise TaskError(
                f"{PurePath(env.path).name} defines interact(messages), which is never called with env.max_turns=1: "
                "set env.max_turns=2 or more."
            )
        return DataTask(data, shape, found)
    return DataTask(data, shape, player(found, found.name, shape), found)


def player(reward: RewardFunction, name: str, shape: RecordShape) -> Callable[[], Env]:
    """Return a factory of environments of one question and one answer."""
    kind = suited(BatchedAnswerEnv if getattr(reward, "batched", False) else AnswerEnv, reward)
    return lambda: kind(reward, name, shape)


class AnswerEnv:
    """An episode of a question, its answer and the reward; async rewards run side by side on the actor's loop."""

    def __init__(self, reward: Callable[..., Any], name: str, shape: RecordShape) -> None:
        self._reward, self._name, self._shape = reward, name, shape
        self._record: Record = {}
        self._prompt: Sequence[ChatMessage] = ()
        self.tools: Sequence[Mapping[str, Any]] = ()
        self.may_block = bool(getattr(reward, "may_block", False))
        self.hears_thoughts = True

    def reset(self, record: Record) -> Sequence[ChatMessage]:
        self._record, self._prompt, self.tools = record, self._shape.messages(record), tool_schemas(record)
        return self._prompt

    async def step(self, action: str) -> Step:
        return as_step(await call(self._reward, self._record, action, self._prompt), self._name)


class BatchedAnswerEnv(AnswerEnv):
    """An `AnswerEnv` whose reward takes lists: called once for the answers of a group that one actor generates."""

    async def step_group(self, turns: Sequence[tuple[BatchedAnswerEnv, str]]) -> Sequence[Step | Exception]:
        """A bad value costs its own member only."""
        answers = [env.answered(action) for env, action in turns]
        return [self._step_or_error(value) for value in await call(self._reward.score_group, answers)]

    def answered(self, action: str) -> tuple[Record, str, Sequence[ChatMessage]]:
        """The reward's arguments for this answer."""
        return self._record, action, self._prompt

    def _step_or_error(self, value: Any) -> Step | Exception:
        try:
            return as_step(value, self._name)
        except TaskError as error:
            return error
