"""Turns of actors and learner on GPUs that have no room for both (`launch.share_gpus=turns`).

    actors' turn (even)    leases are granted; it ends once a batch is cut, and no lease and no evaluation is open
    learner's turn (odd)   no lease is granted; each actor has its engine give its memory back, then names the turn in
                           its heartbeats; ranks get the batch once all have done so, or are gone. It ends with their
                           requests for the next batch, once the version that this is trained at is published

The hub names the turn in every WELCOME and heartbeat, so nothing depends on a single message. The first turn is the
learner's: it loads its model, and after a restart trains the log's batches again.
"""

from __future__ import annotations

from learner.hub.context.connections import Connection, Connections


class Turns:
    """Counts the turns of one hub, from 1; with `is_on=False` the number stays 0, and everybody may work always.

    Args:
        patience_s: how long an actor may take to give its engine's memory back.
    """

    def __init__(self, connections: Connections, patience_s: float, *, is_on: bool) -> None:
        self.number = int(is_on)
        self._connections, self._patience_s = connections, patience_s

    @property
    def is_on(self) -> bool:
        return self.number > 0

    @property
    def actors_may_work(self) -> bool:
        return self.number % 2 == 0

    @property
    def learner_may_work(self) -> bool:
        """Tell whether no engine holds memory that the learner needs."""
        return not self.is_on or (not self.actors_may_work and not self.holding())

    def to_actors(self) -> None:
        """Begin the actors' turn, unless it is."""
        self.number += not self.actors_may_work

    def to_learner(self) -> None:
        """Begin the learner's turn, unless it is, or there are no turns."""
        self.number += self.is_on and self.actors_may_work

    def holding(self) -> list[Connection]:
        """List the actors that have not said in this turn that their engine holds nothing; relays have none."""
        return [one for one in self._connections.all() if one.max_leases and one.turn != self.number]

    def late(self, now: float) -> list[Connection]:
        """List those of them whose patience is over."""
        if self.actors_may_work:
            return []
        return [one for one in self.holding() if now - one.told_turn_at > self._patience_s]
