"""Shares of an actor's time for the heartbeat: generation, environments, installs, and waiting for leases.

    no episode                     starved: it waits for leases
    episodes, none in the engine   idle, as is the time above: all of them are in their environments
    a sequence in the engine       generating, unless an install pauses the engine
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from math import ceil

import psutil

from streamrl.gpus import gpu_use

NUM_RECENT_STEPS = 256
"""Environment steps that the percentile is of."""


class Inside:
    """Counter of those inside `with` blocks; `before` is called before each change.

    It is a context manager for any number of blocks: one made by a generator takes three times as long, and an episode
    has seven.
    """

    def __init__(self, before: Callable[[], None] | None = None) -> None:
        self.num_inside = 0
        self._before = before

    def __enter__(self) -> None:
        if self._before is not None:
            self._before()
        self.num_inside += 1

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            self._before()
        self.num_inside -= 1


class LoadMeter:
    """Adds up seconds from its making on; used from one event loop. `clock` is in seconds, monotonic."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = self._at = clock()
        self._playing = Inside()
        self._off_engine = Inside()
        self._generating = Inside(self._count)
        self._in_environment = Inside(self._count)
        self._idle_s = self._starved_s = self._paused_s = self._generation_s = self._environment_s = 0.0
        self._steps_s: deque[float] = deque(maxlen=NUM_RECENT_STEPS)

    def playing(self) -> AbstractContextManager[None]:
        """Around an episode."""
        return self._playing

    def off_engine(self) -> AbstractContextManager[None]:
        """Around what an episode does after a generation: its step, and the wait for its group's common one."""
        return self._off_engine

    @property
    def num_for_engine(self) -> int:
        """Episodes that have, or will soon ask for, a place in the engine."""
        return self._playing.num_inside - self._off_engine.num_inside

    def generating(self) -> AbstractContextManager[None]:
        """Around a call of the engine's `generate`."""
        return self._generating

    def in_environment(self) -> AbstractContextManager[None]:
        """Around a call of an environment, the wait for a thread included."""
        return self._in_environment

    def enter_environment(self) -> None:
        self._in_environment.__enter__()

    def leave_environment(self) -> None:
        self._in_environment.__exit__()

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """`in_environment`, of a step: its duration goes into the percentile."""
        began = self._clock()
        try:
            with self.in_environment():
                yield
        finally:
            self._steps_s.append(self._clock() - began)

    def paused(self, seconds: float) -> None:
        """An install has kept the engine from generating."""
        self._paused_s += seconds

    def numbers(self) -> dict[str, float]:
        """Seconds since the start, by the names that the hub reads; the last is a 95th percentile."""
        self._count()
        return {
            "up_s": self._at - self._began,
            "idle_s": self._idle_s,
            "starved_s": self._starved_s,
            "paused_s": self._paused_s,
            "generation_s": self._generation_s,
            "environment_s": self._environment_s,
            "env_step_p95_s": self._step_p95_s(),
        }

    def _count(self) -> None:
        """Add the time since the last change, before the next one."""
        now = self._clock()
        passed, self._at = now - self._at, now
        self._generation_s += passed * self._generating.num_inside
        self._environment_s += passed * self._in_environment.num_inside
        if not self._generating.num_inside:
            self._idle_s += passed
            self._starved_s += 0.0 if self._in_environment.num_inside else passed

    def _step_p95_s(self) -> float:
        steps = sorted(self._steps_s)
        return steps[ceil(0.95 * len(steps)) - 1] if steps else 0.0


USE_EVERY_S = 10.0


class UseMeter:
    """Memory and processors of an actor's process, host and GPUs, for the heartbeat."""

    def __init__(self) -> None:
        self.numbers: dict[str, float] = {}
        psutil.cpu_percent()  # the first call only starts the clock

    async def watch(self) -> None:
        """Measure every ten seconds, the first time after one; nvidia-smi opens no context on a GPU."""
        await asyncio.sleep(1.0)
        while True:
            percent, used = await asyncio.to_thread(gpu_use, os.environ)
            self.numbers = {
                "host_cpu_percent": psutil.cpu_percent(),
                "rss_bytes": float(psutil.Process().memory_info().rss),
                "gpu_percent": percent,
                "gpu_used_bytes": used,
                "host_memory_percent": psutil.virtual_memory().percent,
            }
            await asyncio.sleep(USE_EVERY_S)
