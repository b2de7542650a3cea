"""Stop strings are found at the first token whose text completes one, however tokens and text line up."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from actors.engines.native.scheduler import StopMatcher, decoder
from tests.unit.engines.tiny_models import LETTERS, character_tokenizer, engine_for, prompt_of, qwen3, request, run

PIECES = ["a", "b", "ab", "\u2581a", "\u2581", "ba", "\u2581ab\u2581", "<0xC3>", "<0xA9>", "<0xE2>", "<0x82>", "<0xAC>"]


def byte_tokenizer():
    """Pieces with word marks and single bytes: a decoder that strips a leading space and glues bytes together."""
    backend = Tokenizer(models.WordLevel({piece: place for place, piece in enumerate(PIECES)}, unk_token="a"))
    backend.decoder = decoders.Sequence([
        decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0),
    ])  # fmt: skip
    return type("Wrapped", (), {"backend_tokenizer": backend})()


def slow_stop(ids, stop, decode) -> int | None:
    """Number of tokens after which the whole text, decoded from the start, first contains a stop string."""
    for count in range(1, len(ids) + 1):
        if any(text in decode(ids[:count]) for text in stop):
            return count
    return None


@settings(max_examples=300, deadline=None)
@given(
    ids=st.lists(st.integers(0, len(PIECES) - 1), min_size=1, max_size=70),
    stop=st.lists(
        st.sampled_from(["a b", "bab", " ab ", "\u00e9", "\u20aca", "aaa", "b\u20ac", "  "]), min_size=1, max_size=3
    ),
)
@example(ids=[0] * 9 + [9, 10, 11] + [7, 8] * 3, stop=["\u00e9\u00e9\u00e9"])  # the window slides inside a character
def test_the_matcher_stops_where_decoding_everything_again_would(ids, stop):
    decode = decoder(byte_tokenizer())
    matcher = StopMatcher(stop, decode)
    found = next((count for count, token in enumerate(ids, 1) if matcher.feed(token)), None)
    assert found == slow_stop(ids, stop, decode)


def test_a_decoder_that_rewrites_earlier_text_is_followed():
    def decode(ids):
        return "".join("xyz"[token] for token in ids).replace("xy", "Q")

    matcher = StopMatcher(("Qz",), decode)
    assert [matcher.feed(token) for token in (0, 0, 1, 2)] == [False, False, False, True]


@pytest.mark.parametrize("length", [1, 2, 3])
def test_the_engine_ends_with_the_stop_string_in_the_output(length):
    model, tokenizer = qwen3(), character_tokenizer()

    async def work():
        async with engine_for(model, tokenizer) as engine:
            free = await engine.generate(request(prompt_of(5), 60, seed=4))
            text = tokenizer.decode(free.token_ids)
            stop = next(text[i : i + length] for i in range(20, 50) if all(c in LETTERS for c in text[i : i + length]))
            stopped = await engine.generate(request(prompt_of(5), 60, seed=4, stop=("never said", stop)))

        end = text.index(stop) + length
        assert stopped.finish == "stop"
        assert tokenizer.decode(stopped.token_ids) == text[:end]
        assert stopped.token_ids == free.token_ids[: len(stopped.token_ids)]

    run(work)


def test_a_stop_string_may_be_a_special_token():
    tokenizer = character_tokenizer()
    matcher = StopMatcher(("<end>",), decoder(tokenizer))
    assert [matcher.feed(token) for token in (5, 6, 1)] == [False, False, True]
