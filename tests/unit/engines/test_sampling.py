"""The draw: right frequencies, right log-probs, one number per (seed, position)."""

import math
import random

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from actors.engines.base import check_sampling
from actors.engines.native import sampling as native_sampling
from actors.engines.native.sampling import SamplingPlan, draw, processed_logprobs
from actors.engines.native.scheduler import StopMatcher, decoder
from streamrl.errors import RequestError
from streamrl.messages import Sampling
from streamrl.messages.seeding import uniforms
from tests.kit.each import each
from tests.unit.engines.tiny_models import (
    GREEDY,
    LETTERS,
    character_tokenizer,
    engine_for,
    prompt_of,
    qwen3,
    request,
    run,
)

LOGITS = torch.tensor([0.3, -1.0, 2.0, 0.0, 1.1, -0.4, 1.9])
CUTS = [
    Sampling(), Sampling(0.6), Sampling(top_k=3), Sampling(top_p=0.7), Sampling(min_p=0.3), Sampling(2.0, 0.9, 5, 0.1),
]  # fmt: skip


def numbers(count: int, seed: int = 0) -> np.ndarray:
    return uniforms(np.arange(count, dtype=np.uint64) + np.uint64(seed << 32), np.full(count, 7, dtype=np.uint64))


@pytest.mark.parametrize("sampling", CUTS)
def test_empirical_frequencies_match_the_distribution(sampling):
    """Chi-square, generously bounded; the seeds are fixed, so a failure is a change of the code."""
    count = 20_000
    plan = SamplingPlan([sampling] * count)

    tokens, logprobs, _ = draw(LOGITS.expand(count, -1), plan, numbers(count))

    probs = processed_logprobs(LOGITS[None], SamplingPlan([sampling]))[0].double().exp()
    seen = torch.bincount(tokens, minlength=len(LOGITS)).double()
    assert seen[probs == 0].sum() == 0
    expected = probs * count
    statistic = (((seen - expected) ** 2)[probs > 0] / expected[probs > 0]).sum().item()
    freedom = int((probs > 0).sum()) - 1
    assert statistic < freedom + 4 * math.sqrt(2 * freedom) + 10
    torch.testing.assert_close(logprobs.double().exp(), probs[tokens], atol=1e-6, rtol=1e-5)


def test_uniform_numbers_fill_the_unit_interval_evenly_along_seeds_and_along_positions():
    for seeds, positions in ((np.arange(50_000), np.zeros(50_000)), (np.zeros(50_000), np.arange(50_000))):
        values = uniforms(seeds.astype(np.uint64), positions.astype(np.uint64))
        counts, _ = np.histogram(values, bins=50, range=(0.0, 1.0))
        assert values.min() >= 0.0 and values.max() < 1.0
        assert ((counts - 1000) ** 2 / 1000).sum() < 49 + 4 * math.sqrt(98) + 10
        assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.02


def test_uniform_numbers_never_change():
    """A repeated lease is the same draw, also on another machine and another release."""
    seeds = np.array([0, 1, 2**64 - 1, 12345], dtype=np.uint64)
    positions = np.array([0, 0, 9, 2**40], dtype=np.uint64)

    def slow(seed: int, position: int) -> float:
        def mix(state: int) -> int:
            z = (state + 0x9E3779B97F4A7C15) % 2**64
            z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
            z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
            return z ^ (z >> 31)

        return (mix(mix(seed) ^ position) >> 11) / 2**53

    assert uniforms(seeds, positions).tolist() == [slow(int(s), int(p)) for s, p in zip(seeds, positions, strict=True)]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.builds(
            Sampling,
            st.sampled_from([0.0, 0.3, 1.0, 1.7]),
            st.sampled_from([1.0, 0.9, 0.5, 1e-9]),
            st.sampled_from([-1, 0, 1, 4, 1000]),
            st.sampled_from([0.0, 0.05, 1.0]),
        ),
        min_size=1,
        max_size=6,
    ),
    st.integers(0, 1000),
)
def test_a_row_is_the_same_alone_and_among_others(samplings, seed):
    logits = torch.randn(len(samplings), 40, generator=torch.Generator().manual_seed(seed)) * 3
    chance = numbers(len(samplings), seed)

    tokens, logprobs, _ = draw(logits, SamplingPlan(samplings), chance)

    for row, sampling in enumerate(samplings):
        token, logprob, _ = draw(logits[row : row + 1], SamplingPlan([sampling]), chance[row : row + 1])
        assert tokens[row] == token[0]
        assert logprobs[row] == logprob[0]
        assert math.isfinite(logprob[0])
        if sampling.temperature == 0.0:
            assert (token[0], logprob[0]) == (logits[row].argmax(), 0.0)


@pytest.mark.parametrize("number", [0.0, 0.5, 1.0 - 2.0**-53])
def test_a_token_of_probability_zero_is_never_drawn(number):
    logits = torch.tensor([[float("-inf"), 0.0, float("-inf"), 0.0, float("-inf")]])
    tokens, logprobs, _ = draw(logits, SamplingPlan([Sampling()]), np.array([number]))
    assert tokens[0] in (1, 3)
    assert logprobs[0].item() == pytest.approx(math.log(0.5))


@pytest.mark.parametrize("vocab", [513, 1024, 3000])
def test_a_large_vocabulary_is_inverted_as_one_cumulative_sum(vocab):
    logits = 3 * torch.randn(1, vocab, generator=torch.Generator().manual_seed(vocab))
    logits[:, torch.rand(vocab, generator=torch.Generator().manual_seed(1)) < 0.3] = -math.inf
    logits[:, 512:600] = -math.inf  # the end of a block, or all of the last one
    count = 20_000
    drawn, *_ = draw(logits.expand(count, -1), SamplingPlan([Sampling()] * count), numbers(count))
    cumulative = torch.softmax(logits[0].double(), -1).cumsum(0).numpy()
    below = np.concatenate([[0.0], cumulative[:-1]])
    own = numbers(count) * cumulative[-1]
    # Float32 sums of a block and of its ids differ by rounding, which may move a draw across a boundary.
    assert np.all(below[drawn] - 1e-6 <= own) and np.all(own <= cumulative[drawn] + 1e-6)
    assert torch.isfinite(logits[0, drawn]).all()
    reference = np.searchsorted(cumulative, own, side="right")
    assert np.mean(drawn.numpy() != reference) < 1e-3


@pytest.mark.parametrize("likely", [0, 511, 512, 1500, 2047, 2500])
@pytest.mark.parametrize("number", [0.0, 0.5, np.nextafter(1.0, 0.0)])
def test_the_only_possible_token_of_a_large_vocabulary_is_drawn(likely, number):
    logits = torch.full((1, 2501), -math.inf)
    logits[0, likely] = 4.0
    tokens, logprobs, _ = draw(logits, SamplingPlan([Sampling()]), np.array([number]))
    assert tokens.tolist() == [likely] and logprobs.tolist() == [0.0]


@each("seed", range(300))
def test_draws_are_those_of_whole_rows_bit_for_bit(seed):
    pick = random.Random(seed)
    numbers_of = torch.Generator().manual_seed(seed)
    rows, vocab = pick.randrange(1, 13), pick.choice([7, 300, 512, 513, 1024, 1500, 5000])
    logits = pick.choice([0.1, 3.0, 20.0]) * torch.randn(rows, vocab, generator=numbers_of)
    if pick.random() < 0.3:
        logits[torch.rand(rows, vocab, generator=numbers_of) < 0.5] = -math.inf
    kinds = pick.choice([[Sampling()], [Sampling(0.7)], [Sampling(0.0)], CUTS, [*CUTS, Sampling(0.0), Sampling(1.3)]])
    samplings = [pick.choice(kinds) for _ in range(rows)]
    if CUTS[2] not in kinds:  # of equal logits any may be the k-th
        logits = logits.to(pick.choice([torch.float32, torch.bfloat16]))
    found = []
    for size in (pick.choice([1, 3 * vocab]), rows * vocab):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(native_sampling, "_PIECE", size)
            found.append(draw(logits, SamplingPlan(samplings), numbers(rows, seed)))

    drawn, expected = found
    assert torch.equal(drawn.tokens, expected.tokens) and torch.equal(drawn.logprobs, expected.logprobs)
    assert {row: ids.tolist() for row, ids in drawn.sets.items()} == {
        row: ids.tolist() for row, ids in expected.sets.items()
    }


class Largest(TorchDispatchMode):
    """Finds how much memory the largest tensor takes that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {one.untyped_storage()._cdata for one in tree_leaves((args, kwargs)) if torch.is_tensor(one)}
        made = [one for one in tree_leaves(out) if torch.is_tensor(one)]
        self.nbytes = max([self.nbytes, *(one.nbytes for one in made if one.untyped_storage()._cdata not in given)])
        return out


@pytest.mark.parametrize("samplings", [[Sampling()], [Sampling(0.7)], [GREEDY], [Sampling(), GREEDY]])
def test_no_tensor_of_all_rows_and_the_whole_vocabulary_is_made(samplings, monkeypatch):
    rows, vocab = 32, 4096
    logits = torch.randn(rows, vocab)
    plan = SamplingPlan([samplings[row % len(samplings)] for row in range(rows)])
    found = {}
    for piece in (1, rows * vocab):
        monkeypatch.setattr(native_sampling, "_PIECE", piece)
        with Largest() as largest:
            draw(logits, plan, numbers(rows))
        found[piece] = largest.nbytes
    greedy = samplings == [GREEDY]
    assert found[1] <= vocab * 8 and (found[rows * vocab] >= logits.nbytes or greedy)


def test_top_p_keeps_the_token_that_crosses_the_line():
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    kept = processed_logprobs(logits, SamplingPlan([Sampling(top_p=0.6)])).exp()
    torch.testing.assert_close(kept, torch.tensor([[0.625, 0.375, 0.0, 0.0]]))


def test_the_given_logits_are_left_as_they_were():
    logits = torch.randn(3, 9)
    before = logits.clone()
    draw(logits, SamplingPlan([Sampling(top_k=2), Sampling(min_p=0.5), Sampling(0.0)]), numbers(3))
    torch.testing.assert_close(logits, before, atol=0, rtol=0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_numbers_give_a_logprob_that_is_not_finite(temperature):
    logits = torch.full((1, 5), float("nan"))
    _, logprobs, _ = draw(logits, SamplingPlan([Sampling(temperature)]), np.array([0.3]))
    assert math.isnan(logprobs[0])


@pytest.mark.parametrize(
    ("sampling", "name"),
    [
        (Sampling(temperature=float("nan")), "temperature"), (Sampling(temperature=-0.1), "temperature"),
        (Sampling(top_p=0.0), "top_p"), (Sampling(top_p=1.01), "top_p"), (Sampling(min_p=1.5), "min_p"),
        (Sampling(top_k=-2), "top_k"), (Sampling(top_k=1 << 31), "top_k"),
        (Sampling(temperature=1e-320), "temperature"),
    ],
)  # fmt: skip
def test_what_is_no_distribution_is_refused_by_name(sampling, name):
    with pytest.raises(RequestError, match=name):
        check_sampling(sampling)


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
