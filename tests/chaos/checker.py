"""Whether a recorded history kept the guarantees. Pure: events in, violations out; it shares no code with the ledger.

    G1  no (group, member) is trained twice in the surviving lineage; what was accepted ends trained, dropped with a
        reason or held, unless its learner and its actor both died before it was durable; no prompt is lost
    G2  what was acknowledged as DURABLE stays trained: a restart begins at or after every announced checkpoint and
        every version that an actor had, with the parameters that its steps led to
    G3  no trained token is older than max_lag, of an unknown version or of a dead branch
    G4  an actor installs only bytes that were published under that name
    G5  (epoch, version) only go up: at every actor, over all publications, over the starts of the learner
    fence   within one life of the hub, a superseded incarnation is never served again

A trajectory is (group, member); a delivery is (incarnation, seq), the message that brought it. Losses are judged by
trajectory: after a crash another delivery may have brought the same ones, and then nothing is lost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from tests.chaos.history import Event

Key = tuple[int, int]


@dataclass
class Checker:
    """Reads events in order of time; ask `violations` after `finish`."""

    violations: list[tuple[str, str]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    epoch: int = 0
    version: int = 0
    saved: int = -1
    max_lag: int = 0
    digest: str = ""
    lineage: dict[int, list[int]] = field(default_factory=dict)  # epoch -> [first, last] that survive
    digests: dict[int, str] = field(default_factory=dict)  # parameters of each surviving version
    owner: dict[Key, int] = field(default_factory=dict)  # trained trajectory -> version, surviving lineage only
    trained: dict[Key, int] = field(default_factory=dict)  # delivery -> version, surviving lineage only
    ever_trained: set[Key] = field(default_factory=set)
    batches: dict[int, Event] = field(default_factory=dict)
    sent: dict[Key, list[Key]] = field(default_factory=dict)  # delivery -> its trajectories
    accepted: dict[Key, int] = field(default_factory=dict)  # delivery -> epoch that accepted it last
    answered: set[Key] = field(default_factory=set)
    durable: set[Key] = field(default_factory=set)
    excused: set[Key] = field(default_factory=set)  # rejected, or discarded with a reason
    published: dict[tuple[int, int], tuple[str, str]] = field(default_factory=dict)
    installed: dict[int, tuple[int, int]] = field(default_factory=dict)
    current: dict[str, int] = field(default_factory=dict)  # actor -> incarnation, of this life of the hub
    superseded: set[tuple[str, int]] = field(default_factory=set)
    dropped: set[int] = field(default_factory=set)
    exited: set[int] = field(default_factory=set)
    last: Event | None = None
    closing: bool = False
    late: set[Key] = field(default_factory=set)  # accepted after the last snapshot was asked for

    def read(self, event: Event) -> None:
        handler = getattr(self, f"_{event['role']}_{event['event']}", None)
        if handler is not None:
            handler(event)

    def _fail(self, rule: str, text: str) -> None:
        self.counts[rule] += 1
        if self.counts[rule] <= 20:
            self.violations.append((rule, text))

    # --- learner ----------------------------------------------------------------------------------------------------

    def _learner_start(self, event: Event) -> None:
        epoch, version = event["epoch"], event["version"]
        again = version + event.get("unended", 0)  # batches whose end the log does not know are trained once more
        if epoch <= self.epoch:
            self._fail("G5", f"a learner started with epoch {epoch} after {self.epoch}")
        if version < self.saved:
            self._fail("G2", f"epoch {epoch} resumed from version {version}, but {self.saved} was announced as saved")
        newest = max((two for one, two in self.installed.values() if one == self.epoch), default=0)
        if again < newest:
            self._fail("G2", f"epoch {epoch} resumed from version {again}, but actors had {self.epoch}:{newest}")
        if version in self.digests and self.digests[version] != event["digest"]:
            self._fail("G2", f"epoch {epoch} resumed from version {version} with other parameters than trained")
        for number in [one for one in self.batches if one >= version]:  # a dead branch from here on
            for delivery, keys in _deliveries(self.batches.pop(number)["frames"]):
                self.trained.pop(delivery, None)
                for key in keys:
                    self.owner.pop(key, None)
        self.lineage = {old: [first, min(last, again)] for old, (first, last) in self.lineage.items()}
        self.lineage[epoch] = [again, again]
        self.digests = {number: digest for number, digest in self.digests.items() if number <= again}
        self.digests[version] = event["digest"]
        # What was dropped after the checkpoint that this start resumes from is open again.
        below, still = event.get("done_below", 0), set(event.get("dropped", ()))
        self.dropped = {group for group in self.dropped if group < below or group in still}
        self.closing, self.late = False, set()
        self.epoch, self.version, self.saved, self.max_lag = epoch, version, version, event["max_lag"]
        self.current, self.superseded = {}, set()
        self.counts["starts"] += 1

    def _learner_train(self, event: Event) -> None:
        version = event["version"]
        if version != self.version or event["epoch"] != self.epoch:
            self._fail("G5", f"epoch {event['epoch']} trained at {version}, expected {self.epoch}:{self.version}")
        self.batches[version] = event
        for delivery, keys in _deliveries(event["frames"]):
            if delivery not in self.sent:
                self._fail("G1", f"delivery {delivery} was trained and never sent")
            for key in keys:
                if key in self.owner:
                    self._fail("G1", f"{key} trained at version {version} and before at {self.owner[key]}")
                self.owner[key] = version
                self.counts["trajectories"] += 1
            self.trained[delivery] = version
            self.ever_trained.add(delivery)
        for epoch, token_version in event["refs"]:
            first, last = self.lineage.get(epoch, [0, -1])
            if not first <= token_version <= last:
                self._fail("G3", f"trained a token of {epoch}:{token_version}, which is not on the surviving lineage")
            if version - token_version > self.max_lag:
                self._fail("G3", f"trained a token of lag {version - token_version}, max_lag is {self.max_lag}")
        self.version = version + 1
        self.lineage[self.epoch][1] = max(self.lineage[self.epoch][1], self.version)
        if self.digests.get(self.version, event["digest"]) != event["digest"]:
            self._fail("G2", f"version {self.version} was trained again to other parameters")
        self.digests[self.version] = event["digest"]
        self.counts["batches"] += 1

    def _learner_publish(self, event: Event) -> None:
        ref = (event["epoch"], event["version"])
        if self.published and ref <= max(self.published):
            self._fail("G5", f"published {ref} after {max(self.published)}")
        self.published[ref] = (event["root"], event["content"])

    def _learner_saved(self, event: Event) -> None:
        if event["epoch"] != self.epoch:
            self._fail("G5", f"epoch {event['epoch']} saved a checkpoint while {self.epoch} owned the run")
        self.saved = max(self.saved, event["version"])

    def _learner_end(self, event: Event) -> None:
        self.last = event

    def _learner_closing(self, event: Event) -> None:
        self.closing = True

    # --- hub --------------------------------------------------------------------------------------------------------

    def _hub_welcome(self, event: Event) -> None:
        actor, incarnation = event["actor"], event["inc"]
        if (actor, incarnation) in self.superseded:
            self._fail("fence", f"{actor} was welcomed as {incarnation} again after it had been superseded")
        before = self.current.get(actor, incarnation)
        if before != incarnation:
            self.superseded.add((actor, before))
        self.current[actor] = incarnation

    def _hub_accept(self, event: Event) -> None:
        delivery = (event["inc"], event["seq"])
        if event["kind"] == "accepted":
            self.accepted[delivery] = self.epoch
            if self.closing:
                self.late.add(delivery)
            self.excused.discard(delivery)
            if (event["actor"], event["inc"]) in self.superseded:
                self._fail("fence", f"{event['actor']} delivered as superseded incarnation {event['inc']}")
        elif event["kind"] == "rejected":
            self.excused.add(delivery)
        self.counts[event["kind"]] += 1

    def _hub_discard(self, event: Event) -> None:
        self.excused.update((inc, seq) for inc, seq in event["deliveries"])

    def _hub_drop(self, event: Event) -> None:
        self.dropped.add(event["group"])
        self.counts["dropped"] += 1

    # --- actors -------------------------------------------------------------------------------------------------------

    def _actor_send(self, event: Event) -> None:
        self.sent[event["inc"], event["seq"]] = [(event["group"], member) for member in event["members"]]

    def _actor_settled(self, event: Event) -> None:
        for seq in event["seqs"]:
            if (event["inc"], seq) not in self.sent:
                self._fail("G1", f"{seq} of {event['inc']} was answered and never sent")
            self.answered.add((event["inc"], seq))

    def _actor_durable(self, event: Event) -> None:
        self.durable.update((event["inc"], seq) for seq in event["seqs"])

    def _actor_rejected(self, event: Event) -> None:
        self.excused.add((event["inc"], event["seq"]))

    def _actor_install(self, event: Event) -> None:
        ref = (event["epoch"], event["version"])
        if self.published.get(ref) != (event["root"], event["content"]):
            self._fail("G4", f"{event['inc']} installed {ref} with bytes that were never published under that name")
        before = self.installed.get(event["inc"])
        if before is not None and ref <= before:
            self._fail("G5", f"{event['inc']} installed {ref} after {before}")
        self.installed[event["inc"]] = ref
        self.counts["installs"] += 1

    def _actor_exit(self, event: Event) -> None:
        if event["code"] == 0:
            self.exited.add(event["inc"])

    # --- the end ----------------------------------------------------------------------------------------------------

    def finish(self) -> Checker:
        """What only the whole history can show; a history without an end says nothing about loss."""
        for delivery in self.durable & self.ever_trained - self.excused:
            if delivery not in self.trained:
                self._fail("G2", f"{delivery} was DURABLE and its training did not survive")
        if self.last is None:
            return self
        held = dict(_deliveries(self.last["held"]))
        safe = self.owner.keys() | {key for keys in held.values() for key in keys}
        for delivery in self.accepted.keys() & self.answered - self.excused:
            keys = self.sent.get(delivery, ())
            lost = [key for key in keys if key not in safe and key[0] not in self.dropped]
            gone = bool(keys) and delivery not in self.trained and delivery not in held
            if gone and self.accepted[delivery] < self.epoch and delivery[0] not in self.exited:
                self.counts["lost_on_crash"] += 1  # learner and actor died: its group was leased again
            elif lost and delivery not in self.late:
                self._fail("G1", f"{lost} of {delivery}, accepted in epoch {self.accepted[delivery]}, are lost at the "
                                 f"end of epoch {self.epoch}")
            elif gone and not lost:
                self.counts["brought_by_another"] += 1
        done = {group for group, _ in self.owner} | self.dropped | set(self.last["live"])
        for group in range(self.last["next_id"]):
            if group not in done:
                self._fail("G1", f"group {group} was drawn and is neither trained, dropped nor live")
        return self


def _deliveries(frames: Iterable[Any]) -> Iterable[tuple[Key, list[Key]]]:
    """(delivery, trajectories) of every frame of a batch, or of what is held at the end."""
    for incarnation, seq, group, members in frames:
        yield (incarnation, seq), [(group, member) for member in members]


def check(events: Iterable[Event]) -> Checker:
    """The checker after all these events, which are in order of time."""
    checker = Checker()
    for event in events:
        checker.read(event)
    return checker.finish()
