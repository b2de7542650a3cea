"""Work of a learner in the background: versions and checkpoints are written from a copy, then announced."""

import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import learner.publish.publisher as publisher_module
from learner.checkpoint.checkpoint import find_checkpoint
from learner.checkpoint.saving import Saving
from learner.checkpoint.shards import training_tensors
from learner.publish.publisher import Publisher
from learner.publish.publishing import MOST_TRIES, Publishing, Versions
from learner.ranks.activity import Activity
from learner.ranks.background import Background
from learner.ranks.clock import StepClock
from learner.ranks.mesh import Ranks
from learner.setup.publishing import background_of
from learner.setup.trainer import make_staleness
from streamrl.errors import CheckpointError, WeightsError
from streamrl.messages import VersionRef
from streamrl.weights.document import Document
from streamrl.weights.shm.transport import ShmPublisher
from tests.unit.config.setting_harness import config_of

ALONE = Ranks()


class FakeLink:
    """A hub that notes what it is told."""

    def __init__(self) -> None:
        self.published, self.durable, self.frozen = [], [], []

    def publish(self, manifest, path, *rest, **more) -> None:
        self.published.append((manifest, Path(path)))

    def freeze(self, version: int) -> bytes:
        self.frozen.append(version)
        return b"ledger of %d" % version

    def saved(self, version: int) -> None:
        self.durable.append(version)


class Gate:
    """Holds a thread until the test lets it go; `came` is set once it is there."""

    def __init__(self) -> None:
        self.closed, self.came, self._open = False, threading.Event(), threading.Event()

    def __call__(self) -> bool:
        if self.closed:
            self.came.set()
            assert self._open.wait(30)
        return True

    def release(self) -> None:
        self._open.set()


@pytest.fixture
def gate():
    one = Gate()
    yield one
    one.release()


@pytest.fixture
def shm(tmp_path):
    with ShmPublisher(tmp_path / "documents", "run", keep_versions=9) as publisher:
        yield publisher


def publishing(weight, shm, link, *, background, fence=lambda: None) -> Publishing:
    publisher = Publisher([("w", weight)], wire_dtype=torch.float32, bucket_bytes=64, shm=shm, fence=fence)
    return Publishing(publisher, link, ALONE, background=background)


def numbers(link: FakeLink, layout) -> list[list[float]]:
    return [
        Document.map_file(path, manifest, layout).verify().tensors()["w"].tolist() for manifest, path in link.published
    ]


def until_done(one: Background) -> None:
    one._thread.submit(lambda: None).result(timeout=30)  # behind the job, in the same thread


@pytest.mark.shows("publish.beside_training")
@pytest.mark.parametrize(("wish", "trains_on"), [("always", True), ("never", False), ("auto", False)])
def test_a_version_written_beside_training_holds_the_weights_of_its_step(wish, trains_on, shm, gate):
    beside = background_of(config_of(f"publish.beside_training={wish}").publish.beside_training, ALONE, "publish")
    assert (beside is not None) == trains_on  # auto: this is a CPU
    weight, link = torch.nn.Parameter(torch.zeros(50)), FakeLink()
    one = publishing(weight, shm, link, background=beside, fence=gate)
    one.stage(VersionRef(1, 0), None)
    assert one.settle() == VersionRef(1, 0) and len(link.published) == 1  # the first is waited for

    gate.closed = trains_on
    one.stage(VersionRef(1, 1), None)
    if trains_on:
        assert gate.came.wait(30)
    with torch.no_grad():
        weight.add_(1.0)  # the next step
    one.poll()
    assert len(link.published) == (1 if trains_on else 2)  # nothing is announced before it is whole
    gate.release()
    if trains_on:
        until_done(beside)
        one.poll()
        assert len(link.published) == 2
    assert one.settle() == VersionRef(1, 1) and one.settle() is None
    gate.closed = False
    one.stage(VersionRef(1, 2), None)
    one.settle()

    assert numbers(link, one._publisher.layout) == [[0.0] * 50, [0.0] * 50, [1.0] * 50]
    assert [manifest.parent for manifest, _ in link.published] == [None, VersionRef(1, 0), VersionRef(1, 1)]
    one.close()


def test_a_version_that_fails_beside_training_is_skipped_and_the_next_one_comes(shm, caplog):
    broken = [False, True, False]

    def fence() -> None:
        if broken.pop(0):
            raise WeightsError("no room")

    link, beside = FakeLink(), Background(ALONE, "publish")
    one = publishing(torch.nn.Parameter(torch.zeros(3)), shm, link, background=beside, fence=fence)
    for version in range(3):
        one.stage(VersionRef(1, version), None)
        if version == 1:
            until_done(beside)
            one.poll()  # an error waits for the moment when all ranks look
            assert one.num_failed == 0
        assert one.settle() == (None if version == 1 else VersionRef(1, version))

    assert one.num_failed == 1 and "version 1 is skipped" in caplog.text
    assert [manifest.ref.version for manifest, _ in link.published] == [0, 2]
    one.close()


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize(("words", "tries", "announced"), [
    ("staleness.eta=0", [0, 1, 1, 1, 2], [0, 1, 2]), ("staleness.force=1", [0, 1, 1, 1, 2], [0, 1, 2]),
    ("staleness.eta=1", [0, 1, 2, 2], [0, 2]),
])
def test_a_version_that_no_batch_can_come_without_is_published_again(words, tries, announced, beside, shm, caplog):
    broken, tried = [False, True, True, False, False], []

    def fence() -> None:
        if broken.pop(0):
            raise WeightsError("no room")

    link = FakeLink()
    background = Background(ALONE, "publish") if beside else None
    one = publishing(torch.nn.Parameter(torch.zeros(3)), shm, link, background=background, fence=fence)
    versions = Versions(one, make_staleness(config_of(words), {}), StepClock(Activity()), None, learner_epoch=1,
                        wire_precision=nullcontext, staged=tried.append)
    versions.publish(0)
    for version in (1, 2):
        versions.supply(version - 1)
        versions.publish_if_due(version, asked_for=False)
    versions.supply(2)
    versions.settle()

    assert tried == tries and [manifest.ref.version for manifest, _ in link.published] == announced
    assert one.num_failed == 2 and "published again" in caplog.text
    one.close()


@pytest.mark.parametrize("last_try_works", [False, True])
def test_a_version_that_can_never_be_published_ends_the_run_with_the_cause(last_try_works, shm):
    def fence() -> None:
        if link.published and not (last_try_works and one.num_failed == MOST_TRIES):
            raise WeightsError("no room")

    link = FakeLink()
    one = publishing(torch.nn.Parameter(torch.zeros(3)), shm, link, background=None, fence=fence)
    rule = SimpleNamespace(publish_due=lambda *_, **__: True, published=print, starves=bool)
    versions = Versions(one, rule, StepClock(Activity()), None, learner_epoch=1, wire_precision=nullcontext,
                        staged=lambda version: None)
    versions.publish(0)
    versions.publish_if_due(1, asked_for=False)
    if last_try_works:
        versions.supply(1)
        assert one.num_failed == MOST_TRIES and link.published[-1][0].ref.version == 1
        return
    with pytest.raises(WeightsError, match="no batch can come without it"):
        versions.supply(1)
    assert one.num_failed == 1 + MOST_TRIES


def test_without_memory_for_a_copy_versions_are_written_while_training_waits(shm, caplog, monkeypatch):
    copies = []

    def fake_allocator_with_room_for_one_copy(parameter, dtype):
        if copies:
            raise torch.OutOfMemoryError("CUDA out of memory")
        copies.append(parameter.detach().to(dtype, copy=True))
        return copies[-1]

    monkeypatch.setattr(publisher_module, "_copied", fake_allocator_with_room_for_one_copy)
    weight, link = torch.nn.Parameter(torch.zeros(3)), FakeLink()
    one = publishing(weight, shm, link, background=Background(ALONE, "publish"))
    beside = []
    for version in range(4):
        one.stage(VersionRef(1, version), None)
        beside.append(one.in_background)
        assert one.settle() == VersionRef(1, version)
        with torch.no_grad():
            weight.add_(1.0)

    assert beside == [False, True, False, False] and one.num_failed == 0
    assert numbers(link, one._publisher.layout) == [[float(version)] * 3 for version in range(4)]
    assert caplog.text.count("no memory for a copy of the weights") == 1
    one.close()


def trained(value: float) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    module = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(module.parameters(), lr=value)
    step(module, optimizer)
    return module, optimizer


def step(module, optimizer) -> None:
    module(torch.ones(3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.shows("checkpoint.beside_training")
@pytest.mark.parametrize(("wish", "trains_on"), [("always", True), ("never", False), ("auto", False)])
def test_a_checkpoint_written_beside_training_holds_its_moment_and_is_durable_only_when_written(
    tmp_path, wish, trains_on, gate
):
    beside = background_of(config_of(f"checkpoint.beside_training={wish}").checkpoint.beside_training, ALONE, "save")
    module, optimizer = trained(0.1)
    link, lock = FakeLink(), SimpleNamespace(is_owner=gate)
    one = Saving(tmp_path, link, ALONE, num_keep=2, lock=lock, background=beside)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    generator = torch.get_rng_state()
    gate.closed = trains_on
    one.save(7, training_tensors(module, optimizer), {"note": "x"})
    if trains_on:
        assert gate.came.wait(30)
        step(module, optimizer)
        torch.rand(5)
        one.poll()
        assert link.durable == [] and find_checkpoint(tmp_path) is None and one.version == 7
        gate.release()
        until_done(beside)
        one.poll()
    assert link.durable == [7] == link.frozen
    one.settle()
    one.close()

    found = find_checkpoint(tmp_path)
    other, fresh = trained(0.3)
    found.restore(other, fresh, ALONE)
    assert found.version == 7 and found.blobs == {"ledger": b"ledger of 7"} and found.extra["note"] == "x"
    assert all(torch.equal(tensor, before[name]) for name, tensor in other.state_dict().items())
    assert torch.equal(torch.get_rng_state(), generator)
    assert {float(state["step"]) for state in fresh.state_dict()["state"].values()} == {1.0}


def test_a_checkpoint_that_cannot_be_written_is_an_error_at_the_next_one_and_never_durable(tmp_path):
    module, optimizer = trained(0.1)
    link, beside = FakeLink(), Background(ALONE, "save")
    (tmp_path / "file").write_text("no directory")
    one = Saving(tmp_path / "file", link, ALONE, num_keep=2, background=beside)
    one.save(1, training_tensors(module, optimizer), {})
    until_done(beside)
    one.poll()

    with pytest.raises((CheckpointError, OSError)):
        one.settle()
    assert link.durable == []
    one.close()
