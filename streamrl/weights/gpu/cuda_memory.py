"""Device memory that two processes have open at once, by the driver's own interface.

Slots are plain allocations of the driver, never parts of torch's pool: only those can be handed to another process
whatever the settings of torch's allocator are.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any

import torch

from streamrl.errors import ConfigError, WeightsError
from streamrl.gpus import gpu_of


def require_gpu(transport: str, where: str, device: str) -> None:
    """Refuse at start-up what could not work later. Raises ConfigError."""
    if not device.startswith("cuda") or not torch.cuda.is_available():
        visible = "" if torch.cuda.is_available() else " and no CUDA device is visible"
        raise ConfigError(
            f"the transport {transport} moves weights {where}, and the device here is {device}{visible}: take "
            f"{transport} off the list of transports"
        )


def require_ipc(device: str) -> None:
    require_gpu("ipc", "inside one GPU", device)


def device_id(device: str | torch.device) -> str:
    """`host|uuid` of a GPU of this process, the same in every process; "" for a CPU.

    Without nvidia-smi the uuid is torch's, which opens CUDA in this process.
    """
    where = torch.device(device)
    if where.type != "cuda":
        return ""
    # nvidia-smi first: a process that only asks must not take the memory of a CUDA context for it.
    listed = gpu_of(str(where))
    uuid = listed.uuid if listed is not None else str(torch.cuda.get_device_properties(where).uuid)
    return f"{os.uname().nodename[:20]}|{uuid.removeprefix('GPU-')}"


_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * 64)]


class _Span:
    """Memory of the driver as torch wants to see it; freed (or closed) with the last tensor on it."""

    def __init__(self, address: int, nbytes: int, release: Callable[[int], object]) -> None:
        self._address, self._release = address, release
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3, "strides": None,
        }

    def __del__(self) -> None:
        # Here and not in a `close`: torch may hold views of it for longer than the caller uses it.
        self._release(self._address)


class CudaMemory:
    """Slots on a GPU, by the driver's own interface.

    Args:
        device: "cuda" or "cuda:N".
    Raises:
        ConfigError: no GPU.
    """

    def __init__(self, device: str | torch.device) -> None:
        require_ipc(str(device))
        self.device = torch.device("cuda", torch.device(device).index or 0)
        self.device_id = device_id(self.device)
        self._driver = ctypes.CDLL("libcuda.so.1")
        # Declared, because ctypes passes an int as 32 bits otherwise, and addresses of devices have 64.
        self._driver.cuIpcOpenMemHandle_v2.argtypes = [ctypes.POINTER(ctypes.c_uint64), _Handle, ctypes.c_uint]
        self._driver.cuIpcGetMemHandle.argtypes = [ctypes.POINTER(_Handle), ctypes.c_uint64]
        self._driver.cuMemAlloc_v2.argtypes = [ctypes.POINTER(ctypes.c_uint64), ctypes.c_size_t]
        for name in ("cuMemFree_v2", "cuIpcCloseMemHandle"):
            getattr(self._driver, name).argtypes = [ctypes.c_uint64]

    def create(self, nbytes: int) -> tuple[torch.Tensor, bytes]:
        """uint8 [nbytes], and the handle (64 bytes) that opens it elsewhere."""
        with torch.cuda.device(self.device):
            torch.cuda.current_stream().synchronize()  # makes torch's context the current one of this thread
            address, handle = ctypes.c_uint64(), _Handle()
            self._call("cuMemAlloc_v2", ctypes.byref(address), nbytes)
            span = _Span(address.value, nbytes, self._driver.cuMemFree_v2)
            self._call("cuIpcGetMemHandle", ctypes.byref(handle), address.value)
            return torch.as_tensor(span, device=self.device), ctypes.string_at(ctypes.byref(handle), 64)

    def open(self, handle: bytes, nbytes: int) -> torch.Tensor:
        """The same memory in another process. Raises WeightsError."""
        if len(handle) != 64:
            raise WeightsError(f"a CUDA IPC handle has 64 bytes, this one {len(handle)}")
        with torch.cuda.device(self.device):
            torch.cuda.current_stream().synchronize()
            address = ctypes.c_uint64()
            lazy_peer_access = 1  # the only flag that the driver takes here
            self._call(
                "cuIpcOpenMemHandle_v2", ctypes.byref(address), _Handle.from_buffer_copy(handle), lazy_peer_access
            )
            span = _Span(address.value, nbytes, self._driver.cuIpcCloseMemHandle)
            return torch.as_tensor(span, device=self.device)

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._driver, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._driver.cuGetErrorName(code, ctypes.byref(text))
            said = text.value.decode() if text.value else "an unknown error"
            kind = torch.OutOfMemoryError if code == _OUT_OF_MEMORY else WeightsError
            raise kind(f"{name} failed with {said} ({code})")


def free_bytes(device: torch.device) -> int | None:
    """Memory that this process could still take; None where the device is the host."""
    if device.type != "cuda":
        return None
    # Torch keeps what tensors have given back: the driver counts that as taken, this process can use it.
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + unused


def wait_for_device(device: torch.device) -> None:
    """Wait until the work that this thread queued on the device is done."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
