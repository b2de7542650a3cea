"""Starts the processes of a chaos run, applies its faults, restarts what dies, and brings the run to its end."""

import os
import signal
import socket
import time
from contextlib import suppress
from functools import partial
from multiprocessing import Pipe
from typing import Any

from tests.chaos import actors, disk, learner, proxy
from tests.chaos.history import History
from tests.chaos.nemesis import LASTING, Fault
from tests.chaos.processes import ChaosSpec, alive, end, fork

STEP_S = 0.02
WIND_DOWN_S = 60.0
"""Longest time from the last fault to the end of the run: a run that takes longer hangs."""
LEAVE_S = 1.0
"""For actors to read that the run is over."""


class Cluster:
    """One learner with its hub, the proxy, and the actor processes; `run` is the whole run."""

    def __init__(self, spec: ChaosSpec) -> None:
        self.spec = spec
        spec.history.mkdir(parents=True)
        self.history = History(spec.history, "nemesis")
        self._commands, far_end = Pipe()
        self.proxy = fork(partial(proxy.main, spec, far_end))
        self.actors: dict[int, int] = {}  # process id -> number
        self.learner = 0
        self.lives = 0
        self._later: list[tuple[float, Any]] = []

    # --- processes ----------------------------------------------------------------------------------------------------

    def _start_learner(self) -> None:
        self.learner = fork(partial(learner.main, self.spec))

    def _start_actors(self, number: int) -> int:
        self.lives += 1
        pid = fork(partial(actors.main, self.spec, number, self.lives))
        self.actors[pid] = number
        return pid

    def _hub(self) -> int:
        with suppress(OSError, ValueError):
            return int((self.spec.folder / "hub.pid").read_text())
        return 0

    def _reap(self, *, restart: bool = True) -> None:
        """Start again what has died."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            code = os.waitstatus_to_exitcode(status)
            if pid == self.learner:
                self.learner = 0
                if code != 0 and restart:
                    self._end_hub()
                    self._start_learner()
            elif pid in self.actors:
                number = self.actors.pop(pid)
                if restart and number not in self.actors.values():
                    self._start_actors(number)

    def _end_hub(self) -> None:
        """The address must be free for the successor; a stopped hub would hold it."""
        hub = self._hub()
        deadline = time.monotonic() + 2.0
        while hub and alive(hub) and time.monotonic() < deadline:
            time.sleep(STEP_S)
        if hub and alive(hub):
            end(hub)

    # --- the run ------------------------------------------------------------------------------------------------------

    def run(self, faults: list[Fault], seconds: float) -> None:
        """Faults for so many seconds, then health, then the end of the training."""
        try:
            self._start_learner()
            for number in range(self.spec.num_processes):
                self._start_actors(number)
            self._wait_for_first_batch()
            began = time.monotonic()
            pending = list(faults)
            while time.monotonic() - began < seconds or pending:
                now = time.monotonic()
                while pending and now - began >= pending[0].at:
                    self._apply(pending.pop(0))
                self._run_due(now)
                self._reap()
                time.sleep(STEP_S)
            self._end_well()
        finally:
            self.close()

    def _wait_for_first_batch(self) -> None:
        """A fault before it would meet nothing."""
        deadline = time.monotonic() + WIND_DOWN_S
        while not self._num_batches():
            self._reap()
            if time.monotonic() > deadline:
                raise TimeoutError(f"no batch was trained within {WIND_DOWN_S:g} s of the start")
            time.sleep(STEP_S)

    def _end_well(self) -> None:
        """Everything heals, everyone is back, some more batches, then SIGTERM: TimeoutError if that does not happen."""
        self.spec.armed.clear()
        self._run_due(float("inf"))
        self._command("heal")
        self.history.add("heal", kind="everything")
        deadline = time.monotonic() + WIND_DOWN_S
        target, told = self._num_batches() + 4, False
        while self.learner or not told:
            self._reap(restart=not told)
            if not told and self._num_batches() >= target and len(self.actors) >= self.spec.num_processes:
                with suppress(ProcessLookupError):
                    os.kill(self.learner, signal.SIGTERM)
                    told = True
            if told and not self.learner and not self._ended():
                told = False  # it died on the way: its successor ends the run
                self._end_hub()
                self._start_learner()
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"the run did not end within {WIND_DOWN_S:g} s of its last fault: learner {self.learner}, actors "
                    f"{sorted(self.actors.values())}, {self._num_batches()} batches of {target}"
                )
            time.sleep(5 * STEP_S)
        ended_at = time.monotonic()
        while self.actors and time.monotonic() < ended_at + LEAVE_S:  # one that missed the end goes on asking
            self._reap(restart=False)
            time.sleep(STEP_S)

    def _num_batches(self) -> int:
        """Batches trained, from the histories' sizes alone: they are read in full only at the end."""
        return sum(path.read_bytes().count(b'"event":"train"') for path in self.spec.history.glob("learner-*"))

    def _ended(self) -> bool:
        return any(b'"event":"end"' in path.read_bytes() for path in self.spec.history.glob("learner-*"))

    def close(self) -> None:
        for pid in (self.learner, self._hub(), *self.actors, self.proxy):
            if pid and alive(pid):
                end(pid)
        self._reap(restart=False)

    # --- faults -------------------------------------------------------------------------------------------------------

    def _apply(self, fault: Fault) -> None:
        seconds = fault.seconds if fault.kind in LASTING else 0.0
        self.history.add("fault", kind=fault.kind, at=fault.at, target=fault.target, point=fault.point, seconds=seconds)
        getattr(self, f"_{fault.kind}")(fault)

    def _run_due(self, now: float) -> None:
        for at, action in [one for one in self._later if one[0] <= now]:
            self._later.remove((at, action))
            action()

    def _after(self, seconds: float, action: Any) -> None:
        self._later.append((time.monotonic() + seconds, action))

    def _command(self, *command: Any) -> None:
        self._commands.send(command)

    def _pause(self, pid: int, seconds: float) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
        self._after(seconds, partial(_continue, pid))

    def _kill(self, pid: int) -> None:
        if pid and alive(pid):
            os.kill(pid, signal.SIGKILL)

    def _process(self, number: int) -> int:
        return next((pid for pid, other in self.actors.items() if other == number), 0)

    def _kill_actors(self, fault: Fault) -> None:
        self._kill(self._process(fault.target))

    def _stop_actors(self, fault: Fault) -> None:
        if pid := self._process(fault.target):
            self._pause(pid, fault.seconds)

    def _twin(self, fault: Fault) -> None:
        """A second process takes the names of one that is stopped; the older one comes back and must be refused."""
        if pid := self._process(fault.target):
            self._pause(pid, 1.5)
            self._start_actors(fault.target)
            self._after(1.4, partial(self._command, "reset", 1.0))  # what the hub told the older one is lost

    def _kill_hub(self, fault: Fault) -> None:
        self._kill(self._hub())

    def _stop_hub(self, fault: Fault) -> None:
        if hub := self._hub():
            self._pause(hub, fault.seconds)

    def _kill_learner(self, fault: Fault) -> None:
        self._kill(self.learner)

    def _stop_learner(self, fault: Fault) -> None:
        if self.learner:
            self._pause(self.learner, fault.seconds)

    def _power_cut(self, fault: Fault) -> None:
        """The learner's machine goes off: both processes at once, and what was never synced."""
        for pid in (self.learner, self._hub()):
            if pid:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)  # neither sees the other die first
        for pid in (self.learner, self._hub()):
            if pid:
                end(pid)
        disk.power_cut(self.spec.run_dir, self.spec.disk_journal)

    def _crash(self, fault: Fault) -> None:
        self.spec.armed.set(fault.point)
        if "epoch" in fault.point or fault.point in ("hub_bound", "hub_up_before_publish"):
            self._kill(self.learner)  # these are passed at a start only
        elif fault.point in ("joined_before_welcome", "actor_welcomed"):
            self._command("reset", 1.0)

    def _reset(self, fault: Fault) -> None:
        self._command("reset", 0.3)

    def _reset_all(self, fault: Fault) -> None:
        self._command("reset", 1.0)

    def _partition(self, fault: Fault) -> None:
        self._command("refuse", True)
        self._after(fault.seconds, partial(self._command, "refuse", False))

    def _one_way(self, fault: Fault) -> None:
        self._command("block", [fault.count % 2 == 0, fault.count % 2 == 1])
        self._after(fault.seconds, partial(self._command, "block", [False, False]))

    def _delay(self, fault: Fault) -> None:
        self._command("delay", fault.seconds / 10)
        self._after(fault.seconds, partial(self._command, "delay", 0.0))

    def _spend(self, fault: Fault) -> None:
        self._command("spend", fault.kind, fault.count)

    _flip = _duplicate = _late_copy = _truncate = _spend


def _continue(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def free_ports(host: str, number: int) -> list[int]:
    """Ports that were free a moment ago; the proxy uses the same numbers on another loopback address."""
    sockets = [socket.socket() for _ in range(number)]
    try:
        for one in sockets:
            one.bind((host, 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()
