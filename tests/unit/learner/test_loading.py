"""Loading for FSDP2: each rank reads its rows; the weights are those that transformers loads."""

import json
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from learner.checkpoint.model_files import ModelFiles, empty_model
from learner.data.packing import pack
from learner.model.adapter.lora import add_adapter
from learner.model.attention.packed import ATTENTION
from learner.model.critic import build_critic
from learner.model.networks import load_reference
from learner.model.policy import load_policy
from learner.ranks.mesh import Ranks, local_part
from learner.supervised.methods import load_reward_network
from streamrl.config.schema import Config, CriticConfig, CriticKind, LearnerConfig, LoraConfig, LoraInit
from streamrl.errors import ConfigError
from tests.kit.learning import batch
from tests.unit.learner.test_two_ranks import launch_script

pytestmark = pytest.mark.timeout(200)
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def ranks():
    made = Ranks.start("cpu", sharded=True)
    yield made
    made.close()


def contents(policy) -> dict[str, torch.Tensor]:
    named = [*policy.named_parameters(), *policy.named_buffers()]
    return {name: local_part(tensor.detach()).clone() for name, tensor in named}


@pytest.mark.parametrize("kind", ["qwen3-tied", "qwen3", "llama-tied", "mistral", "gpt2"])
def test_shards_read_by_rows_are_the_weights_and_buffers_that_transformers_loads(checkpoints, kind, ranks):
    whole, sharded = load_policy(checkpoints[kind]), load_policy(checkpoints[kind], ranks=ranks)

    expected, found = contents(whole), contents(sharded)
    assert expected.keys() == found.keys() and sharded.rule == whole.rule
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype, name
    head, embedding = sharded.model.get_output_embeddings(), sharded.model.get_input_embeddings()
    assert (head.weight is embedding.weight) == sharded.model.config.tie_word_embeddings


def test_files_whose_names_are_not_the_models_are_loaded_once_and_spread(checkpoints, tmp_path, ranks):
    """Some checkpoints hold the decoder alone; transformers knows the names, a reader of rows does not."""
    folder = tmp_path / "renamed"
    shutil.copytree(checkpoints["qwen3-tied"], folder)
    tensors = load_file(folder / "model.safetensors")
    save_file({name.removeprefix("model."): t for name, t in tensors.items()}, folder / "model.safetensors",
              metadata={"format": "pt"})

    assert not ModelFiles(folder).hold(empty_model(folder, dtype=torch.float32, attention=ATTENTION))
    expected = contents(load_policy(checkpoints["qwen3-tied"], ranks=ranks))
    for name, tensor in contents(load_policy(folder, ranks=ranks)).items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("kind", ["qwen3-tied", "qwen3", "gpt2"])
@pytest.mark.parametrize("renamed", [False, True])
def test_a_critic_of_its_own_reads_the_weights_that_a_lone_process_does(checkpoints, tmp_path, kind, renamed, ranks):
    folder = tmp_path / "start"
    shutil.copytree(checkpoints[kind], folder)
    if renamed:  # as a reward model's: rank 0 reads it
        tensors = load_file(folder / "model.safetensors")
        tensors = {name.removeprefix("transformer."): t for name, t in tensors.items() if name != "lm_head.weight"}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = CriticConfig(kind=CriticKind.model)
    made = []
    for where in (Ranks(), ranks):
        torch.manual_seed(0)
        policy = load_policy(checkpoints[kind], ranks=where)
        torch.manual_seed(0)
        made.append(build_critic(config, "gae", policy, folder, num_steps=1, dtype=torch.float32, ranks=where))
    lone, sharded = (contents(one.module.decoder) for one in made)
    assert lone.keys() == sharded.keys()
    for name, tensor in lone.items():
        assert torch.equal(sharded[name], tensor), name
    (micro,) = pack(batch(1, 4), 500)
    args = micro.tokens, micro.positions, micro.packing, micro.state_index
    assert made[1].module(*args).shape == made[0].module(*args).shape


@pytest.mark.parametrize("kind", ["qwen3-tied", "llama-tied", "mistral"])
@pytest.mark.parametrize("renamed", [False, True])
def test_an_adapter_and_a_reward_model_begin_as_in_a_lone_process(checkpoints, tmp_path, kind, renamed, ranks):
    folder = tmp_path / "start"
    shutil.copytree(checkpoints[kind], folder)
    if renamed:  # read whole
        tensors = load_file(folder / "model.safetensors")
        tensors = {name.removeprefix("model.").removeprefix("transformer."): t for name, t in tensors.items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    adapt = partial(add_adapter, config=LoraConfig(rank=3, init=LoraInit.gaussian), seed=3)
    options = {"dtype": torch.float32, "gradient_checkpointing": False}
    lone, sharded = (
        (contents(load_policy(folder, ranks=where, adapt=adapt)),
         contents(load_reward_network(folder, LearnerConfig(), where, **options))) for where in (Ranks(), ranks)
    )
    for expected, found in zip(lone, sharded, strict=True):
        assert expected.keys() == found.keys()
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), name
    assert sum("lora_A" in name and bool(one.any()) for name, one in sharded[0].items()) > 3


def test_a_model_that_cannot_be_trained_packed_is_refused_with_shards_too(checkpoints, tmp_path, ranks):
    folder = tmp_path / "dynamic"
    shutil.copytree(checkpoints["llama-tied"], folder)
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    (folder / "config.json").write_text(json.dumps(config))

    with pytest.raises(ConfigError, match="cannot be trained packed"):
        load_policy(folder, ranks=ranks, max_tokens=100_000)


def test_a_reference_keeps_the_type_that_its_passes_read_and_scores_the_same_to_the_bit(checkpoints, ranks):
    config = Config()
    policy = load_policy(checkpoints["qwen3-tied"], dtype=torch.bfloat16, ranks=ranks)
    reference = load_reference(
        config.reference, checkpoints["qwen3-tied"], policy, ranks, passes={}, dtype=torch.bfloat16
    )
    (micro,) = pack(batch(1, 4), 500)

    assert {p.dtype for p in reference._policy.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in policy.parameters()} == {torch.float32}
    with torch.no_grad():
        expected, _ = policy(micro.tokens, micro.positions, micro.packing, micro.score_index, micro.targets,
                             micro.temperatures)
    assert torch.equal(reference.score(micro), expected)
    reference.sync(policy)
    assert torch.equal(reference.score(micro), expected)


def test_no_rank_holds_the_model_while_it_loads(tmp_path):
    """Of a model of 96 MiB in float32, two ranks hold 48 each; rank 0 also the layers that it checks."""
    done = launch_script(2, HERE / "loading_budget.py", tmp_path)

    ranks = sorted((json.loads(line) for line in done.splitlines()), key=lambda one: one["rank"])
    assert [one["rank"] for one in ranks] == [0, 1] and all(one["read_mib"] == ranks[0]["read_mib"] for one in ranks)
    assert ranks[0]["read_mib"] == pytest.approx(ranks[0]["file_mib"] / 2, rel=0.01)
    for one in ranks:  # a critic of its own: without the output layer
        assert one["lora_read_mib"] == pytest.approx(one["file_mib"] / 2, rel=0.01)
        assert one["reward_read_mib"] == pytest.approx(one["critic_read_mib"], rel=0.01)
        assert one["critic_read_mib"] == pytest.approx(one["critic_file_mib"] / 2, rel=0.01) and one["critic_read_mib"]
    assert ranks[1]["extra_mib"] <= 48 + 12, ranks
    assert ranks[0]["extra_mib"] <= 48 + 2 * 8 + 16, ranks


def test_attention_is_computed_without_plans_of_cudnn():
    """In a process of its own: the switch is one of the process."""
    for module in ("learner.model.policy", "actors.engines.native.engine", "actors.reward_model.scorer"):
        code = f"import {module}, torch; assert not torch.backends.cuda.cudnn_sdp_enabled()"
        if module == "learner.model.policy":
            subprocess.run([sys.executable, "-c", code], check=True, timeout=100)
        else:
            __import__(module)
            assert not torch.backends.cuda.cudnn_sdp_enabled()
