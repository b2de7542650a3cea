"""The rules that a GROUP must satisfy before leases are looked at.

Hub and actor check with the same code, so a group that fails at the hub is a bug or an attack. Every rule has a name of
its own (`ContentError.check`):

    empty               no members, and not handed back
    sampling            the distribution is not a distribution, or (the ledger looks) not the one that was leased
    member_twice        a member index occurs twice in the message
    member_not_leased   a member index outside the lease
    prompt_length       the prompt is no whole number of 4-byte ids     (`token_length`, `logprob_length` likewise)
    prompt_missing      no prompt, neither its own nor the first member's
    prompt_too_long     more prompt tokens than the hub allows
    prompt_vocabulary   a prompt id outside the vocabulary              (`token_vocabulary` likewise)
    logprob_finite      a NaN or an infinity
    logprob_positive    a log-probability above 1e-4
    logprob_off_mask    not exactly 0.0 where the token is no action
    mask_ranges         ranges not sorted, disjoint, non-empty, inside  (`version_ranges`, `turn_ranges` likewise)
    version_cover       an action token without a version               (`turn_cover` likewise)
    set_missing         truncated sampling without sets of ids, or sets of the whole distribution
    set_length          not one size for each action token, or not as many ids as the sizes say
    set_ids             an id outside the vocabulary, or a set that is not ascending or empty
    set_token           a set without the token that was drawn
    no_action_tokens    nothing to train on, and not aborted
    response_too_long   more action tokens than the hub allows
    too_many_tokens     more tokens of any kind, all prompts included, than the learner can train; not of evaluations
    sequence_count      more sequences in a trajectory than the hub allows
    sequence_starts     sequences not in order and inside, or one without an action token
    sequence_prompt_missing, sequence_prompt_length, sequence_prompt_vocabulary     as above, of a later sequence
    reward_finite       a NaN or an infinity                            (`turn_reward_finite`, `score_finite` likewise)
    reward_size         beyond MAX_MAGNITUDE                            (`turn_reward_size`, `score_size` likewise)
    turn_score_finite   a NaN or an infinity, where a turn has a score of its own
    turn_score_size     the same beyond MAX_MAGNITUDE
    score_name          a score's name is empty or not printable
    agents              not one name for each sequence, or one that is not printable

Where top-p, top-k or min-p cut the distribution off, a member names the ids that each action token was drawn from. The
learner's log-probs are of the distribution over the same ids, so that a ratio at lag 0 is 1. The form of `Member.sets`:

        u16 little-endian   size of each action token's set, in the order of the tokens
        then                the ids of all sets, ascending in each: u16 if all of them fit, else u32
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import NoReturn

import numpy as np
from msgspec import Struct

from streamrl.errors import ContentError
from streamrl.messages import EVAL_BIT, Group, Limits, Member, MemberStatus, Outcome, Sampling, Span, Turn, VersionRef
from streamrl.messages.codec import unpack_ids, unpack_logprobs

LARGEST_SET = (1 << 16) - 1


def sound(stats: Mapping[str, float]) -> dict[str, float]:
    """The numbers of an actor about itself that can be added up; a NaN, or what is negative or endless, is left out."""
    return {name: value for name, value in stats.items() if 0.0 <= value <= LARGEST_STAT}


def is_truncated(sampling: Sampling) -> bool:
    """Whether tokens were drawn from a part of the vocabulary."""
    return sampling.top_p < 1.0 or sampling.top_k > 0 or sampling.min_p > 0.0


def pack_sets(sets: Sequence[np.ndarray]) -> bytes:
    """The sets of a member's action tokens as bytes; of none, no bytes."""
    if not sets:
        return b""
    ids = np.concatenate(sets)
    sizes = np.array([len(one) for one in sets], dtype="<u2")
    return sizes.tobytes() + ids.astype("<u2" if ids.max(initial=0) < 1 << 16 else "<u4").tobytes()


def unpack_sets(raw: bytes, num_tokens: int, where: str = "") -> tuple[np.ndarray, np.ndarray]:
    """Sizes [num_tokens] and ids [K], int64. Raises ContentError `set_length`."""
    sizes = np.frombuffer(raw[: min(2 * num_tokens, len(raw) // 2 * 2)], dtype="<u2").astype(np.int64)
    count, rest = int(sizes.sum()), raw[2 * num_tokens :]
    if len(sizes) != num_tokens or not count or len(rest) not in (2 * count, 4 * count):
        raise ContentError(
            "set_length",
            f"{where}: sets of {num_tokens} action tokens are {len(raw)} bytes, with sizes that sum up to {count} ids",
        )
    return sizes, np.frombuffer(rest, dtype="<u2" if len(rest) == 2 * count else "<u4").astype(np.int64)


MAX_LOGPROB = 1e-4
"""Rounding may lift the log of a probability of one a little above zero, never by more than this."""
MAX_MAGNITUDE = 1e12
"""Of a reward or score. An actor refuses a single one beyond a million; an episode's sum may be larger, but not so
large that squares overflow float32 in the learner."""
PART_BYTES = 1 << 15
"""Of token ids that are checked together."""
LARGEST_STAT = 1e18
"""The most that an actor may tell of itself: counts, seconds, bytes."""


class VersionTokens(Struct, array_like=True, frozen=True, gc=False):
    """A run of consecutive action tokens that one version sampled."""

    learner_epoch: int
    version: int
    num_action_tokens: int


class MemberSummary(Struct, array_like=True, frozen=True, gc=False):
    """The ledger's record of a checked member besides its bytes; `num_tokens` counts prompts and all after them."""

    index: int
    status: MemberStatus
    num_tokens: int
    num_action_tokens: int
    reward: float
    scores: dict[str, float]
    spans: tuple[VersionTokens, ...]
    all_versions: tuple[VersionRef, ...]
    cut: bool = False  # by a limit of tokens or turns

    @property
    def aborted(self) -> bool:
        return self.status == MemberStatus.ABORTED


def check_group(group: Group, limits: Limits, leased: Collection[int]) -> tuple[MemberSummary, ...]:
    """Check every rule above; a summary of each member, in message order.

    Short members are looked at end to end, as one array: an array operation costs more than such a member.

    Args:
        leased: member indices that this lease may fill.
    Raises:
        ContentError: a rule is broken; `.check` is its name, the message says where and by what.
    """
    for sampling in group.samplings:
        _check_sampling(sampling)
    if not group.members and group.outcome != Outcome.RETURNED:
        raise ContentError("empty", f"group {group.group_id} has no members but outcome {group.outcome}, not RETURNED")
    _check_indices(group, leased)
    return tuple(summary for members in _parts(group) for summary in _check_members(group, members, limits))


def _parts(group: Group) -> Iterator[list[Member]]:
    """The members in order, as many at a time as have few enough tokens for arrays that stay in the cache."""
    part: list[Member] = []
    num_bytes = 0
    for member in group.members:
        if part and num_bytes + len(member.token_ids) > PART_BYTES:
            yield part
            part, num_bytes = [], 0
        part.append(member)
        num_bytes += len(member.token_ids)
    if part:
        yield part


def _check_members(group: Group, members: Sequence[Member], limits: Limits) -> Iterator[MemberSummary]:
    places = _check_lengths(group, members, limits)
    _check_vocabulary(group, members, limits)
    lengths = [last - first for first, last in pairwise(places)]
    num_actions = [_check_mask(group, member, length) for member, length in zip(members, lengths, strict=True)]
    _check_logprobs(group, members, limits, places)
    _check_counts(group, members, limits, num_actions)
    of_versions, num_tokens = [], []
    for member, length, wanted in zip(members, lengths, num_actions, strict=True):
        of_versions.append(_check_spans(group, member, length, wanted))
        if member.status != MemberStatus.ABORTED:
            _check_sets(group, member, limits.vocab_size)
        _check_rewards(group, member)
        num_later = _check_sequences(group, member, limits)
        num_prompt = len(member.prompt_ids or group.members[0].prompt_ids) // 4
        num_tokens.append(num_prompt + num_later + length)
        _check_total(group, member, limits, num_tokens[-1])
    return map(_summary, members, num_tokens, num_actions, of_versions)


def _check_mask(group: Group, member: Member, num_tokens: int) -> int:
    """Check the ranges of the mask of a member with so many tokens; returns how many of them are actions."""
    _check_ranges(member.mask, num_tokens, "mask", group, member)
    return sum([end - start for start, end in member.mask])


def _check_spans(group: Group, member: Member, num_tokens: int, num_actions: int) -> list[int]:
    """Check that each action token has a version and a turn, and each sequence one; action tokens of each version span.

    Ranges that pass can be laid over an array of the tokens, as the learner's ranks do.
    """
    of_versions = _cover(group, member, member.versions, num_tokens, num_actions, "version")
    _cover(group, member, member.turns, num_tokens, num_actions, "turn")
    for start, end in pairwise([0, *(one.start for one in member.sequences), num_tokens]) if member.sequences else ():
        if not (0 <= start < end <= num_tokens and sum(_num_inside(member.mask, [(start, end)]))):
            _refuse(
                group, member, "sequence_starts", f": the sequence of tokens {start}..{end} must lie in the "
                f"{num_tokens} tokens, after those before it, and hold an action token",
            )
    return of_versions


def _check_sets(group: Group, member: Member, vocab_size: int) -> None:
    """Check the sets of a member whose mask was checked."""
    sampling = member.sampling or group.sampling
    cut, where = is_truncated(sampling), _where(group, member)
    if not member.sets:
        if cut and member.mask and not group.group_id & EVAL_BIT:
            raise ContentError("set_missing", f"{where} was drawn with {sampling}, and does not say of which ids")
        return
    if not cut:
        raise ContentError("set_missing", f"{where} names sets of ids and was drawn with {sampling}, from all")
    tokens = np.frombuffer(member.token_ids, dtype="<i4")
    drawn = np.concatenate([tokens[start:end] for start, end in member.mask])
    sizes, ids = unpack_sets(member.sets, len(drawn), where)
    owner = np.repeat(np.arange(len(sizes)), sizes)
    if not sizes.all() or ids.max() >= vocab_size or ((np.diff(ids) <= 0) & (np.diff(owner) == 0)).any():
        raise ContentError("set_ids", f"{where}: a set is empty, not ascending or not within {vocab_size} ids")
    if (ids == drawn[owner]).sum() != len(drawn):
        raise ContentError("set_token", f"{where}: a set does not hold the token that was drawn from it")


def _summary(member: Member, num_tokens: int, num_actions: int, of_versions: Sequence[int]) -> MemberSummary:
    """of_versions: action tokens of each span."""
    return MemberSummary(
        index=member.index, status=member.status, num_tokens=num_tokens, num_action_tokens=num_actions,
        reward=member.reward, scores=dict(member.scores),
        spans=tuple(
            [VersionTokens(span.learner_epoch, span.version, n)
             for span, n in zip(member.versions, of_versions, strict=True) if n]
        ),
        all_versions=tuple(dict.fromkeys([VersionRef(span.learner_epoch, span.version) for span in member.versions])),
        cut=member.cut,
    )


def _where(group: Group, member: Member) -> str:
    return f"group {group.group_id} member {member.index}"


def _refuse(group: Group, member: Member, rule: str, what: str) -> NoReturn:
    raise ContentError(rule, _where(group, member) + what)


def _check_sampling(sampling: Sampling) -> None:
    values = (sampling.temperature, sampling.top_p, sampling.min_p)
    if not all(math.isfinite(value) and value >= 0.0 for value in values):
        raise ContentError("sampling", f"{sampling} is not a distribution: every number must be finite and >= 0")


def is_scorable(sampling: Sampling) -> bool:
    """Whether the temperature has log-probs; members name the ids that are left, if some were cut off."""
    return 0.01 <= sampling.temperature <= 100.0


def _check_total(group: Group, member: Member, limits: Limits, num_tokens: int) -> None:
    if num_tokens > limits.max_trajectory_tokens and member.status != MemberStatus.ABORTED and (
        not group.group_id & EVAL_BIT
    ):
        _refuse(
            group, member, "too_many_tokens", f" has {num_tokens} tokens with its prompts and observations, the "
            f"learner trains at most {limits.max_trajectory_tokens} at once (learner.max_tokens_per_device)",
        )


def _check_indices(group: Group, leased: Collection[int]) -> None:
    seen: set[int] = set()
    for member in group.members:
        if member.index in seen:
            _refuse(group, member, "member_twice", " occurs twice in one message")
        if member.index not in leased:
            _refuse(group, member, "member_not_leased", f" is not in the lease, which has {sorted(leased)}")
        seen.add(member.index)


def _check_lengths(group: Group, members: Sequence[Member], limits: Limits) -> list[int]:
    """Offsets of the members' tokens in the array of all, the end of the last included: [members + 1]."""
    places = [0]
    for member in members:
        prompt = member.prompt_ids or group.members[0].prompt_ids
        if not prompt and member.status != MemberStatus.ABORTED:
            _refuse(group, member, "prompt_missing", " has no prompt, and neither has the first member")
        if len(member.prompt_ids) % 4 or len(member.token_ids) % 4 or len(member.logprobs) != len(member.token_ids):
            _raise_of_codec(group, members, limits)
        if len(prompt) > 4 * limits.max_prompt_tokens:
            what = f" has a prompt of {len(prompt) // 4} tokens, the limit is {limits.max_prompt_tokens}"
            _refuse(group, member, "prompt_too_long", what)
        places.append(places[-1] + len(member.token_ids) // 4)
    return places


def _check_vocabulary(group: Group, members: Sequence[Member], limits: Limits) -> None:
    parts = [raw for member in members for raw in (member.prompt_ids, member.token_ids)]
    ids = np.frombuffer(b"".join(parts), dtype="<i4")
    if len(ids) and not 0 <= ids.min() <= ids.max() < limits.vocab_size:
        _raise_of_codec(group, members, limits)


def _raise_of_codec(group: Group, members: Sequence[Member], limits: Limits) -> NoReturn:
    """Find the member that breaks a rule of the codec, and raise it under its name here."""
    for member in members:
        with _named("prompt", _where(group, member)):
            unpack_ids(member.prompt_ids, vocab_size=limits.vocab_size, what="prompt")
        with _named("token", _where(group, member)):
            unpack_ids(member.token_ids, vocab_size=limits.vocab_size, what="token")
        with _named("logprob", _where(group, member)):
            unpack_logprobs(member.logprobs, num_tokens=len(member.token_ids) // 4)
    raise AssertionError("a rule of the codec is broken in all members together and in none alone")


@contextmanager
def _named(what: str, where: str) -> Iterator[None]:
    """A rule of the codec under its name here."""
    try:
        yield
    except ContentError as error:
        raise ContentError(f"{what}_{error.check}", f"{where}: {error}") from None


def _check_logprobs(group: Group, members: Sequence[Member], limits: Limits, places: Sequence[int]) -> None:
    logprobs = np.frombuffer(b"".join([member.logprobs for member in members]), dtype="<f4")
    if not len(logprobs):
        return
    highest = logprobs.max()  # both ends are NaN if there is one
    if not (math.isfinite(highest) and math.isfinite(logprobs.min())):
        _raise_of_codec(group, members, limits)
    if highest > MAX_LOGPROB:
        at = int(logprobs.argmax())
        raise ContentError(
            "logprob_positive", f"{_token(group, members, places, at)} has the log-prob {logprobs[at]}, above 0"
        )
    for member, first, last in zip(members, places, places[1:], strict=False):
        begin = first
        for start, end in (*member.mask, (last - first, last - first)):
            if begin < first + start and logprobs[begin : first + start].any():
                at = begin + int(np.flatnonzero(logprobs[begin : first + start])[0])
                raise ContentError(
                    "logprob_off_mask",
                    f"{_token(group, members, places, at)} is no action but has log-prob {logprobs[at]}",
                )
            begin = first + end


def _token(group: Group, members: Sequence[Member], places: Sequence[int], at: int) -> str:
    """The token at this place of all, for a message."""
    which = bisect_right(places, at) - 1
    return f"{_where(group, members[which])}: token {at - places[which]}"


def _check_counts(group: Group, members: Sequence[Member], limits: Limits, num_actions: Sequence[int]) -> None:
    for member, count in zip(members, num_actions, strict=True):
        if count == 0 and member.status != MemberStatus.ABORTED:
            _refuse(group, member, "no_action_tokens", " has no action token and is not marked aborted")
        if count > limits.max_new_tokens:
            what = f" has {count} action tokens, the limit is {limits.max_new_tokens}"
            _refuse(group, member, "response_too_long", what)


def _check_ranges(
    ranges: Sequence[tuple[int, int]], num_tokens: int, what: str, group: Group, member: Member
) -> None:
    previous = 0
    for start, end in ranges:
        if not previous <= start < end <= num_tokens:
            raise ContentError(
                f"{what}_ranges",
                f"{_where(group, member)}: {what} range {start}..{end} must be non-empty, start at {previous} or later "
                f"and end by {num_tokens}",
            )
        previous = end


def _cover(
    group: Group, member: Member, spans: Sequence[Span | Turn], num_tokens: int, wanted: int, what: str
) -> list[int]:
    """Action tokens inside each of a member's spans; together they must be all of its own."""
    ranges = [(span.start, span.end) for span in spans]
    _check_ranges(ranges, num_tokens, what, group, member)
    found = _num_inside(member.mask, ranges)
    if sum(found) != wanted:
        _refuse(group, member, f"{what}_cover", f": {what} spans cover {sum(found)} of {wanted} action tokens")
    return found


def _num_inside(mask: Sequence[tuple[int, int]], ranges: Sequence[tuple[int, int]]) -> list[int]:
    """Tokens of `mask` inside each of `ranges`; both are sorted and disjoint."""
    if len(mask) == 1:  # the usual case: an answer, every token of it an action
        (first, last), = mask
        return [max(0, (end if end < last else last) - (start if start > first else first)) for start, end in ranges]
    counts, at = [], 0
    for start, end in ranges:
        while at < len(mask) and mask[at][1] <= start:
            at += 1  # it lies before all that follow, too
        num, later = 0, at
        while later < len(mask) and mask[later][0] < end:
            num += min(mask[later][1], end) - max(mask[later][0], start)
            later += 1
        counts.append(num)
    return counts


def _check_sequences(group: Group, member: Member, limits: Limits) -> int:
    """Check number, agents and prompts of the sequences; returns the tokens of the prompts after the first."""
    if member.agents and not (len(member.agents) == 1 + len(member.sequences) and "".join(member.agents).isprintable()):
        _refuse(
            group, member, "agents", f" names {len(member.agents)} agents {member.agents!r:.100}, not one printable "
            f"name for each of {1 + len(member.sequences)} sequences",
        )
    if not member.sequences:
        return 0
    num_sequences = 1 + len(member.sequences)
    if num_sequences > limits.max_sequences:
        what = f" consists of {num_sequences} sequences, the limit is {limits.max_sequences}"
        _refuse(group, member, "sequence_count", what)
    for one in member.sequences:
        if not one.prompt_ids:
            _refuse(group, member, "sequence_prompt_missing", f": the sequence at token {one.start} has no prompt")
        with _named("sequence_prompt", _where(group, member)):
            unpack_ids(one.prompt_ids, vocab_size=limits.vocab_size, what="prompt")
    return sum(len(one.prompt_ids) for one in member.sequences) // 4


def _check_rewards(group: Group, member: Member) -> None:
    # The usual case is decided here, before any text is made or function called.
    if not abs(member.reward) <= MAX_MAGNITUDE:
        _raise_of_number(group, member, member.reward, "reward", "the reward")
    for turn in member.turns:
        if not abs(turn.reward) <= MAX_MAGNITUDE:
            _raise_of_number(group, member, turn.reward, "turn_reward", f"the reward of turn {turn.start}..{turn.end}")
        if turn.score is not None and not abs(turn.score) <= MAX_MAGNITUDE:
            _raise_of_number(group, member, turn.score, "turn_score", f"the score of turn {turn.start}..{turn.end}")
    for name, score in member.scores.items():
        if not (name and name.isprintable()):
            _refuse(group, member, "score_name", f": the score {name!r} has no printable name")
        if not abs(score) <= MAX_MAGNITUDE:
            _raise_of_number(group, member, score, "score", f"score {name!r}")


def _raise_of_number(group: Group, member: Member, value: float, rule: str, what: str) -> NoReturn:
    if not math.isfinite(value):
        _refuse(group, member, f"{rule}_finite", f": {what} is {value}")
    _refuse(group, member, f"{rule}_size", f": {what} is {value:g}, beyond {MAX_MAGNITUDE:g}")
