"""Comparison of a live ledger with the one that its log gives, alone or after a snapshot."""

from collections.abc import Iterable
from typing import Any

from learner.hub.ledger.ledger import Ledger
from learner.hub.ledger.tables.groups import GroupState
from streamrl.stream.records import GroupArrived, Record
from tests.unit.hub.factories import ledger_arguments, log_of
from tests.unit.hub.simulator import World

Log = list[tuple[int, Record]]


def durable_state(ledger: Ledger) -> dict[str, Any]:
    """Groups, batches, versions and bounds, without what is allowed to die: leases, and what only a sender was told."""
    asleep = {GroupState.LEASED: GroupState.READY}
    live = {
        record.group_id: (
            asleep.get(record.state, record.state).name, sorted(record.members), tuple(map(bytes, record.frames)),
            tuple(record.sequences), [(one.actor_id, one.incarnation, one.seq) for one in record.deliveries],
            record.next_attempt, record.grants, record.max_lag,
        )
        for record in ledger.groups.in_order()
    }
    holders = {
        record.group_id: record.lease.actor_id if record.lease is not None else record.holder
        for record in ledger.groups.in_order()
    }
    return {
        "live": live, "holders": holders, "next_id": ledger.groups.next_id, "version": ledger.version,
        "ended": {group_id: (row.state.name, row.reason) for group_id, row in ledger.groups.settled.items()},
        "in_flight": [
            (version, sorted(record.group_id for record in batch)) for version, batch in ledger.in_flight
        ],
        "trained": (ledger.groups.num_trained, ledger.groups.num_dropped), "lineage": ledger.versions.lineage,
        "next_sequence": ledger.journal.next_sequence,
        "published": max(ledger.versions.newest_published, ledger.version),  # a start publishes at once
    }


def restored(world: World, state: bytes | None, log: Log) -> Ledger:
    """Restore the world's ledger from a snapshot or without one, and from these records, in the same epoch."""
    now = world.ledger
    arguments = ledger_arguments(
        learner_epoch=now.versions.learner_epoch, keep_group=now.lifecycle.keep_group,
        **({"lineage": now.versions.lineage} if now.versions.learner_epoch > 1 else {}),
    )

    def records(first: int) -> Iterable[tuple[int, Record]]:
        return [one for one in log if one[0] >= first]

    return Ledger.restore(state, now.settings, records=records, **arguments)


def difference(before: dict[str, Any], after: dict[str, Any]) -> str:
    """Say what differs; "" if nothing does."""
    lines = []
    for key in before:
        if before[key] == after[key]:
            continue
        if key in ("live", "ended"):
            # A group that ended may be forgotten once a checkpoint has its end; one table knows that, the other not.
            known = {*before[key], *after[key]} if key == "live" else before[key].keys() & after[key].keys()
            groups = [one for one in known if before[key].get(one) != after[key].get(one)]
            lines += [f"{key} {one}: {before[key].get(one)} became {after[key].get(one)}" for one in sorted(groups)]
        else:
            lines.append(f"{key}: {before[key]} became {after[key]}")
    return "\n".join(lines)


def check_restored(world: World) -> None:
    """Assert that the log alone and the last checkpoint with the log give the live ledger."""
    log, (_, snapshot, *_) = log_of(world.ledger), world.saved
    for state in (None, snapshot):
        copy = restored(world, state, log)
        before, after = durable_state(world.ledger), durable_state(copy)
        if world.num_restarts:
            del before["holders"]  # a snapshot does not tell an open lease from one that a crash has ended
        found = difference(before, after)
        assert not found, f"restored {'from the log' if state is None else 'from a checkpoint and the log'}:\n{found}"
        copy.check()
        for _, record in log:  # a delivery that the log has is a repeat, and durable
            if isinstance(record, GroupArrived):
                entry = copy.dedup.get(record.actor_id, record.incarnation)
                assert entry is None or (entry.place(record.seq) == "repeat" and record.seq in entry.durable)
