"""A reward model that an actor starts for itself, in a process of its own that ends with the actor."""

from __future__ import annotations

import contextlib
import json
import logging
import subprocess
import threading
import time
from pathlib import Path

from envs.rewards.workers import end
from streamrl import parent_watch
from streamrl.errors import ConfigError
from streamrl.weights.model_folder import check_folder

log = logging.getLogger("streamrl.actor")
MODULE = "actors.reward_model"
"""What serves the model; named, not imported: no torch is loaded here."""
READY = "reward model at "
"""In front of the address, on the line that says that it can be asked."""


def check_checkpoint(path: str) -> None:
    """Raise ConfigError unless it is the folder of a sequence classifier with one label; loads nothing."""
    file = Path(path).expanduser() / "config.json"
    try:
        config = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"reward.model.path={path} must be the folder of a checkpoint: {error}") from error
    kinds = config.get("architectures") or ["none"]
    if not any(kind.endswith("ForSequenceClassification") for kind in kinds):
        raise ConfigError(
            f"reward.model.path={path} holds {', '.join(kinds)}: give a reward model, a sequence classifier with one "
            "label."
        )
    check_folder(file.parent, said=f"reward.model.path={path}")
    labels = config.get("id2label")
    num_labels = len(labels) if labels else config.get("num_labels", 2)
    if num_labels != 1:
        raise ConfigError(f"reward.model.path={path} has {num_labels} labels: give a model with one, the score.")


class LocalModel:
    """The process; threads may share it.

    Args:
        path: a checkpoint that passed `check_checkpoint`.
        device: auto, or as torch names it.
    Attributes:
        url: of the service; empty until the model is loaded.
    """

    def __init__(self, path: str, device: str) -> None:
        self._path, self._device = path, device
        self._process: subprocess.Popen[str] | None = None
        self.url, self._last_words = "", ""
        self._lock = threading.Lock()

    @property
    def running(self) -> bool:
        """Whether the model is loaded and its process has not ended since."""
        return bool(self.url) and self._process is not None and self._process.poll() is None

    def start(self) -> str:
        """The address, once the model is loaded. Raises ConfigError with the last words of a process that ended."""
        with self._lock:
            if not self.running:
                self._start()
            return self.url

    def stop(self) -> None:
        """End it, also while it is loading."""
        process = self._process
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _start(self) -> None:
        self.stop()
        self.url, began = "", time.monotonic()
        log.info("starting the reward model %s: no answer is scored before it is loaded", self._path)
        command = [*parent_watch.program(MODULE), self._path, "--port", "0", "--device", self._device]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace",
            env=parent_watch.child_environment(),
            start_new_session=True,  # Ctrl-C is for the actor, which ends it
        )  # fmt: skip
        reader = threading.Thread(target=self._read_errors, args=(self._process,), daemon=True)
        reader.start()
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(READY):
                self.url = line.removeprefix(READY).strip()
                log.info("the reward model %s is loaded, after %.0f s", self._path, time.monotonic() - began)
                return
        status = end(self._process)
        reader.join(5.0)
        words = self._last_words.strip().splitlines()[-1:] or ["it printed nothing"]
        raise ConfigError(
            f"the process of reward.model.path={self._path} ended with status {status}: {words[0]} "
            f"(run `streamrl reward-model {self._path}` to read all of it)"
        )

    def _read_errors(self, process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None
        with process.stderr as lines:
            for line in lines:
                self._last_words = (self._last_words + line)[-2000:]
