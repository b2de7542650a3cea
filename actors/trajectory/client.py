"""The client that a user's own interaction loop generates with: the actor's engine, in the same process.

Whatever it generates is recorded as it was read and sampled; nothing that the loop does to texts changes a token. Where
the input of a call begins with all of a sequence of the trajectory, that sequence goes on; otherwise another one
begins, as for a subagent, a second branch, or after a chat template rewrote the history.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager
from typing import Any

from actors.engines.base import Engine
from actors.render import Renderer, Tools
from actors.trajectory.chat_form import Chat, as_messages
from actors.trajectory.conversation import ENVIRONMENT, note_rewriting
from actors.trajectory.rules import EpisodeRules, PromptTooLongError
from actors.trajectory.texts import Texts
from actors.trajectory.transcript import Transcript
from streamrl.environment import AgentSession, ChatMessage, Generated
from streamrl.errors import EngineError, EpisodeFullError, TaskError
from streamrl.messages import Sampling


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
        self.tokenizer = renderer.tokenizer
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
        self._closed = False

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
        if self._closed:
            raise TaskError("this episode is over: a client serves the rollout that it was given to, until it returns")
        distribution = self._distribution(sampling, train)
        text, read = self._input(prompt, tools)
        try:
            read, room = self._admitted(read, train, agent)
        except EpisodeFullError:
            await asyncio.sleep(0)  # a loop that asks again and again must come to its time limit
            raise
        stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
        wanted = room if max_new_tokens is None else min(room, _count(max_new_tokens))
        request = self._rules.request(read, wanted, self._seed, self._num_turns, distribution, stops)
        self._num_turns += 1
        with self.waiting(), self._generating():
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

    def count(self, messages: Sequence[Any], tools: Tools = ()) -> int:
        """The tokens of an input, which the model does not read."""
        return len(self._input(messages, tools)[1])

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
        """Around what is not the loop's time, as that of the engine."""
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
        """What was recorded so far, a sequence each: see `Transcript.trace`."""
        return self._transcript.trace()

    def close(self) -> None:
        """The episode is over: a call that still runs is not recorded."""
        self._closed = True

    # --- one call -----------------------------------------------------------------------------------------------

    def _input(self, prompt: str | Sequence[Any], tools: Tools) -> tuple[str | None, list[int]]:
        """The input as text, if it came as one or as messages, and as ids."""
        if not isinstance(prompt, str) and len(prompt) and all(isinstance(one, int) for one in prompt):
            return None, [int(one) for one in prompt]
        whole = isinstance(prompt, str)
        text = str(prompt) if whole else self._renderer.input_text(self._messages(prompt), tools)
        ids = self._texts.ids_for(text)
        return text, self._renderer.encode_input(text, whole=whole) if ids is None else ids

    def _messages(self, prompt: Sequence[Any]) -> list[ChatMessage]:
        return as_messages(prompt, self.chat.texts, writes_calls=self._renderer.writes_calls)

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
        room = min(rules.max_new_tokens, rules.max_tokens - len(read))
        if train:
            room = rules.room(self._transcript, read, agent)
        if room < 1:
            self._raise_full(
                f"the trajectory has no room after an input of {len(read)} tokens, with {self._transcript.num_tokens} "
                f"of {rules.max_tokens} used (learner.max_tokens_per_device): look at client.num_tokens_left"
            )
        return read, room

    def _raise_full(self, why: str) -> None:
        self.full = f"{why}, and return the reward of what there is"
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
        temperature, top_p, top_k, min_p = chosen.values()
        return Sampling(float(temperature), float(top_p), int(top_k), float(min_p))


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise TaskError(f"client.generate got max_new_tokens={value!r}, expected a positive integer")
    return value
