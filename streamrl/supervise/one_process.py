"""A run as threads of this process (`launch.in_process`): learner and hub in threads, the actor in the main one.

Messages, ledger, log and the check of every version are those of a run in processes. This module alone knows both
sides, learner and actors; neither imports the other.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
from asyncio import events
from bdb import BdbQuit
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from streamrl.commands import INTERRUPTED
from streamrl.config.load import load_config
from streamrl.config.schema import Config
from streamrl.errors import StreamrlError, one_sentence
from streamrl.messages.printable import PrintableFormatter
from streamrl.metrics.files import read_object
from streamrl.process_memory import uncollected
from streamrl.supervise.actors import EXIT_CONFIG, EXIT_NO_ACTORS, actor_words
from streamrl.supervise.caller import Caller

if TYPE_CHECKING:
    from actors.worker import Worker
    from learner.ranks.stop_flag import StopFlag
    from streamrl.transport.session import LinkClosed

POLL_S = 0.1
HEARS_S, LEAVES_S = 1.0, 5.0
"""Seconds that the actor may take, after the learner's end, to hear of it, and then to end."""
DEBUG_WORDS = (
    "launch.in_process=true", "launch.debug=true", "launch.num_actors=1", "launch.num_learner_ranks=1",
    "launch.standby_learner=false", "actors.engine=native", "actors.device=cpu", "run.device=cpu",
    "policy.tiny.num_warm_start_steps=0", "eval.at_start=false",  # what comes before the first answer
    "env.step_timeout_s=1e6", "hub.lease_ttl_s=1e6", "eval.pin_s=1e6",  # somebody stands in a debugger meanwhile
    "learner.stall_report_s=1e6", "learner.stall_fail_s=0",
)
"""The settings of `streamrl debug`; words of the command line win over them."""
PACKAGES = ("streamrl", "learner", "actors", "envs")
"""Loggers whose messages the run says itself."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)


def check_here(words: Sequence[str], caller: Caller) -> None:
    """Raise what `streamrl.supervise.check.check_settings` raises, without a process of its own."""
    with uncollected():  # all libraries of the run: what the check needs of them it would import under the collector
        import learner.setup.compose  # noqa: F401
        from learner.setup.preflight import check_run
    check_run(load_config(words), notify=caller.say)


def run_threads(config: Config, run_dir: Path, caller: Caller) -> tuple[int, str]:
    """Do the run; returns the exit status of `streamrl launch`, and why it failed."""
    with uncollected():  # before there are threads, which must not import the same modules at the same time
        import actors.env_calls.debugger
        import actors.worker  # noqa: F401
        import learner.setup.compose  # noqa: F401
        from learner.ranks.stop_flag import StopFlag

    with _signals_restored(), _logged(run_dir, warns=config.launch.debug), _breakpoints(config.launch.debug):
        run = _Threads(config, run_dir, caller, StopFlag(grace_s=2 * config.run.shutdown_s))
        loop = actors.env_calls.debugger.PatientLoop() if config.launch.debug else asyncio.new_event_loop()
        outer = events._get_running_loop()  # of a notebook
        events._set_running_loop(None)
        try:
            loop.run_until_complete(run.actor())
        except BdbQuit:  # of a debugger that somebody set in our code
            run.stop.reason = "the debugger was left"
        finally:
            run.learner.join()
            events._set_running_loop(outer)
            loop.close()
    return run.outcome()


class _Threads:
    """The learner's thread from here on, and the actor, once `actor` runs."""

    def __init__(self, config: Config, run_dir: Path, caller: Caller, stop: StopFlag) -> None:
        self.stop = stop
        self._config, self._run_dir, self._caller = config, run_dir, caller
        self._old_hub = read_object(run_dir / "hub.json")  # of the part before a resume
        self._failure: BaseException | None = None
        self._actor_failed = ""
        self._worker: Worker | None = None
        self.learner = threading.Thread(target=self._learn, name="learner", daemon=True)
        self.learner.start()

    def outcome(self) -> tuple[int, str]:
        """Exit status and cause, at the end."""
        if (error := self._failure) is not None:
            steps = read_object(self._run_dir / "summary.json").get("steps", 0)
            cause = one_sentence(error) if isinstance(error, StreamrlError | OSError) else repr(error)
            told = f"The run failed after {steps} steps (log: {_log_of(self._run_dir)}):\n{cause}"
            return EXIT_CONFIG if isinstance(error, StreamrlError) and isinstance(error, ValueError) else 1, told
        if self._actor_failed:
            return EXIT_NO_ACTORS, f"The actor ended (log: {_log_of(self._run_dir)}):\n{self._actor_failed}"
        return INTERRUPTED if self.stop() else 0, ""

    def _learn(self) -> None:
        import torch

        from learner.setup.compose import carry_out
        from learner.setup.device import start_ranks

        try:
            torch.get_num_threads()  # its first call in a thread takes another thread's number; this one sets its own
            carry_out(self._config, self._run_dir, self.stop, start_ranks(self._config.run, self._config.learner))
        except BaseException as error:
            self._failure = error
            logging.getLogger("streamrl.learner").error(
                "%s", error, exc_info=None if isinstance(error, StreamrlError) else error
            )

    async def actor(self) -> None:
        """Join once the hub listens, work until it stops the actor, and wait for the learner's end."""
        work: asyncio.Task[LinkClosed] | None = None
        while self.learner.is_alive():
            try:
                hub = read_object(self._run_dir / "hub.json")
                if work is None and hub != self._old_hub:
                    work = asyncio.ensure_future(self._join(hub["connect"]).run())
                if work is not None and work.done() and (closed := work.result()).exit_code and not self.stop():
                    self._actor_failed = closed.detail
            except Exception as error:
                self._actor_failed = one_sentence(error) or repr(error)
            if self._actor_failed or not self._caller.wants_more():
                self._stop(self._actor_failed or "the caller wants no more")
            if self.stop():
                self._leave()
            await asyncio.sleep(POLL_S)
        if work is not None:
            await asyncio.wait({work}, timeout=HEARS_S)
            self._leave()  # where the hub told it to wait for another learner
            await asyncio.wait({work}, timeout=LEAVES_S)

    def _join(self, endpoint: str) -> Worker:
        from actors.env_calls.debugger import DebuggedCalls
        from actors.worker import make_worker

        calls = DebuggedCalls(lambda: self._stop("the debugger was left")) if self._config.launch.debug else None
        self._worker = make_worker(endpoint, actor_words(self._config, "actor-0"), calls)
        return self._worker

    def _stop(self, reason: str) -> None:
        """Ask learner and actor to end; no other episode gets into a debugger."""
        self.stop.reason = self.stop.reason or reason
        self._leave()

    def _leave(self) -> None:
        if self._worker is not None:
            self._worker.leave("the run ends")
            self._worker = None  # a second call would not let it hand its leases back


def _log_of(run_dir: Path) -> Path:
    return run_dir / "logs" / "learner.log"


@contextmanager
def _signals_restored() -> Iterator[None]:
    """Give the caller's handlers back at the end."""
    in_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in SIGNALS} if in_main else {}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)


class _Who(logging.Filter):
    """Names the part of the run that speaks, as the processes' own logs do."""

    def filter(self, record: logging.LogRecord) -> bool:
        part = record.name.split(".")[1:2]
        record.who = part[0] if part and part[0] in ("learner", "hub", "actor") else "learner"
        return True


@contextmanager
def _logged(run_dir: Path, *, warns: bool) -> Iterator[None]:
    """Write what all parts say into the learner's log; on the terminal their warnings too, if asked for."""
    _log_of(run_dir).parent.mkdir(exist_ok=True)
    file = logging.FileHandler(_log_of(run_dir))
    handlers: list[logging.Handler] = [file]
    if warns:
        handlers.append(logging.StreamHandler(sys.stderr))
        handlers[-1].setLevel(logging.WARNING)
    for handler in handlers:
        handler.setFormatter(PrintableFormatter("%(asctime)s %(who)-8s %(message)s", datefmt="%H:%M:%S"))
        handler.addFilter(_Who())
    loggers = [logging.getLogger(name) for name in PACKAGES]
    before = [(logger.level, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.setLevel(os.environ.get("STREAMRL_LOG", "INFO").upper())
        logger.propagate = False
        logger.handlers += handlers
    try:
        yield
    finally:
        for logger, (level, propagate) in zip(loggers, before, strict=True):
            logger.setLevel(level)
            logger.propagate = propagate
            for handler in handlers:
                logger.removeHandler(handler)
        file.close()


@contextmanager
def _breakpoints(debug: bool) -> Iterator[None]:
    """Let breakpoint() leave Ctrl-C to the run, unless PYTHONBREAKPOINT or the caller names another debugger."""
    from actors.env_calls.debugger import stand

    before = sys.breakpointhook
    if debug and before is sys.__breakpointhook__ and "PYTHONBREAKPOINT" not in os.environ:
        sys.breakpointhook = stand
    try:
        yield
    finally:
        sys.breakpointhook = before
