"""Keeps the engine's weights current and correct: installs announcements, probes at intervals, reloads, reports.

    announced --install--> probed --passes--> report
                              |
                              +--fails--> report (the hub stops leases) --reload--> probed --> report
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from actors.weights.installer import Installer
from streamrl.errors import EngineError, WeightsError
from streamrl.messages import Base, Installed, Layout, Manifest, Offer

log = logging.getLogger("streamrl.actor")

RECHECK_S = 60.0
"""Interval at which the serving version is compared with its document: memory may be corrupted under it."""


class WeightUpdater:
    """Drives one installer; `report` sends an INSTALLED, `broken` is told why the engine must not generate any more."""

    def __init__(
        self, installer: Installer, *, report: Callable[[Installed], None], broken: Callable[[str], None]
    ) -> None:
        self._installer, self._report, self._broken = installer, report, broken

    async def install(
        self, manifest: Manifest, offers: Sequence[Offer], layout: Layout, base: Base | None = None
    ) -> None:
        """Install this version, or report why not."""
        try:
            await self._handle(await self._installer.install(manifest, offers, layout, base))
        except EngineError as error:
            self._broken(str(error))

    async def watch(self, every_s: float = RECHECK_S) -> None:
        """Check at every interval."""
        while True:
            await asyncio.sleep(every_s)
            await self.check()

    async def check(self) -> None:
        """Probe what serves now; reload and report if it fails. A pass is not reported: the hub counts reports."""
        try:
            report = await self._installer.check()
            if report is not None and _failed(report):
                await self._handle(report)
        except EngineError as error:
            self._broken(str(error))

    async def _handle(self, report: Installed | None) -> None:
        if report is None:
            return
        self._report(report)
        if not _failed(report):
            return
        try:
            again = await self._installer.check(reload=True)
        except WeightsError as error:
            log.error("its document cannot be loaded again: %s", error)
            return
        if again is None:
            return
        self._report(again)
        if _failed(again):
            log.error("version %s fails again after a reload: no leases until a version passes", again.target)
        else:
            log.warning("version %s was reloaded from its document, and passes now", again.target)


def _failed(report: Installed) -> bool:
    return report.probe is not None and bool(report.probe.failed)
