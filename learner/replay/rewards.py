"""Rewards of recorded answers, computed again by the run's task."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from envs.adapters.awaiting import is_async
from streamrl.environment import Env, Record, Step, Task
from streamrl.errors import ContentError
from streamrl.messages import TO_HUB, Group, Member, MemberStatus
from streamrl.messages.codec import Decoder, unpack_ids

NEEDS_ENGINE = {
    "rollout": "its environment drives the generation, which needs an engine",
    "set_input_text": "its environment reads the model's input as text, which is not recorded",
}
_DECODER = Decoder(TO_HUB, 1 << 31)


@dataclass(frozen=True, slots=True)
class RewardAgain:
    """One member's reward as it was recorded, and as it is now; None where it cannot be computed, for `reason`."""

    index: int
    recorded: float
    again: float | None
    reason: str = ""

    @property
    def agrees(self) -> bool:
        """Not a disagreement: equal, up to the rounding of sums, or not to be computed."""
        return self.again is None or math.isclose(self.again, self.recorded, rel_tol=1e-6, abs_tol=1e-9)


def rewards_again(
    frame: bytes, record: Record, task: Task, text_of: Callable[[list[int]], str], *, max_turns: int = 1,
    limit_s: float = 30.0,
) -> list[RewardAgain]:
    """Play the recorded answers of a GROUP frame again; aborted members are left out.

    Args:
        record: its prompt, of the task's train split.
        text_of: tokens as text, without special ones: what environments were given.
        max_turns: env.max_turns.
        limit_s: env.step_timeout_s, of each call.
    Raises:
        WireError: the frame is no group.
    """
    group = _DECODER.decode(frame)
    if not isinstance(group, Group):
        raise ContentError("kind", f"expected a GROUP frame, got {type(group).__name__}")
    members = [one for one in group.members if one.status != MemberStatus.ABORTED]
    return asyncio.run(_Players(task, record, text_of, max_turns, limit_s).all(members))


@dataclass(frozen=True, slots=True)
class _Players:
    """The environments of one group."""

    task: Task
    record: Record
    text_of: Callable[[list[int]], str]
    max_turns: int
    limit_s: float

    async def all(self, members: Sequence[Member]) -> list[RewardAgain]:
        envs = [self.task.env() for _ in members]
        if not members or not hasattr(envs[0], "step_group"):
            return [await self._one(member, env) for member, env in zip(members, envs, strict=True)]
        try:  # answers of a group that are scored together
            for env in envs:
                await self._call(env.reset, dict(self.record))
            texts = [self._texts(member)[-1] for member in members]
            steps = await self._call(envs[0].step_group, list(zip(envs, texts, strict=True)))
        except Exception as error:  # a task's code may raise anything
            return [RewardAgain(one.index, one.reward, None, _described(error)) for one in members]
        return [
            RewardAgain(one.index, one.reward, None, _described(step)) if isinstance(step, Exception)
            else RewardAgain(one.index, one.reward, float(step.reward))
            for one, step in zip(members, steps, strict=True)
        ]

    async def _one(self, member: Member, env: Env) -> RewardAgain:
        reason = next((text for name, text in NEEDS_ENGINE.items() if hasattr(env, name)), "")
        if "env_error" in member.scores:
            reason = "its environment failed then, and env.reward_floor was paid"
        if reason:
            return RewardAgain(member.index, member.reward, None, reason)
        try:
            return RewardAgain(member.index, member.reward, await self._played(member, env))
        except Exception as error:  # see `all`
            return RewardAgain(member.index, member.reward, None, _described(error))

    async def _played(self, member: Member, env: Env) -> float:
        await self._call(env.reset, dict(self.record))
        total, texts = 0.0, self._texts(member)
        for number, text in enumerate(texts, start=1):
            last = number == self.max_turns
            play = (getattr(env, "last_step", None) if last else None) or env.step
            step: Step = await self._call(play, text)
            cut = number == len(texts) and not step.done and not last
            if cut and hasattr(env, "cut_step"):  # its words left no room for another turn
                step = await self._call(env.cut_step, text)
            total += step.reward
            if step.done and number < len(texts):
                return math.nan  # it was not over then
        return total

    def _texts(self, member: Member) -> list[str]:
        ids = unpack_ids(member.token_ids).tolist()
        return [self.text_of(ids[turn.start : turn.end]) for turn in member.turns]

    async def _call(self, method: Callable[[Any], Any], argument: Any) -> Any:
        call = method(argument) if is_async(method) else asyncio.to_thread(method, argument)
        return await asyncio.wait_for(call, self.limit_s)


def _described(error: Exception) -> str:
    return f"the task failed: {type(error).__name__}: {error}"[:200]


def count_reasons(found: Sequence[RewardAgain]) -> Mapping[str, int]:
    """Reason -> how many rewards could not be computed for it."""
    reasons = [one.reason for one in found if one.again is None]
    return {reason: reasons.count(reason) for reason in dict.fromkeys(reasons)}
