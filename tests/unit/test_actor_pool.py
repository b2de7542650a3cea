"""The launcher's actors on a machine that can start no more processes."""

import errno
from pathlib import Path
from types import SimpleNamespace

import pytest

from streamrl.errors import ControlError
from streamrl.supervise.actors import START_AGAIN_S, ActorPool
from streamrl.supervise.caller import Caller


class FakeChild(SimpleNamespace):
    """A process by its exit status alone."""

    def __init__(self, name: str, log_path: Path) -> None:
        super().__init__(
            name=name, code=None, started_at=0.0, num_restarts=0, same_deaths=0, last_line="", given_up=False,
            restart_at=None, log_path=log_path,
        )

    def poll(self) -> int | None:
        return self.code

    def close_input(self) -> None:
        pass


@pytest.fixture
def machine(tmp_path):
    """(pool, machine): the machine has room for so many more processes."""
    machine = SimpleNamespace(room=2)

    def start(name: str) -> FakeChild:
        if not machine.room:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        machine.room -= 1
        return FakeChild(name, tmp_path / "none.log")

    return ActorPool(start, lambda name, within_s: False, 3, Caller()), machine


def test_actors_that_could_be_started_are_kept_where_no_more_can_be(machine):
    pool, room = machine
    with pytest.raises(ControlError, match="2 of 5 actors run, raise this machine's limits .*: .*unavailable"):
        pool.scale(5, 0.0)
    assert [one.name for one in pool.children] == ["actor-0", "actor-1"]

    room.room = 1
    assert pool.scale(3, 1.0) == (["actor-2"], [])


def test_an_actor_that_cannot_be_started_again_now_is_tried_again(machine):
    pool, room = machine
    pool.scale(2, 0.0)
    pool.children[0].code = -9
    pool.poll(200.0)
    assert pool.children[0].code == -9 and not pool.children[0].given_up

    room.room = 1
    pool.poll(200.0 + START_AGAIN_S)
    assert [(one.name, one.code) for one in pool.children] == [("actor-0", None), ("actor-1", None)]
