"""Real learners and actors for tests: started as a person starts them, watched through their files, cleaned up."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from tests.contract.conditions import missing_and_surplus

ROOT = Path(__file__).parents[2]
SMALL = (
    "experiment=quickstart", "rollout.num_prompts_per_step=8", "rollout.num_responses_per_prompt=4",
    "actors.num_concurrent=32", "eval.num_samples=8", "eval.every_steps=0", "policy.tiny.num_warm_start_steps=20",
)
"""The quickstart, shrunk to what a test has time for."""

SLOW = ("actors.num_concurrent=2", "rollout.train.sampling.ignore_eos=true", "rollout.train.sampling.max_new_tokens=32")
"""Generation is the bottleneck: actors always hold leases, and there is time to start and kill some."""


def free_port() -> int:
    """A free port below those that the kernel gives to connections: no test beside takes it before it is used."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def wait_until(condition: Callable[[], Any], deadline_s: float, what: str, logs: Callable[[], str] = str) -> Any:
    """The first true value of `condition`; looks every 50 ms until the deadline."""
    deadline = time.monotonic() + deadline_s
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.05)
    raise AssertionError(f"waited {deadline_s:g} s for {what}, without success\n{logs()}")


def finished(
    command: list[str], folder: Path, popen: type[subprocess.Popen[bytes]], said: str = "", deadline_s: float = 240
) -> subprocess.CompletedProcess[str]:
    """`subprocess.run` with its output, of a command in this folder with `said` as its input."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with TemporaryFile("w+") as stdin, TemporaryFile("w+") as stdout, TemporaryFile("w+") as stderr:
        stdin.write(said)
        stdin.seek(0)
        process = popen(
            command, stdin=stdin, stdout=stdout, stderr=stderr, cwd=folder, env=environment, start_new_session=True
        )
        try:
            code = process.wait(deadline_s)
        except subprocess.TimeoutExpired as error:
            stdout.seek(0)
            stderr.seek(0)
            raise AssertionError(f"{error}\n{stdout.read()}\n{stderr.read()}") from None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        stdout.seek(0)
        stderr.seek(0)
        return subprocess.CompletedProcess(command, code, stdout.read(), stderr.read())


class RunHarness:
    """Processes of one test, in one directory.

    Args:
        popen: what starts them: `subprocess.Popen`, or `ForkedPopen` while a fork server runs.
    """

    def __init__(self, path: Path, popen: type[subprocess.Popen[bytes]] = subprocess.Popen) -> None:
        self.path, self.popen = path, popen
        self.run_dir = path / "run"
        self.port = free_port()
        self.processes: list[subprocess.Popen[bytes]] = []

    @property
    def address(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    def words(self, *more: str) -> list[str]:
        cache = ROOT / ".pytest_cache" / "models"  # for the tests of later days too, and no folder of the user's
        return [*SMALL, f"run.dir={self.run_dir}", f"policy.tiny.cache_dir={cache}", f"hub.bind={self.address}", *more]

    def start(self, name: str, command: list[str]) -> subprocess.Popen[bytes]:
        log = self.path / f"{name}.log"
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        with log.open("ab") as output:
            process = self.popen(
                command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=ROOT,
                env=environment, start_new_session=True,
            )
        self.processes.append(process)
        return process

    def learner(self, *more: str) -> subprocess.Popen[bytes]:
        return self.start("learner", [sys.executable, "-m", "learner", *self.words(*more)])

    def actor(self, name: str, *more: str) -> subprocess.Popen[bytes]:
        return self.start(name, [
            sys.executable, "-m", "actors", f"connect={self.address}", f"actors.actor_id={name}", *more,
        ])

    def launch(self, *more: str) -> subprocess.Popen[bytes]:
        return self.start("launch", [sys.executable, "-m", "streamrl.cli", "launch", *self.words(*more)])

    def command(self, *words: str, said: str = "") -> subprocess.CompletedProcess[str]:
        """`streamrl WORDS` in the harness's folder, with `said` as its input, to its end."""
        return finished([sys.executable, "-m", "streamrl.cli", *words], self.path, self.popen, said)

    def status(self) -> dict[str, Any]:
        try:
            return json.loads((self.run_dir / "status.json").read_text())
        except FileNotFoundError:
            return {"version": -1, "actors": [], "counters": {}}

    def counter(self, name: str) -> float:
        return self.status()["counters"].get(name, 0.0)

    def wait_for_version(self, version: int, deadline_s: float = 60) -> None:
        wait_until(lambda: self.status()["version"] >= version, deadline_s, f"version {version}", self.logs)

    def wait_for_actor(self, name: str, deadline_s: float = 60) -> None:
        """Linked, and serving a version."""
        def there() -> bool:
            return any(row[0] == name and row[1] == "running" for row in self.status()["actors"])

        wait_until(there, deadline_s, f"actor {name}", self.logs)

    def wait_for_eviction(self, name: str) -> None:
        def gone() -> bool:
            return all(row[0] != name for row in self.status()["actors"])

        wait_until(gone, 20, f"the eviction of {name}", self.logs)

    def finish(self, process: subprocess.Popen[bytes], deadline_s: float) -> int:
        try:
            return process.wait(deadline_s)
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"still running after {deadline_s:g} s\n{self.logs()}") from error

    def summary(self) -> dict[str, Any]:
        return json.loads((self.run_dir / "summary.json").read_text())

    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run_dir / "metrics.jsonl").read_text().splitlines()]

    def check_metric_keys(self) -> None:
        """Every key that the run must write under its settings, and no other, is in some line of its metrics."""
        settings = json.loads((self.run_dir / "config.json").read_text()) | {"device": self.summary()["device"]}
        written = {key for row in self.metrics() for key in row} - {"step"}
        missing, surplus = missing_and_surplus(written, settings)
        assert (missing, surplus) == ([], []), f"declared and not written: {missing}; written, not declared: {surplus}"

    def logs(self, lines: int = 25) -> str:
        paths = [*sorted(self.path.glob("*.log")), *sorted(self.run_dir.glob("logs/*.log"))]
        return "\n".join(
            f"--- {path.name}\n" + "\n".join(path.read_text(errors="replace").splitlines()[-lines:]) for path in paths
        )

    def leftovers(self) -> list[str]:
        """Processes and shared memory of this test that are still there."""
        found = [f"process {pid}: {words}" for pid, words in _command_lines() if str(self.path) in words]
        found += [f"process {pid}: {words}" for pid, words in _command_lines() if self.address in words]
        run_id = self.run_dir / "run_id"
        if run_id.exists():
            found += [str(path) for path in Path("/dev/shm").glob(f"*{run_id.read_text().strip()}*")]
        return found

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _command_lines() -> list[tuple[int, str]]:
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:
            continue
        if words:
            found.append((int(entry.name), words))
    return found
