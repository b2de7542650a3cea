"""The example of docs/own_algorithm.md, as it is printed, trains; its tables of inputs are the program's."""

import re

import pytest

import streamrl
from streamrl.algorithms.registry import ESTIMATOR_INPUTS, SURROGATE_INPUTS
from tests.docs.extract import ROOT, extract
from tests.flow.processes import RunHarness

PAGE = ROOT / "docs" / "own_algorithm.md"


def test_the_tables_of_the_page_are_the_inputs():
    text = PAGE.read_text()
    for title, inputs in (("## A surrogate", SURROGATE_INPUTS), ("## An estimator", ESTIMATOR_INPUTS)):
        table = text[text.index(title):].partition("|---|---|\n")[2].partition("\n\n")[0]
        assert dict(re.findall(r"\| `(\w+)` \| (.*) \|", table)) == dict(inputs)


@pytest.mark.flow
@pytest.mark.timeout(300)
def test_the_example_trains(harness: RunHarness, forked_children, tmp_path, monkeypatch):
    (file,) = [item for item in extract(PAGE, PAGE.name) if item.kind == "file"]
    (command,) = [item for item in extract(PAGE, PAGE.name) if item.kind == "shell"]
    (tmp_path / file.name).write_text(file.text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    own = [word for word in command.text.split() if word.startswith(("loss.", "advantage."))]
    assert len(own) == 3

    words = harness.words("trainer.num_steps=3", "checkpoint.export_hf=false")
    run = streamrl.train(overrides=[*words, *own], quiet=True)

    assert run.config.loss.surrogate == "my_algorithm:soft_clip" and run.config.loss.options == {"width": 0.5}
    assert run.steps == 3 and all(norm for norm in run.metrics["policy/grad_norm"] if norm is not None)
    assert harness.leftovers() == []
