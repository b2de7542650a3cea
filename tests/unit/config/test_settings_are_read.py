"""Every setting is read by some code. (That each one changes a run is tested where its reader is.)"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from learner.model.optimizer import OPTIMIZERS
from streamrl.config.catalog import settings

ROOT = Path(__file__).parents[3]
NOT_READERS = {"schema.py", "schema_algorithm.py", "schema_system.py", "schema_task.py"}


def test_every_setting_is_read():
    source = "\n".join(
        path.read_text()
        for room in ("streamrl", "actors", "learner", "envs")
        for path in (ROOT / room).rglob("*.py")
        if path.name not in NOT_READERS and "algorithms" not in path.parts
    )
    read = set(re.findall(r"(?<=\w)\.(\w+)\b(?!\s*=(?!=))", source))
    # A builder's keywords are the settings that it reads.
    keywords = {word for build in OPTIMIZERS.values() for word in inspect.signature(build).parameters}
    leaves = {name: name.rpartition(".")[2] for name, *_ in settings()}
    assert [
        name for name, leaf in leaves.items()
        if leaf not in read and not (".optimizer." in name and leaf in keywords)
    ] == []
