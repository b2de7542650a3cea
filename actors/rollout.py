"""A lease in, a group out: the members of one prompt, generated side by side."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable

import msgspec

from actors.episode import EpisodeRunner, PromptTooLongError
from streamrl.environment import Record
from streamrl.errors import EngineError, WireError
from streamrl.messages import TO_HUB, Group, Lease, Limits, Member, MemberStatus, Outcome, ReturnReason
from streamrl.messages.codec import Decoder, encode
from streamrl.messages.validate import GroupBounds, check_group

log = logging.getLogger("streamrl.actor")


async def run_group(
    lease: Lease, runner: EpisodeRunner, *, load_record: Callable[[Lease], Record] | None = None,
    on_progress: Callable[[], None] = lambda: None,
) -> Group:
    """Generate every leased member; the whole group is sent as one message.

    Members whose environment failed are ABORTED (their member is leased again by the hub). A group that cannot be
    generated at all comes back as RETURNED with the reason; nothing is invented. `on_progress` is called after every
    generation and every environment step of any member.
    """
    started = time.perf_counter()
    try:
        record = json.loads(lease.prompt) if lease.prompt is not None else _load(lease, load_record)
    except (ValueError, LookupError) as error:
        return returned(lease, ReturnReason.PROMPT_INVALID, f"prompt {lease.prompt_index}: {error}")
    plays: list[Awaitable[Member]] = [
        runner.play(record, index, seed, lease.sampling, on_progress)
        for index, seed in zip(lease.members, lease.seeds, strict=True)
    ]
    try:
        members = await _all_or_cancel(plays)
    except PromptTooLongError as error:
        return returned(lease, ReturnReason.TOO_LONG, str(error))
    except EngineError as error:
        return returned(lease, ReturnReason.ENGINE_ERROR, str(error))
    if all(member.status == MemberStatus.ABORTED for member in members):
        cause = runner.last_env_error or "no generation had a token"
        return returned(lease, ReturnReason.ENV_ERROR, f"every member failed, of late with {cause}")
    return Group(
        incarnation=0, seq=0, group_id=lease.group_id, attempt=lease.attempt, outcome=Outcome.COMPLETE,
        reason=ReturnReason.NONE, detail="", sampling=lease.sampling, members=_share_prompt(members),
        stats={"generate_s": time.perf_counter() - started},
    )


def sendable(group: Group, lease: Lease, limits: Limits) -> Group:
    """The group, if the hub will believe it; else the lease handed back with the rule that the group breaks.

    The same checks as the hub's, on the very bytes that would be sent: what fails there counts against this actor.
    """
    if group.outcome != Outcome.COMPLETE:
        return group
    bounds = GroupBounds(limits.vocab_size, limits.max_prompt_tokens, limits.max_new_tokens)
    try:
        check_group(group, bounds, leased=lease.members)
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
    """The lease handed back; the detail is cut to what fits."""
    detail = detail[:512].encode("utf-8", "replace").decode()  # whatever a user's exception says
    return Group(
        incarnation=0, seq=0, group_id=lease.group_id, attempt=lease.attempt, outcome=Outcome.RETURNED,
        reason=reason, detail=detail, sampling=lease.sampling, members=(), stats={},
    )


def _load(lease: Lease, load_record: Callable[[Lease], Record] | None) -> Record:
    if load_record is None:
        raise LookupError("the lease carries no record, and this actor cannot load one by index")
    return load_record(lease)


async def _all_or_cancel(plays: list[Awaitable[Member]]) -> list[Member]:
    """Gather; if one raises, the others are cancelled and their engine slots are free again."""
    tasks = [asyncio.ensure_future(play) for play in plays]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def _share_prompt(members: list[Member]) -> tuple[Member, ...]:
    """Equal prompts travel once: an empty prompt means "as the first member's"."""
    first = next(member for member in members if member.status != MemberStatus.ABORTED)
    ordered = [first, *(member for member in members if member is not first)]
    return tuple(
        msgspec.structs.replace(member, prompt_ids=b"")
        if member is not first and member.prompt_ids == first.prompt_ids
        else member
        for member in ordered
    )
