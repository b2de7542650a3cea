"""A version's probe: fixed tokens, and how likely the weights that are published make them.

The tokens are ordinary text where the tokenizer knows it, because log-probs of text are what actors must get right; a
tokenizer that knows little of it (a toy's) gets tokens from all over its vocabulary instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from learner.checkpoint.shards import reshard
from learner.data.layout import make_layout
from learner.model.policy import Policy
from streamrl.messages import Probe
from streamrl.messages.codec import pack_ids, pack_logprobs

TEXT = (
    "A train leaves the station at 9:40 with 126 passengers. At the first stop 18 people get off and 25 get on; at the "
    "second stop half of them leave. How many passengers are on the train now? Let us think step by step."
)
NUM_TOKENS = 64
_FEWEST_DISTINCT = 12
_STRIDE = 0x9E3779B97F4A7C15


def probe_tokens(model_dir: Path, vocab_size: int, most: int) -> list[int]:
    """Return at most `most` token ids, at least 4; the same for the same model."""
    length = max(4, min(most, NUM_TOKENS))
    file = model_dir / "tokenizer.json"
    ids = Tokenizer.from_file(str(file)).encode(TEXT, add_special_tokens=False).ids[:length] if file.exists() else []
    if len(set(ids)) >= min(_FEWEST_DISTINCT, length) and max(ids) < vocab_size:
        return ids
    return [((place + 1) * _STRIDE >> 20) % vocab_size for place in range(length)]


class Prober:
    """Scores the fixed tokens with the policy, when a version is due.

    Args:
        token_ids: the first quarter is the prompt, the others are scored.
        every: versions between two probes, whether or not those in between are published; 0 never.
        tolerance: travels with the probe.
    """

    def __init__(
        self, policy: Policy, token_ids: Sequence[int], *, every: int, tolerance: float, device: torch.device | str
    ) -> None:
        self._policy, self._ids, self._every, self._tolerance = policy, list(token_ids), every, tolerance
        self._device = torch.device(device)
        self._start = max(1, len(self._ids) // 4)
        self._last: int | None = None

    def due(self, version: int) -> bool:
        return bool(self._every) and (self._last is None or version - self._last >= self._every)

    def probe_if_due(self, version: int) -> Probe | None:
        """A collective call on every rank, or on none: it depends on the version and on what was due before alone."""
        if not self.due(version):
            return None
        self._last = version
        logprobs = self._score().cpu().tolist()
        return Probe(pack_ids(self._ids), self._start, 1.0, pack_logprobs(logprobs), self._tolerance)

    @torch.no_grad()
    def _score(self) -> Tensor:
        ids = torch.tensor(self._ids, device=self._device)
        positions = torch.arange(len(self._ids) - 1, device=self._device)
        targets = ids[self._start :]
        logprobs, _ = self._policy(
            ids[:-1], positions, make_layout([len(positions)]).to(self._device),
            positions[self._start - 1 :],  # the hidden state before a token predicts it
            targets, torch.ones(len(targets), device=self._device),
        )
        reshard(self._policy)  # no backward pass will free the gathered root
        return logprobs
