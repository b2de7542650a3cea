"""Every rule of a GROUP: an honest one passes, and each way to break it is caught under its own name."""

import re

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.errors import ContentError
from streamrl.messages import (
    EVAL_BIT,
    Group,
    Limits,
    Member,
    MemberStatus,
    Outcome,
    ReturnReason,
    Sampling,
    SequenceStart,
    Span,
    Turn,
    VersionRef,
)
from streamrl.messages import validate as group_checks
from streamrl.messages.codec import pack_ids, pack_logprobs
from streamrl.messages.validate import VersionTokens, check_group, pack_sets, unpack_sets
from tests.unit.hub.factories import STEADY

LIMITS = Limits(vocab_size=50, max_prompt_tokens=4, max_new_tokens=6, max_sequences=2, max_trajectory_tokens=15)


def spans(*rows: tuple[int, int, int, int]) -> tuple[Span, ...]:
    return tuple(Span(*row) for row in rows)


def turns(*rows: tuple[int, int, float]) -> tuple[Turn, ...]:
    return tuple(Turn(*row) for row in rows)


# Two turns with an observation between: tokens 0-2 and 4-5 are actions, 3 and 6 are the environment's.
HONEST = Member(
    index=0, status=MemberStatus.FINISHED, prompt_ids=pack_ids([1, 2, 3]),
    token_ids=pack_ids([10, 11, 12, 13, 14, 15, 16]),
    logprobs=pack_logprobs([-0.1, -0.2, -0.3, 0.0, -0.5, -0.6, 0.0]), mask=((0, 3), (4, 6)),
    versions=spans((1, 4, 0, 2), (1, 5, 2, 5), (2, 5, 5, 6)), turns=turns((0, 4, 0.5), (4, 7, 1.0)), reward=1.5,
    scores={"correct": 1.0}, finish="stop",
)


def sequence(start: int, prompt_ids: tuple[int, ...] = (7, 8, 9, 10, 11)) -> SequenceStart:
    return SequenceStart(start, pack_ids(prompt_ids))


def group(*members: Member, outcome: Outcome = Outcome.COMPLETE, sampling: Sampling | None = None) -> Group:
    return Group(
        incarnation=1, seq=1, group_id=3, attempt=0, outcome=outcome, reason=ReturnReason.NONE, detail="",
        sampling=sampling or Sampling(), members=members, stats={},
    )


def changed(**changes: object) -> Member:
    return msgspec.structs.replace(HONEST, **changes)


TOP = Sampling(top_k=4)
THE_REST = [np.array(ids) for ids in ([11, 12], [0, 12, 49], [14], [3, 15])]
SETS = pack_sets([np.array([10]), *THE_REST])
NAN, INF = float("nan"), float("inf")
BROKEN = {
    "empty": group(),
    "sampling": group(HONEST, sampling=Sampling(temperature=NAN)),
    "member_twice": group(HONEST, HONEST),
    "member_not_leased": group(changed(index=9)),
    "prompt_length": group(changed(prompt_ids=b"\0" * 7)),
    "prompt_missing": group(changed(prompt_ids=b"")),
    "prompt_too_long": group(changed(prompt_ids=pack_ids([1] * 5))),
    "prompt_vocabulary": group(changed(prompt_ids=pack_ids([1, 50]))),
    "token_length": group(changed(token_ids=b"\0" * 9)),
    "token_vocabulary": group(changed(token_ids=pack_ids([10, 11, 12, -1, 14, 15, 16]))),
    "logprob_length": group(changed(logprobs=pack_logprobs([-0.1] * 6))),
    "logprob_finite": group(changed(logprobs=pack_logprobs([-0.1, -0.2, NAN, 0.0, -0.5, -0.6, 0.0]))),
    "logprob_positive": group(changed(logprobs=pack_logprobs([-0.1, -0.2, 0.01, 0.0, -0.5, -0.6, 0.0]))),
    "logprob_off_mask": group(changed(logprobs=pack_logprobs([-0.1, -0.2, -0.3, -0.4, -0.5, -0.6, 0.0]))),
    "mask_ranges": group(changed(mask=((4, 6), (0, 3)))),
    "version_ranges": group(changed(versions=spans((1, 4, 0, 3), (1, 5, 2, 6)))),
    "turn_ranges": group(changed(turns=turns((0, 4, 0.5), (4, 8, 1.0)))),
    "version_cover": group(changed(versions=spans((1, 4, 0, 2), (1, 5, 3, 6)))),
    "turn_cover": group(changed(turns=turns((0, 4, 0.5)))),
    "no_action_tokens": group(changed(mask=(), logprobs=pack_logprobs([0.0] * 7))),
    "response_too_long": group(changed(
        token_ids=pack_ids([10] * 7), logprobs=pack_logprobs([-1.0] * 7), mask=((0, 7),),
        versions=spans((1, 4, 0, 7)),
    )),
    "too_many_tokens": group(changed(sequences=(sequence(4, (7, 8, 9, 10, 11, 12)),))),
    "sequence_count": group(changed(sequences=(sequence(1), sequence(2)))),
    "sequence_starts": group(changed(sequences=(sequence(6),))),
    "sequence_prompt_missing": group(changed(sequences=(sequence(4, ()),))),
    "sequence_prompt_length": group(changed(sequences=(SequenceStart(4, b"\0" * 5),))),
    "sequence_prompt_vocabulary": group(changed(sequences=(sequence(4, (1, 50)),))),
    "agents": group(changed(agents=("one", "two"))),
    "set_missing": group(HONEST, sampling=TOP),
    "set_length": group(changed(sets=SETS[:-1]), sampling=TOP),
    "set_ids": group(changed(sets=pack_sets([np.array([10, 10, 11]), *THE_REST])), sampling=TOP),
    "set_token": group(changed(sets=pack_sets([np.array([9, 11]), *THE_REST])), sampling=TOP),
    "reward_finite": group(changed(reward=INF)),
    "turn_reward_finite": group(changed(turns=turns((0, 4, NAN), (4, 7, 1.0)))),
    "score_finite": group(changed(scores={"correct": -INF})),
    "reward_size": group(changed(reward=1e13)),
    "turn_reward_size": group(changed(turns=turns((0, 4, -1e13), (4, 7, 1.0)))),
    "turn_score_finite": group(changed(turns=turns((0, 4, 1.0, NAN), (4, 7, 1.0)))),
    "turn_score_size": group(changed(turns=turns((0, 4, 1.0, 1e13), (4, 7, 1.0)))),
    "score_size": group(changed(scores={"correct": 1e300})),
    "score_name": group(changed(scores={"\x1b[31mred": 1.0})),
}


def test_an_honest_group_gives_its_facts():
    (facts,) = check_group(group(HONEST), LIMITS, range(2))

    assert (facts.index, facts.num_tokens, facts.num_action_tokens, facts.reward) == (0, 10, 5, 1.5)
    assert facts.spans == (VersionTokens(1, 4, 2), VersionTokens(1, 5, 2), VersionTokens(2, 5, 1))


def test_sets_travel_in_two_bytes_an_id_or_four_where_ids_are_larger():
    assert len(SETS) == 2 * 5 + 2 * 9
    check_group(group(changed(sets=SETS), sampling=TOP), LIMITS, range(2))
    large = [np.array([1, 70_000]), np.array([5])]
    assert len(pack_sets(large)) == 2 * 2 + 4 * 3
    for sets in (large, THE_REST):
        sizes, ids = unpack_sets(pack_sets(sets), len(sets))
        assert [one.tolist() for one in np.split(ids, sizes.cumsum()[:-1])] == [one.tolist() for one in sets]
    evaluation = msgspec.structs.replace(group(HONEST, sampling=TOP), group_id=EVAL_BIT | 3)
    check_group(evaluation, LIMITS, range(2))  # no ratio is taken of evaluations


@pytest.mark.parametrize("sets", [
    pack_sets([np.array([10]), np.array([12, 11]), *THE_REST[1:]]), pack_sets([np.array([10, 50]), *THE_REST]),
    pack_sets([np.array([10, 11]), np.array([], dtype=np.int64), *THE_REST[1:]]),
])
def test_a_set_is_ascending_within_the_vocabulary_and_not_empty(sets):
    with pytest.raises(ContentError, match="not ascending or not within 50 ids"):
        check_group(group(changed(sets=sets), sampling=TOP), LIMITS, range(2))


def test_sets_of_the_whole_distribution_are_refused():
    with pytest.raises(ContentError, match="names sets of ids and was drawn"):
        check_group(group(changed(sets=SETS)), LIMITS, range(2))


def test_the_prompts_of_all_sequences_count_and_actions_count_once():
    (facts,) = check_group(group(changed(sequences=(sequence(4),))), LIMITS, range(2))

    assert (facts.num_tokens, facts.num_action_tokens) == (3 + 5 + 7, 5)  # a later prompt may exceed the first's limit


@pytest.mark.parametrize("starts", [(0,), (3, 3), (4, 2), (7,), (9,), (3, 6)])
def test_sequences_are_in_order_and_each_holds_an_action(starts):
    wide = msgspec.structs.replace(LIMITS, max_sequences=9)
    with pytest.raises(ContentError, match="must lie in the 7 tokens, after those before it, and hold an action"):
        check_group(group(changed(sequences=tuple(map(sequence, starts)))), wide, range(2))


def test_a_hub_that_knows_of_one_sequence_takes_no_more():
    with pytest.raises(ContentError, match="consists of 2 sequences, the limit is 1"):
        check_group(group(changed(sequences=(sequence(4),))), Limits(vocab_size=50), range(2))


def test_the_first_prompt_serves_the_members_that_name_none():
    facts = check_group(group(HONEST, changed(index=1, prompt_ids=b"")), LIMITS, range(2))

    assert [one.num_tokens for one in facts] == [10, 10]


def test_an_aborted_member_may_be_empty():
    empty = changed(
        status=MemberStatus.ABORTED, prompt_ids=b"", token_ids=b"", logprobs=b"", mask=(), versions=(), turns=()
    )

    assert check_group(group(empty), LIMITS, range(2))[0].aborted


def test_a_lease_that_is_handed_back_needs_no_members():
    assert check_group(group(outcome=Outcome.RETURNED), LIMITS, range(2)) == ()


def test_a_log_of_one_may_be_rounded_a_little_above_zero():
    check_group(group(changed(logprobs=pack_logprobs([5e-5, -0.2, -0.3, 0.0, -0.5, -0.6, 0.0]))), LIMITS, range(2))


def test_a_span_without_action_tokens_is_checked_against_the_lineage_but_has_no_age():
    (facts,) = check_group(
        group(changed(versions=spans((1, 4, 0, 3), (1, 1, 3, 4), (1, 5, 4, 6)))), LIMITS, range(2)
    )

    assert facts.spans == (VersionTokens(1, 4, 3), VersionTokens(1, 5, 2)) and VersionRef(1, 1) in facts.all_versions


@pytest.mark.parametrize("check", BROKEN)
def test_each_rule_is_caught_under_its_own_name_and_the_member_named_among_honest_ones(check):
    with pytest.raises(ContentError) as caught:
        check_group(BROKEN[check], LIMITS, range(2))
    assert caught.value.check == check and (check == "sampling" or "group 3" in str(caught.value))
    if check in ("empty", "sampling"):
        return

    sampling = BROKEN[check].sampling
    sound = [changed(index=index, sets=SETS if sampling == TOP else b"") for index in (0, 1, 3)]
    broken = BROKEN[check].members[-1]
    if check.startswith("member_"):
        named = broken.index
    else:
        named, broken = 2, msgspec.structs.replace(broken, index=2)
    if check == "prompt_missing":
        named, sound[0] = 0, changed(index=0, prompt_ids=b"")

    with pytest.raises(ContentError, match=f"member {named}") as caught:
        check_group(group(*sound[:2], broken, sound[2], sampling=sampling), LIMITS, range(4))

    assert caught.value.check == check


@pytest.mark.parametrize("part_bytes", [4, 32, 1 << 15])
def test_the_facts_of_a_member_do_not_depend_on_those_beside_it(part_bytes, monkeypatch):
    monkeypatch.setattr(group_checks, "PART_BYTES", part_bytes)
    members = [
        HONEST,
        changed(index=1, prompt_ids=b"", token_ids=pack_ids([7]), logprobs=pack_logprobs([-1.0]), mask=((0, 1),),
                versions=spans((3, 1, 0, 1)), turns=turns((0, 1, 0.0)), reward=0.0),
        changed(index=2, status=MemberStatus.ABORTED, prompt_ids=b"", token_ids=b"", logprobs=b"", mask=(),
                versions=(), turns=()),
        changed(index=3, prompt_ids=pack_ids([5, 6])),
    ]
    together = check_group(group(*members), LIMITS, range(4))

    whole = [msgspec.structs.replace(one, prompt_ids=one.prompt_ids or HONEST.prompt_ids) for one in members]
    assert together == tuple(check_group(group(one), LIMITS, range(4))[0] for one in whole)
    assert [one.num_tokens for one in together] == [10, 4, 3, 9]


def test_every_rule_of_the_table_has_a_broken_example():
    rows = re.findall(r"^    (\w+(?:, \w+)*)  ", group_checks.__doc__, re.M)
    table = [name for row in rows for name in row.split(", ")]
    likewise = re.findall(r"`(\w+)`", "".join(re.findall(r"\(`.*?likewise\)", group_checks.__doc__)))

    assert sorted(table + likewise) == sorted(BROKEN)


@STEADY
@given(st.data())
def test_facts_agree_with_a_token_by_token_count(data):
    num = data.draw(st.integers(1, 12))
    cuts = sorted(data.draw(st.sets(st.integers(1, num), max_size=4)) | {0, num})
    cells = list(zip(cuts, cuts[1:], strict=False))
    masked = [data.draw(st.booleans()) for _ in cells]
    versions = [data.draw(st.integers(0, 5)) for _ in cells]
    mask = np.zeros(num, dtype=bool)
    for (start, end), one in zip(cells, masked, strict=True):
        mask[start:end] = one
    member = changed(
        status=MemberStatus.ABORTED, token_ids=pack_ids([1] * num), logprobs=pack_logprobs(np.where(mask, -1.0, 0.0)),
        mask=tuple(span for span, one in zip(cells, masked, strict=True) if one),
        versions=tuple(Span(1, v, *span) for span, v in zip(cells, versions, strict=True)), turns=turns((0, num, 0.0)),
    )

    (facts,) = check_group(group(member), Limits(vocab_size=50), range(2))

    slow = [(1, v, sum(mask[i] for i in range(*span))) for span, v in zip(cells, versions, strict=True)]
    assert facts.spans == tuple(VersionTokens(*row) for row in slow if row[2])
    assert facts.num_action_tokens == sum(bool(one) for one in mask)


RANGE = st.tuples(st.integers(0, 9), st.integers(0, 9))


@STEADY
@given(st.binary(max_size=40), st.binary(max_size=40), st.lists(RANGE, max_size=4))
def test_hostile_bytes_raise_nothing_but_content_errors(tokens, logprobs, ranges):
    hostile = changed(token_ids=tokens, logprobs=logprobs, mask=tuple(ranges))
    try:
        check_group(group(hostile), LIMITS, range(2))
    except ContentError as error:
        assert error.check in BROKEN
