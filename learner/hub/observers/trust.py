"""Trust in actors: findings against an actor's data, and actors that are shut out for them.

    outliers   rewards, lengths and ratios of an actor that lie apart from those of all others (`judge`): all get
               prompts of one stream, so honest ones differ by chance alone. The median of the others is what they agree
               on; how far an actor may lie from it is their own spread (MAD) and the standard errors of the means
    audits     log-probs that the learner does not find under the version that a token names, and tokens that their
               seed would not have drawn: the learner scores, here its findings are added up

One finding is chance, so an actor is shut out only if every look of `NUM_LOOKS` in a row says the same of it. A new
process of that name begins without a record, once: after that the name is shut out until the hub ends.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from statistics import fmean

import numpy as np

from learner.hub.observers.counters import Arrival, Observer
from streamrl.config.schema_system import TrustConfig
from streamrl.messages import EVAL_BIT, Agreement, Hello, MemberStatus

NUM_LEAST_ACTORS = 3
"""With two, there is no telling which of them is wrong."""
NUM_LEAST, NUM_KEPT = 32, 128
"""Values of an actor before it is judged, and the newest that are looked at. So a mean must differ by a whole standard
deviation of single values to lie eight standard errors away: small real differences between machines never do."""
_NORMAL_MAD = 1.4826
"""Times the MAD is the standard deviation, for normal values."""


class Recent:
    """The newest `NUM_KEPT` values of one actor; their mean is computed again only after a new one."""

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=NUM_KEPT)
        self._summary: tuple[float, float] | None = None

    def __len__(self) -> int:
        return len(self._values)

    def add(self, value: float) -> None:
        self._values.append(value)
        self._summary = None

    @property
    def summary(self) -> tuple[float, float]:
        """The mean, and the square of its standard error; of two values or more."""
        if self._summary is None:
            values = np.array(self._values)
            self._summary = float(values.mean()), float(values.var(ddof=1)) / len(values)
        return self._summary


@dataclass(frozen=True, slots=True)
class Outlier:
    """An actor that lies apart: how many standard errors, its mean and the median of the others' means."""

    actor_id: str
    errors: float
    mean: float
    others: float


def judge(values: Mapping[str, Recent], *, limit: float, floor: float) -> list[Outlier]:
    """List actors that lie more than `limit` standard errors from the others, farthest first; [] if none can be told.

    None can be told with fewer than `NUM_LEAST_ACTORS` that have `NUM_LEAST` values, nor where half of them or more
    would be outliers: then the majority that defines what is right is missing. Costs N log N for N actors.

    Args:
        values: of each actor.
        floor: a standard error below this counts as this: differences of no importance make no outlier.
    """
    judged = {actor_id: one.summary for actor_id, one in values.items() if len(one) >= NUM_LEAST}
    if len(judged) < NUM_LEAST_ACTORS:
        return []
    means, squares = np.array(list(judged.values())).T
    centers, spreads = median_of_others(means), np.empty_like(means)
    for center in np.unique(centers):  # three values at most
        here = centers == center
        spreads[here] = _NORMAL_MAD * median_of_others(abs(means - center))[here]
    errors = np.sqrt(spreads**2 + squares + median_of_others(squares))
    distances = abs(means - centers) / np.maximum(errors, floor)
    apart = np.flatnonzero(distances > limit)
    if 2 * len(apart) >= len(judged):
        return []
    names = list(judged)
    found = [Outlier(names[i], float(distances[i]), float(means[i]), float(centers[i])) for i in apart]
    return sorted(found, key=lambda one: -one.errors)


def median_of_others(values: np.ndarray) -> np.ndarray:
    """The median without each of the values in turn, [N], of [N] values with N >= 2."""
    order = values.argsort()
    ascending, place = values[order], order.argsort()

    def without(rank: int) -> np.ndarray:
        """The value at this rank among the others, for each."""
        return ascending[np.where(rank < place, rank, rank + 1)]

    num = len(values) - 1
    return (without((num - 1) // 2) + without(num // 2)) / 2


NUM_LOOKS = 3
"""Optimizer steps in a row that must find the same."""
NUM_LEAST_TOKENS, MAX_OTHER_DRAWS = 256, 0.05
"""Audited tokens before they count, and the largest part of them that their seeds would not have drawn: arithmetic of
another precision moves a draw only where its number lies between two tokens."""
MAX_SKIPPED = 64
_BASELINE_WEIGHT = 1 / 32
DRAWS_BY_SEED = ("native",)
"""Engines whose draw is a function of (seed, position) that the learner knows."""


@dataclass(frozen=True, slots=True)
class Measure:
    """A quantity that actors are compared by; `floor` is the smallest standard error that it is measured in."""

    words: str
    floor: float
    show: Callable[[float], float] = float


MEASURES = {
    "reward": Measure("the mean reward of its answers", 0.01),
    "length": Measure("the length of its answers in tokens (geometric mean)", 0.05, math.exp),
    "ratio": Measure("the mean |log-ratio| of its tokens to the learner, in nats, at the lag of the others'", 0.02),
}


@dataclass(slots=True)
class ActorRecord:
    """The record of what one incarnation has delivered lately."""

    incarnation: int
    draws_by_seed: bool
    num_skipped: int
    """Groups still to be left out: from an empty engine short answers come first."""
    gaps: dict[str, Recent] = field(default_factory=lambda: {name: Recent() for name in MEASURES})
    """Distances from the baseline, by measure."""
    values: dict[str, Recent] = field(default_factory=lambda: {name: Recent() for name in MEASURES})
    audited: deque[Agreement] = field(default_factory=lambda: deque(maxlen=NUM_KEPT))
    num_looks: int = 0

    @property
    def agreement(self) -> tuple[int, float]:
        """Audited tokens, and the mean difference of their log-probs in nats."""
        num_tokens = sum(one.num_tokens for one in self.audited)
        return num_tokens, sum(one.difference * one.num_tokens for one in self.audited) / max(1, num_tokens)


class ActorTrust(Observer):
    """The records of all actors, and those that were shut out.

    Args:
        tolerance: largest mean difference of log-probs at a token's own version, in nats.
        notify: told what a person must see.
    """

    def __init__(self, settings: TrustConfig, tolerance: float, notify: Callable[[str], None]) -> None:
        self._limit, self._audits = settings.outlier_errors, settings.outlier_errors > 0 or settings.audit_share > 0
        self._audits_asked = settings.audit_share > 0
        self._tolerance, self._notify = tolerance, notify
        self._records: dict[str, ActorRecord] = {}
        self._baselines: dict[tuple[str, int], float] = {}
        self._shut_out: dict[str, tuple[int, int, str]] = {}  # incarnation, how often, why
        self._due: list[tuple[str, str]] = []
        self._told_most = False
        self._sums = dict.fromkeys(("num_tokens_audited", "num_tokens_redrawn", "num_shut_out"), 0)

    # --- who is there ---------------------------------------------------------------------------------------------

    def joined(self, hello: Hello, *, is_new: bool) -> None:
        """An actor was let in; a new process begins without a record."""
        known = self._records.get(hello.actor_id)
        if known is None or known.incarnation != hello.incarnation:
            by_seed, num_skipped = hello.engine in DRAWS_BY_SEED, min(hello.max_leases, MAX_SKIPPED)
            self._records[hello.actor_id] = ActorRecord(hello.incarnation, by_seed, num_skipped)

    def remove(self, actor_id: str) -> None:
        self._records.pop(actor_id, None)

    def refusal(self, actor_id: str, incarnation: int) -> str:
        """Return why this process may not join; "" if it may."""
        last, times, cause = self._shut_out.get(actor_id, (0, 0, ""))
        if times > 1:
            return f"{actor_id} was shut out twice, the last time because {cause}: it stays out of this run"
        return f"{actor_id} was shut out because {cause}" if times and last == incarnation else ""

    @property
    def causes(self) -> dict[str, str]:
        """The cause for every actor that is out now."""
        return {name: cause for name, (_, _, cause) in self._shut_out.items() if name not in self._records}

    # --- what is measured -----------------------------------------------------------------------------------------

    def group(self, arrival: Arrival) -> None:
        """Measure a training group, also one that is too old."""
        record, group = self._records.get(arrival.actor_id), arrival.group
        members = [member for member in group.members if member.status != MemberStatus.ABORTED]
        if record is None or not members or group.group_id & EVAL_BIT:
            return
        if record.num_skipped:
            record.num_skipped -= 1
            return
        lengths = [sum(end - start for start, end in member.mask) for member in members]
        self._note(record, "reward", fmean(member.reward for member in members))
        self._note(record, "length", fmean(math.log(max(1, length)) for length in lengths))

    def _note(self, record: ActorRecord, measure: str, value: float, lag: int = 0) -> None:
        # The policy gets better and its answers longer: what counts is the distance from what all deliver now.
        baseline = self._baselines.setdefault((measure, lag), value)
        record.gaps[measure].add(value - baseline)
        record.values[measure].add(value)
        self._baselines[measure, lag] += _BASELINE_WEIGHT * (value - baseline)

    def compared(self, agreements: Iterable[Agreement]) -> None:
        """Take in what the learner found of the groups of a step; then judge every actor."""
        for one in agreements:
            record = self._records.get(one.actor_id)
            if record is None:
                continue
            if one.lag:
                self._note(record, "ratio", one.difference, one.lag)
            else:
                record.audited.append(one)
                self._sums["num_tokens_audited"] += one.num_tokens
                self._sums["num_tokens_redrawn"] += one.num_drawn * record.draws_by_seed
        self._look()

    # --- what follows ---------------------------------------------------------------------------------------------

    def _look(self) -> None:
        found = self._outliers() | self._disagreements()
        for name, record in list(self._records.items()):
            record.num_looks = record.num_looks + 1 if name in found else 0
            if record.num_looks >= NUM_LOOKS:
                self._shut(name, record, found[name])

    def _outliers(self) -> dict[str, str]:
        """Find the farthest outlier of each measure: without it the others may look different."""
        found: dict[str, str] = {}
        for name, measure in MEASURES.items() if self._limit else ():
            gaps = {actor: one.gaps[name] for actor, one in self._records.items()}
            for one in judge(gaps, limit=self._limit, floor=measure.floor)[:1]:
                found[one.actor_id] = self._words(name, measure, one)
        return found

    def _words(self, name: str, measure: Measure, found: Outlier) -> str:
        mine, _ = self._records[found.actor_id].values[name].summary
        others = mine - found.mean + found.others
        return (f"{measure.words} is {measure.show(mine):.3g}, with the other actors {measure.show(others):.3g}: "
                f"{found.errors:.1f} standard errors, more than {self._limit:g} (trust.outlier_errors)")

    def _disagreements(self) -> dict[str, str]:
        """Find actors that audits speak against; none where that is most of them: then it is the learner, or all.

        A lone actor is shut out only by audits that were asked for: the run ends without it.
        """
        audited = [record for record in self._records.values() if record.agreement[0] >= NUM_LEAST_TOKENS]
        found = {name: cause for name, record in self._records.items() if (cause := self._disagreement(record))}
        if 2 * len(found) <= len(audited) or (len(audited) < 2 and self._audits_asked):
            return found
        if not self._told_most:
            self._told_most = True
            name, cause = next(iter(found.items()))
            self._notify(f"audits disagree with {len(found)} of {len(audited)} actors, so none is shut out for it: of "
                         f"{name}, {cause}. Do engines and learner compute in the same type (actors.dtype)?")
        return {}

    def _disagreement(self, record: ActorRecord) -> str:
        """Return what audits say against an actor; "" if nothing."""
        num_tokens, mean = record.agreement
        if self._audits and num_tokens >= NUM_LEAST_TOKENS:
            if not mean <= self._tolerance:
                return (f"its log-probs differ from the learner's, under the versions that its tokens name, by "
                        f"{mean:.3g} nats on average over {num_tokens} tokens, more than {self._tolerance:g} "
                        "(publish.probe_tolerance)")
        num_drawn = sum(one.num_drawn for one in record.audited)
        if self._audits and record.draws_by_seed and num_drawn >= NUM_LEAST_TOKENS:
            share = sum(one.num_other for one in record.audited) / num_drawn
            if share > MAX_OTHER_DRAWS:
                return (f"{share:.0%} of {num_drawn} audited tokens are not what their seeds draw from the policy, "
                        f"more than {MAX_OTHER_DRAWS:.0%}")
        return ""

    def _shut(self, actor_id: str, record: ActorRecord, cause: str) -> None:
        _, times, _ = self._shut_out.get(actor_id, (0, 0, ""))
        self._shut_out[actor_id] = (record.incarnation, times + 1, cause)
        self._due.append((actor_id, cause))
        self._sums["num_shut_out"] += 1
        del self._records[actor_id]
        then = "it stays out of this run" if times else "a new process of that name may try again"
        self._notify(f"QUARANTINE: {actor_id} is shut out because {cause}. Its groups that are not trained yet are "
                     f"generated again; {then}")

    def take_due(self) -> list[tuple[str, str]]:
        """Take the actors to be cut off, and why; each once."""
        due, self._due = self._due, []
        return due

    def metrics(self) -> dict[str, float]:
        """Report counters since the hub began, and the largest mean difference of an actor's audits."""
        worst = max((record.agreement[1] for record in self._records.values()), default=0.0)
        return {**{name: float(value) for name, value in self._sums.items()}, "audit_mean_difference": worst}
