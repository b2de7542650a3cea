"""The hub's address for learner ranks: a socket file on one machine; on several, an address that asks for a key."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from learner.ranks.mesh import Ranks
from streamrl.config.addresses import in_url
from streamrl.transport.keys import ActorKey, RankKeys, actor_key
from streamrl.transport.sockets import socket_folder

FOLDER_PREFIX = "streamrl-ranks-"
ANY_PORT = "tcp://0.0.0.0:0"
POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class RankEndpoint:
    """The address that a rank connects to, and the key that it shows there."""

    address: str
    key: ActorKey | None = None

    def encode(self) -> bytes:
        return json.dumps([self.address, self.key.text if self.key is not None else None]).encode()

    @staticmethod
    def decode(data: bytes) -> RankEndpoint:
        address, text = json.loads(data)
        return RankEndpoint(address, None if text is None else actor_key(text))


def spans_machines() -> bool:
    """Return whether torchrun started ranks on several machines."""
    world, here = os.environ.get("WORLD_SIZE", "1"), os.environ.get("LOCAL_WORLD_SIZE")
    return here is not None and int(here) < int(world)


@dataclass(frozen=True, slots=True)
class RankDoor:
    """Rank 0's side: the address where it tells its hub to listen, and the keys."""

    bind: str
    keys: RankKeys | None = None

    @staticmethod
    def make() -> RankDoor:
        if spans_machines():
            return RankDoor("tcp://[::]:0" if ":" in os.environ.get("MASTER_ADDR", "") else ANY_PORT, RankKeys.new())
        return RankDoor(f"ipc://{socket_folder(FOLDER_PREFIX)}/ranks")

    def endpoint(self, run_dir: Path, start: int, check_hub: Callable[[], None]) -> RankEndpoint:
        """Wait until the hub has taken a port; returns what ranks connect to. Raises StreamrlError if the hub ends."""
        if self.keys is None:
            return RankEndpoint(self.bind)
        while True:
            check_hub()
            note = run_dir / "hub.json"
            found = json.loads(note.read_text()) if note.exists() else {}
            if found.get("start") == start:
                port = found["ranks"].rpartition(":")[2]
                return RankEndpoint(f"tcp://{in_url(os.environ['MASTER_ADDR'])}:{port}", self.keys.key)
            time.sleep(POLL_S)


def agree(ranks: Ranks, mine: Callable[[], RankEndpoint]) -> RankEndpoint:
    """Share rank 0's endpoint with every rank; a collective call. `mine` is called on rank 0 only."""
    return RankEndpoint.decode(ranks.bytes_from_rank_zero(mine().encode() if ranks.rank == 0 else b""))
