"""One episode: engine and environment take turns. Token in, token out: what the model sampled is never re-tokenized."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import msgspec

from actors.endpoint.endpoint import Endpoint
from actors.engines.base import Engine, Generation
from actors.env_calls.executor import CallClock, EnvExecutor, where
from actors.env_calls.group_step import GroupStep
from actors.env_calls.inline import InlineCalls
from actors.env_calls.instances import Instances
from actors.load import LoadMeter
from actors.render import Renderer, SharedPrompts
from actors.trajectory.client import Client
from actors.trajectory.conversation import Conversation
from actors.trajectory.rules import EpisodeRules, PromptTooLongError
from actors.trajectory.transcript import Transcript
from envs.check import NO_SIGNALS, needs_signals
from envs.reward_values import MAX_NAME_CHARS, part_name
from streamrl.environment import MAX_REWARD, ROLES, DrivesGeneration, Env, InputText, Record, Step, Task
from streamrl.errors import EngineError, EpisodeFullError, RequestError, TaskError
from streamrl.messages import Member, MemberStatus, Sampling

log = logging.getLogger("streamrl.actor")

MAX_SCORES = 64
"""What a `Member` can carry; the score itself takes one of the places."""


class EpisodeRunner:
    """Plays episodes of one task on one engine; plain environments have a time limit, and run in a few threads or, with
    `inline`, on the event loop if they are quick."""

    def __init__(
        self,
        task: Task,
        engine: Engine,
        renderer: Renderer,
        rules: EpisodeRules,
        *,
        num_threads: int | None = 4,
        load: LoadMeter | None = None,
        inline: InlineCalls | None = None,
        endpoint: Endpoint | None = None,
        instances: Instances | None = None,
    ) -> None:
        self.load, self.endpoint = load or LoadMeter(), endpoint or Endpoint()
        self.task, self.engine, self.renderer, self.rules = task, engine, renderer, rules
        if (limit := getattr(engine, "max_tokens", None)) is not None:  # as many as the model has positions
            self.rules = replace(rules, max_sequence_tokens=limit)
        self.executor, self.instances = EnvExecutor(num_threads, inline), instances or Instances()
        self._calls = inline
        self.num_env_errors = 0
        self.last_env_error = ""
        self._told_full = False

    async def play(
        self, record: Record, index: int, seed: int, sampling: Sampling,
        on_progress: Callable[[], None] = lambda: None, group: GroupStep | None = None,
        prompts: SharedPrompts | None = None,
    ) -> Member:
        """One member of a group; `on_progress` is called after every generation and every environment step.

        Args:
            group: where members of a lease meet whose environment scores them together; None: this one is alone.
            prompts: those that the members of the lease have rendered.
        Raises:
            PromptTooLongError: the prompt is over rules.max_prompt_tokens.
            EngineError: the engine failed, or too many environment calls hang.
        """
        with self.load.playing():
            member = await self._episode(record, index, seed, sampling, on_progress, group, prompts)
        label = _optional(self.task, "label")
        if label is None or member.status == MemberStatus.ABORTED or len(member.scores) >= MAX_SCORES:
            return member
        scores = {**member.scores, f"task_{label(record)}": member.reward}
        return msgspec.structs.replace(member, scores=scores)

    async def _episode(
        self, record: Record, index: int, seed: int, sampling: Sampling, on_progress: Callable[[], None],
        group: GroupStep | None, prompts: SharedPrompts | None,
    ) -> Member:
        limit_s = self.rules.step_timeout_s
        try:
            async with self.instances.one(self.task.env, self.executor, limit_s, self.load) as (env, place):
                return await self._in(env, place, record, index, seed, sampling, on_progress, group, prompts)
        except (EngineError, PromptTooLongError, asyncio.CancelledError):
            raise
        except Exception as error:  # of `Task.env`, see `_in`
            return self._failed(index, Transcript(), error)

    async def _in(
        self,
        env: Env,
        place: ExitStack,
        record: Record,
        index: int,
        seed: int,
        sampling: Sampling,
        on_progress: Callable[[], None],
        group: GroupStep | None,
        prompts: SharedPrompts | None,
    ) -> Member:
        transcript = Transcript()
        conversation = Conversation(self.renderer, append=self.rules.append_history, prompts=prompts)
        try:
            if _optional(env, "rollout") is not None:
                return await self._driven(env, record, index, seed, sampling, on_progress)
            with self.load.in_environment():
                messages = await self.executor.run(env.reset, record, self.rules.step_timeout_s)
            opening = messages if isinstance(messages, InputText) else list(messages)
            check_roles(opening, self._source(env.reset))
            conversation.open(opening, getattr(env, "tools", ()))
            if (set_input_text := _optional(env, "set_input_text")) is not None:
                set_input_text(conversation.text)
        except (EngineError, PromptTooLongError, asyncio.CancelledError):
            raise
        except Exception as error:  # a user's code may raise anything: the member is lost, not the actor
            return self._failed(index, transcript, error)
        on_progress()
        conversation.ids = self.rules.checked_prompt(conversation.ids)
        transcript.begin(conversation.ids)
        together = group if _optional(env, "step_group") is not None else None
        if together is not None:
            place.close()  # it waits for the others of its group, which may still wait for a place
        return await self._turns(env, conversation, transcript, index, seed, sampling, on_progress, together)

    async def _turns(
        self, env: Env, conversation: Conversation, transcript: Transcript, index: int, seed: int, sampling: Sampling,
        on_progress: Callable[[], None], group: GroupStep | None,
    ) -> Member:
        scores: dict[str, float] = {"score": 0.0}
        finish, source = "stop", self._source(env.step)
        for turn in range(self.rules.max_turns):
            last = turn + 1 == self.rules.max_turns
            read, room = conversation.ids, self.rules.room(transcript, conversation.ids)
            request = self.rules.request(read, room, seed, turn, sampling, version=transcript.first_version)
            try:
                with self.load.generating():
                    generation = await self.engine.generate(request)
            except RequestError as error:  # as an id that the model does not have: no other actor could serve it
                return self._failed(index, transcript, error)
            recorded = transcript.add_turn(read, generation)
            on_progress()
            try:
                if group is None:
                    step, goes_on = await self._answer(env, conversation, transcript, generation, last)
                else:
                    told = (env, self.renderer.text(generation.token_ids))
                    with self.load.off_engine():
                        step, goes_on = checked(await group.step(index, told, self._play_group), source), False
                scores = _add_scores(scores, step, source)
                transcript.pay_agents(step.agents)
            except (EngineError, asyncio.CancelledError):
                raise
            except Exception as error:  # see `play`
                return self._failed(index, transcript, error)
            on_progress()
            transcript.pay(step.reward)
            if recorded is not None:
                recorded.turns[-1].score = None if step.score == step.reward else step.score
            finish = "env" if step.truncated or (last and not step.done) else generation.finish
            if not goes_on:
                finish = finish if step.done or last else "length"
                break
        return _finished(index, transcript, scores, finish, step)

    async def _driven(
        self, env: DrivesGeneration, record: Record, index: int, seed: int, sampling: Sampling,
        on_progress: Callable[[], None],
    ) -> Member:
        """An episode whose loop is the environment's own. Its time limit counts what it does between generations."""
        transcript, source = Transcript(), self._source(env.rollout)
        client: Client | None = None
        try:
            async with self.executor.clocked(env.rollout, self.rules.step_timeout_s) as clock:
                client = self._client(transcript, clock, seed, sampling, on_progress)
                with self.load.in_environment():
                    step = checked(await env.rollout(record, client), source)
            earned = client.earned + sum(step.agents.values())
            score = step.reward + earned if step.score is None else step.score
            scores = _add_scores({"score": 0.0}, replace(step, score=score), source)
        except EpisodeFullError as error:
            assert client is not None
            if not self._told_full:  # with too small a limit it would be every episode
                self._told_full = True
                log.warning("an interaction loop was cut off and keeps the reward it had earned: %s", error)
            step, scores = Step(0.0, truncated=True), {"score": client.earned}
        except (EngineError, PromptTooLongError, asyncio.CancelledError):
            raise
        except Exception as error:  # see `play`
            if client is None or client.failure is None:
                return self._failed(index, transcript, error)
        finally:
            if client is not None:
                client.close()
        if client.failure is not None:  # whatever the loop made of it
            raise client.failure
        transcript.pay_outcome(step.reward)
        try:
            transcript.pay_agents(step.agents)
        except TaskError as error:
            return self._failed(index, transcript, error)
        return _finished(index, transcript, scores, "env" if step.truncated else client.finish, step)

    def _client(
        self, transcript: Transcript, clock: CallClock, seed: int, sampling: Sampling, on_progress: Callable[[], None]
    ) -> Client:
        def pause() -> None:
            clock.pause()
            self.load.leave_environment()

        def resume() -> None:
            clock.resume()
            self.load.enter_environment()

        return Client(
            self.engine, self.renderer, self.rules, transcript, seed=seed, sampling=sampling,
            generating=self.load.generating, pause=pause, resume=resume, on_progress=on_progress,
            open_session=self.endpoint.session,
        )

    async def close(self) -> None:
        await self.instances.settle()
        self.executor.close()
        await self.endpoint.close()

    async def _answer(
        self, env: Env, conversation: Conversation, transcript: Transcript, generation: Generation, last: bool
    ) -> tuple[Step, bool]:
        """The environment's answer to a turn, and whether there is a next one, whose input is then ready."""
        text = conversation.hear(generation.token_ids)
        text = text if getattr(env, "hears_thoughts", False) else str(text)
        step = await self._play((_optional(env, "last_step") if last else None) or env.step, text)
        if step.done or last:
            return step, False
        conversation.answer(step)
        if self.rules.room(transcript, conversation.ids) >= 1:
            return step, True
        # The environment's words leave no room for an answer.
        cut_step = _optional(env, "cut_step")
        return step if cut_step is None else replace(await self._play(cut_step, text), done=False), False

    async def _play(self, method: Callable[[str], Any], text: str) -> Step:
        with self.load.stepping(), self.load.off_engine():
            return checked(await self.executor.run(method, text, self.rules.step_timeout_s), self._source(method))

    async def _play_group(self, turns: Sequence[tuple[Any, str]]) -> Sequence[Any]:
        with self.load.stepping():
            return await self.executor.run(turns[0][0].step_group, turns, self.rules.step_timeout_s)

    def _source(self, method: Callable[..., Any]) -> str:
        return f"{where(method)} of task {self.task.name}"

    def _failed(self, index: int, transcript: Transcript, error: Exception) -> Member:
        """`env.on_error`: aborted (leased again), or an explicit floor reward if there is something to train on."""
        if self._calls is not None:
            self._calls.failed(error)
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


def _finished(index: int, transcript: Transcript, scores: dict[str, float], finish: str, last: Step) -> Member:
    if not transcript.turns:
        return _aborted(index, "empty")
    status = MemberStatus.FINISHED if last.done and not last.truncated else MemberStatus.TRUNCATED
    return transcript.member(index, status, scores, finish)


def _optional(env: object, name: str) -> Callable[..., Any] | None:
    """A method that an environment need not have; asking with `isinstance` and a protocol costs 20 times as much."""
    return getattr(env, name, None)


def _aborted(index: int, finish: str) -> Member:
    return Member(index, MemberStatus.ABORTED, b"", b"", b"", (), (), (), 0.0, {}, finish[:MAX_NAME_CHARS])


def checked(step: Any, source: str) -> Step:
    """The step with plain numbers only, for the wire. Raises TaskError for no Step, or what cannot be sent."""
    if not isinstance(step, Step):
        raise TaskError(f"{source} returned {type(step).__name__}, expected streamrl.Step")
    check_roles(step.messages, source)
    check_roles(step.context or (), source)
    if type(step.reward) is float and abs(step.reward) <= MAX_REWARD and step.score is None and not (
        step.parts or step.agents
    ):
        return step  # nothing to change: a copy takes as long as the answer of a quick environment
    return replace(
        step,
        reward=_number(step.reward, "reward", source),
        score=None if step.score is None else _number(step.score, "score", source),
        parts={part_name(name, source): _number(part, f"part {name!r}", source) for name, part in step.parts.items()},
        agents={part_name(name, source): _number(one, f"agent {name!r}", source) for name, one in step.agents.items()},
    )


def check_roles(messages: Any, source: str) -> None:
    """Raise TaskError for a message whose role no chat template is asked to know; an `InputText` has none."""
    for message in () if isinstance(messages, InputText) else messages:
        if message.role not in ROLES:
            raise TaskError(f"{source} gave the role {message.role!r:.40}: allowed are {', '.join(ROLES)}")


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


def _add_scores(scores: dict[str, float], step: Step, source: str) -> dict[str, float]:
    """Sums over the turns; `score` is the step's score, or its reward where there is none."""
    sums = dict(scores)
    for name, part in {**step.parts, "score": step.reward if step.score is None else step.score}.items():
        sums[name] = sums.get(name, 0.0) + part
    if len(sums) > MAX_SCORES:
        raise TaskError(f"{source} returned parts of {len(sums) - 1} names, at most {MAX_SCORES - 1} can be sent")
    return sums


def _described(error: Exception) -> str:
    """Describe an error for the log: never raises, always UTF-8."""
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:  # a user's __str__
        text = type(error).__name__
    hint = f". {NO_SIGNALS}" if needs_signals(error) else ""
    return f"{text}{hint}".encode("utf-8", "replace").decode()
