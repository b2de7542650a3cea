"""Weight probe: compares the serving engine with its document, after an install and from time to time.

Digests prove that the right bytes arrived, not that the engine uses them: a name may not be loaded, a fused tensor be
in the wrong order, a bit flip in memory. Two checks, each where the engine allows it:

    tensors    every live tensor equals the document's, bit for bit in the engine's own type; names the bucket
    log-probs  the learner's fixed tokens are as likely here as there
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Mapping
from typing import Any

import torch

from actors.engines.base import Engine, ExposesWeights, ScoresTokens, TakesAdapters
from actors.weights.base_weights import HeldBase
from streamrl.messages import Probe, Probed
from streamrl.messages.codec import unpack_ids, unpack_logprobs
from streamrl.weights.document import Document
from streamrl.weights.gpu.pinned import Upload
from streamrl.weights.manifest import bucket_ranges, tensor_offsets

log = logging.getLogger(__name__)

_MOST_CHARS = 2000


async def probe_engine(engine: Engine, document: Document, base: HeldBase | None = None) -> Probed | None:
    """Compare the engine with its document (and the base of that), and with the learner's probe if there is one.

    Of an engine that got base and adapter merged, or that rounds its weights, only log-probs can be compared.
    Nothing may be installed meanwhile; sequences may run. None if there is nothing to compare by: no probe in the
    manifest or no `score`, and no `live_tensors`. Raises EngineError if the engine fails to score.
    """
    began, failures, differences = time.monotonic(), [], None
    probe = document.manifest.probe
    exposed = isinstance(engine, ExposesWeights) and (base is None or isinstance(engine, TakesAdapters))
    exposed = exposed and not getattr(engine, "rounds_weights", False)
    for one in (document, *([base.document] if base is not None else [])) if exposed else ():
        wrong = await asyncio.to_thread(first_difference, engine.live_tensors(), one)
        failures += [wrong] if wrong else []
    if isinstance(engine, ScoresTokens) and probe is not None:
        ids = unpack_ids(probe.token_ids).tolist()
        scored = await engine.score(ids, start=probe.start, temperature=probe.temperature)
        differences = compare(scored, probe)
        if not differences[0] <= probe.tolerance:
            failures.append(
                f"log-probs of the probe differ from the learner's by {differences[0]:.3g} nats in the mean, "
                f"publish.probe_tolerance is {probe.tolerance:g}"
            )
    elif not exposed:
        return None
    mean, largest = differences or (None, None)
    return Probed(mean, largest, "; ".join(failures)[:_MOST_CHARS], time.monotonic() - began)


def compare(scored: list[float], probe: Probe) -> tuple[float, float]:
    """Mean and largest absolute difference, in nats; infinite where a number is missing or not finite."""
    expected = unpack_logprobs(probe.logprobs).tolist()
    if len(scored) != len(expected) or not expected:
        return math.inf, math.inf
    differences = [abs(here - there) for here, there in zip(scored, expected, strict=True)]
    if not all(map(math.isfinite, differences)):
        return math.inf, math.inf
    return sum(differences) / len(differences), max(differences)


def first_difference(live: Mapping[str, Any], document: Document) -> str | None:
    """The first tensor that is not the document's, with its bucket; None if all are equal, bit for bit."""
    expected = document.tensors()
    for spec, offset in tensor_offsets(document.layout):
        if spec.name not in live:
            return f"the engine has no tensor {spec.name}"
        here = live[spec.name].detach()
        there = expected[spec.name].to(here.dtype)
        if here.shape != there.shape:
            return f"{spec.name} has shape {list(here.shape)}, the document {list(there.shape)}"
        index = _first_index(here, _beside(here, there))
        if index is None:
            continue
        place = offset + index * expected[spec.name].element_size()
        ranges = bucket_ranges(document.layout)
        bucket = f"{next(i for i, (start, end) in enumerate(ranges) if start <= place < end)} of {len(ranges)}"
        return f"bucket {bucket} does not match the published weights: {spec.name} differs from element {index} on"
    return None


def _beside(here: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
    """`there` on the device of `here`; a GPU goes on computing meanwhile."""
    if there.device == here.device:
        return there
    upload, target = Upload(here.device), torch.empty_like(there, device=here.device)
    upload.copy(there, target)
    upload.finish()
    return target


def _first_index(here: torch.Tensor, there: torch.Tensor) -> int | None:
    """Index of the first element whose bits differ; bits, because NaN is not equal to itself."""
    ours, theirs = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (here, there))
    if torch.equal(ours, theirs):
        return None
    return int((ours != theirs).nonzero()[0]) // here.element_size()
