"""The foreign actor with one fault each, and the requirement that must name it."""

import time

from examples.foreign_actor import BYE, GROUP, INSTALLED, PULL, Actor, frame, unpack

FAULTS: dict[type[Actor], str] = {}
"""The actor, and the requirement that it fails."""


class Faulty(Actor):
    """An actor with one fault, and what fails for it."""

    def __init_subclass__(cls, *, fails: str) -> None:
        FAULTS[cls] = fails


class NoHelloAgain(Faulty, fails="hello-again"):
    def say_hello(self, now):
        if not self.hello_at:
            super().say_hello(now)


class WrongDigest(Faulty, fails="frames"):
    def deliver(self, *answer):
        super().deliver(*answer)
        self.send(b"SRLM" + self.outbox[self.next_seq - 1][4:8] + bytes(8) + b"\x90")


class NoHeartbeats(Faulty, fails="heartbeats"):
    def send_heartbeat(self, now):
        if self.beat < 8:
            super().send_heartbeat(now)


class InstallsDamagedWeights(Faulty, fails="weights-verified"):
    def fetch(self, manifest, layout):
        for index, size in enumerate(layout[1]):
            for start in range(0, size, self.limits[8]):
                length = min(self.limits[8], size - start)
                self.weights.send(frame(PULL, [self.welcome[10], manifest[0], 0, index, start, length]))
                assert self.weights.poll(20_000)
                self.weights.recv_multipart()
        return True


class NeverInstallsAgain(Faulty, fails="installs"):
    def announced(self, fields):
        pass


class IgnoresTheRoot(Faulty, fails="refuses-forged"):
    def install(self):
        manifest, now = self.manifest, self.installed
        if manifest is not None and not (now and manifest[0] <= now[0]):
            self.manifest = None
            if self.fetch(manifest, self.welcome[7]):
                self.installed = [manifest[0], manifest[5]]
                self.send(frame(INSTALLED, [manifest[0], manifest[5], True, 2, 0.0, 0.0, 0.0, 0.0, 0, ""]))


class InstallsOlderVersions(Faulty, fails="versions-up"):
    def announced(self, fields):
        if self.installed and fields[0][0] < self.installed[0]:
            self.installed = None
        super().announced(fields)


class HalfTheMembers(Faulty, fails="answers"):
    def deliver(self, lease, outcome, reason, members):
        super().deliver(lease, outcome, reason, members[:1])


class LogprobsWithoutEnd(Faulty, fails="answers"):
    def generate(self, lease, index, seed):
        member = super().generate(lease, index, seed)
        return [*member[:4], b"\xff" * len(member[4]), *member[5:]]


class LabelsWithTheOneBefore(Faulty, fails="labels"):
    def generate(self, lease, index, seed):
        member = super().generate(lease, index, seed)
        epoch, version = self.installed[0]
        return [*member[:6], [[epoch, max(0, version - 1), *member[6][0][2:]]], *member[7:]]


class ReusesNumbers(Faulty, fails="seq"):
    def deliver(self, *answer):
        super().deliver(*answer)
        if self.next_seq == 4:
            self.next_seq = 3


class SkipsNumbers(Faulty, fails="seq"):
    def deliver(self, *answer):
        super().deliver(*answer)
        self.next_seq += self.next_seq == 4


class ForgetsAccepted(Faulty, fails="outbox"):
    def acked(self, ack):
        super().acked(ack)
        self.outbox = {seq: data for seq, data in self.outbox.items() if seq not in self.settled}


class NoResend(Faulty, fails="resend"):
    def welcomed(self, welcome):
        kept, self.outbox = (self.outbox, {}) if not self.linked else ({}, self.outbox)
        super().welcomed(welcome)
        self.outbox |= kept


class OtherBytes(Faulty, fails="resend-bytes"):
    def welcomed(self, welcome):
        if not self.linked:
            for seq, data in self.outbox.items():
                fields = unpack(data[16:])
                self.outbox[seq] = frame(GROUP, [*fields[:6], "again", *fields[7:]])
        super().welcomed(welcome)


class ResendsEverything(Faulty, fails="resend-open"):
    def welcomed(self, welcome):
        again = [] if self.linked else list(self.outbox.values())
        super().welcomed(welcome)
        for data in again:
            self.send(data)


class KeepsRejected(Faulty, fails="forgets"):
    def acked(self, ack):
        super().acked([*ack[:5], []])


class IgnoresRevocations(Faulty, fails="revoked"):
    slow = False  # so that a revoked lease is still answered when the actor must know of it

    def leased(self, fields):
        super().leased([fields[0], []])
        self.slow = self.slow or bool(fields[1])

    def work(self, now):
        self.slow = self.slow and bool(self.leases)
        if self.slow and now - self.group_at < 0.4:
            self.send_heartbeat(now)
        else:
            super().work(now)


class UnpinnedInstalls(Faulty, fails="eval-pinned"):
    waits = False  # so that a lease that pins a version is still open when the next one comes

    def leased(self, fields):
        self.waits = self.waits or any(lease[12] > 0 for lease in fields[0])
        super().leased([[[*lease[:12], 0.0, *lease[13:]] for lease in fields[0]], fields[1]])

    def answer(self, lease):
        ref = self.installed[0]
        super().answer([*lease[:7], ref, *lease[8:]])

    def work(self, now):
        self.waits = self.waits and self.manifest is None
        if self.waits:
            self.send_heartbeat(now)
        else:
            super().work(now)


class NeverDoubtsTheHub(Faulty, fails="silence"):
    def work(self, now):
        self.heard_at = now
        super().work(now)


class ForgetsAtSuccessor(Faulty, fails="resend-successor"):
    def welcomed(self, welcome):
        if self.welcome and welcome[2] != self.welcome[2]:
            self.outbox = {}
        super().welcomed(welcome)


class IgnoresStop(Faulty, fails="stop"):
    def stopped(self, stop):
        if stop[1]:
            super().stopped(stop)


class IgnoresDrain(Faulty, fails="drain"):
    def leave(self, reason):
        pass


class LeavesAtOnce(Faulty, fails="drain"):
    def leave(self, reason):
        self.send(frame(BYE, [self.next_seq - 1, "gone"]))
        self.draining = self.said_bye = True


class StrictArrays(Faulty, fails="tolerates"):
    def leased(self, fields):
        if len(fields) == 2:
            super().leased(fields)


class ObeysDamagedFrames(Faulty, fails="tolerates"):
    def run(self):
        while not self.done:
            self.hub.poll(10)
            while self.hub.poll(0):
                data = self.hub.recv()
                self.heard_at = time.monotonic()
                if len(data) > 16:
                    self.handlers.get(data[6], lambda fields: None)(unpack(data[16:]))
            if self.linked and time.monotonic() - self.heard_at > self.limits[1]:
                self.linked = False
            (self.work if self.linked else self.say_hello)(time.monotonic())


class ComesBackFenced(Faulty, fails="fenced"):
    def stopped(self, stop):
        super().stopped([stop[0], True, stop[2]] if stop[0] == 4 else stop)


class OtherIncarnationEachTime(Faulty, fails="outbox"):
    def say_hello(self, now):
        if now - self.hello_at > self.hello_wait_s and self.run_id:
            self.incarnation += 1
        super().say_hello(now)
