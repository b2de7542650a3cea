"""Keeps the installed version while leases need exactly that one: an evaluation that is answered by one version.

    free --a lease with `keep_s`--> held --its last one ends--> waiting for more --GRACE_S--> free
                                     ^--------another one----------|
"""

from __future__ import annotations

import asyncio
import logging

from streamrl.messages import Lease, LeaseRef

log = logging.getLogger("streamrl.actor")

GRACE_S = 1.0
"""How long after the last lease the hub may take to send more of an evaluation that is not at its end."""


class VersionHold:
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
