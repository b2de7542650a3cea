"""Packed scoring against the model's own code, one sequence at a time."""

import json
import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from learner.checkpoint.checkpoint import ResumeState
from learner.data.layout import make_layout
from learner.data.packing import pack
from learner.model.attention import kernels as blocks
from learner.model.critic import CriticModel, ValueHead
from learner.model.networks import FrozenPolicy
from learner.model.policy import Inspect, decoder_layers, load_policy
from learner.objective.objective import Objective
from learner.objective.regularizers import LossWeights, Regularizers
from learner.ranks.mesh import Ranks
from learner.setup.trainer import load_networks
from streamrl.architectures.miniature import build_miniature
from streamrl.config.schema import AdvantageConfig, ConstraintConfig, EntropyConfig, KlConfig, LossConfig
from streamrl.errors import ConfigError
from tests.kit.learning import OneBatch, batch, plan_of, trajectory
from tests.unit.config.setting_harness import config_of, tiny_model
from tests.unit.learner.test_shared_prompts import rows_of


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


@pytest.mark.shows("policy.gradient_checkpointing")
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


GROUPS = [(40, [(9, 0), (12, 4), (3, 2)]), (30, [(5, 0), (22, 3), (7, 0), (1, 0)]), (2, [(4, 0)] * 2)]
"""Two groups that share their prompt, one of them answers of one token too, and one with too short a prompt."""
FAMILIES = {
    "llama": {}, "qwen3": {}, "gpt2": {}, "gpt_neox": {}, "gpt_oss": {}, "deepseek_v3": {}, "qwen3_moe": {},
    "mistral": {"sliding_window": 4096}, "gemma2": {}, "gemma3_text": {}, "cohere2": {}, "mixtral": {},
}
"""Rotary and learned positions, windows beside full layers, soft caps, sinks, experts, and latent attention."""


def passes(policy, rows, *, share, max_tokens=600):
    """(log-probs of every trajectory, gradients of all parameters, packed tokens)."""
    policy.zero_grad()
    logprobs, num_tokens = {}, 0
    for micro in pack(rows, max_tokens, share=share):
        scored, entropy = policy(
            micro.tokens, micro.positions, micro.packing, micro.score_index, micro.targets, micro.temperatures
        )
        (scored.square().sum() + 0.3 * entropy.sum()).backward()
        found = micro.padded(scored.detach())
        logprobs |= {i: found[place][micro.mask[place]] for place, i in enumerate(micro.trajectory_ids)}
        num_tokens += micro.num_tokens
    gradients = [p.grad.clone() for p in policy.parameters() if p.grad is not None]
    return torch.cat([logprobs[i] for i in sorted(logprobs)]), gradients, num_tokens


def assert_same(shared, alone):
    torch.testing.assert_close(shared[0], alone[0], atol=1e-5, rtol=1e-5)
    for mine, theirs in zip(shared[1], alone[1], strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5 * max(1.0, float(theirs.abs().max())), rtol=1e-4)
    assert shared[2] < 0.6 * alone[2]


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_and_gradients_are_those_of_trajectories_packed_one_by_one(tmp_path, family):
    build_miniature(AutoConfig.for_model(family, **FAMILIES[family])).save_pretrained(tmp_path)
    policy, rows = load_policy(tmp_path, share_prompts=True), rows_of(GROUPS)

    assert policy.shares_prompts
    assert_same(passes(policy, rows, share=True), passes(policy, rows, share=False))


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3_text", "deepseek_v3"])
def test_a_beginning_of_several_prompts_is_as_exact(tmp_path, family):
    build_miniature(AutoConfig.for_model(family, **FAMILIES[family])).save_pretrained(tmp_path)
    policy = load_policy(tmp_path, share_prompts=True)
    rows = rows_of([(40, [(9, 0), (12, 4)]), (30, [(5, 0)]), (35, [(6, 0)] * 3)], openings=[(0, 25), (0, 24), (1, 30)])
    (micro,) = pack(rows, 600, share=True)

    assert 1 in micro.packing.parents, "a prompt continues the stem, and its answers continue the prompt"
    assert_same(passes(policy, rows, share=True), passes(policy, rows, share=False))


def test_a_split_group_and_recomputed_layers_change_nothing(checkpoints):
    rows = rows_of(GROUPS)
    alone = passes(load_policy(checkpoints["mistral"]), rows, share=False)
    shared = passes(load_policy(checkpoints["mistral"], gradient_checkpointing=True), rows, share=True, max_tokens=70)

    assert_same(shared, alone)


def test_a_critic_of_its_own_and_one_on_the_policys_states_see_the_same_states(checkpoints):
    policy, rows = load_policy(checkpoints["qwen3"]), rows_of(GROUPS)
    critic = CriticModel(policy.model.get_decoder(), ValueHead(policy.hidden_size))
    torch.nn.init.normal_(critic.head.outer.weight)
    values, states = [], []
    for share in (False, True):
        (micro,) = pack(rows, 900, share=share, bootstrap=True)
        assert len(micro.bootstrap_index) > 0
        inspect = Inspect(micro.state_index)
        with torch.no_grad():
            values.append(critic(micro.tokens, micro.positions, micro.packing, micro.state_index))
            states.append(policy(
                micro.tokens, micro.positions, micro.packing, micro.score_index, micro.targets, micro.temperatures,
                inspect,
            ).states)

    torch.testing.assert_close(*values, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(*states, atol=1e-5, rtol=1e-5)


def test_a_step_with_a_reference_model_has_the_same_loss_gradients_and_statistics(checkpoints):
    policy, rows = load_policy(checkpoints["llama-tied"]), rows_of(GROUPS)
    reference = FrozenPolicy(load_policy(checkpoints["llama-tied"]), name="reference")
    loss, kl, constraint = LossConfig(), KlConfig(mode="reward_k1", coef=0.5), ConstraintConfig()
    found = []
    for share in (False, True):
        policy.zero_grad()
        objective = Objective(
            AdvantageConfig(), loss, max_new_tokens=32, max_lag=4,
            regularizers=Regularizers(kl, constraint, loss, LossWeights(kl, EntropyConfig(), constraint, loss)),
        )
        one = OneBatch(objective, rows, plan_of(rows), version=5)
        batches = pack(rows, 900, share=share)
        one.score(policy, batches, frozen={"reference": reference})
        total = sum(float(one.forward_backward(policy, micro)) for micro in batches)
        found.append((total, [p.grad.clone() for p in policy.parameters()], one.finish().flush(1)))
    (alone, expected, stats), (shared, gradients, shared_stats) = found

    assert shared == pytest.approx(alone, abs=1e-6)
    torch.testing.assert_close(gradients, expected, atol=1e-5, rtol=1e-4)
    assert 0.5 < shared_stats.pop("policy/shared_fraction") < 1.0 and stats.pop("policy/shared_fraction") == 0.0
    assert shared_stats.keys() == stats.keys()
    for key, value in stats.items():
        assert shared_stats[key] == pytest.approx(value, rel=1e-4, abs=1e-5), key


def test_a_model_whose_shared_passes_are_not_exact_packs_every_prompt(tmp_path, monkeypatch, caplog):
    """Here because the mask is broken: no family is known that passes the check of packed rows and fails this one."""
    build_miniature(AutoConfig.for_model("llama", rope_theta=12_345.0)).save_pretrained(tmp_path)
    right = blocks._mask
    monkeypatch.setattr(blocks, "_mask", lambda block, packing, rule: (
        right(block, packing, rule) if block.continued is None
        else right(block, packing, rule) & (block.continued.key_positions > 1)[:, None, None]
    ))
    with caplog.at_level(logging.WARNING, logger="streamrl.learner"):
        policy = load_policy(tmp_path, share_prompts=True)

    assert not policy.shares_prompts
    assert "packed again for every answer" in caplog.text and "differ from those of eager transformers" in caplog.text


@pytest.mark.shows("learner.share_prompts")
def test_the_networks_of_a_run_share_prompts_unless_told_not_to(tmp_path):
    model_dir, found = tiny_model(tmp_path), []
    for words in ((), ("learner.share_prompts=false",), ("kl.mode=k2_is",), ("advantage.estimator=vtrace",)):
        config = config_of(*words)
        with_critic = config.advantage.estimator == "vtrace"
        config.critic.kind = "model"
        networks = load_networks(
            config, model_dir, ResumeState("run"), Ranks(), with_critic=with_critic,
            with_reference=config.kl.mode != "off",
        )
        found.append(networks.shares_prompts)

    assert found == [True, False, True, True]
