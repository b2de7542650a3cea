"""Continuous batching, one forward pass at a time: read waiting prompts while slots are free, else decode one token.

Rows 0..n-1 of the cache are the running sequences; a sequence that ends gives its row to the last one. Members of a
group share a prompt: those that wait together are read once, and one that comes later copies the cache of a running
sibling, as long as the weights that read it are still the installed ones.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from actors.engines.forward import Forward
from actors.engines.sampling import SamplingPlan, draw, uniforms
from actors.engines.sequences import Sequence
from streamrl.errors import EngineError
from streamrl.messages import VersionRef


@dataclass(slots=True)
class _SharedPrompt:
    """A prompt that the installed weights have read, and the running sequences whose rows begin with it."""

    logits: Tensor  # [vocab], after its last token
    members: set[Sequence]


class Scheduler:
    """All state of the running batch. Belongs to one thread; `step` runs one forward pass."""

    def __init__(self, forward: Forward, slots: int, prefill_tokens: int) -> None:
        self.forward = forward
        self.slots = slots
        self.ref: VersionRef | None = None
        self.admitting = True  # False while an install waits for the running sequences to end
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.tokens_total = self.prefill_tokens_total = self.steps_total = self.nonfinite_total = 0
        self._prefill_tokens = prefill_tokens
        self._cached = np.zeros(slots, dtype=np.int64)  # tokens in the cache, per row
        self._last = np.zeros(slots, dtype=np.int64)  # the token that is sampled but not yet in the cache
        self._seeds = np.zeros(slots, dtype=np.uint64)
        self._plan: SamplingPlan | None = None  # None: the rows have changed since it was made
        self._shared: dict[tuple[int, ...], _SharedPrompt] = {}

    @property
    def can_admit(self) -> bool:
        return bool(self.waiting) and len(self.running) < self.slots and self.admitting and self.ref is not None

    @property
    def has_work(self) -> bool:
        return bool(self.running) or self.can_admit

    def step(self) -> None:
        """One forward pass: prompts first, because an empty slot is lost work."""
        if self.can_admit:
            self._admit()
        else:
            self._decode()
        self.steps_total += 1

    # --- admission ---------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Take waiting sequences in order, as many as there are slots and one forward pass should read."""
        fresh: dict[tuple[int, ...], int] = {}  # prompt -> its place in this pass
        joined: list[Sequence] = []
        longest = 0
        while self.waiting and len(self.running) + len(joined) < self.slots:
            prompt = self.waiting[0].prompt
            if prompt not in self._shared and prompt not in fresh:
                longest = max(longest, len(prompt))
                if fresh and longest * (len(fresh) + 1) > self._prefill_tokens:
                    break
                fresh[prompt] = len(fresh)
            joined.append(self.waiting.popleft())

        first_row = len(self.running)
        for row, sequence in enumerate(joined, first_row):
            self._seat(sequence, row)
        read = self._read_prompts(fresh, joined, first_row) if fresh else None
        logits = torch.stack([self._prompt_logits(sequence, fresh, read) for sequence in joined])
        for sequence in joined:
            self._shared.setdefault(sequence.prompt, _SharedPrompt(self._prompt_logits(sequence, fresh, read), set()))
            self._shared[sequence.prompt].members.add(sequence)
        plan = SamplingPlan([sequence.request.sampling for sequence in joined], self.forward.device)
        self._advance(logits, plan, first_row)

    def _seat(self, sequence: Sequence, row: int) -> None:
        """Give a row; copy the prompt's cache if a running sibling has it."""
        shared = self._shared.get(sequence.prompt)
        if shared is not None:
            sibling = self.running.index(next(iter(shared.members)))
            self.forward.cache.copy_row(sibling, row, len(sequence.prompt))
        self.running.append(sequence)
        sequence.mark(self.ref)
        self._cached[row] = len(sequence.prompt)
        self._seeds[row] = sequence.request.seed & 0xFFFF_FFFF_FFFF_FFFF

    def _read_prompts(self, fresh: dict[tuple[int, ...], int], joined: list[Sequence], first_row: int) -> Tensor:
        """Read each new prompt once, for all of its members."""
        pairs = [(row, fresh[s.prompt]) for row, s in enumerate(joined, first_row) if s.prompt in fresh]
        self.prefill_tokens_total += sum(map(len, fresh))
        return self.forward.read([list(prompt) for prompt in fresh], [p[0] for p in pairs], [p[1] for p in pairs])

    def _prompt_logits(self, sequence: Sequence, fresh: dict[tuple[int, ...], int], read: Tensor | None) -> Tensor:
        place = fresh.get(sequence.prompt)
        return self._shared[sequence.prompt].logits if place is None else read[place]

    # --- decoding ----------------------------------------------------------------------------------------------

    def _decode(self) -> None:
        n = len(self.running)
        if self._plan is None:
            self._plan = SamplingPlan([sequence.request.sampling for sequence in self.running], self.forward.device)
        positions = self._cached[:n]
        ids = torch.from_numpy(self._last[:n])
        logits = self.forward.decode(ids, torch.from_numpy(positions.copy()), int(positions.max()) + 1)
        self._cached[:n] += 1
        self._advance(logits, self._plan, 0)

    def _advance(self, logits: Tensor, plan: SamplingPlan, first_row: int) -> None:
        """Sample one token for rows first_row.. and let those go that have ended."""
        rows = slice(first_row, first_row + logits.shape[0])
        # The new token's place in the whole sequence: the next turn of the same episode draws other numbers.
        numbers = uniforms(self._seeds[rows], self._cached[rows].astype(np.uint64))
        tokens, logprobs = draw(logits, plan, numbers)
        self._last[rows] = tokens.cpu().numpy()
        token_list, logprob_list = self._last[rows].tolist(), logprobs.tolist()
        self.tokens_total += len(token_list)
        ended: list[tuple[int, str | None]] = []
        for row, token, logprob in zip(range(first_row, rows.stop), token_list, logprob_list, strict=True):
            if not math.isfinite(logprob):
                ended.append((row, None))
            elif (finish := self.running[row].add(token, logprob)) is not None:
                ended.append((row, finish))
        if first_row or ended:
            self._plan = None
        for row, finish in reversed(ended):
            self._release(row, finish)
        if any(finish is None for _, finish in ended):
            self.forward.cache.scrub(self._cached[: len(self.running)].tolist())

    def _release(self, row: int, finish: str | None) -> None:
        sequence = self._remove(row)
        if finish is not None:
            sequence.deliver(sequence.generation(finish))
            return
        self.nonfinite_total += 1
        sequence.deliver(
            EngineError(
                f"weights {self.ref} gave a log-prob that is not finite after {len(sequence.token_ids)} new tokens "
                f"on a prompt of {len(sequence.prompt)}; nothing was returned"
            )
        )

    def _remove(self, row: int) -> Sequence:
        """Take a sequence out; the last row moves into its place, so that rows stay compact."""
        sequence, last = self.running[row], len(self.running) - 1
        if row != last:
            self.forward.cache.copy_row(last, row, int(self._cached[last]))
            self.running[row] = self.running[last]
            for column in (self._cached, self._last, self._seeds):
                column[row] = column[last]
        self.running.pop()
        self._plan = None
        shared = self._shared.get(sequence.prompt)
        if shared is not None:
            shared.members.discard(sequence)
            if not shared.members:
                del self._shared[sequence.prompt]
        return sequence

    # --- from outside, between two steps -----------------------------------------------------------------------

    def abort(self, sequence: Sequence) -> None:
        """Forget a sequence, wherever it is; nothing is delivered."""
        if sequence in self.running:
            self._remove(self.running.index(sequence))
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def clear(self) -> None:
        """Forget every sequence, for the engine's end."""
        self.running.clear()
        self.waiting.clear()
        self._shared.clear()

    def new_version(self, ref: VersionRef, *, recompute: bool) -> None:
        """The weights have just changed; running sequences go on, on their old cache or on one read anew."""
        self.ref = ref
        self._shared.clear()
        for sequence in self.running:
            sequence.mark(ref)
        if recompute and self.running:
            self._reread()

    def _reread(self) -> None:
        order = sorted(range(len(self.running)), key=lambda row: self._cached[row])
        while order:
            rows = [order.pop()]
            longest = int(self._cached[rows[0]])
            while order and longest * (len(rows) + 1) <= self._prefill_tokens:
                rows.append(order.pop())
            texts = [[*self.running[row].prompt, *self.running[row].token_ids][: self._cached[row]] for row in rows]
            self.prefill_tokens_total += sum(map(len, texts))
            self.forward.read(texts, rows, list(range(len(rows))))
