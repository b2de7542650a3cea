"""Membership epochs under every order of joins, leaves, reports, failures and deadlines."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from streamrl.messages import BroadcastForm as Form
from streamrl.messages import BroadcastSend as Send
from streamrl.messages import VersionRef
from streamrl.weights.gpu.membership import JOIN_INTERVAL_S, MAX_FAILURES, Abort, Invite, Membership, Phase, Pull

INIT_S, BUCKET_S, GRACE_S = 20.0, 10.0, 5.0


def v(number: int) -> VersionRef:
    return VersionRef(1, number)


def machine(*names: str) -> Membership:
    one = Membership(init_deadline_s=INIT_S, bucket_deadline_s=BUCKET_S, grace_s=GRACE_S)
    one.broadcaster_up()
    one.set_candidates(dict.fromkeys(names, 1), 0.0)
    return one


def live(*names: str, now: float = 0.0) -> Membership:
    """An epoch of these members that has carried version 1."""
    one = machine(*names)
    one.published(v(1), now)
    one.named(1, b"id", now)
    for member in (None, *names):
        one.formed(member, 1, now)
    one.sent(1, now)
    assert one.phase is Phase.LIVE
    return one


def test_a_version_is_sent_when_every_member_has_reported_and_not_before():
    one = machine("a", "b")

    assert one.published(v(1), 0.0) == [Form(1, world=3)]
    assert one.named(1, b"id", 1.0) == [Invite(1, v(1), b"id", 3, {"a": 1, "b": 2})]
    assert one.formed("a", 1, 2.0) == [] and one.formed(None, 1, 2.0) == []
    assert one.formed("b", 1, 3.0) == [Send(1, v(1))]
    assert one.sent(1, 4.0) == [] and one.phase is Phase.LIVE


def test_an_actor_takes_as_many_ranks_as_it_contributes():
    one = machine()
    one.set_candidates({"a": 4, "b": 2, "c": 1}, 0.0)

    assert one.published(v(1), 0.0) == [Form(1, world=8)]
    assert one.named(1, b"id", 0.0)[0].first_rank == {"a": 1, "b": 5, "c": 7}


def test_an_epoch_is_reused_while_its_members_stay():
    one = live("a", "b")

    for version in range(2, 5):
        invite, send = one.published(v(version), float(version))
        assert (invite.epoch, send) == (1, Send(1, v(version)))
        one.sent(1, float(version))
    assert one.num_formed == 1 and one.num_broadcasts == 4


def test_a_member_that_leaves_ends_the_epoch_at_once_and_the_next_publish_forms_one_without_it():
    one = live("a", "b")

    assert one.set_candidates({"b": 1}, 5.0) == [Abort(1, "a left", hung=False)]
    assert one.published(v(2), 6.0) == [Form(2, world=2)]


def test_a_member_that_leaves_in_the_middle_of_a_broadcast_is_followed_by_a_pull_and_an_epoch_without_it():
    one = live("a", "b")
    one.published(v(2), 5.0)

    assert one.set_candidates({"b": 1}, 5.0) == [Abort(1, "a left", hung=False), Pull(v(2), ("b",))]
    assert one.published(v(3), 6.0) == [Form(2, world=2)]
    assert one.named(2, b"id", 6.0) == [Invite(2, v(3), b"id", 2, {"b": 1})]


def test_joins_alone_wait_for_thirty_seconds_and_pull_meanwhile():
    one = live("a", now=100.0)
    one.set_candidates({"a": 1, "b": 1}, 101.0)

    pull, invite, send = one.published(v(2), 100.0 + JOIN_INTERVAL_S - 0.1)
    assert pull == Pull(v(2), ("b",)) and invite.epoch == send.epoch == 1
    one.sent(1, 129.95)
    assert one.published(v(3), 100.0 + JOIN_INTERVAL_S) == [Abort(1, "b joined", hung=False), Form(2, world=3)]


def test_a_member_that_does_not_form_is_excluded_and_the_hung_broadcaster_is_ended():
    one = machine("a", "b")
    one.published(v(1), 0.0)
    one.named(1, b"id", 0.0)
    one.joined("a", 1, 1.0)  # it cannot form anything without b

    assert one.tick(INIT_S - 0.1) == []
    assert one.tick(INIT_S) == [
        Abort(1, "not formed in 20 s without b", hung=True), Pull(v(1), ("b",)), Pull(v(1), ("a",))
    ]
    one.set_candidates({"a": 1, "b": 1}, INIT_S + 1)
    assert one.published(v(2), INIT_S + 4) == [Pull(v(2), ("a",))]  # the broadcaster's successor is not up yet
    one.broadcaster_up()
    assert one.published(v(3), INIT_S + 5) == [Form(2, world=2)]
    assert one.named(2, b"id", INIT_S + 5)[0].first_rank == {"a": 1}


def test_when_every_member_joined_and_it_still_hangs_no_member_is_excluded():
    one = machine("a", "b")
    one.published(v(1), 0.0)
    one.named(1, b"id", 0.0)
    one.joined("a", 1, 1.0)
    one.joined("b", 1, 1.0)

    assert one.tick(INIT_S) == [
        Abort(1, "not formed in 20 s although all members came", hung=True), Pull(v(1), ("a", "b"))
    ]
    one.broadcaster_up()
    assert one.published(v(2), INIT_S + 5) == [Form(2, world=3)]


def test_a_member_that_was_left_out_may_join_again_later():
    one = machine("a", "b")
    one.published(v(1), 0.0)
    one.named(1, b"id", 0.0)
    # The broadcaster is stuck in the call that waits for b.
    assert one.failed("b", 1, "no route", 1.0)[0] == Abort(1, "no route", hung=True)
    one.broadcaster_up()
    one.published(v(2), 2.0)
    one.named(2, b"id", 2.0)
    one.formed(None, 2, 2.0)
    one.formed("a", 2, 2.0)
    one.sent(2, 3.0)
    one.set_candidates({"a": 1, "b": 1}, 1.0 + JOIN_INTERVAL_S)

    assert one.published(v(3), 2.0 + JOIN_INTERVAL_S)[-1] == Form(3, world=3)


def test_after_a_failure_of_a_member_everybody_pulls_and_the_next_publish_goes_without_it():
    one = machine("a", "b", "c")
    one.published(v(1), 0.0)
    one.named(1, b"id", 0.0)
    one.formed(None, 1, 0.0)

    assert one.failed("a", 1, "broken", 0.0) == [
        Abort(1, "broken", hung=False), Pull(v(1), ("a",)), Pull(v(1), ("b", "c"))
    ]
    assert one.published(v(2), 0.0) == [Form(2, world=3)]


def test_after_three_failures_in_a_row_everybody_pulls_and_nothing_is_formed_for_a_while():
    one = live("a", "b")
    for version in range(2, 3 + MAX_FAILURES):
        one.published(v(version), 0.0)
        assert one.failed(None, version - 1, "broken", 0.0)[-1] == Pull(v(version), ("a", "b"))

    assert one.published(v(5), JOIN_INTERVAL_S - 0.1) == [Pull(v(5), ("a", "b"))]
    assert one.published(v(6), JOIN_INTERVAL_S) == [Form(4, world=3)]


def test_a_broadcast_that_stands_still_ends_the_broadcaster_and_one_that_moves_does_not():
    one = live("a")
    one.published(v(2), 10.0)
    first = INIT_S + BUCKET_S + GRACE_S
    one.progressed(1, 10.0 + first - 1)

    assert one.tick(10.0 + first + 1) == []
    assert one.tick(10.0 + first - 1 + BUCKET_S + GRACE_S) == [
        Abort(1, "the broadcaster sent nothing more in time", hung=True), Pull(v(2), ("a",))
    ]


def test_a_version_published_during_a_broadcast_follows_it():
    one = live("a")
    one.published(v(2), 1.0)

    assert one.published(v(3), 2.0) == [] and one.expects("a", v(3))
    assert [type(effect) for effect in one.sent(1, 3.0)] == [Invite, Send]


def test_a_newer_version_takes_the_place_of_one_that_waits_for_its_epoch():
    one = machine("a")
    one.published(v(1), 0.0)
    one.named(1, b"id", 0.0)

    assert one.published(v(2), 1.0) == [Invite(1, v(2), b"id", 2, {"a": 1})]
    one.formed("a", 1, 2.0)
    assert one.formed(None, 1, 2.0) == [Send(1, v(2))]


@pytest.mark.parametrize("names", [(), ("a",)])
def test_without_a_broadcaster_or_without_members_everybody_pulls(names):
    one = Membership()
    one.set_candidates(dict.fromkeys(names, 1), 0.0)

    assert one.published(v(1), 0.0) == ([Pull(v(1), names)] if names else [])


def test_a_broadcaster_that_ends_takes_its_epoch_with_it_and_its_successor_forms_another():
    one = live("a")
    one.published(v(2), 1.0)

    assert one.broadcaster_down(2.0) == [Pull(v(2), ("a",))]
    one.broadcaster_up()
    assert one.published(v(3), 5.0) == [Form(2, world=2)]


def test_words_of_a_dead_epoch_change_nothing():
    one = live("a", "b")
    one.published(v(2), 1.0)
    one.failed(None, 1, "unusable", 1.0)

    for late in (one.named(1, b"old", 2.0), one.formed("a", 1, 2.0), one.sent(1, 2.0), one.failed("b", 1, "too", 2.0)):
        assert late == []
    assert one.phase is Phase.IDLE and one.epoch == 1


# --- every order ----------------------------------------------------------------------------------------------------

NAMES = st.sampled_from("abcd")


class Epochs(RuleBasedStateMachine):
    """The machine beside a broadcaster and members that answer, fail, die and come back in any order."""

    @initialize()
    def start(self) -> None:
        self.one = Membership(init_deadline_s=INIT_S, bucket_deadline_s=BUCKET_S, grace_s=GRACE_S)
        self.now, self.version = 0.0, 0
        self.present: dict[str, int] = {}
        self.up = False
        self.dead: set[int] = set()
        self.frozen: dict[int, int] = {}
        self.invited: dict[int, set[str]] = {}
        self.reported: dict[int, set[str | None]] = {}
        self.formed_at: dict[int, float] = {}
        self.told: dict[str, int] = {}

    def carry_out(self, effects: list) -> None:
        for effect in effects:
            match effect:
                case Form(epoch, world):
                    assert epoch == max(self.frozen, default=0) + 1 and self.up
                    assert world == 1 + sum(self.one.members.values()) > 1
                    self.frozen[epoch], self.reported[epoch] = world, set()
                case Invite(epoch, ref, unique_id, world, first_rank):
                    assert epoch not in self.dead and unique_id == b"%d" % epoch and world == self.frozen[epoch]
                    assert set(first_rank) <= set(self.present)
                    assert self.invited.setdefault(epoch, set(first_rank)) == set(first_rank)  # frozen
                    for member in first_rank:
                        self.told[member] = max(self.told.get(member, 0), ref.version)
                case Send(epoch, ref):
                    assert epoch not in self.dead and ref.version <= self.version
                    assert self.reported[epoch] == {None, *self.invited[epoch]}
                    self.formed_at.setdefault(epoch, self.now)
                case Abort(epoch, reason, hung):
                    assert epoch not in self.dead and reason and self.up
                    self.dead.add(epoch)
                    if "joined" in reason:
                        assert self.now - self.formed_at[epoch] >= JOIN_INTERVAL_S
                    self.up = self.up and not hung
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

    @precondition(lambda self: not self.up)
    @rule()
    def sender_returns(self) -> None:
        self.up = True
        self.one.broadcaster_up()

    @precondition(lambda self: self.up)
    @rule()
    def sender_dies(self) -> None:
        self.up = False
        self.dead |= self.frozen.keys()
        self.carry_out(self.one.broadcaster_down(self.now))

    @rule(late=st.integers(0, 1))
    def sender_names(self, late: int) -> None:
        epoch = self.one.epoch - late
        if self.up and epoch >= 1:
            self.carry_out(self.one.named(epoch, b"%d" % epoch, self.now))

    @rule(who=NAMES)
    def begin(self, who: str) -> None:
        self.carry_out(self.one.joined(who, self.one.epoch, self.now))

    @rule(who=st.one_of(st.none(), NAMES), late=st.integers(0, 1))
    def report(self, who: str | None, late: int) -> None:
        epoch = self.one.epoch - late
        if epoch in self.dead or epoch not in self.invited:
            return
        if who in self.invited[epoch] or (who is None and self.up):
            self.reported[epoch].add(who)
            self.carry_out(self.one.formed(who, epoch, self.now))

    @rule()
    def bucket(self) -> None:
        if self.up:
            self.carry_out(self.one.progressed(self.one.epoch, self.now))

    @rule()
    def sent(self) -> None:
        if self.up and self.one.phase is Phase.SENDING:
            self.carry_out(self.one.sent(self.one.epoch, self.now))

    @rule(who=st.one_of(st.none(), NAMES), late=st.integers(0, 1))
    def fail(self, who: str | None, late: int) -> None:
        epoch = self.one.epoch - late
        if (who in self.one.members) or (who is None and self.up):
            self.carry_out(self.one.failed(who, epoch, "broken", self.now))

    @rule(seconds=st.sampled_from([0.1, 1.0, 5.0, 11.0, 21.0, 31.0, 40.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.carry_out(self.one.tick(self.now))

    @invariant()
    def a_live_epoch_has_only_members_that_are_here(self) -> None:
        if self.one.phase in (Phase.NAMING, Phase.FORMING, Phase.LIVE, Phase.SENDING):
            assert self.one.epoch not in self.dead and self.up
            assert set(self.one.members) <= set(self.present)

    def teardown(self) -> None:
        """After any history: once no event follows, every present member is told of the newest version."""
        if not self.version:
            return
        self.publish()
        for _ in range(8):
            self.now += INIT_S + BUCKET_S + GRACE_S
            self.carry_out(self.one.tick(self.now))
        assert self.one.phase in (Phase.IDLE, Phase.LIVE)
        barred = set(self.one._barred)  # the hub tells those itself
        assert {m for m in self.present if self.told.get(m) != self.version} <= barred


TestEveryOrder = Epochs.TestCase
TestEveryOrder.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
