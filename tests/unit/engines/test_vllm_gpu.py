"""What vLLM is told about GPUs, from what the driver lists; neither a GPU nor vLLM takes part."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from actors.engines.vllm.process import (
    GIB,
    SLACK_BYTES,
    USUAL_UTILIZATION,
    environment,
    gpu_arguments,
    lasting_folder,
    starts_alone,
    utilization,
)
from actors.settings import engine_spec
from streamrl.errors import EngineError
from streamrl.gpus import Gpu
from tests.unit.config.setting_harness import config_of

pytestmark = pytest.mark.timeout(60)
ROOT = Path(__file__).parents[3]


def gpu(free_gib: float, total_gib: float = 80.0) -> Gpu:
    return Gpu("0", "GPU-x", int(total_gib * GIB), int(free_gib * GIB))


def arguments(device: str = "cuda", *, half: bool = True, share: float | None = None, **extra) -> dict:
    return gpu_arguments(
        device, extra, half=half, document_nbytes=2 * GIB, num_documents=2, share=share, gpu=gpu(80.0)
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
    assert arguments() == {"hf_overrides": {"head_dtype": "float32"}, "gpu_memory_utilization": USUAL_UTILIZATION}
    assert "hf_overrides" not in arguments(half=False)
    given = arguments(gpu_memory_utilization=0.3, hf_overrides={"rope_theta": 1, "head_dtype": "model"})
    assert given == {"hf_overrides": {"rope_theta": 1, "head_dtype": "model"}}


@pytest.mark.shows("actors.gpu_memory_share")
def test_the_share_of_an_actor_reaches_its_engine(tmp_path):
    for words, expected in (((), USUAL_UTILIZATION), (("actors.gpu_memory_share=0.4",), 0.4)):
        spec = engine_spec(config_of(*words), tmp_path, None)
        assert arguments(share=spec.memory_share)["gpu_memory_utilization"] == expected
        assert spec.num_device_documents == 0
    assert engine_spec(config_of("actors.transports=[ipc,zmq]"), tmp_path, None).num_device_documents == 2


@pytest.mark.parametrize(
    ("device", "extra", "ids"),
    [("cuda:3", {}, [3]), ("cuda:2", {"tensor_parallel_size": 2}, [2, 3]), ("cuda", {"tensor_parallel_size": 2}, None)],
)
def test_a_numbered_device_reaches_vllm(device, extra, ids):
    assert arguments(device, **extra).get("device_ids") == ids


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


WAITS = """
import sys
from actors.engines.vllm.process import starts_alone
with starts_alone(sys.argv[1], int(sys.argv[2])):
    print("in", flush=True)
    sys.stdin.read()
"""


def test_engines_of_one_gpu_start_one_after_the_other(tmp_path, monkeypatch, python_env):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    environment = {**python_env, "TMPDIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": "0,1,2"}

    def start(*words: str) -> subprocess.Popen[str]:
        return subprocess.Popen([sys.executable, "-c", WAITS, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                text=True, cwd=ROOT, env=environment)

    holder, other_gpu = start("cuda:0", "2"), start("cuda:2", "1")
    assert holder.stdout.readline() == other_gpu.stdout.readline() == "in\n"  # different GPUs at once
    waiting = start("cuda:1", "1")
    with pytest.raises(subprocess.TimeoutExpired):
        waiting.wait(1.0)
    assert waiting.stdin is not None
    holder.communicate()
    assert waiting.stdout.readline() == "in\n"
    for process in (waiting, other_gpu):
        process.communicate()
    with starts_alone("cpu", 1):  # nothing to wait for
        pass
