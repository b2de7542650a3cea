"""The tables of a ledger, and the base of the parts that work on them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from learner.hub.ledger.tables.actors import ActorTable
from learner.hub.ledger.tables.dedup import DedupTable
from learner.hub.ledger.tables.evals import EvalSource, EvalTable
from learner.hub.ledger.tables.filters import GroupFilter
from learner.hub.ledger.tables.groups import GroupTable
from learner.hub.ledger.tables.journal import Journal
from learner.hub.ledger.tables.lifecycle import GroupLifecycle
from learner.hub.ledger.tables.passed_over import PassedOver
from learner.hub.ledger.tables.prompts import PromptStream
from learner.hub.ledger.tables.settings import LedgerSettings
from learner.hub.ledger.tables.versions import LagBounds, Versions
from streamrl.messages import Lineage, Sampling


class Tables:
    """All that a ledger knows.

    Args:
        sampling: how answers are drawn for training; `eval_sources` say it for each set of evaluations.
        restarted: the run had a hub before, whose actors may come back.
    """

    def __init__(
        self, settings: LedgerSettings, *, learner_epoch: int, run_seed: int, prompts: PromptStream,
        sampling: Sampling, eval_sources: Mapping[str, EvalSource] | None = None,
        keep_group: GroupFilter | None = None, version: int = 0, lineage: Sequence[Lineage] = (),
        restarted: bool = False,
    ) -> None:
        self.settings = settings
        self.run_seed = run_seed
        self.sampling, self.eval_sources = sampling, eval_sources or {}
        self.prompts = prompts
        self.counts: Counter[str] = Counter()
        self.versions = Versions(learner_epoch, version, lineage)
        num_batches = version // settings.lag.steps_per_batch
        self.groups = GroupTable(num_trained=num_batches * settings.lag.groups_per_batch)
        prompts.cursor = self.groups.next_id
        self.dedup = DedupTable(settings.dedupe_window)
        self.evals = EvalTable(settings.max_attempts, settings.eval_keep_s)
        self.lag = LagBounds(settings, self.groups, self.versions)
        self.passed_over = PassedOver(settings.num_passed_over, run_seed)
        self.journal = Journal()
        self.lifecycle = GroupLifecycle(
            settings, self.groups, self.dedup, self.lag, prompts, keep_group, self.counts, self.passed_over,
            self.journal,
        )
        self.actors = ActorTable(self.lifecycle, self.evals, restored=restarted or learner_epoch > 1)


class Part:
    """One part of a ledger, with the tables that all parts share."""

    def __init__(self, tables: Tables) -> None:
        self.settings, self.run_seed = tables.settings, tables.run_seed
        self.sampling, self.eval_sources = tables.sampling, tables.eval_sources
        self.counts, self.versions, self.lag = tables.counts, tables.versions, tables.lag
        self.groups, self.dedup, self.evals = tables.groups, tables.dedup, tables.evals
        self.lifecycle, self.actors, self.journal = tables.lifecycle, tables.actors, tables.journal
