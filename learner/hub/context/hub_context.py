"""The state that the hub's handlers share, and their way out to actors and ranks."""

from __future__ import annotations

import logging
import time
from collections import Counter
from dataclasses import dataclass, field

import zmq

from learner.hub.context.connections import Connections
from learner.hub.context.run_log import RunLog
from learner.hub.context.settings import HubSettings
from learner.hub.context.turns import Turns
from learner.hub.context.weight_server import WeightServer
from learner.hub.ledger.ledger import Ledger
from learner.hub.liveness.ranks import RankWatch
from learner.hub.observers.counters import ActorLoads, Arrivals, EpisodeFailures, HungCalls, Observer, SandboxLevels
from learner.hub.observers.trust import ActorTrust
from streamrl.config.schema import PromptOverflow
from streamrl.messages import PROTOCOL, Message
from streamrl.messages.codec import encode
from streamrl.messages.printable import printable
from streamrl.transport.awake import AwakeClock
from streamrl.transport.peers import LogLimit

log = logging.getLogger("streamrl.hub")

MAX_NOTICES = 50


class Outbound:
    """Sends without blocking: a message to a full or unreachable peer is dropped and counted.

    An actor that missed one joins again with HELLO.
    """

    def __init__(self, actors: zmq.Socket, ranks: zmq.Socket, counters: Counter[str]) -> None:
        self._actors, self._ranks, self._counters = actors, ranks, counters

    def to_actor(self, routing_id: bytes, message: Message, *, protocol: int = PROTOCOL) -> bool:
        """Send to an actor; returns whether the message was queued."""
        return self._send(self._actors, routing_id, encode(message, protocol=protocol))

    def to_rank(self, routing_id: bytes, message: Message) -> bool:
        return self._send(self._ranks, routing_id, encode(message))

    def is_gone(self, routing_id: bytes, message: Message) -> bool:
        """Send to an actor; returns whether its connection is closed, as that of a dead process is."""
        before = self._counters["num_sends_unreachable"]
        return not self.to_actor(routing_id, message) and self._counters["num_sends_unreachable"] > before

    def _send(self, socket: zmq.Socket, routing_id: bytes, frame: bytearray) -> bool:
        try:
            socket.send_multipart([routing_id, frame], zmq.NOBLOCK)
            return True
        except zmq.Again:
            self._counters["num_sends_refused"] += 1
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._counters["num_sends_unreachable"] += 1
        return False


@dataclass(slots=True)
class HubContext:
    """The hub as its handlers see it; the server makes it."""

    settings: HubSettings
    ledger: Ledger
    log: RunLog
    connections: Connections
    weights: WeightServer
    send: Outbound
    counters: Counter[str]
    waiting_for: str = ""
    """Why no batch can be cut, while a rank waits for one."""
    notices: list[str] = field(default_factory=list)
    """What a person must see, with the time: in `status.json`, from where `launch` prints it."""
    failures: EpisodeFailures = field(init=False)
    arrivals: Arrivals = field(default_factory=Arrivals)
    trust: ActorTrust = field(init=False)
    turns: Turns = field(init=False)
    observers: tuple[Observer, ...] = field(init=False)
    """All observers, those above included; each is told of every event of every actor."""
    rank_watch: RankWatch = field(init=False)
    clock: AwakeClock = field(default_factory=AwakeClock)
    """Clock of everything that waits in this hub."""
    told: LogLimit = field(default_factory=lambda: LogLimit(log, burst=1, interval_s=30.0))
    _told_records: LogLimit = field(default_factory=lambda: LogLimit(log))
    _any_passed_over: bool = False

    def __post_init__(self) -> None:
        self.ledger.prompts.tell, self.log.notify = self._passed_over, self.notify
        env, stop_at_long_prompt = self.settings.env, self.settings.data.prompt_overflow is PromptOverflow.error
        self.failures = EpisodeFailures(self.notify, stop_at_long_prompt=stop_at_long_prompt)
        self.rank_watch = RankWatch(self.settings.rank_silent_s)
        self.turns = Turns(self.connections, self.settings.hub.lease_ttl_s, is_on=self.settings.by_turns)
        self.trust = ActorTrust(self.settings.trust, self.settings.publish.probe_tolerance, self.notify)
        self.observers = (
            self.failures, self.arrivals, ActorLoads(), SandboxLevels(self.notify), self.trust,
            HungCalls(self.notify, task=env.path or env.name, limit_s=env.step_timeout_s),
        )

    @property
    def fatal(self) -> str:
        """The reason why the run must stop; "" while it need not."""
        return next((one.fatal for one in self.observers if one.fatal), self.ledger.prompts.fatal)

    def _passed_over(self, text: str) -> None:
        """Show the first record on the terminal, the others in the log: a broken file has thousands."""
        if self._any_passed_over:
            self._told_records.warning("%s", text)
        else:
            self._any_passed_over = True
            self.notify(f"{text} (later ones: in the log)")

    def notify(self, text: str) -> None:
        """Warn in the log and on the terminal of `launch`."""
        text = printable(" ".join(text.split()))  # an exception may have many lines, and a peer's text anything
        log.warning("%s", text)
        self.notices = [*self.notices, f"{time.strftime('%H:%M:%S')} {text}"][-MAX_NOTICES:]
