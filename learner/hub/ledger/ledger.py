"""The ledger: who makes which group, what arrived, what is trained, and what a crash may not lose.

    actors         hello -> beat, installed ... drain -> bye        (or evict; tick finds the silent ones)
    work           grant -> accept -> cut_batch -> trained          READY -> LEASED -> HELD -> IN_BATCH -> TRAINED
    durability     freeze -> saved; restore after a crash

It is a pure state machine: no socket, no clock, no thread, no randomness. `now` is the caller's monotonic time in
seconds, and every answer is a value. Its promises:

    every prompt drawn ends exactly once, trained or dropped with a reason, and is live until then
    no (group, member) is trained twice in one surviving history, whatever is re-sent, reissued or restored
    no trained token is older than max_lag at the cut, and with the default max_lag the cut has nothing to throw away
    an actor never holds more training leases than it has slots

The verbs live one idea a file: `roster` (actors), `dispatch` (grants), `admission` (verdicts), `consumption` (batches),
`snapshots` (checkpoints); `books` has the tables and the transitions that they share.
"""

from __future__ import annotations

from learner.hub.ledger.accept import AcceptResult, Admission
from learner.hub.ledger.actors import Effect, JoinResult
from learner.hub.ledger.cut import Consumption
from learner.hub.ledger.evals import EvalOutcome
from learner.hub.ledger.groups import GroupState, HeldGroup, HeldMember
from learner.hub.ledger.settings import LedgerSettings
from learner.hub.ledger.snapshots import Snapshots
from learner.hub.ledger.state import Actor
from streamrl.messages import Lineage, RejectReason, VersionRef

__all__ = [
    "AcceptResult", "Actor", "Effect", "EvalOutcome", "HeldGroup", "HeldMember", "JoinResult", "Ledger",
    "LedgerSettings",
]

_ALWAYS = (
    "num_groups_leased", "num_groups_accepted", "num_groups_trained", "num_groups_stale", "num_duplicates_dropped",
    "num_leases_reissued", "num_groups_filtered", "num_groups_dropped", "num_lag_violations", "num_tokens_accepted",
    "num_tokens_stale", "num_repeats", "num_evictions", "num_leases_expired",
    "num_leases_lost", "num_actor_restarts", "num_installs",
    "num_install_failures", "lost_on_crash",
    *(f"num_rejected_{reason.name.lower()}" for reason in RejectReason if reason is not RejectReason.NONE),
)


class Ledger(Admission, Consumption, Snapshots):
    """See the module."""

    def publish(self, ref: VersionRef) -> None:
        """A version was announced: its tokens are welcome from now on."""
        self.versions.published(ref)

    @property
    def lineage(self) -> tuple[Lineage, ...]:
        """For WELCOME: the versions of every epoch that lie on this history."""
        return self.versions.lineage

    def min_useful(self) -> VersionRef:
        """For the hub's heartbeat: a group that began with anything older can only be refused."""
        if self.settings.mode == "mask_old_tokens":
            return VersionRef(0, 0)  # its young end is still of use
        return self.versions.oldest_useful(self.widest_bound())

    def eval_request(self, eval_id: int, version: int, num_prompts: int, now: float) -> None:
        """Score evaluation prompts 0 .. num_prompts - 1 with at least this version.

        Raises:
            ValueError: the id was used before, or num_prompts is 0.
        """
        self.evals.request(eval_id, version, num_prompts)

    def eval_result(self, eval_id: int) -> EvalOutcome | None:
        """How that evaluation stands (`.done` when it has ended), or None if it is not known."""
        return self.evals.outcome(eval_id)

    def counters(self) -> dict[str, float]:
        """Everything counted since the run began, and how many groups and leases there are now."""
        counts = {name: float(self._counts.get(name, 0)) for name in _ALWAYS}
        counts.update({name: float(value) for name, value in self._counts.items()})
        counts.update(
            num_groups_drawn=float(self.groups.next_id),
            num_groups_ready=float(self.groups.num(GroupState.READY)),
            num_leases_open=float(self.groups.num(GroupState.LEASED)),
            num_groups_held=float(self.groups.num(GroupState.HELD)),
            num_groups_in_batch=float(self.groups.num(GroupState.IN_BATCH)),
            num_actors=float(len(self.actors)),
            eta=float(self.eta),
            max_lag=float(self.max_lag),
        )
        return counts
