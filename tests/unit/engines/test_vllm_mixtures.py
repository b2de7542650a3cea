"""A mixture in the real vLLM on this CPU: its experts are packed, and its output layer is one of its own."""

from __future__ import annotations

import torch
from transformers import CONFIG_MAPPING

from actors.engines.base import EngineSpec
from actors.engines.native.weights import checkpoint_tensors
from actors.engines.vllm.engine import VllmEngine
from streamrl.architectures.miniature import build_miniature
from streamrl.messages import VersionRef
from tests.unit.engines.tiny_models import character_tokenizer
from tests.unit.engines.vllm_harness import NEEDS_VLLM, EngineHarness, Learner

pytestmark = NEEDS_VLLM


def test_every_version_of_a_tied_mixture_is_served_as_the_learner_computes_it(tmp_path):
    config = CONFIG_MAPPING["olmoe"](tie_word_embeddings=True)
    models = [build_miniature(config, seed=seed, head_dim=32) for seed in range(3)]
    for seed, model in enumerate(models):
        model.save_pretrained(tmp_path / str(seed))
        character_tokenizer().save_pretrained(tmp_path / str(seed))
    harness = EngineHarness(tmp_path / "0", VllmEngine(EngineSpec(
        model_dir=tmp_path / "0", tokenizer=None, max_num_seqs=2, max_tokens=64, max_new_tokens=8, num_threads=1,
    )))
    ids = torch.randint(3, 90, (40,), generator=torch.Generator().manual_seed(1)).tolist()

    async def scored(seed: int) -> list[float]:
        document = {name: tensor.detach() for name, tensor in checkpoint_tensors(models[seed]).items()}
        await harness.engine.install(document, VersionRef(1, seed + 1))
        return await harness.engine.score(ids, start=1, temperature=1.0)

    try:
        for seed in range(3):
            truth = Learner(tmp_path / str(seed)).logprobs(ids[:1], ids[1:])
            assert (torch.tensor(harness.run(scored(seed))) - truth).abs().max() < 1e-4
    finally:
        harness.close()
