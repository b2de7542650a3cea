"""Publishing of a trained version, from the decision that it is due to its announcement.

    stage     all ranks: write the version while training waits, or copy it and write it in the background
    poll      rank 0, at any time: announce what has been written meanwhile
    settle    all ranks: wait until the last version is written; a version is settled before the next is staged

A version may bring a probe: fixed tokens, and how likely the weights that are published make them. The tokens are
ordinary text where the tokenizer knows it, because log-probs of text are what actors must get right; a tokenizer that
knows little of it (a toy's) gets tokens from all over its vocabulary instead.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

import msgspec
import torch
from tokenizers import Tokenizer
from torch import Tensor

from learner.data.layout import make_layout
from learner.hub_client.link import HubLink
from learner.model.policy import Policy
from learner.publish.publisher import PublishedVersion, Publisher
from learner.ranks.background import Background
from learner.ranks.clock import StepClock
from learner.ranks.mesh import Ranks
from streamrl.errors import WeightsError
from streamrl.messages import Base, Probe, VersionRef
from streamrl.messages.codec import pack_ids, pack_logprobs

log = logging.getLogger("streamrl.learner")


class Publishing:
    """One learner rank's part in the publication of a version.

    Args:
        background: where versions after the first are written; None writes each while training waits. Ranks that have
            to gather, or have no memory for a copy, wait too.
        base: what versions are adapters of, and the path of its document.
    """

    def __init__(
        self, publisher: Publisher, hub: HubLink, ranks: Ranks, *,
        background: Background[PublishedVersion | None] | None, base: tuple[Base, str] | None = None,
    ) -> None:
        self._publisher, self._hub, self._ranks, self._background = publisher, hub, ranks, background
        self._base = base
        self.assets_path = ""
        self.num_failed, self.nbytes = 0, 0
        self._staged = self._announced = False  # any version at all
        self._last: VersionRef | None = None  # staged and not settled
        self._succeeded = False  # and announced
        self._probe: Probe | None = None
        self.in_background = False  # how the version staged last is written; the same on all ranks
        self._running = False

    def stage(self, ref: VersionRef, probe: Probe | None) -> None:
        """Begin to publish the weights as they are now; a collective call.

        Raises WeightsError: the first version failed; a path that never worked is a broken set-up, not bad luck.
        """
        assert self._last is None, "settle the version before"
        self._last, self._probe, self._succeeded = ref, probe, False
        first, self._staged = not self._staged, True
        self.in_background = self._background is not None and not first and not self._publisher.gathers
        if self.in_background and self._start_in_background(ref):
            return
        try:
            self._announce(self._publisher.publish(ref))
        except WeightsError as error:
            self._failed(error)

    def _start_in_background(self, ref: VersionRef) -> bool:
        """False if there is no memory for a copy: versions are written while training waits from then on."""
        assert self._background is not None
        work = self._publisher.snapshot(ref)
        self.in_background = self._running = work is not None
        if work is not None:
            self._background.start(work)
            return True
        log.warning(
            "a GPU of the learner has no memory for a copy of the weights: versions are written while training waits. "
            "Lower learner.max_tokens_per_device, or raise launch.num_learner_ranks"
        )
        self.close()
        self._background = None
        return False

    def poll(self) -> None:
        """Announce a version that has just been written; never waits."""
        if self._running and self._background is not None and self._background.succeeded:
            self._take()

    def settle(self) -> VersionRef | None:
        """Wait for the version staged last; it, if actors can have it, on every rank. A collective call."""
        if self._last is None:
            return None
        if self._running:
            self._take()
        ref, self._last = self._last, None
        return ref if self._ranks.maximum(float(self._succeeded)) > 0.0 else None

    def close(self) -> None:
        if self._background is not None:
            self._background.close()

    def _take(self) -> None:
        assert self._background is not None
        self._running = False
        try:
            self._announce(self._background.take())
        except WeightsError as error:
            self._failed(error)

    def _announce(self, published: PublishedVersion | None) -> None:
        if published is None:
            return  # not rank 0
        first, self.nbytes = not self._announced, published.nbytes
        self._hub.publish(
            msgspec.structs.replace(published.manifest, probe=self._probe), str(published.path), published.nbytes,
            self._publisher.layout if first else None, self.assets_path if first else "", published.device_manifest,
            base=self._base if first else None,
        )
        self._announced = self._succeeded = True

    def _failed(self, error: WeightsError) -> None:
        if not self._announced:
            raise error
        log.error("version %s is skipped, actors keep the one before: %s", self._last and self._last.version, error)
        self.num_failed += 1


class PublishRule(Protocol):
    """Decides which versions are worth a publication."""

    def publish_due(self, version: int, *, asked_for: bool = False) -> bool: ...

    def published(self, version: int) -> None: ...


class Versions:
    """One learner rank's part in the publication of versions; every call is collective, but for `poll`.

    Args:
        wire_precision: the policy as actors have it, for a probe.
        staged: called with each version whose weights are published as they are at that moment.
    """

    def __init__(
        self, publishing: Publishing, rule: PublishRule, clock: StepClock, prober: Prober | None, *,
        learner_epoch: int, wire_precision: Callable[[], AbstractContextManager[None]], staged: Callable[[int], None],
    ) -> None:
        self.publishing, self._rule, self._clock, self._prober = publishing, rule, clock, prober
        self._learner_epoch, self._wire_precision, self._staged = learner_epoch, wire_precision, staged

    def publish_if_due(self, version: int, *, asked_for: bool) -> None:
        """Publish, unless actors have this version or do as well with the one they have.

        The version before is announced first, also where none is due: the ledger takes them in order.
        """
        with self._clock.timed("publish"):
            self.settle()
        if self._rule.publish_due(version, asked_for=asked_for):
            self.publish(version)

    def publish(self, version: int) -> None:
        """Make the current weights available to every actor under this version.

        It may return while they are being written: `settle` waits for that.
        """
        with self._clock.timed("publish"):
            self.settle()
            probe = None
            if self._prober is not None and self._prober.due(version):
                with self._wire_precision():
                    probe = self._prober.probe_if_due(version)
            self._staged(version)
            self.publishing.stage(VersionRef(self._learner_epoch, version), probe)
            if not self.publishing.in_background:
                self.settle()

    def settle(self) -> None:
        """Wait until the last version is written and announced."""
        if (ref := self.publishing.settle()) is not None:
            self._rule.published(ref.version)


# --- the probe -------------------------------------------------------------------------------------------------------

TEXT = (
    "A train leaves the station at 9:40 with 126 passengers. At the first stop 18 people get off and 25 get on; at the "
    "second stop half of them leave. How many passengers are on the train now? Let us think step by step."
)
NUM_TOKENS = 64
_FEWEST_DISTINCT = 12
_STRIDE = 0x9E3779B97F4A7C15


def probe_tokens(model_dir: Path, vocab_size: int, most: int) -> list[int]:
    """At most `most` token ids, at least 4; the same for the same model."""
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
        return logprobs
