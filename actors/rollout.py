"""A lease in, a group out: the members of one prompt, generated side by side."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from actors.episode import EpisodeRunner, PromptTooLongError
from streamrl.errors import EngineError, WireError
from streamrl.messages import (
    NUM_FAILED_EPISODES,
    TO_HUB,
    Group,
    Lease,
    Limits,
    Member,
    MemberStatus,
    Outcome,
    ReturnReason,
)
from streamrl.messages.codec import Decoder, encode
from streamrl.messages.validate import check_group

log = logging.getLogger("streamrl.actor")


async def run_group(lease: Lease, runner: EpisodeRunner, *, on_progress: Callable[[], None] = lambda: None) -> Group:
    """Generate every leased member; the whole group is sent as one message.

    Members whose environment failed are ABORTED, and the hub leases them again; the group says how many and why. A
    group without a member is RETURNED with the reason. `on_progress` is called after every generation and environment
    step of any member.
    """
    started = time.perf_counter()
    try:
        if lease.prompt is None:
            raise LookupError("the record is not valid: the log of the learner names its file and field")
        json.loads(lease.prompt)
    except (ValueError, LookupError) as error:
        return returned(lease, ReturnReason.PROMPT_INVALID, f"prompt {lease.prompt_index}: {error}")
    try:
        members = await _all_or_cancel([
            # A record of its own for each member: an environment may change it.
            runner.play(json.loads(lease.prompt), index, seed, lease.sampling, on_progress)
            for index, seed in zip(lease.members, lease.seeds, strict=True)
        ])
    except PromptTooLongError as error:
        return returned(lease, ReturnReason.TOO_LONG, str(error))
    except EngineError as error:
        return returned(lease, ReturnReason.ENGINE_ERROR, str(error))
    num_failed = sum(member.status == MemberStatus.ABORTED or "env_error" in member.scores for member in members)
    cause = (runner.last_env_error or "no generation had a token") if num_failed else ""
    if all(member.status == MemberStatus.ABORTED for member in members):
        return returned(lease, ReturnReason.ENV_ERROR, cause)
    stats = {"generate_s": time.perf_counter() - started, NUM_FAILED_EPISODES: float(num_failed)}
    return _group(lease, Outcome.COMPLETE, ReturnReason.NONE, cause, _share_prompt(members), stats)


def sendable(group: Group, lease: Lease, limits: Limits) -> Group:
    """The group if the hub will accept it; else the lease handed back with the rule that the group breaks.

    The hub's own checks, on the very bytes that would be sent: a group that fails there counts against this actor.
    """
    if group.outcome != Outcome.COMPLETE:
        return group
    try:
        check_group(group, limits, leased=lease.members)
        Decoder(TO_HUB, limits.max_message_bytes).decode(encode(group))
    except WireError as error:
        detail = f"{error.counter}: {error}"
    except (TypeError, ValueError, OverflowError) as error:  # MessagePack has no form for it
        detail = f"cannot be encoded: {error}"
    else:
        return group
    log.error("a finished group is handed back, the hub would refuse it: %s", detail)
    return returned(lease, ReturnReason.ENV_ERROR, detail)


def returned(lease: Lease, reason: ReturnReason, detail: str) -> Group:
    """The lease handed back; after an ENV_ERROR every member counts as failed."""
    stats = {NUM_FAILED_EPISODES: float(len(lease.members))} if reason == ReturnReason.ENV_ERROR else {}
    return _group(lease, Outcome.RETURNED, reason, detail, (), stats)


def _group(
    lease: Lease, outcome: Outcome, reason: ReturnReason, detail: str, members: tuple[Member, ...],
    stats: dict[str, float],
) -> Group:
    """A group message; the detail is cut to what fits."""
    detail = detail[:512].encode("utf-8", "replace").decode()  # a user's exception may hold anything
    return Group(
        incarnation=0, seq=0, group_id=lease.group_id, attempt=lease.attempt, outcome=outcome, reason=reason,
        detail=detail, sampling=lease.sampling, members=members, stats=stats,
    )


async def _all_or_cancel(plays: list[Coroutine[Any, Any, Member]]) -> list[Member]:
    """Gather; if one raises, the others are cancelled, which ends their sequences in the engine."""
    tasks = [asyncio.ensure_future(play) for play in plays]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def _share_prompt(members: list[Member]) -> tuple[Member, ...]:
    """Equal prompts are sent once: an empty prompt stands for the first member's."""
    first = next(member for member in members if member.status != MemberStatus.ABORTED)
    others = (member for member in members if member is not first)
    return first, *(
        msgspec.structs.replace(member, prompt_ids=b"") if member.prompt_ids == first.prompt_ids else member
        for member in others
    )
