"""vLLM in a run that trains an adapter: it loads the base from files when it starts, and each version as a LoRA.

    keep, recompute   one LoRA, replaced in place between two forward passes: running sequences switch to it
    finish            a LoRA for each version: a sequence keeps its own, and nothing is paused

vLLM applies its LoRA kernels on a GPU, and the same arithmetic in torch on a CPU.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from actors.engines.base import AdapterSpec, EngineSpec, GenerateRequest, Generation, InstallTimes, VersionSpan
from actors.engines.vllm.engine import PAUSES, VllmEngine, as_in_files
from actors.engines.vllm.imports import vllm
from actors.engines.vllm.process import EngineProcessGroup
from streamrl.errors import EngineError, WeightsError
from streamrl.messages import VersionRef
from streamrl.weights.adapter import adapted_layers

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM makes room for; a smaller adapter is padded."""
NUM_SLOTS = 4
"""Under `finish`: versions in one forward pass; a sequence of a fifth waits."""
KEPT_VERSIONS = 8
"""Under `finish`: versions that stay, for a later turn of an episode."""


@dataclass(frozen=True, slots=True)
class _Lora:
    """A version as vLLM knows it."""

    ref: VersionRef
    number: int
    folder: Path

    def request(self, *, replace: bool = False) -> Any:
        return vllm().LoRARequest(
            lora_name=f"version-{self.number}", lora_int_id=self.number, lora_path=str(self.folder),
            load_inplace=replace,
        )


def lora_arguments(adapter: AdapterSpec, *, pinning: bool) -> dict[str, Any]:
    """Engine arguments. Raises EngineError for a rank that vLLM has no room for."""
    rank = next((size for size in RANKS if size >= adapter.rank), None)
    if rank is None:
        raise EngineError(f"vLLM takes adapters up to rank {RANKS[-1]}: lower policy.lora.rank={adapter.rank}")
    slots = NUM_SLOTS if pinning else 1
    return {
        "enable_lora": True, "max_lora_rank": rank, "max_loras": slots,
        "max_cpu_loras": KEPT_VERSIONS if pinning else 1, "load_format": "auto",
        # Without the output layer: once it is wrapped, vLLM 0.32 on a CPU crashes on prompt log-probs in a batch.
        "lora_target_modules": sorted({layer.rpartition(".")[2] for layer in adapter.layers}),
    }


class AdapterVllmEngine(VllmEngine):
    """A `VllmEngine` that `TakesAdapters`; its core starts with the base, not before."""

    sleep_level = 1
    """vLLM's level: the base stays on the host, with the places of adapters, which it allocates with the weights."""

    def __init__(self, spec: EngineSpec) -> None:
        assert spec.adapter is not None
        self._adapter, self._pinning = spec.adapter, spec.install_policy == "drain"
        self._loras: OrderedDict[VersionRef, _Lora] = OrderedDict()
        self._in_use: dict[VersionRef, int] = {}
        self._number = 0
        super().__init__(spec)

    def _model_folder(self, group: EngineProcessGroup, arguments: Mapping[str, Any]) -> str:
        return group.folder  # the base is written into it

    def _more_arguments(self) -> dict[str, Any]:
        return lora_arguments(self._adapter, pinning=self._pinning)

    def _start_empty(self) -> None:
        """Nothing runs before there is a base to start with; a missing vLLM and unknown arguments are found now."""
        try:
            self._core.check()
        except BaseException:
            self._core.close()
            raise

    @property
    def installed(self) -> VersionRef | None:
        return next(reversed(self._loras)) if self._loras and not self._core.asleep else None

    async def install(self, tensors: Mapping[str, Any], ref: VersionRef) -> InstallTimes:
        raise EngineError("this engine was built for adapters: use install_base and install_adapter")

    async def install_base(self, tensors: Mapping[str, Any]) -> None:
        """See `TakesAdapters.install_base`: a start of vLLM, from a copy of the base in its folder.

        A core that sleeps has its base still: it takes it up again.
        """
        async with self._exchange:
            if self._core.asleep:
                self._check_works()
                await self._wake(self._core.wake_weights())
                return
            self._open.clear()
            self._restarting = True  # it takes longer than an install may
            self._requests.cancel_all()
            try:
                await asyncio.to_thread(self._core.kill)
                path = Path(self._core.group.folder) / "model.safetensors"
                whole = await asyncio.to_thread(as_in_files, self._model, tensors)
                await asyncio.to_thread(save_file, _contiguous(whole), path)
                await asyncio.to_thread(self._core.start)
            except Exception as error:  # of vLLM's making
                self._death = EngineError(f"vLLM does not start with the base: {error}")
                self._open.set()  # waiting requests get the error
                raise self._death from error
            finally:
                self._restarting = False

    async def install_adapter(self, tensors: Mapping[str, Any], ref: VersionRef) -> InstallTimes:
        """See `TakesAdapters.install_adapter`."""
        began = time.perf_counter()
        async with self._exchange:
            self._check_works()
            lora = await asyncio.to_thread(self._stage, tensors, ref)
            try:
                pause_s = await self._take(lora)
            except Exception as error:  # of vLLM's making
                shutil.rmtree(lora.folder, ignore_errors=True)
                if self._core.asleep:
                    raise self._dies(f"vLLM did not wake up with version {ref}: {error}") from error
                if not self._core.alive or not self._pinning:
                    await self._restart()
                raise WeightsError(
                    f"vLLM failed to load version {ref}, {self.installed} keeps serving: {error}"
                ) from error
            self._loras[ref] = lora
            self._retire()
            self._open.set()
        self._pause_s += pause_s
        self._installs += 1
        return InstallTimes(pause_s=pause_s, install_s=time.perf_counter() - began)

    def _stage(self, tensors: Mapping[str, Any], ref: VersionRef) -> _Lora:
        """The adapter as a folder in peft's form, which vLLM reads by itself."""
        layers = adapted_layers(tensors)
        if set(layers) != set(self._adapter.layers):
            strange = sorted(set(layers) ^ set(self._adapter.layers))[0]
            raise WeightsError(f"the adapter's layers are not those of this run: {strange}. The old one keeps serving.")
        self._number += 1
        folder = Path(self._core.group.folder) / f"adapter-{self._number}"
        folder.mkdir()
        rank = next(iter(tensors.values())).shape[0]
        (folder / "adapter_config.json").write_text(json.dumps({
            "peft_type": "LORA", "r": rank, "lora_alpha": self._adapter.scale * rank, "bias": "none",
            "target_modules": sorted({layer.rpartition(".")[2] for layer in layers}),
        }))
        save_file(
            {f"base_model.model.{name}": tensor for name, tensor in _contiguous(tensors).items()},
            folder / "adapter_model.safetensors",
        )
        return _Lora(ref, self._number if self._pinning else 1, folder)

    async def _take(self, lora: _Lora) -> float:
        """Give vLLM a staged version; how long sequences stood still."""
        if self._pinning:
            await self._core.call(self._core.llm.add_lora(lora.request()))
            await self._core.label_and_resume(lora.ref)
            return 0.0
        self._open.clear()
        mode, clear_cache = PAUSES[self._policy]
        await self._core.pause(mode, clear_cache)
        paused = time.perf_counter()
        await self._core.call(self._core.llm.add_lora(lora.request(replace=True)))
        await self._core.label_and_resume(lora.ref)
        return time.perf_counter() - paused

    def _retire(self) -> None:
        """Remove the folders of versions that nothing will ask for."""
        kept = KEPT_VERSIONS if self._pinning else 1
        for ref in list(self._loras)[:-kept]:
            if not self._in_use.get(ref):
                shutil.rmtree(self._loras.pop(ref).folder, ignore_errors=True)

    async def _load_former(self) -> None:
        """Load the former version into a core that was started again, with the base from its folder."""
        if (ref := self.installed) is not None:
            await self._take(self._loras[ref])
            self._open.set()

    async def generate(self, request: GenerateRequest) -> Generation:
        """Generate as `VllmEngine` does; under `finish` every token is of one version."""
        if not self._pinning:
            return await super().generate(request)
        await self._until_open()
        ref = request.version if request.version in self._loras else self.installed
        assert ref is not None
        self._in_use[ref] = self._in_use.get(ref, 0) + 1
        try:
            done = await self._generate(request, ref)
        finally:
            self._in_use[ref] -= 1
            if not self._in_use[ref]:
                del self._in_use[ref]
        return replace(done, spans=[VersionSpan(ref, 0, len(done.token_ids))])

    def _lora_of(self, ref: VersionRef | None) -> Any:
        wanted = ref if ref is not None else self.installed
        assert wanted is not None
        return self._loras[wanted].request()


def vllm_engine(spec: EngineSpec) -> VllmEngine:
    """The engine that a run needs: for whole models, or for adapters. Raises EngineError as the engines do."""
    return VllmEngine(spec) if spec.adapter is None else AdapterVllmEngine(spec)


def _contiguous(tensors: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
