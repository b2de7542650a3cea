"""What a model needs of a GPU, from files and settings alone."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from learner.model.memory import GIB, STATE_BYTES, check_memory, estimate_memory, tensor_shapes
from learner.model.optimizer import OPTIMIZERS, make_optimizer
from streamrl.config.schema import OptimizerConfig
from streamrl.errors import ConfigError
from tests.unit.config.setting_harness import config_of

pytestmark = pytest.mark.timeout(60)


def estimate(config, model_dir):
    return estimate_memory(config.policy, config.learner, model_dir, num_ranks=config.launch.num_learner_ranks)


def check(config, model_dir, total_bytes):
    return check_memory(
        config.policy, config.learner, model_dir, total_bytes, num_ranks=config.launch.num_learner_ranks
    )


def test_the_states_of_a_rank_are_what_its_tensors_hold(checkpoints):
    path = checkpoints["qwen3"]
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    assert sum(torch.Size(shape).numel() for _, shape in tensor_shapes(path)) == sum(
        p.numel() for p in model.parameters()
    )
    for name in ("adamw", "sgd"):
        optimizer = make_optimizer(model, OptimizerConfig(name=name))
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        moments = [m for state in optimizer.state.values() for m in state.values() if m is not None and m.dim()]
        held = [*model.parameters(), *(p.grad for p in model.parameters()), *moments]
        found = estimate(config_of(f"policy.optimizer.name={name}"), path)
        assert found.states == sum(tensor.nbytes for tensor in held)
    assert STATE_BYTES.keys() == OPTIMIZERS.keys()


def test_more_ranks_share_the_states_and_checkpointing_keeps_fewer_activations(checkpoints):
    one = estimate(config_of("policy.gradient_checkpointing=false"), checkpoints["qwen3"])
    two = estimate(
        config_of("launch.num_learner_ranks=2", "policy.gradient_checkpointing=true"), checkpoints["qwen3"]
    )
    assert two.states == one.states // 2 and two.gathered == one.gathered and two.activations < one.activations


@pytest.mark.shows("learner.gpu_memory_share")
def test_a_model_that_cannot_fit_is_refused_before_it_is_loaded(checkpoints):
    path, whole = checkpoints["qwen3"], config_of()
    least = estimate(whole, path).least
    assert check(whole, path, least).least == least and "GiB" in str(check(whole, path, GIB))
    for words, total in (((), least - 1), (("learner.gpu_memory_share=0.5",), 2 * least - 2)):
        with pytest.raises(ConfigError, match="raise launch.num_learner_ranks=1"):
            check(config_of(*words), path, total)


def headers_of_70b(folder: Path) -> Path:
    """Config and header of a dense model of 70.6 billion weights: 80 layers of 8192, a vocabulary of 128256."""
    hidden, kv, inner, vocabulary = 8192, 1024, 28672, 128256
    layer = {
        "self_attn.q_proj": [hidden, hidden], "self_attn.k_proj": [kv, hidden], "self_attn.v_proj": [kv, hidden],
        "self_attn.o_proj": [hidden, hidden], "mlp.gate_proj": [inner, hidden], "mlp.up_proj": [inner, hidden],
        "mlp.down_proj": [hidden, inner], "input_layernorm": [hidden], "post_attention_layernorm": [hidden],
    }
    shapes = {"model.embed_tokens": [vocabulary, hidden], "model.norm": [hidden], "lm_head": [vocabulary, hidden]}
    shapes |= {f"model.layers.{n}.{name}": shape for n in range(80) for name, shape in layer.items()}
    header = json.dumps({
        f"{name}.weight": {"dtype": "BF16", "shape": shape, "data_offsets": [0, 0]} for name, shape in shapes.items()
    }).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    sizes = {"num_hidden_layers": 80, "hidden_size": hidden, "vocab_size": vocabulary}
    (folder / "config.json").write_text(json.dumps(sizes))
    return folder


LINEAR, OTHERS = 68_451_041_280, 2_102_665_216  # 80 x (2 x 8192^2 + 2 x 8192 x 1024 + 3 x 8192 x 28672), and the rest
A_RANK = 12_943_360  # 80 x the in and out of every linear layer: what the factors of rank 1 have
NF4 = 0.5 + 1 / 64 + 4 / (64 * 256)  # a byte for every 64 weights, a float32 for every 256 of those bytes


@pytest.mark.parametrize(
    ("words", "states"),
    [
        ((), 16 * (LINEAR + OTHERS)),
        (("policy.lora.rank=32",), 2 * (LINEAR + OTHERS) + 16 * 32 * A_RANK),
        (("policy.lora.rank=32", "launch.num_learner_ranks=2"), (2 * (LINEAR + OTHERS) + 16 * 32 * A_RANK) / 2),
        (("policy.lora.rank=8", "policy.lora.base_quantization=nf4"), NF4 * LINEAR + 2 * OTHERS + 16 * 8 * A_RANK),
        (("policy.lora.rank=64", "policy.lora.base_quantization=nf4"), NF4 * LINEAR + 2 * OTHERS + 16 * 64 * A_RANK),
        (("policy.lora.rank=8", "policy.lora.base_quantization=int8"), LINEAR + 2 * OTHERS + 16 * 8 * A_RANK),
        (  # each rank has the quantized layers whole
            ("policy.lora.rank=8", "policy.lora.base_quantization=nf4", "launch.num_learner_ranks=2"),
            NF4 * LINEAR + (2 * OTHERS + 16 * 8 * A_RANK) / 2,
        ),
        (  # 80 x 16 x (8192 + 8192 of q, 8192 + 1024 of v), then without v
            ("policy.lora.rank=16", "policy.lora.target_modules=[q_proj,v_proj]"),
            2 * (LINEAR + OTHERS) + 16 * 80 * 16 * (16384 + 9216),
        ),
        (
            ("policy.lora.rank=16", "policy.lora.target_modules=[q_proj,v_proj]", "policy.lora.exclude=[v_proj]"),
            2 * (LINEAR + OTHERS) + 16 * 80 * 16 * 16384,
        ),
    ],
)
def test_the_states_of_a_70b_model_follow_from_quantization_rank_and_layers(tmp_path, words, states):
    assert estimate(config_of(*words), headers_of_70b(tmp_path)).states == int(states)


@pytest.mark.parametrize(
    ("words", "gib", "remedy"),
    [
        (("policy.lora.rank=32", "policy.lora.base_quantization=nf4"), 80, None),
        (("policy.lora.rank=32", "policy.lora.base_quantization=nf4"), 40, "take a smaller model"),
        (("policy.lora.rank=32", "policy.lora.base_quantization=int8"), 40, "policy.lora.base_quantization=nf4"),
        (("policy.lora.rank=32",), 80, "policy.lora.base_quantization=nf4"),
        ((), 80, "policy.lora.rank=32"),
    ],
)
def test_a_70b_model_in_4_bits_fits_80_gib_and_what_does_not_is_refused_with_what_would(tmp_path, words, gib, remedy):
    config, path = config_of("learner.max_tokens_per_device=1024", *words), headers_of_70b(tmp_path)
    if remedy is None:
        assert check(config, path, gib * GIB).least < gib * GIB
        return
    with pytest.raises(ConfigError, match=remedy) as refused:
        check(config, path, gib * GIB)
    assert ("raise launch.num_learner_ranks" in str(refused.value)) == ("base_quantization" not in " ".join(words))


def test_experts_are_neither_quantized_nor_adapted(tmp_path):
    """Files name them one by one; in the model they are one tensor of three dimensions, and no linear layer."""
    path = headers_of_70b(tmp_path)
    header = path / "model.safetensors"
    text = header.read_bytes()[8:].replace(b".mlp.", b".mlp.experts.0.")
    header.write_bytes(struct.pack("<Q", len(text)) + text)
    attention = 80 * (2 * 8192 * 8192 + 2 * 8192 * 1024)
    found = estimate(config_of("policy.lora.rank=8", "policy.lora.base_quantization=nf4"), path)
    factors = 16 * 8 * 80 * (2 * 16384 + 2 * 9216)
    assert found.states == int(NF4 * attention + 2 * (LINEAR - attention + OTHERS) + factors)
