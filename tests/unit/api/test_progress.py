"""Where a call from Python shows its run."""

import importlib
import threading
from pathlib import Path

import pytest

from streamrl.api.inputs import Inputs
from streamrl.api.progress import PythonCaller, in_notebook

pytestmark = pytest.mark.timeout(60)


def test_a_program_that_starts_kernels_is_not_a_notebook_and_is_shown_on_standard_error(tmp_path: Path, capfd):
    """The kernel of a notebook shows its runs on standard output: tests/docs/test_notebook.py."""
    importlib.import_module("ipykernel.kernelapp")  # as nbclient does, in a process that is not a kernel
    assert not in_notebook()
    (tmp_path / "metrics.jsonl").write_text('{"step": 4, "policy/loss": 0.5, "time/step_s": 1.0}\n')
    over = threading.Event()
    over.set()

    PythonCaller(Inputs(None, None), tmp_path, None, None, quiet=False).show(tmp_path, over)

    out, err = capfd.readouterr()
    assert "step 4" in err and not out
