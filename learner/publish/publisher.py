"""The learner's side of weight transfer: cast, write, digest, commit.

    rows     every rank casts the rows that it holds and writes them into the one file, which all of them see: nothing
             is gathered. Then each digests its part of the buckets, and rank 0 commits.
    gather   ranks on other hosts do not see it. All ranks walk the tensors in layout order and gather them one at a
             time, in the document's type; rank 0 writes.
    buckets  a lone rank has nothing to gather: its threads write and digest a bucket each (`buckets`).

A rank that left in the middle would leave the others in a collective, so a failure (no room, a newer learner) is
remembered until the last collective is done, and rank 0 waits for no other process meanwhile.
"""

from __future__ import annotations

import logging
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from learner.checkpoint.shards import local_box
from learner.model.adapter.lora import base_tensors, scale_of
from learner.model.policy import Policy, travels_as
from learner.publish.buckets import BucketWriter, filled
from learner.ranks.mesh import Ranks, local_part
from streamrl.config.schema import LoraConfig
from streamrl.errors import WeightsError
from streamrl.messages import Base, Layout, Manifest, VersionRef
from streamrl.weights.adapter import BASE_REF
from streamrl.weights.document import HEADER_BYTES, PROBE_BYTES, digest_all, unpack_header
from streamrl.weights.gpu.device_document import DocumentFold
from streamrl.weights.gpu.pinned import Download
from streamrl.weights.manifest import (
    DIGEST_FOLD128,
    bucket_ranges,
    document_nbytes,
    layout_digest,
    make_layout,
    make_manifest,
    tensor_nbytes,
    tensor_offsets,
)
from streamrl.weights.shm.transport import DocumentWriter, ShmPublisher

log = logging.getLogger("streamrl.learner")


@dataclass(frozen=True, slots=True)
class PublishedVersion:
    """A staged version: what to announce, where it lies, its size, and how long the block took."""

    manifest: Manifest
    path: Path
    nbytes: int
    seconds: float
    device_manifest: Manifest | None  # the same document in digest_kind 1, if the publisher makes one


class Publisher:
    """Turns the policy's tensors into published documents; every rank has one, rank 0 commits.

    Args:
        tensors: (checkpoint name, tensor), the same on all ranks; see `policy_tensors`. A tensor that appears twice is
            tied: its first name travels. One with a method `full_tensor` (a DTensor, or a quantized weight) is made
            whole by it.
        wire_dtype: dtype of every weight in the document; buffers travel in their own (`travels_as`). Wide elements
            come first, so that no tensor lies between two of its elements.
        bucket_bytes: size of the units that are digested and moved.
        shm: owner of the documents' directory; rank 0 alone has it.
        fence: called right before the document becomes visible; raises if this learner no longer owns the run.
        slot_wait_s: longest that rank 0 waits for room, which is local work on this machine; then the version is
            skipped. The other ranks are in a collective meanwhile, so it must be far below their time-out.
        fold: also digest every tensor where it lies, for transports from GPU to GPU (digest_kind 1).
        for_good: what is published stays available until the learner ends.
    """

    def __init__(
        self, tensors: Sequence[tuple[str, Any]], *, wire_dtype: torch.dtype, bucket_bytes: int,
        shm: ShmPublisher | None, ranks: Ranks | None = None, fence: Callable[[], None] | None = None,
        slot_wait_s: float = 15.0, fold: bool = False, for_good: bool = False,
    ) -> None:
        self._ranks = ranks or Ranks()
        if self._ranks.rank == 0 and shm is None:
            raise WeightsError("rank 0 writes the documents: give it a ShmPublisher")
        first_names: dict[int, tuple[str, Any]] = {}
        for name, tensor in tensors:
            first_names.setdefault(id(tensor), (name, tensor))
        self._tensors = sorted(first_names.values(), key=lambda named: -travels_as(named[1], wire_dtype).itemsize)
        self._dtypes = [travels_as(tensor, wire_dtype) for _, tensor in self._tensors]
        self._shm = shm
        self._fence, self._fold = fence or (lambda: None), fold
        self._slot_wait_s, self._for_good = slot_wait_s, for_good
        self._last_tried: VersionRef | None = None
        self._tried_before: VersionRef | None = None
        self._last_staged: VersionRef | None = None
        self.layout: Layout = make_layout((
            (name, str(dtype).removeprefix("torch."), tensor.shape)
            for (name, tensor), dtype in zip(self._tensors, self._dtypes, strict=True)
        ), bucket_bytes)
        devices = (one.device for _, one in self._tensors if isinstance(one, torch.Tensor))
        self._device = next(devices, self._ranks.device)
        self._download = Download(self._device)
        self._buckets = BucketWriter(self.layout, self._dtypes, self._device)
        self._by_rows = self._ranks.mesh.world > 1 and sharded_by_rows(self._tensors)
        self.num_bytes_written = 0
        """By this rank, of the last document."""

    @property
    def gathers(self) -> bool:
        """Whether a publish gathers over training's own group, so that training must wait for it."""
        return self._ranks.mesh.world > 1 and not self._by_rows

    def publish(self, ref: VersionRef) -> PublishedVersion | None:
        """Stage the current parameters under `ref`; a collective call. The result on rank 0, None elsewhere.

        Raises WeightsError: `ref` is not higher than the last one (on every rank, before anything is written); or, on
        rank 0 at the end, no room. Whatever `fence` raises. Nothing is visible then.
        """
        self._begin(ref)
        return self._stage(ref, [tensor for _, tensor in self._tensors], self._ranks, None)

    @torch.no_grad()
    def snapshot(self, ref: VersionRef) -> Callable[[Ranks], PublishedVersion | None] | None:
        """Copy what this rank holds, where it lies and in the document's type: training may go on. A collective call.

        Returns:
            `publish` of the copy, to be called on every rank, in a thread whose collectives go over the given ranks;
            None, on all of them, if a rank has no memory for its copy: `publish` the version instead.
        Raises:
            WeightsError: as `publish`, for the version.
        """
        assert not self.gathers, "a publish that gathers needs the parameters until its end"
        copies = None
        self._begin(ref)
        try:
            copies = [_copied(one, dtype) for (_, one), dtype in zip(self._tensors, self._dtypes, strict=True)]
        except torch.OutOfMemoryError as error:
            log.debug("no snapshot: %s", error)
        if self._ranks.maximum(float(copies is None)) or copies is None:
            self.failed()
            return None
        ready = torch.cuda.current_stream().record_event() if self._device.type == "cuda" else None
        return lambda ranks: self._stage(ref, copies, ranks, ready)

    def _begin(self, ref: VersionRef) -> None:
        if self._last_tried is not None and ref <= self._last_tried:
            raise WeightsError(f"version {ref} is not higher than {self._last_tried}, the last one published")
        self._tried_before, self._last_tried = self._last_tried, ref

    def failed(self) -> None:
        """Let the version tried last come again, since no rank has published it; to be called on all of them."""
        self._last_tried = self._tried_before

    @torch.no_grad()
    def _stage(self, ref: VersionRef, tensors: Sequence[Any], ranks: Ranks, ready: Any) -> PublishedVersion | None:
        started, draft, self.num_bytes_written = time.monotonic(), None, 0
        with self._download.stream(ready):  # all of it: in the background, nothing else orders what a GPU does
            folds = self._fold and (self._by_rows or ranks.rank == 0)
            fold = DocumentFold(self.layout, self._device) if folds else None
            if self._shm is not None and ranks.rank == 0:
                begin = partial(self._shm.begin, wait_s=self._slot_wait_s, for_good=self._for_good)
                draft = _Draft(begin, ref, self.layout, fold)
            if self._by_rows:
                self._by_rows = self._write_rows(tensors, ranks, draft, fold)
            alone = self._ranks.mesh.world == 1 and self._buckets.takes(tensors)
            if alone and draft is not None:
                self.num_bytes_written = draft.write(tensors, self._dtypes, self._buckets)
            elif not self._by_rows:
                for tensor, dtype in zip(tensors, self._dtypes, strict=True):
                    self._gather_one(tensor, dtype, draft)
            if draft is None:
                return None
            manifest, path = draft.finish(self._last_staged, self._fence)
            device_manifest = draft.device_manifest(self._last_staged)
        self._last_staged = ref
        seconds = time.monotonic() - started
        return PublishedVersion(manifest, path, document_nbytes(self.layout), seconds, device_manifest)

    def _write_rows(
        self, tensors: Sequence[Any], ranks: Ranks, draft: _Draft | None, fold: DocumentFold | None
    ) -> bool:
        """Write and digest what is this rank's; False if a rank does not see the file, and nothing was written."""
        note = ranks.gather_bytes(draft.where() if draft is not None else b"")[0]
        if not note:
            return True  # rank 0 has no file, and says why
        file = failure = None
        try:
            file = SharedFile(os.fsdecode(note[PROBE_BYTES:]), note[:PROBE_BYTES], self.layout)
        except (OSError, WeightsError) as error:
            log.debug("weights are gathered: %s", error)
        if ranks.maximum(float(file is None)):
            if file is not None:
                file.close()
            log.info("the learner's ranks do not share a host: rank 0 gathers the weights and writes them")
            return False
        assert file is not None
        with closing(file):
            try:
                parts = parts_of(tensors, self.layout, ranks)
                self.num_bytes_written = write_parts(parts, file, self._download, fold)
            except Exception as error:  # whatever it is: the other ranks wait for the last part
                failure = error
            failed, digests = ranks.maximum(float(failure is not None)), b""
            if not failed:
                count, at, shares = len(self.layout.bucket_bytes), ranks.dp_rank, ranks.mesh.dp_size  # what is gathered
                try:
                    digests = b"".join(file.digests(range(at * count // shares, (at + 1) * count // shares)))
                except OSError as error:  # rank 0 then gets too few, and says so
                    failure = error
        digests = b"".join(ranks.gather_bytes(digests))
        sums = ranks.add_up(fold.sums) if fold is not None else None
        if draft is not None:
            draft.was_written(digests, sums, failure or WeightsError("another rank failed") if failed else None)
        elif failure is not None:
            log.error("rank %d could not write its rows: %s", ranks.rank, failure)
        return True

    def _gather_one(self, tensor: Any, dtype: torch.dtype, draft: _Draft | None) -> None:
        """Gather one tensor, in a function of its own so that it is freed before the next one is gathered."""
        if isinstance(tensor, DTensor):
            tensor = tensor.detach().to(dtype)  # before it is gathered: half of the bytes move
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        if draft is not None:
            self.num_bytes_written += draft.append(whole, dtype, self._download)


def _copied(parameter: Any, dtype: torch.dtype) -> Any:
    """The same numbers in memory of their own."""
    if not isinstance(parameter, torch.Tensor):
        return parameter.full_tensor().to(dtype)  # just made
    return parameter.detach().to(dtype, copy=True)


class _Draft:
    """The document of one publish; the first failure is kept for `finish`, and later tensors are passed over."""

    def __init__(
        self, begin: Callable[..., DocumentWriter], ref: VersionRef, layout: Layout, fold: DocumentFold | None
    ) -> None:
        self._ref, self._layout, self._fold = ref, layout, fold
        self._failure: Exception | None = None
        self._sums: torch.Tensor | None = None  # of the folds of all ranks
        self._writer: DocumentWriter | None = None
        try:
            self._writer = begin(ref, layout)
        except Exception as error:  # whatever it is: the other ranks are entering the first gather
            self._failure = error

    def append(self, tensor: torch.Tensor, dtype: torch.dtype, download: Download) -> int:
        """Write the next tensor; returns its bytes."""
        if self._writer is None or self._failure is not None:
            return 0
        try:
            if self._fold is not None or tensor.device.type != "cpu":
                tensor = tensor.detach().to(dtype)
            if self._fold is not None:
                self._fold.append(tensor.reshape(-1).view(torch.uint8))
            _write(tensor, dtype, self._writer, download)
        except Exception as error:
            self._failure = error
        return tensor.numel() * dtype.itemsize

    def write(self, tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype], buckets: BucketWriter) -> int:
        """Write all tensors; returns their bytes."""
        if self._writer is None or self._failure is not None:
            return 0
        nbytes = document_nbytes(self._layout)
        try:
            for tensor, dtype in zip(tensors, dtypes, strict=True) if self._fold is not None else ():
                self._fold.append(tensor.detach().to(dtype).reshape(-1).view(torch.uint8))
            self._writer.was_written(buckets.write(tensors, self._writer.room(nbytes)))
        except Exception as error:
            self._failure = error
        return nbytes

    def where(self) -> bytes:
        """The file's first random bytes, then its path; nothing if there is none."""
        if self._writer is None:
            return b""
        path, probe = self._writer.where
        return probe + os.fsencode(path)

    def was_written(self, digests: bytes, sums: torch.Tensor | None, failure: Exception | None) -> None:
        """All ranks have written their parts, or one has failed."""
        self._failure, self._sums = self._failure or failure, sums
        if failure is None and self._writer is not None:
            self._writer.was_written([digests[at : at + 16] for at in range(0, len(digests), 16)])

    def device_manifest(self, parent: VersionRef | None) -> Manifest | None:
        """The device manifest of a finished document."""
        if self._fold is None:
            return None
        return make_manifest(self._layout, self._ref, parent, self._fold.digests(self._sums), DIGEST_FOLD128)

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


def _write(tensor: torch.Tensor, dtype: torch.dtype, writer: DocumentWriter, download: Download) -> None:
    """Copy straight into the document and digest: on a CPU it is cast on the way, in pieces that stay in the cache."""
    flat = tensor.detach().reshape(-1)
    for piece in filled(writer.room(flat.numel() * dtype.itemsize), flat, dtype, download):
        writer.filled(len(piece))


# --- the rows of this rank -------------------------------------------------------------------------------------------

# The rows of a tensor that is sharded by rows are consecutive bytes of the document. So every rank of a host writes its
# own into the one file and nothing is gathered.


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Consecutive bytes of the document that this rank holds, from `start` on."""

    start: int
    tensor: Any  # a tensor, or what `full_tensor` makes one
    dtype: torch.dtype  # in the document

    def wire(self) -> Tensor:
        """The part's numbers in the type of the document, one after another, on their device."""
        tensor = self.tensor if isinstance(self.tensor, Tensor) else self.tensor.full_tensor()
        return tensor.detach().to(self.dtype).reshape(-1)


def parts_of(tensors: Sequence[Any], layout: Layout, ranks: Ranks) -> list[Part]:
    """This rank's parts, in the order of the document; a part that several ranks hold belongs to one of them."""
    found = []
    for tensor, (spec, offset) in zip(tensors, tensor_offsets(layout), strict=True):
        if not ranks.owns(tensor):
            continue
        dtype = getattr(torch, spec.dtype)
        if isinstance(tensor, DTensor):
            box, local = local_box(tensor), local_part(tensor.detach())
            if local.numel():
                found.append(Part(offset + box.offset[0] * (tensor_nbytes(spec) // spec.shape[0]), local, dtype))
        else:
            found.append(Part(offset, tensor, dtype))
    return found


def sharded_by_rows(tensors: Sequence[tuple[str, Any]]) -> bool:
    """Whether every tensor that is sharded at all is sharded so that a rank's part is consecutive bytes."""
    placements = [placement for _, one in tensors if isinstance(one, DTensor) for placement in one.placements]
    return all(getattr(placement, "dim", 0) == 0 for placement in placements)


class SharedFile:
    """The file of a document that is being written, open in a rank other than the one that made it.

    Args:
        probe: the random bytes that it begins with.
    Raises:
        OSError: it cannot be seen from here. WeightsError: another file has its name here.
    """

    def __init__(self, path: str | Path, probe: bytes, layout: Layout) -> None:
        self._layout = layout
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        found, _, nbytes = unpack_header(os.pread(self._fd, HEADER_BYTES, 0))
        self._size = HEADER_BYTES + nbytes
        if found != probe[:PROBE_BYTES]:
            self.close()
            raise WeightsError(f"{path} is another file here than on rank 0")

    def write(self, start: int, data: memoryview) -> None:
        """Put bytes at a place of the document."""
        while data:
            done = os.pwrite(self._fd, data, HEADER_BYTES + start)
            start, data = start + done, data[done:]

    def digests(self, which: range) -> list[bytes]:
        """Digests of these buckets, as they are in the file now."""
        with mmap.mmap(self._fd, self._size, access=mmap.ACCESS_READ) as mapping, memoryview(mapping) as whole:
            ranges = bucket_ranges(self._layout)
            views = [whole[HEADER_BYTES + ranges[i][0] : HEADER_BYTES + ranges[i][1]] for i in which]
            found = digest_all(views)
            for view in views:
                view.release()
        return found

    def close(self) -> None:
        os.close(self._fd)


def write_parts(
    parts: Sequence[Part], file: SharedFile, download: Download, fold: DocumentFold | None
) -> int:
    """Cast, fold and write this rank's parts; returns their bytes. One at a time is held in the document's type."""

    def cast() -> Iterator[tuple[int, Tensor]]:
        for part in parts:
            data = part.wire()
            if fold is not None:
                fold.add(data.view(torch.uint8), part.start)
            yield part.start, data

    nbytes = 0
    for start, data in download.pieces(cast()):
        file.write(start, data)
        nbytes += len(data)
    return nbytes


# --- other uses of a publisher ---------------------------------------------------------------------------------------

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


def publish_base(
    policy: Policy, lora: LoraConfig, *, wire_dtype: torch.dtype, bucket_bytes: int, ranks: Ranks,
    shm: ShmPublisher | None,
) -> tuple[Base, str] | None:
    """Stage the frozen weights for as long as the learner lives; a collective call.

    Returns:
        what to announce, and the document's path; None on ranks other than 0.
    Raises:
        WeightsError: no room.
    """
    publisher = Publisher(
        list(base_tensors(policy)), wire_dtype=wire_dtype, bucket_bytes=bucket_bytes, shm=shm,
        ranks=ranks, for_good=True,
    )
    try:
        published = publisher.publish(BASE_REF)
    except WeightsError as error:
        raise WeightsError(f"the base of policy.lora.rank={lora.rank}: {error}") from error
    if published is None:
        return None
    return Base(published.manifest, publisher.layout, scale_of(lora)), str(published.path)
