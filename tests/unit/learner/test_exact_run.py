"""A run that is killed and resumed has, on the same log of batches, the very bits of one that was not."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from learner.checkpoint.checkpoint import find_checkpoint
from learner.loop.train import train
from learner.ranks.mesh import Ranks
from learner.setup import hub
from learner.setup.compose import build_run, tear_down
from streamrl.config.load import load_config
from streamrl.errors import StreamrlError
from tests.fakes.batch_log import FakeHubLink, FakeHubProcess

pytestmark = pytest.mark.timeout(300)
NUM_STEPS, KILLED_AFTER, EVERY = 6, 5, 2
SMALL = (
    "experiment=quickstart", f"trainer.num_steps={NUM_STEPS}", f"checkpoint.every_steps={EVERY}", "run.device=cpu",
    "run.num_threads=1", "policy.tiny.hidden_size=16", "policy.tiny.num_layers=1", "policy.tiny.num_heads=2",
    "policy.tiny.num_warm_start_steps=2", "policy.optimizer.lr=3e-3", "rollout.num_prompts_per_step=4",
    "rollout.num_responses_per_prompt=4", "eval.every_steps=0", "publish.probe_every=0", "checkpoint.num_keep=20",
)
RUNS = {
    "critic, moving reference, KL controller": (
        "algorithm=ppo", "kl.controller=horizon", "kl.options.target=0.01", "kl.options.horizon=100",
        "reference.sync_every_steps=3", "policy.scheduler.name=warmup_stable_decay", "policy.scheduler.decay_ratio=0.7",
        "critic.scheduler.name=inverse_sqrt", "critic.scheduler.num_warmup_steps=2",
    ),
    "averaged anchor, adaptive lag, minibatches": (
        "loss.surrogate=decoupled_ppo", "loss.anchor=ewma", "staleness.adaptive.enabled=true",
        "staleness.adaptive.rule=ess", "learner.num_minibatches=2", "policy.scheduler.ess_rule=sqrt",
    ),
    "whole-matrix optimizer, entropy control, constraint": (
        "policy.optimizer.name=muon", "entropy.adapt=coef", "entropy.target=1.5", "constraint.kl_limit=0.05",
        "constraint.method=pid",
    ),
}
OF_THE_CLOCK = ("time/", "throughput/", "system/", "run/wall_s", "run/epoch", "hub/", "actors/")


class FakeStop:
    """Never asks to stop."""

    reason = None

    def __call__(self) -> bool:
        return False


@pytest.fixture
def learn(monkeypatch, tmp_path):
    """Train in `folder` until the log ends, or as if killed after so many batches."""
    monkeypatch.setattr(hub, "HubProcess", FakeHubProcess)
    monkeypatch.setattr(hub, "HubLink", FakeHubLink)

    def learn(folder: Path, *words: str, killed_after: int | None = None) -> None:
        config = load_config([*SMALL, f"policy.tiny.cache_dir={tmp_path / 'models'}", *words])
        per_batch = config.learner.num_minibatches * config.learner.num_epochs
        monkeypatch.setattr(FakeHubLink, "last", None if killed_after is None else killed_after * per_batch)
        monkeypatch.setattr(FakeHubLink, "shape", {"steps_per_batch": per_batch, "num_groups": 4, "group_size": 4})
        torch.rand(7)  # a generator of another state than the first process had
        run = build_run(config, folder, FakeStop(), Ranks())
        train(run)
        if killed_after is None:
            run.checkpoints.save(run.version)
        tear_down(run)

    return learn


def rows(folder: Path) -> list[dict]:
    """What a step measured, but for the clock."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if not key.startswith(OF_THE_CLOCK)} for row in lines]


@pytest.mark.parametrize("words", RUNS.values(), ids=RUNS.keys())
def test_every_tensor_every_control_and_every_metric_is_the_same(learn, tmp_path, words):
    learn(tmp_path / "whole", *words)
    learn(tmp_path / "torn", *words, killed_after=KILLED_AFTER)
    (newest,) = [path for path in (tmp_path / "torn").glob("ckpt-*") if path.name in latest(tmp_path / "torn")]
    (newest / "ledger.bin").write_bytes(b"torn by the power cut")  # so an older one is found

    learn(tmp_path / "torn", *words, "checkpoint.resume=true")

    whole, torn = find_checkpoint(tmp_path / "whole"), find_checkpoint(tmp_path / "torn")
    assert whole.version == torn.version and whole.extra["controls"] == torn.extra["controls"]
    assert whole.extra["trained_tokens"] == torn.extra["trained_tokens"]
    mine, theirs = tensors(whole), tensors(torn)
    assert mine.keys() == theirs.keys() and len(mine) > 10
    different = [name for name, tensor in mine.items() if not torch.equal(tensor, theirs[name])]
    assert not different
    measured, again = rows(tmp_path / "whole"), rows(tmp_path / "torn")
    assert len(measured) == len(again) == NUM_STEPS
    pairs = zip(measured, again, strict=True)
    assert not {key for one, two in pairs for key in one | two if one.get(key) != two.get(key)}


def other_model(folder: Path) -> str:
    """The starting model of the run there with other weights."""
    from safetensors.torch import load_file, save_file

    other = shutil.copytree(folder / "run" / "start_model", folder / "other", dirs_exist_ok=True)
    weights = {name: one + 0.1 for name, one in load_file(other / "model.safetensors").items()}
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    return str(other)


OTHERS = {
    "reference": (("kl.mode=k2_is",), ("kl.mode=k2_is", "policy.model_path=OTHER"), "would become the reference. Set"),
    "critic": (("algorithm=ppo",), ("algorithm=ppo", "critic.kind=model"), "leave critic.kind, critic.model_path"),
    "its values": (("algorithm=ppo",), ("advantage.estimator=retrace_q",), "advantage.estimator is retrace_q as"),
}


@pytest.mark.parametrize("before, now, wanted", OTHERS.values(), ids=OTHERS.keys())
def test_a_network_that_the_settings_of_a_resumed_run_exchange_is_refused_by_its_setting(
    learn, tmp_path, before, now, wanted
):
    learn(tmp_path / "run", *before, killed_after=2)
    now = [word.replace("OTHER", other_model(tmp_path)) for word in now]
    with pytest.raises(StreamrlError, match=wanted):
        learn(tmp_path / "run", *now, "checkpoint.resume=true", killed_after=3)

    learn(tmp_path / "run", *before, "checkpoint.resume=true", killed_after=3)
    assert len(rows(tmp_path / "run")) == 3


def test_what_a_resumed_run_does_not_read_of_another_start_is_told(learn, tmp_path, caplog):
    learn(tmp_path / "run", "kl.mode=k2_is", "reference.sync_every_steps=1", killed_after=2)
    copied = shutil.copytree(tmp_path / "run" / "start_model", tmp_path / "moved")
    for words, told in (
        ((f"policy.model_path={other_model(tmp_path)}",), "they are not read, since the run goes on with those of its"),
        (("kl.mode=k2_is",), "the reference is not the one that the run had synced"),
        (("kl.mode=k2_is", "reference.sync_every_steps=9", f"policy.model_path={copied}"), None),
    ):
        run = shutil.copytree(tmp_path / "run", tmp_path / f"run-{len(caplog.text)}")
        caplog.clear()
        learn(run, *words, "checkpoint.resume=true", killed_after=3)
        assert ("the run" in caplog.text) is (told is not None) and (told or "") in caplog.text


def latest(folder: Path) -> str:
    return (folder / "LATEST").read_text()


def tensors(checkpoint) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(checkpoint.path / "rank-00000-of-00001.safetensors")
