"""GPU settings passed to vLLM: which devices, how much of their memory, and the dtype of the logits."""

from __future__ import annotations

import fcntl
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from streamrl.errors import EngineError
from streamrl.gpus import Gpu, gpu_of

log = logging.getLogger("streamrl.actor")

GIB = 1 << 30
USUAL_UTILIZATION = 0.92
"""vLLM's own; never more."""
SLACK_BYTES = 4 * GIB
"""Left free beside other processes: contexts, and what a reload needs of one layer."""
ALONE = 0.95
"""With so much of the memory free, no other process of size is there."""


def num_engine_gpus(options: Mapping[str, Any]) -> int:
    """GPUs of one engine: ranks of tensor times pipeline parallelism."""
    return int(options.get("tensor_parallel_size", 1)) * int(options.get("pipeline_parallel_size", 1))


def gpu_arguments(
    device: str, extra: Mapping[str, Any], *, half: bool, document_nbytes: int, num_documents: int,
    share: float | None, gpu: Gpu | None,
) -> dict[str, Any]:
    """Engine arguments on a GPU, under the user's.

    Args:
        device: "cuda" or "cuda:N", as torch counts.
        half: whether the model computes in half precision. Log-probs are taken from float32 logits as the learner does.
        document_nbytes, num_documents: what the actor keeps on the GPU beside the engine.
        share: part of the GPU's memory that is the engine's; None is what is free.
        gpu: its memory now; None where the driver does not tell.
    Raises:
        EngineError: too little memory is free.
    """
    found: dict[str, Any] = {}
    if ":" in device:
        first = int(device.partition(":")[2])
        found["device_ids"] = list(range(first, first + num_engine_gpus(extra)))
    if half and isinstance(given := extra.get("hf_overrides", {}), Mapping):
        found["hf_overrides"] = {"head_dtype": "float32", **given}
    if "gpu_memory_utilization" not in extra:
        found["gpu_memory_utilization"] = utilization(gpu, share, num_documents * document_nbytes, document_nbytes)
    return found


def utilization(gpu: Gpu | None, share: float | None, beside_nbytes: int, model_nbytes: int) -> float:
    """vLLM's `gpu_memory_utilization`: a part of the whole memory, free now, that leaves room for the others.

    Args:
        beside_nbytes: of documents on the GPU in the actor's own process.
        model_nbytes: of the weights, which must fit.
    Raises EngineError: they do not.
    """
    part = min(USUAL_UTILIZATION, share or 1.0)
    if gpu is None or not gpu.total_bytes or not gpu.free_bytes:
        return part
    slack = 0 if gpu.free_bytes >= ALONE * gpu.total_bytes and share is None else SLACK_BYTES
    part = min(part, (gpu.free_bytes - beside_nbytes - slack) / gpu.total_bytes)
    if part * gpu.total_bytes <= model_nbytes:
        raise EngineError(
            f"of {gpu.total_bytes / GIB:.1f} GiB of GPU {gpu.index} {gpu.free_bytes / GIB:.1f} are free, and vLLM may "
            f"take {max(part, 0.0) * gpu.total_bytes / GIB:.1f} for a model of {model_nbytes / GIB:.1f} (beside "
            f"{beside_nbytes / GIB:.1f} of documents): take ipc and nccl off actors.transports, lower "
            "learner.gpu_memory_share, or give the actor another GPU"
        )
    log.info("vLLM takes %.2f of GPU %s, of which %.1f GiB are free", part, gpu.index, gpu.free_bytes / GIB)
    return round(part, 4)


@contextmanager
def starts_alone(device: str, num_gpus: int) -> Iterator[None]:
    """Hold the GPUs of an engine while it starts: vLLM measures free memory and fails if another one frees some."""
    kind, _, number = device.partition(":")
    with ExitStack() as held:
        for place in range(int(number or 0), int(number or 0) + num_gpus) if kind == "cuda" else ():
            gpu = gpu_of(f"cuda:{place}")
            name = gpu.uuid if gpu is not None else f"{os.environ.get('CUDA_VISIBLE_DEVICES', '')}-{place}"
            path = Path(tempfile.gettempdir()) / f"streamrl-{os.getuid()}-{name.replace(os.sep, '-')}.lock"
            file = held.enter_context(path.open("a"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                log.info("another vLLM starts on GPU %s: this one waits for it", name)
                fcntl.flock(file, fcntl.LOCK_EX)
        yield
