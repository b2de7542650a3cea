"""A reward model that an actor starts for itself, in a process of its own that ends with the actor."""

from __future__ import annotations

import json
import logging
import threading
import time
from pathlib import Path

from streamrl.errors import ConfigError
from streamrl.parent_watch import program
from streamrl.processes import Child
from streamrl.weights.model_folder import check_folder

log = logging.getLogger("streamrl.actor")
END_S = 30.0  # of a process that has closed its output: with torch loaded, on a busy machine
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
        self._process: Child | None = None
        self.url = ""
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
        if process is not None:
            process.process.kill()
            if self.url:  # else another thread reads its output, and ends with it
                process.kill()

    def _start(self) -> None:
        self.stop()
        self.url, began = "", time.monotonic()
        log.info("starting the reward model %s: no answer is scored before it is loaded", self._path)
        self._process = process = Child(
            [*program(MODULE), self._path, "--port", "0", "--device", self._device], answers=True, keep_errors=True
        )
        try:
            while not self.url:
                line = process.receive_line(None).decode(errors="replace")
                self.url = line.removeprefix(READY).strip() if line.startswith(READY) else ""
        except EOFError:
            status, words = process.how_it_ended(END_S)
            raise ConfigError(
                f"the process of reward.model.path={self._path} ended with status {status}: {words} "
                f"(run `streamrl reward-model {self._path}` to read all of it)"
            ) from None
        log.info("the reward model %s is loaded, after %.0f s", self._path, time.monotonic() - began)
