"""Option names of RL2, its fork, rl4llm, ColossalAI's distributed RL and RLite lead to the settings that do it."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from streamrl.config.catalog import is_setting, nearest_setting
from streamrl.config.overrides import check_names
from streamrl.errors import ConfigError

ANSWERS = tomllib.loads(Path(__file__).with_name("ancestor_names.toml").read_text())
NOTHING = "see `streamrl settings` for every key."


def wrong(name: str, answer: str) -> str | None:
    """The answer to this name, unless it is the right one."""
    said = nearest_setting(name)
    if answer == "the same name":
        return None if is_setting(name) else said
    if answer.startswith("says "):
        right = answer.removeprefix("says ") in said and "did you mean" not in said
    else:
        right = said == (NOTHING if answer == "nothing" else f"did you mean `{answer}`?")
    return None if right and not is_setting(name) else said


@pytest.mark.parametrize("project", ANSWERS)
def test_no_name_of_theirs_misleads(project):
    rows = [(name, answer) for answer, names in ANSWERS[project].items() for name in names.split()]
    assert len(rows) == len(set(rows)) > 25
    assert {name: said for name, answer in rows if (said := wrong(name, answer)) is not None} == {}


@pytest.mark.parametrize(("key", "said"), [
    ("kl.tipe", "see "), ("staleness.lag", "see "), ("hub.lrr", "see "), ("run.tempreature", "see "),  # ours, far away
    ("kl.moed", "`kl.mode`"), ("stalenes.eta", "`staleness.eta`"), ("ppo.temprature", "`rollout.train.sampling.temp"),
    ("dpo.betas", "`dpo.beta`"),
])
def test_a_suggestion_is_near_and_in_no_other_section_of_ours(key, said):
    assert said in nearest_setting(key)


def test_an_option_of_a_command_line_is_told_how_the_thing_is_done_here():
    with pytest.raises(ConfigError, match="settings are key=value, and learner.mesh.tensor divides"):
        check_names(["--tensor-parallel-size", "2"])
    with pytest.raises(ConfigError, match="write staleness.eta=2"):
        check_names(["--n-behind", "2"])
