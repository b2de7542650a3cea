from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from learner.model.policy import policy_parameters, policy_tensors
from learner.publish.publisher import Publisher
from streamrl.errors import RunLockedError, WeightsError
from streamrl.messages import Manifest, VersionRef
from streamrl.weights.document import Document
from streamrl.weights.shm.transport import ShmPublisher
from tests.unit.learner.test_two_ranks import launch_script
from tests.unit.weights.fsdp_publish import toy_model


def tiny_llama(tie: bool) -> LlamaForCausalLM:
    torch.manual_seed(3)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=37, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=tie,
        )
    )


def publisher_of(model, shm, *, wire_dtype=torch.float32, **options) -> Publisher:
    return Publisher(policy_parameters(model), wire_dtype=wire_dtype, bucket_bytes=1000, shm=shm, **options)


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("wire_dtype", [torch.float32, torch.bfloat16])
def test_a_published_document_is_the_state_dict_bit_for_bit_and_ties_travel_once(tie, wire_dtype, shm):
    model = tiny_llama(tie)
    publisher = publisher_of(model, shm, wire_dtype=wire_dtype)

    published = publisher.publish(VersionRef(1, 0))

    assert published is not None
    tensors = Document.map_file(published.path, published.manifest, publisher.layout).verify().tensors()
    expected = {name: t for name, t in model.state_dict().items() if not (tie and name == "lm_head.weight")}
    assert list(tensors) == list(expected)
    for name, tensor in expected.items():
        assert torch.equal(tensors[name], tensor.to(wire_dtype)), name
    assert published.nbytes == sum(tensor.numel() for tensor in expected.values()) * wire_dtype.itemsize


@pytest.mark.parametrize("wire_dtype", [torch.float32, torch.bfloat16])
def test_saved_buffers_travel_as_they_are_and_weights_in_the_type_of_the_wire(wire_dtype, shm):
    model = toy_model()
    publisher = Publisher(policy_tensors(model), wire_dtype=wire_dtype, bucket_bytes=64, shm=shm)

    published = publisher.publish(VersionRef(1, 0))

    assert published is not None
    tensors = Document.map_file(published.path, published.manifest, publisher.layout).verify().tensors()
    buffers = {"1.correction", "2.hidden", "2.count"}
    assert tensors.keys() == model.state_dict().keys() and buffers < tensors.keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensors[name], tensor if name in buffers else tensor.to(wire_dtype)), name
        assert tensors[name].dtype == (tensor.dtype if name in buffers else wire_dtype), name


def test_tied_parameters_given_twice_keep_their_first_name(shm):
    weight = torch.nn.Parameter(torch.ones(3))

    publisher = Publisher(
        [("embed", weight), ("head", weight)], wire_dtype=torch.float32, bucket_bytes=8, shm=shm
    )

    assert [spec.name for spec in publisher.layout.tensors] == ["embed"]


def test_wrappers_leave_no_trace_in_checkpoint_names():
    class Wrapped(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self._orig_mod = torch.nn.ModuleDict({"_checkpoint_wrapped_module": torch.nn.Linear(2, 2)})

    assert [name for name, _ in policy_parameters(Wrapped())] == ["weight", "bias"]


def test_each_version_holds_the_parameters_as_they_were_then_and_names_its_parent(shm):
    weight = torch.nn.Parameter(torch.arange(6.0).view(2, 3).t())  # not contiguous
    publisher = Publisher([("w", weight)], wire_dtype=torch.float32, bucket_bytes=10, shm=shm)

    first = publisher.publish(VersionRef(1, 0))
    with torch.no_grad():
        weight.add_(1.0)
    second = publisher.publish(VersionRef(1, 1))

    assert first is not None and second is not None
    assert (first.manifest.parent, second.manifest.parent) == (None, VersionRef(1, 0))
    for published, offset in ((first, 0.0), (second, 1.0)):
        document = Document.map_file(published.path, published.manifest, publisher.layout).verify()
        assert torch.equal(document.tensors()["w"], torch.arange(6.0).view(2, 3).t() + offset)


@pytest.mark.parametrize("ref", [VersionRef(1, 5), VersionRef(1, 4), VersionRef(0, 99)])
def test_a_version_that_is_not_higher_is_refused(ref, shm):
    publisher = Publisher([("w", torch.ones(3))], wire_dtype=torch.float32, bucket_bytes=8, shm=shm)
    publisher.publish(VersionRef(1, 5))

    with pytest.raises(WeightsError, match="not higher than 1:5"):
        publisher.publish(ref)


def test_a_fenced_learner_makes_nothing_visible(shm):
    def fence() -> None:
        raise RunLockedError("epoch 2 owns this run")

    publisher = Publisher([("w", torch.ones(3))], wire_dtype=torch.float32, bucket_bytes=8, shm=shm, fence=fence)

    with pytest.raises(RunLockedError):
        publisher.publish(VersionRef(1, 0))

    assert [path.name for path in shm.directory.iterdir()] == ["owner.lock"]


@pytest.fixture(scope="module")
def printed(tmp_path_factory) -> list[list[str]]:
    """Two ranks have published: (way, what a rank prints of it)."""
    done = launch_script(2, Path(__file__).with_name("fsdp_publish.py"), tmp_path_factory.mktemp("docs"))
    return [line.split(maxsplit=1) for line in done.splitlines()]


def test_two_fsdp_ranks_publish_what_one_would_in_every_way_and_a_failing_one_blocks_no_other(printed, tmp_path: Path):
    expected = single_rank_manifests(tmp_path)
    for way in ("rows", "gather", "snapshot", "no-room", "broken"):
        *published, abandoned = [said for mine, said in printed if mine == way]
        found = [msgspec.msgpack.decode(bytes.fromhex(line), type=tuple[Manifest, Manifest]) for line in published]
        assert abandoned == "abandoned" and found == expected, way


def test_every_rank_writes_its_own_rows_from_little_memory_and_no_weights_are_gathered(printed):
    """24 tensors of 4 MiB, 2 on the wire: each rank writes 24 of the 48 MiB, and holds a tensor's rows at a time."""
    ranks = [json.loads(said) for way, said in printed if way == "budget"]
    assert len(ranks) == 2 and all(rank["extra_mib"] <= 6 for rank in ranks), ranks
    assert [rank["written_mib"] for rank in ranks] == [24, 24]
    assert all(rank["collective_bytes"] < 100_000 and rank["threads"] == ["MainThread"] for rank in ranks), ranks


def test_a_publish_that_gets_no_slot_in_time_is_skipped_and_the_next_one_comes(shm):
    publisher = Publisher(
        [("w", torch.ones(3))], wire_dtype=torch.float32, bucket_bytes=8, shm=shm, slot_wait_s=0.05
    )
    publisher.publish(VersionRef(1, 0))
    shm.settle()
    may_end = threading.Event()
    shm._cleanup_thread = threading.Thread(target=may_end.wait)
    shm._cleanup_thread.start()

    with pytest.raises(WeightsError, match="version 1:1 was not published.*no spare file for version 1:1 after 0.05 s"):
        publisher.publish(VersionRef(1, 1))
    may_end.set()
    later = publisher.publish(VersionRef(1, 2))

    assert later is not None and later.manifest.parent == VersionRef(1, 0)


def single_rank_manifests(folder: Path) -> list[tuple[Manifest, Manifest]]:
    model = toy_model()
    manifests = []
    with ShmPublisher(folder, "single") as shm:
        publisher = Publisher(policy_tensors(model), wire_dtype=torch.bfloat16, bucket_bytes=64, shm=shm, fold=True)
        for version in range(2):
            published = publisher.publish(VersionRef(1, version))
            assert published is not None
            manifests.append((published.manifest, published.device_manifest))
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.5)
    return manifests


def test_an_abandoned_publish_uses_up_its_number_but_is_nobodys_parent(shm):
    fenced = [False, True, False]
    publisher = Publisher(
        [("w", torch.ones(3))], wire_dtype=torch.float32, bucket_bytes=8, shm=shm, fence=lambda: refuse(fenced.pop(0))
    )

    def refuse(now: bool) -> None:
        if now:
            raise WeightsError("abandoned")

    publisher.publish(VersionRef(1, 0))
    for _ in range(2):  # the second time, because the number is used up
        with pytest.raises(WeightsError):
            publisher.publish(VersionRef(1, 1))
    later = publisher.publish(VersionRef(1, 2))

    assert later is not None and later.manifest.parent == VersionRef(1, 0)


MEMORY = """
import sys, torch
from learner.publish.publisher import Publisher
from streamrl.messages import VersionRef
from streamrl.weights.shm.transport import ShmPublisher
from tests.unit.weights.fsdp_publish import toy_model

def status(key):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key)) >> 10

torch.set_num_threads(1)
parameters = [(f"w{i}", torch.nn.Parameter(torch.full((1 << 20,), float(i)))) for i in range(24)]  # 4 MiB each
with ShmPublisher(sys.argv[1], "memory") as shm:
    Publisher(parameters[:1], wire_dtype=torch.bfloat16, bucket_bytes=8 << 20, shm=shm).publish(VersionRef(1, 0))
    shm.settle()
    before, after = status("VmHWM"), []
    look = lambda: after.append(status("VmHWM"))
    publisher = Publisher(parameters, wire_dtype=torch.bfloat16, bucket_bytes=8 << 20, shm=shm, fence=look)
    publisher.publish(VersionRef(1, 1))
    print(after[0] - before - 48)
"""


def test_publishing_takes_the_memory_of_a_tensor_not_of_a_model(tmp_path, python_env):
    command = [sys.executable, "-c", MEMORY, str(tmp_path / "docs")]
    done = subprocess.run(command, env=python_env, capture_output=True, text=True, timeout=100)

    assert done.returncode == 0, done.stderr
    assert int(done.stdout) <= 16, f"peak grew by {done.stdout} MiB over the document's own 48 MiB"
