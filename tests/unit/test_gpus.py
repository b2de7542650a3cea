"""Which GPUs there are, by what nvidia-smi prints, and who gets which. No GPU takes part."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from actors.weights.device import DeviceWeights
from streamrl.config.devices import placement_of
from streamrl.errors import ConfigError
from streamrl.gpus import Gpu, Placement, gpu_names, gpu_of, parse_gpus, place, read_gpus, usable_gpus, visible_gpus
from streamrl.weights.gpu.cuda_memory import device_id
from tests.fakes.communicator import FakeLibrary
from tests.fakes.device_memory import FakeDeviceMemory
from tests.unit.config.setting_harness import config_of

LISTING = "0, GPU-aaa, 81559, 80000\n1, GPU-bbb, 81559, [N/A]\nMIG 1g.10gb, x\n"


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch) -> Path:
    """A program of that name that prints two GPUs."""
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\nprintf '{LISTING}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return program


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


def test_gpus_are_read_without_torch(nvidia_smi):
    assert read_gpus() == parse_gpus(LISTING) == [
        Gpu("0", "GPU-aaa", 81559 << 20, 80000 << 20), Gpu("1", "GPU-bbb", 81559 << 20, 0)
    ]
    assert visible_gpus({}) == ["0", "1"]
    nvidia_smi.write_text("#!/bin/sh\nprintf 'NVIDIA H200\\nNVIDIA H200\\n'\n")
    assert gpu_names({"CUDA_VISIBLE_DEVICES": "0,1"}) == "2 NVIDIA H200"
    nvidia_smi.write_text("#!/bin/sh\nexit 9\n")
    assert read_gpus() == [] == visible_gpus({}) and gpu_names({"CUDA_VISIBLE_DEVICES": "0"}) == "1 GPUs"


@pytest.mark.parametrize(
    ("listed", "gpus"), [("2, 3", ["2", "3"]), ("", []), ("-1", []), ("GPU-a,GPU-b", ["GPU-a", "GPU-b"])]
)
def test_gpus_that_the_user_allows_are_those_that_are_used(listed, gpus):
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": listed}) == gpus


@pytest.mark.parametrize(("listed", "usable"), [(None, ["0", "1"]), ("1", ["1"]), ("", []), ("-1", [])])
def test_gpus_that_the_driver_does_not_list_are_not_used(nvidia_smi, listed, usable):
    environment = {} if listed is None else {"CUDA_VISIBLE_DEVICES": listed}
    assert usable_gpus(environment) == usable
    nvidia_smi.write_text("#!/bin/sh\nexit 9\n")
    assert usable_gpus(environment) == []


@pytest.mark.parametrize(
    ("visible", "device", "uuid"),
    [("1", "cuda", "GPU-bbb"), ("1,0", "cuda:1", "GPU-aaa"), ("GPU-bb", "cuda:0", "GPU-bbb"), ("1", "cuda:1", None),
     ("1", "cpu", None)],
)
def test_a_device_of_torch_is_found_in_the_drivers_list(nvidia_smi, visible, device, uuid):
    found = gpu_of(device, {"CUDA_VISIBLE_DEVICES": visible})
    assert (found.uuid if found else None) == uuid


def test_an_actor_names_its_gpu_alike_for_every_transport_and_without_opening_cuda(nvidia_smi, monkeypatch, context):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    name = device_id("cuda")
    assert name.endswith("|bbb") and name.startswith(os.uname().nodename[:20]) and device_id("cpu") == ""
    by_nccl = DeviceWeights(["nccl", "zmq"], "cuda", context, library=lambda device: FakeLibrary())
    by_ipc = DeviceWeights(
        ["ipc", "zmq"], "cuda", context, memory=lambda device: FakeDeviceMemory(nvidia_smi.parent, device_id(device))
    )
    assert by_nccl.device_id == by_ipc.device_id == name
    by_nccl.close()


EIGHT = [str(number) for number in range(8)]


@pytest.mark.parametrize(
    ("gpus", "ranks", "actors", "each", "learner", "own"),
    [
        (EIGHT, 2, 3, 1, "0 1", ["2", "3", "4"]),
        (EIGHT, 4, 2, 2, "0 1 2 3", ["4 5", "6 7"]),
        (["GPU-x", "GPU-y"], 1, 1, 1, "GPU-x", ["GPU-y"]),
        (EIGHT[:2], 0, 2, 1, "", ["0", "1"]),
        (EIGHT[:2], 2, 2, 0, "0 1", []),
    ],
)
def test_each_process_gets_gpus_of_its_own_while_there_are_enough(gpus, ranks, actors, each, learner, own):
    found = place(gpus, num_ranks=ranks, num_actors=actors, per_actor=each, share=False)
    assert found.learner == tuple(learner.split()) and found.actors == tuple(tuple(one.split()) for one in own)
    assert not found.is_shared


def test_too_few_gpus_are_refused_unless_they_may_be_shared():
    with pytest.raises(ConfigError, match="need 4 GPUs, and 3 are visible"):
        place(EIGHT[:3], num_ranks=2, num_actors=2, per_actor=1, share=False)
    for ranks, each in ((2, 1), (1, 2)):
        with pytest.raises(ConfigError, match="1 are visible"):
            place(["0"], num_ranks=ranks, num_actors=1, per_actor=each, share=True)


def test_a_shared_gpu_is_divided_and_never_promised_twice():
    one = place(["0"], num_ranks=1, num_actors=2, per_actor=1, share=True)
    assert one.actors == (("0",), ("0",)) and (one.learner_share, one.actor_shares) == (0.5, (0.25, 0.25))

    beside = place(["0", "1"], num_ranks=1, num_actors=2, per_actor=1, share=True)
    assert beside.actors == (("1",), ("1",)) and (beside.learner_share, beside.actor_shares) == (None, (0.5, 0.5))

    uneven = place(["0", "1", "2"], num_ranks=1, num_actors=3, per_actor=1, share=True)
    assert uneven.actors == (("1",), ("2",), ("1",)) and uneven.actor_shares == (0.5, None, 0.5)

    given = place(["0"], num_ranks=1, num_actors=1, per_actor=1, share=True, learner_share=0.75)
    assert given.actor_shares == (0.25,)
    for shares in ({"learner_share": 0.75, "actor_share": 0.5}, {"learner_share": 1.0}, {"actor_share": 0.6}):
        with pytest.raises(ConfigError, match="promised more than its memory"):
            place(["0"], num_ranks=1, num_actors=1, per_actor=1, share=True, **shares)


@pytest.mark.parametrize(
    ("words", "gpus", "learner", "actors"),
    [
        (("launch.num_actors=2",), EIGHT[:3], ("0",), (("1",), ("2",))),
        (("launch.num_actors=2", "run.device=cpu"), EIGHT[:3], (), (("0",), ("1",))),
        (("launch.num_actors=2", "actors.device=cpu"), EIGHT[:3], ("0",), ()),
        (("launch.num_actors=1", "actors.device=cuda:1"), EIGHT[:3], ("0",), ()),
        (("launch.num_actors=2",), [], (), ()),
        (("launch.num_actors=1", "actors.engine=vllm", "actors.vllm.tensor_parallel_size=2"), EIGHT[:3],
         ("0",), (("1", "2"),)),
        (("launch.num_actors=1",), ["0"], ("0",), (("0",),)),
        (("launch.num_actors=0", "launch.num_learner_ranks=2"), ["0"], ("0",), ()),
    ],
)
def test_the_settings_say_who_computes_on_a_gpu(words, gpus, learner, actors):
    found = placement_of(config_of(*words), gpus)
    assert (found.learner, found.actors) == (learner, actors)


@pytest.mark.shows("launch.share_gpus")
def test_gpus_are_shared_where_asked_for_or_where_nothing_names_them():
    short = ("launch.num_actors=1", "run.device=cuda")
    with pytest.raises(ConfigError, match=r"launch.share_gpus=true"):
        placement_of(config_of(*short), ["0"])
    assert placement_of(config_of(*short, "launch.share_gpus=true"), ["0"]).is_shared
    with pytest.raises(ConfigError, match="need 2 GPUs"):
        placement_of(config_of("launch.num_actors=1", "launch.share_gpus=false"), ["0"])


BY_TURNS = ("launch.share_gpus=turns", "staleness.eta=0", "policy.optimizer.offload=true")


@pytest.mark.shows("launch.share_gpus")
def test_by_turns_each_side_has_the_whole_gpu_and_what_keeps_memory_or_a_lead_is_refused():
    found = placement_of(config_of(*BY_TURNS, "launch.num_actors=1", "run.device=cuda"), ["0"])
    assert (found.learner, found.actors) == (("0",), (("0",),))
    assert found.learner_share is None and found.actor_shares == (None,)
    both = placement_of(config_of(*BY_TURNS, "launch.num_actors=2", "run.device=cuda"), ["0"])
    assert both.actor_shares == (0.5, 0.5), "actors have their turn together"
    assert placement_of(config_of(*BY_TURNS), []) == Placement(), "a CPU is shared by turns too"
    assert config_of(*BY_TURNS, "actors.engine=vllm").launch.by_turns
    for words, cause in {
        "launch.share_gpus=truns": "none of true, false, null and turns",
        "staleness.eta=1": "set staleness.eta=0",
        "publish.transports=[ipc,shm,zmq]": r"\['ipc'\], which keep versions on the GPU",
        "policy.optimizer.offload=false": "set it to true",
        "launch.in_process=true launch.num_actors=1": "leave one of them out",
    }.items():
        with pytest.raises(ConfigError, match=cause):
            config_of(*BY_TURNS, *words.split())


@pytest.mark.shows("launch.gpus_per_actor")
def test_gpus_of_an_actor_are_dealt_and_what_contradicts_them_is_refused():
    own_engine = ("actors.engine=my:engine", "launch.num_actors=2", "launch.gpus_per_actor=3")
    assert placement_of(config_of(*own_engine), EIGHT).actors == (("1", "2", "3"), ("4", "5", "6"))
    for words, cause in {
        "launch.gpus_per_actor=2": "the engine of an actor computes on 1",
        "launch.gpus_per_actor=1 actors.engine=vllm actors.vllm.tensor_parallel_size=2": "computes on 2",
        "launch.gpus_per_actor=1 actors.device=cpu": "leave one of them out",
        "launch.gpus_per_actor=1 actors.device=cuda:1": "puts every actor on that one GPU",
        "launch.share_gpus=false actors.device=cuda:1": "puts every actor on that one GPU",
        "actors.gpu_memory_share=0.5 actors.vllm.gpu_memory_utilization=0.5": "say the same",
        "policy.dtype=float16": "take bfloat16",
        "run.device=cuda:1": "ranks take the GPUs that they see by number",
    }.items():
        with pytest.raises(ConfigError, match=cause):
            config_of(*words.split())
    with pytest.raises(ConfigError, match="no GPU is visible"):
        placement_of(config_of("launch.gpus_per_actor=1"), [])
