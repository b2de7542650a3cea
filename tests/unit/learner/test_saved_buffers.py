"""Buffers and weights that no optimizer moves, of real architectures: published, installed, saved and exported."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from actors.engines.base import EngineSpec
from actors.engines.native.engine import NativeEngine
from actors.local_policy import LocalModel
from actors.weights.probe import first_difference
from learner.checkpoint.checkpoint import find_checkpoint, save_checkpoint
from learner.checkpoint.model_files import empty_model
from learner.model.adapter.lora import add_adapter
from learner.model.optimizer import make_optimizer
from learner.model.parameters import policy_tensors
from learner.model.policy import load_policy
from learner.model.reference import FrozenPolicy
from learner.publish.export import export_model
from learner.publish.publisher import Publisher
from learner.ranks.mesh import Ranks
from streamrl.architectures.miniature import build_miniature
from streamrl.architectures.saved_buffers import saved_buffers
from streamrl.config.schema import LoraConfig, OptimizerConfig
from streamrl.messages import VersionRef
from streamrl.weights.document import Document
from streamrl.weights.saved import read_version
from streamrl.weights.shm.transport import ShmPublisher

BUFFERS, UNTRAINED = ("deepseek_v3", "gemma4_text", "apertus"), ("afmoe", "laguna")


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """A checkpoint of each family, whose buffers are neither their first values nor numbers of bfloat16."""
    made = {}
    for model_type in (*BUFFERS, *UNTRAINED):
        model = build_miniature(CONFIG_MAPPING[model_type](), seed=1)
        for place, (_, buffer) in enumerate(saved_buffers(model)):
            buffer.add_(torch.linspace(0.1, 0.3, buffer.numel()).view(buffer.shape) + place / 97)
        model.save_pretrained(tmp_path_factory.mktemp(model_type))
        made[model_type] = tmp_path_factory.getbasetemp() / f"{model_type}0"
    return made


def whole(folder: Path) -> dict[str, torch.Tensor]:
    return dict(policy_tensors(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)))


@pytest.mark.parametrize("model_type", [*BUFFERS, *UNTRAINED])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_engine_holds_every_tensor_of_the_checkpoint_and_its_buffers_unrounded(model_type, dtype, folders, tmp_path):
    policy = load_policy(folders[model_type])
    with ShmPublisher(tmp_path / "documents", "buffers") as shm:
        publisher = Publisher(policy_tensors(policy.model), wire_dtype=dtype, bucket_bytes=1 << 12, shm=shm)
        published = publisher.publish(VersionRef(1, 1))
        document = Document.map_file(published.path, published.manifest, publisher.layout).verify()

    async def installed():
        engine = NativeEngine.from_spec(EngineSpec(
            model_dir=folders[model_type], tokenizer=None, max_num_seqs=2, max_tokens=48, max_new_tokens=16, dtype=dtype
        ))
        await engine.install(document.tensors(), VersionRef(1, 1))
        live = {name: tensor.clone() for name, tensor in engine.live_tensors().items()}
        assert first_difference(live, document) is None
        await engine.close()
        return live

    live, buffers = asyncio.run(installed()), dict(saved_buffers(policy.model))
    assert bool(buffers) == (model_type in BUFFERS)
    for name, tensor in whole(folders[model_type]).items():
        assert torch.equal(live[name], tensor if name in buffers else tensor.to(dtype)), name


@pytest.mark.parametrize("model_type", [*BUFFERS, *UNTRAINED])
@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2, target_modules=["o_proj"])])
def test_an_untrained_export_and_a_checkpoint_are_the_model_to_the_bit(model_type, lora, folders, tmp_path):
    adapt = (lambda policy: add_adapter(policy, lora, seed=0)) if lora is not None else None
    policy = load_policy(folders[model_type], adapt=adapt)
    export_model(policy, folders[model_type], tmp_path / "exported", lora=lora)
    manifest = {} if lora is None else {
        "adapter": {"rank": 2, "alpha": lora.alpha, "base": str(folders[model_type]), "base_digest": ""}
    }
    optimizer = make_optimizer(policy, OptimizerConfig())
    save_checkpoint(tmp_path, 3, policy, optimizer, Ranks(), extra=manifest, blobs={}, num_keep=1)

    wanted, exported, saved = whole(folders[model_type]), whole(tmp_path / "exported"), dict(read_version(tmp_path, 3))
    assert exported.keys() == wanted.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in wanted.items())
    if lora is None:
        assert saved.keys() == wanted.keys()
        served = LocalModel(tmp_path, 3).tensors(tmp_path, torch.float32)
        assert all(torch.equal(served[name], tensor) for name, tensor in wanted.items())
    again = load_policy(folders[model_type], adapt=adapt)
    untrained = [] if lora is not None else [one for one in again.parameters() if not one.requires_grad]
    for tensor in (*untrained, *(buffer for _, buffer in saved_buffers(again))):
        tensor.data.zero_()
    find_checkpoint(tmp_path).restore(again, make_optimizer(again, OptimizerConfig()), Ranks())
    export_model(again, folders[model_type], tmp_path / "again", lora=lora)
    restored = whole(tmp_path / "again")
    assert all(torch.equal(restored[name], tensor) for name, tensor in wanted.items())


def test_a_reference_of_other_weights_takes_the_buffers_when_it_is_synced(folders):
    policy, other = (load_policy(folders["deepseek_v3"]) for _ in range(2))
    for tensor in (*other.parameters(), *other.buffers()):
        tensor.data.add_(0.25)
    reference = FrozenPolicy(other, name="reference")
    before = dict(reference.tensors())
    assert any(key.endswith("e_score_correction_bias") for key in before)

    reference.sync(policy)

    synced = {key.removeprefix("frozen/reference/model."): tensor for key, tensor in reference.tensors()}
    assert all(torch.equal(synced[name], tensor) for name, tensor in policy_tensors(policy.model))


def test_a_model_that_is_held_narrow_keeps_its_buffers_wide(folders):
    model = empty_model(folders["deepseek_v3"], dtype=torch.bfloat16, attention="eager")

    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert {buffer.dtype for _, buffer in saved_buffers(model)} == {torch.float32}
