"""Background work of a GPU: loading by rows, pinned copies, publishing from a snapshot, staging."""

import threading

import pytest
import torch
import torch.nn.functional as F

import streamrl.architectures.attention  # noqa: F401  which keeps attention from cuDNN
from actors.engines.native.engine import build_model
from actors.engines.vllm.process import StagedDocument
from actors.engines.vllm.worker import Staging
from actors.weights.probe import first_difference
from learner.checkpoint.shards import copied
from learner.model.scoring.logprobs import score_tokens
from learner.publish.publisher import Publisher
from learner.ranks.background import Background
from learner.ranks.mesh import Ranks
from streamrl.messages import VersionRef
from streamrl.weights.document import Document
from streamrl.weights.gpu.pinned import Download, Upload
from streamrl.weights.shm.transport import ShmPublisher
from tests.gpu.device import finish, needs_gpu, start

pytestmark = [*needs_gpu, pytest.mark.timeout(300)]
GPU = torch.device("cuda", 0)

LOAD = """
import tempfile
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from learner.ranks.mesh import Ranks
from learner.model.policy import load_policy


def own_mib():
    line = next(line for line in open("/proc/self/status") if line.startswith("RssAnon"))
    return int(line.split()[1]) / 1024


folder = Path(tempfile.mkdtemp())
model = Qwen3ForCausalLM(Qwen3Config(
    vocab_size=512, hidden_size=1024, intermediate_size=3072, num_hidden_layers=24, num_attention_heads=16,
    num_key_value_heads=8, head_dim=64, max_position_embeddings=512,
)).to(torch.bfloat16)
model.save_pretrained(folder)
expected = {name: p.detach().clone() for name, p in model.named_parameters()}
del model
ranks = Ranks.start("cuda", sharded=True)
torch.zeros(1, device=ranks.device)
before = own_mib()
policy = load_policy(folder, dtype=torch.bfloat16, ranks=ranks)
grown, size = own_mib() - before, sum(p.numel() for p in policy.parameters()) * 4 / 2**20
assert grown < size / 2, f"{grown} MiB of host memory for a model of {size} MiB in float32"
for name, p in policy.model.named_parameters():
    assert p.device.type == "cuda" and torch.equal(p.full_tensor().cpu().to(torch.bfloat16), expected[name]), name
assert all(buffer.device.type == "cuda" for buffer in policy.buffers())
ranks.close()
print("done")
"""


def test_a_model_is_loaded_onto_the_gpu_without_a_copy_of_it_in_host_memory():
    assert finish(start(LOAD), 250).split()[-1] == "done"


def test_attention_is_not_computed_by_cudnn():
    query = torch.randn(2, 8, 333, 64, device=GPU, dtype=torch.bfloat16)

    assert torch._fused_sdp_choice(query, query, query, is_causal=True) != torch.nn.attention.SDPBackend.CUDNN_ATTENTION
    F.scaled_dot_product_attention(query, query, query, is_causal=True)


def test_the_gradient_of_the_head_is_that_of_float32_within_the_rounding_of_its_factors():
    generator = torch.Generator(GPU).manual_seed(0)
    values = [torch.randn(*shape, device=GPU, generator=generator).bfloat16() for shape in ((512, 256), (3001, 256))]
    targets = torch.randint(0, 3001, (512,), device=GPU, generator=generator)

    def gradients(dtype):
        hidden, weight = (value.detach().to(dtype).requires_grad_() for value in values)
        both = score_tokens(hidden, weight, targets, torch.ones(512, device=GPU), chunk_tokens=100)
        return torch.autograd.grad(both[0].sum() + both[1].sum(), (hidden, weight))

    for half, single in zip(gradients(torch.bfloat16), gradients(torch.float32), strict=True):
        assert float((half.float() - single).norm() / single.norm()) < 1e-2


@pytest.mark.parametrize("nbytes", [1 << 10, 1 << 20])
def test_copies_through_pinned_memory_bring_every_byte_while_kernels_run(nbytes):
    source = [torch.randn(n, device=GPU).to(torch.bfloat16) for n in (70_001, 3, 1 << 20)]
    busy = torch.randn(2048, 2048, device=GPU)
    download, found = Download(GPU, nbytes=nbytes), []
    with download.stream():
        for _, data in download.pieces([(0, tensor) for tensor in source]):
            busy @ busy
            found.append(bytes(data))
    joined = torch.frombuffer(bytearray(b"".join(found)), dtype=torch.bfloat16)
    assert torch.equal(joined, torch.cat(source).cpu())

    upload, target = Upload(GPU, nbytes=nbytes), torch.empty(joined.shape, device=GPU)
    upload.copy(joined, target)
    upload.finish()
    assert torch.equal(target, torch.cat(source).float())


def test_a_version_is_written_from_a_snapshot_while_the_weights_change(tmp_path):
    weight = torch.nn.Parameter(torch.randn(1 << 22, device=GPU))
    with ShmPublisher(tmp_path / "documents", "run") as shm:
        publisher = Publisher([("w", weight)], wire_dtype=torch.bfloat16, bucket_bytes=1 << 20, shm=shm, fold=True)
        publisher.publish(VersionRef(1, 0))
        beside, expected = Background(Ranks(), "publish"), weight.detach().to(torch.bfloat16).cpu()
        beside.start(publisher.snapshot(VersionRef(1, 1)))
        with torch.no_grad():
            for _ in range(20):
                weight.mul_(1.01)
        published = beside.take()
        document = Document.map_file(published.path, published.manifest, publisher.layout).verify()
        assert torch.equal(document.tensors()["w"], expected)
        live = {"w": expected.to(GPU)}
        assert first_difference(live, document) is None
        live["w"][77] += 1.0
        assert "w differs from element 77 on" in first_difference(live, document)
        beside.close()


def test_a_checkpoint_is_copied_to_pinned_memory():
    tensor = torch.randn(1 << 20, device=GPU)
    copy = copied([("model/w", tensor)], Ranks())
    ((_, block),) = copy.blocks

    assert block.part.is_pinned() and torch.equal(block.part, tensor.cpu())


def test_a_document_is_staged_on_the_device_while_kernels_run():
    tensors = {f"w{i}": torch.randn(1 << 20).to(torch.bfloat16) for i in range(8)}
    staged = StagedDocument(tensors)
    busy, stop = torch.randn(2048, 2048, device=GPU), threading.Event()
    thread = threading.Thread(target=lambda: [busy @ busy for _ in range(100) if not stop.is_set()])
    thread.start()
    found = dict(Staging(staged.path, staged.entries, GPU, spare_bytes=1 << 30).tensors())
    stop.set()
    thread.join()

    assert all(found[name].is_cuda and torch.equal(found[name].cpu(), tensor) for name, tensor in tensors.items())
    staged.close()


def test_a_model_of_random_weights_is_made_on_the_device(tmp_path):
    from transformers import Qwen3Config

    Qwen3Config(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=128, architectures=["Qwen3ForCausalLM"],
    ).save_pretrained(tmp_path)
    before = torch.cuda.memory_allocated()
    model = build_model(tmp_path, dtype=torch.bfloat16, device="cuda")

    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"cuda"}
    assert torch.cuda.memory_allocated() > before
