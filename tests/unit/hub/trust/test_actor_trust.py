"""Whose data are not believed: liars by name."""

import math
import time

import numpy as np
import pytest

from learner.hub.handlers.control import sentences
from learner.hub.ledger.tables.groups import GroupState
from learner.hub.observers.counters import Arrival
from learner.hub.observers.trust import NUM_LEAST, NUM_LEAST_TOKENS, NUM_LOOKS, ActorTrust
from streamrl.config.schema import TrustConfig
from streamrl.messages import EVAL_BIT, Agreement, Group, Outcome, ReturnReason, Sampling, Stop, StopReason, Welcome
from tests.unit.config.setting_harness import LiveHub, config_of, tiny_model
from tests.unit.hub.factories import FakeActor, end_batch, held_groups, hello_of, make_ledger, member, train

LIMIT = 8.0
NAMES = ("a", "b", "c", "d")


# --- the table ------------------------------------------------------------------------------------------------------


class Table:
    """A trust table with its actors, and what it told."""

    def __init__(self, *names: str, outlier_errors: float = LIMIT, audit_share: float = 0.0, engine: str = "native"):
        self.told: list[str] = []
        self.trust = ActorTrust(TrustConfig(outlier_errors, audit_share), 0.1, self.told.append)
        self.random = np.random.default_rng(3)
        for name in names or NAMES:
            self.trust.joined(hello_of(name, engine=engine, max_leases=0), is_new=True)

    def deliver(self, name: str, reward: float, num_tokens: int = 5, group_id: int = 0) -> None:
        members = tuple(member(0, [(1, 0)] * num_tokens, reward=reward) for _ in range(1))
        self.trust.group(Arrival(name, Group(
            1, 1, group_id, 0, Outcome.COMPLETE, ReturnReason.NONE, "", Sampling(), members, {},
        )))

    def step(self, *agreements: Agreement) -> list[tuple[str, str]]:
        self.trust.compared(agreements)
        return self.trust.take_due()

    def steps(self, num: int, *agreements: Agreement) -> list[tuple[str, str]]:
        return [due for _ in range(num) for due in self.step(*agreements)]


def test_rewards_are_compared_as_they_move_and_one_look_is_not_enough():
    table = Table()
    for group in range(2 * NUM_LEAST):
        for name in NAMES:
            honest = table.random.random() < 0.2 + 0.6 * group / (2 * NUM_LEAST)  # the policy gets better meanwhile
            table.deliver(name, 4.0 if name == "d" else float(honest))

    assert table.steps(NUM_LOOKS - 1) == []
    ((name, cause),) = table.step()

    assert name == "d" and cause.startswith("the mean reward of its answers is 4, with the other actors 0.")
    assert table.told[0].startswith("QUARANTINE: d is shut out because") and table.trust.causes == {"d": cause}
    assert table.trust.metrics()["num_shut_out"] == 1 and table.steps(NUM_LOOKS) == []


def test_short_answers_are_found_in_the_geometric_mean_and_evaluations_are_not_looked_at():
    table = Table()
    for _ in range(NUM_LEAST):
        for name in NAMES:
            table.deliver(name, 0.0, 1 if name == "a" else int(table.random.integers(4, 9)))
            table.deliver(name, 9.0 if name == "b" else 0.0, group_id=EVAL_BIT)

    ((name, cause),) = table.steps(NUM_LOOKS)

    assert name == "a" and "the length of its answers in tokens (geometric mean) is 1, " in cause


@pytest.mark.shows("trust.outlier_errors")
def test_the_limit_decides_and_0_compares_none():
    for limit, found in ((8.0, 1), (80.0, 0), (0.0, 0)):
        table = Table(outlier_errors=limit)
        for _ in range(NUM_LEAST):
            for name in NAMES:
                table.deliver(name, table.random.normal(5.0 * (name == "c")))
        assert len(table.steps(NUM_LOOKS)) == found


def test_ratios_are_compared_at_equal_lag():
    table = Table()
    due = []
    for _ in range(NUM_LEAST + NUM_LOOKS):
        # "a" is slow: its data are older and so its ratios larger, which is no lie
        noise = {name: table.random.normal(0, 0.1) for name in NAMES}
        ratios = {"a": 1.5, "b": 0.3, "c": 0.3, "d": 0.9}
        due += table.step(*(
            Agreement(name, 3 if name == "a" else 1, 10, ratios[name] + noise[name]) for name in NAMES
        ))

    ((name, cause),) = due
    assert name == "d" and "|log-ratio|" in cause


def test_an_audit_needs_no_other_actor():
    table = Table("a", outlier_errors=0.0, audit_share=0.5)
    few = Agreement("a", 0, NUM_LEAST_TOKENS - 1, 0.5)
    assert table.step(few) == []

    ((name, cause),) = table.steps(NUM_LOOKS, Agreement("a", 0, NUM_LEAST_TOKENS, 0.5))

    assert name == "a" and "by 0.5 nats on average over" in cause and "publish.probe_tolerance" in cause
    assert Table("a").steps(5, Agreement("a", 0, 500, 0.09)) == [], "within the tolerance"
    assert Table("a", outlier_errors=0.0).steps(5, Agreement("a", 0, 500, 0.5)) == [], "nothing is asked for"
    assert len(Table("a", audit_share=0.5).steps(5, Agreement("a", 0, 500, math.nan))) == 1, "a NaN is far, too"


def test_a_lone_actor_is_only_warned_of_where_no_audit_was_asked_for():
    table = Table("a")
    assert table.steps(5, Agreement("a", 0, 500, 0.5)) == []
    assert len(table.told) == 1 and table.told[0].startswith("audits disagree with 1 of 1 actors, so none is shut out")


def test_where_most_of_the_actors_disagree_it_is_not_theirs():
    table = Table("a", "b", "c")
    most = [Agreement(name, 0, 500, 0.5 if name != "c" else 0.0) for name in "abc"]
    assert table.steps(2 * NUM_LOOKS, *most) == []
    assert len(table.told) == 1 and table.told[0].startswith("audits disagree with 2 of 3 actors, so none is shut out")
    assert [name for name, _ in Table("b", "c").steps(NUM_LOOKS, *most[1:])] == ["b"]


def test_draws_count_where_the_engine_draws_by_seed():
    drawn = Agreement("a", 0, 500, 0.0, 500, 40)
    ((_, cause),) = Table("a", audit_share=0.5).steps(NUM_LOOKS, drawn)
    assert cause.startswith("8% of 1500 audited tokens are not what their seeds draw")
    assert Table("a", engine="vllm").steps(5, drawn) == []
    assert Table("a").steps(5, Agreement("a", 0, 500, 0.0, 500, 20)) == []


def test_a_new_process_may_try_once_more():
    table = Table("a", audit_share=0.5)
    far = Agreement("a", 0, 500, 0.5)
    assert len(table.steps(NUM_LOOKS, far)) == 1
    assert table.trust.refusal("a", 1).startswith("a was shut out because its log-probs")
    assert table.trust.refusal("a", 2) == table.trust.refusal("b", 1) == ""

    table.trust.joined(hello_of("a", 2, engine="native", max_leases=0), is_new=True)
    assert table.trust.causes == {}
    # A HELLO after a lost connection changes nothing.
    table.trust.joined(hello_of("a", 2, engine="native", max_leases=0), is_new=False)
    assert len(table.steps(NUM_LOOKS, far)) == 1
    assert "shut out twice" in table.trust.refusal("a", 3) and "it stays out" in table.told[-1]


def test_what_an_empty_engine_delivers_first_does_not_count():
    table = Table()
    table.trust.joined(hello_of("late", engine="native", max_leases=40), is_new=True)
    for group in range(40 + NUM_LEAST):
        for name in (*NAMES, "late"):
            first = name == "late" and group < 40
            table.deliver(name, 0.0, 1 if first else int(table.random.integers(4, 9)))
    assert table.steps(NUM_LOOKS) == []


# --- what becomes of its data ---------------------------------------------------------------------------------------


def test_what_a_distrusted_actor_delivered_is_generated_again_by_others():
    ledger = make_ledger(groups_per_batch=1, eta=3, window=3, max_lag=9)
    liar, honest = FakeActor(ledger, "liar"), FakeActor(ledger, "honest")
    liar.join()
    in_batch, held, open_lease, *_ = liar.ask()
    for lease in (in_batch, held):
        assert liar.finish(lease).kind == "accepted"
    ledger.cut_batch(0)

    ledger.distrust("liar", 1.0)

    assert ledger.actors.get("liar") is None and ledger.num_leases("liar") == 0
    assert held_groups(ledger) == [] and ledger.groups.num(GroupState.IN_BATCH) == 1
    assert (ledger.counts["num_groups_distrusted"], ledger.counts["num_evictions"]) == (1, 0)
    honest.join(1.0)
    again = {lease.group_id: lease for lease in honest.ask(1.0)}
    assert {held.group_id, open_lease.group_id} <= again.keys()
    assert again[held.group_id].seeds == held.seeds and again[held.group_id].attempt == 1
    for lease in again.values():
        assert honest.finish(lease, 1.0).kind == "accepted"
    end_batch(ledger, 1)
    assert train(ledger) == [held.group_id]
    ledger.check()


def test_a_group_that_two_actors_share_is_generated_again_whole():
    ledger = make_ledger(groups_per_batch=1, group_policy="reissue_missing")
    liar, honest = FakeActor(ledger, "liar"), FakeActor(ledger, "honest")
    liar.join()
    lease, *_ = liar.ask()
    liar.finish(lease, members=(0,), outcome=Outcome.RETURNED, reason=ReturnReason.DRAIN)
    liar.leases.clear()
    ledger.drain("liar", 0.0)
    honest.join()
    (rest, *_) = (one for one in honest.ask() if one.group_id == lease.group_id)
    assert rest.members == (1,)

    ledger.distrust("liar", 1.0)

    assert (lease.group_id, rest.attempt) in [ref for effect in ledger.tick(1.0) for ref in effect.leases]
    honest.leases.clear()
    (whole, *_) = (one for one in honest.ask(1.0) if one.group_id == lease.group_id)
    assert whole.members == (0, 1)
    ledger.check()


def test_the_actor_is_told_why_and_only_a_new_process_is_let_in_again(tmp_path):
    with LiveHub(tmp_path, config_of("trust.audit_share=0.5")) as hub:
        hub.publish(0, tiny_model(tmp_path / "model"))
        peer = hub.connect()
        peer.join("a1")
        for _ in range(NUM_LOOKS):
            hub.server.context.trust.compared((Agreement("a1", 0, NUM_LEAST_TOKENS, 0.5),))

        stop = peer.receive(Stop)
        assert (stop.reason, stop.rejoin, stop.exit_code) == (StopReason.EVICTED, False, 7)
        assert stop.detail.startswith("a1 is shut out because its log-probs differ")
        peer.hello("a1")
        assert "a1 was shut out because" in peer.receive(Stop).detail
        assert ("a1", f"was shut out because {hub.server.context.trust.causes['a1']}") in sentences(
            hub.server.context, time.monotonic()
        )
        peer.hello("a1", incarnation=12)
        assert peer.receive(Welcome).version == 0
