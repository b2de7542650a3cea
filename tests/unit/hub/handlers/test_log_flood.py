"""A peer that joins and leaves without end: a real hub writes some lines and counts the others."""

import logging

import pytest

from learner.hub.handlers.actors import MAX_MOVES
from streamrl.messages import Bye
from tests.unit.config.setting_harness import LiveHub, config_of, tiny_model

NUM_TIMES = 600


@pytest.mark.timeout(110)
def test_who_joins_and_leaves_without_end_fills_no_log(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="streamrl.hub")
    with LiveHub(tmp_path, config_of()) as hub:
        hub.publish(0, tiny_model(tmp_path))
        peer = hub.connect()
        for number in range(NUM_TIMES):
            peer.join(f"visitor-{number}")
            peer.send(Bye(1, "x" * 200))
            peer.receive(Bye)
        lines = [line for line in caplog.messages if "visitor-" in line]

    # each of the two lines that a visit causes, but for the first ones and one a second
    assert MAX_MOVES // 2 < len(lines) < NUM_TIMES, len(lines)
