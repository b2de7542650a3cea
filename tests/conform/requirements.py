"""What `python -m tests.conform` asks of an actor, by name, and what an examination found."""

from dataclasses import dataclass, field

REQUIREMENTS = {
    "hello": "the first message is a HELLO: protocol 1, an incarnation of its own, numbers from 1, nothing held",
    "hello-again": "HELLO is repeated until WELCOME answers it, also after STOP with `rejoin`",
    "frames": "every message is one frame with a correct preamble, digest and body",
    "heartbeats": "heartbeats come every `heartbeat_s`, numbered upward, and list just the leases in progress",
    "weights-verified": "a version is INSTALLED only after every byte of it came undamaged, under its own root",
    "installs": "an announced version is fetched, installed and reported",
    "refuses-forged": "a manifest whose root does not follow from its digests is not installed",
    "versions-up": "a version below the installed one is never installed",
    "answers": "each lease is answered once, with its own members and sampling, in a GROUP that the hub accepts",
    "labels": "tokens carry versions that were installed then, none older than the lease's `min_version`",
    "seq": "GROUPs are numbered from 1 without a gap, and a number belongs to one group forever",
    "outbox": "HELLO lists every group that is not durable, and the number of the next one",
    "resend": "after a reconnect every group without an answer comes again",
    "resend-bytes": "what comes again is the same, byte for byte",
    "resend-open": "what WELCOME names as settled does not come again",
    "forgets": "durable and rejected groups leave the outbox",
    "resend-successor": "a learner that restarts from an older checkpoint gets the groups that it has lost",
    "revoked": "work on a revoked lease stops",
    "eval-pinned": "a lease with `keep_s` is answered by exactly `min_version`, and installs wait for it",
    "silence": "without a message of the hub for `hub_silent_s` the actor sends HELLO",
    "stop": "after STOP without `rejoin` nothing more is sent",
    "drain": "after DRAIN leases are answered or handed back, BYE follows the last answer, and then nothing",
    "tolerates": "longer arrays are read, and damaged or unknown frames are dropped, not obeyed",
    "fenced": "a fenced process does not come back",
}
"""Name -> what must hold. The site's page of the session has the same table."""


@dataclass
class Findings:
    """What was seen of each requirement: a failure stays, a success may come many times."""

    failures: dict[str, str] = field(default_factory=dict)
    shown: set[str] = field(default_factory=set)
    notes: dict[str, str] = field(default_factory=dict)
    """Why something could not be shown."""

    def failed(self, name: str, reason: str) -> None:
        """The first reason is kept: later ones often follow from it."""
        assert name in REQUIREMENTS, name
        self.failures.setdefault(name, reason)

    def held(self, name: str) -> None:
        assert name in REQUIREMENTS, name
        self.shown.add(name)

    def require(self, name: str, holds: bool, reason: str) -> bool:
        """Record either way; returns `holds`."""
        if holds:
            self.held(name)
        else:
            self.failed(name, reason)
        return holds

    def note(self, name: str, why: str) -> None:
        self.notes.setdefault(name, why)

    def lines(self) -> list[str]:
        """A line for each requirement, in order."""
        width = max(map(len, REQUIREMENTS))
        found = []
        for name, sentence in REQUIREMENTS.items():
            if name in self.failures:
                found.append(f"FAILED     {name:<{width}}  {self.failures[name]}")
            elif name in self.shown:
                found.append(f"passed     {name:<{width}}  {sentence}")
            else:
                why = self.notes.get(name, "the examination ended before it")
                found.append(f"not shown  {name:<{width}}  {why}")
        return found

    @property
    def passed(self) -> bool:
        """Nothing failed, and the examination came to its end."""
        return not self.failures and all(name in self.shown or name in self.notes for name in REQUIREMENTS)
