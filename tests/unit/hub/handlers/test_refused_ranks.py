"""Messages of a learner rank that make no sense: refused by name, its rank fails with the cause, the hub goes on."""

import msgspec
import pytest

from streamrl.errors import StreamrlError
from streamrl.messages import BatchRequest, EvalRequest, Manifest, Publish, Saved, SnapshotRequest, StepDone, VersionRef
from streamrl.messages.codec import encode
from tests.unit.config.setting_harness import LiveHub, config_of
from tests.unit.messages.examples import example_of

MANIFEST = msgspec.structs.replace(example_of(Manifest), ref=VersionRef(1, 0))
NONSENSE = {
    "another rank": BatchRequest(9, 0),
    "a version far ahead": BatchRequest(0, 7),
    "a step without a batch": StepDone(1, False, ""),
    "a checkpoint that was never frozen": Saved(3),
    "a snapshot of another version": SnapshotRequest(5),
    "weights without a layout": Publish(MANIFEST, "/nowhere", 1),
    "weights of another start": Publish(msgspec.structs.replace(MANIFEST, ref=VersionRef(7, 0)), "/nowhere", 1),
    "an unknown evaluation set": EvalRequest(1, 0, 4, dataset="nowhere"),
    "an evaluation without an answer": EvalRequest(1, 0, 4, num_responses=0),
    "an evaluation without an end": EvalRequest(1, 0, 1 << 31, num_responses=1 << 15),
}


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    with LiveHub(tmp_path_factory.mktemp("hub"), config_of()) as live:
        yield live


@pytest.mark.parametrize("message", NONSENSE.values(), ids=list(NONSENSE))
def test_nonsense_of_a_rank_is_refused_by_name_and_the_hub_goes_on(hub, caplog, message):
    before = hub.server.context.counters["num_wire_errors_rank"]
    hub.link._socket.send(encode(message))

    with pytest.raises(StreamrlError, match=f"the hub refused {type(message).__name__} of learner rank 0: "):
        while True:  # a status may be on its way before the refusal; the test's time-out ends it
            hub.link.refresh_status()

    hub.link.refresh_status()  # the answers to what came with it, and then to this
    assert hub.server.context.counters["num_wire_errors_rank"] == before + 1
    assert "of learner rank 0" in caplog.text and len(hub.link.freeze(0)) > 0
