"""The client that a user's own interaction loop generates with: the actor's engine, in the same process.

Whatever it generates is recorded as it was read and sampled; nothing that the loop does to texts changes a token. Where
the input of a call begins with all of a sequence of the trajectory, that sequence goes on; otherwise another one
begins, as for a subagent, a second branch, or after a chat template rewrote the history.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

import msgspec

from actors.engines.base import Engine, check_sampling
from actors.render import SHORT_TOKEN_CHARS, Renderer, Tools
from actors.trajectory.chat_form import Chat, as_messages
from actors.trajectory.conversation import ENVIRONMENT, note_rewriting, rest_after
from actors.trajectory.rules import EpisodeRules, PromptTooLongError
from actors.trajectory.transcript import RecordedSequence, Transcript
from streamrl.environment import AgentSession, ChatMessage, Generated
from streamrl.errors import EngineError, EpisodeFullError, RequestError, TaskError
from streamrl.messages import Sampling


@dataclass(slots=True)
class _Text:
    whole: str
    ends: list[int] = field(default_factory=list)  # characters up to the end of each turn; -1: not known any more


GoesOn = Callable[[str, int], bool]
"""Tells whether a text can stand after a token that the model sampled."""


@dataclass(frozen=True, slots=True)
class Known:
    """A sequence as it stood at a moment: it only grows, so that a thread may read it up to here."""

    sequence: RecordedSequence
    whole: str
    num_ids: int
    points: tuple[tuple[int, int], ...]  # (characters, ids) up to the end of each turn

    def continued(self, text: str, goes_on: GoesOn) -> tuple[int, str] | None:
        """The ids that this text repeats, and the rest of the text: up to the latest turn that it has whole."""
        rest = rest_after(text, self.whole)
        if rest is not None and goes_on(rest, self.sequence.ids[self.num_ids - 1]):
            return self.num_ids, rest
        for end, num_ids in reversed(self.points):
            if end > 0 and text.startswith(self.whole[:end]) and goes_on(text[end:], self.sequence.ids[num_ids - 1]):
                return num_ids, text[end:]
        return None


class Texts:
    """Texts by sequence, as the model saw them; its own words without special tokens.

    A program sends the whole conversation with every call. Its text is compared with that of every sequence, as it
    stood after each of its turns: tokens up to the longest beginning are those that were read and sampled, and only
    what follows is tokenized.
    """

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._texts: dict[RecordedSequence, _Text] = {}

    def known(self) -> list[Known]:
        """Every sequence, as it stands now."""
        return [
            Known(sequence, text.whole, len(sequence.ids), tuple(
                (end, sequence.num_prompt + turn.end) for end, turn in zip(text.ends, sequence.turns, strict=True)
            ))
            for sequence, text in self._texts.items()
        ]

    def hear(self, sequence: RecordedSequence, text: str, token_ids: Sequence[int]) -> None:
        """The model read this text and said these tokens, now the last turn of the sequence."""
        known = self._texts.setdefault(sequence, _Text(""))
        if not text.startswith(known.whole):  # other white space: places of earlier turns are not those in this text
            known.ends = [-1] * len(known.ends)
        known.whole = text + self._renderer.seen(token_ids)
        known.ends.append(len(known.whole))


def continued(text: str, known: Iterable[Known], goes_on: GoesOn) -> tuple[list[int], str]:
    """The ids of the sequence that an input continues the longest, and the text after them; none if it continues none.
    """
    found = [(one, *point) for one in known if (point := one.continued(text, goes_on)) is not None]
    if not found:
        return [], text
    one, num_ids, rest = max(found, key=lambda point: point[1])
    return one.sequence.ids[:num_ids], rest


T = TypeVar("T")
SMALL = 1 << 15
"""Bytes or characters that are read faster than a thread is woken."""
NUM_AT_ONCE = 2
"""Large pieces of work that run at once, each with memory of its own."""

_threads = ThreadPoolExecutor(NUM_AT_ONCE, "large-request")


async def off_loop(size: int, work: Callable[[], T]) -> T:
    """The result of `work`, from a thread if it reads more than a little: heartbeats and other calls go on."""
    if size <= SMALL:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_threads, work)


GREEDY_BELOW = 0.01
"""A lower temperature of a call is 0: the engines go down to this."""
MAX_STOPS, MAX_STOP_CHARS = 64, 1024
_MESSAGE_CHARS = 100
"""Work of rendering a message, in that of characters."""


class Client:
    """One episode's `streamrl.environment.GenerationClient`.

    Args:
        generating: around every call of the engine.
        pause, resume: called when the loop begins to wait for the engine, and when it goes on.
        on_progress: called after every generation.
        open_session: opens the session of an agent that calls this client over HTTP.

    Attributes:
        failure: an error that the loop may not handle, as that of a dead engine; None without one.
        full: why a call found no turn or no room left; "" if none did.
        finish: how the last turn ended.
        earned: what `reward` was given so far.
    """

    def __init__(
        self, engine: Engine, renderer: Renderer, rules: EpisodeRules, transcript: Transcript, *, seed: int,
        sampling: Sampling, generating: Callable[[], AbstractContextManager[None]], pause: Callable[[], None],
        resume: Callable[[], None], on_progress: Callable[[], None],
        open_session: Callable[[Client], AbstractAsyncContextManager[AgentSession]],
    ) -> None:
        self.chat = Chat(self)
        self.failure: Exception | None = None
        self.full = ""
        self.finish, self.earned = "stop", 0.0
        self._engine, self._renderer, self._rules, self._transcript = engine, renderer, rules, transcript
        self._seed, self._sampling, self._on_progress = seed, sampling, on_progress
        self._generating, self._pause, self._resume = generating, pause, resume
        self._open_session = open_session
        self._texts = Texts(renderer)
        self._num_turns = self._num_waiting = 0
        self._under_way: dict[asyncio.Future[None], tuple[list[int], str, int]] = {}
        self._closed = False

    @property
    def tokenizer(self) -> Any:
        """A copy of the model's: what a loop sets on it changes no prompt."""
        return self._renderer.users_tokenizer

    @property
    def sampling(self) -> dict[str, Any]:
        """The run's sampling settings: temperature, top_p, top_k, min_p, max_new_tokens and stop."""
        one = self._sampling
        return {
            "temperature": one.temperature, "top_p": one.top_p, "top_k": one.top_k, "min_p": one.min_p,
            "max_new_tokens": self._rules.max_new_tokens, "stop": list(self._rules.stop),
        }

    @property
    def max_tokens(self) -> int:
        """Most tokens of the trajectory."""
        return self._rules.max_tokens

    @property
    def vocab_size(self) -> int:
        """Upper bound of the model's ids; its embedding may be padded beyond the tokenizer's length."""
        return getattr(self._engine, "vocab_size", None) or len(self._renderer.tokenizer)

    @property
    def num_turns_left(self) -> int:
        return self._rules.max_turns - self._num_turns

    @property
    def num_tokens_left(self) -> int:
        """Tokens that the trajectory may still have, those that are only read included."""
        return self._rules.max_tokens - self._transcript.num_tokens

    async def generate(
        self, prompt: str | Sequence[Any], *, tools: Tools = (), max_new_tokens: int | None = None,
        stop: str | Sequence[str] | None = None, train: bool = True, agent: str = "", **sampling: float | None,
    ) -> Generated:
        """The model's next turn: see `streamrl.environment.GenerationClient`."""
        distribution, stops = self._distribution(sampling, train), _stops(stop)
        limit = self._rules.max_new_tokens if max_new_tokens is None else _count(max_new_tokens)
        try:
            text, read = await self._input(prompt, tools, train)
            if read is None:
                self._refuse_long(train)
            read, room = await self._turn(read, train, agent, limit)
        except EpisodeFullError:
            await asyncio.sleep(0)  # a loop that asks again and again must come to its time limit
            raise
        request = self._rules.request(read, room, self._seed, self._num_turns, distribution, stops)
        self._num_turns += 1
        with self.waiting(), self._generating(), self._under(read, agent, room if train else 0):
            try:
                generation = await self._engine.generate(request)
            except EngineError as error:
                self.failure = error
                raise
        self._on_progress()
        said = self._renderer.text(generation.token_ids)
        if train and not self._closed:
            if self._transcript.turns and self._transcript.continued(read, agent) is None:
                note_rewriting(ENVIRONMENT)
            sequence = self._transcript.add_turn(read, generation, agent)
            if sequence is not None:
                seen = self._renderer.whole_text(read) if text is None else text
                self._texts.hear(sequence, seen, generation.token_ids)
            self.finish = generation.finish
        return Generated(said, list(generation.token_ids), list(generation.logprobs), generation.finish, tuple(read))

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for, which may be part of a character."""
        return self._renderer.token_bytes(token_id)

    def shown(self, token_ids: Sequence[int]) -> str:
        """These tokens as text, special ones included."""
        return self._renderer.whole_text(token_ids)

    async def count(self, messages: Sequence[Any], tools: Tools = ()) -> int:
        """The tokens of an input, which the model does not read."""
        _, ids = await self._input(messages, tools, train=False)
        if ids is None:
            raise self._rules.too_long(f"more than {self._rules.max_tokens}")
        return len(ids)

    def reward(self, value: float, turn: int = -1) -> None:
        """Reward a turn, by default the last one, in addition to the reward that the rollout returns at its end."""
        number = float(value)
        if not math.isfinite(number):
            raise TaskError(f"client.reward got {value!r}, expected a finite number")
        self.earned += number
        self._transcript.pay(number, turn)

    def session(self) -> AbstractAsyncContextManager[AgentSession]:
        """An address and a key with which a program calls `chat` over HTTP, until the block ends."""
        return self._open_session(self)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Exclude time that is not the loop's, as that of the engine."""
        self._num_waiting += 1
        if self._num_waiting == 1:
            self._pause()
        try:
            yield
        finally:
            self._num_waiting -= 1
            if not self._num_waiting:
                self._resume()

    def note_progress(self) -> None:
        """The lease is alive, although nothing is generated: it waits for an agent."""
        self._on_progress()

    def trace(self) -> list[dict[str, Any]]:
        """The sequences recorded so far: see `Transcript.trace`."""
        return self._transcript.trace()

    def close(self) -> None:
        """The episode is over: a call that still runs is not recorded."""
        self._closed = True

    # --- one call -----------------------------------------------------------------------------------------------

    async def _input(
        self, prompt: str | Sequence[Any], tools: Tools, train: bool
    ) -> tuple[str | None, list[int] | None]:
        """The input as text, if it came as one or as messages, and as ids; None for more than can have room."""
        if not isinstance(prompt, str) and len(prompt) and all(isinstance(one, int) for one in prompt):
            return None, [int(one) for one in prompt]
        limit = self._rules.max_tokens
        if not isinstance(prompt, str) and len(prompt) > limit:  # each has a token
            return None, None
        cut = train and not self._transcript.turns and self._rules.truncate_prompts
        known = self._texts.known()
        return await off_loop(_size(prompt, tools), lambda: self._rendered(prompt, tools, known, limit, cut))

    def _refuse_long(self, train: bool) -> NoReturn:
        """Refuse an input that is too long by its length alone, and was not tokenized whole."""
        limit = self._rules.max_tokens
        if train and not self._transcript.turns:
            self.failure = self._rules.too_long(f"more than {limit}")
            raise self.failure
        self._raise_full(f"an input of more than {limit} tokens leaves no room: look at client.num_tokens_left")

    def _rendered(
        self, prompt: str | Sequence[Any], tools: Tools, known: list[Known], limit: int, cut: bool
    ) -> tuple[str, list[int] | None]:
        """The text of an input and its ids, None if there are too many; on any thread."""
        whole, renderer = isinstance(prompt, str), self._renderer
        text = str(prompt) if whole else renderer.input_text(self._messages(prompt, tools), tools)
        ids, rest = continued(text, known, lambda rest, last: whole or renderer.may_follow(rest, last_token=last))
        if not cut and renderer.surely_over(rest, limit - len(ids)):
            return text, None
        if ids:
            return text, [*ids, *renderer.follow(rest, last_token=ids[-1])]
        if cut and len(rest) > limit * SHORT_TOKEN_CHARS:
            rest = rest[-limit * renderer.longest_token :]
        return text, renderer.encode_input(rest, whole=whole)

    def _messages(self, prompt: Sequence[Any], tools: Tools) -> list[ChatMessage]:
        self._renderer.tell_unread(tools)
        return as_messages(prompt, self.chat.texts, tools, writes_calls=self._renderer.writes_calls)

    async def _turn(self, read: list[int], train: bool, agent: str, limit: int) -> tuple[list[int], int]:
        """The input and the new tokens of a turn, once no call that is under way can take room from it."""
        while True:
            if self._closed:
                raise TaskError(
                    "this episode is over: a client serves the rollout that it was given to, until it returns"
                )
            read, room = self._admitted(read, train, agent)
            room, others = min(room, limit), self._under_way
            calls = [*others.values(), (read, agent, room)]
            if not (train and others) or self._transcript.has_room(calls, self._rules.max_tokens):
                return read, room
            with self.waiting():
                await asyncio.wait(others, return_when=asyncio.FIRST_COMPLETED)

    @contextmanager
    def _under(self, read: list[int], agent: str, room: int) -> Iterator[None]:
        """Around the generation of a turn; without room it is outside of the trajectory."""
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if room:
            self._under_way[ended] = read, agent, room
        try:
            yield
        finally:
            self._under_way.pop(ended, None)
            ended.set_result(None)

    def _admitted(self, read: list[int], train: bool, agent: str) -> tuple[list[int], int]:
        """The input, cut if it may be, and the new tokens that the turn may have."""
        rules = self._rules
        if self._num_turns >= rules.max_turns:
            self._raise_full(f"env.max_turns={rules.max_turns} turns are used: look at client.num_turns_left")
        if train and not self._transcript.turns:
            try:
                read = rules.checked_prompt(read)
            except PromptTooLongError as error:
                self.failure = error
                raise
        room = min(rules.max_new_tokens, min(rules.max_tokens, rules.max_sequence_tokens) - len(read))
        if train:
            room = rules.room(self._transcript, read, agent)
        if room < 1:
            self._raise_full(
                f"the trajectory has no room after an input of {len(read)} tokens, with {self._transcript.num_tokens} "
                f"of {rules.max_tokens} used (learner.max_tokens_per_device): look at client.num_tokens_left"
            )
        return read, room

    def _raise_full(self, why: str) -> NoReturn:
        self.full = f"{why}, and return the reward earned so far"
        raise EpisodeFullError(self.full)

    def _distribution(self, given: Mapping[str, float | None], train: bool) -> Sampling:
        """The sampling parameters of this call, checked."""
        known = ("temperature", "top_p", "top_k", "min_p")
        unknown = sorted(set(given) - set(known))
        if unknown:
            raise TaskError(
                f"client.generate does not take {', '.join(unknown)}: it takes tools, max_new_tokens, stop, train, "
                f"agent, {', '.join(known)}"
            )
        other = {key: value for key, value in given.items() if value is not None and value != self.sampling[key]}
        if other and train:
            key, value = next(iter(other.items()))
            raise TaskError(
                f"client.generate got {key}={value}, and the run samples with {key}={self.sampling[key]}: tokens of "
                "another distribution cannot be trained on, so leave it out, or pass train=False for a call that is "
                "not trained on"
            )
        chosen = {key: self.sampling[key] for key in known} | other
        temperature, top_p, min_p = (_number(key, chosen[key]) for key in ("temperature", "top_p", "min_p"))
        top_k = chosen["top_k"]
        if not isinstance(top_k, int) or isinstance(top_k, bool):
            raise RequestError(f"client.generate got top_k={top_k!r:.40}: give an integer")
        found = Sampling(temperature, top_p, top_k, min_p)
        if other and 0.0 < found.temperature < GREEDY_BELOW:
            found = msgspec.structs.replace(found, temperature=0.0)
        check_sampling(found)
        return found


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise RequestError(f"client.generate got max_new_tokens={value!r:.40}, expected a positive integer")
    return value


def _number(name: str, value: Any) -> float:
    try:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
    except OverflowError:
        pass
    raise RequestError(f"client.generate got {name}={value!r:.40}: give a number")


def _stops(given: Any) -> tuple[str, ...]:
    """Stop strings; empty ones, the default of several programs, stop nothing."""
    texts = [given] if isinstance(given, str) else list(given) if isinstance(given, list | tuple) else None
    texts = [] if given is None else texts
    if texts is None or not all(isinstance(one, str) for one in texts):
        raise RequestError(f"client.generate got stop={given!r:.60}: give a text or a list of texts")
    if len(texts) > MAX_STOPS or any(len(one) > MAX_STOP_CHARS for one in texts):
        raise RequestError(
            f"client.generate got {len(texts)} stop strings, the longest of {max(map(len, texts))} characters: each is "
            f"looked for after every token, give at most {MAX_STOPS} of at most {MAX_STOP_CHARS} characters"
        )
    return tuple(one for one in texts if one)


def _size(prompt: str | Sequence[Any], tools: Tools) -> int:
    """About the characters of an input."""
    if isinstance(prompt, str):
        return len(prompt)
    size = sum(_MESSAGE_CHARS + len(str(_content(one))) for one in prompt) if len(prompt) < SMALL else SMALL + 1
    return size + (len(repr(tools)) if tools else 0)


def _content(message: Any) -> Any:
    return message.get("content") if isinstance(message, Mapping) else getattr(message, "content", None)
