"""One call for the answers of a group, where an environment scores them together."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

from streamrl.environment import HasGroupStep
from streamrl.errors import TaskError

Turn = tuple[HasGroupStep, str]
"""A member's environment and what the model wrote."""
Call = Callable[[Sequence[Turn]], Awaitable[Sequence[Any]]]


class GroupStep:
    """Members of a lease wait here with their answers; when none is missing, one call scores all that are there.

    Args:
        members: indices of the members that are played; each comes with its answer or leaves without one.
    """

    def __init__(self, members: Iterable[int]) -> None:
        self._missing = set(members)
        self._turns: dict[int, Turn] = {}
        self._complete = asyncio.Event()
        self._outcomes: asyncio.Future[dict[int, Any]] = asyncio.get_running_loop().create_future()

    async def step(self, index: int, turn: Turn, call: Call) -> Any:
        """Return this member's entry of the group call. Raises the error of the call, or of the entry."""
        self._turns[index] = turn
        self.leave(index)
        await self._complete.wait()
        if index == min(self._turns):
            await self._run(call, turn)
        outcome = (await asyncio.shield(self._outcomes))[index]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def leave(self, index: int) -> None:
        """This member is no longer waited for: it failed, or its answer is there."""
        self._missing.discard(index)
        if not self._missing:
            self._complete.set()

    async def _run(self, call: Call, turn: Turn) -> None:
        members = sorted(self._turns)
        try:
            found = list(await call([self._turns[member] for member in members]))
            if len(found) != len(members):
                name = f"{type(turn[0]).__name__}.step_group"
                raise TaskError(f"{name} returned {len(found)} steps for {len(members)} answers: return one for each.")
        except Exception as error:
            found = [error] * len(members)
        self._outcomes.set_result(dict(zip(members, found, strict=True)))
