"""Shared prompts as data: every trajectory keeps its tokens, and the common beginning is packed once."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.data.layout import make_layout
from learner.data.packing import pack
from learner.data.shared_prompts import KEYS_PER_TOKEN, LEAST_STEM_TOKENS, common_beginnings
from tests.kit.learning import VOCAB, trajectory

GROUPS = st.lists(
    st.tuples(st.integers(1, 60), st.lists(st.tuples(st.integers(1, 25), st.integers(0, 6)), min_size=1, max_size=6)),
    min_size=1, max_size=6,
)
"""Tokens of the prompt, and for each member its action tokens and how many leading ones are like the first member's."""


def rows_of(groups, *, openings=()):
    """`openings`: of each group how its prompt begins, as (which of several texts, how many tokens of it)."""
    rng, rows = np.random.default_rng(0), []
    texts = np.random.default_rng(1).integers(0, VOCAB, (3, 60)).astype(np.int32)
    texts[1, :20] = texts[0, :20]  # two tasks, one system prompt before both
    for group, (num_prompt, members) in enumerate(groups):
        prompt = rng.integers(0, VOCAB, num_prompt).astype(np.int32)
        which, like = openings[group] if group < len(openings) else (0, 0)
        prompt[:like] = texts[which, : min(like, num_prompt)]
        first = None
        for index, (num_actions, like) in enumerate(members):
            made = trajectory(rng, group, index, num_prompt=num_prompt, num_actions=num_actions)
            row = replace(made, prompt_ids=prompt)
            if first is None:
                first = row
            like = min(like, len(row.token_ids), len(first.token_ids))
            row.token_ids[:like] = first.token_ids[:like]
            rows.append(row)
    return rows


def before(number: int, starts, parents) -> list[int]:
    """Packed positions of what a sequence continues, first what that one continues."""
    parent = parents[number] if parents else -1
    return [] if parent < 0 else [*before(parent, starts, parents), *range(starts[parent], starts[parent + 1])]


def seen_from(micro, at: int) -> list[int]:
    """Packed positions that the token at one sees, in order: what its sequence continues, then its sequence."""
    starts = np.cumsum([0, *micro.packing.lengths])
    sequence = int(np.searchsorted(starts, at, side="right")) - 1
    return [*before(sequence, starts, micro.packing.parents), *range(starts[sequence], at + 1)]


OPENINGS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 60)), max_size=6)


@given(GROUPS, OPENINGS, st.integers(95, 300), st.booleans())
@settings(max_examples=100, deadline=None)
def test_every_action_token_is_scored_from_exactly_its_own_trajectory(groups, openings, max_tokens, bootstrap):
    rows, found = rows_of(groups, openings=openings), []
    for micro in pack(rows, max_tokens, share=True, bootstrap=bootstrap):
        assert micro.num_tokens == sum(micro.packing.lengths) <= max_tokens
        used = 0
        for place, i in enumerate(micro.trajectory_ids):
            row, picked = rows[i], micro.flat_index // micro.mask.shape[1] == place
            full = np.concatenate([row.prompt_ids, row.token_ids])
            wanted = np.flatnonzero(row.mask) + len(row.prompt_ids)
            assert micro.targets[picked].tolist() == full[wanted].tolist()
            for at, target in zip(micro.score_index[picked].tolist(), wanted.tolist(), strict=True):
                seen = seen_from(micro, at)
                assert micro.tokens[seen].tolist() == full[:target].tolist()
                assert micro.positions[seen].tolist() == list(range(target))
            used += int(wanted[-1]) + int(bootstrap and row.truncated)
            if bootstrap and row.truncated:
                end = int(micro.bootstrap_index[micro.bootstrap_rows == place])
                assert micro.tokens[seen_from(micro, end)].tolist() == full[: int(wanted[-1]) + 1].tolist()
        assert micro.num_shared == used - micro.num_tokens >= 0
        found += micro.trajectory_ids
    assert sorted(found) == list(range(len(rows)))


def test_a_group_needs_its_prompt_once_and_goes_into_one_micro_batch():
    rows = rows_of([(300, [(30, 0)] * 8), (300, [(30, 0)] * 8)])

    plain, shared = pack(rows, 1000), pack(rows, 1000, share=True)

    assert (len(plain), len(shared)) == (6, 2)
    assert [one.trajectory_ids for one in shared] == [tuple(range(8)), tuple(range(8, 16))]
    assert all(one.num_tokens < 300 + 8 * 32 and one.num_shared == 7 * 300 for one in shared)


def test_a_group_over_the_budget_is_split_and_repeats_its_prompt():
    rows = rows_of([(100, [(20, 0)] * 9)])
    packed = pack(rows, 170, share=True)

    assert len(packed) >= 3 and all(one.num_tokens <= 170 for one in packed)
    assert sorted(i for one in packed for i in one.trajectory_ids) == list(range(9))


def test_what_all_responses_begin_with_is_shared_beside_the_prompt():
    rows = rows_of([(20, [(25, 0), (25, 6), (25, 6)])])
    (micro,) = pack(rows, 500, share=True)

    assert micro.packing.lengths[0] >= 26 and micro.packing.parents == (-1, 0, 0, 0)


ANSWERS = [(10, 0)] * 4


def test_what_prompts_begin_with_is_packed_once_for_all_groups():
    rows = rows_of([(50, ANSWERS), (60, ANSWERS), (45, [(10, 0)])], openings=[(0, 40)] * 3)
    (micro,) = pack(rows, 2000, share=True)

    assert micro.packing.lengths[:2] == (40, 10) and micro.packing.parents[:3] == (-1, 0, 1)
    assert sum(parent == -1 for parent in micro.packing.parents) == 1
    assert micro.num_tokens < 40 + 10 + 20 + 5 + 9 * 12


def test_single_answers_to_prompts_that_begin_alike_need_that_once():
    rows = rows_of([(50, [(10, 0)])] * 6, openings=[(2, 40)] * 6)
    (micro,) = pack(rows, 2000, share=True)

    assert set(micro.packing.parents) == {-1, 0} and micro.num_shared == 5 * 40
    assert micro.num_tokens == micro.packing.lengths[0] + sum(micro.packing.lengths[1:])


def test_of_a_short_stem_of_all_and_longer_ones_of_some_those_are_taken_that_save_more():
    def stems(openings) -> list[int]:
        rows = rows_of([(60, [(10, 0)])] * len(openings), openings=openings)
        (micro,) = pack(rows, 2000, share=True)
        parents = micro.packing.parents
        return sorted(micro.packing.lengths[number] for number in {parent for parent in parents if parent >= 0})

    assert stems([(0, 50)] * 4 + [(1, 50)] * 4) == [50, 50]  # saves 2 x 3 x 50, and 7 x 20 for all
    assert stems([(0, 24), (0, 24), (1, 24), (1, 24)]) == [20]  # 4 tokens more are too few


def test_a_stem_counts_once_in_the_budget_of_a_micro_batch():
    rows = rows_of([(50, [(10, 0)])] * 6, openings=[(0, 40)] * 6)
    longest = max(row.num_tokens for row in rows)

    assert len(pack(rows, 2 * longest, share=True)) == 2 < len(pack(rows, 2 * longest)) == 3


def test_the_keys_of_a_micro_batch_have_a_bound_however_much_its_sequences_share():
    rows = rows_of([(52, [(2, 0)])] * 60, openings=[(0, 50)] * 60)
    packed = pack(rows, 100, share=True)

    keys = [sum(rows[place].num_tokens for place in one.trajectory_ids) for one in packed]
    assert max(keys) <= KEYS_PER_TOKEN * 100 < sum(keys) and all(one.num_tokens <= 100 for one in packed)


def test_the_answers_to_one_prompt_have_that_bound_too():
    rows = rows_of([(90, [(2, 0)] * 40)])
    packed = pack(rows, 100, share=True)

    keys = [sum(rows[place].num_tokens for place in one.trajectory_ids) for one in packed]
    assert max(keys) <= KEYS_PER_TOKEN * 100 < sum(keys) and sum(map(len, (one.trajectory_ids for one in packed))) == 40


def test_few_micro_batches_hold_a_stem_where_prompts_begin_in_several_ways():
    openings = [(number % 3, 50) for number in range(60)]
    rows = rows_of([(53 + number % 5, [(5, 0)]) for number in range(60)], openings=openings)
    packed = pack(rows, 170, share=True)

    alone = [pack([row for row, (which, _) in zip(rows, openings, strict=True) if which == stem], 170, share=True)
             for stem in range(3)]
    assert len(packed) <= sum(map(len, alone))
    assert sum(one.num_tokens for one in packed) <= sum(one.num_tokens for parts in alone for one in parts)


def test_a_stem_that_saves_little_of_long_answers_is_left_alone():
    def parents(answer: int) -> tuple[int, ...]:
        (micro,) = pack(rows_of([(12, [(answer, 0)])] * 2, openings=[(0, 10)] * 2), 2000, share=True)
        return micro.packing.parents

    assert parents(20) == (-1, 0, 0) and not parents(200)  # 10 of 62 tokens, and of 422


@given(st.lists(st.lists(st.integers(0, 1), max_size=LEAST_STEM_TOKENS + 8), max_size=12), st.data())
@settings(max_examples=200, deadline=None)
def test_common_beginnings_save_as_much_as_any_choice_of_them(rows, data):
    rows += [rows[data.draw(st.integers(0, len(rows) - 1))] for _ in range(4)] if rows else []
    rows = [[7] * 5 + row for row in rows]
    found = common_beginnings({place: np.array(row) for place, row in enumerate(rows)})

    named = [place for _, alike in found for place in alike]
    assert len(named) == len(set(named))
    assert all(num >= LEAST_STEM_TOKENS and len({tuple(rows[place][:num]) for place in alike}) == 1
               and min(len(rows[place]) for place in alike) >= num for num, alike in found)
    assert sum(num * (len(alike) - 1) for num, alike in found) == most_saved(rows, 0)


def most_saved(rows: list[list[int]], known: int) -> int:
    """Tokens saved by the best choice for these rows, whose first `known` are the same."""
    own = known * (len(rows) - 1) if known >= LEAST_STEM_TOKENS else 0
    following: dict[int, list[list[int]]] = {}
    for row in rows:
        if len(row) > known:
            following.setdefault(row[known], []).append(row)
    return max(own, sum(most_saved(alike, known + 1) for alike in following.values() if len(alike) > 1))


def test_thousands_of_prompts_each_the_beginning_of_the_next_are_no_deep_recursion():
    full = np.random.default_rng(0).integers(0, VOCAB, 6000)
    found = common_beginnings({number: full[: 10 * number] for number in range(1, 600)})

    (num, alike), = found
    assert num * (len(alike) - 1) == max(10 * number * (599 - number) for number in range(1, 600))


@pytest.mark.parametrize(("groups", "reason"), [([(3, [(4, 0)] * 4)], "short"), ([(40, [(4, 0)])], "alone")], ids=str)
def test_a_short_prompt_or_a_lone_answer_is_packed_as_ever(groups, reason):
    rows = rows_of(groups)
    (plain,), (shared,) = pack(rows, 400), pack(rows, 400, share=True)

    assert shared.packing.lengths == plain.packing.lengths and not shared.packing.parents, reason
    assert torch.equal(shared.tokens, plain.tokens) and shared.num_shared == 0


def test_answers_of_one_token_leave_nothing_but_their_prompt():
    rows = rows_of([(30, [(1, 0)] * 5)])
    (micro,) = pack(rows, 400, share=True)

    assert micro.packing.lengths == (30,) and micro.num_scored == 5 and micro.score_index.tolist() == [29] * 5


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 8)), min_size=1, max_size=16))
@settings(max_examples=60, deadline=None)
def test_blocks_show_each_query_its_sequence_and_what_it_continues(sequences):
    lengths = [length for length, _ in sequences]
    parents = [number - back if 0 < back <= number else -1 for number, (_, back) in enumerate(sequences)]
    layout = make_layout(lengths, parents)
    starts = np.cumsum([0, *lengths])
    places = torch.arange(sum(lengths)) if layout.block_index is None else layout.block_index
    sources = torch.cat([block.sources for block in layout.blocks])
    assert torch.equal(sources[places], torch.arange(sum(lengths)))

    area, first = 0, 0
    for block in layout.blocks:
        num, more = block.sources.numel() // block.length, block.continued
        keys = block.sources if more is None else more.key_sources
        at = torch.arange(block.length).expand(num, -1)
        query_at, key_at = (at, at) if more is None else (more.query_positions, more.key_positions)
        keys = keys.view(num, -1)
        area += num * block.length * keys.shape[1]
        real = places[(places >= first) & (places < first + num * block.length)] - first
        for query in real.tolist():
            row, column = divmod(query, block.length)
            seen = keys[row][key_at[row] <= query_at[row, column]].tolist()
            packed = int(block.sources[query])
            sequence = int(np.searchsorted(starts, packed, side="right")) - 1
            assert seen == [*before(sequence, starts, parents), *range(starts[sequence], packed + 1)]
        first += num * block.length
    need = sum(n * (n + len(before(number, starts, parents))) for number, n in enumerate(lengths))
    assert area < 2 * need
