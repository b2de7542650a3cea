"""What each actor generates, as metrics of a step."""

from learner.record.recorder import MAX_ACTORS, actor_rates
from streamrl.messages import HubStatus
from streamrl.metrics.names import lookup


def test_every_actor_has_a_metric_of_its_own_up_to_a_limit():
    few = HubStatus(1, {}, (("b c", "running 1:1", 20.0, 0.1), ("a", "syncing 1:0", 0.0, 3.0)))
    many = HubStatus(1, {}, tuple((f"actor-{i:03d}", "running", 1.0, 0.0) for i in range(100)))

    assert actor_rates(few) == {"actors/a": 0.0, "actors/b_c": 20.0}
    assert len(actor_rates(many)) == MAX_ACTORS and "actors/actor-000" in actor_rates(many)
    assert lookup("actors/b_c").unit == "tokens/s"
