"""What vLLM is started with, and that nothing of it outlives its actor; none of this needs vLLM itself."""

import asyncio
import gc
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from itertools import accumulate
from multiprocessing.synchronize import Event
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING

from actors.engines.base import AdapterSpec, EngineSpec, Generation, VersionSpan
from actors.engines.native.engine import build_model
from actors.engines.native.weights import checkpoint_tensors
from actors.engines.vllm import core as client
from actors.engines.vllm.adapters import AdapterVllmEngine
from actors.engines.vllm.core import (
    NUM_MORE_KEPT,
    CoreDiedError,
    generation_of,
    sampling_arguments,
    spans_of,
    turn_seed,
)
from actors.engines.vllm.engine import VllmEngine, as_in_files
from actors.engines.vllm.process import (
    GIB,
    OURS,
    SLACK_BYTES,
    USUAL_UTILIZATION,
    StagedDocument,
    cache_bytes,
    check_argument_names,
    check_model,
    engine_arguments,
    environment,
    gpu_arguments,
    kv_bytes_per_token,
    lasting_folder,
    starts_alone,
    utilization,
)
from actors.engines.vllm.reaper import MARK, group_pids
from actors.engines.vllm.worker import Staging, mapped_tensors, with_copies
from actors.settings import engine_spec
from streamrl.architectures.miniature import build_miniature
from streamrl.config.devices import NUM_MORE_CANDIDATES
from streamrl.errors import EngineError, RequestError
from streamrl.gpus import Gpu
from streamrl.messages import Sampling, VersionRef
from streamrl.weights.document import Document
from streamrl.weights.manifest import make_layout, make_manifest
from streamrl.weights.shm.transport import ShmPublisher
from tests.unit.config.setting_harness import config_of
from tests.unit.engines.tiny_models import character_tokenizer, request
from tests.unit.engines.vllm_harness import save

pytestmark = pytest.mark.timeout(60)


def arguments(device: str = "cpu", **extra) -> dict:
    return engine_arguments(
        max_num_seqs=4, max_tokens=100, device=device, dtype="float32", extra=extra, kv_bytes_per_token=1000
    )


def test_the_users_engine_arguments_win_over_defaults_and_never_over_ours():
    assert arguments()["enforce_eager"] and arguments()["enable_prefix_caching"]
    assert arguments()["enable_chunked_prefill"] is False and "enable_chunked_prefill" not in arguments(device="cuda")
    assert arguments(enforce_eager=False, tensor_parallel_size=2).items() >= {
        "enforce_eager": False, "tensor_parallel_size": 2,
    }.items()
    for name in OURS:
        with pytest.raises(EngineError, match=f"actors.vllm.{name} is not yours"):
            arguments(**{name: 1})


def test_the_cache_on_a_cpu_holds_the_longest_sequence_in_every_place_unless_told_how_much(monkeypatch):
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    assert arguments()["kv_cache_memory_bytes"] == cache_bytes(4, 100, 1000) >= 4 * 100 * 1000
    assert "kv_cache_memory_bytes" not in arguments("cuda") and "enforce_eager" not in arguments("cuda")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    assert "kv_cache_memory_bytes" not in arguments()
    config = SimpleNamespace(num_hidden_layers=3, num_key_value_heads=2, head_dim=8, num_attention_heads=4)
    assert kv_bytes_per_token(config, 4) == 2 * 3 * 2 * 8 * 4


def test_an_unknown_engine_argument_is_refused_with_the_nearest_one():
    @dataclass
    class Arguments:
        tensor_parallel_size: int = field(default=1)

    check_argument_names({"tensor_parallel_size": 2}, Arguments, "0.0")
    with pytest.raises(EngineError, match="did you mean actors.vllm.tensor_parallel_size"):
        check_argument_names({"tensor_paralel_size": 2}, Arguments, "0.0")


def test_the_environment_is_ours_inside_the_users_where_set_and_as_before_outside(monkeypatch):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0-1")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    before = dict(os.environ)

    with environment("mark", "cpu", 2, eager=True):
        inside = dict(os.environ)

    assert dict(os.environ) == before
    assert inside.items() >= {
        "VLLM_CPU_OMP_THREADS_BIND": "0-1", "OMP_NUM_THREADS": "2", MARK: "mark", "TORCHDYNAMO_DISABLE": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }.items()
    with environment("mark", "cuda", 2, eager=False):
        assert os.environ["OMP_NUM_THREADS"] == "7" and "TORCHDYNAMO_DISABLE" not in os.environ


def test_a_staged_document_is_read_back_bit_for_bit_by_another_mapping_and_leaves_no_name(tmp_path):
    tensors = {
        "a": torch.randn(3, 5), "b": torch.randn(7).to(torch.bfloat16), "none": torch.empty(0, 4),
        "c": torch.randn(6, 4).t(), "scalar": torch.tensor(2.5),
    }
    staged = StagedDocument(tensors)
    try:
        found = dict(mapped_tensors(staged.path, staged.entries))
    finally:
        staged.close()

    assert list(found) == list(tensors)
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)
    with pytest.raises(OSError):
        next(mapped_tensors(staged.path, staged.entries))


def test_a_document_that_is_a_file_is_mapped_as_it_is_though_it_lost_its_name(tmp_path):
    tensors = {"a": torch.randn(3, 5).to(torch.bfloat16), "odd": torch.ones(3, dtype=torch.uint8), "b": torch.randn(7)}
    with ShmPublisher(tmp_path / "documents", "run") as shm:
        specs = [(name, str(t.dtype).removeprefix("torch."), t.shape) for name, t in tensors.items()]
        writer = shm.begin(VersionRef(1, 1), layout := make_layout(specs, bucket_bytes=20))
        for tensor in tensors.values():
            writer.append(tensor.contiguous().view(torch.uint8).reshape(-1).numpy().data)
        manifest = make_manifest(layout, VersionRef(1, 1), None, writer.digests())
        document = Document.map_file(writer.commit(), manifest, layout).verify()
    given = document.renamed(manifest).tensors()
    staged = StagedDocument(given)
    found = dict(mapped_tensors(staged.path, staged.entries))

    assert staged._fd == -1 and given.file is not None  # nothing was copied
    assert all(torch.equal(found[name], tensor) and given[name].dtype == tensor.dtype for name, tensor in
               tensors.items())  # fmt: skip
    path = staged.path
    assert os.path.exists(path)
    staged.close()
    del document, given, staged
    gc.collect()
    assert not os.path.exists(path), "the file is closed with the last that refers to it"


def test_a_document_is_staged_as_far_as_memory_reaches_and_read_from_there():
    tensors = {name: torch.randn(100) for name in "abc"}
    staged = StagedDocument(tensors)
    staging = Staging(staged.path, staged.entries, torch.device("cpu"), spare_bytes=900)
    found = dict(staging.tensors())

    assert staging.done and staging.nbytes == 800 and list(staging._staged) == ["a", "b"]
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert found["a"].data_ptr() == staging._staged["a"].data_ptr()
    staged.close()


def test_a_document_that_cannot_be_read_fails_in_the_load_and_not_beside_it():
    staged = StagedDocument({name: torch.randn(100) for name in "abc"})
    staged.entries[1] = ("b", "float32", [100_000], 0)
    staging = Staging(staged.path, staged.entries, torch.device("cpu"), spare_bytes=1 << 20)

    with pytest.raises(ValueError, match="buffer length"):
        dict(staging.tensors())
    assert staging.done and list(staging._staged) == ["a"]
    staged.close()


def test_labels_become_versions_and_what_is_not_ours_is_refused():
    def span(version: str, start: int, end: int) -> SimpleNamespace:
        return SimpleNamespace(version=version, start=start, end=end)

    labels = [span("1:4", 0, 0), span("1:5", 0, 3), span("2:0", 3, 4)]
    assert spans_of(labels, 4) == [VersionSpan(VersionRef(1, 5), 0, 3), VersionSpan(VersionRef(2, 0), 3, 4)]
    assert spans_of([], 0) == spans_of(None, 0) == []
    with pytest.raises(EngineError, match="'default', which is no version"):
        spans_of([span("default", 0, 4)], 4)
    with pytest.raises(EngineError, match="cover 0 of 4"):
        spans_of(None, 4)


def output(*places: dict[int, float] | list[tuple[int, float]]) -> SimpleNamespace:
    """An output of vLLM with tokens 5 and 6: at each place ids and their log-probs, that of the token first."""
    pairs = [list(place.items()) if isinstance(place, dict) else place for place in places]
    ends = list(accumulate(map(len, pairs)))
    flat = SimpleNamespace(
        token_ids=[token for place in pairs for token, _ in place], start_indices=[0, *ends][: len(pairs)],
        logprobs=[number for place in pairs for _, number in place], end_indices=ends,
    )
    versions = [SimpleNamespace(version="1:0", start=0, end=2)]
    return SimpleNamespace(token_ids=[5, 6], logprobs=flat, weight_versions=versions, finish_reason="length")


def test_logprobs_that_are_missing_or_no_numbers_are_refused():
    good = output({5: -1.0}, {6: -2.0})
    assert generation_of(good, greedy=False).logprobs == [-1.0, -2.0]
    assert generation_of(good, greedy=True).logprobs == [0.0, 0.0]
    assert generation_of(good, greedy=False).sets is None
    for bad in (output({5: -1.0}), output({5: -1.0}, {6: float("nan")})):
        with pytest.raises(EngineError, match="log-probs"):
            generation_of(bad, greedy=False)


def test_the_ids_that_are_left_are_the_set_of_a_token_and_what_ties_beyond_them_is_left_out_of_both():
    cut = float("-inf")
    half, quarter, eighth = math.log(0.5), math.log(0.25), math.log(0.125)
    whole = [(5, quarter), (9, half), (5, quarter), (2, quarter), (7, cut), (8, cut)]  # the token comes twice
    # Of four ids that tie behind the first, two came, and the drawn one is a third.
    tied = [(6, eighth), (9, half), (4, eighth), (3, eighth)]
    done = generation_of(output(whole, tied), greedy=False)
    assert [ids.tolist() for ids in done.sets] == [[2, 5, 9], [3, 4, 6, 9]]
    assert done.logprobs == pytest.approx([quarter, math.log(0.125 / 0.875)])


def test_log_probs_of_all_that_may_be_left_are_asked_for_where_a_top_k_bounds_it():
    def asked(wants_sets: bool = True, **sampling) -> int:
        one = request([3], 4, sampling=Sampling(**sampling), wants_sets=wants_sets)
        return sampling_arguments(one, [1], vocab_size=100)["logprobs"]

    assert asked() == asked(top_p=0.9) == asked(temperature=0.0, top_k=4) == 0
    assert asked(top_k=4) == 4 + NUM_MORE_KEPT == 4 + NUM_MORE_CANDIDATES - 1 and asked(top_k=1024, min_p=0.1) == 100
    assert asked(wants_sets=False, top_k=4) == 0  # as an evaluation asks


@pytest.mark.parametrize("policy", ["continue", "recompute", "drain"])
def test_an_engine_with_adapters_hands_on_all_that_vllm_said_of_a_turn_the_sets_it_drew_from_among_it(
    policy, tmp_path, monkeypatch
):
    said = Generation([5, 6], [-1.0, -2.0], [VersionSpan(VersionRef(1, 3), 0, 2)], "stop", [np.array([2, 5])] * 2)

    async def generated(engine, asked, version=None) -> Generation:
        return said

    monkeypatch.setattr(client.Core, "check", lambda self: None)  # vLLM need not be there
    monkeypatch.setattr(VllmEngine, "_generate", generated)
    monkeypatch.setattr(client.Core, "alive", True)
    engine = AdapterVllmEngine(EngineSpec(
        model_dir=save(tmp_path, 0), tokenizer=character_tokenizer(), max_num_seqs=1, max_tokens=64, max_new_tokens=64,
        install_policy=policy, adapter=AdapterSpec(("model.layers.0.self_attn.q_proj",), 2, 1.0),
    ))

    async def turn() -> Generation:
        engine._loras[VersionRef(1, 3)] = None
        engine._open.set()
        return await engine.generate(request([3], 4, sampling=Sampling(top_k=2), wants_sets=True))

    try:
        assert asyncio.run(turn()) == said
    finally:
        engine._core.close()


def test_sequences_longer_than_the_models_positions_are_refused_before_anything_starts(tmp_path):
    spec = EngineSpec(
        model_dir=save(tmp_path, 0), tokenizer=character_tokenizer(), max_num_seqs=1, max_tokens=513, max_new_tokens=64
    )
    with pytest.raises(EngineError, match="max_tokens=513 exceeds the model's max_position_embeddings=512"):
        VllmEngine(spec)


def test_the_seed_of_a_turn_depends_on_the_members_seed_and_the_place_and_fits():
    seeds = [turn_seed(request([3] * length, 4, seed=seed)) for length in (1, 2, 9) for seed in (0, 1, 2**64 - 1)]
    assert len(set(seeds)) == 9 and all(0 <= seed < 2**63 for seed in seeds)
    assert seeds[0] == turn_seed(request([4], 9, seed=0))


PARENT = """
import subprocess, sys, time, os
from actors.engines.vllm.reaper import MARK
from actors.engines.vllm.process import EngineProcessGroup, environment
home = EngineProcessGroup(sys.argv[1])
with environment(home.mark, "cpu", 1, eager=True):
    grandchild = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"
    child = subprocess.Popen([sys.executable, "-c", grandchild])
print(home.mark, home.folder, flush=True)
time.sleep(600)
"""


def test_a_killed_actor_takes_its_engines_processes_and_their_folder_with_it(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    mark, folder = parent.stdout.readline().split()
    while len(group_pids(mark)) < 2:  # the child, and what the child started
        assert parent.poll() is None
        time.sleep(0.01)
    assert os.listdir(folder) == ["config.json"]

    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()

    while group_pids(mark) or os.path.exists(folder):
        time.sleep(0.01)
    parent.stdout.close()


class Refused(Exception):
    """Refusals of vLLM's own class, which is no ValueError."""


@pytest.mark.parametrize(("raised", "dead", "error"), [
    (ValueError("top_k must be an integer"), False, RequestError), (OverflowError("too large"), False, RequestError),
    (Refused("temperature"), False, RequestError),
    (RuntimeError("out of memory"), False, EngineError), (ValueError("anything"), True, CoreDiedError),
])
def test_what_one_request_raises_is_that_requests_unless_the_core_is_dead(raised, dead, error, monkeypatch):
    class Llm:
        errored = dead

        async def generate(self, *_, **__):
            raise raised
            yield

    deaths: list = []
    names = SimpleNamespace(tokens_input=lambda ids, cache_salt: ids, refusals=(Refused, ValueError, OverflowError))
    monkeypatch.setattr(client, "vllm", lambda: names)
    tracker = client.RequestTracker(SimpleNamespace(llm=Llm(), asleep=False), deaths.append)
    with pytest.raises(error) as caught:
        asyncio.run(tracker.submit([1], None, ""))
    assert type(caught.value) is error and len(deaths) == dead


@pytest.mark.parametrize("model_type", ["mixtral", "deepseek_v3", "llama"])
def test_vllm_gets_tensors_by_the_names_of_the_models_files(model_type, tmp_path):
    model = build_miniature(CONFIG_MAPPING[model_type](), seed=1)
    model.save_pretrained(tmp_path)
    published = {name: tensor.detach() for name, tensor in checkpoint_tensors(model).items()}

    given = as_in_files(build_model(tmp_path, dtype=torch.float32, device="meta"), published)

    files = load_file(tmp_path / "model.safetensors")
    assert given.keys() == files.keys() and all(torch.equal(given[name], tensor) for name, tensor in files.items())
    assert (given is published) == (model_type == "llama")


@pytest.mark.parametrize("model_type", [
    "deepseek_v2", "deepseek_v3", "minicpm3", "glm4_moe_lite", "longcat_flash", "cohere2", "ernie4_5_moe", "gpt_oss",
])
def test_what_vllm_computes_otherwise_on_a_cpu_is_refused_by_name_there_alone(model_type):
    config = CONFIG_MAPPING[model_type](architectures=["SomeForCausalLM"])
    with pytest.raises(EngineError, match=f"compute {model_type} as .*actors.engine=native"):
        check_model(config, "cpu")
    check_model(config, "cuda")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("model_type", ["qwen2", "qwen2_moe", "qwen3"])
def test_windows_in_some_layers_are_refused_where_vllm_has_none_of_the_kind(model_type, device):
    windows = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    make = CONFIG_MAPPING[model_type]
    with pytest.raises(EngineError, match=f"no {model_type} with a window in some layers .*use_sliding_window"):
        check_model(make(architectures=["SomeForCausalLM"], **windows), device)
    check_model(make(architectures=["SomeForCausalLM"]), device)


def test_a_tied_tensor_comes_once_more_at_the_end_where_vllm_holds_both():
    tensors = {"embed.weight": torch.randn(3), "norm.weight": torch.randn(2)}

    given = list(with_copies(tensors.items(), {"head.weight": "embed.weight", "other.weight": "nowhere.weight"}))

    assert [name for name, _ in given] == ["embed.weight", "norm.weight", "head.weight"]
    assert given[2][1] is tensors["embed.weight"] and list(with_copies(tensors.items(), {})) == list(tensors.items())


WAIT_S = 30.0


def gpu(free_gib: float, total_gib: float = 80.0) -> Gpu:
    return Gpu("0", "GPU-x", int(total_gib * GIB), int(free_gib * GIB))


def on_gpu(
    device: str = "cuda", *, half: bool = True, share: float | None = None, sleeps: bool = False, **extra
) -> dict:
    return gpu_arguments(
        device, extra, half=half, document_nbytes=2 * GIB, num_documents=2, share=share, gpu=gpu(80.0), sleeps=sleeps
    )


@pytest.mark.parametrize(
    ("free", "share", "expected"),
    [
        (80.0, None, USUAL_UTILIZATION),  # alone on the GPU: as vLLM would
        (40.0, None, (40 - 4 - SLACK_BYTES / GIB) / 80),  # beside a learner: what is free, documents and slack left out
        (60.0, 0.5, 0.5),  # a share that is free
        (38.0, 0.5, (38 - 4 - SLACK_BYTES / GIB) / 80),  # a share of which others took some
        (0.0, 0.5, 0.5),  # the driver tells nothing
    ],
)
def test_vllm_takes_what_is_free_and_no_more_than_its_share(free, share, expected):
    found = utilization(gpu(free), share, beside_nbytes=4 * GIB, model_nbytes=2 * GIB)
    assert found == pytest.approx(expected, abs=1e-4)
    if free:
        assert found * 80 <= free, "vLLM refuses to start when less is free than it is to take"


def test_a_gpu_without_room_for_the_model_is_refused_with_the_numbers():
    with pytest.raises(EngineError, match=r"9\.0 are free, and vLLM may take 1\.0 for a model of 2\.0"):
        utilization(gpu(9.0), None, beside_nbytes=4 * GIB, model_nbytes=2 * GIB)


def test_what_the_user_set_wins_and_log_probs_come_from_float32_logits():
    assert on_gpu() == {"hf_overrides": {"head_dtype": "float32"}, "gpu_memory_utilization": USUAL_UTILIZATION}
    assert "hf_overrides" not in on_gpu(half=False)
    given = on_gpu(gpu_memory_utilization=0.3, hf_overrides={"rope_theta": 1, "head_dtype": "model"})
    assert given == {"hf_overrides": {"rope_theta": 1, "head_dtype": "model"}}


def test_vllm_can_sleep_and_leaves_some_memory_free_where_a_run_goes_by_turns_alone():
    assert "enable_sleep_mode" not in on_gpu()
    found = on_gpu(sleeps=True, enable_sleep_mode=False)
    assert found["enable_sleep_mode"] and found["gpu_memory_utilization"] == pytest.approx(72 / 80, abs=1e-4)
    assert on_gpu(sleeps=True, share=0.5)["gpu_memory_utilization"] == 0.5


@pytest.mark.shows("actors.gpu_memory_share")
def test_the_share_of_an_actor_reaches_its_engine(tmp_path):
    for words, expected in (((), USUAL_UTILIZATION), (("actors.gpu_memory_share=0.4",), 0.4)):
        spec = engine_spec(config_of(*words), tmp_path, None)
        assert on_gpu(share=spec.memory_share)["gpu_memory_utilization"] == expected
        assert spec.num_device_documents == 0
    assert engine_spec(config_of("actors.transports=[ipc,zmq]"), tmp_path, None).num_device_documents == 2


@pytest.mark.parametrize(
    ("device", "extra", "ids"),
    [("cuda:3", {}, [3]), ("cuda:2", {"tensor_parallel_size": 2}, [2, 3]), ("cuda", {"tensor_parallel_size": 2}, None)],
)
def test_a_numbered_device_reaches_vllm(device, extra, ids):
    assert on_gpu(device, **extra).get("device_ids") == ids


def test_the_model_has_the_same_path_at_every_start_and_another_one_for_other_files(tmp_path):
    source, cache = tmp_path / "model", tmp_path / "cache"
    source.mkdir()
    (source / "config.json").write_text("{}")
    (source / "model.safetensors").write_bytes(b"weights")

    first, again = lasting_folder(source, cache), lasting_folder(source, cache)
    assert first == again and [path.name for path in Path(first).iterdir()] == ["config.json"]
    (source / "config.json").write_text('{"a": 1}')
    assert lasting_folder(source, cache) != first
    assert len(list(cache.iterdir())) == 2, "a draft was left"


@pytest.mark.parametrize(
    ("device", "given", "used"),
    [("cuda", None, "1"), ("cuda:1", None, "1"), ("cpu", None, "0"), ("cuda", "0", "0"), ("cpu", "1", "1")],
)
def test_the_model_runner_is_v2_on_a_gpu_unless_the_user_says_otherwise(monkeypatch, device, given, used):
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    if given is not None:
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", given)
    with environment("mark", device, None, eager=False):
        assert os.environ["VLLM_USE_V2_MODEL_RUNNER"] == used


def start_alone_and_wait(device: str, num_devices: int, inside: Event, leave: Event) -> None:
    with starts_alone(device, num_devices):
        inside.set()
        leave.wait(WAIT_S)


def test_engines_of_one_gpu_start_one_after_the_other(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    forks = multiprocessing.get_context("fork")

    def start(device: str, num_devices: int) -> tuple[Event, Event]:
        inside, leave = forks.Event(), forks.Event()
        forks.Process(target=start_alone_and_wait, args=(device, num_devices, inside, leave), daemon=True).start()
        return inside, leave

    (holds, leave), (other_gpu, _) = start("cuda:0", 2), start("cuda:2", 1)
    assert holds.wait(WAIT_S) and other_gpu.wait(WAIT_S)  # different GPUs at once
    waits, _ = start("cuda:1", 1)
    assert not waits.wait(0.5)
    leave.set()
    assert waits.wait(WAIT_S)
    with starts_alone("cpu", 1):  # nothing to wait for
        pass
