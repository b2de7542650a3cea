"""An actor's part in a run by turns (`launch.share_gpus=turns`): the learner's turns are odd, the actors' even.

    odd     leases that are left go back, the engine gives its memory back, the hub is told for which turn
    even    the newest version wakes the engine; nothing is built or loaded before
    no hub  as odd: its successor's learner needs the memory to load
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any

import psutil

from actors.engines.base import Engine, GivesMemoryBack
from actors.weights.installer import Installer
from streamrl.errors import ConfigError
from streamrl.gpus import gpu_of

log = logging.getLogger("streamrl.actor")


class Turns:
    """Knows whose turn it is; used from one asyncio loop.

    Args:
        release: ends leases, and has the engine give its memory back, if there is one; returns whether it has.
        wake: called when the actors' turn begins.
        report: tells the hub the turn that memory was released for.
        spawn: runs `release` concurrently with the caller.
    """

    def __init__(
        self, release: Callable[[], Awaitable[bool]], wake: Callable[[], None], report: Callable[[int], None],
        spawn: Callable[[Coroutine[Any, Any, None]], Any],
    ) -> None:
        self._release, self._wake, self._report, self._spawn = release, wake, report, spawn
        self._number = 0
        self._actors = asyncio.Event()
        self._actors.set()

    @property
    def actors(self) -> bool:
        """Tell whether it is the actors' turn, or there are no turns."""
        return self._actors.is_set()

    async def until_actors(self) -> None:
        """Wait for the actors' turn."""
        await self._actors.wait()

    def hear(self, number: int, *, joined: bool = False) -> None:
        """The hub names the turn; `joined` in a WELCOME, to which every odd one is answered anew."""
        if number == self._number and not (joined and number % 2):
            return
        self._number = number
        if number % 2:
            self._actors.clear()
            self._spawn(self._give_back(number))
        elif not self._actors.is_set():
            self._actors.set()
            self._wake()

    def lost(self) -> None:
        """No hub answers."""
        if self._number and not self._number % 2:
            self.hear(self._number + 1)

    async def _give_back(self, number: int) -> None:
        if not await self._release():
            return
        if self._number == number:
            self._report(number)
        elif self._actors.is_set():  # it has ended meanwhile, and what woke the engine then came too soon
            self._wake()


def check_turns(engine: Engine) -> None:
    """Raise ConfigError for an engine that cannot take turns."""
    if not isinstance(engine, GivesMemoryBack):
        raise ConfigError(
            f"launch.share_gpus=turns, but the engine {engine.name} has no `release`: give it one (GivesMemoryBack in "
            "actors/engines/base.py), or take launch.share_gpus=true"
        )


async def release(engine: Engine, installer: Installer, device: str) -> int | None:
    """Have the engine give its memory back; how many bytes that were, None if it held no version."""
    installed, document = engine.installed, installer.document
    before = await asyncio.to_thread(memory_held, device)
    await installer.release()
    if installed is None or document is None:
        return None
    after = await asyncio.to_thread(memory_held, device)
    log.info(
        "memory of version %s given back: %d bytes held before, %d after, weights of %d",
        installed, before, after, document.nbytes,
    )
    return max(0, before - after)


def memory_held(device: str) -> int:
    """Bytes of an engine's GPU that are in use; on a CPU those resident in this process and its children."""
    if (gpu := gpu_of(device)) is not None:
        return gpu.total_bytes - gpu.free_bytes
    this, held = psutil.Process(), 0
    for process in (this, *this.children(recursive=True)):
        with suppress(psutil.Error):  # it has ended meanwhile
            held += process.memory_info().rss
    return held
