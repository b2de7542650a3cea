"""The caller of a run: the files it brings, the lines it is told, and whether it wants the run to go on."""

from __future__ import annotations

import shlex
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from streamrl.report.live.view import LiveView


class Caller:
    """A person at a terminal, who is told everything there. A call from Python overrides what it wants otherwise."""

    def inputs(self, run_dir: Path | None) -> Sequence[str]:
        """Overrides that name files which the caller brings: for the check (None), then in the run's directory."""
        return ()

    def say(self, text: object, *, error: bool = False, end: str = "\n") -> None:
        """Tell a line of the run as a whole; what its processes say is for `show`."""
        print(text, file=sys.stderr if error else sys.stdout, end=end, flush=True)

    def show(self, run_dir: Path, until: threading.Event) -> None:
        """Show what happens in the run directory until the event is set. Called in a thread of its own."""
        LiveView(run_dir).run(until)

    def wants_more(self) -> bool:
        """Asked ten times a second in the thread that asked for the run; False stops it as Ctrl-C does."""
        return True

    def resume_words(self, run: str) -> str:
        """The command that continues the run of this name or directory."""
        return shlex.join(["streamrl", "resume", run])
