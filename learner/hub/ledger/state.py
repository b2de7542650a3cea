"""The state of a ledger, and the base of the parts that decide from it."""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Mapping, Sequence

from learner.hub.ledger.tables.dedup import DedupTable
from learner.hub.ledger.tables.evals import EvalSource, EvalTable
from learner.hub.ledger.tables.groups import Delivery, GroupRecord, GroupTable
from learner.hub.ledger.tables.prompts import PromptStream
from learner.hub.ledger.tables.settings import LedgerSettings
from learner.hub.ledger.tables.versions import LagBounds, Versions
from streamrl.messages import GroupOrigin, KeptGroup, Lineage, Sampling
from streamrl.messages.seeding import draw_key
from streamrl.stream.records import GroupArrived, Record


class Journal:
    """The records that changes of the ledger leave for the run's log, in order.

    The shell takes and writes them, and says how far they are durable.
    """

    def __init__(self) -> None:
        self.next_sequence = 1
        self._waiting: list[Record] = []
        self._unsynced: deque[tuple[int, Delivery]] = deque()

    @property
    def first_waiting(self) -> int:
        """The number of the next record that `take` gives."""
        return self.next_sequence - len(self._waiting)

    def append(self, record: Record) -> int:
        """Add a record; returns its number. The delivery of an accepted group becomes durable with it."""
        sequence = self.next_sequence
        self.next_sequence += 1
        self._waiting.append(record)
        if isinstance(record, GroupArrived) and not record.refused:
            self._unsynced.append((sequence, Delivery(record.actor_id, record.incarnation, record.seq)))
        return sequence

    def take(self) -> list[Record]:
        """Take what was added since the last call."""
        taken, self._waiting = self._waiting, []
        return taken

    def synced(self, sequence: int) -> list[Delivery]:
        """Take the deliveries whose records, up to this number, survive a crash."""
        done = []
        while self._unsynced and self._unsynced[0][0] <= sequence:
            done.append(self._unsynced.popleft()[1])
        return done


class PassedOver:
    """The `num` groups with the smallest keys of those added since the last `take`."""

    def __init__(self, num: int, seed: int) -> None:
        self._num, self._seed = num, seed
        self._kept: dict[int, tuple[KeptGroup, ...]] = {}  # by group

    def add(self, group_id: int, frames: Sequence[bytes], origins: Sequence[GroupOrigin], fate: str) -> None:
        """Add frames of a group that will not be trained on; `fate` says why."""
        if not frames or not self._num:
            return
        self._kept[group_id] = tuple(KeptGroup(bytes(f), o, fate) for f, o in zip(frames, origins, strict=True))
        drawn = heapq.nsmallest(self._num, self._kept, key=lambda one: draw_key(self._seed, one))
        self._kept = {one: self._kept[one] for one in drawn}

    def take(self) -> tuple[KeptGroup, ...]:
        """Take every frame of the drawn groups."""
        kept, self._kept = self._kept, {}
        return tuple(frame for frames in kept.values() for frame in frames)


class State:
    """The tables of a ledger, except for connections: `apply` alone changes groups, versions, bounds and `in_flight`.

    Args:
        sampling: how answers are drawn for training; `eval_sources` say it for each set of evaluations.
    """

    def __init__(
        self, settings: LedgerSettings, *, learner_epoch: int, run_seed: int, prompts: PromptStream,
        sampling: Sampling, eval_sources: Mapping[str, EvalSource] | None = None, version: int = 0,
        lineage: Sequence[Lineage] = (),
    ) -> None:
        self.settings = settings
        self.run_seed = run_seed
        self.sampling, self.eval_sources = sampling, eval_sources or {}
        self.prompts = prompts
        self.counts: Counter[str] = Counter()
        self.versions = Versions(learner_epoch, version, lineage)
        num_batches = version // settings.lag.steps_per_batch
        self.groups = GroupTable(num_trained=num_batches * settings.lag.groups_per_batch)
        # (version it trains at, groups) of each batch that was cut, oldest first
        self.in_flight: deque[tuple[int, list[GroupRecord]]] = deque()
        self.dedup = DedupTable(settings.dedupe_window)
        self.evals = EvalTable(settings.max_attempts, settings.eval_keep_s)
        self.lag = LagBounds(settings, self.groups, self.versions)
        self.passed_over = PassedOver(settings.num_passed_over, run_seed)
        self.journal = Journal()


    def sampling_of(self, group_id: int) -> Sampling:
        """The sampling that a training group is leased with, however often that is."""
        number = max(0, group_id - self.lag.ahead)
        return self.settings.sampling_rule.of_group(self.sampling, number // self.settings.lag.groups_per_batch)


class Part:
    """One part of a ledger: it reads the state, decides, and commits records."""

    def __init__(self, state: State) -> None:
        self.state, self.settings, self.counts = state, state.settings, state.counts
        self.versions, self.groups, self.lag = state.versions, state.groups, state.lag
        self.dedup, self.evals, self.eval_sources = state.dedup, state.evals, state.eval_sources
