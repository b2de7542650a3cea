"""Find out which isolation this machine can give: each is tried for real, none is believed."""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Iterator

from envs.sandbox.isolation import Isolation, base_python
from envs.sandbox.limits import Case, Limits
from envs.sandbox.process import SandboxProcess
from streamrl.errors import TaskError

LEVELS = ("auto", "1", "2")
_TRIAL = "import collections, json, math, random, re\nopen('file', 'w').write('x')\nprint(6 * 7)"


@functools.cache
def find_isolation(wanted: str = "auto") -> Isolation:
    """The best isolation that works here; each candidate runs a small program before it is believed.

    Args:
        wanted: one of LEVELS; "auto" is level 2 where it works, else level 1.

    Raises:
        TaskError: the wanted level does not work here; says why and what to install.
    """
    if wanted not in LEVELS:
        raise TaskError(f"sandbox level {wanted!r}: give one of {', '.join(LEVELS)}.")
    reasons: list[str] = []
    for candidate in _candidates():
        if wanted in ("auto", str(candidate.level)):
            reason = why_not(candidate)
            if reason is None:
                return candidate
            reasons.append(reason)
    raise TaskError(
        f"Sandbox level {wanted} does not work here: {'; '.join(reasons) or 'there is no program bwrap'}. "
        "Level 2 needs the package bubblewrap, and a kernel that lets it make namespaces; level 1 protects less."
    )


def _candidates() -> Iterator[Isolation]:
    root = os.getuid() == 0
    pythons = [python for python in dict.fromkeys((base_python(), "/usr/bin/python3")) if os.access(python, os.X_OK)]
    bubblewrap = shutil.which("bwrap")
    for made_by in (None,) if bubblewrap is None else (bubblewrap, None):
        for drops_root in (True, False) if root else (False,):
            for python in pythons:
                yield Isolation(python, drops_root, made_by)


def why_not(isolation: Isolation) -> str | None:
    """None if a program runs in it, else the reason why not."""
    try:
        process = SandboxProcess(isolation, slot=255, limits=Limits())
    except OSError as error:
        return str(error)
    try:
        outcome = process.run(_TRIAL, [Case()], Limits(), total_s=10.0)[0]
        return None if outcome.stdout == "42\n" else f"level {isolation.level}: {process.complaint or outcome.stderr}"
    finally:
        process.close()
