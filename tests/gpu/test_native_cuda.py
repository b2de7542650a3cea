"""The native engine on a GPU: generation, log-probs, and installs of documents that already lie on the device."""

import asyncio

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from actors.engines.base import GenerateRequest
from actors.engines.native.engine import NativeEngine
from actors.engines.native.weights import checkpoint_tensors
from actors.weights.probe import first_difference
from streamrl.messages import Sampling, VersionRef
from streamrl.weights.gpu.device_document import DeviceDocument, DocumentFold
from streamrl.weights.manifest import DIGEST_FOLD128, make_layout, make_manifest
from tests.gpu.device import needs_gpu

pytestmark = [*needs_gpu, pytest.mark.timeout(300)]
VOCAB = 512


def model(seed: int, device: str, dtype: torch.dtype) -> torch.nn.Module:
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(Qwen3Config(
        vocab_size=VOCAB, hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=512, eos_token_id=1, pad_token_id=0,
    )).to(device=device, dtype=dtype).eval()


def document(source: torch.nn.Module, version: int) -> DeviceDocument:
    """The model's weights as a verified document in the memory of its device."""
    tensors = {name: tensor.detach() for name, tensor in checkpoint_tensors(source).items()}
    dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    layout = make_layout(((name, dtype, t.shape) for name, t in tensors.items()), bucket_bytes=1 << 16)
    body = torch.cat([t.contiguous().reshape(-1).view(torch.uint8) for t in tensors.values()])
    fold = DocumentFold(layout, body.device)
    fold.append(body)
    manifest = make_manifest(layout, VersionRef(1, version), None, fold.digests(), DIGEST_FOLD128)
    return DeviceDocument(body, manifest, manifest, layout)


def requests(count: int, new: int) -> list[GenerateRequest]:
    return [
        GenerateRequest([3 + i, 5, 7 + i % 3], Sampling(), new, seed=i, ignore_eos=True) for i in range(count)
    ]


def check_engine(device: str, dtype: torch.dtype, tolerance: float) -> None:
    """Also called with a CPU, where it needs no GPU, to try the test itself."""
    first, second = model(0, device, dtype), model(1, device, dtype)
    one, other = document(first, 1), document(second, 2)

    async def work() -> None:
        engine = NativeEngine(model(9, device, dtype), None, max_num_seqs=16, max_tokens=256, device=device)
        await engine.install(one.tensors(), VersionRef(1, 1))
        assert first_difference(engine.live_tensors(), one) is None
        tasks = [asyncio.create_task(engine.generate(request)) for request in requests(16, 128)]
        while engine.stats().tokens_total < 16 * 4:
            await asyncio.sleep(0.001)
        times = await engine.install(other.tensors(), VersionRef(1, 2))
        assert times.pause_s <= times.install_s
        assert first_difference(engine.live_tensors(), other) is None
        done = await asyncio.gather(*tasks)
        assert all(len(generation.token_ids) == 128 for generation in done)
        assert all(generation.spans[-1].ref == VersionRef(1, 2) for generation in done)
        graphs = engine._scheduler.forward.graphs
        assert (graphs is None) == (device == "cpu")
        assert graphs is None or (graphs.refused is None and len(graphs._sets) == 2)

        fresh = await engine.generate(requests(1, 32)[0])
        prompt = list(requests(1, 32)[0].prompt_ids)
        ids = torch.tensor([prompt + fresh.token_ids], device=device)
        with torch.inference_mode():
            logprobs = second(ids).logits[0].float().log_softmax(-1)
        expected = [float(logprobs[len(prompt) - 1 + i, token]) for i, token in enumerate(fresh.token_ids)]
        torch.testing.assert_close(torch.tensor(fresh.logprobs), torch.tensor(expected), atol=tolerance, rtol=0)
        scored = await engine.score(prompt + fresh.token_ids, start=len(prompt), temperature=1.0)
        torch.testing.assert_close(torch.tensor(scored), torch.tensor(expected), atol=tolerance, rtol=0)
        await engine.close()

    asyncio.run(asyncio.wait_for(work(), 200))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-3), (torch.bfloat16, 0.15)])
def test_sequences_live_through_an_install_from_device_memory(dtype, tolerance):
    check_engine("cuda", dtype, tolerance)
