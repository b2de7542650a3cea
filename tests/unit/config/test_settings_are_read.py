"""Every setting is read by some code. (That each one changes a run is tested where its reader is.)"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from learner.model.optimizer import OPTIMIZERS
from streamrl.config.load import settings

ROOT = Path(__file__).parents[3]
NOT_READERS = {"schema.py", "schema_algorithm.py", "schema_system.py", "schema_task.py"}
SOURCE = "\n".join(
    path.read_text()
    for room in ("streamrl", "actors", "learner", "envs")
    for path in (ROOT / room).rglob("*.py")
    if path.name not in NOT_READERS and "algorithms" not in path.parts
)


@pytest.mark.parametrize("name", [name for name, _, _, _ in settings()])
def test_every_setting_is_read(name: str):
    leaf = name.rsplit(".", 1)[-1]
    if ".optimizer." in name and any(leaf in inspect.signature(build).parameters for build in OPTIMIZERS.values()):
        return  # a builder's keywords are the settings that it reads
    assert re.search(rf"\w\.{leaf}\b(?!\s*=(?!=))", SOURCE), f"nothing reads {name}"
