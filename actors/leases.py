"""The leases that an actor works on: their progress, cancellation, and handing them back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from actors.rollout import returned
from actors.weights.updater import VersionPin
from streamrl.messages import Group, Lease, LeaseRef, Limits, Purpose, ReturnReason, VersionRef

log = logging.getLogger("streamrl.actor")


@dataclass(slots=True)
class RunningLease:
    lease: Lease
    task: asyncio.Task[None]
    since: VersionRef  # the version installed when it began
    moved_at: float  # when one of its members last got a generation or an environment's answer


class RunningLeases:
    """Every lease with a task; what is handed back is sent as a RETURNED group. `clock` tells which make progress."""

    def __init__(self, send: Callable[[Group], None], clock: Callable[[], float]) -> None:
        self._send, self._clock = send, clock
        self._running: dict[LeaseRef, RunningLease] = {}
        self.pin = VersionPin()

    @property
    def held(self) -> tuple[LeaseRef, ...]:
        return tuple(self._running)

    @property
    def num_train(self) -> int:
        return sum(running.lease.purpose == Purpose.TRAIN for running in self._running.values())

    def stuck(self, limits: Limits) -> tuple[LeaseRef, ...]:
        """Leases without progress for longer than their deadline."""
        return tuple(
            ref for ref, running in self._running.items()
            if self._idle_s(running) > _deadline_s(limits, running.lease.purpose)
        )

    def add(self, lease: Lease, task: asyncio.Task[None], since: VersionRef) -> None:
        self._running[lease.ref] = RunningLease(lease, task, since, self._clock())
        self.pin.begin(lease)

    def moved(self, lease: Lease) -> None:
        if (running := self._running.get(lease.ref)) is not None:
            running.moved_at = self._clock()

    def finish(self, lease: Lease) -> None:
        self._running.pop(lease.ref, None)
        self.pin.end(lease.ref)

    def cancel(self, ref: LeaseRef) -> None:
        if (running := self._running.pop(ref, None)) is not None:
            running.task.cancel()
            self.pin.end(ref)

    def hand_back(
        self, reason: ReturnReason, detail: str, which: Callable[[RunningLease], bool] = lambda running: True
    ) -> int:
        """Cancel and return those chosen; how many there were."""
        chosen = [running.lease for running in self._running.values() if which(running)]
        for lease in chosen:
            self.cancel(lease.ref)
            self._send(returned(lease, reason, detail))
        return len(chosen)

    def drop_useless(self, oldest: VersionRef) -> None:
        """L3: groups begun with a version beyond max_lag can only be refused; handing them back saves the compute."""
        # By the version at the start: the lag bound is on the oldest token. Evaluation has no bound.
        count = self.hand_back(
            ReturnReason.STALE, f"older than {oldest}, the oldest useful version",
            lambda running: running.lease.purpose == Purpose.TRAIN and running.since < oldest,
        )
        if count:
            log.info("handed back %d groups that began before version %s", count, oldest)

    def drop_stuck(self, limits: Limits) -> None:
        """Hand back those without progress for twice their deadline."""
        for purpose in Purpose:
            self._drop_idle(purpose, 2 * _deadline_s(limits, purpose))

    def _drop_idle(self, purpose: Purpose, longer_than_s: float) -> None:
        detail = f"no generation and no environment step ended in {longer_than_s:g} s"
        count = self.hand_back(
            ReturnReason.TIMEOUT, detail,
            lambda running: running.lease.purpose == purpose and self._idle_s(running) > longer_than_s,
        )
        if count:
            log.warning("handed back %d groups: %s", count, detail)

    def _idle_s(self, running: RunningLease) -> float:
        return self._clock() - running.moved_at


def _deadline_s(limits: Limits, purpose: Purpose) -> float:
    of_evals = limits.eval_progress_deadline_s or limits.progress_deadline_s
    return of_evals if purpose == Purpose.EVAL else limits.progress_deadline_s
