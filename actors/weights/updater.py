"""Keeping the engine's weights new and right: installs what is announced, looks again now and then, repairs, reports.

    announced --install--> probed --passes--> the hub is told
                              |
                              +--fails--> the hub is told (no leases) --reload--> probed --> the hub is told again
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from actors.weights.installer import Installer
from streamrl.errors import EngineError, WeightsError
from streamrl.messages import Installed, Layout, Manifest, Offer

log = logging.getLogger("streamrl.actor")

RECHECK_S = 60.0
"""A version that serves for longer is compared with its document again and again: memory may rot under it."""


class WeightUpdater:
    """Drives one installer.

    Args:
        report: sends an INSTALLED.
        broken: told why, when the engine must not generate any more.
    """

    def __init__(
        self, installer: Installer, *, report: Callable[[Installed], None], broken: Callable[[str], None]
    ) -> None:
        self._installer, self._send, self._broken = installer, report, broken

    async def install(self, manifest: Manifest, offers: Sequence[Offer], layout: Layout) -> None:
        """Bring the engine to this version, or say why not."""
        try:
            await self._tell(await self._installer.install(manifest, offers, layout))
        except EngineError as error:
            self._broken(str(error))

    async def watch(self, every_s: float = RECHECK_S) -> None:
        """For ever: probe what serves; only what fails is reported, because the hub counts what it is told."""
        while True:
            await asyncio.sleep(every_s)
            await self.look()

    async def look(self) -> None:
        """Probe what serves now; repair and report if it fails."""
        try:
            report = await self._installer.check()
            if report is not None and _failed(report):
                await self._tell(report)
        except EngineError as error:
            self._broken(str(error))

    async def _tell(self, report: Installed | None) -> None:
        if report is None:
            return
        self._send(report)
        if _failed(report):
            await self._repair()

    async def _repair(self) -> None:
        try:
            again = await self._installer.reload()
        except WeightsError as error:
            log.error("its document cannot be loaded again: %s", error)
            return
        if again is None:
            return
        self._send(again)
        if _failed(again):
            log.error("version %s fails again after its document was loaded anew: no leases until one passes",
                      again.target)
        else:
            log.warning("version %s was loaded anew from its document, and passes now", again.target)


def _failed(report: Installed) -> bool:
    return report.probe is not None and bool(report.probe.failed)
