"""Where a process may listen: where no other machine reaches, as long as actors are not authenticated."""

from __future__ import annotations

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


def is_loopback(address: str) -> bool:
    """Whether only processes of this machine reach tcp://HOST:PORT."""
    return address.removeprefix("tcp://").rpartition(":")[0] in LOOPBACK
