"""What the processes of a chaos run share, and small facts about processes."""

import ctypes
import logging
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from streamrl.config.schema import Config
from tests.chaos.crash_points import Armed


@dataclass(frozen=True)
class ChaosSpec:
    """One run: its folder, its seed, the addresses, and what is wrong with it on purpose.

    The hub listens on `near`; what it tells actors, and what they connect to, is `far`, where the proxy listens.
    """

    folder: Path
    seed: int
    config: Config
    armed: Armed
    hub_port: int
    weights_port: int
    num_processes: int = 3
    actors_per_process: int = 4
    steps_per_checkpoint: int = 8
    mutant: str = ""
    near: str = "127.0.0.1"
    far: str = "127.0.0.2"

    @property
    def run_dir(self) -> Path:
        return self.folder / "run"

    @property
    def history(self) -> Path:
        return self.folder / "history"

    @property
    def disk_journal(self) -> Path:
        return self.folder / "disk.jsonl"

    def log_to(self, role: str) -> None:
        """Everything that this process prints goes to a file."""
        file = os.open(self.folder / f"{role}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.close(file)
        for handler in list(logging.getLogger().handlers):
            logging.getLogger().removeHandler(handler)
        logging.basicConfig(level=logging.WARNING, format=f"%(relativeCreated)9d {role} %(message)s")


def fork(main: Callable[[], int]) -> int:
    """Run `main` in a child that dies with this process; its process id."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() == parent:
            code = main()
    except BaseException:
        logging.getLogger("chaos").exception("this process failed")
    finally:
        os._exit(code)


def alive(pid: int) -> bool:
    """Whether it still runs; one that has ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (OSError, IndexError):
        return False


def end(pid: int, timeout_s: float = 10.0) -> None:
    """Kill it and wait until it is gone."""
    deadline = time.monotonic() + timeout_s
    while alive(pid):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise TimeoutError(f"process {pid} survived SIGKILL for {timeout_s:g} s")
        time.sleep(0.005)
