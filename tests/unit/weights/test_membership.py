"""Membership epochs under every order of joins, leaves, reports, failures and deadlines."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from streamrl.messages import BroadcastForm as Form
from streamrl.messages import BroadcastReport, BroadcastStage, NcclState, VersionRef
from streamrl.messages import BroadcastSend as Send
from streamrl.weights.gpu.membership import MAX_FAILURES, Abort, Invite, Membership, Phase, Pull, TurnOff

INIT_S, BUCKET_S, GRACE_S = 20.0, 10.0, 5.0


def v(number: int) -> VersionRef:
    return VersionRef(1, number)


class Played(Membership):
    """The machine, and short words for what a hub hears."""

    def __init__(self) -> None:
        super().__init__(init_deadline_s=INIT_S, bucket_deadline_s=BUCKET_S, grace_s=GRACE_S)

    def hears(self, stage: str, now: float = 0.0, *, epoch: int | None = None, **more) -> list:
        report = BroadcastReport(self.epoch if epoch is None else epoch, BroadcastStage[stage], **more)
        return self.broadcaster_said(report, now)

    def loaded(self, version: int, now: float = 0.0, error: str = "") -> list:
        return self.hears("LOADED", now, epoch=0, ref=v(version), error=error)

    def member(self, name: str, now: float = 0.0, **state) -> list:
        return self.member_said(name, NcclState(**state), now)


def reached(phase: Phase, *names: str, now: float = 0.0) -> Played:
    """A machine whose first epoch, version 1 for these members, has come so far at that moment."""
    one = Played()
    one.broadcaster_up()
    one.set_candidates(dict.fromkeys(names, 1), now)
    steps = (
        (Phase.LOADING, lambda: one.published(v(1), now)), (Phase.NAMING, lambda: one.loaded(1, now)),
        (Phase.FORMING, lambda: one.hears("NAMED", now, unique_id=b"id")),
        (Phase.SENDING, lambda: [one.hears("FORMED", now), *(one.member(name, now, formed=1) for name in names)]),
    )
    for at, step in steps:
        if one.phase is not phase:
            step()
            assert one.phase is at
    return one


def standing(*names: str) -> Played:
    """A machine whose first epoch has brought version 1."""
    one = reached(Phase.SENDING, *names)
    assert one.hears("SENT") == [] and one.phase is Phase.IDLE
    return one


def test_a_version_is_sent_when_every_member_has_reported_and_not_before():
    one = Played()
    one.broadcaster_up()
    one.set_candidates({"a": 2, "b": 1}, 0.0)

    assert one.published(v(1), 0.0) == [] and one.expects("a", v(1))
    assert one.loaded(1, 1.0) == [Form(1, world=4)]
    assert one.hears("NAMED", 1.0, unique_id=b"id") == [Invite(1, v(1), b"id", 4, {"a": 1, "b": 3})]
    assert one.member("a", 2.0, formed=1) == [] and one.hears("FORMED", 2.0) == []
    assert one.member("b", 3.0, formed=1) == [Send(1, v(1))]
    assert one.hears("SENT", 4.0) == [] and one.phase is Phase.IDLE


def test_an_epoch_brings_version_after_version_until_an_actor_joins():
    one = standing("a", "b")
    for version in (2, 3):
        assert one.published(v(version), 5.0) == []
        assert one.loaded(version, 5.0) == [Invite(1, v(version), b"id", 3, {"a": 1, "b": 2}), Send(1, v(version))]
        one.hears("SENT", 6.0)

    assert one.set_candidates({"a": 1, "b": 1, "c": 1}, 7.0) == [], "a healthy epoch is not ended for a joiner"
    one.published(v(4), 8.0)
    assert one.loaded(4, 8.0) == [Form(2, world=4)] and one.num_formed == 1


def test_a_member_that_leaves_between_two_versions_ends_the_epoch_and_the_next_one_forms_another():
    one = standing("a", "b")

    assert one.set_candidates({"b": 1}, 5.0) == [Abort(1, "a left", hung=False)] and one.members == {}
    one.published(v(2), 6.0)
    assert one.loaded(2, 6.0) == [Form(2, world=2)]


def test_a_broadcaster_that_ends_between_two_versions_is_no_failure():
    one = standing("a")
    assert one.broadcaster_down() == [] and one.members == {} and one._failures == 0
    assert one.published(v(2), 1.0) == [Pull(v(2), ("a",))]
    one.broadcaster_up()
    one.published(v(3), 2.0)
    assert one.loaded(3, 2.0) == [Form(2, world=2)]


PULLED = [  # (where it happens, what happens, the abort, whether it is a failure)
    (Phase.LOADING, lambda one: one.loaded(1, error="no such file"), None, False),
    (Phase.LOADING, lambda one: one.tick(INIT_S + BUCKET_S), None, False),
    (Phase.LOADING, lambda one: one.broadcaster_down(), None, False),
    (Phase.NAMING, lambda one: one.tick(INIT_S), ("the broadcaster gave no unique id in time", True), True),
    (Phase.NAMING, lambda one: one.hears("FAILED", error="no cupy"), ("no cupy", False), True),
    (Phase.FORMING, lambda one: one.tick(INIT_S), ("not formed in 20 s without a, b", True), True),
    (Phase.FORMING, lambda one: one.member("b", failed=1), ("b reported a failure", True), True),
    (Phase.FORMING, lambda one: one.hears("FAILED", error="refused"), ("refused", False), True),
    (Phase.SENDING, lambda one: one.member("b", failed=1), ("b reported a failure", False), True),
    (Phase.SENDING, lambda one: one.tick(INIT_S + BUCKET_S + GRACE_S),
     ("the broadcaster sent nothing more in time", True), True),
    (Phase.SENDING, lambda one: one.broadcaster_down(), None, True),
]


@pytest.mark.parametrize(("phase", "event", "abort", "counts"), PULLED)
def test_whatever_ends_an_epoch_everybody_pulls_its_version(phase, event, abort, counts):
    one = reached(phase, "a", "b")

    effects = event(one)

    assert effects == [*([Abort(1, *abort)] if abort else []), Pull(v(1), ("a", "b"))]
    assert one.phase is Phase.IDLE and not one.expects("a", v(1)) and one._failures == counts
    if abort and abort[1]:  # the broadcaster's successor is not up yet
        assert one.published(v(2), 50.0) == [Pull(v(2), ("a", "b"))]


def test_the_members_that_the_others_wait_for_are_named():
    one = reached(Phase.FORMING, "a", "b")
    one.member("a", joining=1)  # it cannot form anything without b
    assert one.tick(INIT_S - 0.1) == []
    assert one.tick(INIT_S)[0].reason == "not formed in 20 s without b"

    one = reached(Phase.FORMING, "a", "b")
    for name in "ab":
        one.member(name, joining=1)
    assert one.tick(INIT_S)[0].reason == "not formed in 20 s although all members came"


def test_a_member_that_leaves_ends_the_epoch_at_once_and_that_is_no_failure():
    one = reached(Phase.SENDING, "a", "b")

    assert one.set_candidates({"b": 1}, 5.0) == [Abort(1, "a left", hung=False), Pull(v(1), ("b",))]
    assert one._failures == 0
    one.published(v(2), 6.0)
    assert one.loaded(2, 6.0) == [Form(2, world=2)]


def test_a_broadcast_that_moves_has_its_deadline_again():
    one = reached(Phase.SENDING, "a")
    one.hears("PROGRESS", 34.0)
    assert one.tick(34.0 + BUCKET_S + GRACE_S - 0.1) == []
    assert one.tick(34.0 + BUCKET_S + GRACE_S) != []


def test_after_three_failures_in_a_row_no_epoch_is_formed_any_more_and_that_is_said_once():
    one = reached(Phase.NAMING, "a")
    one.set_candidates({}, 0.0)  # no failure
    one.set_candidates({"a": 1}, 0.0)
    for version in range(2, 2 + MAX_FAILURES):
        one.published(v(version), 0.0)
        one.loaded(version)
        effects = one.hears("FAILED", error="broken")
        assert effects[-1] == Pull(v(version), ("a",)) and (TurnOff("broken") in effects) == one.off

    assert one.off
    for version in (9, 10):
        assert one.published(v(version), 1e6) == [Pull(v(version), ("a",))] and one.loaded(version) == []


def test_a_complete_broadcast_forgives_the_failures_before():
    one = standing("a")
    one.published(v(2), 0.0)
    one.loaded(2)
    one.hears("FAILED", error="broken")
    assert one._failures == 1
    one.published(v(3), 0.0)
    one.loaded(3)
    one.hears("NAMED", unique_id=b"id")
    one.hears("FORMED")
    one.member("a", formed=2)
    one.hears("SENT")
    one.published(v(4), 0.0)
    assert one.loaded(4)[-1] == Send(2, v(4)) and one._failures == 0


def test_bytes_that_arrive_damaged_every_time_count_as_failures_although_the_broadcaster_has_sent_them():
    one = standing("a", "b")
    for failures in range(1, 1 + MAX_FAILURES):
        effects = one.member("b", failed=one.epoch)
        assert effects[0] == Abort(failures, "b reported a failure", hung=False) and one._failures == failures
        one.published(v(1 + failures), 0.0)
        one.loaded(1 + failures)
        one.hears("NAMED", unique_id=b"id")
        one.hears("FORMED")
        for name in "ab":
            one.member(name, formed=one.epoch)
        one.hears("SENT")
    assert one.off and one.num_formed == MAX_FAILURES


def test_a_version_published_during_a_broadcast_follows_it_and_outsiders_pull_at_once():
    one = reached(Phase.SENDING, "a")
    one.set_candidates({"a": 1, "b": 1}, 1.0)
    assert one.published(v(2), 2.0) == [Pull(v(2), ("b",))] and one.expects("a", v(2))
    one.loaded(2, 2.5)
    assert one.hears("SENT", 3.0) == [Form(2, world=3)]

    one = reached(Phase.SENDING, "a")
    one.published(v(2), 2.0)
    one.loaded(2, 2.5)
    assert one.hears("SENT", 3.0) == [Invite(1, v(2), b"id", 2, {"a": 1}), Send(1, v(2))]

    one = reached(Phase.SENDING, "a")
    one.published(v(2), 2.0)
    assert one.hears("FAILED", error="x")[-1] == Pull(v(2), ("a",)), "the newest, where the one before failed"


def test_a_newer_version_replaces_one_of_which_no_member_was_told():
    one = reached(Phase.NAMING, "a")
    assert one.published(v(2), 1.0) == []
    assert one.hears("NAMED", 1.0, unique_id=b"id")[0].ref == v(2)


def test_a_version_that_the_broadcaster_cannot_read_is_pulled_at_once():
    one = standing("a")
    one.published(v(2), 1.0)
    assert one.loaded(2, 1.0, error="no such file") == [Pull(v(2), ("a",))] and one.members == {"a": 1}

    one = reached(Phase.NAMING, "a")  # the epoch that was begun for the version before has none to bring
    one.published(v(2), 1.0)
    assert one.loaded(2, 1.0, error="no such file") == [Abort(1, "no such file", hung=False), Pull(v(2), ("a",))]
    assert one._failures == 0

    one = reached(Phase.SENDING, "a")
    one.published(v(2), 1.0)
    assert one.loaded(2, 1.0, error="no such file") == [Pull(v(2), ("a",))] and not one.expects("a", v(2))
    assert one.hears("SENT", 2.0) == [] and one.phase is Phase.IDLE


def test_actors_do_not_wait_for_a_learner_that_publishes_faster_than_documents_are_read():
    one = reached(Phase.LOADING, "a")
    assert one.published(v(2), 1.0) == [Pull(v(2), ("a",))]
    assert one.loaded(1) == [] and one.phase is Phase.IDLE


@pytest.mark.parametrize("names", [(), ("a",)])
def test_without_a_broadcaster_or_without_members_everybody_pulls(names):
    one = Membership()
    one.set_candidates(dict.fromkeys(names, 1), 0.0)

    assert one.published(v(1), 0.0) == ([Pull(v(1), names)] if names else [])


def test_words_of_a_dead_epoch_change_nothing():
    one = reached(Phase.SENDING, "a", "b")
    one.hears("FAILED", error="unusable")

    late = [one.hears(stage, 2.0) for stage in ("NAMED", "FORMED", "PROGRESS", "SENT", "FAILED")]
    late += [one.member("a", 2.0, formed=1), one.member("b", 2.0, failed=1)]
    assert late == [[]] * 7 and one.phase is Phase.IDLE and one.epoch == 1


# --- every order ----------------------------------------------------------------------------------------------------

NAMES = st.sampled_from("abcd")


class Epochs(RuleBasedStateMachine):
    """The machine together with a broadcaster and members that answer, fail, die and come back in any order."""

    @initialize()
    def start(self) -> None:
        self.one = Played()
        self.now, self.version = 0.0, 0
        self.present: dict[str, int] = {}
        self.up = self.off = False
        self.dead: set[int] = set()
        self.frozen: dict[int, int] = {}
        self.invited: dict[int, set[str]] = {}
        self.formed: dict[int, set[str | None]] = {}
        self.brought: dict[int, int] = {}
        self.sending = 0
        self.told: dict[str, int] = {}

    def carry_out(self, effects: list) -> None:
        for effect in effects:
            match effect:
                case Form(epoch, world):
                    assert epoch == max(self.frozen, default=0) + 1 and self.up and not self.off
                    assert world == 1 + sum(self.one.members.values()) > 1
                    self.frozen[epoch], self.formed[epoch] = world, set()
                case Invite(epoch, ref, unique_id, world, first_rank):
                    assert epoch not in self.dead and unique_id == b"%d" % epoch and world == self.frozen[epoch]
                    assert set(first_rank) <= set(self.present)
                    assert self.invited.setdefault(epoch, set(first_rank)) == set(first_rank)  # one epoch, one group
                    assert ref.version > self.brought.get(epoch, 0) and not self.sending  # one at a time, in order
                    self.brought[epoch] = ref.version
                    for member in first_rank:
                        self.told[member] = max(self.told.get(member, 0), ref.version)
                case Send(epoch, ref):
                    assert epoch not in self.dead and ref.version == self.brought[epoch]
                    assert self.formed[epoch] == {None, *self.invited[epoch]}
                    self.sending = epoch
                case Abort(epoch, reason, hung):
                    assert epoch not in self.dead and reason and self.up
                    self.dead.add(epoch)
                    self.sending = 0
                    self.up = self.up and not hung
                case TurnOff(reason):
                    assert reason and not self.off
                    self.off = True
                case Pull(ref, members):
                    for member in members:
                        self.told[member] = max(self.told.get(member, 0), ref.version)

    @rule(name=NAMES, ranks=st.integers(1, 2))
    def join(self, name: str, ranks: int) -> None:
        self.present.setdefault(name, ranks)
        self.carry_out(self.one.set_candidates(self.present, self.now))

    @rule(name=NAMES)
    def leave(self, name: str) -> None:
        self.present.pop(name, None)
        self.told.pop(name, None)
        self.carry_out(self.one.set_candidates(self.present, self.now))

    @rule()
    def publish(self) -> None:
        self.version += 1
        self.carry_out(self.one.published(v(self.version), self.now))

    @precondition(lambda self: self.up and self.version)
    @rule(late=st.integers(0, 1), error=st.sampled_from(["", "", "", "damaged"]))
    def loads(self, late: int, error: str) -> None:
        self.carry_out(self.one.loaded(self.version - late, self.now, error))

    @precondition(lambda self: not self.up)
    @rule()
    def sender_returns(self) -> None:
        self.up = True
        self.one.broadcaster_up()

    @precondition(lambda self: self.up)
    @rule()
    def sender_dies(self) -> None:
        self.up, self.sending = False, 0
        self.dead |= self.frozen.keys()
        self.carry_out(self.one.broadcaster_down())

    @precondition(lambda self: self.up and self.one.epoch)
    @rule(late=st.integers(0, 1), stage=st.sampled_from(["NAMED", "FORMED", "PROGRESS", "SENT", "FAILED"]))
    def sender_says(self, late: int, stage: str) -> None:
        epoch = self.one.epoch - late
        if stage == "FORMED" and epoch in self.invited:
            self.formed[epoch].add(None)
        if stage == "SENT" and self.sending == epoch:
            self.sending = 0
        if stage != "SENT" or self.one.phase is Phase.SENDING:
            self.carry_out(self.one.hears(stage, self.now, epoch=epoch, unique_id=b"%d" % epoch, error="broken"))

    @precondition(lambda self: self.one.members)
    @rule(who=NAMES, late=st.integers(0, 1), state=st.sampled_from(["joining", "formed", "failed"]))
    def member_says(self, who: str, late: int, state: str) -> None:
        epoch = self.one.epoch - late
        if epoch not in self.dead and who in self.invited.get(epoch, ()):
            if state == "formed":
                self.formed[epoch].add(who)
            self.carry_out(self.one.member(who, self.now, **{state: epoch}))

    @precondition(lambda self: self.up and not self.off and self.present and self.one.phase is Phase.IDLE)
    @rule()
    def goes_well(self) -> None:
        """A publish to which everybody answers at once, which random words seldom make."""
        self.publish()
        self.loads(0, "")
        for stage in ("NAMED", "FORMED"):
            self.sender_says(0, stage)
        for name in self.present:
            self.member_says(name, 0, "formed")
        brought, formed = self.one.num_broadcasts, self.one.num_formed
        self.sender_says(0, "SENT")
        assert self.one.num_broadcasts == brought + 1 and self.one.members == self.present
        assert formed == self.one.num_formed <= self.one.epoch

    @rule(seconds=st.sampled_from([0.1, 1.0, 5.0, 11.0, 21.0, 31.0, 40.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.carry_out(self.one.tick(self.now))

    @invariant()
    def an_epoch_has_only_members_that_are_here(self) -> None:
        if self.one.members:
            assert self.one.epoch not in self.dead and self.up and set(self.one.members) <= set(self.present)
        else:
            assert self.one.phase in (Phase.IDLE, Phase.LOADING)
        assert (self.one.phase is Phase.SENDING) == bool(self.sending)

    def teardown(self) -> None:
        """After any history: once no event follows, every present member is told of the newest version."""
        if not self.version:
            return
        self.publish()
        for _ in range(8):
            self.now += INIT_S + BUCKET_S + GRACE_S
            self.carry_out(self.one.tick(self.now))
        assert self.one.phase is Phase.IDLE
        assert {member for member in self.present if self.told.get(member) != self.version} == set()


TestEveryOrder = Epochs.TestCase
TestEveryOrder.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
