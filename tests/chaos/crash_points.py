"""Named places at which a process can be made to die: between two effects whose order matters.

A point is a product function and the side of it, so the product carries no hooks: `arm` wraps these functions in the
child process that plays the role. The nemesis raises a point's number in memory that all processes share, and the first
process that comes past a raised point records it and kills itself with SIGKILL.
"""

import mmap
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from importlib import import_module
from typing import Any

from tests.chaos.history import History


@dataclass(frozen=True, slots=True)
class CrashPoint:
    """Die before or after this function; `when` looks at (result, arguments) and says whether this call counts."""

    name: str
    role: str
    module: str
    target: str
    side: str = "after"
    when: Callable[[Any, tuple[Any, ...]], bool] = lambda result, arguments: True


def _is_latest(_: Any, arguments: tuple[Any, ...]) -> bool:
    return arguments[0].name == "LATEST"


def _is_epoch(_: Any, arguments: tuple[Any, ...]) -> bool:
    return arguments[0].name == "EPOCH"


def _has_result(result: Any, _: tuple[Any, ...]) -> bool:
    return bool(result)


CKPT, LINK, SESSION = "learner.checkpoint.checkpoint", "learner.hub_client.link", "tests.chaos.actors"
LEDGER = "learner.hub.ledger"
POINTS = (
    CrashPoint("epoch_before_written", "learner", "learner.checkpoint.run_lock", "write_durably", "before", _is_epoch),
    CrashPoint("epoch_written_before_hub", "learner", "learner.checkpoint.run_lock", "write_durably", "after",
               _is_epoch),
    CrashPoint("hub_up_before_publish", "learner", LINK, "HubLink.wait_until_up"),
    CrashPoint("batch_taken_before_step", "learner", LINK, "HubLink.next_batch", "after", _has_result),
    CrashPoint("step_before_reported", "learner", LINK, "HubLink.trained", "before"),
    CrashPoint("step_reported_before_publish", "learner", LINK, "HubLink.trained"),
    CrashPoint("document_before_commit", "learner", "streamrl.weights.shm.transport", "DocumentWriter.commit",
               "before"),
    CrashPoint("document_committed_before_announced", "learner", "streamrl.weights.shm.transport",
               "DocumentWriter.commit"),
    CrashPoint("published", "learner", LINK, "HubLink.publish"),
    CrashPoint("ledger_frozen_before_checkpoint", "learner", LINK, "HubLink.freeze"),
    CrashPoint("shards_before_synced", "learner", CKPT, "write_shards"),
    CrashPoint("checkpoint_before_rename", "learner", CKPT, "_publish", "before"),
    CrashPoint("checkpoint_renamed_before_latest", "learner", CKPT, "write_durably", "before", _is_latest),
    CrashPoint("latest_before_pruned", "learner", CKPT, "write_durably", "after", _is_latest),
    CrashPoint("checkpoint_before_announced", "learner", LINK, "HubLink.saved", "before"),
    CrashPoint("checkpoint_announced", "learner", LINK, "HubLink.saved"),
    CrashPoint("hub_bound", "hub", "learner.hub.server", "HubServer.__init__"),
    CrashPoint("group_before_accepted", "hub", f"{LEDGER}.accept", "Acceptance.accept", "before"),
    CrashPoint("accepted_before_ack", "hub", f"{LEDGER}.accept", "Acceptance.accept"),
    CrashPoint("ack_taken_before_sent", "hub", f"{LEDGER}.ledger", "Ledger.take_acks", "after", _has_result),
    CrashPoint("leases_granted_before_sent", "hub", f"{LEDGER}.grant", "Grants.grant", "after", _has_result),
    CrashPoint("batch_cut_before_shared", "hub", f"{LEDGER}.cut", "BatchCutter.cut_batch", "after", _has_result),
    CrashPoint("step_marked_trained", "hub", f"{LEDGER}.cut", "BatchCutter.end_batch"),
    CrashPoint("frozen_before_sent", "hub", f"{LEDGER}.ledger", "Ledger.freeze"),
    CrashPoint("durable_before_ack", "hub", f"{LEDGER}.ledger", "Ledger.saved"),
    CrashPoint("joined_before_welcome", "hub", f"{LEDGER}.membership", "Membership.hello"),
    CrashPoint("version_served_before_announced", "hub", "learner.hub.context.weight_server", "WeightServer.publish"),
    CrashPoint("actor_welcomed", "actor", SESSION, "RecordedSession._welcomed"),
    CrashPoint("group_before_sent", "actor", SESSION, "RecordedSession.submit", "before"),
    CrashPoint("group_sent", "actor", SESSION, "RecordedSession.submit"),
    CrashPoint("ack_received", "actor", SESSION, "RecordedSession._acked"),
    CrashPoint("fetched_before_installed", "actor", SESSION, "FakeEngine.install", "before"),
    CrashPoint("installed_before_reported", "actor", SESSION, "RecordedSession.report_installed", "before"),
)
NAMES = tuple(point.name for point in POINTS)


class Armed:
    """One byte a point, in memory that children made by fork share."""

    def __init__(self) -> None:
        self._bytes = mmap.mmap(-1, len(POINTS))

    def set(self, name: str) -> None:
        self._bytes[NAMES.index(name)] = 1

    def clear(self) -> None:
        self._bytes[:] = bytes(len(POINTS))

    def take(self, place: int) -> bool:
        if not self._bytes[place]:
            return False
        self._bytes[place] = 0
        return True


def arm(role: str, armed: Armed, history: History) -> None:
    """In this process, wrap the functions of every point of this role."""
    for place, point in enumerate(POINTS):
        if point.role == role:
            owner, attribute = find(point.module, point.target)
            setattr(owner, attribute, _wrapped(getattr(owner, attribute), place, armed, history))


def find(module: str, target: str) -> tuple[Any, str]:
    """The object that holds a function, and the function's name there."""
    owner: Any = import_module(module)
    *path, attribute = target.split(".")
    for part in path:
        owner = getattr(owner, part)
    return owner, attribute


def _wrapped(function: Callable[..., Any], place: int, armed: Armed, history: History) -> Callable[..., Any]:
    point = POINTS[place]

    def die_if_armed(result: Any, arguments: tuple[Any, ...]) -> None:
        if point.when(result, arguments) and armed.take(place):
            history.add("crash", point=point.name)
            os.kill(os.getpid(), signal.SIGKILL)

    @wraps(function)
    def around(*arguments: Any, **named: Any) -> Any:
        if point.side == "before":
            die_if_armed(None, arguments)
        result = function(*arguments, **named)
        if point.side == "after":
            die_if_armed(result, arguments)
        return result

    return around
