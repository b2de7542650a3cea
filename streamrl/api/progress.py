"""The caller of a run from Python: its callbacks, its files, and how much it wants to be told."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from streamrl.api.inputs import FOLDER, Inputs
from streamrl.api.runs import evaluation_of
from streamrl.metrics.run_record import parse_row
from streamrl.report.live.view import LiveView, Tail
from streamrl.supervise.caller import Caller

Callback = Callable[[Mapping[str, Any]], object]


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook; a program that starts kernels imports their package too."""
    kernel = sys.modules.get("ipykernel.kernelapp")
    return kernel is not None and kernel.IPKernelApp.initialized()


class PythonCaller(Caller):
    """A script or a notebook.

    Args:
        staging: a folder for the inputs until the run has a directory.
        on_step: called with the metrics of each step. on_evaluation: with those of each evaluation.
        quiet: tell nothing.
    Attributes:
        raised: what a callback raised; the run was stopped by it.
    """

    def __init__(self, inputs: Inputs, staging: Path, on_step: Callback | None, on_evaluation: Callback | None,
                 quiet: bool) -> None:
        self.raised: BaseException | None = None
        self._inputs, self._staging, self._quiet = inputs, staging, quiet
        self._on_step, self._on_evaluation = on_step, on_evaluation
        self._metrics: Tail | None = None
        self._seen: set[int] = set()  # a resume writes the file again, with the lines that it keeps

    def inputs(self, run_dir: Path | None) -> Sequence[str]:
        if run_dir is not None:
            self._metrics = Tail(run_dir / "metrics.jsonl")
            self._seen = {hash(line) for line in self._metrics.lines()}
        return self._inputs.write(self._staging if run_dir is None else run_dir / FOLDER)

    def say(self, text: object, *, error: bool = False, end: str = "\n") -> None:
        if not self._quiet:
            super().say(text, error=error, end=end)

    def show(self, run_dir: Path, until: threading.Event) -> None:
        if self._quiet:
            return
        # A notebook shows standard error as if something were wrong, and draws no panel.
        console = Console(force_jupyter=False, force_terminal=False) if in_notebook() else None
        LiveView(run_dir, console).run(until)

    def wants_more(self) -> bool:
        if self._metrics is None or self.raised is not None or not (self._on_step or self._on_evaluation):
            return self.raised is None
        try:
            for line in self._metrics.lines():
                if hash(line) not in self._seen:
                    self._seen.add(hash(line))
                    self._call_back(parse_row(line))
        except BaseException as error:  # the caller gets it once everything has stopped
            self.raised = error
        return self.raised is None

    def _call_back(self, row: Mapping[str, Any]) -> None:
        if self._on_step is not None and "time/step_s" in row:
            self._on_step(row)
        if self._on_evaluation is not None and (found := evaluation_of(row)) is not None:
            self._on_evaluation(found)

    def resume_words(self, run: str) -> str:
        return f'streamrl.resume("{run}")'
