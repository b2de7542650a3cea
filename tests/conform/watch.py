"""What every message of the examined actor must satisfy, whatever the examiner does at the moment. No socket, no clock.

Order decides, not time: the connection keeps it, so what arrives after the second heartbeat since an event was sent by
a process that had the event in front of it for a whole interval. A busy machine is not taken for a fault.
"""

from dataclasses import dataclass, field

from streamrl.errors import WireError
from streamrl.messages import (
    PROTOCOL,
    TO_HUB,
    Ack,
    ActorHeartbeat,
    Bye,
    Drain,
    Group,
    Hello,
    Installed,
    Layout,
    Lease,
    LeaseRef,
    Leases,
    Manifest,
    Message,
    Outcome,
    RejectReason,
    Stop,
    StopReason,
    VersionRef,
    Welcome,
)
from streamrl.messages.codec import Decoder
from tests.conform.requirements import Findings
from tests.conform.weights import Pulls

FAULTS = (RejectReason.MALFORMED, RejectReason.VERSION, RejectReason.NO_LEASE, RejectReason.OVERSIZE)
"""Rejections that only the actor can have caused."""
SETTLING_BEATS = 2
"""Heartbeats after which an actor must have acted on what it was sent."""


@dataclass
class Sent:
    """A number that the actor used: the group's frame as it came first, and what it was told about it."""

    frame: bytes
    group: Group
    times: int = 1
    accepted: bool = False
    forgettable_at: int | None = None
    """Heartbeat count when it was told that the group is durable or rejected."""


@dataclass
class Watch:
    """One incarnation of the actor as its messages show it."""

    findings: Findings
    pulls: Pulls
    run_id: str
    actor_id: str = ""
    incarnation: int = 0
    layout: Layout | None = None
    known: dict[VersionRef, Manifest] = field(default_factory=dict)
    hellos: list[Hello] = field(default_factory=list)
    welcomed: bool = False
    ended: str = ""
    """After which message of the hub nothing more may come; "" before."""
    sent: dict[int, Sent] = field(default_factory=dict)
    leases: dict[LeaseRef, Lease] = field(default_factory=dict)
    answered: dict[LeaseRef, int] = field(default_factory=dict)
    revoked: dict[LeaseRef, int] = field(default_factory=dict)
    num_beats: int = 0
    beat: ActorHeartbeat | None = None
    installed: list[VersionRef] = field(default_factory=list)
    refused: list[VersionRef] = field(default_factory=list)
    forbidden: set[bytes] = field(default_factory=set)
    drain: Drain | None = None
    bye: Bye | None = None
    _ended_at: int = 0
    _stale_held: LeaseRef | None = None
    _unproven: list[tuple[VersionRef, int, int]] = field(default_factory=list)
    """Versions that tokens carry although no message has named them as installed: version, seq, heartbeat count."""
    _decoder: Decoder = field(default_factory=lambda: Decoder(TO_HUB))

    # --- from the actor ---------------------------------------------------------------------------------------------

    def received(self, frames: list[bytes]) -> Message | None:
        """Check one message; None if it cannot be read."""
        if not self.findings.require("frames", len(frames) == 1, f"a message of {len(frames)} frames instead of one"):
            return None
        try:
            message = self._decoder.decode(frames[0])
        except WireError as error:
            self.findings.failed("frames", str(error))
            return None
        if self.ended:
            self._too_late(message)
            return message
        if not self.welcomed and not self.hellos and not isinstance(message, Hello):
            self.findings.failed("hello", f"the first message is {type(message).__name__}")
        match message:
            case Hello():
                self._hello(message)
            case Group():
                self._group(message, bytes(frames[0]))
            case ActorHeartbeat():
                self._beat(message)
            case Installed():
                self._installed(message)
            case Drain():
                self.drain = message
            case Bye():
                self.bye = message
        return message

    def _too_late(self, message: Message) -> None:
        """Only what left before the end was read may still arrive."""
        self.num_beats += isinstance(message, ActorHeartbeat)
        if isinstance(message, Hello) or self.num_beats > self._ended_at + SETTLING_BEATS:
            name = {"BYE": "drain", "FENCED": "fenced"}.get(self.ended, "stop")
            self.findings.failed(name, f"{type(message).__name__} came after {self.ended} had ended the session")

    def _end(self, by: str) -> None:
        self.ended, self._ended_at = by, self.num_beats

    def _hello(self, hello: Hello) -> None:
        first = not self.hellos
        self.hellos.append(hello)
        self.welcomed = False
        if first:
            self.actor_id, self.incarnation = hello.actor_id, hello.incarnation
            wrong = [
                text for text, bad in (
                    (f"protocols {hello.protocol_min} to {hello.protocol_max}",
                     not hello.protocol_min <= PROTOCOL <= hello.protocol_max),
                    ("incarnation 0", hello.incarnation == 0), (f"next_seq {hello.next_seq}", hello.next_seq != 1),
                    ("a run_id", hello.run_id is not None), ("leases", bool(hello.held)),
                    ("an outbox", bool(hello.outbox)), ("an installed version", hello.installed is not None),
                ) if bad
            ]
            self.findings.require("hello", not wrong, f"the HELLO of a new process has {', '.join(wrong)}")
            return
        if not self.sent and hello.run_id is None:
            return  # it was not welcomed yet
        self._check_outbox(hello)

    def _check_outbox(self, hello: Hello) -> None:
        listed = {seq for first, last in hello.outbox for seq in range(first, last + 1)}
        owed = {seq for seq, one in self.sent.items() if one.forgettable_at is None}
        newest = max([0, *self.sent, *listed])
        same = (hello.actor_id, hello.incarnation, hello.run_id) == (self.actor_id, self.incarnation, self.run_id)
        self.findings.require("outbox", same, (
            f"HELLO after a reconnect is of {hello.actor_id}, incarnation {hello.incarnation}, run {hello.run_id}; it "
            f"was {self.actor_id}, {self.incarnation}, {self.run_id}"
        ))
        self.findings.require("outbox", owed <= listed, (
            f"HELLO lists {sorted(listed)}, and not {sorted(owed - listed)}, which no ACK called durable or rejected"
        ))
        self.findings.require("outbox", hello.next_seq == newest + 1, (
            f"HELLO has next_seq {hello.next_seq}, the newest number is {newest}"
        ))
        late = sorted(seq for seq in listed & self.sent.keys() if self._is_over(self.sent[seq].forgettable_at))
        self.findings.require("forgets", not late, f"HELLO still lists {late}, which were durable or rejected before")

    def _is_over(self, since: int | None) -> bool:
        return since is not None and self.num_beats >= since + SETTLING_BEATS

    def _beat(self, beat: ActorHeartbeat) -> None:
        number = self.beat.beat if self.beat is not None else 0
        self.num_beats += 1
        self.findings.require("heartbeats", beat.beat > number and beat.incarnation == self.incarnation, (
            f"heartbeat {beat.beat} of incarnation {beat.incarnation} follows {number} of {self.incarnation}"
        ))
        self.beat = beat
        held = beat.held or ()
        unknown = [ref for ref in held if ref not in self.leases]
        self.findings.require("heartbeats", not unknown, f"a heartbeat lists leases {unknown}, which it never got")
        done = next((ref for ref in held if ref in self.answered), None)
        if done is not None and done == self._stale_held:  # one alone may have been written before the answer
            self.findings.failed("heartbeats", f"heartbeats go on to list lease {done} after its answer")
        self._stale_held = done
        for ref in held:
            self._check_revoked(ref, "a heartbeat still lists it")
        if beat.installed is not None:
            self._now_has(beat.installed, beat.root)
        for version, seq, since in self._unproven:
            if self._is_over(since):  # a group may overtake the report of its version, but not by so much
                self.findings.failed("labels", f"seq {seq} has tokens of {version}, which was never installed")

    def _check_revoked(self, ref: LeaseRef, what: str) -> None:
        at = self.revoked.get(ref)
        if at is not None and self._is_over(at):
            self.findings.failed("revoked", (
                f"lease {ref} was revoked, and after {self.num_beats - at} more heartbeats {what}"
            ))

    def _installed(self, message: Installed) -> None:
        if not message.ok:
            self.refused.append(message.target)
            return
        manifest = self.known.get(message.target)
        if message.root in self.forbidden:
            self.findings.failed("refuses-forged", f"INSTALLED({message.target}) under a root that was made up")
            return
        if manifest is None or self.layout is None:
            self.findings.failed("weights-verified", f"INSTALLED({message.target}), which was never announced")
            return
        self.findings.require("weights-verified", message.root == manifest.root, (
            f"INSTALLED({message.target}) has root {message.root.hex()[:8]}, announced was {manifest.root.hex()[:8]}"
        ))
        missing = self.pulls.missing(manifest, self.layout)
        self.findings.require("weights-verified", not missing, (
            f"INSTALLED({message.target}) although {missing} came damaged or never"
        ))
        self._now_has(message.target, message.root)

    def _now_has(self, ref: VersionRef, root: bytes) -> None:
        before = self.installed[-1] if self.installed else None
        self.findings.require("versions-up", before is None or ref >= before, f"{ref} was installed over {before}")
        if root in self.forbidden:
            self.findings.failed("refuses-forged", f"a heartbeat names {ref} under a root that was made up")
        elif ref != before:
            self.installed.append(ref)
            self._unproven = [one for one in self._unproven if one[0] != ref]

    # --- groups -----------------------------------------------------------------------------------------------------

    def _group(self, group: Group, frame: bytes) -> None:
        ref, known = (group.group_id, group.attempt), self.sent.get(group.seq)
        if known is not None:
            self._repeated(known, group, frame)
            return
        newest = max(self.sent, default=0)
        self.findings.require("seq", group.seq == newest + 1, f"seq {group.seq} follows {newest}")
        self.sent[group.seq] = Sent(frame, group)
        lease = self.leases.get(ref)
        if group.members:
            self._check_revoked(ref, f"seq {group.seq} answers it")
        if lease is None:
            self.findings.failed("answers", f"seq {group.seq} answers lease {ref}, which this actor never got")
            return
        if group.outcome != Outcome.PARTIAL and ref in self.answered:
            self.findings.failed("answers", f"seq {self.answered[ref]} and {group.seq} both answer lease {ref}")
        if group.outcome != Outcome.PARTIAL:
            self.answered[ref] = group.seq
        self._check_answer(group, lease)

    def _repeated(self, known: Sent, group: Group, frame: bytes) -> None:
        known.times += 1
        first = known.group
        if (first.group_id, first.attempt) != (group.group_id, group.attempt):
            self.findings.failed("seq", (
                f"seq {group.seq} was group {first.group_id} and is group {group.group_id} now"
            ))
        else:
            self.findings.require("resend-bytes", known.frame == frame, (
                f"seq {group.seq} had {len(known.frame)} bytes and comes again with {len(frame)} others"
            ))
        if self._is_over(known.forgettable_at):
            self.findings.failed("forgets", f"seq {group.seq} comes again although it was durable or rejected")

    def _check_answer(self, group: Group, lease: Lease) -> None:
        indices = sorted(member.index for member in group.members)
        if group.outcome == Outcome.COMPLETE and indices != sorted(lease.members):
            self.findings.failed("answers", (
                f"lease {lease.ref} asks for members {sorted(lease.members)}, seq {group.seq} is COMPLETE with "
                f"{indices}"
            ))
        if group.members and group.sampling != lease.sampling:
            self.findings.failed("answers", (
                f"seq {group.seq} was sampled with {group.sampling}, its lease says {lease.sampling}"
            ))
        spans = {VersionRef(span.learner_epoch, span.version) for one in group.members for span in one.versions}
        if not spans:
            return
        self._unproven += [(ref, group.seq, self.num_beats) for ref in spans - set(self.installed)]
        self.findings.require("labels", min(spans) >= lease.min_version, (
            f"seq {group.seq} has tokens of {min(spans)}, its lease asks for {lease.min_version} or newer"
        ))
        if lease.keep_s > 0:
            self.findings.require("eval-pinned", spans == {lease.min_version}, (
                f"seq {group.seq} has tokens of {', '.join(map(str, sorted(spans)))}; its lease, with keep_s="
                f"{lease.keep_s:g}, asks for {lease.min_version} alone"
            ))

    # --- to the actor -----------------------------------------------------------------------------------------------

    def told(self, message: Message) -> None:
        """A message of the hub that leaves now."""
        match message:
            case Welcome():
                self.welcomed = True
                self._knows(message.manifest)
                self.layout = message.layout
                self._accepted(message.settled_upto, message.settled)
                self._settled(message.durable_upto, message.durable)
                self._kept([ref for ref, keep in message.held if not keep])
            case Leases():
                self.leases |= {lease.ref: lease for lease in message.grants}
                self._kept(list(message.revoked))
            case Ack():
                self._acked(message)
            case Stop() if not message.rejoin:
                self._end("FENCED" if message.reason == StopReason.FENCED else f"STOP({message.reason.name})")
            case Bye():
                self._end("BYE")

    def _knows(self, manifest: Manifest | None) -> None:
        if manifest is not None:
            self.known[manifest.ref] = manifest
            self.pulls.know(manifest)

    def announced(self, manifest: Manifest) -> None:
        """A true manifest."""
        self._knows(manifest)

    def _kept(self, revoked: list[LeaseRef]) -> None:
        for ref in revoked:
            if ref not in self.answered:
                self.revoked.setdefault(ref, self.num_beats)

    def _acked(self, ack: Ack) -> None:
        self._accepted(ack.settled_upto, ack.accepted)
        self._settled(ack.durable_upto, ack.durable)
        for one in ack.rejected:
            self._forgettable(one.seq)
            if one.reason in FAULTS:
                self.findings.failed("answers", f"the hub rejected seq {one.seq}: {one.detail}")

    def _accepted(self, upto: int, ranges: tuple[tuple[int, int], ...]) -> None:
        for seq, one in self.sent.items():
            one.accepted |= seq <= upto or any(first <= seq <= last for first, last in ranges)

    def _settled(self, upto: int, ranges: tuple[tuple[int, int], ...]) -> None:
        for seq in self.sent:
            if seq <= upto or any(first <= seq <= last for first, last in ranges):
                self._forgettable(seq)

    def _forgettable(self, seq: int) -> None:
        one = self.sent.get(seq)
        if one is not None and one.forgettable_at is None:
            one.forgettable_at = self.num_beats

    def open_leases(self) -> set[LeaseRef]:
        """Granted, and neither answered nor revoked."""
        return self.leases.keys() - self.answered.keys() - self.revoked.keys()

    def unsettled(self) -> list[int]:
        """Numbers that no ACK and no WELCOME has named."""
        return [seq for seq, one in self.sent.items() if not one.accepted and one.forgettable_at is None]
