"""An actor that ends while its engine is being built leaves nothing behind."""

import asyncio
import threading

import pytest

from actors import runtime
from actors.worker import EXIT_ENGINE_HUNG
from streamrl.errors import ConfigError, EngineError
from streamrl.transport.session import LinkClosed
from tests.fakes.scripted_engine import ScriptedEngine
from tests.kit.loops import DEADLINE_S, until
from tests.unit.actors.fakes import Actor, always, says

WRONG_RUN = LinkClosed(6, "another run")


class Site(Actor):
    """A worker whose runtime takes until the test lets it be finished, or fail."""

    def __init__(self) -> None:
        super().__init__(ScriptedEngine(says("ok")), always())
        self.entered, self.hold, self.fails = threading.Event(), threading.Event(), False

    def _build(self, welcome):
        self.entered.set()
        assert self.hold.wait(DEADLINE_S)
        if self.fails:
            raise EngineError("no such device")
        return super()._build(welcome)


async def stopped_while_building(site: Site) -> asyncio.Future[LinkClosed]:
    life = asyncio.ensure_future(site.worker.run())
    site.client.says(site.welcome())
    await until(site.entered.is_set)
    site.client.events.put_nowait(WRONG_RUN)
    await until(lambda: not site.worker._jobs)
    return life


async def test_an_engine_that_is_finished_after_the_stop_is_closed_before_the_process_goes_on():
    site = Site()
    life = await stopped_while_building(site)
    assert not life.done()
    site.hold.set()
    assert await life == WRONG_RUN
    assert site.engine.stats().extra["dead"] == 1.0, "or its processes outlive the actor under its new name"


async def test_a_build_that_fails_after_the_stop_changes_nothing():
    site = Site()
    life = await stopped_while_building(site)
    site.fails = True
    site.hold.set()
    assert await life == WRONG_RUN and site.client.closed


async def test_a_build_that_never_ends_ends_the_process_instead_of_renewing_it(monkeypatch):
    monkeypatch.setattr(runtime, "BUILD_DEADLINE_S", 0.05)

    site = Site()
    gone = await (await stopped_while_building(site))
    assert gone.exit_code == EXIT_ENGINE_HUNG and "another run" in gone.detail
    site.hold.set()


@pytest.mark.parametrize(("error", "exit_code"), [(ConfigError("no such engine"), 2), (EngineError("no device"), 1)])
async def test_a_configuration_error_has_an_exit_code_of_its_own(error, exit_code):
    class Refusing(Site):
        def _build(self, welcome):
            raise error

    site = Refusing()
    site.client.says(site.welcome())
    assert await site.worker.run() == LinkClosed(exit_code, str(error))
