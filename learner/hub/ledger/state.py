"""The state of a ledger, and the base of the parts that decide from it."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence

from learner.hub.ledger.tables.dedup import DedupTable
from learner.hub.ledger.tables.evals import EvalSource, EvalTable
from learner.hub.ledger.tables.groups import GroupRecord, GroupTable
from learner.hub.ledger.tables.journal import Journal
from learner.hub.ledger.tables.passed_over import PassedOver
from learner.hub.ledger.tables.prompts import PromptStream
from learner.hub.ledger.tables.settings import LedgerSettings
from learner.hub.ledger.tables.versions import LagBounds, Versions
from streamrl.messages import Lineage, Sampling


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


class Part:
    """One part of a ledger: it reads the state, decides, and commits records."""

    def __init__(self, state: State) -> None:
        self.state, self.settings, self.counts = state, state.settings, state.counts
        self.versions, self.groups, self.lag = state.versions, state.groups, state.lag
        self.dedup, self.evals, self.eval_sources = state.dedup, state.evals, state.eval_sources
