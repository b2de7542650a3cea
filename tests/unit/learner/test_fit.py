"""What fits: counted memory against literal sums and against a real rank's, the refusal, and the command."""

import json
import sys
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig

from learner.fit.__main__ import lines, main
from learner.fit.estimate import (
    GIB,
    RESERVED,
    WORKING,
    RankMemory,
    Uncounted,
    check_memory,
    engine_memory,
    job_of,
    num_parameters,
    rank_memory,
)
from learner.fit.live_bytes import ACTIVATIONS, LOGITS, LiveBytes
from learner.fit.models import PUBLISHED, config_of_model, model_path
from learner.fit.proposal import Machine, Planner
from learner.fit.stand_ins import QUANTIZED_BYTES
from learner.ranks.mesh import Mesh
from streamrl.architectures.decode_graphs import bucket, graph_bytes
from streamrl.config.schema import LoraBase, LoraConfig, OptimizerConfig, PolicyConfig
from streamrl.errors import ConfigError
from tests.unit.config.setting_harness import config_of
from tests.unit.learner import fit_measured

SMALL = dict(
    vocab_size=160, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, tie_word_embeddings=False,
)
LORA = PolicyConfig(lora=LoraConfig(rank=4))


def small(**changes):
    return AutoConfig.for_model("qwen3", **{**SMALL, **changes})


def a_job(*words, on_gpu=False, **changes):
    words = ("learner.max_tokens_per_device=64", "rollout.max_prompt_tokens=8", *words)
    return replace(job_of(config_of(*words), longest=32, on_gpu=on_gpu), **changes)


def test_bytes_are_counted_from_a_tensors_making_to_its_end_and_by_kind():
    with LiveBytes(vocabulary=7) as live:
        kept = torch.ones(10)
        live.label("kept", [kept])
        live.begin("one")
        logits = torch.ones(3, 7) + 1.0  # the ones are gone after the sum
        live.begin("two")
        del logits
        view = kept[2:]
    assert live.peaks() == {"one": {"kept": 40, LOGITS: 2 * 84}, "two": {"kept": 40, LOGITS: 84}}
    assert view.numel() == 8 and ACTIVATIONS not in live.peaks()["one"]


def test_the_states_of_a_rank_are_those_of_its_parameters():
    count = num_parameters(small())
    one = rank_memory(a_job(), small()).kinds
    buffers = one["parameters"] - 4 * count
    assert 0 < buffers < 1000  # frequencies of the rotary embedding
    assert one["moments"] - 8 * count == 4 * 25  # and a count of steps for each of 2 layers' 11 tensors and 3 others'
    two = rank_memory(a_job("launch.num_learner_ranks=2"), small()).kinds
    assert two["moments"] < 0.51 * one["moments"] and two["gathered weights and gradients"] > 0


def test_copies_of_the_model_are_counted_as_they_are_held():
    words = ("launch.num_learner_ranks=4", "rollout.num_prompts_per_step=4")
    two, copied = (rank_memory(a_job(*more), small()) for more in (
        ("launch.num_learner_ranks=2",), (*words, "learner.mesh.replicate=2")))
    assert copied.kinds["moments"] == two.kinds["moments"] and copied.total == pytest.approx(two.total, rel=0.01)
    assert copied.trained == two.trained == num_parameters(small())
    divided = rank_memory(a_job(*words, "learner.mesh.tensor=2"), small())
    assert divided.trained == two.trained and divided.kinds["activations"] < 0.8 * two.kinds["activations"]
    long = rank_memory(a_job(*words, "learner.mesh.context=2"), small())  # rows of twice the tokens, cut over two
    assert long.trained == two.trained and long.kinds["activations"] < 1.2 * two.kinds["activations"]
    assert long.kinds["moments"] == pytest.approx(two.kinds["moments"] / 2, rel=0.01)
    ends = 2 * 160 * 32 + 5 * 32  # embedding, output layer and norms are divided over two, the rest over four
    expected = 8 * ((num_parameters(small()) - ends) / 4 + ends / 2)
    assert divided.kinds["moments"] == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize(("policy", "ranks"), [(PolicyConfig(gradient_checkpointing=True), 4), (LORA, 1)])
def test_two_depths_tell_what_counting_every_layer_does(policy, ranks):
    job, model = a_job(on_gpu=True, policy=policy, mesh=Mesh(shard=ranks)), small(num_hidden_layers=12)
    line, whole = rank_memory(job, model), rank_memory(job, model, whole_depth=True)
    assert line.total - RESERVED == pytest.approx(whole.total - RESERVED, rel=0.01) and line.trained == whole.trained


def test_every_means_that_saves_or_takes_memory_is_counted():
    model = small()
    plain = a_job(on_gpu=True, mesh=Mesh(shard=2))
    total = rank_memory(plain, model).total
    for more in ({"reduce_once": True}, {"reshard_after_forward": False}, {"frozen_copies": (torch.bfloat16,)},
                 {"critic_model": True}, {"tokens": 128}):
        assert rank_memory(replace(plain, **more), model).total > total, more
    assert rank_memory(replace(plain, snapshot=None), model).total < total
    eight = replace(plain, policy=PolicyConfig(optimizer=OptimizerConfig(name="adam8bit")))
    assert rank_memory(eight, model).total < total
    away = [rank_memory(replace(job, policy=replace(job.policy, optimizer=replace(job.policy.optimizer, offload=True))),
                        model) for job in (plain, replace(plain, mesh=Mesh(shard=4)))]
    kept = rank_memory(plain, model).kinds["moments"]
    assert all("moments" not in one.kinds for one in away) and away[0].total < total
    assert away[0].offloaded == kept and away[1].offloaded == pytest.approx(kept / 2, rel=0.02)
    settings = ("kl.mode=loss_k3", "kl.coef=0.1", "loss.anchor=ewma", "loss.surrogate=decoupled_ppo")
    assert a_job(*settings).frozen_copies == (torch.float32, torch.float32)
    offloaded = [a_job(*settings, "reference.offload=true", on_gpu=on_gpu).frozen_copies for on_gpu in (False, True)]
    assert offloaded == [(torch.float32, torch.float32), (torch.float32,)]


@pytest.mark.parametrize("how", [LoraBase.nf4, LoraBase.int8])
def test_quantized_layers_are_as_large_as_their_format_says(how):
    model, lora = small(), LoraConfig(rank=4, base_quantization=how)
    linear = 2 * (32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 64)
    others, factors = num_parameters(model) - linear, 4 * 2 * (2 * 64 + 2 * 48 + 3 * 96)
    found = rank_memory(a_job(on_gpu=True, policy=PolicyConfig(lora=lora)), model)
    expected = QUANTIZED_BYTES[how] * linear + 2 * others + 4 * factors
    assert found.kinds["parameters"] == pytest.approx(expected, abs=100) and found.trained == factors


@pytest.mark.parametrize(
    ("name", "billions"),
    [("Qwen/Qwen3-0.6B", 0.596), ("Qwen/Qwen3-8B", 8.19), ("Qwen/Qwen3-32B", 32.76), ("Qwen/Qwen3-30B-A3B", 30.53)],
)
def test_published_shapes_have_the_published_number_of_parameters(name, billions):
    assert num_parameters(config_of_model(name)) / 1e9 == pytest.approx(billions, abs=0.005)
    assert config_of_model(name.partition("/")[2].lower()).to_dict() == config_of_model(name).to_dict()


def test_an_engine_has_its_part_of_the_weights_and_of_the_heads():
    model = config_of_model("Qwen3-8B")
    one, two = (engine_memory(model, 16_000_000_000, 80e9, size) for size in (1, 2))
    assert one.per_token == 2 * 2 * 8 * 128 * 36 == 2 * two.per_token  # keys and values, two bytes each
    assert one.room == int(0.92 * 80e9) - 16_000_000_000 - WORKING and two.weights == one.weights // 2
    assert one.sequences(8192) == one.room // (8192 * one.per_token)
    assert engine_memory(model, 16 << 30, 1e9, 1).room == 0


def test_graphs_of_the_native_engine_are_counted_by_rows_and_span_wherever_its_gpu_is_divided(monkeypatch):
    model = config_of_model("Qwen3-0.6B")
    for rows, span in ((64, 4096), (128, 4096), (64, 8192), (50, 3000), (1, 2)):
        shapes = {(min(bucket(row, 4, 2), rows), min(bucket(place, 256, 4), span))
                  for row in range(1, rows + 1) for place in (*range(1, span + 1, 97), span)}
        held = 2 * len(shapes) * 28 * (40 << 10)
        assert graph_bytes(model, rows, span) == held + 10 * rows * model.vocab_size + 16 * rows * span
    graphs = graph_bytes(model, 64, 4096)
    assert graphs < graph_bytes(model, 128, 4096) and graphs < graph_bytes(model, 64, 8192)

    plain = engine_memory(model, 10**9, 80e9, 1)
    native = engine_memory(model, 10**9, 80e9, 1, graphs=graphs)
    assert (plain.graphs, native.graphs) == (0, graphs) and native.weights == 2 * plain.weights
    assert plain.room - native.room == graphs + plain.weights

    kinds = RankMemory("backward pass", {"parameters": GIB}, 10**6, 0)
    monkeypatch.setattr(Planner, "_estimate", lambda self, words: kinds)
    found = {}
    for rows, context in ((64, 4096), (256, 4096), (256, 8192)):
        words = ["actors.engine=native", f"actors.num_concurrent={rows}"]
        planner, machine = Planner("Qwen3-0.6B", model, words), Machine(2, 80e9, context)
        proposal = planner.propose(machine)
        found[rows, context] = proposal.engine.graphs
        told = [line for line in lines("Qwen3-0.6B", planner, machine, proposal) if "graphs of decode steps" in line]
        assert float(told[0].split()[0]) == pytest.approx(proposal.engine.graphs / GIB, abs=0.05)
    assert found == {key: graph_bytes(model, *key) for key in found} and len(set(found.values())) == 3
    assert Planner("Qwen3-0.6B", model, []).propose(Machine(2, 80e9, 4096)).engine.graphs == 0


@pytest.mark.shows("learner.gpu_memory_share")
def test_a_model_that_cannot_fit_is_refused_before_it_is_loaded(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", **SMALL}))
    words = [f"policy.model_path={tmp_path}", "learner.max_tokens_per_device=2048"]
    need = check_memory(config_of(*words), 8 * GIB, longest=512).total
    assert check_memory(config_of(*words), need, longest=512).total == need
    for more, total, remedy in (
        ((), need - 1, "policy.gradient_checkpointing=true"),
        (("learner.gpu_memory_share=0.5",), 2 * need - 2, "policy.gradient_checkpointing=true"),
        (("policy.gradient_checkpointing=true",), GIB, "policy.lora.rank=32"),
        (("policy.gradient_checkpointing=true", "policy.lora.rank=4"), GIB, "base_quantization=nf4"),
    ):
        with pytest.raises(ConfigError, match=remedy) as refused:
            check_memory(config_of(*words, *more), total, longest=512)
        assert f"streamrl fit {tmp_path} --gpus N" in str(refused.value)


def test_a_model_whose_code_needs_numbers_is_not_counted_and_named():
    strange = AutoConfig.for_model("bert", num_hidden_layers=1, hidden_size=32, num_attention_heads=4, vocab_size=160)
    with pytest.raises(Uncounted, match="the memory of bert cannot be counted"):
        rank_memory(a_job(), strange)


def test_the_command_proposes_settings_that_are_read_and_says_when_none_fit(tmp_path, monkeypatch, capsys):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **SMALL}))
    monkeypatch.setattr(sys, "argv", ["fit", str(tmp_path / "config.json"), "--gpus", "4", "--context", "256"])
    assert main() == 0
    shown = capsys.readouterr().out
    words = shown.splitlines()[-1].split()
    assert words[:3] == ["streamrl", "launch", f"policy.model_path={tmp_path}"] and "training every weight" in shown
    config = config_of(*words[2:])
    assert (config.launch.num_learner_ranks, config.launch.num_actors) == (2, 2)
    assert config.rollout.max_prompt_tokens + config.rollout.train.sampling.max_new_tokens == 256
    monkeypatch.setattr(sys, "argv", [*sys.argv, "policy.lora.rank=4", "--memory", "1GiB"])
    assert main() == 1 and "DOES NOT FIT" in capsys.readouterr().out


def test_a_name_without_a_configuration_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="Qwen/Qwen3-32B"):
        config_of_model("Qwen/Qwen3-9999B")
    assert len(PUBLISHED) == 4


@pytest.mark.parametrize("known", PUBLISHED)
def test_the_printed_command_names_a_known_model_as_the_hub_does(known, tmp_path, monkeypatch):
    short = known.partition("/")[2]
    assert {model_path(name) for name in (known, known.lower(), short, short.lower())} == {known}
    assert model_path(f"someone/{short}") == f"someone/{short}"
    (tmp_path / short).mkdir()
    monkeypatch.chdir(tmp_path)
    assert model_path(short) == short


def test_a_name_that_is_not_here_is_one_sentence_without_a_hub(tmp_path):
    with pytest.raises(ConfigError, match="^meta-llama/x: it is neither a folder here nor in the cache of the model "
                       "hub, which cannot be reached from here. Give a folder") as caught:
        config_of_model("meta-llama/x")
    assert "://" not in str(caught.value)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="no configuration of a model can be read there"):
        config_of_model(str(tmp_path))


@pytest.mark.timeout(280)
def test_a_real_ranks_resident_memory_is_within_a_tenth_of_the_estimate(tmp_path):
    found = fit_measured.measured(tmp_path, ["llama"], ["full", "lora", "checkpointing"], [1, 2], timeout_s=240)
    assert len(found) == 6
    for one in found:
        job = job_of(
            fit_measured.config_for(one["variant"], one["ranks"]), longest=fit_measured.LENGTH, on_gpu=False
        )
        estimate = rank_memory(job, fit_measured.model_config(one["model"]))
        assert estimate.total == pytest.approx(one["bytes"], rel=0.1), (one, estimate.kinds)
