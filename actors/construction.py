"""The plant of an actor, from the thread that builds it to its end; whatever was begun is closed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from actors.engines.base import Engine
from actors.episode import EpisodeRunner
from actors.weights.device import DeviceWeights
from actors.weights.installer import Installer
from streamrl.messages import Welcome

log = logging.getLogger("streamrl.actor")

BUILD_DEADLINE_S = 300.0
"""How long an actor that is to end waits for an engine that is still being built, so as to close it."""
CLOSE_DEADLINE_S = 30.0
"""How long engine, environments and transports may take to end; what hangs is left to the end of the process."""


@dataclass(slots=True)
class ActorRuntime:
    """What is built from the first WELCOME and lives as long as the process."""

    engine: Engine
    installer: Installer
    train: EpisodeRunner
    test: EpisodeRunner
    set_welcome: Callable[[Welcome], None]
    slots: int  # groups held at once
    device_weights: DeviceWeights | None = None
    fits: Callable[[Welcome], bool] = lambda welcome: True  # whether it is what this WELCOME asks for

    async def close(self) -> None:
        self.installer.close()
        if self.device_weights is not None:
            await asyncio.to_thread(self.device_weights.close)
        self.train.close()
        self.test.close()
        await self.engine.close()


class RuntimeHandle:
    """One plant; `plant` is None until it stands."""

    def __init__(self, build: Callable[[Welcome], ActorRuntime]) -> None:
        self.plant: ActorRuntime | None = None
        self._build = build
        self._building: asyncio.Future[ActorRuntime] | None = None

    @property
    def begun(self) -> bool:
        return self._building is not None

    def begin(self, welcome: Welcome) -> None:
        """Build in a thread, once; may take minutes."""
        self._building = asyncio.get_running_loop().run_in_executor(None, self._build, welcome)

    async def finished(self) -> ActorRuntime:
        """The plant. Cancelling this leaves the thread at work: `close` waits for it.

        Raises:
            Exception: whatever building raised.
        """
        assert self._building is not None
        self.plant = await asyncio.shield(self._building)
        return self.plant

    async def close(self) -> bool:
        """End what stands, or what a thread is still building: it holds processes that nobody else would end.

        Returns:
            False if something hangs. Such a process must end: if it went on under another name, they would stay.
        """
        try:
            plant = self.plant or await self._half_built()
            if plant is not None:
                await asyncio.wait_for(plant.close(), CLOSE_DEADLINE_S)
        except TimeoutError:
            log.error("the engine does not come to its end: it is left to that of the process")
            return False
        return True

    async def _half_built(self) -> ActorRuntime | None:
        if self._building is None:
            return None
        await asyncio.wait({self._building}, timeout=BUILD_DEADLINE_S)
        if not self._building.done():
            raise TimeoutError
        return None if self._building.exception() is not None else self._building.result()
