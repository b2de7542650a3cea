"""Frames of every kind, mutated: nothing but a `WireError` at decoder and ledger, and a hub that goes on answering."""

import secrets
import sys

import pytest

from streamrl.errors import WireError
from streamrl.messages.codec import Decoder
from tests.chaos.fuzz import DIRECTIONS, Mutator, run_frames
from tests.chaos.fuzz_ports import fuzz_ports

pytestmark = pytest.mark.timeout(300)
FRAMES_S, PORTS_S = 45.0, 15.0
"""A minute together, other frames each time: a failure names its seed, and `tests.chaos.fuzz --seed` replays it."""
MIN_FRAMES = 50_000


def test_mutated_frames_of_all_directions_are_refused_or_accepted_and_never_crash():
    counts = run_frames(sys.maxsize, seed=secrets.randbits(32), seconds=FRAMES_S)
    assert counts["frames"] > MIN_FRAMES
    # It must get past each stage: damage alone would prove only the digest.
    for name in ("accepted", "rejected", "decoded", "refused_body", "refused_kind", "refused_digest", "refused_frame"):
        assert counts[name] > 20, (name, counts)


@pytest.mark.parametrize("name", DIRECTIONS)
def test_the_same_seed_gives_the_same_frames(name):
    first, second = (Mutator(DIRECTIONS[name], 5) for _ in range(2))
    frames = [first.frame() for _ in range(200)]
    assert frames == [second.frame() for _ in range(200)]
    decoder, num_sound = Decoder(DIRECTIONS[name]), 0
    for frame in frames:
        try:
            decoder.decode(frame)
            num_sound += 1
        except WireError:
            pass
    assert 0 < num_sound < len(frames)


def test_a_hub_answers_an_honest_actor_whatever_comes_to_its_ports():
    found = fuzz_ports(seed=secrets.randbits(32), seconds=PORTS_S)
    assert found["frames"] > 1000 and found["raw connections"] > 0
    assert {"num_wire_errors_body", "num_wire_errors_digest"} <= found["refused"].keys()
