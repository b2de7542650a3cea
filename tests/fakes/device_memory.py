"""FakeDeviceMemory: files mapped by two processes, where a GPU would have CUDA IPC. For tests only."""

import secrets
from pathlib import Path

import numpy as np
import torch

from streamrl.errors import WeightsError


class FakeDeviceMemory:
    """Stand-in for `streamrl.weights.gpu.cuda_memory.CudaMemory`, on the CPU. A handle names a file in `folder`."""

    def __init__(self, folder: Path, device_id: str = "fake-gpu-0") -> None:
        self.device = torch.device("cpu")
        self.device_id = device_id
        self.num_opened = 0
        self._folder = folder

    def create(self, nbytes: int) -> tuple[torch.Tensor, bytes]:
        name = secrets.token_hex(8)
        mapped = np.memmap(self._folder / name, dtype=np.uint8, mode="w+", shape=(nbytes,))
        return torch.from_numpy(mapped), name.encode()

    def open(self, handle: bytes, nbytes: int) -> torch.Tensor:
        self.num_opened += 1
        try:
            return torch.from_numpy(np.memmap(self._folder / handle.decode(), dtype=np.uint8, mode="r+"))[:nbytes]
        except (OSError, ValueError) as error:
            raise WeightsError(f"no slot of that name here: {error}") from error
