"""The learner's side of weight transfer: gather, cast, digest, commit.

One uninterrupted block between the optimizer step and the next forward. All ranks walk the tensors in layout order and
gather them one at a time; rank 0 copies each into the document that is being written, and every rank frees it at once.
A rank that left the block early would leave the others in an all-gather, so a failure on rank 0 (no room, a newer
learner) is remembered until the last gather is done, and rank 0 waits for no other process meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path

import torch
from torch.nn import Module, Parameter

from streamrl.errors import WeightsError
from streamrl.messages import Layout, Manifest, VersionRef
from streamrl.weights.document import PIECE_BYTES
from streamrl.weights.gpu.fold128 import DocumentFold
from streamrl.weights.manifest import DIGEST_FOLD128, document_nbytes, make_layout, make_manifest
from streamrl.weights.shm.transport import ShmPublisher
from streamrl.weights.shm.writer import DocumentWriter

_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.", "_fsdp_wrapped_module.")


@dataclass(frozen=True, slots=True)
class PublishedVersion:
    """A staged version: what to announce, where it lies, its size, and how long the block took."""

    manifest: Manifest
    path: Path
    nbytes: int
    seconds: float
    device_manifest: Manifest | None  # the same document in digest_kind 1, if the publisher makes one


def policy_parameters(model: Module) -> list[tuple[str, Parameter]]:
    """(checkpoint name, parameter) in module order; of tied copies only the first, wrappers' prefixes removed."""
    return [
        (reduce(lambda left, wrapper: left.replace(wrapper, ""), _WRAPPERS, name), parameter)
        for name, parameter in model.named_parameters()
    ]


class Publisher:
    """Turns the policy's parameters into published documents; every rank has one, rank 0 writes.

    Args:
        parameters: (checkpoint name, parameter), the same on all ranks; see `policy_parameters`. A parameter that
            appears twice is tied: its first name travels. One with a method `full_tensor` (a DTensor, or a quantized
            weight) is made whole by it.
        wire_dtype: dtype of every tensor in the document.
        bucket_bytes: size of the units that are digested and moved.
        shm: owner of the documents' directory; rank 0 alone has it.
        fence: called right before the document becomes visible; raises if this learner no longer owns the run.
        slot_wait_s: longest that rank 0 waits for room, which is local work on this machine; then the version is
            skipped. The other ranks are in their first gather meanwhile, so it must be far below their time-out.
        fold: also digest every tensor where it lies, for transports from GPU to GPU (digest_kind 1).
        for_good: what is published stays available until the learner ends.
    """

    def __init__(
        self, parameters: Sequence[tuple[str, torch.Tensor]], *, wire_dtype: torch.dtype, bucket_bytes: int,
        shm: ShmPublisher | None, rank: int = 0, fence: Callable[[], None] | None = None,
        slot_wait_s: float = 15.0, fold: bool = False, for_good: bool = False,
    ) -> None:
        if rank == 0 and shm is None:
            raise WeightsError("rank 0 writes the documents: give it a ShmPublisher")
        first_names: dict[int, tuple[str, torch.Tensor]] = {}
        for name, parameter in parameters:
            first_names.setdefault(id(parameter), (name, parameter))
        self._parameters = list(first_names.values())
        self._wire_dtype, self._rank, self._shm = wire_dtype, rank, shm
        self._fence, self._fold = fence or (lambda: None), fold
        self._slot_wait_s, self._for_good = slot_wait_s, for_good
        self._last_tried: VersionRef | None = None
        self._last_staged: VersionRef | None = None
        dtype = str(wire_dtype).removeprefix("torch.")
        self.layout: Layout = make_layout(((name, dtype, p.shape) for name, p in self._parameters), bucket_bytes)

    def publish(self, ref: VersionRef) -> PublishedVersion | None:
        """Stage the current parameters under `ref`; a collective call. The result on rank 0, None elsewhere.

        Raises WeightsError: `ref` is not higher than the last one (on every rank, before anything is gathered); or, on
        rank 0 after the last gather, no room. Whatever `fence` raises. Nothing is visible then.
        """
        if self._last_tried is not None and ref <= self._last_tried:
            raise WeightsError(f"version {ref} is not higher than {self._last_tried}, the last one published")
        started = time.monotonic()
        self._last_tried = ref
        draft = None
        if self._shm is not None and self._rank == 0:
            fold = DocumentFold(self.layout, self._parameters[0][1].device) if self._fold else None
            begin = partial(self._shm.begin, wait_s=self._slot_wait_s, for_good=self._for_good)
            draft = _Draft(begin, ref, self.layout, fold)
        with torch.no_grad():
            for _, parameter in self._parameters:
                self._gather_one(parameter, draft)
        if draft is None:
            return None
        manifest, path = draft.finish(self._last_staged, self._fence)
        device_manifest = draft.device_manifest(self._last_staged)
        self._last_staged = ref
        seconds = time.monotonic() - started
        return PublishedVersion(manifest, path, document_nbytes(self.layout), seconds, device_manifest)

    def _gather_one(self, parameter: torch.Tensor, draft: _Draft | None) -> None:
        """Its own function, so that the gathered tensor is freed before the next one is gathered."""
        whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        if draft is not None:
            draft.append(whole, self._wire_dtype)


class _Draft:
    """The document of one publish; the first failure is kept for `finish`, and later tensors are passed over."""

    def __init__(
        self, begin: Callable[..., DocumentWriter], ref: VersionRef, layout: Layout, fold: DocumentFold | None
    ) -> None:
        self._ref, self._layout, self._fold = ref, layout, fold
        self._failure: Exception | None = None
        self._writer: DocumentWriter | None = None
        try:
            self._writer = begin(ref, layout)
        except Exception as error:  # whatever it is: the other ranks are entering the first gather
            self._failure = error

    def append(self, tensor: torch.Tensor, wire_dtype: torch.dtype) -> None:
        if self._writer is None or self._failure is not None:
            return
        try:
            if self._fold is not None:
                tensor = tensor.detach().to(wire_dtype).reshape(-1)
                self._fold.append(tensor.view(torch.uint8))
            _write(tensor, wire_dtype, self._writer)
        except Exception as error:
            self._failure = error

    def device_manifest(self, parent: VersionRef | None) -> Manifest | None:
        """Of a finished document."""
        if self._fold is None:
            return None
        return make_manifest(self._layout, self._ref, parent, self._fold.digests(), DIGEST_FOLD128)

    def finish(self, parent: VersionRef | None, fence: Callable[[], None]) -> tuple[Manifest, Path]:
        try:
            if self._failure is not None:
                raise WeightsError(
                    f"version {self._ref} was not published, actors keep the one before: {self._failure}"
                ) from self._failure
            assert self._writer is not None
            manifest = make_manifest(self._layout, self._ref, parent, self._writer.digests())
            fence()
            return manifest, self._writer.commit()
        finally:
            if self._writer is not None:
                self._writer.abort()


def _write(tensor: torch.Tensor, wire_dtype: torch.dtype, writer: DocumentWriter) -> None:
    """Cast and copy straight into the document; on the CPU in pieces that are digested while still in the cache."""
    flat = tensor.detach().reshape(-1)
    step = PIECE_BYTES // wire_dtype.itemsize if flat.device.type == "cpu" else max(1, flat.numel())
    for start in range(0, flat.numel(), step):
        piece = flat[start : start + step]
        nbytes = piece.numel() * wire_dtype.itemsize
        torch.frombuffer(writer.room(nbytes), dtype=wire_dtype).copy_(piece)
        writer.filled(nbytes)
