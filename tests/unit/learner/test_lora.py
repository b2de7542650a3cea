"""Training an adapter: what is trained, saved, published, compared with and exported is what LoRA says."""

import copy
import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from learner.checkpoint.shards import ShardReader, read_training_tensors, training_tensors, write_shards
from learner.data.packing import pack
from learner.model.adapter import lora as quantization
from learner.model.adapter.lora import (
    Dequantized,
    FrozenAdapter,
    adapter_layers,
    adapter_parameters,
    add_adapter,
    base_tensors,
    check_quantization,
    check_resumed,
    chosen_layers,
    describe,
    describe_adapter,
)
from learner.model.optimizer import make_optimizer, make_schedule
from learner.model.policy import Policy, load_policy
from learner.publish.export import export_model
from learner.ranks.mesh import Ranks
from streamrl.architectures.miniature import build_miniature
from streamrl.config.load import load_config
from streamrl.config.schema import LoraBase, LoraConfig, LoraInit, OptimizerConfig, SchedulerConfig
from streamrl.errors import CheckpointError, ConfigError
from streamrl.weights.adapter import adapted_layers, merged
from tests.kit.learning import VOCAB, batch, tiny_checkpoint

LORA = LoraConfig(rank=4, alpha=8.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("lora") / "model", "qwen3", tied=True)


def policy_with(model: Path, config: LoraConfig = LORA, *, seed: int = 7) -> Policy:
    return load_policy(model, adapt=partial(add_adapter, config=config, seed=seed))


def moved(policy: Policy) -> Policy:
    """Factors as after some training: the second ones are not 0 any more."""
    random = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for _, factor in adapter_parameters(policy):
            factor += 0.1 * torch.randn(factor.shape, generator=random)
    return policy


def scores(policy, rows=None) -> torch.Tensor:
    (micro,) = pack(rows or batch(1, 2), 200)
    with torch.no_grad():
        return policy(
            micro.tokens, micro.positions, micro.packing, micro.score_index, micro.targets, micro.temperatures
        )[0]


def test_an_adapter_starts_at_the_model_and_only_its_factors_are_trained(model):
    plain, policy = load_policy(model), policy_with(model)

    assert torch.equal(scores(plain), scores(policy))
    names = [name for name, _ in adapter_parameters(policy)]
    assert len(names) == 2 * 2 * 7 and names[0] == "model.layers.0.self_attn.q_proj.lora_A.weight"
    assert {name for name, p in policy.named_parameters() if p.requires_grad} == {
        f"model.{name.removesuffix('.weight')}.default.weight" for name in names
    }
    assert dict(base_tensors(policy)).keys() == dict(plain.model.named_parameters()).keys()
    count = sum(factor.numel() for _, factor in adapter_parameters(policy))
    said = describe(policy, LORA, 1e-5)
    assert "rank 4 on 14 layers" in said and f"{count:,} trained weights" in said and "0.0001" in said


def test_optimizer_and_checkpoint_hold_the_adapter_alone(model):
    policy = policy_with(model)
    optimizer = make_optimizer(policy, OptimizerConfig(lr=1e-3))
    scores(policy)
    for _, factor in adapter_parameters(policy):
        factor.grad = torch.ones_like(factor)
    optimizer.step()

    keys = [key for key, _ in training_tensors(policy, optimizer)]
    assert len(keys) == 28 * 4 and all(".lora_" in key for key in keys)


def test_in_half_precision_frozen_weights_have_no_float32_master_and_factors_do(model):
    ranks = Ranks.start("cpu", sharded=True)
    try:
        plain = load_policy(model, dtype=torch.bfloat16, ranks=ranks)
        policy = load_policy(
            model, dtype=torch.bfloat16, ranks=ranks,
            adapt=partial(add_adapter, config=LORA, seed=7, dtype=torch.bfloat16),
        )
        assert torch.equal(scores(plain), scores(policy))
        types = {(p.requires_grad, p.dtype) for p in policy.parameters()}
        (micro,) = pack(batch(1, 2), 200)
        policy(
            micro.tokens, micro.positions, micro.packing, micro.score_index, micro.targets, micro.temperatures
        )[0].sum().backward()
        gradients = {factor.grad.dtype for _, factor in adapter_parameters(policy)}
    finally:
        ranks.close()
    assert types == {(True, torch.float32), (False, torch.bfloat16)} and gradients == {torch.float32}


@pytest.mark.shows("policy.lora.base_quantization")
@pytest.mark.parametrize("how", [LoraBase.nf4, LoraBase.int8])
def test_a_quantized_base_is_published_as_what_the_learner_computes_with(tmp_path, how):
    pytest.importorskip("bitsandbytes")
    source = tiny_checkpoint(tmp_path / "model", "qwen3", tied=False)
    config = replace(LORA, base_quantization=how)
    policy = moved(policy_with(source, config))
    optimizer = make_optimizer(policy, OptimizerConfig(lr=1e-3))
    base = {
        name: weight.full_tensor() if isinstance(weight, Dequantized) else weight
        for name, weight in base_tensors(policy)
    }
    whole, plain = load_policy(source), load_policy(source)
    with torch.no_grad():
        for name, tensor in merged(base, dict(adapter_parameters(policy)), LORA.alpha / LORA.rank):
            dict(whole.model.named_parameters())[name].copy_(tensor)
    (micro,) = pack(batch(1, 2), 200)

    torch.testing.assert_close(scores(whole), scores(policy), atol=1e-4, rtol=1e-4)
    reference = FrozenAdapter(policy, name="reference", off=True)
    assert 1e-4 < (reference.score(micro) - scores(plain)).abs().max() < 3.0, "rounded, and not something else"
    policy(
        micro.tokens, micro.positions, micro.packing, micro.score_index, micro.targets, micro.temperatures
    )[0].sum().backward()
    optimizer.step()
    assert all(factor.grad is not None for _, factor in adapter_parameters(policy))
    export_model(policy, source, tmp_path / "run" / "model", lora=config)
    torch.testing.assert_close(scores(load_policy(tmp_path / "run" / "model")), scores(policy), atol=1e-4, rtol=1e-4)


def test_a_quantized_base_without_its_library_names_the_remedy(monkeypatch):
    monkeypatch.setattr(quantization, "find_spec", lambda name: None)

    with pytest.raises(ConfigError, match=r"pip install 'streamrl\[qlora\]'"):
        check_quantization(LoraBase.nf4)


@pytest.mark.parametrize("tied", [True, False])
def test_merged_exported_and_read_by_peft_it_is_the_same_model(tmp_path, tied):
    source = tiny_checkpoint(tmp_path / "model", "qwen3", tied=tied)
    policy = moved(policy_with(source))
    expected = scores(policy)
    export_model(policy, source, tmp_path / "run" / "model", lora=LORA)

    torch.testing.assert_close(scores(load_policy(tmp_path / "run" / "model")), expected, atol=1e-5, rtol=1e-5)
    plain = AutoModelForCausalLM.from_pretrained(source)
    by_peft = PeftModel.from_pretrained(copy.deepcopy(plain), tmp_path / "run" / "adapter")
    ids = torch.arange(9)[None]
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    with torch.no_grad():
        torch.testing.assert_close(by_peft(ids).logits, ours(ids).logits, atol=1e-5, rtol=1e-5)
        assert not torch.allclose(plain(ids).logits, ours(ids).logits, atol=1e-2)
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert {"adapter_config.json", "adapter_model.safetensors", "config.json"} <= {path.name for path in files}
    written = json.loads((tmp_path / "run" / "adapter" / "adapter_config.json").read_text())["target_modules"]
    assert written == sorted(written) and len(written) > 4, "the same file in every process"
    plain_file = tmp_path / "plain"
    plain_file.touch()
    assert {path.stat().st_mode for path in files} == {plain_file.stat().st_mode}, "the mode follows the umask"


def test_what_is_published_gives_the_trained_policy(model):
    policy = moved(policy_with(model))
    whole = load_policy(model)
    document = dict(merged(dict(base_tensors(policy)), dict(adapter_parameters(policy)), LORA.alpha / LORA.rank))
    with torch.no_grad():
        for name, parameter in whole.model.named_parameters():
            parameter.copy_(document[name])

    torch.testing.assert_close(scores(whole), scores(policy), atol=1e-5, rtol=1e-5)


def test_the_reference_is_the_base_and_follows_the_policy_when_it_is_told_to(model):
    policy = policy_with(model)
    base, reference = scores(policy), FrozenAdapter(policy, name="reference", off=True)
    average = FrozenAdapter(policy, name="ewma", off=False)
    moved(policy)
    trained = scores(policy)
    (micro,) = pack(batch(1, 2), 200)

    assert torch.equal(reference.score(micro), base)
    assert torch.equal(scores(policy), trained), "scoring the reference left the policy as it was"
    assert all(parameter.requires_grad for _, parameter in adapter_parameters(policy))
    reference.sync(policy)
    assert torch.equal(reference.score(micro), trained)
    average.blend(policy, decay=0.5)
    assert not torch.allclose(average.score(micro), base) and not torch.allclose(average.score(micro), trained)
    assert sum(factor.numel() for _, factor in reference.tensors()) == sum(
        factor.numel() for _, factor in adapter_parameters(policy)
    ), "no second copy of the weights"


@pytest.mark.shows(
    "policy.lora.rank", "policy.lora.alpha", "policy.lora.target_modules", "policy.lora.exclude", "policy.lora.init"
)
def test_each_setting_of_the_adapter_changes_it(model):
    usual = policy_with(model)

    def factors(**changed):
        return dict(adapter_parameters(policy_with(model, replace(LORA, **changed))))

    def layers(**changed):
        return {name.split(".")[-3] for name in factors(**changed)}

    q = "model.layers.0.self_attn.q_proj.lora_A.weight"
    assert factors(rank=2)[q].shape == (2, 32)
    assert layers() == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert layers(target_modules=["q_proj", "v_proj"]) == {"q_proj", "v_proj"}
    assert layers(exclude=["up_proj"]) == layers() - {"up_proj"}
    gaussian = factors(init=LoraInit.gaussian)
    assert not torch.equal(gaussian[q], dict(adapter_parameters(usual))[q])
    assert not gaussian["model.layers.0.self_attn.q_proj.lora_B.weight"].any()
    weak = moved(policy_with(model, replace(LORA, alpha=4.0)))
    assert not torch.allclose(scores(weak), scores(moved(usual)))


@pytest.mark.shows("policy.lora.lr_scale")
def test_the_rate_is_the_optimizers_times_the_scale(tmp_path):
    optimizer, scheduler = OptimizerConfig(lr=1e-5), SchedulerConfig(name="linear", min_lr=1e-6)
    one, ten = (make_schedule(optimizer, scheduler, num_steps=10, lr_scale=scale) for scale in (1.0, 10.0))

    assert [ten.lr_at(step) for step in (0, 5, 20)] == pytest.approx([10 * one.lr_at(step) for step in (0, 5, 20)])


@pytest.mark.parametrize("words, said", [
    (["policy.lora.alpha=8"], "policy.lora.alpha does nothing"),
    (["policy.lora.rank=8", "policy.lora.target_modules=[all-linear,q_proj]"], "stands for all names"),
    (["policy.lora.rank=8", "policy.lora.target_modules=[]"], "adapts no layer"),
    (["policy.lora.rank=8", "reference.sync_every_steps=3", "reference.model_path=x"], "cannot follow an adapter"),
    (["policy.lora.rank=0"], "policy.lora.rank"),
])
def test_settings_that_cannot_be_meant_are_refused(words, said):
    with pytest.raises(ConfigError, match=said.replace(".", r"\.")):
        load_config(["experiment=quickstart", *words])


@pytest.mark.parametrize("given, said", [
    ({"target_modules": ["lm_head"]}, "'lm_head' is the embedding or the output layer"),
    ({"target_modules": ["embed_tokens"]}, "'embed_tokens' is the embedding or the output layer"),
    ({"target_modules": ["no_such_layer"]}, "target_modules: 'no_such_layer' is no layer .* which are down_proj, "),
    ({"target_modules": ["q_proj", "k_porj"]}, "'k_porj' is no layer .* Did you mean k_proj"),
    ({"target_modules": ["mlp"]}, r"'mlp' is no linear layer \(Qwen3MLP\)"),
    ({"exclude": ["upproj"]}, "exclude: 'upproj' is no layer .* Did you mean up_proj"),
    ({"exclude": ["self_attn"]}, "exclude: 'self_attn' is no linear layer"),
    ({"target_modules": ["q_proj"], "exclude": ["q_proj"]}, r"exclude=\['q_proj'\] leaves no layer"),
])
def test_each_name_that_chooses_no_layer_is_refused_with_near_ones(model, given, said):
    with pytest.raises(ConfigError, match=said):
        policy_with(model, replace(LORA, **given))


MIXTURES = {
    "qwen3_moe": 4 * 2, "mixtral": 4 * 2, "phimoe": 4 * 2,
    "deepseek_v3": 5 * 2 + 2 * 3,  # a dense layer, and the experts that all tokens share
}
"""Family -> its plain linear layers, in two decoder layers."""


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory) -> dict[str, Path]:
    sizes = dict(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, num_experts_per_tok=2, max_position_embeddings=256,
        pad_token_id=0, eos_token_id=1, bos_token_id=2, initializer_range=0.3,
    )
    own = {
        "qwen3_moe": {"num_experts": 4, "head_dim": 8}, "mixtral": {"num_local_experts": 4},
        "phimoe": {"num_local_experts": 4}, "deepseek_v3": {
            "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 16,
            "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4,
        },
    }
    folders = {}
    for family in MIXTURES:
        folders[family] = tmp_path_factory.mktemp(family)
        torch.manual_seed(0)
        config = AutoConfig.for_model(family, **{**sizes, **own[family]})
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folders[family])
    return folders


@pytest.mark.parametrize("family", MIXTURES)
def test_of_a_mixture_the_linear_layers_are_trained_and_experts_stay(mixtures, tmp_path, family):
    """The trained adapter equals the exported one, merged and on its own."""
    policy = moved(policy_with(mixtures[family]))
    plain = load_policy(mixtures[family])
    layers = adapted_layers(name for name, _ in adapter_parameters(policy))
    assert len(layers) == MIXTURES[family] and not any(".experts." in name for name in layers)
    assert "experts are one tensor a layer and stay frozen" in describe(policy, LORA, 1e-5)
    assert not torch.allclose(scores(policy), scores(plain))

    export_model(policy, mixtures[family], tmp_path / "model", lora=LORA)
    assert torch.allclose(scores(load_policy(tmp_path / "model")), scores(policy), atol=1e-4)
    base = AutoModelForCausalLM.from_pretrained(mixtures[family], dtype=torch.float32)
    if family != "deepseek_v3":  # peft takes the names of its dense layers for those of experts
        theirs = PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload()
        whole = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
        for (name, one), (_, other) in zip(theirs.named_parameters(), whole.named_parameters(), strict=True):
            torch.testing.assert_close(one, other, msg=name)


@pytest.mark.parametrize("name", ["experts", "down_proj", "gate"])
def test_experts_and_routers_of_a_mixture_are_no_target_and_the_refusal_says_what_works(mixtures, name):
    with pytest.raises(ConfigError, match=f"'{name}' is no .* which are k_proj, o_proj, q_proj, v_proj.* stay frozen"):
        policy_with(mixtures["qwen3_moe"], replace(LORA, target_modules=["q_proj", name]))
    policy_with(mixtures["qwen3_moe"], replace(LORA, exclude=["experts", "gate"]))  # they have none anyway


def test_a_checkpoint_resumes_only_over_the_base_and_the_adapter_that_it_belongs_to(model, tmp_path):
    now = describe_adapter(LORA, model, Ranks())
    other = describe_adapter(LORA, tiny_checkpoint(tmp_path / "other", seed=1), Ranks())
    saved = now.to_plain()

    check_resumed(saved, now, Ranks())
    check_resumed(None, None, Ranks())
    check_resumed({**saved, "base": "/elsewhere"}, now, Ranks())  # the same weights in another place
    for state, mine, said in (
        (saved, other, "belongs to the weights of"), (saved, None, "set policy.lora.rank=4"),
        (None, now, "holds all weights"), ({**saved, "rank": 8}, now, "policy.lora.rank=4"),
        (saved, replace(now, alpha=16.0), "policy.lora.alpha=16"),
        (saved, replace(now, target_modules=("q_proj", "v_proj")), r"=\[q_proj,v_proj\].*=\[all-linear\]"),
        (saved, replace(now, exclude=("o_proj",)), r"policy.lora.exclude=\[o_proj\], but"),
        (saved, replace(now, base_quantization="nf4"), "set policy.lora.base_quantization=none"),
    ):
        with pytest.raises(ConfigError, match=said):
            check_resumed(state, mine, Ranks())


def test_trained_weights_that_no_module_asks_for_are_an_error_and_not_lost(model, tmp_path):
    def states(config):
        policy = policy_with(model, config)
        return policy, make_optimizer(policy, OptimizerConfig())

    everything, fewer = states(LORA), states(replace(LORA, target_modules=["q_proj"]))
    write_shards(tmp_path / "shard", training_tensors(*everything), Ranks())
    read_training_tensors(ShardReader([tmp_path / "shard"]), *everything)
    with pytest.raises(CheckpointError, match="tensors that are not trained here"):
        read_training_tensors(ShardReader([tmp_path / "shard"]), *fewer)


def test_every_layer_is_adapted_whatever_the_architecture(tmp_path):
    for architecture in ("llama", "mistral"):
        policy = policy_with(tiny_checkpoint(tmp_path / architecture, architecture))
        assert len(adapter_layers(policy)) == 14
    with pytest.raises(ConfigError, match="Conv1D"):
        policy_with(tiny_checkpoint(tmp_path / "gpt2", "gpt2"))


@pytest.mark.parametrize("model_type", ["longcat_flash", "gemma4_text", "llama4_text"])
def test_what_a_router_holds_gets_no_adapter(model_type):
    """Some routers read the weight of a linear layer without calling it: an adapter there would not be computed."""
    model = build_miniature(CONFIG_MAPPING[model_type]())

    chosen = chosen_layers(model, LoraConfig(rank=2))

    called = set()
    for name in chosen:
        model.get_submodule(name).register_forward_hook(lambda *_, name=name: called.add(name))
    model(input_ids=torch.arange(40)[None] % 90 + 3)
    assert chosen and set(chosen) == called
