"""The hub begins turns by what it has heard of actors and ranks."""

from learner.hub.context.connections import Connection, Connections
from learner.hub.context.turns import Turns


def linked(connections: Connections, name: str, now: float = 0.0, **fields) -> Connection:
    one = Connection(name.encode(), name, 1, now, told_turn_at=now, **fields)
    connections.bind(one)
    return one


def test_the_learner_works_once_every_engine_has_given_its_memory_back_or_is_gone():
    connections = Connections()
    turns = Turns(connections, 10.0, is_on=True)
    assert (turns.actors_may_work, turns.learner_may_work) == (False, True), "it loads"
    turns.to_learner()
    assert turns.number == 1
    turns.to_actors()
    turns.to_actors()
    assert turns.number == 2 and turns.actors_may_work and not turns.learner_may_work

    ready, slow = linked(connections, "ready"), linked(connections, "slow")
    linked(connections, "relay", max_leases=0)
    ready.turn = slow.turn = 1  # of a turn before
    turns.to_learner()
    assert turns.number == 3 and not turns.actors_may_work and not turns.learner_may_work
    ready.turn = 3
    assert turns.holding() == [slow] and not turns.learner_may_work
    connections.drop("slow")
    assert turns.learner_may_work
    late = linked(connections, "late", now=95.0)
    assert turns.late(now=100.0) == [] and turns.late(now=106.0) == [late]
    turns.to_actors()
    assert turns.late(now=106.0) == []


def test_without_turns_everybody_works_always():
    connections = Connections()
    turns = Turns(connections, 10.0, is_on=False)
    linked(connections, "one")
    turns.to_learner()
    turns.to_actors()
    assert turns.number == 0 and turns.actors_may_work and turns.learner_may_work and turns.late(1e9) == []
