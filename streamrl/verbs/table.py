"""The commands for a run that is there: name -> its help, and what it does with its words."""

from __future__ import annotations

from collections.abc import Callable

from streamrl.verbs import actors, resume, status

VERBS: dict[str, tuple[str, Callable[[list[str]], int]]] = {
    "status": (status.USAGE, status.status),
    "scale": (actors.SCALE_USAGE, actors.scale),
    "drain": (actors.DRAIN_USAGE, actors.drain),
    "resume": (resume.USAGE, resume.resume),
}
