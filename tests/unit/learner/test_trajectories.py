"""GROUP frames to trajectories, with real frames."""

from __future__ import annotations

import numpy as np
import pytest

from learner.data.trajectories import TrajectoryReader
from streamrl.errors import ContentError, DigestError
from streamrl.messages import Bye, Group, Member, Outcome, Sampling, Span, Turn
from streamrl.messages.codec import encode, pack_ids, pack_logprobs


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


def read(*frames: bytes, version: int = 9, **options):
    return TrajectoryReader(**options).read(frames, version=version, learner_epoch=2)


def test_every_field_of_a_member_arrives_at_its_token():
    (row,) = read(frame(member()))

    assert (row.group_id, row.index, row.temperature, row.truncated, row.num_turns) == (3, 0, 0.8, False, 2)
    assert row.prompt_ids.tolist() == [1, 2, 3] and row.token_ids.tolist() == [4, 5, 6, 7, 8, 9, 10]
    assert row.mask.tolist() == [True] * 3 + [False] * 2 + [True] * 2
    assert row.versions.tolist() == [6, 6, 7, -1, -1, 7, 7]
    assert row.logprobs.tolist() == [-1.0, -2.0, -3.0, 0.0, 0.0, -4.0, -5.0]
    assert (row.num_tokens, row.num_action_tokens) == (10, 5)


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
        ({"versions": ((1, 6, 0, 3), (2, 7, 2, 7))}, "version_ranges"),  # two versions claim one token
        ({"versions": ((1, 6, 0, 2), (2, 10, 2, 7))}, "version"),  # from the future
        ({"versions": ((1, 6, 0, 2), (3, 7, 2, 7))}, "version"),  # from a later learner
        ({"mask": ((0, 3), (5, 8))}, "mask_ranges"),
        ({"logprobs": pack_logprobs([-1.0] * 6)}, "length"),
        ({"logprobs": pack_logprobs([float("nan")] * 7)}, "finite"),
        ({"token_ids": pack_ids([4, 5, 6, 7, 8, 9, 99])}, "vocabulary"),
        ({"prompt_ids": b"abc"}, "length"),
    ],
)
def test_what_training_would_silently_get_wrong_is_refused_by_name(change, check):
    with pytest.raises(ContentError) as caught:
        read(frame(member(**change)), vocab_size=50)
    assert caught.value.check == check


def test_a_trajectory_that_comes_twice_or_has_no_prompt_or_no_temperature_is_refused():
    with pytest.raises(ContentError, match="twice"):
        read(frame(member()), frame(member()))
    with pytest.raises(ContentError, match="no prompt"):
        read(frame(member(prompt_ids=b"")))
    with pytest.raises(ContentError, match="temperature 0.0"):
        read(frame(member(), temperature=0.0))


def test_a_damaged_frame_and_a_frame_of_another_kind_are_refused():
    broken = bytearray(frame(member()))
    broken[-1] ^= 1
    with pytest.raises(DigestError):
        read(bytes(broken))
    with pytest.raises(ContentError, match="GROUP"):
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


def test_the_trajectory_that_is_impossible_is_named_among_sound_ones():
    with pytest.raises(ContentError, match="group 2 member 1") as caught:
        read(frame(member(0), group_id=1), frame(member(1, versions=(Span(1, 6, 0, 3),)), group_id=2), frame(member(2)))
    assert caught.value.check == "version_cover"
    with pytest.raises(ContentError, match="the first is token 2's"):
        read(frame(member(0)), frame(member(1, logprobs=pack_logprobs([-1, -2, float("nan"), 0, 0, -4, -5]))))
