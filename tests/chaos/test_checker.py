"""The checker itself: an honest history passes, and every guarantee has broken histories that it must catch."""

import copy
from itertools import count

import pytest

from tests.chaos.checker import check
from tests.chaos.history import Event, History, read_history

CLOCK = count()


def event(role: str, name: str, **fields) -> Event:
    return {"t": float(next(CLOCK)), "role": role, "event": name, **fields}


def start(epoch: int, version: int, digest: str) -> Event:
    return event("learner", "start", epoch=epoch, version=version, max_lag=2, digest=digest)


def publish(epoch: int, version: int) -> Event:
    return event("learner", "publish", epoch=epoch, version=version, root=f"r{version}", content=f"c{version}")


def train(epoch: int, version: int, *frames, ref=None) -> Event:
    return event("learner", "train", epoch=epoch, version=version, frames=[list(one) for one in frames],
                 refs=[list(ref or (epoch, version))], digest=f"d{version + 1}")


def deliver(inc: int, seq: int, group: int, members=(0, 1), *, kind="accepted") -> list[Event]:
    return [
        event("actor", "send", inc=inc, seq=seq, group=group, members=list(members)),
        event("hub", "accept", actor="a", inc=inc, seq=seq, kind=kind),
        event("actor", "settled", inc=inc, seqs=[seq]),
    ]


def frame(inc: int, seq: int, group: int) -> tuple:
    return (inc, seq, group, [0, 1])


def install(inc: int, epoch: int, version: int, content: str = "") -> Event:
    return event("actor", "install", inc=inc, epoch=epoch, version=version, root=f"r{version}",
                 content=content or f"c{version}")


def honest() -> list[Event]:
    """Two epochs: group 1 is trained and lost in the first, sent again and trained in the second."""
    return [
        start(1, 0, "d0"), publish(1, 0), event("hub", "welcome", actor="a", inc=7), install(7, 1, 0),
        *deliver(7, 1, 0), train(1, 0, frame(7, 1, 0)), publish(1, 1), install(7, 1, 1),
        event("learner", "saved", epoch=1, version=1), event("actor", "durable", inc=7, seqs=[1]),
        *deliver(7, 2, 1), train(1, 1, frame(7, 2, 1)),
        start(2, 1, "d1"), publish(2, 1), event("hub", "welcome", actor="a", inc=7), install(7, 2, 1),
        *deliver(7, 2, 1), train(2, 1, frame(7, 2, 1)), *deliver(7, 3, 2),
        event("learner", "closing"),
        event("learner", "end", next_id=4, live=[2, 3], held=[frame(7, 3, 2)]), event("actor", "exit", inc=7, code=0),
    ]


def rules(events: list[Event]) -> set[str]:
    return {rule for rule, _ in check(events).violations}


def test_an_honest_history_with_a_crash_has_no_violation():
    result = check(honest())
    assert result.violations == []
    assert (result.counts["trajectories"], result.counts["batches"], result.counts["starts"]) == (6, 3, 2)


def unended(**fields) -> list[Event]:
    """A power cut takes the end of a batch whose version actors have; the successor trains that batch again."""
    return [
        start(1, 0, "d0"), publish(1, 0), event("hub", "welcome", actor="a", inc=7), install(7, 1, 0),
        *deliver(7, 1, 0), train(1, 0, frame(7, 1, 0)), publish(1, 1), install(7, 1, 1),
        start(2, 0, "d0") | {"unended": 1}, train(2, 0, frame(7, 1, 0), ref=(1, 0)) | fields,
        publish(2, 1), event("hub", "welcome", actor="a", inc=7), *deliver(7, 2, 1),
        train(2, 1, frame(7, 2, 1), ref=(1, 1)),
        event("learner", "closing"),
        event("learner", "end", next_id=2, live=[], held=[]), event("actor", "exit", inc=7, code=0),
    ]


def test_a_batch_whose_end_is_lost_may_be_trained_again_to_the_same_parameters_only():
    assert check(unended()).violations == []
    assert "G2" in rules(unended(digest="other"))
    assert "G2" in rules([{**one, "unended": 0} if one["event"] == "start" else one for one in unended()])


def insert(after: int, *events: Event):
    """Put these events after the one at this place."""
    return lambda history: history[: after + 1] + [copy.deepcopy(one) for one in events] + history[after + 1 :]


def change(at: int, **fields):
    def changed(history: list[Event]) -> list[Event]:
        history[at] = {**history[at], **fields}
        return history
    return changed


def without(at: int):
    return lambda history: history[:at] + history[at + 1 :]


def place(role: str, name: str, nth: int = 0) -> int:
    found = [at for at, one in enumerate(honest()) if (one["role"], one["event"]) == (role, name)]
    return found[nth]


TRAIN_0, TRAIN_2 = place("learner", "train"), place("learner", "train", 2)
START_2, SAVED, END = place("learner", "start", 1), place("learner", "saved"), place("learner", "end")

BROKEN = {
    "the same delivery twice in one batch": ("G1", change(TRAIN_2, frames=[frame(7, 2, 1), frame(7, 2, 1)])),
    "a group of the surviving lineage again": ("G1", change(TRAIN_2, frames=[frame(7, 1, 0)])),
    "trained and never sent": ("G1", change(TRAIN_0, frames=[frame(8, 1, 0)])),
    "accepted in the last epoch and gone": ("G1", change(END, held=[])),
    "accepted in the last epoch and half of it gone": ("G1", change(END, held=[(7, 3, 2, [1])])),
    "a prompt that ended nowhere": ("G1", change(END, live=[2])),
    "a prompt that was dropped after the checkpoint, and ended nowhere": ("G1", lambda history: insert(
        START_2 - 1, event("hub", "drop", group=3))(change(END, live=[2])(history))),
    "answered and never sent": ("G1", insert(END - 2, event("actor", "settled", inc=7, seqs=[99]))),
    "a live actor's group is lost over a crash": ("G1", change(TRAIN_2, frames=[frame(7, 3, 2)])),
    "resumed before an announced checkpoint": ("G2", change(START_2, version=0, digest="d0")),
    "resumed with other parameters": ("G2", change(START_2, digest="other")),
    "durable, and its training did not survive": (
        "G2", lambda history: change(START_2 - 1, version=0, digest="d0")(without(SAVED)(history))),
    "a token beyond max_lag": ("G3", lambda history: insert(TRAIN_2, *[
        train(2, version, ref=(2, 1)) for version in range(2, 5)])(history)),
    "a token of a dead branch": ("G3", change(TRAIN_2, refs=[[1, 2]])),
    "a token of the future": ("G3", change(TRAIN_0, refs=[[1, 1]])),
    "bytes that were not published": ("G4", insert(TRAIN_0, install(8, 1, 0, "torn"))),
    "a version that was not published": ("G4", insert(TRAIN_0, install(8, 9, 9))),
    "an install that goes back": ("G5", insert(END, install(7, 1, 1))),
    "an install twice": ("G5", insert(END, install(7, 2, 1))),
    "a publication that goes back": ("G5", insert(END, publish(1, 1))),
    "an epoch that is used twice": ("G5", change(START_2, epoch=1)),
    "an older learner that still saves": ("G5", insert(END, event("learner", "saved", epoch=1, version=3))),
    "an older learner that still trains": ("G5", insert(END, train(1, 2))),
    "a superseded incarnation is welcomed": ("fence", insert(
        START_2, *[event("hub", "welcome", actor="b", inc=inc) for inc in (1, 2, 1)])),
    "a superseded incarnation delivers": ("fence", insert(
        START_2, *[event("hub", "welcome", actor="b", inc=inc) for inc in (1, 2)],
        event("hub", "accept", actor="b", inc=1, seq=1, kind="accepted"))),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_history_is_caught_by_its_rule(name):
    rule, spoil = BROKEN[name]
    assert rule in rules(spoil(honest()))


def test_what_died_with_learner_and_actor_is_counted_and_not_a_violation():
    events = [
        start(1, 0, "d0"), *deliver(7, 1, 0), start(2, 0, "d0"), *deliver(8, 1, 0), train(2, 0, frame(8, 1, 0)),
        event("learner", "end", next_id=1, live=[], held=[]), event("actor", "exit", inc=8, code=0),
    ]
    result = check(events)
    assert result.violations == [] and result.counts["lost_on_crash"] == 1


AGAIN = frame(8, 1, 1)


def sent_again_and_damaged(*trained, live: tuple[int, ...] = (), dropped: tuple[Event, ...] = ()) -> list[Event]:
    """Group 1 of actor 7 is accepted; the learner dies before a checkpoint, and what 7 sends again arrives damaged."""
    return [
        start(1, 0, "d0"), *deliver(7, 1, 0), train(1, 0, frame(7, 1, 0)), *deliver(7, 2, 1),
        start(2, 0, "d0"), *deliver(7, 1, 0), train(2, 0, frame(7, 1, 0)), event("actor", "send", inc=7, seq=2, group=1,
                                                                             members=[0, 1]),
        *deliver(8, 1, 1), *(train(2, 1, one) for one in trained), *dropped, event("learner", "closing"),
        event("learner", "end", next_id=2, live=live, held=[]), event("actor", "exit", inc=7, code=0),
        event("actor", "exit", inc=8, code=0),
    ]


@pytest.mark.parametrize(
    "history",
    [sent_again_and_damaged(AGAIN), sent_again_and_damaged(dropped=(event("hub", "drop", group=1),))],
    ids=["trained", "dropped"],
)
def test_a_delivery_is_not_lost_if_another_one_brought_its_trajectories(history):
    assert check(history).violations == []


@pytest.mark.parametrize(
    ("history", "lost"),
    [
        (sent_again_and_damaged(live=(1,)), "[(1, 0), (1, 1)] of (7, 2), accepted in epoch 1"),
        (sent_again_and_damaged((8, 1, 1, [0])), "[(1, 1)] of (7, 2), accepted in epoch 1"),
        (sent_again_and_damaged((8, 1, 1, [0])), "[(1, 1)] of (8, 1), accepted in epoch 2"),
    ],
    ids=["its group is open", "one member is missing", "of the last epoch"],
)
def test_the_same_history_without_that_other_delivery_is_a_loss(history, lost):
    assert any(rule == "G1" and text.startswith(lost) for rule, text in check(history).violations)


def test_groups_that_arrive_after_the_last_snapshot_are_not_lost():
    assert check([*honest(), *deliver(7, 9, 3)]).violations == []


def test_a_line_that_a_killed_process_did_not_finish_is_left_out(tmp_path):
    history = History(tmp_path, "actor")
    history.add("send", inc=1, seq=1, members=[0])
    with open(next(tmp_path.glob("*.jsonl")), "ab") as file:
        file.write(b'{"t": 3.0, "role": "act')
    assert [one["event"] for one in read_history(tmp_path)] == ["send"]
