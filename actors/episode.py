"""One episode: engine and environment take turns. Token in, token out: what the model sampled is never re-tokenized."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from actors.engines.base import Engine, GenerateRequest, Generation
from actors.env_executor import EnvExecutor, where
from actors.load import LoadMeter
from actors.render import Renderer
from envs.check import NO_SIGNALS, needs_signals
from streamrl.environment import (
    MAX_REWARD,
    Env,
    HasCutStep,
    HasLastStep,
    HasTools,
    InputText,
    ReadsInputText,
    Record,
    Step,
    Task,
)
from streamrl.errors import EngineError, TaskError
from streamrl.messages import Member, MemberStatus, Sampling, Span, Turn
from streamrl.messages.codec import pack_ids, pack_logprobs

log = logging.getLogger("streamrl.actor")

MAX_SCORES, MAX_NAME_CHARS = 64, 32
"""What a `Member` can carry; the score itself takes one of the places."""


class PromptTooLongError(TaskError):
    """The rendered prompt leaves no room; the lease goes back with reason TOO_LONG."""


@dataclass(frozen=True, slots=True)
class EpisodeRules:
    """Limits of an episode, from the learner's WELCOME."""

    max_prompt_tokens: int
    max_new_tokens: int
    max_turns: int
    max_tokens: int = 1 << 31  # prompt and everything after it
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    step_timeout_s: float = 30.0
    error_floor: float | None = None  # None: an environment error aborts the member
    truncate_prompts: bool = False  # a prompt that is too long keeps its end


@dataclass(slots=True)
class Transcript:
    """A trajectory while it grows; positions count tokens after the prompt."""

    prompt_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    mask: list[tuple[int, int]] = field(default_factory=list)
    versions: list[Span] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    pending_reward: float = 0.0  # of turns without tokens, while there is no turn to add it to

    def add_action(self, generation: Generation, reward: float) -> None:
        """A turn of the model. A range must not be empty, so the reward of a turn without tokens joins another's."""
        start = len(self.token_ids)
        end = start + len(generation.token_ids)
        if start == end:
            if not self.turns:
                self.pending_reward += reward
            else:
                last = self.turns[-1]
                self.turns[-1] = Turn(last.start, last.end, last.reward + reward)
            return
        reward, self.pending_reward = reward + self.pending_reward, 0.0
        self.token_ids += generation.token_ids
        self.logprobs += generation.logprobs
        self.mask.append((start, end))
        self.turns.append(Turn(start, end, reward))
        for span in generation.spans:
            ref = span.ref
            self.versions.append(Span(ref.learner_epoch, ref.version, start + span.start, start + span.end))

    def pay_only(self, reward: float) -> None:
        """The whole reward on the last turn, in place of what the turns earned."""
        *earlier, last = self.turns
        self.turns = [*(Turn(turn.start, turn.end, 0.0) for turn in earlier), Turn(last.start, last.end, reward)]

    def add_observation(self, ids: Sequence[int]) -> None:
        self.token_ids += ids
        self.logprobs += [0.0] * len(ids)

    def member(self, index: int, status: MemberStatus, scores: dict[str, float], finish: str) -> Member:
        return Member(
            index=index, status=status, prompt_ids=pack_ids(self.prompt_ids), token_ids=pack_ids(self.token_ids),
            logprobs=pack_logprobs(self.logprobs), mask=tuple(self.mask), versions=tuple(self.versions),
            turns=tuple(self.turns), reward=float(sum(turn.reward for turn in self.turns)), scores=scores,
            finish=finish,
        )


class EpisodeRunner:
    """Plays episodes of one task on one engine; plain environments run in a few threads with a time limit."""

    def __init__(
        self, task: Task, engine: Engine, renderer: Renderer, rules: EpisodeRules, *, num_threads: int = 4,
        load: LoadMeter | None = None,
    ) -> None:
        self.load = load or LoadMeter()
        self.task, self.engine, self.renderer, self.rules = task, engine, renderer, rules
        self.executor = EnvExecutor(num_threads)
        self.num_env_errors = 0
        self.last_env_error = ""

    async def play(
        self, record: Record, index: int, seed: int, sampling: Sampling,
        on_progress: Callable[[], None] = lambda: None,
    ) -> Member:
        """One member of a group; `on_progress` is called after every generation and every environment step.

        Raises:
            PromptTooLongError: the prompt is over rules.max_prompt_tokens.
            EngineError: the engine failed, or too many environment calls hang.
        """
        transcript = Transcript()
        try:
            env = self.task.env()
            with self.load.in_environment():
                messages = await self.executor.run(env.reset, record, self.rules.step_timeout_s)
            opening = messages if isinstance(messages, InputText) else list(messages)
            tools = env.tools if isinstance(env, HasTools) else ()
            transcript.prompt_ids = self._cut(self.renderer.render(opening, tools))
            if isinstance(env, ReadsInputText):
                env.set_input_text(self.renderer.input_text(opening, tools))
        except (EngineError, asyncio.CancelledError):
            raise
        except Exception as error:  # a user's code may raise anything: the member is lost, not the actor
            return self._failed(index, transcript, error)
        on_progress()
        num_prompt, rules = len(transcript.prompt_ids), self.rules
        if num_prompt > rules.max_prompt_tokens or num_prompt >= rules.max_tokens:
            raise PromptTooLongError(
                f"the prompt has {num_prompt} tokens, rollout.max_prompt_tokens is {rules.max_prompt_tokens} and a "
                f"whole trajectory may have {rules.max_tokens}: raise it, or set data.prompt_overflow=truncate_left"
            )
        return await self._turns(env, transcript, index, seed, sampling, on_progress)

    def _cut(self, prompt_ids: list[int]) -> list[int]:
        """The end of a prompt that is too long, if it may be cut: what asks for the answer stands there."""
        rules = self.rules
        return prompt_ids[-rules.max_prompt_tokens :] if rules.truncate_prompts else prompt_ids

    async def _turns(
        self, env: Env, transcript: Transcript, index: int, seed: int, sampling: Sampling,
        on_progress: Callable[[], None],
    ) -> Member:
        scores: dict[str, float] = {"score": 0.0}
        finish, source = "stop", self._source(env.step)
        for turn in range(self.rules.max_turns):
            last = turn + 1 == self.rules.max_turns
            with self.load.generating():
                generation = await self.engine.generate(self._request(transcript, turn_seed(seed, turn), sampling))
            on_progress()
            try:
                step, more = await self._answer(env, transcript, generation, last)
                scores = _add_scores(scores, step, source)
            except (EngineError, asyncio.CancelledError):
                raise
            except Exception as error:  # see `play`
                transcript.add_action(generation, 0.0)
                return self._failed(index, transcript, error)
            on_progress()
            transcript.add_action(generation, step.reward)
            finish = "env" if step.truncated or (last and not step.done) else generation.finish
            if more is None:
                finish = finish if step.done or last else "length"
                break
            transcript.add_observation(more)
        if not transcript.turns:
            return _aborted(index, "empty")
        status = MemberStatus.TRUNCATED if finish in ("length", "env") else MemberStatus.FINISHED
        return transcript.member(index, status, scores, finish)

    async def _answer(
        self, env: Env, transcript: Transcript, generation: Generation, last: bool
    ) -> tuple[Step, list[int] | None]:
        """The environment's answer to a turn, and what it says before the next one; None if there is no next one."""
        text = self.renderer.text(generation.token_ids)
        step = await self._play(env.last_step if last and isinstance(env, HasLastStep) else env.step, text)
        if step.done or last:
            return step, None
        # A turn without tokens lacks the token that ends a turn; -1 is no token's id, so that one is rendered.
        last_token = generation.token_ids[-1] if generation.token_ids else -1
        if step.text is None:
            more = self.renderer.render_more(step.messages, last_token=last_token)
        else:
            more = self.renderer.render_text(step.text, last_token=last_token)
        if self._room(transcript, len(generation.token_ids) + len(more)) >= 1:
            return step, more
        # The environment's words leave no room for an answer.
        return replace(await self._play(env.cut_step, text), done=False) if isinstance(env, HasCutStep) else step, None

    async def _play(self, method: Callable[[str], Any], text: str) -> Step:
        with self.load.stepping():
            return checked(await self.executor.run(method, text, self.rules.step_timeout_s), self._source(method))

    def _source(self, method: Callable[..., Any]) -> str:
        return f"{where(method)} of task {self.task.name}"

    def _room(self, transcript: Transcript, num_more: int = 0) -> int:
        """New tokens that the next turn may have after so many more; 0 or less if the trajectory is full."""
        used = len(transcript.prompt_ids) + len(transcript.token_ids) + num_more
        return min(self.rules.max_new_tokens, self.rules.max_tokens - used)

    def _request(self, transcript: Transcript, seed: int, sampling: Sampling) -> GenerateRequest:
        return GenerateRequest(
            prompt_ids=transcript.prompt_ids + transcript.token_ids, sampling=sampling, seed=seed,
            max_new_tokens=self._room(transcript), stop=self.rules.stop, ignore_eos=self.rules.ignore_eos,
        )

    def _failed(self, index: int, transcript: Transcript, error: Exception) -> Member:
        """`env.on_error`: aborted (leased again), or an explicit floor reward if there is something to train on."""
        description = _described(error)
        self.num_env_errors += 1
        self.last_env_error = f"task {self.task.name}: {description}"
        if self.num_env_errors & (self.num_env_errors - 1) == 0:  # the 1st, 2nd, 4th, 8th ...: a log is not a flood
            log.warning("environment failure %d: %s", self.num_env_errors, self.last_env_error)
        if self.rules.error_floor is None or not transcript.turns:
            return _aborted(index, description)
        transcript.pay_only(self.rules.error_floor)
        scores = {"score": self.rules.error_floor, "env_error": 1.0}
        return transcript.member(index, MemberStatus.FINISHED, scores, "env")


def turn_seed(seed: int, turn: int) -> int:
    """Each turn draws from a stream of its own; turn 0 from the lease's seed itself."""
    return (seed + turn * 0x9E3779B97F4A7C15) % (1 << 64)


def _aborted(index: int, finish: str) -> Member:
    return Member(index, MemberStatus.ABORTED, b"", b"", b"", (), (), (), 0.0, {}, finish[:MAX_NAME_CHARS])


def checked(step: Any, source: str) -> Step:
    """The step with plain numbers only, for the wire. Raises TaskError for no Step, or what cannot be sent."""
    if not isinstance(step, Step):
        raise TaskError(f"{source} returned {type(step).__name__}, expected streamrl.Step")
    return replace(
        step,
        reward=_number(step.reward, "reward", source),
        score=None if step.score is None else _number(step.score, "score", source),
        parts={_name(name, source): _number(part, f"part {name!r}", source) for name, part in step.parts.items()},
    )


def _number(value: Any, what: str, source: str) -> float:
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise TaskError(f"{source} returned {what} {value!r}, expected a finite number")
    if abs(number) > MAX_REWARD:
        raise TaskError(f"{source} returned {what} {number:g}: beyond {MAX_REWARD:g} it is a mistake; scale it")
    return number


def _name(name: Any, source: str) -> str:
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARS or not name.isprintable():
        raise TaskError(f"{source} returned a part named {name!r}, expected 1 to {MAX_NAME_CHARS} printable characters")
    return str.__str__(name)


def _add_scores(scores: dict[str, float], step: Step, source: str) -> dict[str, float]:
    """Sums over the turns; `score` is the step's score, or its reward where there is none."""
    sums = dict(scores)
    for name, part in {**step.parts, "score": step.reward if step.score is None else step.score}.items():
        sums[name] = sums.get(name, 0.0) + part
    if len(sums) > MAX_SCORES:
        raise TaskError(f"{source} returned parts of {len(sums) - 1} names, at most {MAX_SCORES - 1} can be sent")
    return sums


def _described(error: Exception) -> str:
    """For people: never raises, always UTF-8."""
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:  # a user's __str__
        text = type(error).__name__
    hint = f". {NO_SIGNALS}" if needs_signals(error) else ""
    return f"{text}{hint}".encode("utf-8", "replace").decode()
