from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from actors.engines.base import EngineStats, InstallTimes
from actors.weights.installer import Installer, InstallState
from streamrl.errors import EngineError, WeightsError
from streamrl.messages import InstallSource, VersionRef
from streamrl.weights.document import VersionRetired
from streamrl.weights.manifest import make_layout
from streamrl.weights.shm.transport import shm_offer
from streamrl.weights.transport import WeightSource


class FakeEngine:
    """Holds bytes instead of a model; `fail` maps a version to what its install raises after mixing the model."""

    name, slots = "fake", 1

    def __init__(self, fail: dict[VersionRef, list[BaseException]] | None = None) -> None:
        self.installed: VersionRef | None = None
        self.weights: dict[str, bytes] = {}
        self.history: list[VersionRef] = []
        self.fail = fail or {}
        self.hang: asyncio.Event | None = None
        self.tells: asyncio.Event | None = None  # an install returns only then, although the version serves already

    async def install(self, tensors: Mapping[str, Any], ref: VersionRef) -> InstallTimes:
        if self.hang is not None:
            await self.hang.wait()
        if errors := self.fail.get(ref):
            error = errors.pop(0)
            if not isinstance(error, WeightsError):
                self.weights, self.installed = {"mixed": b""}, None
            raise error
        self.weights = {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}
        self.installed = ref
        self.history.append(ref)
        if self.tells is not None:
            await self.tells.wait()
        return InstallTimes(pause_s=0.001, install_s=0.002)

    def stats(self) -> EngineStats:
        return EngineStats()


class Gate:
    """A fetch that waits at a gate for chosen versions, as a slow transfer does; the rest is the real thing."""

    def __init__(self, source: WeightSource, slow: set[VersionRef]) -> None:
        self._source, self._slow = source, slow
        self.waiting, self.open = threading.Event(), threading.Event()
        self.fetched: list[VersionRef] = []

    def __call__(self, manifest, offers, layout, *, cancelled, deadline_s):
        self.fetched.append(manifest.ref)
        if manifest.ref in self._slow:
            self.waiting.set()
            while not (self.open.is_set() or cancelled.is_set()):
                cancelled.wait(0.01)
        return self._source.fetch(manifest, offers, layout, cancelled=cancelled, deadline_s=deadline_s)


@pytest.fixture
def source(context) -> WeightSource:
    return WeightSource(context)


@pytest.fixture
def announce(publish, layout, shm):
    """announce(version, epoch=1, seed=0) -> the arguments of Installer.install."""
    shm._keep_versions = 10

    def make(version: int, *, epoch: int = 1, seed: int = 0):
        manifest, path, body = publish(layout, version, epoch=epoch, seed=seed)
        return manifest, [shm_offer(path)], layout

    return make


def test_a_version_is_brought_verified_and_live(announce, source, publish, layout):
    manifest, offers, _ = announce(1)
    engine = FakeEngine()

    async def play():
        installer = Installer(engine, source.fetch)
        report = await installer.install(manifest, offers, layout)
        installer.close()
        return report, installer

    report, installer = asyncio.run(play())

    assert (report.ok, report.error, report.source) == (True, "", InstallSource.SHM)
    assert (report.target, report.root, report.nbytes) == (manifest.ref, manifest.root, 1888)
    assert (report.pause_s, report.install_s) == (0.001, 0.002) and report.verify_s > 0
    assert engine.installed == manifest.ref and installer.state is InstallState.IDLE
    document = installer.document
    assert document is not None and document.tensors()["norm"].numpy().tobytes() == engine.weights["norm"]


def test_a_newer_announce_supersedes_a_running_fetch(announce, source):
    first, second = announce(1), announce(2)
    engine, fetch = FakeEngine(), Gate(source, {VersionRef(1, 1)})

    async def play():
        installer = Installer(engine, fetch)
        slow = asyncio.create_task(installer.install(*first))
        await asyncio.to_thread(fetch.waiting.wait, 10)
        assert installer.state is InstallState.FETCHING
        again = await installer.install(*first)
        newer = await installer.install(*second)
        older = await slow
        installer.close()
        return again, newer, older

    again, newer, older = asyncio.run(asyncio.wait_for(play(), 30))

    assert again is None and older is None and newer.ok
    assert engine.history == [VersionRef(1, 2)] and fetch.fetched == [VersionRef(1, 1), VersionRef(1, 2)]


def test_a_verified_version_is_installed_even_if_a_newer_one_is_on_its_way(announce, source):
    first, second = announce(1), announce(2)
    engine, fetch = FakeEngine(), Gate(source, {VersionRef(1, 2)})

    async def play():
        installer = Installer(engine, fetch)
        engine.hang = asyncio.Event()
        early = asyncio.create_task(installer.install(*first))
        while installer.state is not InstallState.INSTALLING:
            await asyncio.sleep(0)
        late = asyncio.create_task(installer.install(*second))
        await asyncio.to_thread(fetch.waiting.wait, 10)
        engine.hang.set()
        reports = [await early]
        fetch.open.set()
        reports.append(await late)
        installer.close()
        return reports

    reports = asyncio.run(asyncio.wait_for(play(), 30))

    assert [report.ok for report in reports] == [True, True]
    assert engine.history == [VersionRef(1, 1), VersionRef(1, 2)]


@pytest.mark.parametrize("lower", [VersionRef(2, 5), VersionRef(2, 4), VersionRef(1, 99)])
def test_anything_not_higher_is_refused_and_the_engine_not_touched(lower, announce, source):
    engine = FakeEngine()
    current = announce(5, epoch=2)
    other = announce(lower.version, epoch=lower.learner_epoch) if lower != VersionRef(2, 5) else None

    async def play():
        installer = Installer(engine, source.fetch)
        await installer.install(*current)
        if other is None:  # the same number with other bytes: a forged or confused manifest
            forged = msgspec.structs.replace(current[0], root=bytes(16))
            return await installer.install(forged, *current[1:])
        return await installer.install(*other)

    report = asyncio.run(play())

    assert not report.ok and "not higher than 2:5" in report.error
    assert engine.history == [VersionRef(2, 5)]


def test_hearing_again_of_the_installed_version_confirms_it(announce, source):
    engine, current = FakeEngine(), announce(5)

    async def play():
        installer = Installer(engine, source.fetch)
        await installer.install(*current)
        return await installer.install(*current)

    report = asyncio.run(play())

    assert report.ok and report.source == InstallSource.SAME and report.nbytes == 0
    assert engine.history == [VersionRef(1, 5)]


def test_hearing_again_of_a_version_that_serves_before_its_install_returns_reports_it_once(announce, source):
    engine = FakeEngine()

    async def play():
        installer = Installer(engine, source.fetch)
        await installer.install(*announce(1))
        engine.tells = asyncio.Event()
        two = announce(2, seed=1)
        first = asyncio.create_task(installer.install(*two))
        while engine.installed != VersionRef(1, 2):
            await asyncio.sleep(0)
        again = await installer.install(*two)
        engine.tells.set()
        return again, await first

    again, first = asyncio.run(play())
    assert again is None and first.ok and engine.history == [VersionRef(1, 1), VersionRef(1, 2)]


def test_the_same_bytes_under_a_new_epoch_are_renamed_without_a_transfer(announce, source):
    before, after, next_one = announce(5, seed=9), announce(5, epoch=2, seed=9), announce(6, epoch=2)
    engine, fetch = FakeEngine(), Gate(source, set())

    async def play():
        installer = Installer(engine, fetch)
        return [await installer.install(*version) for version in (before, after, next_one)]

    reports = asyncio.run(play())

    assert [report.source.name for report in reports] == ["SHM", "SAME", "SHM"]
    assert all(report.ok for report in reports) and reports[1].root == after[0].root
    assert engine.history == [VersionRef(1, 5), VersionRef(2, 5), VersionRef(2, 6)]
    assert fetch.fetched == [VersionRef(1, 5), VersionRef(2, 6)]


def damaged(announced, layout):
    manifest, (offer,), _ = announced
    with open(offer.name, "r+b") as file:
        file.seek(64 + 500)
        file.write(b"\xaa\xbb\xcc")
    return manifest, [offer], layout


def test_a_damaged_document_is_reported_and_the_old_version_keeps_serving(announce, source, layout):
    good, bad, next_one = announce(1), damaged(announce(2), layout), announce(3)
    engine = FakeEngine()

    async def play():
        installer = Installer(engine, source.fetch)
        reports = [await installer.install(*good), await installer.install(*bad)]
        assert engine.installed == VersionRef(1, 1)
        return [*reports, await installer.install(*next_one)]

    reports = asyncio.run(play())

    assert [report.ok for report in reports] == [True, False, True]
    assert "bucket 1 of 5 of version 1:2 has digest" in reports[1].error
    assert engine.history == [VersionRef(1, 1), VersionRef(1, 3)]


def test_a_retired_version_is_reported_and_the_next_announce_is_taken(announce, layout, source):
    def gone(*args, **kwargs):
        raise VersionRetired("version 1:1 was retired")

    first, second = announce(1), announce(2)
    engine = FakeEngine()

    async def play():
        installer = Installer(engine, gone)
        report = await installer.install(*first)
        installer._fetch = source.fetch
        return report, await installer.install(*second)

    report, later = asyncio.run(play())

    assert not report.ok and "retired" in report.error and later.ok


def test_an_engine_that_refuses_the_names_keeps_its_version_without_a_rollback(announce, source):
    first, second = announce(1), announce(2)
    engine = FakeEngine({VersionRef(1, 2): [WeightsError("tensor 'lm_head' is missing")]})

    async def play():
        installer = Installer(engine, source.fetch)
        return await installer.install(*first), await installer.install(*second)

    _, report = asyncio.run(play())

    assert not report.ok and "lm_head" in report.error
    assert engine.history == [VersionRef(1, 1)]


def test_an_engine_that_fails_halfway_gets_the_previous_document_back(announce, source):
    first, second, third = announce(1), announce(2), announce(3)
    engine = FakeEngine({VersionRef(1, 2): [RuntimeError("out of memory at layer 7")]})

    async def play():
        installer = Installer(engine, source.fetch)
        await installer.install(*first)
        before = dict(engine.weights)
        report = await installer.install(*second)
        assert engine.weights == before and engine.installed == VersionRef(1, 1)
        return report, await installer.install(*third)

    report, later = asyncio.run(play())

    assert not report.ok and "layer 7" in report.error and later.ok
    assert engine.history == [VersionRef(1, 1), VersionRef(1, 1), VersionRef(1, 3)]


def test_an_engine_that_cannot_go_back_either_must_not_go_on(announce, source):
    first, second = announce(1), announce(2)
    engine = FakeEngine({VersionRef(1, 2): [RuntimeError("layer 7")]})

    async def play():
        installer = Installer(engine, source.fetch)
        await installer.install(*first)
        engine.fail[VersionRef(1, 1)] = [RuntimeError("still broken")]
        await installer.install(*second)

    with pytest.raises(EngineError, match="layer 7.*still broken.*mixed"):
        asyncio.run(play())


def test_a_hung_engine_is_an_error_with_a_deadline(announce, source):
    async def play():
        engine = FakeEngine()
        engine.hang = asyncio.Event()
        await Installer(engine, source.fetch, install_deadline_s=0.05).install(*announce(1))

    with pytest.raises(EngineError, match="no progress for 0.05 s"):
        asyncio.run(asyncio.wait_for(play(), 30))


def test_a_manifest_of_another_model_is_refused_before_anything_is_fetched(announce, source, layout):
    manifest, offers, _ = announce(1)
    fetch = Gate(source, set())

    async def play():
        return await Installer(FakeEngine(), fetch).install(manifest, offers, make_layout([("w", "uint8", (9,))], 9))

    report = asyncio.run(play())

    assert not report.ok and "same model" in report.error and fetch.fetched == []


def test_cancelling_the_installing_task_abandons_the_fetch(announce, source):
    fetch = Gate(source, {VersionRef(1, 1)})
    ended = threading.Event()

    def watched(*args, **kwargs):
        try:
            return fetch(*args, **kwargs)
        finally:
            ended.set()

    async def play():
        installer = Installer(FakeEngine(), watched)
        task = asyncio.create_task(installer.install(*announce(1)))
        await asyncio.to_thread(fetch.waiting.wait, 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return await asyncio.to_thread(ended.wait, 10)

    assert asyncio.run(play())
