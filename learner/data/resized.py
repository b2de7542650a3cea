"""Micro-batches of another size: passes without gradient, and the halves of one that did not fit into memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from learner.data.packing import MicroBatch, equalize, pack
from learner.data.trajectories import Trajectory
from learner.ranks.mesh import Ranks
from streamrl.errors import ConfigError

Outputs = TypeVar("Outputs")
"""A dataclass of tensors [S, A] and [S], or None, of a micro-batch."""


def packed_passes(
    rows: Sequence[Trajectory],
    max_tokens: int | None,
    ranks: Ranks,
    *,
    places: Iterable[int],
    bootstrap: bool,
    share: bool,
) -> list[MicroBatch] | None:
    """The trajectories in passes of this budget, as many on every rank; a collective call, unless there is none."""
    if max_tokens is None:
        return None
    packed = pack(
        rows, max_tokens, places=places,
        bootstrap=bootstrap, share=share,
    )
    return equalize(packed, ranks)


def dealt(
    micro_batches: Sequence[MicroBatch], observed: Sequence[tuple[MicroBatch, Outputs]], device: torch.device
) -> list[tuple[MicroBatch, Outputs]]:
    """The outputs of passes of another size, for each trajectory in the micro-batch that it is trained in."""
    rows = {place: (outputs, row) for batch, outputs in observed for row, place in enumerate(batch.trajectory_ids)}
    found, of = [], type(observed[0][1])
    for micro in micro_batches:
        counts, values = micro.mask.sum(1).tolist(), dict[str, Tensor]()
        for name in (one.name for one in fields(of)):
            seen = [(getattr(outputs, name), row) for outputs, row in (rows[place] for place in micro.trajectory_ids)]
            if not seen or seen[0][0] is None:
                continue
            parts = [tensor[row] for tensor, row in seen]
            if not parts[0].dim():  # one value of each trajectory
                values[name] = torch.stack(parts)
                continue
            cut = [part[:count] for part, count in zip(parts, counts, strict=True)]
            values[name] = pad_sequence(cut, batch_first=True)
        found.append((micro.to(device), of(**values)))
    return found


def halves(whole: MicroBatch, trajectories: Sequence[Trajectory], *, bootstrap: bool, share: bool) -> list[MicroBatch]:
    """The trajectories of a micro-batch in two; `trajectories`, `bootstrap` and `share` are those of its `pack`."""
    places, middle = whole.trajectory_ids, len(whole.trajectory_ids) // 2
    budget = sum(trajectories[place].num_tokens for place in places)
    return [
        replace(part, has_gradient=whole.has_gradient) for chosen in (places[:middle], places[middle:])
        for part in pack(trajectories, budget, bootstrap=bootstrap, places=chosen, share=share)
    ]


REMEDY = "lower learner.max_tokens_per_device, or set policy.gradient_checkpointing=true"


def check_split(whole: MicroBatch, cause: str, ranks: Ranks, *, possible: bool) -> None:
    """Raise ConfigError where a micro-batch that did not fit into memory cannot be split."""
    if ranks.mesh.world > 1 or not possible:  # other ranks are inside collectives of the pass that failed here
        raise ConfigError(
            f"a micro-batch of {whole.num_tokens} tokens did not fit into the memory of learner rank {ranks.rank}; "
            f"with several ranks, or FSDP2 of torch before 2.13, none is split: {REMEDY}. torch: {cause}"
        )
    if len(whole.trajectory_ids) < 2:
        raise ConfigError(
            f"a trajectory of {whole.num_tokens} tokens does not fit into memory by itself: set "
            "policy.gradient_checkpointing=true, lower learner.logprob_chunk_tokens or the limits of its length "
            "(rollout.max_prompt_tokens, rollout.train.sampling.max_new_tokens), or take more ranks with "
            f"learner.mesh.context. torch: {cause}"
        )
