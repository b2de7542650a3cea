"""Words compose to what hydra makes of them, however many were composed before."""

from __future__ import annotations

import pytest
from hydra.errors import HydraException
from omegaconf import OmegaConf

from streamrl.config.load import CONFIGS, _composed, _composed_by_hydra

GROUPS = [f"{group}={path.stem}" for group in ("experiment", "algorithm") for path in (CONFIGS / group).glob("*.yaml")]


@pytest.mark.parametrize(
    "words",
    [
        [], *([word] for word in sorted(GROUPS)), ["algorithm=grpo", "experiment=games"],
        ["experiment=quickstart", "staleness.eta=9"], ["staleness.eta=9", "experiment=quickstart", "staleness.eta=8"],
        ["++env.options.length=3", "env.name=string.sort"], ["++eval.datasets={long: {env: {max_turns: 2}}}"],
        ["++eval.datasets.own.path=x", "rollout.train.sampling.stop=[a,b]", "policy.model_path=null"],
        ["experiment=tool_arithmetic", "++env.options={length: 3}"],
    ],
)
def test_words_compose_to_what_hydra_makes_of_them(words):
    for _ in range(2):
        found, wanted = _composed(words), _composed_by_hydra(tuple(words))
        assert OmegaConf.to_yaml(found) == OmegaConf.to_yaml(wanted) and found == wanted
        found.env.name = "of one caller alone"


@pytest.mark.parametrize(
    "word", ["staleness.etta=3", "staleness.eta=many", "algorithm=none", "staleness.eta=1,2", "+new=3", "~env", "env=3"]
)
def test_what_cannot_be_set_is_refused_in_the_words_of_hydra(word):
    words, said = ("experiment=quickstart", word), []
    for compose in (_composed_by_hydra, _composed):
        try:
            found = compose(words)
        except HydraException as error:
            said.append(f"{error} {error.__cause__}")
        else:
            said.append(OmegaConf.to_yaml(found))
    assert said[0] == said[1]
