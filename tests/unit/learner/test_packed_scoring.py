"""Packed scoring against the model's own code, one sequence at a time."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from learner.data.layout import make_layout
from learner.data.packing import pack
from learner.model.policy import decoder_layers, load_policy
from streamrl.errors import ConfigError
from tests.unit.learner.learner_factories import batch, trajectory


def alone(model, row):
    """Log-probs and entropies of the action tokens of one trajectory, by the book."""
    full = torch.tensor([*row.prompt_ids.tolist(), *row.token_ids.tolist()])
    logits = model(input_ids=full[None]).logits[0, :-1] / row.temperature
    log_p = logits.log_softmax(-1)
    places = torch.from_numpy(row.mask).nonzero().squeeze(1) + len(row.prompt_ids)
    chosen = log_p[places - 1]
    return chosen.gather(-1, full[places][:, None]).squeeze(-1), -(chosen.exp() * chosen).sum(-1)


def packed(policy, rows, max_tokens):
    """(row, log-probs, entropies) of every trajectory, through the packed path."""
    for micro in pack(rows, max_tokens):
        scored = policy(
            micro.tokens, micro.positions, micro.packing, micro.score_index, micro.targets, micro.temperatures
        )
        logprobs, entropies = (micro.padded(values) for values in scored)
        for place, row in enumerate(micro.trajectory_ids):
            yield row, logprobs[place][micro.mask[place]], entropies[place][micro.mask[place]]


@pytest.mark.parametrize("kind", ["qwen3-tied", "qwen3", "llama-tied", "mistral", "gpt2"])
@pytest.mark.parametrize("max_tokens", [28, 400])
def test_packed_log_probs_entropies_and_gradients_are_those_of_single_sequences(checkpoints, kind, max_tokens):
    policy = load_policy(checkpoints[kind], chunk_tokens=5)
    plain = AutoModelForCausalLM.from_pretrained(checkpoints[kind], attn_implementation="eager", dtype=torch.float32)
    rows = batch(3, 4, temperature=0.7)
    for row, logprobs, entropies in packed(policy, rows, max_tokens):
        expected, expected_entropies = alone(plain, rows[row])
        torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(entropies, expected_entropies, atol=1e-5, rtol=1e-5)
        (logprobs.square().sum() + 0.3 * entropies.sum()).backward(retain_graph=True)
        (expected.square().sum() + 0.3 * expected_entropies.sum()).backward()

    theirs = dict(plain.named_parameters())
    for name, parameter in policy.model.named_parameters():
        scale = float(theirs[name].grad.abs().max())
        torch.testing.assert_close(parameter.grad, theirs[name].grad, atol=1e-5 * max(1.0, scale), rtol=1e-4)


def test_the_units_of_sharding_are_the_layers_of_any_architecture(checkpoints):
    for kind in ("llama-tied", "gpt2"):
        layers = decoder_layers(load_policy(checkpoints[kind]).model)
        assert len(layers) == 2 and len({type(layer) for layer in layers}) == 1


def test_gradient_checkpointing_changes_no_gradient(checkpoints):
    grads = []
    for recompute in (False, True):
        policy, calls = load_policy(checkpoints["qwen3-tied"], gradient_checkpointing=recompute), []
        policy.model.model.layers[0].input_layernorm.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        sum(logprobs.sum() for _, logprobs, _ in packed(policy, batch(2, 3), 400)).backward()
        assert len(calls) == 1 + recompute
        grads.append([parameter.grad for parameter in policy.parameters()])
    for once, twice in zip(*grads, strict=True):
        torch.testing.assert_close(once, twice, atol=1e-6, rtol=1e-5)


def test_a_change_in_one_sequence_leaves_its_neighbors_bit_for_bit(checkpoints):
    policy = load_policy(checkpoints["llama-tied"])
    rows = batch(2, 3)
    before = {row: logprobs for row, logprobs, _ in packed(policy, rows, 400)}
    rows[2].prompt_ids[:] = (rows[2].prompt_ids + 1) % 53
    after = {row: logprobs for row, logprobs, _ in packed(policy, rows, 400)}

    assert not torch.equal(before[2], after[2])
    assert all(torch.equal(before[row], after[row]) for row in before if row != 2)


@given(st.lists(st.integers(1, 300), min_size=1, max_size=40))
@settings(max_examples=60, deadline=None)
def test_blocks_hold_every_token_once_and_less_than_twice_the_attention_area(lengths):
    layout = make_layout(lengths)

    assert sum(block.sources.numel() * block.length for block in layout.blocks) < 2 * sum(n * n for n in lengths)
    sources = torch.cat([block.sources for block in layout.blocks])
    places = torch.arange(sum(lengths)) if layout.block_index is None else layout.block_index
    assert torch.equal(sources[places], torch.arange(sum(lengths)))
    rows = torch.cat([torch.arange(s.numel()) // b.length for b in layout.blocks for s in [b.sources]])
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    for index, length in enumerate(lengths):  # consecutive index of one padded row
        mine = places[sequence == index]
        assert torch.equal(mine, torch.arange(int(mine[0]), int(mine[0]) + length))
        assert rows[mine].unique().numel() == 1


def test_equal_lengths_need_no_copies_at_all():
    assert make_layout([7, 7, 7]).block_index is None
    assert make_layout([7, 6, 7]).block_index is not None


def test_a_model_that_cannot_be_packed_and_a_missing_directory_are_named(tmp_path):
    from transformers import BloomConfig

    config = BloomConfig(vocab_size=53, hidden_size=32, n_layer=1, n_head=4, pad_token_id=0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)

    with pytest.raises(ConfigError, match="bloom"):
        load_policy(tmp_path)
    with pytest.raises(ConfigError, match="no config.json there"):
        load_policy(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["attention_dropout", "resid_pdrop"])
def test_dropout_of_a_checkpoint_is_turned_off_because_scores_must_be_repeatable(checkpoints, tmp_path, name):
    directory = tmp_path / "model"
    directory.mkdir()
    for path in checkpoints["llama-tied" if name == "attention_dropout" else "gpt2"].iterdir():
        (directory / path.name).write_bytes(path.read_bytes())
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, name: 0.5}))

    policy = load_policy(directory)
    rows = [trajectory(torch_rng(), 0, 0, num_actions=8)]
    (_, once, _), (_, again, _) = next(packed(policy, rows, 99)), next(packed(policy, rows, 99))

    assert torch.equal(once, again)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("kind", ["opt", "biogpt", "seed_oss"])
def test_functional_dropout_and_skipped_layers_are_off_with_and_without_recomputed_layers(tmp_path, kind, recompute):
    sizes = dict(
        vocab_size=53, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=256,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )
    drop = {
        "opt": dict(dropout=0.5, attention_dropout=0.5, layerdrop=0.5, ffn_dim=48, word_embed_proj_dim=32),
        "biogpt": dict(hidden_dropout_prob=0.5, attention_probs_dropout_prob=0.5, layerdrop=0.5, intermediate_size=48),
        "seed_oss": dict(residual_dropout=0.5, attention_dropout=0.5, intermediate_size=48, num_key_value_heads=2,
                         head_dim=8),
    }[kind]
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(
        CONFIG_MAPPING[kind](**sizes, **drop), attn_implementation="eager", dtype=torch.float32
    ).eval()
    plain.save_pretrained(tmp_path)
    policy = load_policy(tmp_path, gradient_checkpointing=recompute)
    rows = batch(2, 2)

    (sum(logprobs.sum() for _, logprobs, _ in packed(policy, rows, 400))).backward()
    sum(alone(plain, row)[0].sum() for row in rows).backward()

    theirs = dict(plain.named_parameters())
    largest = max(float(one.grad.abs().max()) for one in theirs.values() if one.grad is not None)
    for name, parameter in policy.model.named_parameters():
        if parameter.grad is not None:
            assert float((parameter.grad - theirs[name].grad).abs().max()) < 1e-5 * largest, name


def torch_rng():
    import numpy as np

    return np.random.default_rng(3)
