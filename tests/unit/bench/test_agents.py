"""The benchmark of agents at its smallest: what it counts is exact at any size."""

import pytest

from bench.agents import MEMBERS, measured


@pytest.mark.timeout(600)
def test_sessions_of_every_api_train_once_and_token_by_token_over_deaths_and_lost_answers(tmp_path):
    pytest.importorskip("openai")
    pytest.importorskip("anthropic")
    found = measured(12, 1, tmp_path, groups=2)  # small steps: weights are installed under most sessions
    assert (found["lost"], found["twice"], found["trained"]) == (0, 0, 24 * MEMBERS)
    assert found["died"] > 0 and found["answers_lost"] > 0 and min(found["calls"].values()) > 0
    assert found["over_installs"] > 0 and found["mismatch"] < 1e-3
    assert found["tokens_scored"] == found["tokens_sampled"] > 500
