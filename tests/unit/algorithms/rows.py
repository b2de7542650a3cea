"""Random rows with gaps, padding on both sides and an empty row; and what may be done to them without consequence."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

NUM_ROWS, WIDTH = 6, 9


@dataclass(frozen=True, eq=False)
class Rows:
    """One batch with everything that any function of the package reads; [B, T] unless said."""

    mask: Tensor
    behavior: Tensor
    policy: Tensor
    proximal: Tensor
    reference: Tensor
    rewards: Tensor
    values: Tensor
    old_values: Tensor
    targets: Tensor
    expected_q: Tensor
    advantages: Tensor
    losses: Tensor
    weights: Tensor
    gamma: Tensor
    log_ratios: Tensor
    lag_m2: Tensor
    token_probs: Tensor
    keep: Tensor
    versions: Tensor
    lags: Tensor
    segment_ids: Tensor
    bootstrap: Tensor  # [B]
    scores: Tensor  # [B]
    baselines: Tensor  # [B]
    group_ids: Tensor  # [B]

    def token_fields(self) -> list[str]:
        return [f.name for f in fields(self) if getattr(self, f.name).dim() == 2 and f.name != "mask"]

    def change(self, **tensors: Tensor) -> Rows:
        return replace(self, **tensors)

    def to(self, dtype: torch.dtype) -> Rows:
        floating = [f.name for f in fields(self) if getattr(self, f.name).is_floating_point()]
        return replace(self, **{name: getattr(self, name).to(dtype) for name in floating})

    def poisoned(self) -> Rows:
        """NaN, or an absurd integer, or the opposite flag, at every masked position of every tensor."""
        changed = {}
        for name in self.token_fields():
            tensor = getattr(self, name).clone()
            if tensor.dtype == torch.bool:
                tensor[~self.mask] = True
            else:
                tensor[~self.mask] = float("nan") if tensor.is_floating_point() else -987_654
            changed[name] = tensor
        return replace(self, **changed)

    def permuted(self, order: Tensor) -> Rows:
        return replace(self, **{f.name: getattr(self, f.name)[order] for f in fields(self)})

    def spread(self, seed: int, extra: int = 5) -> Rows:
        """The same action tokens among `extra` more masked columns, at random places of each row."""
        generator = torch.Generator().manual_seed(seed)
        num_rows, width = self.mask.shape
        places = torch.rand(num_rows, width + extra, generator=generator).argsort(1)[:, :width].sort(1).values
        changed = {}
        for name in ["mask", *self.token_fields()]:
            old = getattr(self, name)
            new = torch.zeros(num_rows, width + extra, dtype=old.dtype)
            changed[name] = new.scatter(1, places, old)
        return replace(self, **changed).poisoned()


def random_rows(seed: int, *, num_rows: int = NUM_ROWS, width: int = WIDTH, drift: float = 0.7) -> Rows:
    """float64 rows: row 0 is full, the last is empty, the others have gaps; row 1 has a single action token."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    shape = (num_rows, width)
    mask = torch.rand(shape, generator=generator) < 0.6
    mask[0] = True
    mask[1] = False
    mask[1, width // 2] = True
    mask[-1] = False
    behavior = -normal(*shape).abs() - 0.3
    versions = 10 + torch.randint(0, 5, shape, generator=generator).sort(1).values
    return Rows(
        mask=mask,
        behavior=behavior,
        policy=(behavior + drift * normal(*shape)).clamp(max=-1e-3),
        proximal=(behavior + drift / 2 * normal(*shape)).clamp(max=-1e-3),
        reference=(behavior + drift * normal(*shape)).clamp(max=-1e-3),
        rewards=normal(*shape),
        values=normal(*shape),
        old_values=normal(*shape),
        targets=normal(*shape),
        expected_q=normal(*shape),
        advantages=normal(*shape),
        losses=normal(*shape),
        weights=normal(*shape).abs(),
        gamma=0.8 + 0.2 * torch.rand(shape, generator=generator, dtype=torch.float64),
        log_ratios=drift * normal(*shape),
        lag_m2=normal(*shape).square() * 0.1,
        token_probs=torch.rand(shape, generator=generator, dtype=torch.float64),
        keep=torch.rand(shape, generator=generator) < 0.7,
        versions=versions,
        lags=15 - versions,
        segment_ids=torch.randint(0, 4, shape, generator=generator).sort(1).values,
        bootstrap=normal(num_rows),
        scores=normal(num_rows),
        baselines=normal(num_rows),
        group_ids=torch.tensor([7, 7, 3, 3, 7, 3])[:num_rows],
    )


def action_lists(rows: Rows, *names: str) -> list[list[list[float]]]:
    """For each row the named fields at its action tokens, in order, as plain lists."""
    out = []
    for i in range(rows.mask.shape[0]):
        out.append([getattr(rows, name)[i][rows.mask[i]].tolist() for name in names])
    return out


def on_rows(rows: Rows, per_row: list[list[float]]) -> Tensor:
    """The inverse: lists per row put back on the action tokens, 0 elsewhere."""
    out = torch.zeros(rows.mask.shape, dtype=torch.float64)
    for i, numbers in enumerate(per_row):
        out[i][rows.mask[i]] = torch.tensor(numbers, dtype=torch.float64)
    return out
