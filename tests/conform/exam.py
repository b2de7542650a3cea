"""The examination: four starts of one actor, and what the hub does to it in each.

    first    join, damaged weights, work, lost messages and acks, rejection, revocation, versions, evaluation,
             silence, a learner that restarts, STOP
    second   DRAIN by the hub
    third    frames of a later release and damaged ones; a newer process takes the name
    fourth   SIGTERM, only where the examiner starts the actor itself
"""

import signal
import time
from collections.abc import Callable, Set
from typing import Protocol

from learner.hub.context.settings import HubSettings
from streamrl.messages import Drain, Group, Hello, LeaseRef, Message, Stop, StopReason
from streamrl.messages.codec import encode
from tests.conform.hub import ExaminedHub, frame_of
from tests.conform.requirements import Findings
from tests.conform.watch import SETTLING_BEATS, Watch
from tests.conform.weights import Model, Pulls

SLOW_BEATS = 6.0
"""Times `heartbeat_s`: longer intervals on average are a fault."""
NUM_GROUPS = 3
"""Groups that a part of the examination waits for."""


class Actor(Protocol):
    """How the examined process is started; `tests.conform.actor_process` has a command, and a person."""

    stops_by_signal: bool

    def start(self, number: int, num_starts: int) -> None: ...
    def end(self, signal_number: int) -> None: ...
    def ended(self) -> bool | None: ...


class Incomplete(Exception):
    """The actor does not do what the rest of this part needs."""


class Examination:
    """Runs all parts; `findings` fills meanwhile.

    Args:
        patience_s: how long the actor may take for a step.
        first_install_s: the same for its first HELLO and its first version, for which an engine is built.
        fail_fast: end with the first failure.
    """

    def __init__(
        self, settings: HubSettings, model: Model, actor: Actor, *, patience_s: float = 20.0,
        first_install_s: float = 200.0, fail_fast: bool = False, notify: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.findings, self.pulls = Findings(), Pulls()
        self.hub = ExaminedHub(settings, model, self.pulls, self._new_watch(settings))
        self._actor, self._patience_s, self._notify = actor, patience_s, notify

        self._first_install, self._fail_fast = first_install_s / patience_s, fail_fast
        self._blame = ""

    def _new_watch(self, settings: HubSettings) -> Watch:
        return Watch(self.findings, self.pulls, settings.run_id)

    @property
    def watch(self) -> Watch:
        return self.hub.watch

    def run(self) -> Findings:
        parts = [self._first, self._drained, self._fenced] + [self._terminated] * self._actor.stops_by_signal
        for number, part in enumerate(parts, 1):
            self.pulls.good.clear()
            self.hub.examine(self._new_watch(self.hub.context.settings))
            self._actor.start(number, len(parts))
            try:
                part()
            except Incomplete as why:
                self._notify(f"part {number} ends early: {why}")
            finally:
                self._blame = ""
                self._actor.end(signal.SIGKILL)
            if self._fail_fast and self.findings.failures:
                break
        return self.findings

    def close(self) -> None:
        self.hub.close()

    # --- waiting ----------------------------------------------------------------------------------------------------

    def wait(self, condition: Callable[[], object], *, times: float = 1.0) -> bool:
        """Turn the hub until the condition holds; False if that takes too long."""
        deadline = time.monotonic() + times * self._patience_s
        while not condition():
            if time.monotonic() > deadline:
                return False
            if self._fail_fast and self.findings.failures:
                raise Incomplete("something failed")
            self.hub.turn()
        return True

    def need(self, name: str, condition: Callable[[], object], reason: str, *, times: float = 1.0) -> None:
        """As `wait`; a failure is recorded, and ends this part."""
        if not self.findings.require(self._blame or name, self.wait(condition, times=times), reason):
            raise Incomplete(reason)

    def beats(self, number: int = SETTLING_BEATS + 1) -> None:
        """Until so many more heartbeats have come."""
        wanted = self.watch.num_beats + number
        self.need("heartbeats", lambda: self.watch.num_beats >= wanted or self.watch.ended, "heartbeats have stopped")

    def groups(self, number: int = NUM_GROUPS, *, losing: bool = False) -> list[int]:
        """Grant until so many new groups have come; their numbers. With `losing` the hub does not get them."""
        before = set(self.watch.sent)
        self.hub.losing = (Group,) if losing else ()
        self.hub.granting = True
        self.need("answers", lambda: len(self.watch.sent.keys() - before) >= number, (
            f"{number} groups did not come in time; the actor holds {len(self.hub.open_leases())} leases and its last "
            f"heartbeat has free={self.watch.beat.free if self.watch.beat else 0}"
        ))
        self.hub.granting = False
        return sorted(self.watch.sent.keys() - before)

    def quiet(self) -> None:
        """Until every open lease is answered."""
        self.hub.granting = False
        self.need("answers", lambda: not self.watch.open_leases(), "leases stayed without an answer")

    def join(self) -> None:
        """From the start of a process to its first installed version."""
        self.need("hello", lambda: self.watch.hellos, "no HELLO came", times=self._first_install)
        self.need("weights-verified", lambda: self.watch.installed, (
            "no version was installed"
            + (", refused was " + ", ".join(map(str, self.watch.refused)) if self.watch.refused else "")
        ), times=self._first_install)
        self.need("heartbeats", lambda: self.watch.beat is not None and self.watch.beat.installed, (
            "no heartbeat names the installed version"
        ))

    def rejoin(self, name: str) -> None:
        """Lose the connection, and wait for the HELLO and the WELCOME after it."""
        num = len(self.watch.hellos)
        self.hub.drop_connection()
        self.need(name, lambda: len(self.watch.hellos) > num, "STOP(NO_LINK) was not followed by HELLO")
        self.need(name, lambda: self.watch.welcomed, "no HELLO came that could be answered")

    # --- the first start --------------------------------------------------------------------------------------------

    def _first(self) -> None:
        self._hello_again()
        self.join()
        self._joined_at = time.monotonic()
        self.groups()
        for part in (
            self._lost_groups, self._lost_acks, self._durable, self._rejected, self._revoked, self._versions,
            self._pinned, self._silence, self._successor, self._stopped,
        ):
            part()

    def _hello_again(self) -> None:
        """The first HELLO gets lost, the second finds a hub without a version."""
        self.hub.losing = (Hello,)
        self.need("hello", lambda: self.watch.hellos, "no HELLO came", times=self._first_install)
        self.need("hello-again", lambda: len(self.watch.hellos) > 1, "a HELLO without an answer was not repeated")
        self.hub.losing = ()
        self.need("hello-again", lambda: len(self.watch.hellos) > 2, "HELLO did not come again")
        num = len(self.watch.hellos)
        self.need("hello-again", lambda: len(self.watch.hellos) > num, "STOP(BUSY) was not followed by HELLO")
        self.hub.publish()
        self.need("hello-again", lambda: self.watch.welcomed, "no HELLO came that could be answered")

    def _lost_groups(self) -> None:
        """Groups are lost with the connection: each must come again, as it was."""
        lost = self.groups(losing=True)
        self.rejoin("resend")
        for seq in lost:
            self.need("resend", lambda seq=seq: self.watch.sent[seq].times > 1, (
                f"seq {seq} was lost with the connection and did not come again"
            ))
        self.findings.held("resend-bytes")
        self.quiet()

    def _lost_acks(self) -> None:
        """Acks are lost with the connection: WELCOME says what they would have said."""
        self.wait(lambda: not self.watch.unsettled())
        self.hub.holding_acks = True
        seqs = self.groups()
        self.quiet()
        times = {seq: self.watch.sent[seq].times for seq in seqs}  # before: what comes again may follow WELCOME at once
        self.rejoin("resend-open")
        self.hub.holding_acks = False
        self.beats()
        again = [seq for seq in seqs if self.watch.sent[seq].times > times[seq]]
        self.findings.require("resend-open", not again, f"WELCOME named seq {again} as settled, and they came again")

    def _durable(self) -> None:
        """Accepted is not durable: a checkpoint is what empties the outbox."""
        self.train_and_publish()
        self.quiet()
        self.train()
        self.hub.save()
        self.wait(lambda: not self.watch.unsettled())
        self.beats()
        self.rejoin("forgets")
        self.findings.held("forgets")

    def _rejected(self) -> None:
        """A rejected group is forgotten: `Watch` compares the next HELLO and what comes again."""
        self.hub.rejecting = True
        self.groups()
        self.quiet()
        self.beats()
        self.rejoin("forgets")
        self.beats()

    def _revoked(self) -> None:
        """Leases are taken back as soon as they are out."""
        before = set(self.watch.leases)
        self.hub.granting = True
        self.need("answers", lambda: self.watch.leases.keys() - before, "the actor has no room for a lease")
        self.hub.granting = False
        refs = sorted(self.hub.open_leases())
        taken = set(refs[1:] or refs)
        self.hub.revoke(taken)
        self.beats(2 * SETTLING_BEATS)
        self.quiet()
        if "revoked" not in self.findings.failures and taken - self.watch.answered.keys():
            self.findings.held("revoked")
        self.findings.note("revoked", "every lease was answered before its revocation could be read")

    def train(self) -> None:
        """One step, with as many groups as it takes."""
        while not self.hub.train():
            self.groups(1)

    def train_and_publish(self) -> None:
        self.train()
        ref = self.hub.publish().ref
        self.need("installs", lambda: ref in self.watch.installed, f"version {ref} was announced and not installed")

    def _versions(self) -> None:
        """A new version, one under a forged root, an old one again."""
        self.train_and_publish()
        self.groups()
        older = self.hub.context.weights.manifest
        assert older is not None
        self.train()
        ref = self.hub.publish(forged_first=True).ref
        self.beats()
        self.findings.held("refuses-forged")
        self.hub.announce_published()
        self.need("installs", lambda: ref in self.watch.installed, (
            f"version {ref} was not installed after one with the same number and a forged root was refused"
        ))
        self.hub.announce(older)
        self.beats(2 * SETTLING_BEATS)
        self.groups()
        self.findings.held("versions-up")
        self.findings.held("labels")
        self.quiet()

    def _pinned(self) -> None:
        """An evaluation, and a new version while its answers are made."""
        if not self.watch.beat or not self.watch.beat.free_eval:
            self.findings.note("eval-pinned", "the actor takes no leases of evaluations (free_eval is 0)")
            return
        self.train()
        before = set(self.watch.leases)
        self.hub.ledger.evals.request(1, self.hub.context.weights.manifest.ref.version, 8)
        self.hub.granting = True
        pinned = lambda: any(self.watch.leases[ref].keep_s for ref in self.watch.leases.keys() - before)  # noqa: E731
        self.need("eval-pinned", pinned, "no lease of an evaluation could be granted")
        ref = self.hub.publish().ref
        run = self.hub.ledger.evals.get(1)
        self.need("eval-pinned", lambda: run.done, "the evaluation did not end")
        self.quiet()
        self.need("installs", lambda: ref in self.watch.installed, f"version {ref} was not installed after it")
        self.findings.held("eval-pinned")

    def _silence(self) -> None:
        """The hub says nothing, and hears nothing but HELLO."""
        num = len(self.watch.hellos)
        self.hub.losing = (Message,)
        self.need("silence", lambda: len(self.watch.hellos) > num, (
            f"no HELLO came although the hub was silent for longer than "
            f"hub_silent_s={self.hub.context.settings.limits.hub_silent_s:g}"
        ))
        self.hub.losing = ()
        self.need("silence", lambda: self.watch.welcomed, "no HELLO came that could be answered")
        self.groups()
        self.quiet()

    def _successor(self) -> None:
        """The learner dies after groups were accepted, and restarts from the checkpoint before them."""
        state = self.hub.save()
        seqs = self.groups()
        self.quiet()
        self.wait(lambda: all(self.watch.sent[seq].accepted for seq in seqs))
        times, num = {seq: self.watch.sent[seq].times for seq in seqs}, len(self.watch.hellos)
        self.hub = self.hub.succeeded_by(state)
        self.hub.publish()
        self.need("resend-successor", lambda: len(self.watch.hellos) > num and self.watch.welcomed, (
            "a learner restarted at the same address and got no HELLO"
        ))
        for seq in seqs:
            self.need("resend-successor", lambda seq=seq: self.watch.sent[seq].times > times[seq], (
                f"seq {seq} was accepted but not durable, and did not come to the restarted learner"
            ))
        ref = self.hub.newest
        self.need("installs", lambda: ref in self.watch.installed, (
            f"version {ref}, the same weights under a new learner_epoch, was not reported"
        ))
        self.groups()
        self.quiet()
        for name in ("seq", "outbox", "answers", "frames"):
            self.findings.held(name)

    def _stopped(self) -> None:
        self._check_rate()
        self.hub.send(Stop(StopReason.FINISHED, False, 0.0, 0, "the examination of this process is over"))
        self._ends("stop")

    def _check_rate(self) -> None:
        """Heartbeats over the whole part; generous, because the machine may be busy."""
        interval_s = (time.monotonic() - self._joined_at) / max(1, self.watch.num_beats)
        wanted_s = self.hub.context.settings.limits.heartbeat_s
        self.findings.require("heartbeats", interval_s < SLOW_BEATS * wanted_s, (
            f"a heartbeat came every {interval_s:.1f} s on average, heartbeat_s is {wanted_s:g}"
        ))

    def _ends(self, name: str) -> None:
        """Nothing more may come, and the process must end, if it is ours."""
        silent_s = 4 * SETTLING_BEATS * self.hub.context.settings.limits.heartbeat_s
        deadline = time.monotonic() + silent_s
        self.wait(lambda: name in self.findings.failures or time.monotonic() > deadline)
        self.findings.require(name, self.wait(lambda: self._actor.ended() is not False), (
            f"the process did not end after {self.watch.ended}"
        ))

    # --- the other starts -------------------------------------------------------------------------------------------

    def _drained(self) -> None:
        """DRAIN while leases are out."""
        self.join()
        self.groups(1)
        self.hub.granting = True
        self.wait(lambda: self.watch.open_leases(), times=0.1)
        self.hub.granting = False
        self.hub.send(Drain("the examiner drains this actor", self.hub.context.settings.limits.drain_deadline_s))
        self._leaves(self.watch.leases.keys() - self.watch.revoked.keys())

    def _terminated(self) -> None:
        """SIGTERM asks for the same, from outside."""
        self.join()
        self.groups(1)
        known = set(self.watch.beat.held or ()) if self.watch.beat is not None else set()
        self._actor.end(signal.SIGTERM)
        self._leaves(known)  # a lease on its way may be overtaken by the signal

    def _leaves(self, leases: Set[LeaseRef]) -> None:
        """Until BYE; these leases must be answered by then."""
        self.need("drain", lambda: self.watch.bye is not None, "no BYE came", times=2)
        bye, newest = self.watch.bye, max(self.watch.sent, default=0)
        assert bye is not None
        open_now = sorted(leases - self.watch.answered.keys())
        self.findings.require("drain", not open_now, f"BYE came although leases {open_now} had no answer")
        self.findings.require("drain", bye.last_seq == newest, f"BYE names seq {bye.last_seq}, the newest is {newest}")
        open_seqs = self.watch.unsettled()
        self.findings.require("drain", not open_seqs, f"BYE came before seq {open_seqs} were acknowledged")
        self._ends("drain")

    def _fenced(self) -> None:
        """What an actor of today must bear, and then a newer process with its name."""
        self.hub.heard.extended, self._blame = True, "tolerates"
        self.join()
        self.groups()
        stop = encode(Stop(StopReason.FINISHED, False, 0.0, 0, "a frame that was damaged on the way"))
        for frame in (frame_of(Stop.KIND, bytes(stop[16:]), damage=1), frame_of(200, b"\x90"), b"SRL"):
            self.hub.heard.raw(self.hub.route, frame)
        self.beats()
        self.groups()
        self.findings.require("tolerates", len(self.watch.hellos) == 1, "a damaged frame made the actor join again")
        self.hub.heard.extended, self._blame = False, ""
        self.hub.refuse_incarnation()
        self._ends("fenced")
