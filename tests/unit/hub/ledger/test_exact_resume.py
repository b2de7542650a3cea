"""A run over data files that is killed and resumed trains on the same records in the same order as one that is not."""

import json
from collections import Counter
from pathlib import Path

import pytest

from learner.hub.context.run_log import RunLog
from learner.hub.ledger.ledger import Ledger
from learner.hub.setup import open_ledger
from learner.hub_client.settings import hub_settings
from streamrl.messages import VersionRef
from tests.unit.config.test_setting_effects_ledger import config_of
from tests.unit.hub.factories import FakeActor, cut, end_batch, publish, run_started

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


def ledger_of(
    words: tuple[str, ...], run_dir: Path, *, epoch: int = 1, lineage=(), state: Path | None = None
) -> tuple[Ledger, RunLog]:
    """As the hub makes it, for a new run or from the log and the ledger in a checkpoint, if there is one."""
    settings = hub_settings(
        config_of(*words), started=run_started(start=epoch, learner_epoch=epoch), run_dir=run_dir,
        lineage=lineage, dp_ranks=(0,), bind="tcp://127.0.0.1:0", rank_endpoint="ipc:///nowhere/ranks",
        shm_dir=run_dir, vocab_size=100, restore_path=None if state is None else str(state),
    )
    ledger, log = open_ledger(settings)
    publish(ledger, VersionRef(epoch, ledger.version))
    return ledger, log


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
            batch = cut(self.ledger)
            for _ in range(10):
                if batch is None:
                    self.take()
                    for lease in list(self.actor.leases.values())[:2]:
                        self.actor.finish(lease, self.now)
                    batch = cut(self.ledger)
            assert batch is not None, self.ledger.wait_reason(self.now)
            self.trained.append([self.records[group.group_id] for group in batch])
            end_batch(self.ledger, self.ledger.version + 1)
            publish(self.ledger, VersionRef(self.epoch, self.ledger.version))
            self.actor.install(self.ledger.version, epoch=self.epoch)


def uninterrupted(words: tuple[str, ...], run_dir: Path) -> list[list[str]]:
    ledger, log = ledger_of(words, run_dir / "uninterrupted")
    player = Player(ledger, 1)
    player.play(NUM_STEPS)
    log.close()
    return player.trained


@pytest.mark.parametrize("shuffle", ["true", "false"])
@pytest.mark.parametrize(("saved_at", "killed_at"), [(1, 1), (7, 9), (10, 14), (23, 24), (0, 5)])
def test_a_killed_run_goes_on_with_the_very_next_record_and_loses_no_step(
    words, tmp_path, shuffle, saved_at, killed_at
):
    words = (*words, f"data.shuffle={shuffle}")
    ledger, log = ledger_of(words, tmp_path)
    first = Player(ledger, 1)
    first.play(saved_at)
    first.take()  # in flight when the checkpoint is written, and lost
    state = None
    if saved_at:
        state = tmp_path / "ledger"
        state.write_bytes(ledger.freeze(saved_at))
    first.play(killed_at)
    log.close()  # what the journal had by now is on the disk

    resumed, log = ledger_of(words, tmp_path, epoch=2, lineage=ledger.versions.lineage, state=state)
    assert resumed.version == killed_at
    second = Player(resumed, 2)
    second.records |= first.records  # groups that are held in the log are not leased again
    second.play(NUM_STEPS)
    log.close()

    assert first.trained + second.trained == uninterrupted(words, tmp_path)


def test_every_pass_has_every_record_in_its_share(words, tmp_path):
    trained = [record for batch in uninterrupted(words, tmp_path) for record in batch]
    for start in range(0, 60, 20):
        counts = Counter(trained[start : start + 20])
        assert len(counts) == 18 and sum(n for one, n in counts.items() if one.startswith("few")) == 5
