"""The ids that each action token was drawn from, where top-p, top-k or min-p cut the distribution off.

    u16 little-endian   size of each action token's set, in the order of the tokens
    then                the ids of all sets, ascending in each: u16 if all of them fit, else u32

The learner's log-probs are of the distribution over the same ids, so that a ratio at lag 0 is 1. Rules of check:

    set_missing    truncated sampling without sets, or sets of the whole distribution
    set_length     not one size for each action token, or not as many ids as the sizes say
    set_ids        an id outside the vocabulary, or a set that is not ascending or empty
    set_token      a set without the token that was drawn
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from streamrl.errors import ContentError
from streamrl.messages.base import EVAL_BIT, Sampling
from streamrl.messages.work import Group, Member

LARGEST_SET = (1 << 16) - 1


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


def sets_of(group: Group, member: Member, vocab_size: int | None) -> tuple[np.ndarray, np.ndarray] | None:
    """Sizes and ids of the sets of a member whose mask was checked, or None of the whole distribution.

    Raises:
        ContentError: a rule above is broken.
    """
    cut, where = is_truncated(group.sampling), f"group {group.group_id} member {member.index}"
    if not member.sets:
        if cut and member.mask and not group.group_id & EVAL_BIT:
            raise ContentError("set_missing", f"{where} was drawn with {group.sampling}, and does not say of which ids")
        return None
    if not cut:
        raise ContentError("set_missing", f"{where} names sets of ids and was drawn with {group.sampling}, from all")
    tokens = np.frombuffer(member.token_ids, dtype="<i4")
    drawn = np.concatenate([tokens[start:end] for start, end in member.mask])
    sizes, ids = unpack_sets(member.sets, len(drawn), where)
    owner = np.repeat(np.arange(len(sizes)), sizes)
    if not sizes.all() or (vocab_size is not None and ids.max() >= vocab_size) or (
        (np.diff(ids) <= 0) & (np.diff(owner) == 0)
    ).any():
        raise ContentError("set_ids", f"{where}: a set is empty, not ascending or not within {vocab_size} ids")
    if (ids == drawn[owner]).sum() != len(drawn):
        raise ContentError("set_token", f"{where}: a set does not hold the token that was drawn from it")
    return sizes, ids
