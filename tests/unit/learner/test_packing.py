"""Packing: nothing lost, nothing over the budget, always the same."""

from dataclasses import fields, is_dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.data import layout, transfer
from learner.data.packing import TokenSets, empty_micro_batch, equalize, pack
from learner.ranks.mesh import Ranks
from streamrl.errors import ConfigError
from tests.kit.learning import batch, trajectory

SIZES = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=40)


def rows_of(sizes):
    rng = np.random.default_rng(0)
    return [trajectory(rng, i // 4, i % 4, num_prompt=p, num_actions=n) for i, (p, n) in enumerate(sizes)]


@given(SIZES, st.integers(64, 200))
@settings(max_examples=50, deadline=None)
def test_every_action_token_is_scored_once_from_the_token_before_it(sizes, max_tokens):
    rows = rows_of(sizes)
    seen = []
    for micro in pack(rows, max_tokens):
        assert sum(rows[i].num_tokens for i in micro.trajectory_ids) <= max_tokens
        assert sum(micro.packing.lengths) == micro.num_tokens
        starts = np.cumsum([0, *micro.packing.lengths])
        for place, i in enumerate(micro.trajectory_ids):
            row, mine = rows[i], micro.mask[place]
            seen.append(i)
            picked = micro.flat_index // micro.mask.shape[1] == place
            assert micro.padded(micro.targets)[place][mine].tolist() == row.token_ids[row.mask].tolist()
            torch.testing.assert_close(micro.behavior_logprobs[place][mine], torch.from_numpy(row.logprobs[row.mask]))
            assert micro.versions[place][mine].tolist() == row.versions[row.mask].tolist()
            assert float(micro.rewards[place].sum()) == row.reward
            full = np.concatenate([row.prompt_ids, row.token_ids])
            before = micro.score_index[picked] - starts[place]
            assert before.tolist() == (np.flatnonzero(row.mask) + len(row.prompt_ids) - 1).tolist()
            packed = micro.tokens[starts[place] : starts[place + 1]].numpy()
            assert np.array_equal(packed, full[: len(packed)])
            assert micro.positions[starts[place] : starts[place + 1]].tolist() == list(range(len(packed)))
    assert sorted(seen) == list(range(len(rows)))


@given(SIZES)
@settings(max_examples=30, deadline=None)
def test_few_micro_batches_are_used_and_always_the_same(sizes):
    rows = rows_of(sizes)
    first, again = pack(rows, 70), pack(rows, 70)

    assert [m.trajectory_ids for m in first] == [m.trajectory_ids for m in again]
    need = sum(row.num_tokens for row in rows)
    # first fit leaves at most one micro-batch half empty
    assert len(first) <= 2 * need / 70 + 1


def test_a_trajectory_over_the_budget_names_the_setting():
    longest = trajectory(np.random.default_rng(0), 0, 0, num_prompt=10, num_actions=10, with_gap=False)

    assert len(pack([longest], 20)) == 1
    with pytest.raises(ConfigError, match="learner.max_tokens_per_device=19 .* is below the longest trajectory of 20"):
        pack([longest], 19)


def test_trajectories_without_actions_are_not_packed():
    rows = batch(1, 3)
    rows[1].mask[:] = False

    assert [m.trajectory_ids for m in pack(rows, 500)] == [(0, 2)]
    assert pack(rows[1:2], 500) == []


def test_every_rank_runs_as_many_passes_as_the_longest_and_the_rest_are_empty():
    others_have_five = SimpleNamespace(maximum=lambda mine: max(mine, 5.0))
    mine = pack(batch(2, 2), 40)

    equal = equalize(mine, others_have_five)

    assert len(equal) == 5 and equal[: len(mine)] == mine
    assert all(not m.trajectory_ids and m.num_scored == 0 and m.num_tokens == 1 for m in equal[len(mine) :])
    assert equalize(mine, Ranks()) == mine


def test_an_empty_pass_reaches_every_parameter_with_zeros(checkpoints):
    from learner.model.policy import load_policy

    policy, empty = load_policy(checkpoints["qwen3-tied"]), empty_micro_batch()

    logprobs, _ = policy(
        empty.tokens, empty.positions, empty.packing, empty.score_index, empty.targets, empty.temperatures
    )
    logprobs.sum().backward()

    assert all(p.grad is not None and not p.grad.any() for p in policy.parameters())


def tensors_in(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, tuple):
        return [one for part in value for one in tensors_in(part)]
    parts = fields(value) if is_dataclass(value) else ()
    return [one for part in parts for one in tensors_in(getattr(value, part.name))]


def test_every_tensor_of_a_micro_batch_goes_to_its_device_through_pinned_memory(monkeypatch):
    rows = rows_of([(9, 4), (9, 5), (9, 30), (3, 7)])
    rows[1:2] = [replace(rows[1], prompt_ids=rows[0].prompt_ids)]
    whole, sent = pack(rows, 200, share=True, bootstrap=True)[0], []
    sets = TokenSets(*(torch.arange(number) for number in range(1, 5)))
    whole = replace(whole, sets=sets)
    for module in (transfer, layout):
        monkeypatch.setattr(module, "upload", lambda one, device: sent.append(id(one)) or one.to(device))

    moved = whole.to("meta")

    assert sorted(sent) == sorted(map(id, tensors_in(whole))) and len(sent) > 20
    assert {one.device.type for one in tensors_in(moved)} == {"meta"}
