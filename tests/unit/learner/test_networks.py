"""The frozen copy: it never learns, follows only when told to, and survives a restart; sharded or not."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoTokenizer

import streamrl
from actors.engines.base import EngineSpec
from actors.engines.native.engine import NativeEngine
from actors.local_policy import LocalModel
from actors.weights.probe import first_difference
from envs.json_service import listening
from learner.checkpoint.checkpoint import find_checkpoint, save_checkpoint
from learner.checkpoint.model_files import empty_model
from learner.checkpoint.shards import training_tensors
from learner.data.packing import empty_micro_batch, pack
from learner.model.adapter.lora import add_adapter
from learner.model.networks import FrozenPolicy, load_reference
from learner.model.optimizer import make_optimizer
from learner.model.policy import load_policy, policy_tensors
from learner.model.teacher import RemoteTeacher
from learner.model.tiny import make_tiny_model
from learner.publish.export import export_model
from learner.publish.probe import Prober
from learner.publish.publisher import Publisher
from learner.publish.rounding import trained_shards
from learner.ranks.mesh import Ranks, local_part
from learner.setup.preflight import check_models
from streamrl.architectures.miniature import build_miniature
from streamrl.architectures.saved_buffers import saved_buffers
from streamrl.config.load import load_config
from streamrl.config.schema import LoraConfig, OptimizerConfig, ReferenceConfig
from streamrl.errors import ConfigError, StreamrlError
from streamrl.messages import VersionRef
from streamrl.weights.document import Document
from streamrl.weights.saved import read_version
from streamrl.weights.shm.transport import ShmPublisher
from tests.fakes.service import in_thread
from tests.kit.learning import batch, tiny_checkpoint
from tests.unit.learner.objective.test_distill import groups_of

MICRO = pack(batch(2, 2), 500)[0]


@pytest.fixture(params=["one process", "sharded", "half precision", "offloaded"])
def how(request):
    """Keyword arguments of `load_policy`."""
    ranks = Ranks() if request.param == "one process" else Ranks.start("cpu", sharded=True)
    yield {"ranks": ranks, "dtype": torch.bfloat16 if request.param == "half precision" else torch.float32}
    ranks.close()


@pytest.fixture
def ranks(how):
    return how["ranks"]


@pytest.fixture
def pair(checkpoints, how, request):
    """A policy and a frozen copy of its start."""
    directory, offload = checkpoints["qwen3-tied"], request.node.callspec.params["how"] == "offloaded"
    copy = load_policy(directory, **how, offload=offload)
    return load_policy(directory, **how), FrozenPolicy(copy, name="reference")


def score(policy) -> torch.Tensor:
    inputs = (MICRO.tokens, MICRO.positions, MICRO.packing, MICRO.score_index, MICRO.targets, MICRO.temperatures)
    return policy(*inputs)[0]


@torch.no_grad()
def disturb(policy) -> None:
    for parameter in policy.parameters():
        part = local_part(parameter)
        part.add_(0.05 * torch.randn(part.shape, generator=torch.Generator().manual_seed(1)))


def train(policy) -> torch.Tensor:
    """One step of gradient descent; the scores before it."""
    logprobs = score(policy)
    logprobs.sum().backward()
    torch.optim.SGD(policy.parameters(), lr=1e-2).step()
    policy.zero_grad()
    return logprobs.detach()


def test_a_copy_scores_as_the_policy_did_and_stays_when_the_policy_learns(pair):
    policy, reference = pair
    start = train(policy)

    for _ in range(2):
        torch.testing.assert_close(reference.score(MICRO), start, atol=1e-6, rtol=0)
    assert not reference.score(MICRO).requires_grad
    assert float((score(policy).detach() - start).abs().max()) > 1e-3


def test_after_a_sync_it_scores_as_the_policy_does_now_and_then_stays_again(pair):
    policy, reference = pair
    reference.score(MICRO)
    train(policy)
    reference.sync(policy)

    now = train(policy)
    torch.testing.assert_close(reference.score(MICRO), now, atol=1e-6, rtol=0)


def test_a_blend_keeps_the_share_that_decay_says(pair):
    policy, reference = pair
    reference.score(MICRO)  # what the forward pass gathered must not hide the change
    before = {key: local_part(tensor).clone() for key, tensor in reference.tensors()}
    disturb(policy)

    reference.blend(policy, decay=0.75)

    weights = {name: local_part(p.detach()) for name, p in policy.named_parameters()}
    for key, tensor in reference.tensors():
        expected = 0.75 * before[key] + 0.25 * weights[key.removeprefix("frozen/reference/")]
        torch.testing.assert_close(local_part(tensor), expected, atol=1e-6, rtol=1e-5)
    with pytest.raises(ValueError, match=r"decay=1.5"):
        reference.blend(policy, decay=1.5)


def test_a_copy_that_has_moved_comes_back_from_a_checkpoint(tmp_path, pair, checkpoints, ranks, how):
    policy, reference = pair
    optimizer = make_optimizer(policy, OptimizerConfig())
    options = {"extra": {}, "blobs": {}, "num_keep": 1}
    save_checkpoint(tmp_path / "without", 1, policy, optimizer, ranks, **options)
    disturb(policy)
    reference.sync(policy)
    moved = reference.score(MICRO)
    save_checkpoint(tmp_path / "with", 1, policy, optimizer, ranks, **options, also=reference.tensors())
    fresh = FrozenPolicy(load_policy(checkpoints["qwen3-tied"], **how), name="reference")

    assert fresh.restore(find_checkpoint(tmp_path / "without", ranks).shards()) is False
    start = fresh.score(MICRO)
    assert fresh.restore(find_checkpoint(tmp_path / "with", ranks).shards()) is True
    assert torch.equal(fresh.score(MICRO), moved) and not torch.allclose(start, moved, atol=1e-3)


def test_passes_without_a_backward_one_change_nothing_that_is_saved_audited_or_restored(tmp_path, checkpoints, how):
    policy = load_policy(checkpoints["qwen3-tied"], **how)
    optimizer = make_optimizer(policy, OptimizerConfig())
    score(policy).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    prober = Prober(policy, MICRO.tokens[:20].tolist(), every=1, tolerance=None, device="cpu")
    passes = {"score": torch.no_grad()(lambda: score(policy)), "probe": lambda: prober.probe_if_due(1)}

    def held(look) -> list[dict]:
        found = []
        for read in (lambda: training_tensors(policy, optimizer), lambda: enumerate(trained_shards(policy))):
            look()
            found.append({key: (type(one), local_part(one).clone()) for key, one in read()})
        return found

    before = held(lambda: None)
    assert sum(key.startswith("optim/") for key in before[0]) == 3 * len(before[1])
    for name, look in passes.items():
        for mine, theirs in zip(held(look), before, strict=True):
            assert mine.keys() == theirs.keys(), (name, theirs.keys() - mine.keys())
            assert all(kind is theirs[key][0] and torch.equal(one, theirs[key][1]) for key, (kind, one) in mine.items())
    ranks = how["ranks"]
    save_checkpoint(tmp_path, 1, policy, optimizer, ranks, extra={}, blobs={}, num_keep=1)
    disturb(policy)
    passes["score"]()
    find_checkpoint(tmp_path, ranks).restore(policy, optimizer, ranks)
    assert all(torch.equal(part, before[1][place][1]) for place, part in enumerate(trained_shards(policy)))


@pytest.mark.shows("reference.offload")
@pytest.mark.parametrize("how", ["sharded", "half precision"], indirect=True)
def test_a_reference_in_host_memory_scores_bit_for_bit_as_one_on_the_device(checkpoints, how):
    start, policy = checkpoints["qwen3-tied"], load_policy(checkpoints["qwen3-tied"], **how)
    plain, offloaded = (
        load_reference(ReferenceConfig(offload=offload), start, policy, passes={}, **how) for offload in (False, True)
    )
    assert torch.equal(plain.score(MICRO), offloaded.score(MICRO))
    units = [unit for unit in offloaded._policy.modules() if isinstance(unit, FSDPModule)]
    policies = [unit._get_fsdp_state()._fsdp_param_group.offload_policy for unit in units]
    assert len(units) == 3 and all(isinstance(one, CPUOffloadPolicy) for one in policies)


def test_an_empty_micro_batch_is_scored_to_nothing(pair):
    assert pair[1].score(empty_micro_batch()).shape == (0,)


def test_a_model_of_another_shape_cannot_follow_the_policy(tmp_path, pair):
    policy, reference = pair
    other = FrozenPolicy(load_policy(tiny_checkpoint(tmp_path, "gpt2")), name="reference")

    reference.check_same_parameters(policy)
    with pytest.raises(ConfigError, match="reference model cannot follow the policy"):
        other.check_same_parameters(policy)


LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVW"  # with four special tokens the ids of `batch`


@contextmanager
def small_server(model_dir: Path, *, tells: bool = True) -> Iterator[str]:
    """The part of vLLM's server that a teacher needs, over a real model; one that does not tell logs nothing."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(model_dir)

    async def answer(request: web.Request, body: Any) -> tuple[int, Any]:
        return 200, {"data": [{"id": "served"}]} if request.method == "GET" else told(request.path, body)

    @torch.no_grad()
    def told(path: str, asked: dict[str, Any]) -> dict[str, Any]:
        assert asked["model"] == "served"
        if path == "/tokenize":
            return {"tokens": tokenizer.encode(asked["prompt"], add_special_tokens=asked["add_special_tokens"])}
        assert path == "/v1/completions" and asked["prompt_logprobs"] == 0
        if not tells:
            return {"choices": [{"text": "a"}]}
        ids = torch.tensor(asked["prompt"])
        logprobs = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0].tolist()
        tokens = [{str(one): {"logprob": value}} for one, value in zip(asked["prompt"][1:], logprobs, strict=True)]
        return {"choices": [{"prompt_logprobs": [None, *tokens]}]}

    with in_thread(listening(answer, "127.0.0.1", 0, max_bytes=1 << 20)) as (_, port):
        yield f"http://127.0.0.1:{port}/v1"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return (
        make_tiny_model(folder / "student", characters=LETTERS, hidden_size=16, num_heads=2, seed=1),
        make_tiny_model(folder / "teacher", characters=LETTERS, hidden_size=32, num_heads=2, seed=2),
    )


@pytest.mark.parametrize("max_tokens", [40, 10_000])
def test_its_scores_are_those_of_the_checkpoint(models, max_tokens):
    student, teacher = models
    here = FrozenPolicy(load_policy(teacher), name="teacher")
    with small_server(teacher) as url:
        there = RemoteTeacher(url, student)
        assert not there.shares_prompts
        for micro in pack(batch(3, 3, seed=4), max_tokens):
            torch.testing.assert_close(there.score(micro), here.score(micro), atol=1e-4, rtol=1e-4)


def test_training_with_a_server_is_training_with_its_checkpoint(models):
    student, teacher = models
    settings = {"algorithm": "distill", "policy__optimizer__lr": 3e-3, "rollout__max_prompt_tokens": 16}
    with small_server(teacher) as url:
        trainers = [streamrl.Trainer(student, distill__teacher=where, **settings) for where in (teacher, url)]
        rows = [[trainer.train(groups_of(trainer, number)) for number in range(2)] for trainer in trainers]

    for here, there in zip(*rows, strict=True):
        for key in ("distill/kl", "policy/grad_norm", "advantage/std"):
            assert there[key] == pytest.approx(here[key], rel=1e-4)


def test_what_cannot_be_a_teacher_is_refused_with_what_to_do(models, tmp_path):
    student, teacher = models
    other = make_tiny_model(tmp_path / "other", characters=LETTERS[::-1], hidden_size=16, num_heads=2)

    def check(url: str, *words: str) -> None:
        check_models(
            load_config([f"policy.model_path={student}", f"distill.teacher={url}", *words]), notify=pytest.fail
        )

    with small_server(teacher) as url, small_server(other) as strange, small_server(teacher, tells=False) as silent:
        check(url)
        with pytest.raises(ConfigError, match="served, which has another tokenizer than the policy"):
            check(strange)
        with pytest.raises(ConfigError, match="temperature 1 only; sample at 1"):
            check(url, "rollout.train.sampling.temperature=0.7")
        with pytest.raises(StreamrlError, match="gave no log-probs of a prompt .KeyError: 'prompt_logprobs'"):
            RemoteTeacher(silent, student).score(pack(batch(1, 1), 1000)[0])
    with pytest.raises(ConfigError, match="no model is served there .ConnectError.*vllm serve MODEL"):
        check(url)


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
