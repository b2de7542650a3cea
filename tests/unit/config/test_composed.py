"""Words compose over the files that they name, however many were composed before."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from streamrl.config.load import ALGORITHM, CONFIGS, _composed
from streamrl.config.schema import Config

ALGORITHMS = sorted(path.stem for path in (CONFIGS / "algorithm").glob("*.yaml"))
EXPERIMENTS = sorted(path.stem for path in (CONFIGS / "experiment").glob("*.yaml"))


def files(algorithm: str = ALGORITHM, experiment: str | None = None):
    names = [("algorithm", algorithm), *([("experiment", experiment)] if experiment else [])]
    return OmegaConf.merge(
        OmegaConf.structured(Config), *(OmegaConf.load(CONFIGS / group / f"{name}.yaml") for group, name in names)
    )


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_an_algorithm_lies_over_the_schema(algorithm):
    assert _composed([f"algorithm={algorithm}"])[0] == files(algorithm)


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_an_experiment_lies_over_the_algorithm_and_is_returned_as_its_file_is(experiment):
    found, alone = _composed([f"experiment={experiment}"])

    assert found == files(experiment=experiment)
    assert alone == OmegaConf.load(CONFIGS / "experiment" / f"{experiment}.yaml")
    assert _composed([f"experiment={experiment}", "algorithm=grpo"])[0] == files("grpo", experiment)


@pytest.mark.parametrize(
    ("words", "changes"),
    [
        ([], {}), (["staleness.eta=9", "algorithm=grpo", "staleness.eta=8"], {"staleness": {"eta": 8}}),
        (["++env.options.length=3", "+env.options.other=4"], {"env": {"options": {"length": 3, "other": 4}}}),
        (["env.options={length: 3}", "env.options.other=4"], {"env": {"options": {"length": 3, "other": 4}}}),
        (["env.options.length=3", "~env.options.length"], {}),
        (["eval.datasets.own.path=x"], {"eval": {"datasets": {"own": {"path": "x"}}}}),
        (["rollout.train.sampling.stop=[a,b]"], {"rollout": {"train": {"sampling": {"stop": ["a", "b"]}}}}),
        (["policy.model_path=~/my model (2)"], {"policy": {"model_path": "~/my model (2)"}}),
    ],
)
def test_words_lie_over_the_files_and_nothing_of_a_call_stays(words, changes):
    algorithm = "grpo" if "algorithm=grpo" in words else ALGORITHM
    for _ in range(2):
        found, _ = _composed(words)
        assert found == OmegaConf.merge(files(algorithm), changes)
        found.env.name = "of one caller alone"
