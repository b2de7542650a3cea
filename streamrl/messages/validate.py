"""The rules that a GROUP must satisfy before leases are looked at.

Hub and actor check with the same code, so a group that fails at the hub is a bug or an attack. Every rule has a name of
its own (`ContentError.check`):

    empty               no members, and not handed back
    sampling            the distribution is not a distribution
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
    no_action_tokens    nothing to train on, and not aborted
    response_too_long   more action tokens than the hub allows
    reward_finite       a NaN or an infinity                            (`turn_reward_finite`, `score_finite` likewise)
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from msgspec import Struct

from streamrl.errors import ContentError
from streamrl.messages import Group, Limits, Member, MemberStatus, Outcome, Sampling, Span, Turn, VersionRef
from streamrl.messages.codec import unpack_ids, unpack_logprobs

MAX_LOGPROB = 1e-4
"""Rounding may lift the log of a probability of one a little above zero, never by more than this."""


class VersionTokens(Struct, array_like=True, frozen=True, gc=False):
    """How many consecutive action tokens a version sampled."""

    learner_epoch: int
    version: int
    num_action_tokens: int


class MemberSummary(Struct, array_like=True, frozen=True, gc=False):
    """What the ledger keeps of a checked member besides its bytes; `num_tokens` counts prompt and all after it."""

    index: int
    status: MemberStatus
    num_tokens: int
    num_action_tokens: int
    reward: float
    scores: dict[str, float]
    spans: tuple[VersionTokens, ...]
    all_versions: tuple[VersionRef, ...]

    @property
    def aborted(self) -> bool:
        return self.status == MemberStatus.ABORTED


def check_group(group: Group, limits: Limits, leased: Collection[int]) -> tuple[MemberSummary, ...]:
    """Check every rule above; a summary of each member, in message order.

    Args:
        leased: member indices that this lease may fill.
    Raises:
        ContentError: a rule is broken; `.check` is its name, the message says where and by what.
    """
    _check_sampling(group.sampling)
    if not group.members and group.outcome != Outcome.RETURNED:
        raise ContentError("empty", f"group {group.group_id} has no members but outcome {group.outcome}, not RETURNED")
    seen: set[int] = set()
    summaries = []
    for member in group.members:
        where = f"group {group.group_id} member {member.index}"
        if member.index in seen:
            raise ContentError("member_twice", f"{where} occurs twice in one message")
        if member.index not in leased:
            raise ContentError("member_not_leased", f"{where} is not in the lease, which has {sorted(leased)}")
        seen.add(member.index)
        summaries.append(_check_member(member, group.members[0].prompt_ids, limits, where))
    return tuple(summaries)


def _check_sampling(sampling: Sampling) -> None:
    values = (sampling.temperature, sampling.top_p, sampling.min_p)
    if not all(math.isfinite(value) and value >= 0.0 for value in values):
        raise ContentError("sampling", f"{sampling} is not a distribution: every number must be finite and >= 0")


def _check_member(member: Member, first_prompt: bytes, limits: Limits, where: str) -> MemberSummary:
    aborted = member.status == MemberStatus.ABORTED
    prompt = member.prompt_ids or first_prompt
    if not prompt and not aborted:
        raise ContentError("prompt_missing", f"{where} has no prompt, and neither has the first member")
    num_prompt = _check_ids(prompt, limits.vocab_size, "prompt", where)
    if num_prompt > limits.max_prompt_tokens:
        raise ContentError(
            "prompt_too_long", f"{where} has a prompt of {num_prompt} tokens, the limit is {limits.max_prompt_tokens}"
        )
    num_tokens = _check_ids(member.token_ids, limits.vocab_size, "token", where)
    mask = _mask(member, num_tokens, where)
    _check_logprobs(member.logprobs, mask, where)
    before = np.zeros(num_tokens + 1, dtype=np.int64)  # [T + 1] action tokens before position t
    np.cumsum(mask, out=before[1:])
    num_actions = int(before[-1])
    if num_actions == 0 and not aborted:
        raise ContentError("no_action_tokens", f"{where} has no action token and is not marked aborted")
    if num_actions > limits.max_new_tokens:
        raise ContentError(
            "response_too_long", f"{where} has {num_actions} action tokens, the limit is {limits.max_new_tokens}"
        )
    counts = _cover(member.versions, before, "version", where)
    _cover(member.turns, before, "turn", where)
    _check_rewards(member, where)
    return MemberSummary(
        index=member.index, status=member.status, num_tokens=num_prompt + num_tokens, num_action_tokens=num_actions,
        reward=member.reward, scores=dict(member.scores),
        spans=tuple(
            VersionTokens(span.learner_epoch, span.version, n)
            for span, n in zip(member.versions, counts, strict=True) if n
        ),
        all_versions=tuple(dict.fromkeys(VersionRef(span.learner_epoch, span.version) for span in member.versions)),
    )


def _check_ids(raw: bytes, vocab_size: int, what: str, where: str) -> int:
    with _named(what, where):
        return len(unpack_ids(raw, vocab_size=vocab_size, what=what))


@contextmanager
def _named(what: str, where: str) -> Iterator[None]:
    """A rule of the codec under its name here."""
    try:
        yield
    except ContentError as error:
        raise ContentError(f"{what}_{error.check}", f"{where}: {error}") from None


def _mask(member: Member, num_tokens: int, where: str) -> np.ndarray:
    """bool [T]: which tokens are actions."""
    _check_ranges(member.mask, num_tokens, "mask", where)
    mask = np.zeros(num_tokens, dtype=bool)
    for start, end in member.mask:
        mask[start:end] = True
    return mask


def _check_logprobs(raw: bytes, mask: np.ndarray, where: str) -> None:
    with _named("logprob", where):
        logprobs = unpack_logprobs(raw, num_tokens=len(mask))
    if len(logprobs) and float(logprobs.max()) > MAX_LOGPROB:
        at = int(logprobs.argmax())
        raise ContentError("logprob_positive", f"{where}: the log-prob of token {at} is {logprobs[at]}, above 0")
    stray = (logprobs != 0.0) & ~mask
    if stray.any():
        at = int(stray.argmax())
        raise ContentError("logprob_off_mask", f"{where}: token {at} is no action but has log-prob {logprobs[at]}")


def _check_ranges(ranges: Sequence[tuple[int, int]], num_tokens: int, what: str, where: str) -> None:
    previous = 0
    for start, end in ranges:
        if not previous <= start < end <= num_tokens:
            raise ContentError(
                f"{what}_ranges",
                f"{where}: {what} range {start}..{end} must be non-empty, start at {previous} or later and end by "
                f"{num_tokens}",
            )
        previous = end


def _cover(spans: Sequence[Span | Turn], before: np.ndarray, what: str, where: str) -> list[int]:
    """Action tokens inside each span; together they must be all of them."""
    ranges = [(span.start, span.end) for span in spans]
    _check_ranges(ranges, len(before) - 1, what, where)
    counts = [int(before[end] - before[start]) for start, end in ranges]
    if sum(counts) != before[-1]:
        raise ContentError(
            f"{what}_cover", f"{where}: {what} spans cover {sum(counts)} of {int(before[-1])} action tokens"
        )
    return counts


def _check_rewards(member: Member, where: str) -> None:
    if not math.isfinite(member.reward):
        raise ContentError("reward_finite", f"{where}: the reward is {member.reward}")
    for turn in member.turns:
        if not math.isfinite(turn.reward):
            raise ContentError(
                "turn_reward_finite", f"{where}: the reward of turn {turn.start}..{turn.end} is {turn.reward}"
            )
    for name, score in member.scores.items():
        if not math.isfinite(score):
            raise ContentError("score_finite", f"{where}: score {name!r} is {score}")
