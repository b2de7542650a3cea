"""The notebooks run from their first cell to their last, and what is committed came from such a run."""

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.docs.extract import ROOT

PATH = ROOT / "examples" / "first_run.ipynb"
TEN_LINES = ROOT / "examples" / "ten_lines.ipynb"
SHORT = (
    'settings = ["trainer.num_steps=2", "eval.every_steps=1", "eval.num_samples=8", "rollout.num_prompts_per_step=8", '
    '"rollout.num_responses_per_prompt=4", "policy.tiny.num_warm_start_steps=20", "policy.tiny.cache_dir={cache}"]'
)


def texts(notebook: nbformat.NotebookNode) -> str:
    """Everything that its cells printed or returned as text."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return "\n".join(output.get("text", "") or output.get("data", {}).get("text/plain", "") for output in outputs)


@pytest.mark.flow
@pytest.mark.timeout(300)
def test_every_cell_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(PATH, as_version=4)
    (parameters,) = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ())]
    parameters.source = SHORT.format(cache=ROOT / "models" / "test")

    NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(tmp_path)}}).execute()

    shown = texts(notebook)
    assert "report          runs/quickstart-001/report.html" in shown
    assert shown.count("reversed without an error") >= 2 and "abcd ->" in shown
    assert any("image/png" in output.get("data", {}) for cell in notebook.cells for output in cell.get("outputs", ()))


def test_the_committed_outputs_are_those_of_one_whole_run():
    notebook = nbformat.read(PATH, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]

    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert "error" not in {output.output_type for cell in code for output in cell.outputs}
    assert "steps           60\n" in texts(notebook)
    assert "stderr" not in {output.get("name") for cell in code for output in cell.outputs}
    assert PATH.stat().st_size < 200_000


@pytest.mark.flow
@pytest.mark.timeout(600)
def test_ten_lines_with_a_function_and_a_list_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(TEN_LINES, as_version=4)
    for cell in notebook.cells:
        cell.source = cell.source.replace("num_steps=150", "num_steps=24, eval__every_steps=8, launch__num_actors=1")
        cell.source = cell.source.replace("num_steps=200", "num_steps=26")
    check = "assert run.eval_score_best > run.eval_score_first, run.evaluations\nassert run.steps == 26, run"
    notebook.cells.append(nbformat.v4.new_code_cell(check))

    NotebookClient(notebook, timeout=540, resources={"metadata": {"path": str(tmp_path)}}).execute()

    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    (shown,) = [output.data for output in outputs if "data" in output]
    assert shown["text/plain"].startswith("run         quickstart-001, finished\n") and "<svg" in shown["text/html"]
    assert len(shown["text/html"]) < 50_000 and "% of the held-out sums" in texts(notebook)
    assert {output.get("name") for output in outputs} == {None, "stdout"} and "\x1b" not in texts(notebook)


def test_the_ten_lines_are_ten_and_their_committed_run_trained():
    notebook = nbformat.read(TEN_LINES, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]

    lines = [line for line in code[0].source.splitlines() if line.strip()]
    assert len(lines) <= 10 and "streamrl.train(" in code[0].source
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    first, last = re.search(r"evaluation  (\S+) → (\S+), best", texts(notebook)).groups()
    assert float(last) > float(first) + 0.1
