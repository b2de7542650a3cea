"""The only code that changes a durable table: `apply` does what a record says, while the hub runs and after a crash.

A verb of the ledger decides, makes a record of it and commits that. Restoration applies the records of the log to a
snapshot. So both lead to the same tables, and no change can be forgotten in one of them. What dies with the hub is
changed by verbs alone: leases, heartbeats, acks, evaluations, times, and the counts of events that are in no record.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from learner.hub.ledger.state import State
from learner.hub.ledger.tables.groups import Delivery, Grant, GroupRecord, GroupState, read_frame
from streamrl.errors import WireError
from streamrl.messages.validate import MemberSummary
from streamrl.stream.records import BatchCut, GroupArrived, GroupMoved, Record, RunStarted, StepTaken, VersionPublished


def commit(state: State, record: Record, members: Sequence[MemberSummary] | None = None) -> int:
    """Apply a record and add it to the journal; returns its number.

    Raises ValueError: it makes no sense now, and nothing has changed.
    """
    sequence = state.journal.next_sequence
    apply(state, sequence, record, members)
    state.journal.append(record)
    return sequence


def apply(state: State, sequence: int, record: Record, members: Sequence[MemberSummary] | None = None) -> None:
    """Do what a record says. No clock, no filter and no setting of the hub decides anything here.

    Args:
        sequence: the record's number in the log.
        members: summaries of a group that has just arrived; None reads them from a frame of the log.
    Raises:
        ValueError: it contradicts what came before it, and nothing has changed.
    """
    match record:
        case GroupArrived():
            _arrived(state, sequence, record, members)
        case GroupMoved():
            _moved(state, record)
        case BatchCut():
            _cut(state, record)
        case StepTaken():
            _step(state, record)
        case VersionPublished():
            state.versions.published(record.manifest.ref)
        case RunStarted():
            end_leases(state)


def draw_through(state: State, group_id: int) -> GroupRecord | None:
    """Draw every group up to this number, whose prompts follow from their numbers; None if this one has ended.

    A draw needs no record: the first record that names a group implies it, and until then it is of no consequence.
    """
    while state.groups.next_id <= group_id:
        number = state.groups.next_id
        state.groups.add(GroupRecord(number, *state.prompts.at(number)))
    return state.groups.live.get(group_id)


def end_leases(state: State) -> None:
    """Make leased groups READY: no lease outlives its hub. Each remembers who may come back with it."""
    for group in state.groups.in_state(GroupState.LEASED):
        state.groups.move(group, GroupState.READY)


def return_frames(state: State, group: GroupRecord, frames: Mapping[int, bytes]) -> None:
    """Give a group of a snapshot its frames, by their records' numbers; generate it again if the log lacks one."""
    if all(sequence in frames for sequence in group.sequences):
        group.frames = [frames[sequence] for sequence in group.sequences]
        return
    state.counts["lost_on_crash"] += len(group.sequences)
    _discard(state, group)
    if group.state is GroupState.HELD:
        state.groups.move(group, GroupState.READY)


def _arrived(
    state: State, sequence: int, arrived: GroupArrived, members: Sequence[MemberSummary] | None
) -> None:
    sender = state.dedup.known(arrived.actor_id, arrived.incarnation)
    sender.settled.add(arrived.seq)
    if members is None:  # it comes from the disk
        sender.durable.add(arrived.seq)
    group = draw_through(state, arrived.group_id)
    if arrived.refused or group is None:
        return
    if members is None:
        try:
            _, members = read_frame(arrived.frame, state.settings.limits)
        except WireError:  # the settings of now refuse it: without members its group is generated again
            return
    fresh = [one for one in members if not one.aborted]
    state.counts["num_members_aborted"] += len(members) - len(fresh)
    state.counts["num_members_accepted"] += len(fresh)
    state.counts["num_tokens_accepted"] += sum(one.num_action_tokens for one in fresh)
    if group.state is GroupState.READY:  # it came without a lease: nobody need be waited for any more
        group.holder = ""
    if fresh:
        group.members.update({one.index: one for one in fresh})
        group.frames.append(arrived.frame)
        group.deliveries.append(Delivery(arrived.actor_id, arrived.incarnation, arrived.seq))
        group.sequences.append(sequence)


def _moved(state: State, moved: GroupMoved) -> None:
    group = draw_through(state, moved.group_id)
    if group is None or group.state is GroupState.IN_BATCH:
        return
    group.holder = moved.actor_id  # of a lease; else there is none
    match GroupState(moved.state):
        case GroupState.LEASED:
            group.grants[moved.attempt] = Grant(moved.actor_id, moved.members)
            group.next_attempt = max(group.next_attempt, moved.attempt + 1)
            group.max_lag = max(group.max_lag, moved.max_lag)
            if group.state is GroupState.READY:
                state.groups.move(group, GroupState.LEASED)
        case GroupState.READY:
            if moved.discarded:
                _discard(state, group)
            if group.state is not GroupState.READY:
                state.groups.move(group, GroupState.READY)
        case GroupState.HELD if group.members and group.state is not GroupState.HELD:
            _hold(state, group)
        case GroupState.DROPPED:
            # A held group is dropped by a filter, unless it has grown too old.
            state.counts["num_groups_filtered"] += group.state is GroupState.HELD and moved.reason != "stale"
            _drop(state, group, moved.reason)


def _hold(state: State, group: GroupRecord) -> None:
    whole = len(group.members) == state.settings.group_size
    rewards = [member.reward for member in group.members.values()]
    state.counts["num_groups_accepted" if whole else "num_groups_partial"] += 1
    state.counts["num_groups_completed"] += 1
    state.counts["num_groups_zero_std"] += len(rewards) > 1 and min(rewards) == max(rewards)
    state.groups.move(group, GroupState.HELD)


def _drop(state: State, group: GroupRecord, reason: str) -> None:
    """End a group untrained; its place in capacity is free at once."""
    state.counts["num_groups_dropped"] += 1
    state.counts[f"num_dropped_{reason}"] += 1
    _discard(state, group)
    state.groups.settle(group, GroupState.DROPPED, reason)


def _discard(state: State, group: GroupRecord) -> None:
    """Forget what was accepted for a group; its senders may forget it too."""
    # Before the log has it on the disk: after a crash the group would only be generated again.
    state.counts["num_tokens_discarded"] += sum(one.num_action_tokens for one in group.members.values())
    state.dedup.make_durable(group.deliveries)
    group.members, group.frames, group.deliveries, group.sequences = {}, [], [], []


def _cut(state: State, cut: BatchCut) -> None:
    # In dispatch order; the plan's order is that of its ranks.
    groups = [state.groups.live.get(group_id) for group_id in sorted({row.group_id for row in cut.plan})]
    held = [group for group in groups if group is not None and group.state is GroupState.HELD]
    if len(held) != len(groups):
        raise ValueError(
            f"a cut at version {cut.version} of {len(groups)} groups, of which {len(held)} are complete by then: log "
            "and checkpoint are not of one run"
        )
    for group in held:
        state.groups.move(group, GroupState.IN_BATCH)
    state.in_flight.append((cut.version, held))


def _step(state: State, step: StepTaken) -> None:
    current, num_steps = state.versions.current, state.settings.lag.steps_per_batch
    if not state.in_flight:
        raise ValueError(f"the end of a batch at version {step.version}: no batch was cut")
    if step.version != current + (0 if step.skipped else num_steps):
        raise ValueError(f"the end of a batch at version {step.version}, skipped={step.skipped}, from {current}")
    if step.bounds is not None:
        state.lag.moved(*step.bounds)  # refused before anything has changed
    _, batch = state.in_flight.popleft()
    for group in batch:
        if step.skipped:
            # The step was not finite: what caused it is unknown, so none of these groups is tried again.
            state.counts["num_groups_quarantined"] += 1
            _drop(state, group, "quarantined")
        else:
            state.counts["num_groups_trained"] += 1
            state.groups.settle(group, GroupState.TRAINED, step.reason)
    if not step.skipped:
        state.versions.advance(num_steps)
    if step.bounds is not None:
        state.lag.set_bounds(*step.bounds)
