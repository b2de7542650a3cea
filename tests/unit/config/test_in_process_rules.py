"""Refusals of a run in one process, and how long a call of an environment may take without progress of its lease."""

from __future__ import annotations

import pytest

from learner.hub_client.settings import limits
from streamrl.errors import ConfigError
from tests.unit.config.setting_harness import config_of

HERE = ("launch.in_process=true", "launch.num_actors=1")


@pytest.mark.parametrize(
    ("word", "remedy"),
    [
        ("launch.num_actors=2", "launch.num_actors=1"), ("launch.num_learner_ranks=2", "launch.num_learner_ranks=1"),
        ("launch.standby_learner=true", "launch.standby_learner=false"), ("run.device=cuda", "run.device=cpu"),
        ("actors.engine=vllm", "actors.engine=native"), ("actors.device=cuda", "actors.device=cpu"),
    ],
)
def test_what_needs_more_processes_is_refused_with_the_setting_that_does_not(word, remedy):
    with pytest.raises(ConfigError, match=f"launch.in_process=true runs one .* add {remedy}, or leave"):
        config_of(*HERE, word)


def test_a_debugger_needs_one_process():
    with pytest.raises(ConfigError, match="take the command streamrl debug"):
        config_of("launch.debug=true")
    assert config_of("launch.debug=true", *HERE).launch.debug


def test_a_lease_may_wait_for_the_longest_call_of_its_environment():
    assert limits(config_of(), 100).progress_deadline_s == 120.0
    patient = limits(config_of("env.step_timeout_s=500"), 100)
    assert (patient.progress_deadline_s, patient.eval_progress_deadline_s) == (1000.0, 1000.0)
