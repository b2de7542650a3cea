"""Environments of an actor: how many there are at once, and how each is closed when its episode is over."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from typing import Any

from actors.env_calls.executor import NOTHING, EnvExecutor, where
from actors.load import LoadMeter
from streamrl.environment import Env
from streamrl.errors import describe

log = logging.getLogger("streamrl.actor")


class Instances:
    """Places for environments.

    Args:
        limit: of environments that are not closed yet; None is no limit.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._places = None if limit is None else asyncio.Semaphore(limit)
        self._closing: set[asyncio.Task[None]] = set()
        self._num_failed = 0

    @asynccontextmanager
    async def one(
        self,
        make: Callable[[], Env],
        executor: EnvExecutor,
        limit_s: float,
        load: LoadMeter,
    ) -> AsyncIterator[tuple[Env, ExitStack]]:
        """A fresh environment, and its place, which may be given back early; after the block it is closed.

        No episode waits for that, and a canceled one is closed too; the place is free when it is done.
        """
        place = ExitStack()
        if self._places is not None:
            with load.in_environment(), load.off_engine():
                await self._places.acquire()
            place.callback(self._places.release)
        with place:
            env = make()
            try:
                yield env, place
            finally:
                close = getattr(env, "close", None)
                if callable(close):
                    task = asyncio.ensure_future(self._close(close, executor, limit_s, place.pop_all()))
                    self._closing.add(task)
                    task.add_done_callback(self._closing.discard)

    async def settle(self) -> None:
        """Wait for all that are being closed."""
        await asyncio.gather(*self._closing)

    async def _close(
        self, close: Callable[[], Any], executor: EnvExecutor, limit_s: float, place: ExitStack
    ) -> None:
        with place:
            try:
                await executor.run(close, NOTHING, limit_s)
            except Exception as error:  # a user's code may raise anything, and the episode is over
                self._num_failed += 1
                if self._num_failed & (self._num_failed - 1) == 0:  # the 1st, 2nd, 4th ...: a log is not a flood
                    log.warning("%s failed, time %d: %s", where(close), self._num_failed, describe(error))
