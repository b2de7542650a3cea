"""Seeded draws that several processes repeat: members' seeds, their tokens' numbers, groups kept to be read."""

from __future__ import annotations

import numpy as np

_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_MASK64 = (1 << 64) - 1
_KEPT_GROUPS = 0x5A3D  # a stream of its own: the seed of the run also decides what members sample


def mix64(*words: int) -> int:
    """A well-mixed u64 of some integers; the finalizer of SplitMix64 (Steele, Lea, Flood 2014) over each word."""
    state = 0
    for word in words:
        state = (state ^ (word & _MASK64)) + 0x9E3779B97F4A7C15 & _MASK64
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & _MASK64
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & _MASK64
        state ^= state >> 31
    return state


def member_seed(run_seed: int, group_id: int, member: int) -> int:
    """Sampling seed of a member, u64."""
    # The attempt is left out: a repeated group is the same draw.
    return mix64(run_seed, group_id, member)


def draw_key(seed: int, group_id: int) -> int:
    """The groups with the smallest keys are kept to be read, of those trained on and those passed over together."""
    return mix64(seed, group_id, _KEPT_GROUPS)


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """One number in [0, 1) for each (seed, position), both [n] uint64: splitmix64 twice, 53 bits kept.

    Source:
        Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators" (the finalizer).
    """
    mixed = _splitmix(_splitmix(seeds) ^ positions)
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def draw_gaps(drawn_at: np.ndarray, below: np.ndarray, probs: np.ndarray) -> np.ndarray:
    """The distance of each number of `uniforms` from those that would have drawn the recorded token; [n] each.

    A draw inverts the cumulative distribution: token i comes of the numbers from the mass of all smaller ids to that
    plus its own. So the gap is 0 for an exact draw, of the size of rounding for another arithmetic, and of the size of
    the distribution for a token that was not drawn so.

    Args:
        below: mass of the ids smaller than the token's.
        probs: of the token itself.
    """
    return np.maximum(0.0, np.maximum(below - drawn_at, drawn_at - (below + probs)))


def _splitmix(state: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        z = state + _STEP
        z = (z ^ (z >> np.uint64(30))) * _MIX_1
        z = (z ^ (z >> np.uint64(27))) * _MIX_2
        return z ^ (z >> np.uint64(31))
