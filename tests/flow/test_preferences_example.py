"""The eighth example, whole: each trainer starts from the last one's model, and RL and DPO gain."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from tests.docs.extract import ROOT, extract
from tests.flow.forked_process import ForkedPopen
from tests.flow.processes import finished

FOLDER = ROOT / "examples" / "8_preferences"


@pytest.mark.timeout(600)
def test_the_commands_of_the_page_train_one_model_after_another(tmp_path: Path, fork_server):
    shutil.copytree(FOLDER, tmp_path / "examples" / FOLDER.name)
    page = [item.text for item in extract(FOLDER / "README.md") if item.kind == "shell"]

    for program, *words in map(str.split, "\n".join(page).splitlines()):
        module = [] if program == "python" else ["-m", "streamrl.cli"]
        done = finished([sys.executable, *module, *words], tmp_path, ForkedPopen, deadline_s=300)
        assert done.returncode == 0, f"{' '.join(words)}: {done.stdout}{done.stderr}"

    evaluations = sorted((tmp_path / "evals").glob("*.json"))
    supervised, reinforced, preferred = (json.loads(path.read_text())["reward"] for path in evaluations)
    assert 0.2 < supervised < 0.5
    assert reinforced > supervised + 0.15 and preferred > supervised + 0.15
