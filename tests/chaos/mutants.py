"""What is removed on purpose, so that the checker must fail: each function patches the process of the role it is in."""

import os
from collections.abc import Callable

from learner.hub.ledger.accept import Acceptance
from learner.hub.ledger.membership import Membership
from learner.hub.ledger.tables.dedup import DedupEntry, DedupTable


def no_dedupe(role: str) -> None:
    """No sequence number is remembered, and no member of a group that still waits for others counts as done."""
    if role != "hub":
        return
    place, check_open = DedupEntry.place, Acceptance._check_open

    def without_members(self: Acceptance, record, group, summaries) -> None:
        check_open(self, record, group, [])

    DedupEntry.place = lambda self, seq: "new" if place(self, seq) == "repeat" else place(self, seq)
    Acceptance._check_open = without_members


def no_fencing(role: str) -> None:
    """A superseded incarnation may return."""
    if role != "hub":
        return
    DedupTable.is_fenced = lambda self, actor_id, incarnation: False
    Membership._refuse = lambda self, actor_id, hello: None


def no_fsync(role: str) -> None:
    """Nothing is forced to the disk; see `disk`, which patches the same function before this does."""
    if role == "learner":
        os.fsync = lambda file: None


def skipped_batch(role: str) -> None:
    """A recovery trains the log again without its first batch, and counts it."""
    if role != "learner":
        return
    from tests.chaos import learner

    def train_again(self, log):
        batches = log.batches
        if batches and batches[0].step is not None:
            self.version += 1
            log.batches = batches[1:]
        return untouched(self, log)

    untouched = learner.FakeLearner.train_again
    learner.FakeLearner.train_again = train_again


MUTANTS: dict[str, Callable[[str], None]] = {
    "dedupe": no_dedupe, "fencing": no_fencing, "fsync": no_fsync, "skipped_batch": skipped_batch,
}
