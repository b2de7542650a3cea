"""The actor's life: leases in, groups out, new versions installed in between, for ever.

    hub thread (streamrl.transport.client) --events--> Worker (one asyncio loop) --tasks--> engine thread, env threads

    WELCOME   first time: build engine, renderer, task from what the learner says; always: install its version
    LEASE     a task a group; a revoked one is cancelled
    ANNOUNCE  fetch and verify beside the running sequences, then swap between two forward passes
    BEAT      tells which versions are still useful: groups that can no longer be trained are handed back (L3)
    STOP      the process ends with the exit code that the hub names
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from actors.construction import ActorRuntime, RuntimeHandle
from actors.engines.base import EngineStats
from actors.rollout import returned, run_group, sendable
from actors.weights.updater import WeightUpdater
from streamrl.errors import StreamrlError
from streamrl.messages import (
    Announce,
    Drain,
    HubHeartbeat,
    Installed,
    Lease,
    Leases,
    Limits,
    Manifest,
    Offer,
    Purpose,
    ReturnReason,
    Stop,
    VersionRef,
    Welcome,
)
from streamrl.transport.client import HubClient
from streamrl.transport.session import Deliver, Disconnected, LinkClosed, Progress

log = logging.getLogger("streamrl.actor")

PROGRESS_S = 0.2
EXIT_ENGINE_HUNG = 9
EXIT_RESTART = 11
WEDGED_DRAIN_S = 5.0
"""How long a broken actor may take to hand its leases back."""


@dataclass(slots=True)
class Running:
    """A lease at work; `moved_at` is when one of its members last got a generation or an environment's answer."""

    lease: Lease
    task: asyncio.Task[None]
    since: VersionRef
    moved_at: float


class Worker:
    """Drives one engine for one hub.

    Args:
        build: makes the plant from the first WELCOME; may take minutes, heartbeats go on meanwhile.
        clock: monotonic seconds; judges which leases make progress.
    """

    def __init__(
        self, client: HubClient, build: Callable[[Welcome], ActorRuntime], *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.client, self._clock = client, clock
        self._construction = RuntimeHandle(build)
        self._upkeep: WeightUpdater | None = None
        self._welcome: Welcome | None = None
        self._newest: tuple[Manifest, tuple[Offer, ...]] | None = None
        self._limits = Limits()
        self._running: dict[tuple[int, int], Running] = {}
        self._jobs: set[asyncio.Task[None]] = set()
        self._draining = False
        self._result: LinkClosed | None = None
        self._broken: LinkClosed | None = None

    @property
    def _plant(self) -> ActorRuntime | None:
        return self._construction.plant

    async def run(self) -> LinkClosed:
        """Until the hub stops us, we leave, or the engine is beyond repair."""
        self.client.start()
        self._spawn(self._report_progress())
        try:
            while self._result is None:
                event = await self.client.events.get()
                if isinstance(event, LinkClosed):
                    self._result = self._broken or event
                else:
                    self._handle(event)
        finally:
            if not await self._close() and self._result is not None:
                detail = f"{self._result.detail}; what hangs here goes with the process only"
                self._result = LinkClosed(EXIT_ENGINE_HUNG, detail)
        return self._result

    def leave(self, reason: str) -> None:
        """SIGINT or SIGTERM: hand back what is not finished, settle, go. A second call goes at once."""
        if self._draining:
            self._end(LinkClosed(130, "interrupted twice"))
            return
        self._draining = True
        log.info("leaving (%s): %d leases are handed back", reason, len(self._running))
        self._hand_back(lambda running: True, ReturnReason.DRAIN, reason)
        self.client.drain(reason)

    def _end(self, gone: LinkClosed) -> None:
        self.client.events.put_nowait(gone)

    def _break_down(self, detail: str) -> None:
        """This process can do no more work: hand back what it holds, then end so that it is started anew."""
        if self._broken is None:
            log.error("beyond repair: %s", detail)
            self._end_politely(LinkClosed(EXIT_ENGINE_HUNG, detail), ReturnReason.ENGINE_ERROR, "beyond repair")

    def _end_politely(self, gone: LinkClosed, reason: ReturnReason, farewell: str) -> None:
        """Leases back, the outbox settled, BYE: then `gone`."""
        self._broken = gone
        self._draining = True
        self._hand_back(lambda running: True, reason, gone.detail)
        self._update_progress()
        self.client.drain(farewell, WEDGED_DRAIN_S)

    def _handle(self, deliver: Deliver) -> None:
        match deliver.event:
            case Welcome() as welcome:
                self._welcomed(welcome)
            case Leases() as leases:
                self._leased(leases)
            case Announce() as announce:
                self._newest = (announce.manifest, announce.offers)
                if self._takes_part(announce):
                    self._spawn(self._install_newest())
            case HubHeartbeat() as beat:
                self._drop_useless(beat.min_useful)
            case Disconnected():
                log.warning("the hub is silent: going on with %d leases, reconnecting", len(self._running))
            case Drain() as drain:
                self.leave(drain.reason)
            case Stop() as stop:
                log.info("stopped by the hub: %s", stop.detail)

    # --- WELCOME and weights ------------------------------------------------------------------------------------

    def _welcomed(self, welcome: Welcome) -> None:
        log.info("joined run %s at %s, version %s", welcome.run_id, self.client.endpoint, welcome.version)
        self._welcome, self._limits = welcome, welcome.limits
        if welcome.manifest is not None:
            self._newest = (welcome.manifest, welcome.offers)
        for ref, keep in welcome.held:
            if not keep:
                self._cancel(ref)
        if self._plant is not None:
            if self._fits(self._plant, welcome):
                self._plant.set_welcome(welcome)
                self._spawn(self._install_newest())
        elif not self._construction.begun:
            self._construction.begin(welcome)
            self._spawn(self._set_to_work(welcome))

    async def _set_to_work(self, welcome: Welcome) -> None:
        try:
            plant = await self._construction.finished()
        except StreamrlError as error:
            log.error("cannot take part in run %s: %s", welcome.run_id, error)
            self._end(LinkClosed(1, str(error)))
            return
        assert self._welcome is not None
        if self._fits(plant, self._welcome):
            plant.set_welcome(self._welcome)
            await self._install_newest()

    def _fits(self, plant: ActorRuntime, welcome: Welcome) -> bool:
        """False if this run has other settings now than the plant was built for: then the process starts anew."""
        if self._draining or plant.fits(welcome):
            return True
        detail = "the run goes on with other settings than this actor was built for"
        log.warning("%s: it hands back %d leases and joins anew", detail, len(self._running))
        self._end_politely(LinkClosed(EXIT_RESTART, detail), ReturnReason.DRAIN, "other settings")
        return False

    def _takes_part(self, announce: Announce) -> bool:
        """Tell who moves weights between GPUs; False if that is all that the announcement was for."""
        plant, welcome = self._plant, self._welcome
        if plant is None or plant.device_weights is None or welcome is None or welcome.layout is None:
            return True
        plant.device_weights.hear(announce.manifest, announce.offers, welcome.layout)
        broadcast = any(offer.nccl is not None for offer in announce.offers)
        return not (broadcast and announce.manifest.ref == plant.engine.installed)

    async def _install_newest(self) -> None:
        """Whatever was announced last: while the plant was being built, older versions may have been retired."""
        plant, welcome, newest = self._plant, self._welcome, self._newest
        if plant is None or welcome is None or welcome.layout is None or newest is None:
            return
        manifest, offers = newest
        if self._upkeep is None:
            self._upkeep = WeightUpdater(plant.installer, report=self._report, broken=self._break_down)
            self._spawn(self._upkeep.watch())
        await self._upkeep.install(manifest, offers, welcome.layout)

    def _report(self, report: Installed) -> None:
        self.client.report_installed(report)
        self._update_progress()

    # --- leases -------------------------------------------------------------------------------------------------

    def _leased(self, leases: Leases) -> None:
        for ref in leases.revoked:
            self._cancel(ref)
        for lease in leases.grants:
            plant = self._plant
            if plant is None or plant.engine.installed is None or self._draining:
                self.client.send_group(returned(lease, ReturnReason.DRAIN, "not ready for leases"))
            elif lease.ref not in self._running:
                self._start(lease, plant)
        self._update_progress()

    def _start(self, lease: Lease, plant: ActorRuntime) -> None:
        installed = plant.engine.installed
        assert installed is not None
        if installed < lease.min_version:
            detail = f"installed {installed} is older than the lease's {lease.min_version}"
            self.client.send_group(returned(lease, ReturnReason.STALE, detail))
            return
        task = self._spawn(self._work(lease, plant))
        self._running[lease.ref] = Running(lease, task, installed, self._clock())

    async def _work(self, lease: Lease, plant: ActorRuntime) -> None:
        runner = plant.test if lease.purpose == Purpose.EVAL else plant.train
        group = await run_group(lease, runner, on_progress=lambda: self._moved(lease))
        # Not when cancelled: whoever did that took the lease off the list, and may have put another task in its place.
        self._running.pop(lease.ref, None)
        self.client.send_group(sendable(group, lease, self._limits))
        self._update_progress()
        if group.reason == ReturnReason.ENGINE_ERROR and (plant.engine.stats().extra.get("dead") or runner.exhausted):
            self._break_down(group.detail)

    def _moved(self, lease: Lease) -> None:
        if (running := self._running.get(lease.ref)) is not None:
            running.moved_at = self._clock()

    def _cancel(self, ref: tuple[int, int]) -> None:
        running = self._running.pop(ref, None)
        if running is not None:
            running.task.cancel()

    def _hand_back(self, which: Callable[[Running], bool], reason: ReturnReason, detail: str) -> int:
        chosen = [running for running in self._running.values() if which(running)]
        for running in chosen:
            self._cancel(running.lease.ref)
            self.client.send_group(returned(running.lease, reason, detail))
        return len(chosen)

    def _drop_useless(self, oldest: VersionRef) -> None:
        """L3: groups that began with a version beyond max_lag can only be refused; hand them back, save the compute."""
        count = self._hand_back(
            lambda running: running.lease.purpose == Purpose.TRAIN and running.since < oldest,
            ReturnReason.STALE, f"older than {oldest}, the oldest version still of use",
        )
        if count:
            log.info("handed back %d groups that began before version %s", count, oldest)

    # --- heartbeats ---------------------------------------------------------------------------------------------

    async def _report_progress(self) -> None:
        while True:
            self._drop_stuck(2 * self._limits.progress_deadline_s)
            self._update_progress()
            await asyncio.sleep(PROGRESS_S)

    def _drop_stuck(self, longest_s: float) -> None:
        detail = f"no generation and no environment step ended in {longest_s:g} s"
        count = self._hand_back(lambda running: self._idle_s(running) > longest_s, ReturnReason.TIMEOUT, detail)
        if count:
            log.warning("handed back %d groups: %s", count, detail)

    def _idle_s(self, running: Running) -> float:
        return self._clock() - running.moved_at

    def _update_progress(self) -> None:
        plant = self._plant
        stats = plant.engine.stats() if plant is not None else None
        total = stats.tokens_total if stats else 0
        deadline_s = self._limits.progress_deadline_s
        stuck = [ref for ref, running in self._running.items() if self._idle_s(running) > deadline_s]
        held = tuple(self._running)
        num_train = sum(running.lease.purpose == Purpose.TRAIN for running in self._running.values())
        slots = plant.slots if plant is not None else 0
        sequences = plant.engine.slots if plant is not None else 0
        ready = plant is not None and plant.engine.installed is not None and not self._draining
        self.client.update(Progress(
            slots=slots,
            free=max(0, slots - num_train) if ready else 0,
            free_eval=max(0, sequences - (len(held) - num_train)) if ready else 0,
            running=len(held), tokens_total=total, held=held, stuck=tuple(stuck),
            stats=self._stats(stats) if stats else {},
        ))

    def _stats(self, stats: EngineStats) -> dict[str, float]:
        found = {"busy_s": stats.busy_s, "waiting": float(stats.waiting)}
        if self._plant is not None and self._plant.device_weights is not None:
            found["abandoned_threads"] = float(self._plant.device_weights.num_abandoned_threads)
        return found

    # --- tasks --------------------------------------------------------------------------------------------------

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._jobs.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._jobs.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("the actor failed: %r", error, exc_info=error)
            self._end(LinkClosed(1, repr(error)))

    async def _close(self) -> bool:
        """False if something hangs; see `RuntimeHandle.close`."""
        for task in list(self._jobs):
            task.cancel()
        await asyncio.gather(*self._jobs, return_exceptions=True)
        try:
            return await self._construction.close()
        finally:
            self.client.close()
