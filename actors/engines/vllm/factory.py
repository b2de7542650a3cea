"""The vLLM engine that a run needs: for whole models, or for adapters."""

from __future__ import annotations

from actors.engines.base import EngineSpec
from actors.engines.vllm.adapters import AdapterVllmEngine
from actors.engines.vllm.engine import VllmEngine


def vllm_engine(spec: EngineSpec) -> VllmEngine:
    """Raises EngineError as the engines do."""
    return VllmEngine(spec) if spec.adapter is None else AdapterVllmEngine(spec)
