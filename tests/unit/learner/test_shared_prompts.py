"""Shared prompts as data: every trajectory keeps its tokens, and the common beginning is packed once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.data.layout import make_layout
from learner.data.packing import pack
from tests.unit.learner.learner_factories import VOCAB, trajectory

GROUPS = st.lists(
    st.tuples(st.integers(1, 60), st.lists(st.tuples(st.integers(1, 25), st.integers(0, 6)), min_size=1, max_size=6)),
    min_size=1, max_size=6,
)
"""Tokens of the prompt, and for each member its action tokens and how many leading ones are like the first member's."""


def rows_of(groups):
    rng, rows = np.random.default_rng(0), []
    for group, (num_prompt, members) in enumerate(groups):
        prompt = rng.integers(0, VOCAB, num_prompt).astype(np.int32)
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


def seen_from(micro, at: int) -> list[int]:
    """Packed positions that the token at one sees, in order: the parent of its sequence, then its sequence."""
    starts = np.cumsum([0, *micro.packing.lengths])
    sequence = int(np.searchsorted(starts, at, side="right")) - 1
    parent = micro.packing.parents[sequence] if micro.packing.parents else -1
    before = [] if parent < 0 else list(range(starts[parent], starts[parent + 1]))
    return [*before, *range(starts[sequence], at + 1)]


@given(GROUPS, st.integers(95, 300), st.booleans())
@settings(max_examples=60, deadline=None)
def test_every_action_token_is_scored_from_exactly_its_own_trajectory(groups, max_tokens, bootstrap):
    rows, found = rows_of(groups), []
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


@given(st.lists(st.tuples(st.integers(1, 40), st.lists(st.integers(1, 30), max_size=5)), min_size=1, max_size=8))
@settings(max_examples=60, deadline=None)
def test_blocks_show_each_query_its_sequence_and_the_one_it_continues(families):
    lengths, parents = [], []
    for head, members in families:
        parents += [-1, *[len(lengths)] * len(members)]
        lengths += [head, *members]
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
            parent = parents[sequence]
            before = [] if parent < 0 else list(range(starts[parent], starts[parent + 1]))
            assert seen == [*before, *range(starts[sequence], packed + 1)]
        first += num * block.length
    need = sum(n * (n + (lengths[p] if p >= 0 else 0)) for n, p in zip(lengths, parents, strict=True))
    assert area < 2 * need
