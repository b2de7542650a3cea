"""One episode: engine and environment take turns. Token in, token out: what the model sampled is never re-tokenised."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from actors.engines.base import Engine, GenerateRequest, Generation
from actors.render import Renderer
from streamrl.codec import pack_ids, pack_logprobs
from streamrl.environment import ChatMessage, Env, Record, Step, Task
from streamrl.errors import EngineError, TaskError
from streamrl.messages import Member, MemberStatus, Sampling


class PromptTooLongError(TaskError):
    """The rendered prompt leaves no room; the lease goes back with reason TOO_LONG."""


@dataclass(frozen=True, slots=True)
class EpisodeRules:
    """Limits of an episode, from the learner's WELCOME."""

    max_prompt_tokens: int
    max_new_tokens: int
    max_turns: int
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    step_timeout_s: float = 60.0
    error_floor: float | None = None  # None: an environment error aborts the member


@dataclass(slots=True)
class Transcript:
    """A trajectory while it grows; positions count tokens after the prompt."""

    prompt_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    mask: list[tuple[int, int]] = field(default_factory=list)
    versions: list[tuple[int, int, int, int]] = field(default_factory=list)
    turns: list[tuple[int, int, float]] = field(default_factory=list)

    def add_action(self, generation: Generation, reward: float) -> None:
        start = len(self.token_ids)
        end = start + len(generation.token_ids)
        self.token_ids += generation.token_ids
        self.logprobs += generation.logprobs
        self.mask.append((start, end))
        self.turns.append((start, end, reward))
        for span in generation.spans:
            row = (span.ref.learner_epoch, span.ref.version, start + span.start, start + span.end)
            self.versions.append(row)

    def add_observation(self, ids: Sequence[int]) -> None:
        self.token_ids += ids
        self.logprobs += [0.0] * len(ids)


class EpisodeRunner:
    """Plays episodes of one task on one engine; plain environments run in a thread pool with a time limit."""

    def __init__(
        self, task: Task, engine: Engine, renderer: Renderer, rules: EpisodeRules, *, num_threads: int = 4
    ) -> None:
        self.task, self.engine, self.renderer, self.rules = task, engine, renderer, rules
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="env")
        self.num_env_errors = 0
        self.env_s = 0.0

    async def play(self, record: Record, index: int, seed: int, sampling: Sampling) -> Member:
        """One member of a group.

        Raises:
            PromptTooLongError: the prompt is over rules.max_prompt_tokens.
            EngineError: the engine failed.
        """
        env = self.task.env()
        try:
            messages = await self._call(env.reset, record)
            prompt_ids = self.renderer.render(list(messages))
        except (EngineError, asyncio.CancelledError):
            raise
        except Exception as error:  # a user's code may raise anything: the member is lost, not the actor
            return self._failed(index, Transcript([]), error)
        if len(prompt_ids) > self.rules.max_prompt_tokens:
            raise PromptTooLongError(
                f"the prompt has {len(prompt_ids)} tokens, rollout.max_prompt_tokens is {self.rules.max_prompt_tokens}"
            )
        transcript = Transcript(prompt_ids)
        return await self._turns(env, transcript, index, seed, sampling)

    async def _turns(self, env: Env, transcript: Transcript, index: int, seed: int, sampling: Sampling) -> Member:
        scores: dict[str, float] = {}
        score, finish = 0.0, "stop"
        for turn in range(self.rules.max_turns):
            generation = await self.engine.generate(GenerateRequest(
                prompt_ids=transcript.prompt_ids + transcript.token_ids, sampling=sampling,
                max_new_tokens=self.rules.max_new_tokens, seed=turn_seed(seed, turn), stop=self.rules.stop,
                ignore_eos=self.rules.ignore_eos,
            ))
            finish = generation.finish
            try:
                step = _checked(await self._call(env.step, self.renderer.text(generation.token_ids)))
            except (EngineError, asyncio.CancelledError):
                raise
            except Exception as error:  # see `play`
                transcript.add_action(generation, 0.0)
                return self._failed(index, transcript, error)
            transcript.add_action(generation, step.reward)
            score += step.reward if step.score is None else step.score
            for name, part in step.parts.items():
                scores[name] = scores.get(name, 0.0) + float(part)
            if step.done:
                break
            if turn + 1 < self.rules.max_turns:
                transcript.add_observation(self._render_more(step.messages, transcript))
            else:
                finish = "env"
        status = MemberStatus.TRUNCATED if finish in ("length", "env") else MemberStatus.FINISHED
        return self._member(index, transcript, status, {**scores, "score": score}, finish)

    def _render_more(self, messages: Sequence[ChatMessage], transcript: Transcript) -> list[int]:
        last_token = transcript.token_ids[-1] if transcript.token_ids else None
        return self.renderer.render_more(messages, last_token=last_token)

    def _failed(self, index: int, transcript: Transcript, error: Exception) -> Member:
        """`env.on_error`: aborted (leased again), or an explicit floor reward if there is something to train on."""
        self.num_env_errors += 1
        if self.rules.error_floor is not None and transcript.token_ids:
            start, end, _ = transcript.turns[-1]
            transcript.turns[-1] = (start, end, self.rules.error_floor)
            return self._member(
                index, transcript, MemberStatus.FINISHED, {"score": self.rules.error_floor, "env_error": 1.0}, "env"
            )
        return Member(index, int(MemberStatus.ABORTED), b"", b"", b"", (), (), (), 0.0, {}, f"{error!r}"[:32])

    def _member(
        self, index: int, transcript: Transcript, status: MemberStatus, scores: dict[str, float], finish: str
    ) -> Member:
        return Member(
            index=index, status=int(status), prompt_ids=pack_ids(transcript.prompt_ids),
            token_ids=pack_ids(transcript.token_ids), logprobs=pack_logprobs(transcript.logprobs),
            mask=tuple(transcript.mask), versions=tuple(transcript.versions), turns=tuple(transcript.turns),
            reward=float(sum(reward for _, _, reward in transcript.turns)), scores=scores, finish=finish,
        )

    async def _call(self, method: Callable[..., Any], argument: object) -> Any:
        """Await an async method; run a plain one in the pool. Both within env.step_timeout_s."""
        if inspect.iscoroutinefunction(method):
            work = method(argument)
        else:
            work = asyncio.get_running_loop().run_in_executor(self._pool, method, argument)
        started = asyncio.get_running_loop().time()
        try:
            return await asyncio.wait_for(work, self.rules.step_timeout_s)
        finally:
            self.env_s += asyncio.get_running_loop().time() - started

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def turn_seed(seed: int, turn: int) -> int:
    """Each turn draws from a stream of its own; turn 0 from the lease's seed itself."""
    return (seed + turn * 0x9E3779B97F4A7C15) % (1 << 64)


def _checked(step: Any) -> Step:
    if not isinstance(step, Step):
        raise TaskError(f"Env.step returned {type(step).__name__}, expected streamrl.Step")
    if not math.isfinite(step.reward) or (step.score is not None and not math.isfinite(step.score)):
        raise TaskError(f"Env.step returned reward {step.reward}, score {step.score}: both must be finite")
    return step
