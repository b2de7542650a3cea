"""Keys between a hub and learner ranks on other machines: made for one start, and written to no file.

The hub gets them in its environment, as a child of rank 0; the other ranks get theirs through the process group.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from streamrl.transport.keys import ActorKey, KeyPair

VARIABLE = "STREAMRL_RANK_KEYS"
NAME = "ranks"


@dataclass(frozen=True, slots=True)
class RankKeys:
    """The hub's pair and the one that all ranks show; read by an `Authenticator` in place of a `KeyDirectory`."""

    server: KeyPair
    ranks: KeyPair

    @staticmethod
    def new() -> RankKeys:
        return RankKeys(KeyPair.new(), KeyPair.new())

    def environment(self) -> dict[str, str]:
        """The environment variable that passes the keys to the hub's process."""
        return {VARIABLE: f"{self.server.secret.decode()} {self.ranks.secret.decode()}"}

    @staticmethod
    def from_environment() -> RankKeys | None:
        """Read the keys that `environment` passed; None without any."""
        text = os.environ.get(VARIABLE)
        return None if text is None else RankKeys(*(KeyPair.of_secret(one.encode()) for one in text.split()))

    @property
    def key(self) -> ActorKey:
        """The key that a rank shows, and the hub that it trusts."""
        return ActorKey(NAME, self.ranks, self.server.public)

    def hub(self) -> KeyPair:
        return self.server

    def allowed(self) -> dict[bytes, str]:
        return {self.ranks.public: NAME}

    def stamp(self) -> tuple[tuple[str, int], ...]:
        return ()
