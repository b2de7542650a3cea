"""The simulation against what can be worked out by hand: which side limits, how old tokens get, what failures cost."""

import pytest

from bench.plane.ledger_cost import LedgerLoad
from bench.simulate import Simulation, World
from streamrl.config.load import load_config
from streamrl.config.schema import Config

B = 16


@pytest.fixture(scope="module")
def config() -> Config:
    return load_config([
        "experiment=quickstart", "trainer.num_steps=1000000", "rollout.num_responses_per_prompt=2",
        f"rollout.num_prompts_per_step={B}", "staleness.eta=2",
    ])


def test_many_actors_keep_the_learner_busy_and_the_lag_at_its_bound(config):
    world = World(200, group_s=2.0, sigma=0.1, step_s=2.0, install_s=0.1)
    simulation = Simulation(config, world)
    found = simulation.run(400.0, warm_s=100.0)
    assert found["groups_per_s"] == pytest.approx(B / 2.0, rel=0.05) and found["learner_busy"] > 0.95
    assert 1 <= found["lag_mean"] <= found["lag_max"] <= simulation.ledger.lag.rule.max_lag
    assert found["stale"] == found["dropped"] == 0


@pytest.mark.parametrize("num_actors", [3, 200])
def test_the_load_on_the_ledger_keeps_every_actor_busy(num_actors):
    load = LedgerLoad(num_actors, groups_per_batch=16)
    for _ in range(3 * num_actors):
        load.step()
    load.ledger.check()
    assert {len(one.train.leases) for one in load.ledger.actors.all()} == {2}
