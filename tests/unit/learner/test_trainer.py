"""The trainer alone, on recorded groups: the same weights as a run with a hub has, bit by bit."""

import json
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from envs.registry import task_of
from learner.loop.finish import finish
from learner.loop.train import train
from learner.model.paths import model_directory
from learner.model.tiny import CHAT_TEMPLATE
from learner.objective.statistics import TrainedBatch
from learner.ranks.activity import Activity
from learner.ranks.clock import StepClock
from learner.ranks.mesh import Ranks
from learner.setup import hub
from learner.setup.compose import build_run, tear_down
from learner.setup.trainer import save_policy, steered_trainer
from learner.sources.batch import BatchSource
from learner.sources.recorded import RecordedBatches
from streamrl.config.load import load_config
from streamrl.errors import ContentError
from tests.fakes.batch_log import FakeHubLink, FakeHubProcess, batch
from tests.unit.learner.test_exact_run import SMALL, FakeStop

pytestmark = pytest.mark.timeout(300)
NUM_STEPS, NUM_GROUPS, GROUP_SIZE = 3, 4, 4


def config_of(folder: Path, *words: str):
    return load_config([*SMALL, f"trainer.num_steps={NUM_STEPS}", f"policy.tiny.cache_dir={folder / 'models'}", *words])


def with_a_hub(monkeypatch, folder: Path, *words: str) -> dict[str, torch.Tensor]:
    """The policy of a run whose hub hands out the log's batches."""
    monkeypatch.setattr(hub, "HubProcess", FakeHubProcess)
    monkeypatch.setattr(hub, "HubLink", FakeHubLink)
    config = config_of(folder, *words)
    shape = {"steps_per_batch": steps_of(config), "num_groups": NUM_GROUPS, "group_size": GROUP_SIZE}
    monkeypatch.setattr(FakeHubLink, "last", None)
    monkeypatch.setattr(FakeHubLink, "shape", shape)
    run = build_run(config, folder / "run", FakeStop(), Ranks())
    assert train(run)
    weights = {name: p.detach().clone() for name, p in run.trainer.networks.policy.named_parameters()}
    tear_down(run)
    return weights


TEMPLATE = "{% for m in messages %}<{{ m['content'] }}>{% endfor %}"


@pytest.mark.parametrize("words, expected", [
    ((f'data.chat_template="{TEMPLATE}"',), TEMPLATE), ((), CHAT_TEMPLATE),
    ((f'data.chat_template="{TEMPLATE}"', "data.apply_chat_template=false"), CHAT_TEMPLATE),
])
def test_the_exported_model_is_prompted_as_the_policy_was(monkeypatch, tmp_path, words, expected):
    """By transformers, vLLM and others, which know no settings of the run."""
    monkeypatch.setattr(hub, "HubProcess", FakeHubProcess)
    monkeypatch.setattr(hub, "HubLink", FakeHubLink)
    monkeypatch.setattr(FakeHubLink, "last", 0)
    run = build_run(config_of(tmp_path, *words), tmp_path / "run", FakeStop(), Ranks())
    finish(run, completed=True)
    saved = save_policy(run.config, run.trainer, run.model_dir, tmp_path / "saved")
    tear_down(run)
    for folder in (tmp_path / "run" / "model", saved):
        assert AutoTokenizer.from_pretrained(folder).chat_template == expected
        assert (folder / "chat_template.jinja").read_text() == expected


def steps_of(config) -> int:
    return config.learner.num_minibatches * config.learner.num_epochs


def without_a_hub(folder: Path, *words: str) -> dict[str, torch.Tensor]:
    """The policy after the same batches, from a list of recorded groups."""
    return trained_alone(folder, *words)[0]


def trained_alone(folder: Path, *words: str) -> tuple[dict[str, torch.Tensor], list[TrainedBatch]]:
    """The same policy, and the result of each batch."""
    config = config_of(folder, *words)
    model_dir = model_directory(
        config.policy, task_of(config), Ranks(), seed=config.run.seed, num_threads=1,
        max_positions=config.learner.max_tokens_per_device,
    )
    trainer, staleness = steered_trainer(config, model_dir)
    shape = {"steps_per_batch": steps_of(config), "num_groups": NUM_GROUPS, "group_size": GROUP_SIZE}
    recorded = [batch(number * steps_of(config), **shape).groups for number in range(NUM_STEPS)]
    source: BatchSource = RecordedBatches(recorded, num_minibatches=config.learner.num_minibatches)
    results = []
    while (taken := source.next_batch(trainer.version)) is not None:
        trained = trainer.train_batch(taken.rows, taken.plan, lag_policy=staleness.lag_policy)
        source.commit_batch(trainer.version, trained)
        results.append(trained)
    assert trainer.step == NUM_STEPS
    return {name: p.detach() for name, p in trainer.networks.policy.named_parameters()}, results


@pytest.mark.shows("learner.gradient_cosine")
def test_gradients_of_consecutive_batches_are_compared_if_asked_and_the_weights_are_the_same(tmp_path):
    plain, unasked = trained_alone(tmp_path)
    weights, asked = trained_alone(tmp_path, "learner.gradient_cosine=true")
    assert [one.result.cosine for one in unasked] == [None] * NUM_STEPS
    assert asked[0].result.cosine is None and all(-1.0 <= one.result.cosine <= 1.0 for one in asked[1:])
    assert all(torch.equal(plain[name], weights[name]) for name in plain)


@pytest.mark.parametrize(
    "words",
    [
        (), ("algorithm=areal", "learner.num_minibatches=1", "learner.num_epochs=2"), ("algorithm=impala",),
        ("kl.mode=k2_is", "kl.coef=0.1"),
    ],
    ids=["default", "areal, two epochs", "impala", "KL in the loss"],
)
def test_a_list_of_recorded_groups_trains_the_bits_of_a_run_with_a_hub(monkeypatch, tmp_path, words):
    alone = without_a_hub(tmp_path, *words)

    whole = with_a_hub(monkeypatch, tmp_path, *words)

    assert alone.keys() == whole.keys() and len(alone) > 5
    assert [name for name in whole if not torch.equal(alone[name], whole[name])] == []


@pytest.mark.shows("shadow.algorithms")
@pytest.mark.parametrize("words", [(), ("algorithm=impala",)], ids=["default", "impala"])
def test_shadow_algorithms_are_in_the_metrics_of_every_step_and_leave_no_trace_in_the_weights(
    monkeypatch, tmp_path, words
):
    shadows = ["uncorrected", "grpo"] if words else ["vespo", "grpo", "m2po"]
    plain = without_a_hub(tmp_path, *words)

    watched = with_a_hub(monkeypatch, tmp_path, *words, f"shadow.algorithms=[{','.join(shadows)}]")

    assert [name for name in plain if not torch.equal(plain[name], watched[name])] == []
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "policy/loss" in row]
    assert len(steps) == NUM_STEPS
    for row in steps:
        assert row["shadow/cosine"] == pytest.approx(1.0) and row["shadow/grad_norm"] > 0
        assert all(-1 <= row[f"shadow/{name}/cosine"] < 1 - 1e-9 for name in shadows)
        assert all(row[f"shadow/{name}/grad_norm_by_lag"] for name in shadows)


def test_several_optimizer_steps_of_a_batch_train_the_same_bits_with_shadows(tmp_path):
    words = ("algorithm=areal", "learner.num_minibatches=2", "learner.num_epochs=2")
    plain, watched = without_a_hub(tmp_path, *words), without_a_hub(tmp_path, *words, "shadow.algorithms=[grpo,vespo]")

    assert [name for name in plain if not torch.equal(plain[name], watched[name])] == []


def test_recorded_batches_are_dealt_to_minibatches_as_the_hub_deals_them():
    frames = batch(0, steps_per_batch=2, num_groups=4, group_size=2).groups

    taken = RecordedBatches([frames], num_minibatches=2).next_batch(0)

    assert [row.minibatch for row in taken.plan] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert RecordedBatches([]).next_batch(0) is None


def test_a_batch_that_cannot_be_planned_is_refused_as_the_hub_refuses_it():
    frames = batch(0, steps_per_batch=1, num_groups=3, group_size=2).groups

    with pytest.raises(ContentError, match="no trajectory"):
        RecordedBatches([[]]).next_batch(0)
    with pytest.raises(ContentError, match="3 groups cannot be split over learner.num_minibatches=2"):
        RecordedBatches([frames], num_minibatches=2).next_batch(0)


def test_the_first_step_of_a_lone_trainer_began_when_its_clock_was_made():
    before = time.monotonic()

    assert before <= StepClock(Activity()).began <= time.monotonic()
