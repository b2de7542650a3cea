"""A machine that stood still, and processes that were stopped together: nobody was silent meanwhile."""

import time

import pytest
import zmq

from learner.hub_client.link import HubLink
from streamrl.messages import ActorHeartbeat, ActorState, Leases, VersionRef
from streamrl.transport.awake import AwakeClock
from tests.kit.system import until
from tests.unit.config.setting_harness import LiveHub, config_of

HOUR = 3600.0


class Frozen:
    """A clock of a machine that was frozen for `seconds` so far."""

    seconds = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.seconds


def test_only_what_passes_between_two_questions_soon_after_each_other_counts():
    now = [100.0]
    clock, began = AwakeClock(lambda: now[0]), 100.0
    for gap, counted in ((1.9, 1.9), (0.0, 1.9), (HOUR, 1.9), (0.5, 2.4), (2.1, 2.4), (0.1, 2.5)):
        now[0] += gap
        assert clock() - began == pytest.approx(counted)


def test_a_hub_that_stood_still_evicts_nobody_and_takes_no_lease_back(tmp_path, model_dir):
    with LiveHub(tmp_path, config_of("hub.dead_after_s=5", "hub.lease_ttl_s=60")) as hub:
        frozen = Frozen()
        hub.server.context.clock._clock = frozen
        manifest, peer = hub.publish(0, model_dir), hub.connect()
        peer.join("a1")
        peer.send(ActorHeartbeat(
            incarnation=11, beat=1, state=ActorState.RUNNING, free=1, running=0, installed=VersionRef(1, 0),
            tokens_total=0, stuck=(), outbox_groups=0, outbox_bytes=0, max_leases=4, root=manifest.root,
        ))
        peer.receive(Leases)
        ledger = hub.server.context.ledger
        ticks, tick = [], ledger.tick
        ledger.tick = lambda now: ticks.append(now) or tick(now)
        for _ in range(3):
            frozen.seconds += HOUR
            after = len(ticks) + 3
            until(lambda enough=after: len(ticks) >= enough)
            counts = ledger.counters()
            assert (counts["num_evictions"], counts["num_leases_expired"], counts["num_leases_open"]) == (0, 0, 1)


@pytest.mark.parametrize("wait", ["next_batch", "wait_for_evals", "freeze", "wait_until_up"])
def test_a_rank_that_stood_still_does_not_take_its_hub_for_dead(wait):
    frozen, context = Frozen(), zmq.Context()
    router = context.socket(zmq.ROUTER)
    address = f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}"
    link = HubLink(
        address, rank=0, world=1, version=0, check_hub=lambda: None, stop_requested=lambda: False, stall_report_s=60,
        stall_fail_s=60,
    )
    link._clock._clock = frozen
    link.evaluate(0, 0, 1)
    turns = []

    def idle():
        turns.append(None)
        if len(turns) == 3:
            frozen.seconds += HOUR
        if len(turns) == 6:
            raise InterruptedError("it still waits")

    link.on_idle = idle
    try:
        with pytest.raises(InterruptedError):
            getattr(link, wait)(*[0] * (wait in ("next_batch", "freeze")))
    finally:
        link.close()
        context.destroy(linger=0)
