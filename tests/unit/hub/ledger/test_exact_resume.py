"""A run over data files that is killed and resumed trains on the same records in the same order as one that is not."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from learner.hub.ledger.ledger import Ledger
from learner.hub.setup import build_ledger
from learner.hub_client.settings import hub_settings
from streamrl.messages import VersionRef
from tests.unit.config.test_setting_effects_ledger import config_of
from tests.unit.hub.factories import FakeActor

NUM_STEPS = 30


@pytest.fixture(scope="module")
def words(tmp_path_factory) -> tuple[str, ...]:
    """Two files with weights, of 13 and 5 records: a pass has 20 places, and 30 steps of 2 groups are three passes."""
    folder = tmp_path_factory.mktemp("data")
    for name, size in (("many", 13), ("few", 5)):
        records = [json.dumps({"question": f"{name} {number}", "answer": str(number)}) for number in range(size)]
        (folder / f"{name}.jsonl").write_text("\n".join(records))
    paths = f"data.path=[{folder}/many.jsonl,{folder}/few.jsonl]"
    return paths, "data.weights=[3,1]", "data.test_ratio=0", "reward.type=exact"


def ledger_of(words: tuple[str, ...], *, epoch: int = 1, version: int = 0, lineage=(), state: Path | None = None):
    """As the hub makes it, for a new run or from the ledger in a checkpoint."""
    settings = hub_settings(
        config_of(*words), run_id="run", run_dir=Path("/nowhere"), learner_epoch=epoch, version=version,
        lineage=lineage, dp_ranks=(0,), bind="tcp://127.0.0.1:0", rank_endpoint="ipc:///nowhere/ranks",
        shm_dir=Path("/nowhere"), vocab_size=100, restore_path=None if state is None else str(state),
    )
    ledger = build_ledger(settings)
    ledger.versions.published(VersionRef(epoch, version))
    return ledger


class Player:
    """One actor that finishes what it is given, and the records that were trained.

    After a resume the time is later than the actors of the run before may take to come back: others get their leases.
    """

    def __init__(self, ledger: Ledger, epoch: int) -> None:
        self.ledger, self.epoch, self.now = ledger, epoch, 1000.0 * (epoch - 1)
        self.actor = FakeActor(ledger, f"a{epoch}", incarnation=epoch, slots=3, ref=VersionRef(epoch, ledger.version))
        self.actor.join()
        self.records: dict[int, str] = {}
        self.trained: list[list[str]] = []

    def take(self) -> None:
        """Leases, as many as there is room for."""
        for lease in self.actor.ask(self.now):
            self.records[lease.group_id] = json.loads(lease.prompt)["question"]

    def play(self, until: int) -> None:
        while self.ledger.version < until:
            batch = self.ledger.cut_batch(self.ledger.version)
            for _ in range(10):
                if batch is None:
                    self.take()
                    for lease in list(self.actor.leases.values())[:2]:
                        self.actor.finish(lease, self.now)
                    batch = self.ledger.cut_batch(self.ledger.version)
            assert batch is not None, self.ledger.why_waiting(self.now)
            self.trained.append([self.records[group.group_id] for group in batch])
            self.ledger.trained(self.ledger.version + 1, False, "")
            self.ledger.versions.published(VersionRef(self.epoch, self.ledger.version))
            self.actor.install(self.ledger.version, epoch=self.epoch)


def uninterrupted(words: tuple[str, ...]) -> list[list[str]]:
    player = Player(ledger_of(words), 1)
    player.play(NUM_STEPS)
    return player.trained


@pytest.mark.parametrize("shuffle", ["true", "false"])
@pytest.mark.parametrize(("saved_at", "killed_at"), [(1, 1), (7, 9), (10, 14), (23, 24)])
def test_a_killed_run_goes_on_with_the_very_next_record(words, tmp_path, shuffle, saved_at, killed_at):
    words = (*words, f"data.shuffle={shuffle}")
    first = Player(ledger_of(words), 1)
    first.play(saved_at)
    first.take()  # in flight when the checkpoint is written, and lost
    state = tmp_path / "ledger"
    state.write_bytes(first.ledger.freeze(saved_at))
    first.play(killed_at)

    second = Player(ledger_of(words, epoch=2, version=saved_at, lineage=first.ledger.versions.lineage, state=state), 2)
    second.records |= first.records  # groups that are held in the checkpoint are not leased again
    second.play(NUM_STEPS)

    assert first.trained[:saved_at] + second.trained == uninterrupted(words)


def test_every_pass_has_every_record_in_its_share(words):
    trained = [record for batch in uninterrupted(words) for record in batch]
    for start in range(0, 60, 20):
        counts = Counter(trained[start : start + 20])
        assert len(counts) == 18 and sum(n for one, n in counts.items() if one.startswith("few")) == 5
