"""streamrl blame RUN A..B: the groups, prompts, ages and actors that moved the weights from version A to version B.

The gradient of a batch is the sum of those of its groups: the loss is normalized once for the whole batch. A group's
share is the length of its own gradient along its batch's, divided by the lengths of the gradients of all batches: the
shares add up to 1, and a group that the others outweigh has a negative one. All of it is taken at the weights before
each batch, before the gradient is clipped and before the optimizer scales it.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor

from learner.data.packing import MicroBatch, pack
from learner.objective.plan import BatchPlan
from learner.objective.scoring_pass import score_batch
from learner.objective.statistics import StepStatistics
from learner.replay.opened import OpenedRun, open_run
from learner.trainer import Trainer, forward_backward
from streamrl.commands import parsed, parser_of, say, status_of
from streamrl.errors import ControlError
from streamrl.messages.printable import printable
from streamrl.run_dirs import find_run_dir
from streamrl.stream.export import Text, last_line, run_text


@dataclass(frozen=True, slots=True)
class Blamed:
    """The part of one group in a batch's gradient.

    Attributes:
        version: that its batch was trained at.
        age: the lag of its oldest token.
        norm: of its gradient.
        cosine: of its gradient to its batch's.
        along: the length of its gradient along its batch's.
        asked: the last line of its prompt, "" without a tokenizer.
    """

    group_id: int
    version: int
    prompt: int
    actor: str
    age: int
    reward: float
    norm: float
    cosine: float
    asked: str = ""

    @property
    def along(self) -> float:
        return self.norm * self.cosine


def main() -> int:
    parser = parser_of(
        "blame", "Rank groups, prompts, ages and actors by their share of the gradients between two versions of a run.",
        find=find_run_dir,
        epilog="Then: streamrl stream RUN --kind group --text prints what they said, and streamrl replay RUN --without "
        "GROUP trains without a group.",
    )
    parser.add_argument("versions", metavar="A..B", help="the batches that led from version A to version B")
    parser.add_argument("--top", type=int, default=10, metavar="N", help="lines of each table (default: 10)")
    given = parsed(parser)
    between = re.fullmatch(r"(\d+)\.\.(\d+)", given.versions)
    if between is None or int(between[1]) >= int(between[2]):
        parser.error(f"{given.versions}: expected two versions, the smaller one first, as 137..141")
    first, last = int(between[1]), int(between[2])
    found = blame(given.run, first, last, given.words, partial(say, error=True))
    say("\n".join(tables(found, given.top)))
    return 0


def blame(
    run_dir: Path, first: int, last: int, words: Sequence[str] = (), notify: Callable[[str], None] = lambda text: None
) -> list[Blamed]:
    """Every group of the batches between two versions, the largest share first. Raises ControlError, LogError."""
    run = open_run(run_dir, words, at_most=first)
    known = [one.cut.version for one in run.batches()]
    if not [version for version in known if first <= version < last]:
        raise ControlError(
            f"{run_dir} trained no batch between versions {first} and {last}: its batches are for versions "
            f"{min(known, default=0)} to {max(known, default=0)}, choose from those"
        )
    for one in run.train(upto=first, compare=False):
        notify(f"  trained up to version {one.version}")
    found: list[Blamed] = []
    text = run_text(run_dir, special=False)
    for one in run.train(
        upto=last, compare=False, on_planned=lambda plan, _: found.extend(_of_batch(run, plan, text))
    ):
        notify(f"  the gradients of {len(found)} groups, up to version {one.version}")
    return sorted(found, key=lambda one: -one.along)


def _of_batch(run: OpenedRun, plan: BatchPlan, text: Text | None) -> Iterator[Blamed]:
    """The groups of a batch that is about to be trained; the trainer is left as it was."""
    trainer, networks = run.trainer, run.trainer.networks
    places: dict[int, list[int]] = defaultdict(list)
    for place in plan.places:
        places[plan.rows[place].group_id].append(place)
    passes = {
        group: pack(
            plan.rows, trainer.settings.max_tokens, places=mine, bootstrap=trainer.objective.bootstraps,
            share=networks.shares_prompts,
        )
        for group, mine in places.items()
    }
    everything = [one for mine in passes.values() for one in mine]
    with trainer.with_wire_precision():
        scored = score_batch(
            networks.policy, everything, plan, run.ranks, critic=networks.critic, frozen=networks.frozen,
        )
        whole = _gradient(trainer, scored, everything)
        length = _dot(whole, whole) ** 0.5
        for row in dict.fromkeys(one.group_id for one in plan.rows):
            mine = _gradient(trainer, scored, passes[row]) if row in passes else []
            yield _blamed(plan, row, _dot(mine, mine) ** 0.5, _dot(mine, whole) if mine else 0.0, length, text)


def _gradient(trainer: Trainer, plan: BatchPlan, passes: Sequence[MicroBatch]) -> list[Tensor]:
    """The gradient of the batch's loss that comes of some of its trajectories, as each parameter has it."""
    policy = trainer.networks.policy
    statistics = StepStatistics(plan, trainer.ranks)
    parameters = [one for one in policy.parameters() if one.requires_grad]
    for micro_batch in passes:
        forward_backward(policy, micro_batch, plan, statistics, trainer.ranks)
    found = [torch.zeros_like(one) if one.grad is None else one.grad for one in parameters]
    for one in parameters:
        one.grad = None
    return found


def _dot(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    return sum(float((a.double() * b.double()).sum()) for a, b in zip(one, other, strict=False))


def _blamed(plan: BatchPlan, group: int, norm: float, dot: float, length: float, text: Text | None) -> Blamed:
    rows = [one for one in plan.recorded if one.group_id == group]
    ages = [plan.version - int(one.versions[one.mask].min()) for one in rows if one.mask.any()]
    cosine = dot / (norm * length) if norm and length else 0.0
    return Blamed(
        group, plan.version, rows[0].prompt_index, rows[0].actor_id, max(ages, default=0),
        fmean(one.reward for one in rows), norm, cosine,
        last_line(text(rows[0].prompt_ids.tolist())) if text is not None else "",
    )


def tables(found: Sequence[Blamed], top: int) -> list[str]:
    """The ranked tables, line by line."""
    total = sum(one.along for one in found) or 1.0
    lines = [
        f"{len(found)} groups, the gradients' lengths add up to {total:.4g}; a share is what lies along its batch's",
        "   share      norm  cosine    group at version  age   reward  prompt, actor, the prompt's last line",
    ]
    lines += [
        f"{one.along / total:8.1%} {one.norm:9.3g} {one.cosine:7.2f} {one.group_id:8d} {one.version:10d} {one.age:4d} "
        f"{one.reward:8.3g}  {one.prompt}, {one.actor}, {printable(one.asked)}" for one in found[:top]
    ]
    keys: dict[str, Callable[[Blamed], object]] = {
        "prompt": lambda one: one.prompt, "age": lambda one: one.age, "actor": lambda one: one.actor,
        "batch at version": lambda one: one.version,
    }
    for name, key in keys.items():
        sums: dict[object, list[float]] = defaultdict(list)
        for one in found:
            sums[key(one)].append(one.along / total)
        ranked = sorted(sums.items(), key=lambda item: -sum(item[1]))
        lines += ["", f"by {name}"]
        lines += [f"{sum(shares):8.1%}  {value}  ({len(shares)} groups)" for value, shares in ranked[:top]]
    return lines


if __name__ == "__main__":
    sys.exit(status_of(main))
