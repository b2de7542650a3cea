"""An actor in a run by turns: it holds memory in its own turns alone, and wakes with what is verified."""

import asyncio
import mmap

import pytest

from actors.engines.base import EngineStats, InstallTimes
from actors.weights.turns import Turns, check_turns, memory_held
from actors.worker import EXIT_ENGINE_HUNG
from streamrl.errors import ConfigError, EngineError
from streamrl.gpus import Gpu
from streamrl.messages import Announce, HubHeartbeat, Outcome, ReturnReason, VersionRef
from streamrl.transport.session import Disconnected
from tests.fakes.scripted_engine import ScriptedEngine
from tests.kit.loops import until
from tests.unit.actors.fakes import V1, V2, actor, always, lease, says

BALLAST = 64 << 20


class SleepyEngine(ScriptedEngine):
    """Gives its memory back, and counts."""

    num_releases = 0
    asleep = False
    held: mmap.mmap | None = None

    @property
    def installed(self) -> VersionRef | None:
        return None if self.asleep else super().installed

    async def install(self, tensors, ref) -> InstallTimes:
        self.asleep = False
        return await super().install(tensors, ref)

    async def release(self) -> None:
        self.num_releases += 1
        self.asleep = True
        if self.held is not None:
            self.held.close()


def turn(number: int) -> HubHeartbeat:
    return HubHeartbeat(1, 1, 1, V1, "", number)


async def test_the_engine_sleeps_in_the_learners_turn_and_wakes_with_the_newest_version():
    engine = SleepyEngine(says("ok"))
    async with actor(engine, always()) as one:
        one.client.says(turn(2))
        one.client.grants(lease(1))
        await one.finished(1)
        one.client.says(turn(3))
        await until(lambda: one.client.released == [3])
        assert engine.asleep and one.client.progress.free == 0
        one.client.says(Announce(one.weights.manifest(V2), ()))
        one.client.says(turn(3))  # every heartbeat says so
        one.client.grants(lease(2))
        await one.finished(2)
        assert one.client.returns() == {2: ReturnReason.DRAIN} and engine.installs == [V1]
        one.client.says(turn(4))
        await until(lambda: V2 in one.client.installed)
        assert engine.installs == [V1, V2] and engine.num_releases == 1
        one.client.grants(lease(3, min_version=V2))
        assert (await one.finished(3))[-1].outcome == Outcome.COMPLETE


async def test_the_same_version_wakes_the_engine_after_a_step_that_was_skipped():
    engine = SleepyEngine(says("ok"))
    async with actor(engine, always()) as one:
        for number in (2, 3, 4):
            one.client.says(turn(number))
        await until(lambda: engine.installs == [V1, V1] and not engine.asleep)


async def test_without_a_hub_leases_go_back_and_memory_too_until_one_says_whose_turn_it_is():
    gate = asyncio.Event()
    engine = SleepyEngine(says("ok"), gate=gate)
    async with actor(engine, always()) as one:
        one.client.says(turn(2))
        one.client.grants(lease(1))
        await until(lambda: bool(one.client.progress.held))
        one.client.says(Disconnected())
        await until(lambda: engine.asleep)
        assert one.client.returns() == {1: ReturnReason.DRAIN}
        for number in (1, 1):  # the hub after it, twice: it wants an answer to each WELCOME
            one.turn = number
            one.client.says(one.welcome())
        await until(lambda: one.client.released.count(1) == 2)
        assert engine.installs == [V1]
        one.client.says(turn(2))
        await until(lambda: engine.installs == [V1, V1])


async def test_the_memory_that_the_last_release_gave_back_is_in_the_heartbeats():
    engine = SleepyEngine(says("ok"))
    engine.held = mmap.mmap(-1, BALLAST)
    for _ in range(BALLAST >> 20):
        engine.held.write(b"x" * (1 << 20))
    async with actor(engine, always()) as one:
        assert one.client.progress.stats["given_back_bytes"] == 0
        one.client.says(turn(2))
        one.client.says(turn(3))
        await until(lambda: one.client.released == [3])
        given_back = one.client.progress.stats["given_back_bytes"]
        assert 0.9 * BALLAST < given_back < 1.5 * BALLAST
        one.turn = 3
        one.client.says(one.welcome())  # it is told once more, and holds nothing
        await until(lambda: one.client.released == [3, 3])
        assert one.client.progress.stats["given_back_bytes"] == given_back


def test_a_gpu_is_asked_what_is_in_use_on_it(monkeypatch):
    monkeypatch.setattr("actors.weights.turns.gpu_of", lambda device: Gpu("0", device, 80, 30))
    assert memory_held("cuda:1") == 50


async def test_a_turn_that_ends_while_memory_is_given_back_wakes_the_engine_afterwards():
    go, happened = asyncio.Event(), []

    async def release() -> bool:
        await go.wait()
        happened.append("released")
        return True

    turns = Turns(release, lambda: happened.append("woken"), lambda number: happened.append(str(number)),
                  asyncio.ensure_future)
    turns.hear(3)
    await asyncio.sleep(0)
    turns.hear(4)
    assert happened == ["woken"]
    go.set()
    await until(lambda: happened == ["woken", "released", "woken"])


async def test_an_engine_that_fails_to_give_its_memory_back_ends_the_process_and_says_nothing_else():
    class Stubborn(SleepyEngine):
        async def release(self) -> None:
            raise EngineError("it is stuck")

    async with actor(Stubborn(says("ok")), always()) as one:
        for number in (2, 3):
            one.client.says(turn(number))
        assert (await one.life).exit_code == EXIT_ENGINE_HUNG and one.client.released == []


async def test_an_engine_that_fails_to_wake_ends_the_process_with_the_cause():
    class Sleeper(SleepyEngine):
        async def install(self, tensors, ref) -> InstallTimes:
            if self.asleep:
                raise EngineError("it did not wake up")
            return await super().install(tensors, ref)

        def stats(self) -> EngineStats:
            return EngineStats(extra={"dead": float(self.asleep)})

    async with actor(Sleeper(says("ok")), always()) as one:
        for number in (2, 3):
            one.client.says(turn(number))
        await until(lambda: one.client.released == [3])
        one.client.says(turn(4))
        life = await one.life
        assert life.exit_code == EXIT_ENGINE_HUNG and life.detail == "it did not wake up"


def test_an_engine_that_keeps_its_memory_is_refused():
    with pytest.raises(ConfigError, match="the engine scripted has no `release`"):
        check_turns(ScriptedEngine(says("ok")))
