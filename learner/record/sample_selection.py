"""The draw of trajectories that a run keeps to be read, and drafts of them before they are decoded.

The draw is fair. Every group that arrived since the step before has a key, a hash of the run's seed and its number. The
groups with the smallest keys are taken, and of each one member by another hash. Rewards, lengths and ages have no
influence, so groups that a filter dropped or that were too old to train show as often as they occur.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from learner.data.trajectories import Trajectory
from streamrl.messages import EVAL_BIT
from streamrl.messages.seeding import draw_key, mix64
from streamrl.metrics.samples import Sample, SampleTokens, Turn

_MEMBERS, _EVALS = 0x5A3E, 0x5A3F  # streams of their own: the seed also decides what is sampled


def draw_groups(group_ids: Iterable[int], num: int, seed: int) -> list[int]:
    """The `num` groups of a fair draw without replacement; what was drawn elsewhere by the same rule can be merged."""
    return heapq.nsmallest(num, set(group_ids), key=lambda group_id: draw_key(seed, group_id))


def draw_member(members: Sequence[int], group_id: int, seed: int) -> int:
    """Draw one of these members of a group."""
    return members[mix64(seed, group_id, _MEMBERS) % len(members)]


def draw_prompts(num_prompts: int, num: int, seed: int) -> tuple[int, ...]:
    """Prompts of an evaluation whose answers are kept: the same in every one, so that versions can be compared."""
    return tuple(sorted(heapq.nsmallest(num, range(num_prompts), key=lambda index: mix64(seed, index, _EVALS))))


class Draft(msgspec.Struct, array_like=True):
    """A sample whose texts are still ids; T tokens after the prompt. What one rank sends to rank 0."""

    sample: Sample
    prompt_ids: list[int]
    token_ids: list[int]  # [T]
    runs: list[tuple[int, int, bool, float]]  # start, end, whether the model said it, its reward; together 0 .. T
    versions: list[int]  # [T], -1 off the mask
    ratios: list[float | None]  # [T], or empty
    later: list[tuple[int, list[int]]]  # of each sequence after the first: where it starts, its prompt

    def decoded(self, tokenizer: object, num_detailed_tokens: int) -> Sample:
        """The sample with its texts; `tokenizer` is one of transformers."""

        def decode(ids: Sequence[int], *, special: bool = False) -> str:
            return tokenizer.decode(  # type: ignore[attr-defined]
                ids, skip_special_tokens=not special, clean_up_tokenization_spaces=False
            )

        prompts = dict(self.later)
        turns = []
        for start, end, said, reward in self.runs:
            if start in prompts:
                turns.append(Turn("context", decode(prompts[start], special=True)))
            turns.append(Turn("assistant" if said else "environment", decode(self.token_ids[start:end]), reward))
        said = [turn.content for turn in turns if turn.role == "assistant"]
        tokens = None
        if num_detailed_tokens:
            ids = self.token_ids[:num_detailed_tokens]
            tokens = SampleTokens(
                ids, token_texts(lambda part: decode(part, special=True), ids),
                (self.ratios or [None] * len(ids))[: len(ids)], self.versions[: len(ids)],
                [start for start, _ in self.later if start < len(ids)],
            )
        return msgspec.structs.replace(
            self.sample, prompt=decode(self.prompt_ids, special=True), answer="\n".join(said),
            messages=turns if len(turns) > 1 else [], tokens=tokens,
        )


def draft(
    row: Trajectory, *, kind: str, step: int, version: int, fate: str, ratios: Sequence[float] = (),
    advantage: float | None = None, dataset: str = "",
) -> Draft:
    """A trajectory as it is kept.

    Args:
        version: the version that lags are counted from.
        ratios: pi/mu of its action tokens, in order; empty if it was not trained on.
    """
    mask, ids = row.mask, row.token_ids
    sampled_by = row.versions[mask]
    oldest = int(sampled_by.min()) if len(sampled_by) else version
    per_token: list[float | None] = []
    if len(ratios):
        per_token = [None] * len(ids)
        for place, ratio in zip(np.flatnonzero(mask).tolist(), ratios, strict=True):
            per_token[place] = float(f"{ratio:.4g}")
    sample = Sample(
        kind=kind, step=step, version=int(sampled_by[0]) if len(sampled_by) else version,
        lag=0 if kind == "eval" else max(0, version - oldest), prompt="", answer="", reward=row.reward,
        score=float(row.scores.get("score", row.reward)), num_tokens=row.num_action_tokens,
        group=row.group_id & ~EVAL_BIT, member=row.index, record=row.prompt_index, fate=fate, actor=row.actor_id,
        truncated=row.truncated, advantage=advantage, dataset=dataset,
        parts={name: float(part) for name, part in row.scores.items() if name != "score"},
    )
    later = [(start, prompt.tolist()) for start, prompt in row.later]
    return Draft(sample, row.prompt_ids.tolist(), ids.tolist(), _runs(row), row.versions.tolist(), per_token, later)


def _runs(row: Trajectory) -> list[tuple[int, int, bool, float]]:
    """Turns and what stands between them: where the mask, the turn or the sequence changes."""
    if not len(row.mask):
        return []
    kinds = np.where(row.mask, row.turns, -1)
    changes = np.append(True, kinds[1:] != kinds[:-1])
    changes[[start for start, _ in row.later]] = True
    starts = np.flatnonzero(changes).tolist()
    return [
        (start, end, bool(row.mask[start]), float(row.rewards[start:end].sum()))
        for start, end in zip(starts, [*starts[1:], len(kinds)], strict=True)
    ]


def token_texts(decode: object, ids: Sequence[int]) -> list[str]:
    """The text that each token adds; joined they are the whole text. `decode` makes a text of a list of ids.

    A character of several tokens is the text of the last one, the others are empty.
    """
    texts: list[str] = []
    context = done = 0  # a token is decoded beside the one before it: many tokenizers drop a space at the beginning
    for end in range(1, len(ids) + 1):
        text = decode(ids[context:end])  # type: ignore[operator]
        if text.endswith("\ufffd") and end < len(ids) and end - done < 4:  # no character has more than 4 bytes
            texts.append("")
            continue
        before = decode(ids[context:done]) if done > context else ""  # type: ignore[operator]
        texts.append(text[len(before) :])
        context, done = done, end
    return texts
