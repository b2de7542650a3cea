"""Versions on their way to an engine: none waits without limit, whatever the learner, the transport or engine does."""

import asyncio
import sys
import threading
from typing import Any

import pytest

import actors.__main__
from actors import runtime
from actors.engines.base import EngineStats, GenerateRequest
from actors.engines.native import engine as native
from actors.engines.native.engine import NativeEngine
from actors.weights.installer import Installer, InstallState
from actors.worker import EXIT_ENGINE_HUNG
from streamrl.errors import EngineError, WeightsError
from streamrl.messages import Manifest, ReturnReason, Sampling, VersionRef
from streamrl.transport.session import LinkClosed
from streamrl.weights.document import Document, Superseded
from tests.fakes.scripted_engine import ScriptedEngine
from tests.kit.loops import DEADLINE_S, jump, jumping, run, until
from tests.unit.actors.fakes import Weights, actor, always, lease, says
from tests.unit.actors.test_probe import ProbedWeights
from tests.unit.actors.test_worker import tiny_engine


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
        self.deaf: set[int] = set()  # those that do not hear that they are abandoned
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
        while not self._ends[number].wait(0.001) and (number in self.deaf or not cancelled.is_set()):
            pass
        if cancelled.is_set():
            self.abandoned.append(number)
            raise Superseded(f"{manifest.ref} was abandoned")
        if number in self._fails:
            raise WeightsError("the line broke")
        return self._documents[number].fetch(manifest, offers, layout)


async def test_after_an_abandoned_fetch_the_next_one_ends_and_the_newest_of_the_others_follows():
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


async def test_a_learner_that_publishes_during_every_fetch_still_has_every_second_one_installed():
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


async def test_a_fetch_that_failed_by_itself_has_had_its_chance():
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
    await line.begins(4)
    await until(lambda: line.abandoned == [1, 3])  # 3 made room for it; its thread notices a moment later
    line.lets(4)
    assert (await newest).ok
    installer.close()


@jumping
async def test_a_fetch_that_hangs_beyond_its_deadline_keeps_no_newer_version_waiting():
    line, engine = Line(), ScriptedEngine(says("ok"))
    installer = Installer(engine, line, fetch_deadline_s=120.0)
    await line.announced(installer, 1)
    await line.begins(1)
    await line.announced(installer, 2)
    await line.begins(2)
    line.deaf.add(2)
    await line.announced(installer, 3)
    await jump(100.0)
    newest = await line.announced(installer, 4)
    assert line.begun == [1, 2]
    await jump(31.0)  # 3 has waited for long enough, and lets 4 go first
    await line.begins(4)
    line.lets(4)
    assert (await newest).ok and engine.installs == [ref(4)]
    line.lets(2)
    installer.close()


# --- an engine that hangs, and one that is only busy ------------------------------------------------------------------


class Held(ScriptedEngine):
    """Installs and scores when the test lets it; says meanwhile what the test has it say of itself."""

    def __init__(self) -> None:
        super().__init__(says("ok"))
        self.go, self.steps, self.blocked = asyncio.Event(), 0, False

    async def install(self, tensors, ref):
        await self.go.wait()
        return await super().install(tensors, ref)

    def stats(self) -> EngineStats:
        return EngineStats(steps_total=self.steps, blocked=self.blocked)


async def installing(engine: Held) -> tuple[Installer, asyncio.Task]:
    """An installer with a deadline of 120 s that waits for its engine, and the installation; the clock runs."""
    line = Line()
    installer = Installer(engine, line, install_deadline_s=120.0)
    line.lets(1)
    install = await line.announced(installer, 1)
    await until(lambda: installer.state is InstallState.INSTALLING)
    await jump(0.0)
    return installer, install


@pytest.mark.parametrize("sign", ["steps", "blocked"])
@jumping
async def test_an_install_may_wait_for_as_long_as_the_engine_shows_why(sign):
    installer, install = await installing(engine := Held())
    for _ in range(10):
        setattr(engine, sign, getattr(engine, sign) + 1)
        await jump(100.0)
    assert not install.done()
    engine.go.set()
    assert (await install).ok
    installer.close()


@jumping
async def test_an_engine_that_falls_silent_while_it_is_to_install_is_hung():
    installer, install = await installing(engine := Held())
    engine.steps += 1
    await jump(100.0)
    await jump(100.0)
    assert not install.done(), "100 s after its last step"
    await jump(50.0)
    with pytest.raises(EngineError, match="did not install version 1:1 and made no progress for 120 s"):
        await install
    assert engine.installs == [], "nor is anything loaded in its place"
    installer.close()


@jumping
async def test_a_large_document_may_be_copied_for_longer_before_its_engine_is_hung(monkeypatch):
    """70B are 141 GB: a minute to stage and load them alone, without one counter of vLLM's that moves."""
    monkeypatch.setattr(Document, "nbytes", 141 * 10**9)

    line, engine = Line(), Held()
    installer = Installer(engine, line, install_deadline_s=120.0)
    line.lets(1)
    install = await line.announced(installer, 1)
    await until(lambda: installer.state is InstallState.INSTALLING)
    await jump(0.0)
    await jump(1400.0)
    assert not install.done()
    await jump(140.0)
    with pytest.raises(EngineError, match="made no progress for 1530 s"):
        await install
    installer.close()


@jumping
async def test_with_finish_an_install_waits_for_sequences_that_take_longer_than_its_deadline():
    class Metronome:
        """A tokenizer that holds the engine's thread in every step until the test lets it take one more."""

        eos_token_id, permits = None, threading.Semaphore(0)

        def decode(self, ids, **_):
            assert self.permits.acquire(timeout=DEADLINE_S)
            return "x" * len(ids)

    plain, model = tiny_engine()
    await plain.close()  # only its model is wanted
    metronome, weights = Metronome(), Weights(model)
    engine = NativeEngine(model, metronome, max_num_seqs=1, max_tokens=64, num_threads=1, install_policy="drain")
    installer = Installer(engine, weights.fetch)
    assert (await installer.install(weights.manifest(ref(1)), (), weights.layout)).ok
    weights.body[0] ^= 1
    request = GenerateRequest([5, 6, 7], Sampling(), 8, seed=0, stop=("never",), ignore_eos=True)
    running = asyncio.ensure_future(engine.generate(request))
    await until(lambda: engine.stats().running == 1)
    install = asyncio.ensure_future(installer.install(weights.manifest(ref(2)), (), weights.layout))
    await until(lambda: len(engine._swaps) == 1)
    await jump(0.0)  # the clock runs
    for _ in range(7):
        before = engine.stats().steps_total
        metronome.permits.release()
        await until(lambda before=before: engine.stats().steps_total > before)
        await jump(100.0)
    assert not install.done()
    metronome.permits.release()
    assert (await install).ok and [span.ref for span in (await running).spans] == [ref(1)]
    await engine.close()
    installer.close()


def test_an_engine_that_hangs_while_it_is_probed_keeps_no_later_install_waiting():
    hold = threading.Event()

    async def work():
        engine, model = tiny_engine()
        weights = ProbedWeights(model)
        installer = Installer(engine, weights.fetch, install_deadline_s=DEADLINE_S)
        assert (await installer.install(weights.manifest(ref(1)), (), weights.layout)).ok
        model.register_forward_pre_hook(lambda *_: hold.wait(DEADLINE_S) and None)
        installer._install_deadline_s = 0.1
        look = asyncio.ensure_future(installer.check())
        later = asyncio.ensure_future(installer.install(weights.manifest(ref(2)), (), weights.layout))
        with pytest.raises(EngineError, match="did not score the probe of version 1:1.*made no progress for 0.1 s"):
            await look
        with pytest.raises(EngineError, match="did not install version 1:2"):
            await later
        hold.set()
        await engine.close()
        installer.close()

    try:
        run(work)
    finally:
        hold.set()


def test_a_worker_whose_engine_hangs_hands_its_leases_back_and_ends_with_its_exit_code(monkeypatch):
    monkeypatch.setattr(native, "CLOSE_DEADLINE_S", 0.1)
    hold, entered = threading.Event(), threading.Event()

    def hang(*_):
        entered.set()
        hold.wait(DEADLINE_S)

    async def work():
        engine, model = tiny_engine()
        async with actor(engine, always(), weights=ProbedWeights(model), ignore_eos=True) as one:
            model.register_forward_pre_hook(hang)
            one.client.grants(lease(1))
            await until(entered.is_set)
            one.worker._runtime.installer._install_deadline_s = 0.1
            await one.worker._updater.check()
            gone = await one.life
            assert gone.exit_code == EXIT_ENGINE_HUNG and "presumed hung" in gone.detail
            assert one.client.returns() == {1: ReturnReason.ENGINE_ERROR} and one.client.closed

    try:
        run(work)
    finally:
        hold.set()


async def test_a_process_is_not_renewed_over_an_engine_that_does_not_close(monkeypatch):
    monkeypatch.setattr(runtime, "CLOSE_DEADLINE_S", 0.05)

    class Clings(ScriptedEngine):
        async def close(self):
            await asyncio.Event().wait()

    async with actor(Clings(says("ok")), always()) as one:
        one.client.events.put_nowait(LinkClosed(6, "another run"))
        gone = await one.life
        assert gone.exit_code == EXIT_ENGINE_HUNG and "another run" in gone.detail and one.client.closed


def test_a_thread_that_hangs_does_not_hold_the_process_up(monkeypatch):
    hold = threading.Event()

    async def work(endpoint, overrides):
        stuck = asyncio.get_running_loop().run_in_executor(None, hold.wait)
        stuck.cancel()
        return EXIT_ENGINE_HUNG

    monkeypatch.setattr(actors.__main__, "work", work)
    monkeypatch.setattr(sys, "argv", ["actors", "connect=tcp://127.0.0.1:1"])
    release = threading.Timer(DEADLINE_S, hold.set)
    release.start()
    try:
        assert actors.__main__.main() == EXIT_ENGINE_HUNG
        assert not hold.is_set(), "it was waited for"
    finally:
        release.cancel()
        hold.set()
