"""`client.chat.completions.create(...)`: the form in which programs call model servers, answered by the engine here.

Messages are dicts or objects with `role` and `content`. An answer that calls tools has `tool_calls`; if it comes back
in a later call, it is read as the text that the model wrote, so that the sequence goes on.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from envs.data.chat_template import call_text, is_whole_call
from envs.thoughts import TAIL, heard, spoken
from envs.tools.parsing import ToolCall as ParsedCall
from envs.tools.parsing import parse_written
from envs.tools.turns import before_calls
from streamrl.environment import ROLES, ChatMessage, Generated
from streamrl.errors import RequestError, TaskError

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
MAX_ENTRIES = 1000
MAX_BYTES = 32 << 20


class Kept(Generic[K, V]):
    """The last entries by their keys, of at most `max_bytes` together; each names its own size."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._entries: dict[K, tuple[V, int]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: K) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[V]:
        return iter([value for value, _ in self._entries.values()])

    def get(self, key: K) -> V | None:
        found = self._entries.get(key)
        return None if found is None else found[0]

    def put(self, key: K, value: V, num_bytes: int) -> None:
        self.drop(key)
        self._entries[key] = value, num_bytes
        self.num_bytes += num_bytes
        while len(self._entries) > MAX_ENTRIES or self.num_bytes > self._max_bytes:
            self.drop(next(iter(self._entries)))

    def drop(self, key: K) -> None:
        _, num_bytes = self._entries.pop(key, (None, 0))
        self.num_bytes -= num_bytes


PASSED = ("temperature", "top_p", "top_k", "min_p", "stop", "train", "agent")
IGNORED = ("model", "user", "metadata", "timeout", "parallel_tool_calls", "store", "seed", "service_tier")
"""Of a server; they mean nothing here."""
ONLY: dict[str, tuple[Any, ...]] = {
    "tool_choice": ("auto", "none"), "n": (1,), "stream": (False,), "frequency_penalty": (0,), "presence_penalty": (0,),
    "logit_bias": ({},), "response_format": ({"type": "text"},), "logprobs": (False,), "top_logprobs": (0,),
}
"""Options that must ask for what is done without them."""


@dataclass(frozen=True, slots=True)
class FunctionCall:
    name: str
    arguments: str  # JSON


@dataclass(frozen=True, slots=True)
class ToolCall:
    id: str
    function: FunctionCall
    type: str = "function"


@dataclass(frozen=True, slots=True)
class Message:
    """The model's message; `content` is all of its text, calls of tools included."""

    content: str
    role: str = "assistant"
    tool_calls: list[ToolCall] | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    message: Message
    finish_reason: str  # "stop", "length" or "tool_calls"
    token_ids: list[int]
    logprobs: list[float]
    index: int = 0


@dataclass(frozen=True, slots=True)
class ChatCompletion:
    id: str
    choices: list[Choice]
    prompt_token_ids: list[int]
    usage: dict[str, int] = field(default_factory=dict)
    object: str = "chat.completion"


class Generates(Protocol):
    async def generate(self, prompt: Sequence[Any], **options: Any) -> Generated: ...

    def shown(self, token_ids: Sequence[int]) -> str: ...


class Chat:
    """`chat.completions.create`.

    Attributes:
        texts: what the model wrote where it called tools.
    """

    def __init__(self, client: Generates) -> None:
        self.texts = Written()
        self._client = client
        self._name = secrets.token_hex(4)  # ids of another process, or of another episode, must not be taken for these
        self._num_calls = self._num_completions = 0

    @property
    def completions(self) -> Chat:
        return self

    async def create(self, *, messages: Sequence[Any], tools: Sequence[Any] = (), **options: Any) -> ChatCompletion:
        """One answer to a conversation. Raises TaskError for an option that is not served, and as `generate` does."""
        given = {key: value for key, value in options.items() if value is not None and key not in IGNORED}
        limits = [given.pop(key) for key in ("max_tokens", "max_completion_tokens") if key in given]
        called = bool(tools) and given.get("tool_choice") != "none"
        for key, allowed in ONLY.items():
            if given.pop(key, allowed[0]) not in allowed:
                raise RequestError(
                    f"the call got {key}={options[key]!r:.60}: here it can only be {' or '.join(map(repr, allowed))}"
                )
        unknown = sorted(set(given) - set(PASSED))
        if unknown:
            raise RequestError(
                f"the call does not take {', '.join(unknown)}: it takes messages, tools, max_tokens, "
                f"{', '.join(PASSED)}"
            )
        limit = min(limits, default=None) if all(isinstance(one, int) for one in limits) else limits[0]
        answer = await self._client.generate(messages, tools=list(tools or ()), max_new_tokens=limit, **given)
        said = heard(answer.text, self._client.shown(answer.prompt_ids[-TAIL:]))
        calls = self._calls(said, tools) if called else []
        self._num_completions += 1
        finish = "tool_calls" if calls else answer.finish if answer.finish == "length" else "stop"
        message = Message(answer.text, tool_calls=calls or None)
        read, said = len(answer.prompt_ids), len(answer.token_ids)
        return ChatCompletion(
            f"completion-{self._name}-{self._num_completions}",
            [Choice(message, finish, list(answer.token_ids), list(answer.logprobs))], list(answer.prompt_ids),
            {"prompt_tokens": read, "completion_tokens": said, "total_tokens": read + said},
        )

    def _calls(self, text: str, tools: Sequence[Any]) -> list[ToolCall]:
        """Calls that can be read; what is none stays text."""
        found = []
        for name, arguments in _read_calls(text, tools):
            self._num_calls += 1
            found.append(ToolCall(f"call-{self._name}-{self._num_calls}", FunctionCall(name, arguments)))
        self.texts.add(str(text), found)
        return found


Calls = list[tuple[Any, Any]]  # name, and arguments as JSON


class Written:
    """Texts of the model that call tools: by what they say, and by the ids that their calls were given."""

    def __init__(self) -> None:
        self._texts: Kept[tuple[str, str], str] = Kept()

    def add(self, text: str, calls: Sequence[ToolCall]) -> None:
        said = _canonical((call.function.name, call.function.arguments) for call in calls)
        for key in (before_calls(text).strip(), *(call.id for call in calls)) if calls else ():
            self._texts.put((key, said), text, len(text) + len(said))

    def text_of(self, content: str, ids: Sequence[Any], calls: Calls) -> str | None:
        """The text that a message repeats: clients give calls other ids, or other words before them."""
        said = _canonical(calls)
        keys = [one for one in ids if isinstance(one, str)] + [before_calls(content).strip()]
        return next((text for key in keys if (text := self._texts.get((key, said))) is not None), None)


def _read_calls(text: str, tools: Sequence[Any]) -> Calls:
    """The calls in a text that are JSON."""
    found = []
    try:
        for call in parse_written(spoken(text), tools):
            if isinstance(call, ParsedCall):
                found.append((call.name, json.dumps(call.arguments, allow_nan=False)))
    except (ValueError, RecursionError):  # NaN, or nested without end
        return []
    return found


def _canonical(calls: Iterable[tuple[str, str]]) -> str:
    """Equal for equal calls, however their JSON is written."""
    written = []
    for name, arguments in calls:
        try:
            written.append([name, json.loads(arguments)])
        except (ValueError, RecursionError):
            written.append([name, arguments])
    return json.dumps(written, sort_keys=True)


def as_messages(
    messages: Sequence[Any], texts: Written, tools: Sequence[Any] = (), *, writes_calls: bool = False
) -> list[ChatMessage]:
    """Messages in any of their forms. Raises TaskError for one that is none.

    Args:
        texts: what the model wrote where it called tools.
        tools: by which calls in a text are read.
        writes_calls: the chat template writes calls of tools; else they are written as text here.
    """
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence) or not messages:
        raise TaskError(
            f"the client got the prompt {messages!r:.60}: give a list of messages, a text, or a list of token ids"
        )
    names: dict[Any, Any] = {}
    return [_message(one, texts, tools, writes_calls, names) for one in messages]


def _message(
    one: Any, texts: Written, tools: Sequence[Any], writes_calls: bool, names: dict[Any, Any]
) -> ChatMessage:
    fields = _fields(one, ("role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content"))
    calls = [_fields(call, ("id", "type", "function", "name", "arguments")) for call in fields.get("tool_calls") or ()]
    for call in calls:
        if "function" in call:
            call["function"] = _fields(call["function"], ("name", "arguments"))
        if isinstance(call.get("id"), str):
            names[call["id"]] = call.get("function", call).get("name")
    fields["tool_calls"] = calls
    # The OpenAI client sends the id alone, and templates such as Hermes 2's refuse a result without the tool's name.
    called = names.get(fields.get("tool_call_id")) if isinstance(fields.get("tool_call_id"), str) else None
    if called is not None:
        fields.setdefault("name", called)
    try:
        if calls:
            said = ChatMessage.of({**fields, "content": fields.get("content") or "", "tool_calls": None}).content
            if (own := _own(said, calls, texts, tools)) is not None:
                fields |= {"content": own, "tool_calls": None}
            elif not (writes_calls and all(map(is_whole_call, calls))):
                fields |= {"content": "\n".join(filter(None, [said, *map(call_text, calls)])), "tool_calls": None}
        else:
            fields["content"] = fields.get("content") or ""
        return ChatMessage.of(fields)
    except TaskError as error:
        raise TaskError(
            f"the client got a message that {error}; a message has a role of {', '.join(ROLES)}, and a text as content"
        ) from error


def _own(content: str, calls: Sequence[Mapping[str, Any]], texts: Written, tools: Sequence[Any]) -> str | None:
    """The text with these calls that the model wrote here, or that the message has already; each stands once."""
    inner = [call.get("function", call) for call in calls]
    given = [
        (one.get("name"), arguments if isinstance(arguments := one.get("arguments"), str) else json.dumps(arguments))
        for one in inner
    ]
    if (text := texts.text_of(content, [call.get("id") for call in calls], given)) is not None:
        return text
    return content if _canonical(_read_calls(content, tools)) == _canonical(given) else None


def _fields(one: Any, names: Sequence[str]) -> dict[str, Any]:
    """The fields of a mapping, or these of an object as packages of model servers make them, without those of None."""
    found = dict(one) if isinstance(one, Mapping) else {name: getattr(one, name, None) for name in names}
    return {name: value for name, value in found.items() if value is not None}
