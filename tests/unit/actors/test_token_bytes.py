"""The bytes of single tokens: together those of the text, also where a character is several tokens."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from actors.render import Renderer, token_bytes
from tests.unit.actors.fakes import TOKENIZER, installed_engine
from tests.unit.actors.test_requests import serving

WORDS = ["a b", "ab abab", "naïve", "漢字", "🙂 ok", "x\n\ty"]
TEXTS = st.lists(st.sampled_from([*WORDS, *"é漢🙂 ab\n", "\u200d"]), max_size=12).map("".join)


def byte_level():
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(WORDS, trainers.BpeTrainer(vocab_size=280, initial_alphabet=alphabet))
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")


def sentencepiece():
    """As Llama 2 has it: spaces as a mark of their own, and bytes for characters that it does not know."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "ab", "▁a", "▁ab"]
    merges = [("a", "b"), ("▁", "a"), ("▁", "ab")]
    vocab = {piece: place for place, piece in enumerate(pieces)}
    backend = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="<|end|>")


KINDS = {"byte-level": byte_level(), "sentencepiece": sentencepiece()}


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=60)
@given(text=TEXTS)
def test_the_bytes_of_all_tokens_are_those_of_the_text(kind, text):
    tokenizer, of = KINDS[kind], token_bytes(KINDS[kind])
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert b"".join(map(of, ids)) == text.encode()


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_are_their_text_and_ids_that_are_not_there_are_nothing(kind):
    of = token_bytes(KINDS[kind])
    assert of(KINDS[kind].eos_token_id) == b"<|end|>" and of(10**6) == b""
    assert token_bytes(TOKENIZER)(TOKENIZER.eos_token_id) == b"<end>"
    assert token_bytes(TOKENIZER)(2) == b"a"


async def test_logprobs_of_a_chat_name_the_bytes_of_each_token():
    tokenizer = KINDS["byte-level"]
    said = tokenizer("🚀", add_special_tokens=False)["input_ids"]

    engine = await installed_engine(lambda *_: said)
    async with serving(engine, renderer=Renderer(tokenizer)) as (asks, _):
        body = {"messages": [{"role": "user", "content": "ab"}], "logprobs": True}
        content = (await asks.post("/v1/chat/completions", json=body)).json()["choices"][0]["logprobs"]["content"]
    assert len(content) == len(said) > 1
    assert bytes(byte for one in content for byte in one["bytes"]).decode() == "🚀"
    assert all(bytes(one["bytes"]).decode(errors="replace") == one["token"] for one in content)
