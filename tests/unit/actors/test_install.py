"""Versions on their way to an engine: none waits for ever, whatever the learner, the line or the engine does."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from actors.engines.scripted import ScriptedEngine
from actors.install import Installer
from streamrl.errors import WeightsError
from streamrl.messages import Manifest, VersionRef
from streamrl.weights.document import Superseded
from tests.unit.actors.parts import Weights, run, says, until

pytestmark = pytest.mark.timeout(60)


def ref(version: int) -> VersionRef:
    return VersionRef(1, version)


class Line:
    """Fetches that end when the test lets them, or when they are abandoned. Every version has other weights."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.abandoned: list[int] = []
        self.cancelled: dict[int, threading.Event] = {}
        self._documents = {number: Weights() for number in range(1, 20)}
        self._ends = {number: threading.Event() for number in self._documents}
        self._fails: set[int] = set()
        for number, weights in self._documents.items():
            weights.body[0] = number

    def lets(self, number: int, *, fail: bool = False) -> None:
        if fail:
            self._fails.add(number)
        self._ends[number].set()

    async def begins(self, number: int) -> None:
        await until(lambda: number in self.begun)

    async def announced(self, installer: Installer, number: int) -> asyncio.Task[Any]:
        """The installer has heard of this version, and has begun, abandoned or put off what it will."""
        weights = self._documents[number]
        task = asyncio.ensure_future(installer.install(weights.manifest(ref(number)), (), weights.layout))
        await until(lambda: installer._target == ref(number))
        return task

    def __call__(self, manifest: Manifest, offers: Any, layout: Any, *, cancelled: threading.Event, **_: Any):
        number = manifest.ref.version
        self.begun.append(number)
        self.cancelled[number] = cancelled
        while not (self._ends[number].wait(0.001) or cancelled.is_set()):
            pass
        if cancelled.is_set():
            self.abandoned.append(number)
            raise Superseded(f"{manifest.ref} was abandoned")
        if number in self._fails:
            raise WeightsError("the line broke")
        return self._documents[number].fetch(manifest, offers, layout)


def test_after_an_abandoned_fetch_the_next_one_ends_and_the_newest_of_the_others_follows():
    async def work():
        line, engine = Line(), ScriptedEngine(says("ok"))
        installer = Installer(engine, line)
        first = await line.announced(installer, 1)
        await line.begins(1)
        second = await line.announced(installer, 2)
        await line.begins(2)
        assert await first is None and line.abandoned == [1]
        others = [await line.announced(installer, number) for number in (3, 4, 5)]
        assert line.begun == [1, 2] and not line.cancelled[2].is_set(), "2 is left to end, and nothing competes with it"
        line.lets(2)
        assert (await second).ok and engine.installed == ref(2)
        await line.begins(5)
        line.lets(5)
        assert [report and report.ok for report in await asyncio.gather(*others)] == [None, None, True]
        assert engine.installs == [ref(2), ref(5)] and line.begun == [1, 2, 5]
        installer.close()

    run(work)


def test_a_learner_that_publishes_during_every_fetch_still_has_every_second_one_installed():
    async def work():
        line, engine = Line(), ScriptedEngine(says("ok"))
        installer = Installer(engine, line)
        tasks = [await line.announced(installer, 1)]
        await line.begins(1)
        for number in range(2, 12):
            tasks.append(await line.announced(installer, number))
            if number % 2:
                line.lets(number - 1)
            await line.begins(number)
        await until(lambda: len(engine.installs) == 5)
        assert engine.installs == [ref(number) for number in (2, 4, 6, 8, 10)]
        assert line.abandoned == [1, 3, 5, 7, 9]
        installer.close()
        await asyncio.gather(*tasks)

    run(work)


def test_a_fetch_that_failed_by_itself_has_had_its_chance():
    async def work():
        line, engine = Line(), ScriptedEngine(says("ok"))
        installer = Installer(engine, line)
        await line.announced(installer, 1)
        await line.begins(1)
        broken = await line.announced(installer, 2)
        await line.begins(2)
        line.lets(2, fail=True)
        assert not (await broken).ok
        await line.announced(installer, 3)
        await line.begins(3)
        newest = await line.announced(installer, 4)
        await line.begins(4)  # 3 made room for it
        assert line.abandoned == [1, 3]
        line.lets(4)
        assert (await newest).ok
        installer.close()

    run(work)
