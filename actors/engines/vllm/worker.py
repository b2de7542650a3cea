"""Extension of vLLM's worker processes: loads a staged document into the live model.

vLLM mixes `DocumentLoader` into its worker (`worker_extension_cls`); the engine calls it by name between pause and
resume, on every tensor-parallel rank. The document is shared memory, so it is neither sent nor copied; each rank takes
its part of every tensor.
"""

from __future__ import annotations

import logging
import mmap
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from streamrl.weights.gpu.pinned import Upload

log = logging.getLogger("streamrl.actor")

STAGING_MARGIN_BYTES = 2 << 30
"""Of device memory that staging leaves to what else the worker allocates."""

Entry = tuple[str, str, list[int], int]
"""(checkpoint name, torch dtype by name, shape, offset in bytes) of one tensor of a staged document."""


def mapped_tensors(path: str, entries: Sequence[Entry]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a staged document in its order, as views of memory that this process maps privately."""
    fd = os.open(path, os.O_RDONLY)
    try:
        # Private and writable, because torch refuses read-only memory; it is never written.
        mapping = mmap.mmap(fd, 0, access=mmap.ACCESS_COPY)
    finally:
        os.close(fd)
    for name, dtype_name, shape, offset in entries:
        dtype = getattr(torch, dtype_name)
        count = torch.Size(shape).numel()
        if count and offset % dtype.itemsize:  # a document of several types may leave a tensor between two elements
            raw = torch.frombuffer(mapping, dtype=torch.uint8, count=count * dtype.itemsize, offset=offset)
            yield name, raw.clone().view(dtype).reshape(shape)
        elif count:
            yield name, torch.frombuffer(mapping, dtype=dtype, count=count, offset=offset).reshape(shape)
        else:
            yield name, torch.empty(shape, dtype=dtype)


class Staging:
    """Brings a document's tensors onto the device in a thread, in order, as far as `spare_bytes` reach.

    The others, and those after one that cannot be read, stay where they are.
    """

    def __init__(self, path: str, entries: Sequence[Entry], device: torch.device, spare_bytes: int) -> None:
        self.path, self._entries, self._device, self._spare = path, entries, device, spare_bytes
        self._staged: dict[str, torch.Tensor] = {}
        self.nbytes = 0
        self._thread = threading.Thread(target=self._run, name="streamrl-stage", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All tensors in the document's order; waits for the thread."""
        self._thread.join()
        for name, tensor in mapped_tensors(self.path, self._entries):
            yield name, self._staged.get(name, tensor)

    def _run(self) -> None:
        upload = Upload(self._device)
        try:
            for name, tensor in mapped_tensors(self.path, self._entries):
                if self.nbytes + tensor.nbytes > self._spare:
                    break
                target = torch.empty_like(tensor, device=self._device)
                upload.copy(tensor, target)
                self._staged[name] = target
                self.nbytes += tensor.nbytes
        except Exception as error:  # no memory, or a document that the load will refuse in its turn
            log.warning("version is staged in part: %r", error)
        upload.finish()


class DocumentLoader:
    """Methods for vLLM's worker; the prefix keeps them apart from its own."""

    model_runner: Any
    vllm_config: Any
    streamrl_staging: Staging | None = None

    def streamrl_stage(self, path: str, entries: Sequence[Entry]) -> None:
        """Begin to stage a document on the model's device; returns at once. On a CPU it is there."""
        device = next(self.model_runner.get_model().parameters()).device
        self.streamrl_staging = None
        if device.type == "cuda":
            unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
            spare = torch.cuda.mem_get_info(device)[0] + unused - STAGING_MARGIN_BYTES
            self.streamrl_staging = Staging(path, entries, device, spare)

    def streamrl_staged(self) -> tuple[int, bool]:
        """Bytes that are beside the model by now, and whether no more will be."""
        staging = self.streamrl_staging
        return (staging.nbytes, staging.done) if staging is not None else (0, True)

    def streamrl_load(self, path: str, entries: Sequence[Entry], tied: Mapping[str, str]) -> float:
        """Load a complete document, layer by layer, through the fusing and packing of a first load; seconds it took.

        Args:
            tied: name of a tied copy, which documents leave out -> the name that its values come under.

        Raises:
            RuntimeError: tensors of the model got nothing; ValueError and others from vLLM's loaders. The model is
                mixed then: load a complete document before anything is generated.
        """
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        began = time.perf_counter()
        staging, self.streamrl_staging = self.streamrl_staging, None
        staged = staging is not None and staging.path == path
        model = self.model_runner.get_model()
        # Before the reload begins: it puts place-holders where the model's tensors were, two of them for a tied one.
        wanted = {name for name, _ in model.named_parameters()}
        _forget_kernels(model)
        with set_current_vllm_config(self.vllm_config), torch.no_grad():
            initialize_layerwise_reload(model)
            # Without what vLLM computes from loaded weights, such as the halves of a latent attention's projection.
            wanted &= {name for name, _ in model.named_parameters(remove_duplicate=False)}
            tensors = staging.tensors() if staged else mapped_tensors(path, entries)
            own = {copy: source for copy, source in tied.items() if copy in wanted}
            try:
                loaded = model.load_weights(with_copies(tensors, own))
            finally:
                # After a failure too: it restores the layers not reached, so that another document can follow.
                finalize_layerwise_reload(model, self.vllm_config.model_config)
            _pack_tied(model, loaded or set())
        missing = sorted(wanted - loaded) if loaded is not None else []
        if missing and self.vllm_config.model_config.quantization is None:
            raise RuntimeError(f"{len(missing)} tensors of the model got nothing, the first is {missing[0]}")
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the label and the next pass follow
        return time.perf_counter() - began


def with_copies(
    tensors: Iterable[tuple[str, torch.Tensor]], copies: Mapping[str, str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors, and after them those that are tied in the files while vLLM's model holds both (DeepSeek)."""
    held = {}
    for name, tensor in tensors:
        if name in copies.values():
            held[name] = tensor
        yield name, tensor
    for copy, source in copies.items():
        if source in held:
            yield copy, held[source]


def _forget_kernels(model: Any) -> None:
    """Let a mixture's experts be packed once more, with the next weights.

    On a CPU vLLM packs them when it makes their kernel. A reload that finds a kernel leaves them as they come, which
    that kernel misreads. On a GPU nothing is packed there, and captured graphs need the kernel that they know.
    """
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None and next(module.parameters()).device.type == "cpu":
            method.moe_kernel = None


def _pack_tied(model: Any, loaded: set[str]) -> None:
    """Pack the weights of tied layers again.

    On a CPU a layer computes with a packed copy of its weight. A reload packs only the layer that got the weight: the
    output layer that shares it would keep the copy of an older version.
    """
    owners: dict[int, int] = {}
    for module in model.modules():
        if (weight := getattr(module, "weight", None)) is not None:
            owners[id(weight)] = owners.get(id(weight), 0) + 1
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if weight is None or owners[id(weight)] < 2 or f"{name}.weight" in loaded:
            continue
        if hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading(module)
