"""One vLLM engine with a tiny model for all tests of a file: its start takes longer than all that they ask of it."""

import asyncio
import threading
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from actors.engines.base import EngineSpec
from actors.engines.vllm.engine import VllmEngine
from learner.data.packing import make_layout
from learner.model.policy import Policy, load_policy
from tests.unit.engines.tiny_models import character_tokenizer

NEEDS_VLLM = [
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: run `make vllm`"),
    pytest.mark.timeout(600),
]
WAIT_S = 280.0
MAX_TOKENS, SLOTS = 256, 8


def model(seed: int) -> Any:
    """Heads of 32, the least that vLLM has an attention for on a CPU; tied, which is the harder case."""
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(Qwen3Config(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=512, initializer_range=0.25, eos_token_id=1,
        bos_token_id=None, pad_token_id=0, tie_word_embeddings=True,
    )).eval()


def save(path: Path, seed: int) -> Path:
    """A model folder as the learner has it."""
    model(seed).save_pretrained(path)
    character_tokenizer().save_pretrained(path)
    return path


class Learner:
    """The learner's log-probs under one version."""

    def __init__(self, path: Path) -> None:
        self.policy: Policy = load_policy(path)

    @torch.no_grad()
    def logprobs(self, prompt: list[int], new: list[int], temperature: float = 1.0) -> torch.Tensor:
        ids = torch.tensor([*prompt, *new])
        num_read = len(ids) - 1
        found, _ = self.policy(
            ids[:-1], torch.arange(num_read), make_layout([num_read]), torch.arange(len(prompt) - 1, num_read),
            ids[len(prompt) :], torch.full((len(new),), temperature),
        )
        return found


class EngineHarness:
    """An engine and the loop that it belongs to, which runs in a thread of its own from test to test."""

    def __init__(self, path: Path, engine: VllmEngine | None = None) -> None:
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, name="vllm-tests", daemon=True).start()
        self.engine = engine or VllmEngine(EngineSpec(
            model_dir=path, tokenizer=character_tokenizer(), max_num_seqs=SLOTS, max_tokens=MAX_TOKENS,
            max_new_tokens=MAX_TOKENS, num_threads=1,
        ))

    def run(self, work: Awaitable) -> Any:
        async def within() -> Any:
            return await asyncio.wait_for(work, WAIT_S)

        return asyncio.run_coroutine_threadsafe(within(), self.loop).result()

    async def under_way(self, num_tokens: int) -> None:
        """Every running sequence has so many tokens; only vLLM's front end counts them."""
        def fewest() -> int:
            states = self.engine._core.llm.output_processor.request_states.values()
            return min((state.detokenizer.num_output_tokens() for state in states), default=0)

        while fewest() < num_tokens:
            await asyncio.sleep(0.002)

    @contextmanager
    def policy(self, name: str) -> Iterator[None]:
        """Another install policy, for one test."""
        before, self.engine._policy = self.engine._policy, name
        try:
            yield
        finally:
            self.engine._policy = before

    def close(self) -> None:
        self.run(self.engine.close())
        self.loop.call_soon_threadsafe(self.loop.stop)
