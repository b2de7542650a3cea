"""An actor without any code of streamrl: docs/protocol.md in 200 lines, to start from in another language.

    python -m tests.conform tcp://127.0.0.1:5601 -- python examples/foreign_actor.py tcp://127.0.0.1:5601

It needs pyzmq, xxhash and msgspec (as a plain MessagePack coder). Its "policy" ignores the weights that it fetches and
draws every token with the same probability, an honest log-prob; an engine takes the place of `generate`."""
import contextlib
import math
import random
import signal
import struct
import sys
import time

import msgspec
import xxhash
import zmq

HELLO, WELCOME, LEASES, GROUP, ACK, HEARTBEAT, ANNOUNCE, PULL, CHUNK, INSTALLED, DRAIN, BYE, STOP = range(1, 14)
SYNCING, RUNNING, DRAINING, COMPLETE, RETURNED, STALE, BY_DRAIN = 1, 2, 4, 0, 2, 1, 4
PREAMBLE, NUM_LEASES, NUM_TOKENS, GROUP_S = struct.Struct("<4sHBBQ"), 8, 6, 0.02
pack, unpack = msgspec.msgpack.encode, msgspec.msgpack.decode
hash64, hash128 = xxhash.xxh3_64_intdigest, xxhash.xxh3_128_digest


def frame(kind, fields):
    body = pack(fields)
    return PREAMBLE.pack(b"SRLM", 1, kind, 0, hash64(body)) + body


def unframe(data):  # kind and fields; kind 0 is a frame that is damaged or of another protocol
    magic, protocol, kind, flags, digest = PREAMBLE.unpack_from(data.ljust(16))
    intact = (magic, protocol, flags, digest) == (b"SRLM", 1, 0, hash64(data[16:]))
    return (kind, unpack(data[16:])) if intact else (0, [])


def dealer(address):
    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.linger, socket.immediate = 0, 1  # nothing is queued for a connection that is not there
    socket.connect(address)
    return socket


def numbers(ranges):
    return {seq for first, last in ranges for seq in range(first, last + 1)}


class Actor:
    def __init__(self, address):
        self.hub, self.incarnation, self.hello_wait_s = dealer(address), time.time_ns(), 0.1
        self.run_id = self.welcome = self.limits = self.weights = None
        self.linked = self.done = self.draining = self.said_bye = False
        self.outbox, self.settled, self.next_seq = {}, set(), 1  # seq -> frame, until durable; those accepted
        self.leases, self.buckets = {}, {}  # (group_id, attempt) -> lease; digest -> bytes
        self.installed = self.manifest = None  # [ref, root]; what to install next
        self.beat = self.num_tokens = self.hello_at = 0
        self.heard_at = self.beat_at = self.group_at = time.monotonic()
        self.handlers = {
            WELCOME: self.welcomed, LEASES: self.leased, ACK: self.acked, ANNOUNCE: self.announced, STOP: self.stopped,
            DRAIN: lambda fields: self.leave(fields[0]), BYE: lambda fields: setattr(self, "done", True)}

    def run(self):
        while not self.done:
            self.hub.poll(10)
            while self.hub.poll(0):
                kind, fields = unframe(self.hub.recv())
                self.heard_at = time.monotonic() if kind else self.heard_at
                self.handlers.get(kind, lambda fields: None)(fields)
            now = time.monotonic()
            if self.linked and now - self.heard_at > self.limits[1]:  # hub_silent_s
                self.stopped([0, True, 0])
            (self.work if self.linked else self.say_hello)(now)

    def work(self, now):
        self.send_heartbeat(now)
        self.install()
        if self.leases and now - self.group_at > GROUP_S:
            self.group_at = now
            self.answer(next(iter(self.leases.values())))
        if self.draining and not self.said_bye and not self.leases and self.outbox.keys() <= self.settled:
            self.said_bye = True
            self.send(frame(BYE, [self.next_seq - 1, "drained"]))

    def send(self, data):
        with contextlib.suppress(zmq.Again):  # the connection is gone: HELLO follows, and then the outbox
            self.hub.send(data, zmq.NOBLOCK)

    def say_hello(self, now):
        if now - self.hello_at > self.hello_wait_s:
            self.hello_at, self.hello_wait_s = now, min(5.0, 2 * self.hello_wait_s)
            self.send(frame(HELLO, [
                1, 1, "foreign", self.incarnation, self.run_id, "uniform", "foreign 1", NUM_LEASES, ["zmq"],
                self.installed, list(self.leases), [[seq, seq] for seq in self.outbox], self.next_seq, ""]))

    def send_heartbeat(self, now):
        if now - self.beat_at >= self.limits[0]:
            self.beat, self.beat_at = self.beat + 1, now
            state = DRAINING if self.draining else RUNNING if self.installed else SYNCING
            free = max(0, NUM_LEASES - len(self.leases)) if state == RUNNING else 0
            ref, root = self.installed or (None, b"")
            self.send(frame(HEARTBEAT, [
                self.incarnation, self.beat, state, free, len(self.leases), ref, self.num_tokens, [], len(self.outbox),
                sum(map(len, self.outbox.values())), free, {}, NUM_LEASES, root, None, list(self.leases)]))

    def welcomed(self, welcome):
        if not self.linked:
            self.linked, self.welcome, self.limits = True, welcome, welcome[5]
            self.run_id, self.manifest, self.settled = welcome[1], welcome[8], set()
            self.weights = dealer(next(offer[1] for offer in welcome[9] if offer[0] == "zmq"))
            self.acked([0, *welcome[13:17], []])
            self.leased([[], [ref for ref, keep in welcome[17] if not keep]])
            for seq in sorted(self.outbox.keys() - self.settled):
                self.send(self.outbox[seq])

    def acked(self, ack):
        _, upto, accepted, durable_upto, durable, rejected = ack[:6]
        self.settled |= numbers([[1, upto], *accepted])
        for seq in self.outbox.keys() & (numbers([[1, durable_upto], *durable]) | {one[0] for one in rejected}):
            del self.outbox[seq]

    def leased(self, fields):
        for group_id, attempt in fields[1]:  # revoked
            self.leases.pop((group_id, attempt), None)
        self.leases |= {(lease[0], lease[1]): lease for lease in fields[0]}

    def answer(self, lease):
        ref, wanted, keep_s = self.installed[0], lease[7], lease[12]
        if ref < wanted or (keep_s and ref != wanted):
            return self.deliver(lease, RETURNED, STALE, [])
        self.deliver(lease, COMPLETE, 0, [self.generate(lease, *one) for one in zip(*lease[5:7], strict=True)])

    def generate(self, lease, index, seed):
        draw, vocab, n = random.Random(seed), self.limits[15], NUM_TOKENS
        prompt, tokens = [byte % vocab for byte in lease[4]], [draw.randrange(vocab) for _ in range(n)]
        reward = sum(token % 2 for token in tokens) / n
        self.num_tokens += n
        ids, logprobs = struct.pack(f"<{n}i", *tokens), struct.pack(f"<{n}f", *[-math.log(vocab)] * n)
        return [index, 0, struct.pack(f"<{len(prompt)}i", *prompt), ids, logprobs, [[0, n]],
                [[*self.installed[0], 0, n]], [[0, n, reward]], reward, {}, "length"]

    def deliver(self, lease, outcome, reason, members):
        self.leases.pop((lease[0], lease[1]), None)
        fields = [self.incarnation, self.next_seq, *lease[:2], outcome, reason, "", lease[8], members, {}, []]
        self.outbox[self.next_seq] = frame(GROUP, fields)
        self.send(self.outbox[self.next_seq])
        self.next_seq += 1

    def announced(self, fields):
        if self.manifest is None or fields[0][0] > self.manifest[0]:
            self.manifest = fields[0]

    def install(self):  # the newest version, unless leases with keep_s ask for the present one
        manifest, now, layout = self.manifest, self.installed, self.welcome[7]
        if manifest is None or (now and manifest[0] <= now[0]) or any(one[12] > 0 for one in self.leases.values()):
            return
        self.manifest = None  # one that fails is announced again
        ok = hash128(pack([manifest[2], *manifest[0], *manifest[3:5]])) == manifest[5] and self.fetch(manifest, layout)
        self.installed = [manifest[0], manifest[5]] if ok else now
        self.send(frame(INSTALLED, [manifest[0], manifest[5], ok, 2, 0.0, 0.0, 0.0, 0.0, sum(layout[1]), ""]))

    def fetch(self, manifest, layout):  # whether every bucket is here and has its digest
        buckets, self.buckets = self.buckets, {}
        for index, (digest, size) in enumerate(zip(manifest[4], layout[1], strict=True)):
            data = buckets.get(digest, b"")
            for _ in range(3):
                if hash128(data) != digest:
                    data = self.pull(manifest[0], index, size)
            self.buckets[digest] = data
        return all(hash128(data) == digest for digest, data in self.buckets.items())

    def pull(self, ref, bucket, size):
        data, deadline = b"", time.monotonic() + 20
        while len(data) < size and time.monotonic() < deadline:
            asked = [ref, 0, bucket, len(data)]
            self.weights.send(frame(PULL, [self.welcome[10], *asked, min(self.limits[8], size - len(data))]))
            if self.weights.poll(1000 * self.limits[5]):
                message, payload = self.weights.recv_multipart()
                chunk = unframe(message)[1]
                if chunk[:5] == [*asked, 0] and hash64(payload) == chunk[8]:
                    data += payload
            self.send_heartbeat(time.monotonic())
        return data

    def leave(self, reason):
        self.done = not self.linked
        if self.linked and not self.draining:
            self.draining = True
            self.send(frame(DRAIN, [reason, self.limits[6], 0]))
            for lease in list(self.leases.values()):
                self.deliver(lease, RETURNED, BY_DRAIN, [])

    def stopped(self, stop):
        self.done = not stop[1]  # rejoin
        self.linked, self.hello_at, self.hello_wait_s = False, time.monotonic(), max(0.1, stop[2])


if __name__ == "__main__":
    actor = Actor(sys.argv[1])
    signal.signal(signal.SIGTERM, lambda *_: actor.leave("SIGTERM"))
    actor.run()
