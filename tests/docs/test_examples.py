"""The examples are complete, their settings are real and their tasks can be played; `make docs-test` runs them."""

import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from envs.check import check_task
from envs.registry import task_of
from examples.plot import evaluations, plot
from streamrl.config.load import load_config
from tests.docs.extract import ROOT, extract

EXAMPLES = sorted(path.parent for path in (ROOT / "examples").glob("*/settings.yaml"))

# Where the settings of an example find the files that its make_data.py wrote into a folder.
WRITTEN = {
    "6_gsm8k_format": ["data.path={}/gsm8k_train.jsonl", "data.test_path={}/gsm8k_test.jsonl"],
    # Its reward model is trained by the commands before: tests/flow/test_preferences_example.py.
    "8_preferences": ["data.path={}/answers.jsonl", "eval.datasets.right.path={}/test.jsonl", "reward.type=exact"],
}


def test_there_are_eight_and_the_page_lists_them_in_order():
    page = (ROOT / "examples" / "README.md").read_text()

    assert [path.name[0] for path in EXAMPLES] == list("12345678")
    places = [page.index(f"({path.name}/README.md)") for path in EXAMPLES]
    assert places == sorted(places)


@pytest.mark.parametrize("folder", EXAMPLES, ids=lambda folder: folder.name)
def test_an_example_is_complete(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.chdir(ROOT)  # its paths are relative to the clone
    page = (folder / "README.md").read_text()
    commands = [item.text for item in extract(folder / "README.md") if item.kind == "shell"]

    written = []
    if (folder / "make_data.py").exists():
        subprocess.run([sys.executable, folder / "make_data.py", tmp_path], check=True, timeout=60)
        written = [setting.format(tmp_path) for setting in WRITTEN[folder.name]]
    check_task(task_of(load_config([f"examples/{folder.name}/settings.yaml", *written])))

    assert any(f"examples/{folder.name}/settings.yaml" in command for command in commands)
    assert all(heading in page for heading in ("## Run it", "## What to expect", "## What to try next"))
    assert "](curve.svg)" in page
    assert ElementTree.parse(folder / "curve.svg").getroot().tag.endswith("svg")


def test_the_curves_can_be_drawn_again(tmp_path: Path):
    points = evaluations(ROOT / "docs/results/smollm2")

    plot({"native": points, "again": points}, tmp_path / "curve.svg")

    drawn = (tmp_path / "curve.svg").read_text()
    assert points[0] == (1, 0.51) and points[-1][0] == 80
    assert "optimizer steps" in drawn and "again" in drawn and drawn.count("<use ") >= 2 * len(points)
