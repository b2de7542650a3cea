"""FakeSleep: what vLLM's CUDA allocator does at a sleep, for workers of vLLM's CPU build, which ignore it. Tests only.

Only the allocator is fake: AsyncLLM, core and executor are vLLM's own. `vllm_fake_worker.py` is the worker's half.
"""

from typing import Any

from actors.engines.vllm.adapters import AdapterVllmEngine
from actors.engines.vllm.engine import VllmEngine


class FakeSleepVllm(VllmEngine):
    """A `VllmEngine` in whose core weights and cache have no memory while it sleeps."""

    def _more_arguments(self) -> dict[str, Any]:
        return {**super()._more_arguments(), "worker_extension_cls": "tests.fakes.vllm_fake_worker.FakeSleepLoader"}

    async def told(self, fails_at: str = "") -> tuple[list[str], int]:
        """The worker's calls since it was asked, and the bytes that it holds; the call `fails_at` will fail."""
        calls, nbytes = (await self._core.call(self._core.llm.collective_rpc("streamrl_told", args=(fails_at,))))[0]
        return calls, nbytes


class FakeSleepAdapterVllm(FakeSleepVllm, AdapterVllmEngine):
    """The same with adapters."""
