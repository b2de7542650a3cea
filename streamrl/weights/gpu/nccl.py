"""NCCL through cupy: the communicators of `streamrl.weights.gpu.broadcast` on GPUs. The only user of cupy.

Buckets travel as bytes, so their dtype never matters; cupy is given addresses of torch's memory and one of its streams.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from streamrl.errors import ConfigError, WeightsError
from streamrl.weights.gpu.cuda_memory import require_gpu

UNIQUE_ID_BYTES = 128


def require_nccl(device: str) -> None:
    """Refuse at start-up what could not work later.

    Raises:
        ConfigError: no GPU, no cupy, or a cupy without NCCL; says what to install.
    """
    require_gpu("nccl", "between GPUs", device)
    _nccl()


def _nccl() -> Any:
    try:
        cupy = importlib.import_module("cupy")
        nccl = importlib.import_module("cupy.cuda.nccl")
    except ImportError as error:
        raise ConfigError(
            f"the transport nccl needs cupy, which cannot be imported here ({error}): pip install "
            "'streamrl[nccl]' (a driver of CUDA 12: 'streamrl[nccl-cu12]'), or take nccl off the list of transports"
        ) from error
    if not nccl.available:
        raise ConfigError(
            f"cupy {cupy.__version__} found no NCCL library: install nvidia-nccl-cu12 or nvidia-nccl-cu13 beside it, "
            "or take nccl off the list of transports"
        )
    return nccl


class CupyNccl:
    """Makes communicators whose rank here is one GPU.

    Args:
        device: the GPU of this process, "cuda" or "cuda:N".
    Raises:
        ConfigError: see `require_nccl`.
    """

    def __init__(self, device: str | torch.device) -> None:
        require_nccl(str(device))
        self._nccl = _nccl()
        self._cupy = importlib.import_module("cupy")
        self.device = torch.device("cuda", torch.device(device).index or 0)

    @property
    def version(self) -> int:
        """The version of the loaded NCCL library, e.g. 22809."""
        return int(self._nccl.get_version())

    def unique_id(self) -> bytes:
        """Names a new group; called by its rank 0."""
        return bytes(self._nccl.get_unique_id()).ljust(UNIQUE_ID_BYTES, b"\0")

    def connect(self, world: int, unique_id: bytes, rank: int) -> CupyCommunicator:
        """Blocks until all ranks have connected."""
        with torch.cuda.device(self.device), self._cupy.cuda.Device(self.device.index), named_errors():
            torch.cuda.current_stream().synchronize()  # makes torch's context the current one of this thread
            inner = self._nccl.NcclCommunicator(world, unique_id, rank)
        return CupyCommunicator(self._nccl, inner, self.device, world)


_NUMBERS = {6: "remote error", 7: "operation in progress", 8: "a timeout"}
"""Results of NCCL that cupy has no name for: it raises a KeyError of the number."""


@contextmanager
def named_errors() -> Iterator[None]:
    """Inside, an error of NCCL that cupy cannot name keeps its number."""
    try:
        yield
    except KeyError as error:
        number = error.args[0] if error.args else None
        if not isinstance(number, int):
            raise
        raise WeightsError(f"NCCL error {number} ({_NUMBERS.get(number, 'unknown to cupy')})") from error


class CupyCommunicator:
    """One rank of one group that never changes, on one GPU, with a stream of its own.

    Methods block; after any failure only `abort` may be called.
    """

    def __init__(self, nccl: Any, inner: Any, device: torch.device, world: int) -> None:
        self._nccl, self._inner, self._device, self._world = nccl, inner, device, world
        self._stream = torch.cuda.Stream(device)
        self._aborted = False

    def test(self) -> None:
        """A one-element all-reduce; raises WeightsError unless it counts every rank."""
        with torch.cuda.device(self._device), named_errors():
            one = torch.ones(1, dtype=torch.int32, device=self._device)
            self._stream.wait_stream(torch.cuda.current_stream())
            address, nccl = one.data_ptr(), self._nccl
            self._inner.allReduce(address, address, 1, nccl.NCCL_INT32, nccl.NCCL_SUM, self._stream.cuda_stream)
            self._stream.synchronize()
            if (total := int(one)) != self._world:
                raise WeightsError(f"{total} ranks answered, the group has {self._world}")

    def broadcast(self, buffer: torch.Tensor) -> None:
        """Copy rank 0's bytes (uint8, contiguous) into every rank's buffer; complete when this returns."""
        if buffer.dtype != torch.uint8 or not buffer.is_contiguous() or buffer.device != self._device:
            raise WeightsError(f"a broadcast moves contiguous bytes on {self._device}, got {buffer.dtype} there: "
                               f"{buffer.device}")
        with torch.cuda.device(self._device), named_errors():
            self._stream.wait_stream(torch.cuda.current_stream())
            self._inner.bcast(buffer.data_ptr(), buffer.numel(), self._nccl.NCCL_UINT8, 0, self._stream.cuda_stream)
            self._stream.synchronize()
            # An abort ends the kernel that was waited for, then frees what would be asked.
            if self._aborted:
                raise WeightsError("the communicator was aborted")
            self._inner.check_async_error()

    def abort(self) -> None:
        """End whatever is in progress here; callable from any thread."""
        self._aborted = True
        with torch.cuda.device(self._device), named_errors():
            self._inner.abort()
