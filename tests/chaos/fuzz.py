"""Mutated frames of every kind: through decoding, checks and a ledger in this process, and at every port of a real hub.

    python -m tests.chaos.fuzz --frames 10000000 --socket-s 60 --record docs/results/chaos

A frame may be refused with a `WireError`, or accepted. Any other exception, a hub that ends or stops answering, or more
than 64 MiB of growth is a failure; the seed and the number of the frame replay it.
"""

import argparse
import json
import random
import resource
import sys
import time
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from streamrl.errors import WireError
from streamrl.messages import (
    ACTOR_TO_IPC,
    FROM_WEIGHTS,
    HUB_TO_BROADCASTER,
    HUB_TO_RANK,
    IPC_TO_ACTOR,
    RANK_TO_HUB,
    TO_ACTOR,
    TO_HUB,
    TO_WEIGHTS,
    Direction,
    Group,
    Message,
    ReturnReason,
)
from streamrl.messages.codec import PREAMBLE, Decoder, encode
from streamrl.messages.validate import check_group
from tests.unit.hub.factories import LIMITS, FakeActor, make_ledger, one_actor
from tests.unit.messages.examples import example_of

DIRECTIONS: dict[str, Direction] = {
    "to_hub": TO_HUB, "to_actor": TO_ACTOR, "to_weights": TO_WEIGHTS, "from_weights": FROM_WEIGHTS,
    "rank_to_hub": RANK_TO_HUB, "hub_to_rank": HUB_TO_RANK, "to_broadcaster": HUB_TO_BROADCASTER,
    "to_ipc": ACTOR_TO_IPC, "from_ipc": IPC_TO_ACTOR,
}
MAX_GROWTH_BYTES = 64 << 20
_MARKERS = bytes((0x00, 0x7F, 0x80, 0x8F, 0x90, 0x91, 0x9F, 0xA0, 0xC0, 0xC1, 0xC2, 0xC3, 0xC4, 0xC6, 0xC9, 0xCB, 0xCF,
                  0xD3, 0xD9, 0xDB, 0xDC, 0xDD, 0xDE, 0xDF, 0xFF))
"""First bytes of MessagePack values: types swapped, lengths that lie, nesting."""
_ODD = (None, True, -1, 0, 1 << 63, (1 << 64) - 1, -(1 << 63), 0.5, float("nan"), float("inf"), -1e308, "", "x" * 70,
        b"", b"\x00" * 17, [], [[]], {}, {"a": float("nan")})


class Mutator:
    """An endless, seeded stream of frames of one direction."""

    def __init__(self, direction: Direction, seed: int, extra: tuple[Message, ...] = ()) -> None:
        self._rng = random.Random(seed)
        examples = [*(example_of(cls) for cls in direction.values()), *extra]
        self._bodies = [(one.KIND, bytes(encode(one)[PREAMBLE.size :])) for one in examples]
        self._trees = [(kind, msgspec.msgpack.decode(body)) for kind, body in self._bodies]

    def frame(self) -> bytes:
        """The next one: damaged bytes, or a sound frame around damaged contents."""
        rng = self._rng
        choice = rng.random()
        if choice < 0.02:
            return rng.randbytes(int(rng.random() * 200))
        if choice < 0.35:
            kind, tree = self._trees[int(rng.random() * len(self._trees))]
            return seal(kind, msgspec.msgpack.encode(self._change(tree)))
        kind, body = self._bodies[int(rng.random() * len(self._bodies))]
        body = self._damage(body)
        if choice < 0.95:
            return seal(kind if choice < 0.9 else int(rng.random() * 70), body)
        return self._damage(seal(kind, body))

    def _damage(self, body: bytes) -> bytes:
        rng = self._rng
        place, choice = int(rng.random() * (len(body) + 1)), rng.random()
        if choice < 0.4:
            changed = bytearray(body)
            for _ in range(1 + int(rng.random() * 4)):
                if changed:
                    changed[int(rng.random() * len(changed))] ^= 1 << int(rng.random() * 8)
            return bytes(changed)
        if choice < 0.7:
            return body[:place] + _MARKERS[(at := int(rng.random() * len(_MARKERS))) : at + 1] + body[place + 1 :]
        if choice < 0.8:
            return body[:place]
        if choice < 0.9:
            other = self._bodies[int(rng.random() * len(self._bodies))][1]
            return body[:place] + other[int(rng.random() * len(other)) :]
        if choice < 0.99:
            return body[:place] + body[max(0, place - 8) :]
        return body[:place] + b"\x91" * int(rng.random() * 3000) + body[place:]

    def _change(self, tree: Any) -> Any:
        """The same value with one leaf or branch replaced, dropped or doubled."""
        rng = self._rng
        if not isinstance(tree, list) or not tree or rng.random() < 0.15:
            return _ODD[int(rng.random() * len(_ODD))]
        at = int(rng.random() * len(tree))
        choice = rng.random()
        if choice < 0.05:
            return tree[:at] + tree[at + 1 :]
        if choice < 0.1:
            return tree[:at] + [tree[at], *tree[at:]]
        return [*tree[:at], self._change(tree[at]), *tree[at + 1 :]]


def seal(kind: int, body: bytes) -> bytes:
    """A sound preamble in front of any body."""
    return PREAMBLE.pack(b"SRLM", 1, kind, 0, xxhash.xxh3_64_intdigest(body)) + body


def honest_groups() -> tuple[Message, ...]:
    """GROUPs that a ledger accepts: what is one step away from these gets deepest into it."""
    ledger, actor, leases = one_actor(groups_per_batch=4, eta=1, window=4, max_lag=3, slots=6)
    return (
        actor.group(leases[0]), actor.group(leases[1], members=(0,), outcome=1), actor.group(leases[2], aborted=(1,)),
        actor.group(leases[3], members=(), outcome=2, reason=ReturnReason.DRAIN),
    )


class LedgerTarget:
    """A ledger with one actor; made again now and then, so that there is always something to accept."""

    def __init__(self) -> None:
        self._num = 0
        self._start()

    def _start(self) -> None:
        self.ledger = make_ledger(groups_per_batch=4, eta=1, window=4, max_lag=3)
        self.actor = FakeActor(self.ledger, "a1", slots=6)
        self.actor.join()
        self.actor.ask()

    def take(self, message: Message, frame: bytes) -> str:
        """What became of it, in a word."""
        self._num += 1
        if self._num % 500 == 0:
            self.ledger.tick(0.0)
            self.ledger.freeze(self.ledger.version)
            self.ledger.take_acks("a1")
            self._start()
        if not isinstance(message, Group):
            return "decoded"
        check = self.ledger.accept("a1", message, frame, 0.0)
        return check.kind


def run_frames(num_frames: int, seed: int, seconds: float = float("inf")) -> Counter[str]:
    """Frames through decode, checks and ledger; counts of what became of them. Raises AssertionError: a failure."""
    counts: Counter[str] = Counter()
    target, groups = LedgerTarget(), honest_groups()
    lanes = [
        (name, Decoder(direction), Mutator(direction, seed + at, groups * 3 if name == "to_hub" else ()))
        for at, (name, direction) in enumerate(DIRECTIONS.items())
    ]
    lanes += [lanes[0]] * 4  # most of what a hub reads
    began, deadline = peak_bytes(), time.monotonic() + seconds
    for number in range(num_frames):
        name, decoder, mutator = lanes[number % len(lanes)]
        frame = mutator.frame()
        try:
            message = decoder.decode(frame)
            if name == "to_hub":
                counts[target.take(message, frame)] += 1
            else:
                if isinstance(message, Group):
                    check_group(message, LIMITS, range(2))
                counts["decoded"] += 1
        except WireError as error:
            counts[f"refused_{error.counter}"] += 1
        except Exception as error:
            raise AssertionError(
                f"seed {seed}, frame {number} ({name}): {error!r} for {frame.hex()[:400]}"
            ) from error
        if number % 4096 == 0 and time.monotonic() > deadline:
            break
    counts["frames"] = number + 1
    counts["growth_bytes"] = peak_bytes() - began
    assert counts["growth_bytes"] <= MAX_GROWTH_BYTES, f"memory grew by {counts['growth_bytes']} bytes"
    return counts


def peak_bytes() -> int:
    """The most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def mixed(seed: int) -> Iterator[bytes]:
    """Frames of every kind and direction in turn."""
    groups = honest_groups()
    mutators = [Mutator(one, seed + at, groups) for at, one in enumerate(DIRECTIONS.values())]
    while True:
        for mutator in mutators:
            yield mutator.frame()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--socket-s", type=float, default=0.0, help="then so many seconds at the ports of a real hub")
    parser.add_argument("--record", type=Path, default=None)
    arguments = parser.parse_args()
    began = time.monotonic()
    found: dict[str, Any] = {"decoding": dict(run_frames(arguments.frames, arguments.seed, arguments.seconds))}
    found["decoding_s"] = round(time.monotonic() - began, 1)
    if arguments.socket_s:
        from tests.chaos.fuzz_ports import fuzz_ports

        found["ports"] = fuzz_ports(arguments.seed, arguments.socket_s)
    started = datetime.now(UTC).strftime("%Y%m%dT%H%M%S")
    record = {"started": started, "command": " ".join(["python -m tests.chaos.fuzz", *sys.argv[1:]]), **found}
    print(json.dumps(record))
    if arguments.record is not None:
        arguments.record.mkdir(parents=True, exist_ok=True)
        (arguments.record / f"fuzz-{started}.json").write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
