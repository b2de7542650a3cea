"""A lease in, a group out: the members of one prompt, generated side by side."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from typing import Any

import msgspec
import xxhash

from actors.env_calls.group_step import GroupStep
from actors.episode import EpisodeRunner, PromptTooLongError
from actors.render import SharedPrompts
from envs.rewards.extract import stated_answer
from streamrl.errors import ContentError, EngineError
from streamrl.messages import (
    FINISHED_AT,
    NUM_FAILED_EPISODES,
    Group,
    Lease,
    Limits,
    Member,
    MemberStatus,
    Outcome,
    Purpose,
    ReturnReason,
)
from streamrl.messages.validate import check_group, is_truncated

MAX_ANSWER_CHARS = 256
"""What a `Group` can carry of one."""

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
    except (ValueError, LookupError, RecursionError) as error:
        return returned(lease, ReturnReason.PROMPT_INVALID, f"prompt {lease.prompt_index}: {error}")
    trains = lease.purpose == Purpose.TRAIN
    cut = any(map(is_truncated, (lease.sampling, *lease.samplings)))
    if trains and cut and not getattr(runner.engine, "returns_sets", False):
        return returned(lease, ReturnReason.ENGINE_ERROR, (
            f"the engine {runner.engine.name} does not say which ids top_p, top_k and min_p leave, so its tokens "
            "cannot be trained on: use actors.engine=native or vllm, or rollout.train.sampling without them"
        ), failed=True)
    group, prompts = GroupStep(lease.members), SharedPrompts(runner.renderer)
    try:
        members = await _all_or_cancel([
            _play(lease, runner, index, seed, on_progress, group, prompts)
            for index, seed in zip(lease.members, lease.seeds, strict=True)
        ])
    except PromptTooLongError as error:
        return returned(lease, ReturnReason.TOO_LONG, str(error))
    except EngineError as error:
        dead = runner.engine.stats().extra.get("dead") or runner.executor.exhausted
        # An engine that lives would refuse it again, as any other would: the task's prompts are at fault, or the model.
        return returned(lease, ReturnReason.ENGINE_ERROR, str(error), failed=not dead)
    num_failed = sum(member.status == MemberStatus.ABORTED or "env_error" in member.scores for member in members)
    cause = (runner.last_env_error or "no generation had a token") if num_failed else ""
    if all(member.status == MemberStatus.ABORTED for member in members):
        return returned(lease, ReturnReason.ENV_ERROR, cause)
    stats = {
        "generate_s": time.perf_counter() - started, NUM_FAILED_EPISODES: float(num_failed),
        FINISHED_AT: datetime.now(UTC).timestamp(),
    }
    done = _group(lease, Outcome.COMPLETE, ReturnReason.NONE, cause, _share_prompt(members), stats)
    if trains:
        return done
    answers = tuple(_answer(runner, member) for member in members)
    unread = tuple(msgspec.structs.replace(member, sets=b"") for member in done.members)
    return msgspec.structs.replace(done, members=unread, answers=answers)


def _answer(runner: EpisodeRunner, member: Member) -> str:
    """The final answer of a member; of a long one a digest, which is as good for counting equal ones."""
    text = stated_answer(runner.renderer.said(member))
    text = text.encode("utf-8", "replace").decode()
    return text if len(text) <= MAX_ANSWER_CHARS else xxhash.xxh3_128_hexdigest(text.encode())


async def _play(
    lease: Lease, runner: EpisodeRunner, index: int, seed: int, on_progress: Callable[[], None], group: GroupStep,
    prompts: SharedPrompts,
) -> Member:
    """A member with a record of its own, which its environment may change; the others stop waiting when it ends."""
    try:
        record = json.loads(lease.prompt or b"")
        own = dict(zip(lease.members, lease.samplings, strict=False)).get(index)
        member = await runner.play(record, index, seed, own or lease.sampling, on_progress, group, prompts)
        return member if own is None else msgspec.structs.replace(member, sampling=own)
    finally:
        group.leave(index)


def sendable(group: Group, lease: Lease, limits: Limits) -> Group:
    """The group if it keeps the rules of a group; else the lease handed back with the rule that it breaks.

    These are the hub's own checks: a group that fails there counts against this actor. The session checks what they
    leave, that the hub can decode the group (`streamrl.transport.session`).
    """
    if group.outcome != Outcome.COMPLETE:
        return group
    try:
        check_group(group, limits, leased=lease.members)
    except ContentError as error:
        detail = f"{error.counter}: {error}"
    except (TypeError, ValueError, OverflowError) as error:  # no bytes or no numbers where there must be some
        detail = f"cannot be checked: {error}"
    else:
        return group
    log.error("a finished group is handed back, the hub would refuse it: %s", detail)
    return returned(lease, ReturnReason.ENV_ERROR, detail)


def returned(lease: Lease, reason: ReturnReason, detail: str, *, failed: bool = False) -> Group:
    """The lease handed back; if it has `failed`, as after every ENV_ERROR, each member counts as a failed episode."""
    failed = failed or reason == ReturnReason.ENV_ERROR
    stats = {NUM_FAILED_EPISODES: float(len(lease.members))} if failed else {}
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
