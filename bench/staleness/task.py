"""Mirror addition: for a prompt of L digits x, answer y_i = (x_i + x_{L+1-i}) mod 10, digit by digit.

The score of an answer is its share of right digits, paid once at the end; a random answer scores 0.1. Prompts and
sampling noise come from the seed alone: members with the same seed see the same prompts and the same luck, whatever
their lag or their loss.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bench.staleness.policy import NUM_DIGITS


@dataclass(frozen=True, slots=True)
class Task:
    """Batch sizes of the experiment: a step trains on `num_prompts` groups of `group_size` answers."""

    num_tokens: int = 6
    num_prompts: int = 16
    group_size: int = 4
    num_eval_prompts: int = 256

    @property
    def num_rows(self) -> int:
        return self.num_prompts * self.group_size

    def group_ids(self) -> Tensor:
        """Index of the prompt that a row answers, int64 [R]."""
        return torch.arange(self.num_prompts).repeat_interleave(self.group_size)


def scores(prompts: Tensor, tokens: Tensor) -> Tensor:
    """Share of right digits of each row, [...]; both arguments [..., L]."""
    return (tokens == (prompts + prompts.flip(-1)) % NUM_DIGITS).float().mean(-1)


class Luck:
    """All randomness of the members: one generator per seed, drawn in a fixed order.

    Args:
        seeds: of each member; equal seeds share every draw.
    """

    def __init__(self, task: Task, seeds: list[int]) -> None:
        self._task = task
        self._unique = sorted(set(seeds))
        self._of_member = torch.tensor([self._unique.index(seed) for seed in seeds])
        self._train = {seed: torch.Generator().manual_seed(2 * seed + 1) for seed in self._unique}
        self._eval = {seed: torch.Generator().manual_seed(2 * seed) for seed in self._unique}

    def training(self) -> tuple[Tensor, Tensor]:
        """Prompts [E, R, L], each repeated for its group, and Gumbel noise [E, R, L, A] of the next batch."""
        task = self._task
        drawn = [self._draw(self._train[seed], task.num_prompts, task.group_size) for seed in self._unique]
        return self._for_members(drawn)

    def evaluation(self) -> tuple[Tensor, Tensor]:
        """Fresh prompts [E, V, L] and noise [E, V, L, A], from a stream of their own."""
        drawn = [self._draw(self._eval[seed], self._task.num_eval_prompts, 1) for seed in self._unique]
        return self._for_members(drawn)

    def _draw(self, generator: torch.Generator, num_prompts: int, group_size: int) -> tuple[Tensor, Tensor]:
        length = self._task.num_tokens
        prompts = torch.randint(NUM_DIGITS, (num_prompts, length), generator=generator).repeat_interleave(group_size, 0)
        exponential = torch.empty(*prompts.shape, NUM_DIGITS).exponential_(generator=generator)
        return prompts, -exponential.log()

    def _for_members(self, drawn: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        prompts, noise = (torch.stack(column) for column in zip(*drawn, strict=True))
        return prompts[self._of_member], noise[self._of_member]
