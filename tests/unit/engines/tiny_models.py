"""Small random models, a character tokenizer, and the slow truth: plain forward passes of transformers."""

import asyncio
import copy
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from actors.engines.base import GenerateRequest
from actors.engines.native.engine import NativeEngine
from actors.engines.native.weights import checkpoint_tensors
from streamrl.messages import Sampling, VersionRef

torch.set_num_threads(1)
V1, V2, V3 = VersionRef(0, 1), VersionRef(0, 2), VersionRef(0, 3)
GREEDY = Sampling(temperature=0.0)
TIMEOUT_S = 30.0
VOCAB = 64
LETTERS = "abcdefghijklmnopqrstuvwxyz .,:;!?0123456789ABCDEFGHIJKLMNOPQRST"

_SIZES = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512, "initializer_range": 0.25,
    "eos_token_id": 1, "bos_token_id": None, "pad_token_id": 0,
}  # fmt: skip


def qwen3(seed: int = 0, *, tied: bool = True) -> torch.nn.Module:
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(Qwen3Config(**_SIZES, tie_word_embeddings=tied)).eval()


def llama(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**_SIZES, tie_word_embeddings=False)).eval()


def mistral(seed: int = 0) -> torch.nn.Module:
    """Every layer sees at most the last seven tokens."""
    torch.manual_seed(seed)
    return MistralForCausalLM(MistralConfig(**_SIZES, sliding_window=7, tie_word_embeddings=False)).eval()


def document(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A model's weights as they come over the wire."""
    return {name: tensor.detach().clone() for name, tensor in checkpoint_tensors(model).items()}


def character_tokenizer() -> PreTrainedTokenizerFast:
    """Token 0 pads, token 1 ends, the others are one character each."""
    vocab = {"<pad>": 0, "<end>": 1, **{letter: place for place, letter in enumerate(LETTERS[: VOCAB - 2], 2)}}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", pad_token="<pad>")


class GatedTokenizer:
    """A tokenizer that stops the engine's thread inside a step, at its n-th decode, until the test lets it go on."""

    def __init__(self, stop_at: int) -> None:
        self.reached, self.go = threading.Event(), threading.Event()
        self._calls, self._stop_at = 0, stop_at
        self.eos_token_id = None

    def decode(self, ids: Sequence[int], **_: object) -> str:
        self._calls += 1
        if self._calls == self._stop_at:
            self.reached.set()
            assert self.go.wait(TIMEOUT_S), "the test never let the engine go on"
        return "x" * len(ids)


def request(
    prompt: Sequence[int], new: int, *, seed: int = 0, sampling: Sampling | None = None, **more
) -> GenerateRequest:
    more = {"ignore_eos": True, "wants_sets": True, **more}
    return GenerateRequest(list(prompt), sampling or Sampling(), new, seed, **more)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return torch.randint(2, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@asynccontextmanager
async def engine_for(model: torch.nn.Module, tokenizer=None, *, install: bool = True, max_num_seqs: int = 4, **more):
    more.setdefault("max_tokens", 256)
    engine = NativeEngine(copy.deepcopy(model), tokenizer, max_num_seqs=max_num_seqs, num_threads=1, **more)
    try:
        if install:
            await engine.install(document(model), V1)
        yield engine
    finally:
        await engine.close()


def run(work: Callable[[], Awaitable]) -> None:
    asyncio.run(asyncio.wait_for(work(), TIMEOUT_S))


async def until(condition: Callable[[], bool]) -> None:
    """Look again and again; the time limit is that of `run`."""
    while not condition():
        await asyncio.sleep(0.001)


@torch.inference_mode()
def truth_logits(model: torch.nn.Module, ids: Sequence[int]) -> torch.Tensor:
    """[tokens, vocab]: row t predicts token t + 1; one direct pass, no cache."""
    return model(torch.tensor([list(ids)]), use_cache=False).logits[0]


def truth_logprobs(model: torch.nn.Module, prompt: Sequence[int], new: Sequence[int], temperature: float = 1.0):
    logits = truth_logits(model, [*prompt, *new])[len(prompt) - 1 : -1]
    return torch.log_softmax(logits / temperature, -1).gather(-1, torch.tensor(list(new))[:, None])[:, 0]


def assert_logprobs(model: torch.nn.Module, prompt: Sequence[int], generation, temperature: float = 1.0) -> None:
    """Assert that a direct pass over prompt and answer gives what was recorded while sampling."""
    expected = truth_logprobs(model, prompt, generation.token_ids, temperature)
    torch.testing.assert_close(torch.tensor(generation.logprobs), expected, atol=1e-5, rtol=1e-5)


def truth_greedy(model: torch.nn.Module, prompt: Sequence[int], new: int) -> list[int]:
    ids = torch.tensor([list(prompt)])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False,
                         eos_token_id=None, pad_token_id=0)  # fmt: skip
    return out[0, len(prompt) :].tolist()


@torch.inference_mode()
def two_model_logprobs(old, new_model, prompt: Sequence[int], tokens: Sequence[int], switch: int) -> torch.Tensor:
    """Teacher-forced decoding of `tokens` with one cache; tokens switch.. are predicted by the second model."""
    cache, logits = DynamicCache(), []
    steps = [list(prompt), *([token] for token in tokens[:-1])]
    for place, ids in enumerate(steps):
        model = old if place < switch else new_model
        logits.append(model(torch.tensor([ids]), past_key_values=cache, use_cache=True).logits[0, -1])
    return torch.log_softmax(torch.stack(logits), -1).gather(-1, torch.tensor(list(tokens))[:, None])[:, 0]
