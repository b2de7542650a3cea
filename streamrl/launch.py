"""Process supervisor of a run: starts a learner and its actors, restarts actors, stops all: `streamrl launch`.

Its view of them is their files: the learner writes `hub.json` when actors may connect, and `summary.json` at
the end. Every child holds the read end of a pipe from this process, so none outlives it, even after kill -9.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from streamrl.config.devices import placement_of
from streamrl.config.eval_sets import eval_sets
from streamrl.config.load import load_config
from streamrl.config.rules import sampling_differences
from streamrl.config.schema import Config
from streamrl.errors import ConfigError, StreamrlError
from streamrl.gpus import Placement, environment_for, visible_gpus
from streamrl.metrics.summary import Summary
from streamrl.parent_watch import NOTICE, child_environment, program
from streamrl.report.live.view import LiveView
from streamrl.report.pages import write_pages
from streamrl.run_dirs import choose_run_dir, note_start
from streamrl.transport.keys import KeyDirectory

log = logging.getLogger("streamrl.launch")

POLL_S = 0.1
STOP_ACTORS_S = 8.0
QUICK_DEATH_S = 15.0
HEALTHY_S = 120.0
NUM_SAME_DEATHS = 3
"""An actor that ends so often in a row with the same words, and soon after its start, will not do better."""
EXIT_CONFIG = 2
EXIT_NO_ACTORS = 3
EXIT_INTERRUPTED = 130
OWN_LINE = re.compile(r"\d\d:\d\d:\d\d (learner|hub|actor|launch)")
"""A line of ours in a log."""
LAUNCHER_LINE = re.compile(r"torch.distributed|torchrun|ChildFailedError")
"""torchrun ends with a traceback of its own, about its children."""


@dataclass(slots=True)
class Child:
    """One supervised process."""

    name: str
    process: subprocess.Popen[bytes]
    started_at: float
    log_path: Path
    num_restarts: int = 0
    same_deaths: int = 0
    last_line: str = ""
    restart_at: float | None = None
    given_up: bool = False

    def tail(self, num_lines: int) -> str:
        """The end of its log without the lines of steps, indented."""
        lines = [line for line in self.log_path.read_text(errors="replace").splitlines()
                 if line.strip() and not line.startswith("step ")]  # the terminal has had those
        return "\n".join("  " + line for line in lines[-num_lines:])

    def last_words(self) -> str:
        """The end of its log without what libraries print, unless it ends with a traceback."""
        lines = [line for line in self.log_path.read_text(errors="replace").splitlines() if line.strip()]
        own = [line for line in lines if OWN_LINE.match(line)]
        after = lines[lines.index(own[-1]):] if own else lines
        if not own or any(line.startswith("Traceback") for line in after) and not any(map(LAUNCHER_LINE.search, after)):
            return self.tail(20)
        return "\n".join("  " + line for line in own[-6:])

    def close_pipe(self) -> None:
        """A child that still runs ends by this: it watches the other end."""
        if self.process.stdin is not None:
            self.process.stdin.close()


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
        self, config: Config, overrides: Sequence[str], run_dir: Path, placement: Placement | None = None
    ) -> None:
        self.config, self.run_dir = config, run_dir
        self._placement = placement or Placement()
        self._overrides = [one for one in overrides if not one.startswith(("run.dir=", "-"))]
        self._learner: Child | None = None
        self._actors: list[Child] = []
        self._endpoint: str | None = None
        self._old_hub = 0
        self._old_summary = self._written_at("summary.json")

    def run(self) -> int:
        """Run until the learner ends; returns its exit status, or 130 after Ctrl-C."""
        self.run_dir.mkdir(parents=True, exist_ok=True)
        note_start(self.run_dir, ["streamrl", "launch", *self._overrides])
        done = threading.Event()
        view = LiveView(self.run_dir)
        viewer = threading.Thread(target=view.run, args=(done,), daemon=True)
        with Interrupts() as interrupts:
            self._learner = self._start_learner()
            viewer.start()
            try:
                code = self._supervise(interrupts)
            finally:
                self._stop_everything(interrupts)
                done.set()
                viewer.join(timeout=5)
        if interrupts.count:
            print(f"\nStopped. Resume with:\n  streamrl launch {self._resume()}", flush=True)
            return EXIT_INTERRUPTED
        if code != 0:
            print(f"\n{self._why_it_failed(code)}", file=sys.stderr)
            if (self.run_dir / "LATEST").exists():
                print(f"Go on from its newest checkpoint with:\n  streamrl launch {self._resume()}", file=sys.stderr)
        return code

    def _why_it_failed(self, code: int) -> str:
        """The cause in the learner's own words; the end of its log where it could not say any."""
        assert self._learner is not None
        log_path = self._learner.log_path
        if self._written_at("summary.json") != self._old_summary:
            ended = Summary.load(self.run_dir / "summary.json")
            if ended.failed:
                return f"The run failed after {ended.steps} steps (log: {log_path}):\n{ended.failed}"
        killed = f" (killed by {signal.Signals(-code).name}: out of memory?)" if code == -signal.SIGKILL else ""
        return f"The run ended with status {code}{killed}. The end of {log_path}:\n{self._learner.last_words()}"

    def _resume(self) -> str:
        """The words that continue this run."""
        kept = [one for one in self._overrides if one != "checkpoint.resume=true"]
        return shlex.join([*kept, f"run.dir={self.run_dir}", "checkpoint.resume=true"])

    def _supervise(self, interrupts: Interrupts) -> int:
        assert self._learner is not None
        stopping, deadline = False, 0.0
        while True:
            code = self._learner.process.poll()
            if code is not None:
                return code
            now = time.monotonic()
            if interrupts.count and not stopping:
                stopping, deadline = True, now + 3 * self.config.run.shutdown_s
                self._learner.process.send_signal(signal.SIGTERM)
            if interrupts.count > 1 or (stopping and now > deadline):
                self._learner.process.kill()
            if self._endpoint is None:
                self._look_for_hub()
            elif not stopping:
                self._restart_actors(now)
                if self._actors and all(actor.given_up for actor in self._actors):
                    print("No actor can be kept alive: the run is stopped.", file=sys.stderr)
                    self._learner.process.send_signal(signal.SIGTERM)
                    self._learner.process.wait()
                    return EXIT_NO_ACTORS
            time.sleep(POLL_S)  # supervision has no event to wait for on all platforms

    # --- starting -----------------------------------------------------------------------------------------------

    def _start_learner(self) -> Child:
        overrides = [*self._overrides, f"run.dir={self.run_dir}"]
        ranks = self.config.launch.num_learner_ranks
        torchrun = [
            *program("torch.distributed.run"), f"--nproc_per_node={ranks}", "--standalone", "--no-python",
        ] if ranks > 1 else []
        self._old_hub = self._written_at("hub.json")  # a resumed run's directory holds the former hub's address
        print("starting the learner", flush=True)
        where = self._placement
        if where.learner_share is not None:
            overrides.append(f"learner.gpu_memory_share={where.learner_share:g}")
        return self._start("learner", [*torchrun, *program("learner"), *overrides], environment_for(where.learner))

    def _start(self, name: str, command: list[str], more: Mapping[str, str]) -> Child:
        log_path = self.run_dir / "logs" / f"{name}.log"
        log_path.parent.mkdir(exist_ok=True)
        with log_path.open("ab") as output:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT,
                env={**child_environment(), **more}, start_new_session=True,
            )
        return Child(name, process, time.monotonic(), log_path)

    def _start_actor(self, index: int) -> Child:
        where = self._placement
        share = where.actor_shares[index] if where.actor_shares else None
        return self._start(f"actor-{index}", [
            *program("actors"), f"connect={self._endpoint}", f"actors.actor_id=actor-{index}",
            f"actors.engine={self.config.actors.engine}",  # HELLO reports it
            f"actors.transports=[{','.join(self.config.actors.transports)}]",
            f"actors.give_up_after_s={self.config.actors.give_up_after_s}",
            *([f"actors.key={KeyDirectory(keys).launched_key()}"] if (keys := self.config.hub.keys) else []),
            *([f"actors.gpu_memory_share={share:g}"] if share is not None else []),
            *([f"actors.device={self.config.actors.device}"] if self.config.actors.device != "auto" else []),
        ], environment_for(where.actors[index] if where.actors else ()))

    def _written_at(self, name: str) -> int:
        path = self.run_dir / name
        return path.stat().st_mtime_ns if path.exists() else 0

    def _look_for_hub(self) -> None:
        """Actors start as soon as the hub listens; they load their libraries while the learner loads its model."""
        if self._written_at("hub.json") == self._old_hub:
            return
        self._endpoint = json.loads((self.run_dir / "hub.json").read_text())["connect"]
        self._actors = [self._start_actor(index) for index in range(self.config.launch.num_actors)]
        num = len(self._actors)
        done = f"starting {num} actors; more join" if num else "launch.num_actors=0: start actors"
        key = " actors.key=FILE" if self.config.hub.keys else ""
        print(f"{done} with  streamrl actor connect={self._endpoint}{key}", flush=True)

    def _restart_actors(self, now: float) -> None:
        for index, actor in enumerate(self._actors):
            code = actor.process.poll()
            if code is None or code == 0 or actor.given_up:
                continue
            if actor.restart_at is None:
                age = now - actor.started_at
                if age > HEALTHY_S:
                    actor.num_restarts = 0
                why = self._why_give_up(actor, code, age)
                if why:
                    actor.given_up = True
                    print(f"\n{actor.name} ended with status {code} after {actor.num_restarts} restarts: given up "
                          f"({why}). The end of {actor.log_path}:\n{actor.last_words()}", file=sys.stderr)
                    continue
                actor.restart_at = now + (1.0 if age < QUICK_DEATH_S else 0.0)
                log.warning("%s ended with status %d: restarting it. Its last line (%s):\n%s",
                            actor.name, code, actor.log_path, actor.tail(1))
            if now >= actor.restart_at:
                fresh = self._start_actor(index)
                fresh.num_restarts = actor.num_restarts + 1
                fresh.same_deaths, fresh.last_line = actor.same_deaths, actor.last_line
                actor.close_pipe()
                self._actors[index] = fresh

    def _why_give_up(self, actor: Child, code: int, age: float) -> str:
        """Why a dead actor is not started again; "" if it is."""
        last_line = OWN_LINE.sub("", actor.tail(1).strip())
        again = code > 0 and age < HEALTHY_S and last_line == actor.last_line  # a signal leaves no last line
        actor.same_deaths, actor.last_line = actor.same_deaths + 1 if again else 1, last_line
        if code == EXIT_CONFIG:  # it stays one however often the actor starts
            return "a configuration error"
        if actor.same_deaths >= NUM_SAME_DEATHS:
            return f"the same words {NUM_SAME_DEATHS} times"
        return "launch.num_max_restarts" if actor.num_restarts >= self.config.launch.num_max_restarts else ""

    # --- stopping -----------------------------------------------------------------------------------------------

    def _stop_everything(self, interrupts: Interrupts) -> None:
        """Terminate, then kill, what the hub's own stop message has not ended."""
        children = [child for child in [self._learner, *self._actors] if child is not None]
        self._wait(children, 0.5 if interrupts.count else 2.0)
        for child in children:
            if child.process.poll() is None:
                child.process.terminate()
        self._wait(children, STOP_ACTORS_S if interrupts.count < 2 else 1.0)
        for child in children:
            if child.process.poll() is None:
                log.warning("%s did not end: killed", child.name)
                os.killpg(child.process.pid, signal.SIGKILL)
                child.process.wait()
            child.close_pipe()

    @staticmethod
    def _wait(children: list[Child], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for child in children:
            try:
                child.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                pass


def check_engine(config: Config) -> None:
    """Raise ConfigError if the actors started here lack their engine's package."""
    if config.launch.num_actors and config.actors.engine == "vllm" and importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "actors.engine=vllm: vLLM is not installed here. Run `make vllm` (docs/vllm.md), take "
            "actors.engine=native, or launch.num_actors=0 and start the actors on a machine that has it."
        )


def check_settings(config: Config, overrides: Sequence[str]) -> None:
    """Raise ConfigError for what would end the learner or the actors in their first seconds; no directory is made yet.

    The learner's preflight runs in a process of its own: neither torch nor the user's task belongs into the supervisor.
    """
    check_engine(config)
    print("checking the settings", flush=True)
    told: list[str] = []
    with subprocess.Popen(
        [*program("learner"), "--check", *overrides], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, errors="replace",
    ) as check:
        reader = threading.Thread(target=_pass_on, args=(check.stderr, told), daemon=True)
        reader.start()
        answer = check.stdout.read().strip() if check.stdout is not None else ""
        code = check.wait()
        reader.join(timeout=1.0)  # a process that the task started may hold the pipe
    if code == EXIT_CONFIG and answer:
        raise ConfigError(answer)
    if code != 0:
        raise StreamrlError(f"the check of the settings ended with status {code}:\n{''.join(told).strip()}")


def _pass_on(lines: Iterable[str], kept: list[str]) -> None:
    """Print what the check says while it runs; keep the rest."""
    for line in lines:
        kept.append(line)
        if line.startswith(NOTICE):
            print(line.removeprefix(NOTICE), end="", flush=True)


def eval_notes(config: Config) -> list[str]:
    """A line for each evaluation set that samples otherwise than training. Raises ConfigError for a wrong set."""
    notes = [(one.name, sampling_differences(one.config)) for one in eval_sets(config)]
    return [f"evaluation{f' on {name}' if name else ''} samples otherwise than training: {note}"
            for name, note in notes if note]


def launch_run(overrides: Sequence[str]) -> tuple[Path, int]:
    """Do the run of these `key=value` overrides, print its summary; returns its directory and exit status.

    Raises:
        ConfigError: an impossible setting, or a run directory that is taken.
    """
    config = load_config(overrides)
    if config.run.dir is not None or config.checkpoint.resume:
        choose_run_dir(config)  # refused before anything that takes time; no directory is made
    for line in eval_notes(config):
        print(line, flush=True)
    placement = placement_of(config, visible_gpus(os.environ))
    check_settings(config, overrides)
    run_dir = choose_run_dir(config)
    print(f"run directory: {run_dir}", flush=True)
    if placement.learner or any(placement.actors):
        print(placement, flush=True)
    code = Launcher(config, overrides, run_dir, placement).run()
    summary, report = run_dir / "summary.json", run_dir / "report.html"
    if code == 0 and summary.exists():
        print("\n" + Summary.load(summary).table(), end="")
    write_pages(run_dir, run_dir.parent if config.run.dir is None else None, ended_well=code == 0)
    for name, path in (("model", run_dir / "model"), ("report", report)):
        if path.exists():
            print(f"{name:<15} {path}", flush=True)
    return run_dir, code
