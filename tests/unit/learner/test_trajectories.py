"""GROUP frames to trajectories, with real frames."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.data.trajectories import Trajectory, check_groups, read_groups
from streamrl.errors import ContentError, DigestError, KindError
from streamrl.messages import Bye, Group, Limits, Member, MemberStatus, Outcome, Sampling, SequenceStart, Span, Turn
from streamrl.messages.codec import encode, pack_ids, pack_logprobs
from streamrl.messages.validate import check_group, pack_sets
from tests.unit.hub.factories import STEADY


def member(index=0, **changes) -> Member:
    """Three actions, two observations, two actions; the last version took over after the second action."""
    fields = dict(
        index=index, status=0, prompt_ids=pack_ids([1, 2, 3]), token_ids=pack_ids([4, 5, 6, 7, 8, 9, 10]),
        logprobs=pack_logprobs([-1.0, -2.0, -3.0, 0.0, 0.0, -4.0, -5.0]), mask=((0, 3), (5, 7)),
        versions=(Span(1, 6, 0, 2), Span(2, 7, 2, 7)), turns=(Turn(0, 3, 0.25), Turn(5, 7, 0.5)), reward=1.0,
        scores={"score": 1.0}, finish="stop",
    )
    return Member(**{**fields, **changes})


def frame(*members: Member, group_id: int = 3, temperature: float = 0.8) -> bytes:
    return bytes(encode(Group(
        incarnation=1, seq=1, group_id=group_id, attempt=0, outcome=Outcome.COMPLETE, reason=0, detail="",
        sampling=Sampling(temperature=temperature), members=members, stats={},
    )))


def read(*frames: bytes) -> list[Trajectory]:
    return read_groups(frames)


def test_every_field_of_a_member_arrives_at_its_token():
    (row,) = read(frame(member()))

    assert (row.group_id, row.index, row.temperature, row.truncated, row.num_turns) == (3, 0, 0.8, False, 2)
    assert row.prompt_ids.tolist() == [1, 2, 3] and row.token_ids.tolist() == [4, 5, 6, 7, 8, 9, 10]
    assert row.mask.tolist() == [True] * 3 + [False] * 2 + [True] * 2
    assert row.versions.tolist() == [6, 6, 7, -1, -1, 7, 7]
    assert row.logprobs.tolist() == [-1.0, -2.0, -3.0, 0.0, 0.0, -4.0, -5.0]
    assert (row.num_tokens, row.num_action_tokens) == (10, 5)


def test_a_member_with_a_sampling_of_its_own_is_scored_under_that():
    own = member(1, sampling=Sampling(temperature=1.5))
    assert [row.temperature for row in read(frame(member(0), own))] == [0.8, 1.5]
    with pytest.raises(ContentError, match="temperature 0.0"):
        check_groups([frame(member(0), member(1, sampling=Sampling(temperature=0.0)))], version=9)


def test_turn_rewards_stand_on_the_last_action_of_their_turn_and_the_rest_on_the_last_of_all():
    (row,) = read(frame(member()))

    assert row.rewards.tolist() == [0, 0, 0.25, 0, 0, 0, 0.75]
    assert row.rewards.sum() == row.reward == 1.0


def test_aborted_members_are_left_out_and_truncated_ones_are_marked():
    rows = read(frame(member(0), member(1, status=2), member(2, status=1), member(3, finish="length")))

    # The last one was cut and judged: it is counted as cut, but nothing follows its reward.
    assert [(row.index, row.truncated, row.bootstraps) for row in rows] == [
        (0, False, False), (2, True, True), (3, True, False)
    ]


def test_an_empty_prompt_means_the_prompt_of_the_first_member():
    rows = read(frame(member(0), member(1, prompt_ids=b"")))

    assert np.array_equal(rows[0].prompt_ids, rows[1].prompt_ids)


def test_a_member_without_actions_has_no_reward_to_place():
    (row,) = read(frame(member(mask=(), versions=(), turns=(), logprobs=pack_logprobs([0.0] * 7))))

    assert not row.mask.any() and not row.rewards.any()


@pytest.mark.parametrize(
    ("change", "check"),
    [
        ({"versions": ((1, 6, 0, 2), (2, 7, 2, 6))}, "version_cover"),  # the last action token has no version
        ({"versions": ((1, 6, 0, 2), (2, 10, 2, 7))}, "version"),  # from the future
        ({"token_ids": pack_ids([4, 5, 6, 7, 8, 9, 99])}, "token_vocabulary"),
        ({"prompt_ids": b""}, "prompt_missing"),
    ],
)
def test_what_comes_past_a_hub_is_checked_by_the_same_rules(change, check):
    sound, broken = frame(member(), group_id=1), frame(member(**change), group_id=2)
    check_groups([sound], version=9, vocab_size=50)

    with pytest.raises(ContentError, match="group 2 member 0") as caught:
        check_groups([sound, broken], version=9, vocab_size=50)
    assert caught.value.check == check


def test_a_trajectory_that_comes_twice_or_has_no_temperature_is_refused():
    with pytest.raises(ContentError, match="twice"):
        check_groups([frame(member()), frame(member())], version=9)
    with pytest.raises(ContentError, match="temperature 0.0"):
        check_groups([frame(member(), temperature=0.0)], version=9)


def test_a_damaged_frame_and_a_frame_of_another_kind_are_refused():
    broken = bytearray(frame(member()))
    broken[-1] ^= 1
    with pytest.raises(DigestError):
        read(bytes(broken))
    with pytest.raises(KindError, match="GROUP|Group"):
        read(bytes(encode(Bye(last_seq=0, note=""))))


def test_trajectories_are_read_the_same_alone_and_among_others():
    frames = [
        frame(member(0), member(1, prompt_ids=b"", mask=(), versions=(), turns=(), logprobs=pack_logprobs([0.0] * 7)),
              group_id=1),
        frame(member(3, token_ids=pack_ids([9]), logprobs=pack_logprobs([-1.5]), mask=((0, 1),),
                     versions=(Span(1, 4, 0, 1),), turns=(Turn(0, 1, 2.0),), reward=2.0), group_id=2),
        frame(member(0, prompt_ids=pack_ids([8])), member(2, status=2), group_id=5, temperature=0.5),
    ]
    fields = ("prompt_ids", "token_ids", "logprobs", "mask", "versions", "rewards", "turns")

    together = read(*frames)
    alone = [row for one in frames for row in read(one)]

    assert [(row.group_id, row.index) for row in together] == [(1, 0), (1, 1), (2, 3), (5, 0)]
    for row, same in zip(together, alone, strict=True):
        assert all(np.array_equal(getattr(row, name), getattr(same, name)) for name in fields)
        assert (row.reward, row.temperature, row.num_tokens) == (same.reward, same.temperature, same.num_tokens)


def some_ranges(data: st.DataObject, num_tokens: int) -> list[tuple[int, int]]:
    """Cells that cover the tokens, and now and then one end that is off."""
    cuts = [0, *sorted(data.draw(st.sets(st.integers(1, max(1, num_tokens - 1)), max_size=3))), num_tokens]
    if data.draw(st.integers(0, 9)) == 9:
        cuts[data.draw(st.integers(0, len(cuts) - 1))] = data.draw(st.integers(-1, num_tokens + 1))
    return list(pairwise(cuts))


def some_member(data: st.DataObject, index: int, sampling: Sampling) -> Member:
    """A member that is sound, or nearly: each of its parts is drawn alone."""
    ids = data.draw(st.lists(st.integers(0, 50 if data.draw(st.integers(0, 20)) == 20 else 49), min_size=1, max_size=9))
    num = len(ids)
    mask = [one for one in some_ranges(data, num) if data.draw(st.integers(0, 3))]
    acting = [any(start <= place < end for start, end in mask) for place in range(num)]
    logprobs = [-float(1 + place) if acts else 0.0 for place, acts in enumerate(acting)]
    starts = data.draw(st.sets(st.integers(1, num), max_size=1))
    prompts = st.lists(st.integers(0, 49), min_size=0 if index else 1, max_size=3).map(pack_ids)
    sets = [np.unique([token, 11, 30]) for token, acts in zip(ids, acting, strict=True) if acts]
    agents = ("a", *("b" for _ in starts)) if data.draw(st.booleans()) else ()
    return Member(
        index=index, status=data.draw(st.sampled_from(MemberStatus)), prompt_ids=data.draw(prompts),
        token_ids=pack_ids(ids), logprobs=pack_logprobs(logprobs), mask=tuple(mask),
        versions=tuple(Span(1, data.draw(st.integers(0, 9)), *one) for one in some_ranges(data, num)),
        turns=tuple(Turn(*one, float(data.draw(st.integers(-2, 2)))) for one in some_ranges(data, num)),
        reward=float(data.draw(st.integers(-3, 3))), scores={}, finish="stop", agents=agents,
        sequences=tuple(SequenceStart(one, data.draw(prompts)) for one in sorted(starts)),
        sets=pack_sets(sets) if sampling.top_k > 0 else b"",
    )


def assert_read_token_by_token(row: Trajectory, member: Member, first_prompt: bytes) -> None:
    """Every array of the row is what the ranges say of each token, looked up one by one."""
    ids, num = np.frombuffer(member.token_ids, "<i4").tolist(), len(member.token_ids) // 4
    acting = [any(start <= place < end for start, end in member.mask) for place in range(num)]
    version_at = {place: one.version for one in member.versions for place in range(one.start, one.end)}
    turn_at = {place: number for number, one in enumerate(member.turns) for place in range(one.start, one.end)}
    assert row.token_ids.tolist() == ids and row.mask.tolist() == acting
    assert row.versions.tolist() == [version_at[place] if acts else -1 for place, acts in enumerate(acting)]
    assert row.turns.tolist() == [turn_at[place] if acts else 0 for place, acts in enumerate(acting)]
    assert all(logprob == 0.0 for logprob, acts in zip(row.logprobs, acting, strict=True) if not acts)
    assert row.rewards.sum() == row.reward == member.reward and not row.rewards[~row.mask].any()
    assert pack_ids(row.prompt_ids) == (member.prompt_ids or first_prompt)
    assert [one.start for one in row.pieces] == [0, *(one.start for one in member.sequences)]
    assert all(row.mask[one.start : one.end].any() and len(one.prompt_ids) for one in row.pieces)
    assert len(row.agents) == (len(member.turns) if member.agents else 0)
    if row.sets is not None:
        sizes, kept = row.sets
        ends = np.cumsum(sizes)
        drawn = [token for token, acts in zip(ids, acting, strict=True) if acts]
        assert all(t in kept[end - size : end] for t, size, end in zip(drawn, sizes, ends, strict=True))


def test_a_group_that_the_check_passes_is_unpacked_as_its_ranges_say_token_by_token():
    outcomes = Counter[str]()

    @settings(parent=STEADY, max_examples=400)
    @given(st.data())
    def law(data: st.DataObject) -> None:
        sampling = Sampling(top_k=4) if data.draw(st.booleans()) else Sampling()
        members = tuple(some_member(data, index, sampling) for index in range(data.draw(st.integers(1, 3))))
        group = Group(
            incarnation=1, seq=1, group_id=3, attempt=0, outcome=Outcome.COMPLETE, reason=0, detail="",
            sampling=sampling, members=members, stats={},
        )
        try:
            check_group(group, Limits(vocab_size=50, max_sequences=2), range(3))
        except ContentError as error:
            outcomes[error.check] += 1
            return
        rows = read(bytes(encode(group)))
        kept = [one for one in members if one.status != MemberStatus.ABORTED]
        for row, one in zip(rows, kept, strict=True):
            assert_read_token_by_token(row, one, members[0].prompt_ids)
        outcomes["passed"] += bool(rows)

    law()
    assert outcomes["passed"] >= 50 and len(outcomes) >= 6, outcomes
