"""A version of a run that trains an adapter: its base with the factors, as the exported model has them."""

import asyncio
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from actors.local_policy import find_model, local_config, open_policy
from envs.registry import task_of
from learner.checkpoint.checkpoint import save_checkpoint
from learner.model.adapter.lora import add_adapter, describe_adapter
from learner.model.optimizer import make_optimizer
from learner.model.policy import load_policy
from learner.model.tiny import prepare_tiny_model
from learner.publish.export import export_model
from learner.ranks.mesh import Ranks
from streamrl.config.load import load_config, to_yaml
from streamrl.config.schema import LoraConfig, OptimizerConfig
from streamrl.errors import CheckpointError, ConfigError
from streamrl.weights.assets import pack_assets

WORDS = ["experiment=quickstart", "eval.num_samples=3", "actors.num_threads=1", "policy.lora.rank=4"]


@pytest.fixture
def base(tmp_path) -> Path:
    return prepare_tiny_model(
        tmp_path / "models", task_of(load_config(["experiment=quickstart"])), hidden_size=16, num_layers=1, num_heads=2,
        num_warm_start_steps=0, warm_start_lr=1e-3, stop_at=0.5, seed=0, num_threads=1, progress=print,
        max_positions=1024,
    )  # fmt: skip


@pytest.fixture
def trained(base, tmp_path) -> Path:
    """A run with an adapter: version 3 in a checkpoint, and the same exported with its factors merged."""
    run, lora = tmp_path / "mine", LoraConfig(rank=4, alpha=12.0)
    run.mkdir()
    (run / "config.yaml").write_text(to_yaml(load_config([*WORDS, "policy.lora.alpha=12", f"run.dir={run}"])))
    (run / "assets.msgpack").write_bytes(pack_assets(base))
    policy = load_policy(base)
    add_adapter(policy, lora, seed=0)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3))
    extra = {"adapter": describe_adapter(lora, base, Ranks()).to_plain()}
    save_checkpoint(run, 3, policy, make_optimizer(policy, OptimizerConfig()), Ranks(), extra=extra, blobs={},
                    num_keep=5)
    export_model(policy, base, run / "model", lora=lora)
    return run


def test_a_version_is_the_base_with_its_factors_as_the_exported_model_has_them(trained, base):
    model = find_model(f"{trained}@3")
    with model.files() as files:
        found = model.tensors(files, torch.float32)

    merged, untouched = load_file(trained / "model" / "model.safetensors"), load_file(base / "model.safetensors")
    assert found.keys() == merged.keys() == untouched.keys()
    assert all(torch.equal(found[name], merged[name]) for name in merged)
    assert any(not torch.equal(found[name], untouched[name]) for name in merged)


def test_an_engine_serves_it(trained):
    async def logprobs(source: str) -> list[float]:
        policy = await open_policy(local_config(source, ["rollout.test.sampling.temperature=0"]))
        try:
            return list(await policy.engine.score(list(range(3, 12)), start=1, temperature=1.0))
        finally:
            await policy.engine.close()

    version, exported = (asyncio.run(logprobs(source)) for source in (f"{trained}@3", str(trained)))
    assert list(version) == list(exported)


def test_a_base_that_is_gone_or_is_another_one_is_named(trained, base):
    def read() -> dict[str, torch.Tensor]:
        model = find_model(f"{trained}@3")
        with model.files() as files:
            return model.tensors(files, torch.float32)

    weights = (base / "model.safetensors").read_bytes()
    (base / "model.safetensors").write_bytes(weights[:-4] + b"\0\0\0\1")
    with pytest.raises(ConfigError, match="missing or have changed: put them back"):
        read()
    (base / "model.safetensors").write_bytes(weights)
    assert read()
    base.rename(base.with_name("elsewhere"))
    with pytest.raises(ConfigError, match="missing or have changed: put them back"):
        read()
    manifest = trained / "ckpt-00000003" / "manifest.json"
    whole = json.loads(manifest.read_text())
    for adapter in ({"base": "x"}, {**whole["body"]["extra"]["adapter"], "rank": None}):
        manifest.write_text(json.dumps({"body": {**whole["body"], "extra": {"adapter": adapter}}}))
        with pytest.raises(CheckpointError, match="manifest of version 3"):
            read()
    adapter = {**whole["body"]["extra"]["adapter"], "base_quantization": "nf4"}
    manifest.write_text(json.dumps({"body": {**whole["body"], "extra": {"adapter": adapter}}}))
    with pytest.raises(ConfigError, match="weights in nf4.*let the run finish"):
        read()
