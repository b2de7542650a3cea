"""Several rewards with weights, each logged under its own name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from envs.async_compat import call, suited
from envs.reward_values import as_step
from streamrl.environment import ChatMessage, Record, RewardFunction, Step


class Combined:
    """The weighted sum. The score, and the right completion of a record, are those of the first reward that has one.

    A reward that is None does not apply to this answer and adds nothing; one at least must apply.

    Beside one that is awaited, the others must be fast, as they run on the actor's loop.
    """

    def __init__(self, rewards: Mapping[str, RewardFunction], weights: Mapping[str, float]) -> None:
        self._rewards, self._weights = rewards, weights
        self.system_prompt = _first(rewards, "system_prompt")
        self.may_block = any(getattr(reward, "may_block", False) for reward in rewards.values())
        self.reads_answer = any(getattr(reward, "reads_answer", True) for reward in rewards.values())
        target = _first(rewards, "target")
        if target is not None:
            self.target = target
        self.is_no_answer = _first(rewards, "is_no_answer")
        self._set_up = [one for one in rewards.values() if hasattr(one, "set_up")]
        if self._set_up:
            self.set_up, self.tear_down = self._all("set_up"), self._all("tear_down")

    async def __call__(self, record: Record, completion: str, prompt: Sequence[ChatMessage]) -> Step:
        steps, parts, last = {}, dict[str, float](), list(self._rewards)[-1]
        for name, reward in self._rewards.items():
            value = await call(reward, record, completion, prompt)
            if value is None and (steps or name != last):
                continue
            steps[name] = as_step(value, f"reward {name}")
            parts |= {**steps[name].parts, name: steps[name].reward}
        total = sum(self._weights[name] * step.reward for name, step in steps.items())
        score = next((step.score for step in steps.values() if step.score is not None), None)
        return Step(reward=total, score=score, parts=parts)

    def _all(self, method: str) -> Callable[[], None]:
        def call() -> None:
            for reward in self._set_up:
                getattr(reward, method)()

        return call


def combine(rewards: Mapping[str, RewardFunction], weights: Mapping[str, float]) -> Combined:
    """One reward of several; `weights` has the same names."""
    return suited(Combined, *rewards.values())(rewards, weights)


def _first(rewards: Mapping[str, RewardFunction], attribute: str) -> Any:
    return next((found for reward in rewards.values() if (found := getattr(reward, attribute, None)) is not None), None)
