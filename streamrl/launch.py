"""Process supervisor of a run: starts a learner and its actors, restarts actors, stops all: `streamrl launch`.

Its view of them is their files: the learner writes `hub.json` when actors may connect, and `summary.json` at
the end. Every child holds the read end of a pipe from this process, so none outlives it, even after kill -9.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq

from streamrl.config.devices import Choice, choice_lines, placement_of
from streamrl.config.eval_sets import eval_sets, sampling_note
from streamrl.config.load import load_config, load_with_choices, recorded, to_plain
from streamrl.config.schema import Config
from streamrl.errors import ConfigError, ControlError
from streamrl.gpus import Placement, environment_for, gpu_names, visible_gpus
from streamrl.messages.printable import printable_lines
from streamrl.metrics.files import read_object, write_atomic
from streamrl.metrics.run_record import read_run
from streamrl.metrics.summary import Summary
from streamrl.named_code import words_for_actors
from streamrl.parent_watch import program
from streamrl.processes import num_cores
from streamrl.report.index import write_pages
from streamrl.report.readme_line import readme_line
from streamrl.run_dirs import (
    LAUNCH_NOTE,
    choose_run_dir,
    forget_refused,
    launch_lock,
    name_or_path,
    note_start,
    settings_written,
)
from streamrl.supervise.actors import EXIT_NO_ACTORS, ActorPool, actor_words
from streamrl.supervise.caller import Caller
from streamrl.supervise.check import check_settings
from streamrl.supervise.child import Supervised, last_words, num_threads, openmp_environment
from streamrl.supervise.learner import LearnerRestarts, Standby
from streamrl.supervise.one_process import check_here, run_threads
from streamrl.transport.control import ControlServer, ask, is_running, note

log = logging.getLogger("streamrl.launch")

POLL_S = 0.1
STOP_ACTORS_S = 8.0
EXIT_INTERRUPTED = 130
RESUME = "checkpoint.resume="
MAX_ACTORS = 4096


@dataclass(slots=True)
class Interrupts:
    """Count of SIGINT and SIGTERM: the first asks for a graceful stop, the second ends the run at once.

    Python delivers signals to the main thread only: in any other thread nothing is installed.
    """

    count: int = 0
    old: dict[int, object] = field(default_factory=dict)

    def __enter__(self) -> Interrupts:
        in_main = threading.current_thread() is threading.main_thread()
        for number in (signal.SIGINT, signal.SIGTERM) if in_main else ():
            self.old[number] = signal.signal(number, self._received)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.old.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _received(self, _number: int, _frame: object) -> None:
        self.count += 1


class Launcher:
    """One run: a learner (one process, or several ranks under torchrun) and `launch.num_actors` actors."""

    def __init__(
        self, config: Config, overrides: Sequence[str], run_dir: Path, placement: Placement | None = None,
        caller: Caller | None = None,
    ) -> None:
        self.config, self.run_dir, self._caller = config, run_dir, caller or Caller()
        self._placement = placement or Placement()
        self._overrides = [one for one in overrides if not one.startswith(("run.dir=", "-"))]
        self._learner: Supervised | None = None
        self._actors = ActorPool(self._start_actor, self._drain, config.launch.num_max_restarts, self._caller)
        self._restarts = LearnerRestarts(run_dir, config.launch.num_max_learner_restarts)
        self._standby = Standby(lambda: self._start_learner("--standby", resume=True))
        self._endpoint: str | None = None
        self._told = ""  # the address that actors were started with
        self._openmp = openmp_environment(num_threads(config), num_cores(), os.environ)
        self._old_hub = self._written_at("hub.json")  # a resumed run's directory holds the former hub's address
        self._began = False
        self._old_summary = self._written_at("summary.json")

    def run(self) -> int:
        """Run until the learner ends; returns its exit status, or 130 after Ctrl-C.

        Raises RunLockedError: another process has this run; nothing of it was changed.
        """
        with launch_lock(self.run_dir):
            return self._run()

    def _run(self) -> int:
        before = settings_written(self.run_dir)
        note_start(self.run_dir, ["streamrl", "launch", *self._overrides])
        with Interrupts() as interrupts, self._control(), _shown(self._caller, self.run_dir):
            self._learner = self._start_learner()
            try:
                code = self._supervise(interrupts)
            finally:
                self._stop_everything(interrupts)
        if interrupts.count:
            code = EXIT_INTERRUPTED
        elif code != 0:
            forget_refused(self.run_dir, before)
        _tell_end(self._caller, self.run_dir, code, lambda: self._why_it_failed(code))
        return code

    @contextmanager
    def _control(self) -> Iterator[None]:
        """Let other commands reach this process by the note in the run directory."""
        path, context = self.run_dir / LAUNCH_NOTE, zmq.Context()
        self._requests = ControlServer(context, self._answer)
        write_atomic(path, json.dumps({**note(self._requests.endpoint), "actors": self.config.launch.num_actors}))
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
            self._requests.close()
            context.term()

    def _why_it_failed(self, code: int) -> str:
        """The cause in the learner's own words; the end of its log where it could not say any."""
        assert self._learner is not None
        log_path = self._learner.log_path
        if self._written_at("summary.json") != self._old_summary:
            ended = read_object(self.run_dir / "summary.json")
            if ended.get("failed"):
                return f"The run failed after {ended.get('steps')} steps (log: {log_path}):\n{ended['failed']}"
        if self._written_at("hub.json") != self._old_hub and (cause := self._restarts.exit_reason()):
            return f"The run ended with status {code} (log: {log_path}):\n{cause}"
        killed = f" (killed by {signal.Signals(-code).name}: out of memory?)" if code == -signal.SIGKILL else ""
        return f"The run ended with status {code}{killed}. The end of {log_path}:\n{last_words(log_path)}"

    def _supervise(self, interrupts: Interrupts) -> int:
        assert self._learner is not None
        stopping, deadline = False, 0.0
        while True:
            code = self._learner.process.poll()
            if code is not None:
                if interrupts.count or not self._restart_learner(code):
                    return code
                continue
            self._requests.serve()
            if not interrupts.count and not self._caller.wants_more():
                interrupts.count = 1
            now = time.monotonic()
            if interrupts.count and not stopping:
                stopping, deadline = True, now + 3 * self.config.run.shutdown_s
                self._learner.process.send_signal(signal.SIGTERM)
            if stopping and is_running(read_object(self.run_dir / "hub.json")):
                # The step may be long, and the checkpoint large. The hub ends when a rank is silent.
                deadline = now + 3 * self.config.run.shutdown_s
            if interrupts.count > 1 or (stopping and now > deadline):
                self._learner.process.kill()
            if self._endpoint is None:
                self._look_for_hub()
            elif not stopping:
                self._actors.poll(now)
                if self.config.launch.standby_learner and self.config.launch.num_learner_ranks == 1:
                    self._standby.poll(now)
                if self._actors.all_given_up:
                    self._caller.say("No actor can be kept alive: the run is stopped.", error=True)
                    self._learner.process.send_signal(signal.SIGTERM)
                    self._learner.process.wait()
                    return EXIT_NO_ACTORS
            time.sleep(POLL_S)  # supervision has no event to wait for on all platforms

    # --- starting -----------------------------------------------------------------------------------------------

    def _start_learner(self, *first: str, resume: bool = False) -> Supervised:
        overrides = [*self._overrides, f"run.dir={self.run_dir}"]
        if resume:
            overrides = [*(one for one in overrides if not one.startswith(RESUME)), f"{RESUME}true"]
        ranks = self.config.launch.num_learner_ranks
        torchrun = [
            *program("streamrl.supervise.torchrun"), f"--nproc_per_node={ranks}", "--standalone", "--no-python",
        ] if ranks > 1 else []
        if not first:
            self._caller.say("starting the learner")
        where = self._placement
        if where.learner_share is not None:
            overrides.append(f"learner.gpu_memory_share={where.learner_share:g}")
        command = [*torchrun, *program("learner"), *first, *overrides]
        return Supervised("learner", command, self.run_dir, {**self._openmp, **environment_for(where.learner)})

    def _restart_learner(self, code: int) -> bool:
        """Start a learner again that was killed, or whose ranks lost each other; False if it has ended for good."""
        if self._endpoint is None:
            self._look_for_hub()  # it may have listened for a moment
        if code == 0 or self._endpoint is None:  # before its hub listened nothing was lost, and what ended it may stay
            return False
        cause = self._restarts.cause(code)
        if not cause or not self._restarts.allowed():
            return False
        where = self._restarts.newest() or "version 0: there is no checkpoint yet"
        self._caller.say(
            f"\n{printable_lines(cause)}\nThe learner is started again, from {where}; the batches after it in the log "
            "are trained again.", error=True,
        )
        assert self._learner is not None
        self._learner.close_input()
        self._endpoint = None
        self._old_hub = self._written_at("hub.json")
        self._learner = self._standby.take() or self._start_learner(resume=True)
        return True

    def _start_actor(self, name: str) -> Supervised:
        where, index = self._placement, int(name.rpartition("-")[2])
        index %= len(where.actors) or 1  # an actor that still leaves may hold the name, and so the place, of this one
        share = where.actor_shares[index] if where.actor_shares else None
        return Supervised(name, [
            *program("actors"), f"connect={self._endpoint}", *actor_words(self.config, name),
            *([f"actors.gpu_memory_share={share:g}"] if share is not None else []),
        ], self.run_dir, {**self._openmp, **environment_for(where.actors[index] if where.actors else ())})

    def _written_at(self, name: str) -> int:
        path = self.run_dir / name
        return path.stat().st_mtime_ns if path.exists() else 0

    def _look_for_hub(self) -> None:
        """Actors start as soon as the hub listens; they load their libraries while the learner loads its model."""
        if self._written_at("hub.json") == self._old_hub:
            return
        self._endpoint = json.loads((self.run_dir / "hub.json").read_text())["connect"]
        moved, self._told = self._told != self._endpoint, self._endpoint
        if self._began:  # a learner that was started again takes the same address, if no other process has taken it
            if moved:
                self._actors.start_again()
            return
        self._began = True
        num = self.config.launch.num_actors
        self._actors.scale(num, time.monotonic())
        done = f"starting {num} actor{'s' * (num > 1)}; more join" if num else "launch.num_actors=0: start actors"
        key = ["actors.key=FILE"] if self.config.hub.keys else []
        words = shlex.join([f"connect={self._endpoint}", *key, *words_for_actors(to_plain(self.config))])
        self._caller.say(f"{done} with  streamrl actor {words}")

    # --- requests of other commands -----------------------------------------------------------------------------

    def _answer(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """`streamrl status` and `streamrl scale`."""
        now = time.monotonic()
        if request["verb"] == "status":
            assert self._learner is not None
            will_keep = 0 if self._began else self.config.launch.num_actors
            return {"processes": self._actors.sentences(now), "learner": self._learner.sentence(now),
                    "will_keep": will_keep}
        if request["verb"] != "scale":
            raise ControlError(f"this launcher does not know {request['verb']!r}: it is from another release")
        num, most = request.get("num_actors"), len(self._placement.actors) or MAX_ACTORS
        if not isinstance(num, int) or not 0 <= num <= most:
            why = " that have a GPU" if self._placement.actors else ""
            raise ControlError(f"the launcher can run 0 to {most} actors{why}, not {num!r}")
        if self._endpoint is None:
            raise ControlError("the learner is still starting: scale the run once its hub listens")
        started, leaving = self._actors.scale(num, now)
        log.info("scaled to %d actors: %d started, %d finish and leave", num, len(started), len(leaving))
        return {"started": started, "leaving": leaving}

    def _drain(self, name: str, within_s: float) -> bool:
        """Ask the hub to let an actor finish; False if it does not know it."""
        try:
            ask(read_object(self.run_dir / "hub.json"), "the hub", timeout_s=2.0, verb="drain", actor=name,
                within_s=within_s)
        except ControlError as error:
            log.info("%s was stopped before it finished: %s", name, error)
            return False
        return True

    # --- stopping -----------------------------------------------------------------------------------------------

    def _stop_everything(self, interrupts: Interrupts) -> None:
        """Terminate, then kill, what the hub's own stop message has not ended."""
        self._standby.dismiss()
        children = [child for child in [self._learner, *self._actors.children] if child is not None]
        self._wait(children, 0.5 if interrupts.count else 2.0)
        for child in children:
            if child.poll() is None:
                child.process.terminate()
        self._wait(children, STOP_ACTORS_S if interrupts.count < 2 else 1.0)
        for child in children:
            if child.poll() is None:
                log.warning("%s did not end: killed", child.name)
                child.kill()
            child.close_input()

    @staticmethod
    def _wait(children: list[Supervised], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for child in children:
            child.ends_within(max(0.0, deadline - time.monotonic()))


@contextmanager
def _shown(caller: Caller, run_dir: Path) -> Iterator[None]:
    """Let the caller show the run, in a thread, until the end of the block."""
    done = threading.Event()
    viewer = threading.Thread(target=caller.show, args=(run_dir, done), daemon=True)
    viewer.start()
    try:
        yield
    finally:
        done.set()
        viewer.join(timeout=5)


def _tell_end(caller: Caller, run_dir: Path, code: int, why: Callable[[], str]) -> None:
    """Tell how a run that did not end well can go on."""
    resume = caller.resume_words(name_or_path(run_dir))
    if code == EXIT_INTERRUPTED:
        caller.say(f"\nStopped. Resume with:\n  {resume}")
    elif code != 0:
        caller.say(f"\n{printable_lines(why())}", error=True)
        if (run_dir / "LATEST").exists():
            caller.say(f"Resume from its newest checkpoint with:\n  {resume}", error=True)


def run_in_process(config: Config, words: Sequence[str], run_dir: Path, caller: Caller) -> int:
    """Do the run as threads of this process; returns what `Launcher.run` does, and raises the same."""
    with launch_lock(run_dir):
        before = settings_written(run_dir)
        note_start(run_dir, ["streamrl", "launch", *words])
        with nullcontext() if config.launch.debug else _shown(caller, run_dir):
            code, cause = run_threads(config, run_dir, caller)
        if code not in (0, EXIT_INTERRUPTED):
            forget_refused(run_dir, before)
    _tell_end(caller, run_dir, code, lambda: cause)
    return code


def eval_notes(config: Config) -> list[str]:
    """A line for each evaluation set that samples differently from training. Raises ConfigError for a wrong set."""
    notes = [(one.name, sampling_note(one.config)) for one in eval_sets(config)]
    return [f"evaluation{f' on {name}' if name else ''} {note}" for name, note in notes if note]


def _placement_lines(config: Config, placement: Placement, num_gpus: int) -> list[str]:
    """Who computes on which GPU, and how idle ones would be used; nothing without GPUs."""
    used = {*placement.learner, *(gpu for own in placement.actors for gpu in own)}
    if not used:
        return []
    fit = f"streamrl fit {config.policy.model_path or 'MODEL'} --gpus {num_gpus} proposes ranks and actors"
    return [f"{placement}; {num_gpus - len(used)} idle: {fit}" if len(used) < num_gpus else str(placement)]


def launch_run(overrides: Sequence[str], caller: Caller | None = None) -> tuple[Path, int]:
    """Do the run of these `key=value` overrides, tell its summary; returns its directory and exit status.

    Raises:
        ConfigError: an impossible setting, or a run directory that is taken.
    """
    caller = caller or Caller()
    words = [*overrides, *caller.inputs(None)]
    loaded = load_with_choices(words, notify=caller.say)
    config, begun = loaded.config, list[Choice]()
    if config.run.dir is not None or config.checkpoint.resume:
        run_dir = choose_run_dir(config)  # refused before anything that takes time; no directory is made
        begun = recorded(run_dir, loaded.open) if config.checkpoint.resume else []
    for line in eval_notes(config):
        caller.say(line)
    gpus = visible_gpus(os.environ)
    placement, planned = placement_of(config, gpus), list[Choice]()
    if config.launch.in_process:
        if placement.learner or any(placement.actors):
            raise ConfigError("launch.in_process=true computes on the CPU, and a GPU is visible here: add "
                              "run.device=cpu actors.device=cpu, or leave it out")
        check_here(words, caller)
    else:
        planned = check_settings(config, [*words, *(one.word for one in begun)], caller)
    chosen = {one.key: one for one in (*loaded.choices, *begun, *planned)}.values()
    run_dir = choose_run_dir(config)
    caller.say(f"run directory: {run_dir}")
    for line in (*_placement_lines(config, placement, len(gpus)), *choice_lines(chosen)):
        caller.say(line)
    settled = [*overrides, *caller.inputs(run_dir), *(one.word for one in chosen)]
    if settled != words:  # actors are told which files they may run, and every process what was chosen
        words, config = settled, load_config(settled)
    if config.launch.in_process:
        code = run_in_process(config, words, run_dir, caller)
    else:
        code = Launcher(config, words, run_dir, placement, caller).run()
    summary, report = run_dir / "summary.json", run_dir / "report.html"
    if code == 0 and summary.exists():
        caller.say("\n" + Summary.load(summary).table(), end="")
        used = gpu_names(os.environ) if placement.learner else f"{num_cores()} CPU cores"
        caller.say(f"{'in one line':<15} {readme_line(read_run(run_dir), used)}")
    write_pages(run_dir, run_dir.parent if config.run.dir is None else None, ended_well=code == 0)
    for name, path in (("model", run_dir / "model"), ("report", report)):
        if path.exists():
            caller.say(f"{name:<15} {path}")
    return run_dir, code
