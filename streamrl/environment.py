"""The interfaces that a user implements: a `Task` gives the prompts, an `Env` plays one episode of one prompt.

The short form is `SingleTurnTask`: two methods, `record` and `reward`. Several turns, tools or state take an `Env` of
one's own, returned by `Task.env`.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from streamrl.errors import TaskError

MAX_REWARD = 1e6
"""A reward of a larger magnitude is refused as a mistake: it would drown every other of its batch."""

Record = Mapping[str, Any]
"""One prompt of a task: JSON-serializable, keys are the task's own."""


ROLES = ("system", "user", "assistant", "tool", "developer")
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Names under which a message holds its author's thoughts."""
SYSTEM_ROLES = ("system", "developer")
"""The second is the newer name of the first."""


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a conversation.

    Args:
        role: one of ROLES.
        content: its text.
        fields: what else the chat template gets, such as tool_calls, tool_call_id, name and reasoning_content. A
            `content` of None among them is for templates that tell it from an empty text.
    """

    role: str
    content: str
    fields: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def as_dict(self) -> dict[str, Any]:
        """The whole message, as chat templates and rewards read it."""
        return {"role": self.role, "content": self.content, **self.fields}

    @classmethod
    def of(cls, message: Any) -> ChatMessage:
        """A message of this form. Raises TaskError saying what is wrong with it, after the name of where it stands."""
        if not isinstance(message, Mapping) or "role" not in message:
            raise TaskError(f'is {_shown(message)}: give {{"role": ..., "content": ...}}')
        role, content = message["role"], message.get("content")
        fields = {key: value for key, value in message.items() if key not in ("role", "content") and value is not None}
        if role not in ROLES:
            raise TaskError(f"has the role {_shown(role)}: allowed are {', '.join(ROLES)}")
        _check_calls(fields.get("tool_calls", ()))
        if not fields.get("tool_calls", True):  # templates ask whether there are calls by whether the field is there
            del fields["tool_calls"]
        if content is None and fields.get("tool_calls"):
            return cls(role, "", {"content": None, **fields})
        if content is None and not any(fields.get(name) for name in THOUGHTS):
            raise TaskError(f'is {_shown(message)}: give {{"role": ..., "content": ...}} with a text, or tool_calls')
        return cls(role, "" if content is None else _text_of(content), fields)


def _text_of(content: Any) -> str:
    """The text of a content, which may be a list of parts."""
    if isinstance(content, str):
        return content
    parts = [content] if isinstance(content, Mapping) else content
    if not isinstance(parts, list | tuple):
        raise TaskError(f"has {_shown(content)} as its content: give a text")
    texts = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    for part, text in zip(parts, texts, strict=True):
        if not isinstance(text, str) or (isinstance(part, Mapping) and part.get("type", "text") != "text"):
            raise TaskError(f"has {_shown(part)} in its content: text only, images and audio are not supported")
    return "".join(texts)


def _check_calls(calls: Any) -> None:
    """Raise TaskError unless these are calls of tools: a name each, and arguments as an object or as its JSON."""
    if not isinstance(calls, list | tuple):
        raise TaskError(f"has {_shown(calls)} as its tool_calls: give a list")
    for call in calls:
        inner = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str):
            raise TaskError(f'has {_shown(call)} in its tool_calls: give {{"function": {{"name": ..., ...}}}}')
        arguments = inner.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except (ValueError, RecursionError):
                arguments = ()
        if arguments is not None and not isinstance(arguments, Mapping):
            raise TaskError(
                f"has {_shown(inner['arguments'])} as the arguments of its call of {inner['name']!r:.60}: give an "
                "object, or its JSON as a text"
            )


class InputText(str):
    """The model's whole input as a text: `Env.reset` may return it in place of messages; it gets no chat template."""


class Continued(str):
    """A model's turn that continues a thought: its prompt ended with `<think>`. Environments with an attribute
    `hears_thoughts = True` get it in place of a plain text."""


@dataclass(frozen=True, slots=True)
class Step:
    """The result of one action.

    Args:
        reward: feeds the advantage; task units.
        score: only logged and used for evaluation; None is the reward.
        done: True ends the episode; False continues it with `messages`, the environment's answer.
        parts: named components of the reward, logged as `reward/<name>`.
        text: the environment's answer as text instead of `messages`: it follows the model's words as it is, without the
            chat template, and is encoded alone.
        truncated: with `done`, the environment ended the episode at a limit of its own.
        agents: with `done`, the rewards of the agents that their calls named, each for its agent's last turn; they add
            to `reward`.
        context: the model's whole next input in place of `messages`, as messages or an `InputText`. Where it does not
            begin with all that was read and said, the history is rewritten: another sequence of the trajectory begins.
    """

    reward: float
    done: bool = True
    score: float | None = None
    messages: Sequence[ChatMessage] = ()
    parts: Mapping[str, float] = field(default_factory=dict)
    text: str | None = None
    truncated: bool = False
    context: Sequence[ChatMessage] | InputText | None = None
    agents: Mapping[str, float] = field(default_factory=dict)


@runtime_checkable
class Env(Protocol):
    """One episode at a time. Methods may be plain or `async`; plain ones run in a thread pool with a time limit.

    Those that return within a millisecond are called on the actor's event loop instead, unless it has an attribute
    `may_block = True`: an environment, a `SingleTurnTask` or a reward that may wait for a network or another process.
    """

    def reset(self, record: Record) -> Sequence[ChatMessage] | Awaitable[Sequence[ChatMessage]]:
        """Start an episode of this prompt; returns the first messages, or an `InputText`."""

    def step(self, action: str) -> Step | Awaitable[Step]:
        """Play the model's `action`."""


@runtime_checkable
class Task(Protocol):
    """A set of prompts and a way to play them."""

    name: str

    def num_records(self, split: str) -> int:
        """The number of prompts of `split` ("train" or "test")."""

    def record(self, split: str, index: int) -> Record:
        """Prompt `index` of the split: a pure function of its arguments, JSON-serializable."""

    def env(self) -> Env:
        """A fresh environment; one is made for each episode."""


@runtime_checkable
class HasTarget(Protocol):
    """Optional on a task that knows the right answers; a supervised warm start needs it."""

    def target(self, record: Record) -> str | None:
        """A completion of this record that earns the full reward; None if none is known."""


@runtime_checkable
class KnowsAnswer(Protocol):
    """Optional on a task whose records hold right answers, as those of a data file do."""

    def answer(self, record: Record) -> Any:
        """The record's own answer as it stands there; None if it has none."""

    def answer_forms(self, record: Record) -> Sequence[str]:
        """Completions of which one should be paid, that of `target` first; none where the reward reads no answer."""


@runtime_checkable
class HasSetUp(Protocol):
    """Optional on a task that needs what takes long to start, as a model; the check at the start scores no answer."""

    def set_up(self) -> None:
        """Called once by each actor before its first episode, in a thread and without a time limit."""

    def tear_down(self) -> None:
        """Called when the actor ends, if it has the time."""


@runtime_checkable
class HasTools(Protocol):
    """Optional on an environment whose conversation offers tools: read after `reset`, shown by the chat template."""

    tools: Sequence[Mapping[str, Any]]


@runtime_checkable
class HasTargetTurns(Protocol):
    """Optional on a task of several turns: how an episode goes that earns the full reward; for a warm start."""

    def target_turns(self, record: Record) -> Sequence[str]:
        """The texts after the prompt: the model's, the environment's, the model's, ...; the last is the model's."""


@runtime_checkable
class HasLastStep(Protocol):
    """Optional on an environment that plays the last turn that env.max_turns allows differently."""

    def last_step(self, action: str) -> Step | Awaitable[Step]:
        """Play that turn in place of `step`; `done` says whether the episode was over without the limit."""


@runtime_checkable
class HasCutStep(Protocol):
    """Optional on an environment that scores an episode at its end, however it ends."""

    def cut_step(self, action: str) -> Step | Awaitable[Step]:
        """After `step` with the same action, whose answer left no room for a turn: this step stands in its place."""


@runtime_checkable
class HasClose(Protocol):
    """Optional on an environment that holds what must be given back, as a container or a connection."""

    def close(self) -> None | Awaitable[None]:
        """Called once when the episode is over, however it ended: also after a failed `reset`, or while a hung step
        still runs."""


@runtime_checkable
class HasGroupStep(Protocol):
    """Optional on an environment of one turn that scores the answers of a group together."""

    def step_group(self, turns: Sequence[tuple[Any, str]]) -> Sequence[Any] | Awaitable[Sequence[Any]]:
        """Step all members of a group that one actor plays, in place of `step`: a `Step` or an Exception for each.

        `turns` are their environments and answers, this one's included. Members that failed before are not there.
        """


@runtime_checkable
class ReadsInputText(Protocol):
    """Optional on an environment that works on the model's input as text."""

    def set_input_text(self, text: str) -> None:
        """Called after `reset` with the text that the model reads: the first messages through the chat template."""


@dataclass(frozen=True, slots=True)
class Generated:
    """The model's answer to one call of `GenerationClient.generate`.

    Args:
        text: without special tokens.
        token_ids, logprobs: as sampled; natural logs under the distribution that was sampled from.
        finish: "stop", or "length" if the limit of tokens ended it.
        prompt_ids: what the model read.
    """

    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    finish: str
    prompt_ids: Sequence[int] = ()


@dataclass(slots=True)
class AgentSession:
    """The address of an episode for a program that calls its model over HTTP, as `openai.OpenAI` takes it.

    Attributes:
        answer: the model's last turn as text.
        reward: what the program posted to `base_url`/reward; None if nothing.
        full: why a call found no turn or no room left, once the session is over; "" if none did.
    """

    base_url: str
    api_key: str
    answer: str = ""
    reward: Any = None
    full: str = ""

    async def offered(self, record: Record) -> None:
        """Let a program outside play this episode; returns at its end. Raises TaskError if it says that it failed."""
        raise NotImplementedError


class GenerationClient(Protocol):
    """The client that an interaction loop generates with; `actors.trajectory.client.Client` implements it.

    Attributes:
        tokenizer: a copy of the model's, of transformers: what a loop sets on it changes no prompt.
        sampling: how the run samples: temperature, top_p, top_k, min_p, max_new_tokens, stop.
        chat: `chat.completions.create(messages=..., tools=...)`, as programs call model servers.
        num_turns_left: calls that `env.max_turns` still allows.
        num_tokens_left: tokens that the trajectory may still have, those that are only read included.
    """

    tokenizer: Any
    chat: Any

    @property
    def sampling(self) -> Mapping[str, Any]: ...

    @property
    def num_turns_left(self) -> int: ...

    @property
    def num_tokens_left(self) -> int: ...

    async def generate(
        self, prompt: str | Sequence[Any], *, tools: Sequence[Mapping[str, Any]] = (),
        max_new_tokens: int | None = None, stop: str | Sequence[str] | None = None, train: bool = True,
        agent: str = "", **sampling: float | None,
    ) -> Generated:
        """The model's next turn. Where the input begins with all that was read and said, the same sequence goes on.

        Args:
            prompt: messages (dicts or `ChatMessage`), a text without a chat template, or token ids.
            tools: JSON schemas for the chat template.
            max_new_tokens: at most; never more than the run's.
            stop: texts that end the turn, in place of the run's.
            agent: whose turn it is, where several play: a sequence belongs to one of them.
            train: False for a call that is not part of the trajectory; only then may the sampling differ.
            sampling: temperature, top_p, top_k, min_p.
        Raises:
            EpisodeFullError: no turn or no room is left.
            TaskError: an input that is none, or a sampling that is not the run's.
        """

    def reward(self, value: float, turn: int = -1) -> None:
        """Reward a turn, by default the last one, in addition to the reward that the rollout returns at its end."""

    def waiting(self) -> AbstractContextManager[None]:
        """Around a wait that `env.step_timeout_s` does not count, as that for a free place of a server."""

    def note_progress(self) -> None:
        """The episode is alive although nothing is generated; one that says nothing for long is played again."""

    def session(self) -> AbstractAsyncContextManager[AgentSession]:
        """An address and a key with which a program calls `chat` over HTTP, until the block ends."""


@runtime_checkable
class DrivesGeneration(Protocol):
    """An environment with an interaction loop of its own, in place of `reset` and `step`."""

    async def rollout(self, record: Record, client: GenerationClient) -> Step:
        """Play one episode; the step's reward stands on the last turn."""


class RewardFunction(Protocol):
    """Scores the answers to the records of a data file; its `__call__` may be `async`.

    It may also have `target(record, answer) -> str`, the completion that earns the full reward (`\\boxed{4}` for 4),
    and `system_prompt`, the text that tells the model so.
    """

    def __call__(
        self, record: Record, completion: str, prompt: Sequence[ChatMessage]
    ) -> float | Step | Awaitable[float | Step]:
        """The reward of a completion; `prompt` is the conversation before it."""


class SingleTurnTask:
    """Base of a task of one question and one answer: override `record` and `reward`.

    `record` returns at least {"prompt": ...}, a string or a list of {"role": ..., "content": ...}; the key may also be
    "messages". `reward` returns a float, or a `Step` when reward and score differ.
    """

    name = "single_turn"
    num_train = 1_000_000
    num_test = 200

    def num_records(self, split: str) -> int:
        return self.num_train if split == "train" else self.num_test

    def record(self, split: str, index: int) -> Record:
        raise TypeError(f"{type(self).__name__} must define record(split, index)")

    def reward(self, record: Record, completion: str) -> float | Step:
        raise TypeError(f"{type(self).__name__} must define reward(record, completion)")

    def messages(self, record: Record) -> list[ChatMessage]:
        """The conversation that opens the episode: the record's own messages, or its text as one user message."""
        key = "messages" if "prompt" not in record and "messages" in record else "prompt"
        return _conversation(key, record[key])

    def env(self) -> Env:
        return _SingleTurnEnv(self)


def _conversation(key: str, prompt: Any) -> list[ChatMessage]:
    if isinstance(prompt, str):
        return [ChatMessage("user", prompt)]
    if not isinstance(prompt, list | tuple) or not prompt:
        raise TaskError(f"record[{key!r}] is {_shown(prompt)}: {_PROMPT_FORMS}")
    found = []
    for number, message in enumerate(prompt, 1):
        try:
            found.append(ChatMessage.of(message))
        except TaskError as error:
            raise TaskError(f"record[{key!r}], message {number} {error}") from error
    return found


_PROMPT_FORMS = 'give a string, or a list of {"role": ..., "content": ...}.'


def _shown(value: Any) -> str:
    return f"{value!r:.80} ({type(value).__name__})"


class _SingleTurnEnv:
    def __init__(self, task: SingleTurnTask) -> None:
        self._task = task
        self._record: Record = {}
        self.may_block = bool(getattr(task, "may_block", False))

    def reset(self, record: Record) -> Sequence[ChatMessage]:
        self._record = record
        return self._task.messages(record)

    def step(self, action: str) -> Step:
        result = self._task.reward(self._record, action)
        return result if isinstance(result, Step) else Step(reward=float(result))


_SingleTurnEnv.step.__qualname__ = "reward"  # what messages call it: the method that its author wrote
