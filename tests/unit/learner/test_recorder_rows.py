"""What a row of metrics holds of the hub's counters."""

from __future__ import annotations

import math

from learner.record.recorder import hub_keys
from streamrl.messages import HubStatus


def test_counters_get_their_names_and_sums_that_only_make_means_stay_out():
    row = hub_keys(HubStatus(3, {"num_actors": 2.0, "mean_pause_s": 0.5, "arrived_reward": 9.0, "odd": math.nan}, ()))

    assert row == {"hub/num_actors": 2.0, "time/install_pause_s": 0.5}
