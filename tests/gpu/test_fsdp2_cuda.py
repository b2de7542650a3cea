"""One learner rank on a GPU, sharded with FSDP2: steps in mixed precision, and a publish folded on the device."""

import pytest

from tests.gpu.device import finish, needs_gpu, start

pytestmark = [*needs_gpu, pytest.mark.timeout(300)]

STEP = """
import sys, tempfile
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from learner.data.layout import make_layout
from learner.model.optimizer import optimizer_step
from learner.model.policy import load_policy
from learner.model.optimizer import Schedule, make_optimizer
from learner.model.policy import policy_parameters
from learner.publish.publisher import Publisher
from learner.ranks.mesh import Ranks
from streamrl.config.schema import OptimizerConfig
from streamrl.messages import VersionRef
from streamrl.weights.document import Document
from tests.unit.weights.fold_reference import fold128_numpy
from streamrl.weights.manifest import bucket_ranges
from streamrl.weights.shm.transport import ShmPublisher

device, dtype = sys.argv[1], getattr(torch, sys.argv[2])
BUCKET = 1 << 20
folder = Path(tempfile.mkdtemp())
torch.manual_seed(0)
config = Qwen3Config(
    vocab_size=8192, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=64, max_position_embeddings=512, tie_word_embeddings=False,
)
Qwen3ForCausalLM(config).save_pretrained(folder / "model")
ranks = Ranks.start(device, sharded=True)
policy = load_policy(folder / "model", dtype=dtype, ranks=ranks)
optimizer = make_optimizer(policy, OptimizerConfig())
lengths = [37, 64, 21]
tokens = torch.randint(0, 8192, (sum(lengths),), device=ranks.device)
positions = torch.cat([torch.arange(n) for n in lengths]).to(ranks.device)
starts = [sum(lengths[:i]) for i in range(3)]
index = torch.cat([torch.arange(s, s + n - 1) for s, n in zip(starts, lengths)]).to(ranks.device)
packing = make_layout(lengths).to(ranks.device)
before = policy.model.get_output_embeddings().weight.full_tensor().clone()
for step in range(2):
    scored = policy(tokens, positions, packing, index, tokens[index + 1], torch.ones(len(index), device=ranks.device))
    loss = -scored[0].mean()
    loss.backward()
    schedule = Schedule("constant", 1e-3, 10)
    result = optimizer_step(policy, optimizer, schedule, step=step, max_grad_norm=1.0, ranks=ranks)
    assert not result.skipped and result.grad_norm > 0, result
    print("loss", float(loss.detach()), flush=True)
assert not torch.equal(before, policy.model.get_output_embeddings().weight.full_tensor())
del before, scored, loss

with ShmPublisher(folder / "docs", "gpu-test") as shm:
    publisher = Publisher(
        policy_parameters(policy.model), wire_dtype=torch.bfloat16, bucket_bytes=BUCKET, shm=shm, fold=True
    )
    publisher.publish(VersionRef(1, 0))
    cuda = ranks.device.type == "cuda"
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
    published = publisher.publish(VersionRef(1, 1))
    if cuda:
        largest = max(p.numel() for _, p in policy_parameters(policy.model)) * (4 + 2)  # gathered, and as it travels
        # The fold's own temporaries: a biased copy of what it reads, as large as the tensor on the wire.
        allowed = largest + largest // 3 + 2 * BUCKET + (8 << 20)
        grown = torch.cuda.max_memory_allocated() - held
        assert grown <= allowed, f"publishing took {grown} bytes of device memory, {allowed} are allowed"
    document = Document.map_file(published.path, published.manifest, publisher.layout).verify()
    found = [fold128_numpy(document.view(a, b)) for a, b in bucket_ranges(publisher.layout)]
    assert found == list(published.device_manifest.digests), "the device folds what the host holds"
    named = dict(policy_parameters(policy.model))
    for name, tensor in document.tensors().items():
        whole = named[name]
        whole = whole.full_tensor() if hasattr(whole, "full_tensor") else whole
        assert torch.equal(tensor, whole.detach().to(torch.bfloat16).cpu()), name
ranks.close()
print("done", flush=True)
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_sharded_step_and_a_publish_whose_digests_are_those_of_the_host(dtype):
    assert finish(start(STEP, "cuda", dtype), 250).split()[-1] == "done"
