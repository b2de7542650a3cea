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
from streamrl.messages import Base, Installed, Layout, Lease, LeaseRef, Manifest, Offer

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


# --- the pin ----------------------------------------------------------------------------------------------------------
#
# An evaluation is answered by one version, so leases of it pin the installed one:
#
#    free --a lease with `keep_s`--> pinned --its last one ends--> waiting for more --GRACE_S--> free
#                                      ^---------another one------------|

GRACE_S = 1.0
"""How long after the last lease the hub may take to send more of an evaluation that is not at its end."""


class VersionPin:
    """Knows whether an install must wait; used from one asyncio loop."""

    def __init__(self) -> None:
        self._open: set[LeaseRef] = set()
        self._more = False  # prompts waited for this version when the newest lease was granted
        self._keep_s = 0.0
        self._over = False  # these leases have had their time
        self._free = asyncio.Event()
        self._free.set()
        self._grace: asyncio.TimerHandle | None = None

    def begin(self, lease: Lease) -> None:
        """Work on this lease begins."""
        if lease.keep_s <= 0:
            return
        if self._grace is not None:
            self._grace.cancel()
        self._over = self._over and bool(self._open)
        self._open.add(lease.ref)
        self._more, self._keep_s = lease.num_after > 0, lease.keep_s
        self._free.clear()

    def end(self, ref: LeaseRef) -> None:
        """End the work on a lease that was finished, handed back or revoked."""
        if ref not in self._open:
            return
        self._open.discard(ref)
        if self._open:
            return
        if self._more:
            self._grace = asyncio.get_running_loop().call_later(GRACE_S, self._free.set)
        else:
            self._free.set()

    async def released(self) -> None:
        """Wait until no lease needs the version any more, or for as long as the leases allow."""
        if self._free.is_set() or self._over:
            return
        if self._open:  # else it may be asked for more in a moment
            log.info("the next version waits for %d answers of an evaluation", len(self._open))
        try:
            await asyncio.wait_for(self._free.wait(), self._keep_s)
        except TimeoutError:
            self._over = True
            log.warning("an evaluation has kept its version for %g s: the next one is installed", self._keep_s)
