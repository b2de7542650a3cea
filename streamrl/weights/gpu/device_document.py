"""A version in the memory of a device: received bucket by bucket, verified there, read as tensors without a copy."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from streamrl.errors import WeightsError
from streamrl.messages import Layout, Manifest
from streamrl.weights.document import Document, check_digest
from streamrl.weights.gpu.fold128 import fold128
from streamrl.weights.manifest import (
    DIGEST_FOLD128,
    DTYPE_BYTES,
    bucket_ranges,
    check_manifest,
    document_nbytes,
    same_weights,
    tensor_nbytes,
    tensor_offsets,
)


class DeviceDocument:
    """The counterpart of `streamrl.weights.document.Document` on any device: a uint8 tensor, all buckets checked.

    Args:
        body: uint8 [document bytes]; owned by the document and by every tensor it gave out.
        manifest: what was announced, under whatever digest kind: its name here.
        device_manifest: the same version in digest_kind 1: what the bytes were checked against.
    Raises:
        WeightsError: manifests, layout and body do not belong together.
    """

    def __init__(self, body: torch.Tensor, manifest: Manifest, device_manifest: Manifest, layout: Layout) -> None:
        check_manifest(device_manifest, layout, DIGEST_FOLD128)
        # Two manifests name one version by different digests; nothing else ties them together.
        if (manifest.ref, manifest.layout_digest) != (device_manifest.ref, device_manifest.layout_digest):
            raise WeightsError(f"version {manifest.ref} was offered with the digests of {device_manifest.ref}")
        if body.numel() != document_nbytes(layout):
            raise WeightsError(
                f"version {manifest.ref} has {body.numel()} bytes, its layout holds {document_nbytes(layout)}"
            )
        self.manifest, self.layout, self._buffer = manifest, layout, body

    def renamed(self, manifest: Manifest) -> DeviceDocument:
        """The same bytes under another version. Raises WeightsError if they are not these bytes."""
        if not same_weights(self.manifest, manifest):
            raise WeightsError(f"version {manifest.ref} is not the verified document {self.manifest.ref}")
        renamed = copy.copy(self)
        renamed.manifest = manifest
        return renamed

    @property
    def nbytes(self) -> int:
        return self._buffer.numel()

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Checkpoint name to tensor, in wire dtype, as views of the document: read them, never write them."""
        found = {}
        for spec, offset in tensor_offsets(self.layout):
            raw = self._buffer[offset : offset + tensor_nbytes(spec)]
            if offset % DTYPE_BYTES[spec.dtype]:
                raw = raw.clone()  # a document of mixed dtypes may leave a tensor between two elements
            found[spec.name] = raw.view(getattr(torch, spec.dtype)).view(spec.shape)
        return found


def empty_document(nbytes: int, device: torch.device) -> torch.Tensor:
    """uint8 [nbytes] on the device. Raises torch.OutOfMemoryError, on the host too."""
    try:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    except RuntimeError as error:
        raise torch.OutOfMemoryError(f"{device} has no memory for a document of {nbytes} bytes") from error


def check_device_bucket(index: int, data: torch.Tensor, manifest: Manifest) -> None:
    """Raise WeightsError unless this uint8 tensor is bucket `index` of the manifest; waits for the device."""
    check_digest(index, fold128(data), manifest)


class HostBuckets:
    """The buckets of a verified document on the host.

    Args:
        bounce: pinned host memory of at least a bucket, through which a GPU is reached at full speed; one user at a
            time. None for a device that is the host.
    """

    def __init__(self, document: Document, bounce: torch.Tensor | None = None) -> None:
        self.layout, self._document, self._bounce = document.layout, document, bounce
        self._ranges: Sequence[tuple[int, int]] = bucket_ranges(document.layout)

    def fill(self, index: int, out: torch.Tensor) -> None:
        """Copy bucket `index` into `out`, uint8 of at least its size; complete when this returns."""
        start, end = self._ranges[index]
        host = out[: end - start] if self._bounce is None else self._bounce[: end - start]
        host.numpy()[:] = np.frombuffer(self._document.view(start, end), dtype=np.uint8)
        if self._bounce is not None:
            out[: end - start].copy_(host, non_blocking=True)
            torch.cuda.current_stream(out.device).synchronize()
