"""Groups that a real run was trained on train the same bits again, without its hub and its actors."""

import torch

from learner.loop.train import train
from learner.ranks.mesh import Ranks
from learner.setup.compose import build_run, tear_down
from learner.setup.trainer import steered_trainer
from learner.sources.batch import Batch, BatchSource
from learner.sources.recorded import RecordedBatches
from streamrl.config.load import load_config

NUM_STEPS = 3
WORDS = (f"trainer.num_steps={NUM_STEPS}", "eval.num_samples=0", "run.device=cpu", "run.num_threads=1")


class NeverStops:
    reason = None

    def __call__(self) -> bool:
        return False


class Keeps:
    """A run's source, whose batches are kept."""

    def __init__(self, source: BatchSource) -> None:
        self.source = source
        self.batches: list[Batch] = []

    def next_batch(self, version: int) -> Batch | None:
        batch = self.source.next_batch(version)
        self.batches += [] if batch is None else [batch]
        return batch

    def commit_batch(self, version, trained) -> None:
        self.source.commit_batch(version, trained)


def weights(networks) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in networks.policy.named_parameters()}


def test_a_list_of_the_groups_of_a_run_gives_its_weights_bit_by_bit(harness):
    words = harness.words(*WORDS)
    run = build_run(load_config(words), harness.run_dir, NeverStops(), Ranks())
    run.source = kept = Keeps(run.source)
    try:
        harness.actor("a0")
        assert train(run)
        trained = weights(run.trainer.networks)
    finally:
        tear_down(run)

    trainer, staleness = steered_trainer(load_config(words), run.model_dir)
    source = RecordedBatches([batch.share.groups for batch in kept.batches])
    for recorded in kept.batches:
        batch = source.next_batch(trainer.version)
        assert batch.plan == recorded.plan
        trainer.train_batch(batch.rows, batch.plan, lag_policy=staleness.lag_policy)

    again = weights(trainer.networks)
    assert trainer.step == NUM_STEPS and again.keys() == trained.keys()
    assert [name for name in trained if not torch.equal(again[name], trained[name])] == []
