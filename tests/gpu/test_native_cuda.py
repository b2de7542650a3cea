"""The native engine on a GPU: generation, log-probs, and installs of documents that already lie on the device."""

import asyncio

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from actors.engines.base import GenerateRequest, Generation
from actors.engines.native.engine import NativeEngine
from actors.engines.native.sampling import draw, make_plan
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


def check_behind(device: str) -> None:
    """Also called with a CPU, as above. Groups join and end at their own times; no launch makes the host wait."""
    source = model(0, device, torch.float32)
    one = document(source, 1)

    async def answers(engine: NativeEngine, asked: list[GenerateRequest]) -> list[Generation]:
        return await asyncio.gather(*(engine.generate(request) for request in asked))

    async def work() -> None:
        engine = NativeEngine(model(9, device, torch.float32), None, max_num_seqs=16, max_tokens=256, device=device)
        scheduler = engine._scheduler
        assert scheduler._ahead == (device == "cuda")
        scheduler._ahead = True
        await engine.install(one.tensors(), VersionRef(1, 1))
        launch, behind = scheduler._launch, []

        def without_waiting(n: int) -> object:
            behind.append(scheduler._flight is not None)
            if device != "cuda":
                return launch(n)
            torch.cuda.set_sync_debug_mode("error")
            try:
                return launch(n)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        together = requests(16, 64)
        first = await answers(engine, together)  # graphs are captured, and memory is taken
        scheduler._launch = without_waiting
        again = await answers(engine, together)
        scheduler._ahead = False
        waited = await answers(engine, together)
        scheduler._ahead = True
        for mine, other, third in zip(first, again, waited, strict=True):
            assert mine.token_ids == other.token_ids == third.token_ids
            torch.testing.assert_close(other.logprobs, third.logprobs, atol=1e-4, rtol=0)
        assert sum(behind) >= 60
        scheduler._launch = launch  # other shapes are captured, which waits

        mixed = [
            GenerateRequest([3 + i, 5, 7], sampling, 3 + 5 * i, seed=i)
            for i, sampling in enumerate([Sampling(), Sampling(0.0), Sampling(0.7)] * 8)
        ]
        for request, done in zip(mixed, await answers(engine, mixed), strict=True):
            assert done.finish == ("stop" if done.token_ids[-1] == 1 else "length")
            assert 1 not in done.token_ids[:-1] and len(done.token_ids) <= request.max_new_tokens
            if request.sampling.temperature:
                whole = [*request.prompt_ids, *done.token_ids]
                scored = await engine.score(whole, start=3, temperature=request.sampling.temperature)
                torch.testing.assert_close(scored, done.logprobs, atol=2e-3, rtol=0)
        await engine.close()

    asyncio.run(asyncio.wait_for(work(), 200))


def test_the_host_is_a_pass_behind_and_no_launch_waits_for_the_device():
    check_behind("cuda")


def test_a_draw_takes_less_memory_than_its_logits():
    logits = torch.randn(512, 151_936, device="cuda")
    plan = make_plan([Sampling(0.7)] * len(logits), logits.device)
    numbers = np.random.default_rng(0).random(len(logits))
    draw(logits, plan, numbers)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    drawn = draw(logits, plan, numbers)
    assert torch.cuda.max_memory_allocated() - before < 0.75 * logits.nbytes
    expected = torch.log_softmax(logits / 0.7, -1).gather(-1, drawn.tokens[:, None])[:, 0]
    torch.testing.assert_close(drawn.logprobs, expected, atol=1e-4, rtol=0)
