"""Connections by actor: how often each misbehaved, and how fast it generates."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from streamrl.messages import NcclState, Stop, StopReason, VersionRef
from streamrl.transport.session import EXIT_EVICTED

MAX_STRIKES, STRIKE_WINDOW_S = 3, 60.0


@dataclass(slots=True)
class Connection:
    """One live connection of one incarnation of an actor."""

    routing_id: bytes
    actor_id: str
    incarnation: int
    heard_at: float
    state: str = "syncing"
    version: str = "-"
    tokens_total: int = 0
    tokens_per_s: float = 0.0
    rate_at: float = 0.0
    strikes: deque[float] = field(default_factory=deque)
    stats: dict[str, float] = field(default_factory=dict)
    transports: tuple[str, ...] = ()
    device: str = ""
    installed: VersionRef | None = None
    nccl: NcclState = NcclState()
    announced_at: float = 0.0
    probed_at: float = 0.0
    max_leases: int = 1
    """0 for a relay, which never generates."""
    turn: int = 0
    """The turn that its last heartbeat named."""
    told_turn_at: float = 0.0
    """When it was first told of the turn that it is."""

    def strike(self, now: float) -> bool:
        """Count a violation; True if that is one too many."""
        self.strikes.append(now)
        while now - self.strikes[0] > STRIKE_WINDOW_S:
            self.strikes.popleft()
        return len(self.strikes) >= MAX_STRIKES

    def count_tokens(self, tokens_total: int, now: float) -> int:
        """Count new tokens since the last heartbeat; keeps a smoothed rate. The first heartbeat is the baseline."""
        new = max(0, tokens_total - self.tokens_total) if self.rate_at else 0
        if self.rate_at and now > self.rate_at:
            rate = new / (now - self.rate_at)
            self.tokens_per_s = 0.7 * self.tokens_per_s + 0.3 * rate if self.tokens_per_s >= 0.1 else rate
        self.tokens_total, self.rate_at = tokens_total, now
        return new


class Connections:
    """The table routing id <-> actor. A new HELLO of an actor replaces its old connection."""

    def __init__(self) -> None:
        self.by_route: dict[bytes, Connection] = {}
        self.by_actor: dict[str, Connection] = {}

    def bind(self, new: Connection) -> None:
        old = self.by_actor.get(new.actor_id)
        if old is not None:
            self.drop(new.actor_id)
            if old.incarnation == new.incarnation:
                new.tokens_total, new.tokens_per_s, new.rate_at = old.tokens_total, old.tokens_per_s, old.rate_at
                new.strikes = old.strikes
        self.by_route[new.routing_id] = self.by_actor[new.actor_id] = new

    def drop(self, actor_id: str) -> None:
        connection = self.by_actor.pop(actor_id, None)
        if connection is not None:
            self.by_route.pop(connection.routing_id, None)

    def all(self) -> list[Connection]:
        return list(self.by_actor.values())

    def __len__(self) -> int:
        """Count actors that may generate; relays do not count."""
        return sum(connection.max_leases > 0 for connection in self.by_actor.values())


def shut_out(cause: str) -> Stop:
    """Make the answer to an actor that is not believed."""
    return Stop(StopReason.EVICTED, False, 0.0, EXIT_EVICTED, cause[:512])
