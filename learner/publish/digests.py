"""Digests of the weights as they would be published, without anybody to publish them to."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from learner.publish.publisher import Publisher
from learner.ranks.mesh import Ranks
from streamrl.messages import Manifest, VersionRef
from streamrl.weights.manifest import layout_digest
from streamrl.weights.shm.transport import ShmPublisher

_ANY_EPOCH = 1


class WeightDigests:
    """Digests a model again and again; every call is collective, and the answer is that of rank 0 on all of them.

    Args:
        parameters, wire_dtype, bucket_bytes: as the run published them.
    """

    def __init__(
        self, parameters: Sequence[tuple[str, Any]], ranks: Ranks, *, wire_dtype: torch.dtype, bucket_bytes: int
    ) -> None:
        self._ranks, self._kept = ranks, ExitStack()
        shm = None
        if ranks.rank == 0:
            folder = self._kept.enter_context(tempfile.TemporaryDirectory(prefix="streamrl-digests-"))
            shm = ShmPublisher(Path(folder) / "documents", "digests", 1)
            self._kept.callback(shm.close)
        self._publisher = Publisher(parameters, wire_dtype=wire_dtype, bucket_bytes=bucket_bytes, shm=shm, ranks=ranks)
        self._num = 0

    def difference(self, version: int, expected: Manifest | None) -> str:
        """How the weights differ from a published version, in words; "" if they are equal.

        Args:
            expected: on rank 0.
        """
        self._num += 1
        made = self._publisher.publish(VersionRef(_ANY_EPOCH, self._num))
        text = ""
        if made is not None and expected is not None:
            text = _difference(version, self._publisher, made.manifest.digests, expected)
        return self._ranks.bytes_from_rank_zero(text.encode()).decode()

    def close(self) -> None:
        self._kept.close()


def _difference(version: int, publisher: Publisher, digests: Sequence[bytes], expected: Manifest) -> str:
    if layout_digest(publisher.layout) != expected.layout_digest:
        return f"version {version} has tensors of other names, shapes or types, or buckets of another size"
    other = [place for place, pair in enumerate(zip(digests, expected.digests, strict=True)) if pair[0] != pair[1]]
    if not other:
        return ""
    return f"version {version} differs in {len(other)} of {len(digests)} buckets, the first is bucket {other[0]}"
