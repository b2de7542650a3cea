"""Machine, versions and settings that a number was measured with: the stamp in every benchmark line."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

_PACKAGES = (
    "torch", "numpy", "pyzmq", "msgspec", "xxhash", "zstandard", "transformers", "safetensors", "vllm", "trl", "triton",
    "cupy-cuda13x", "cupy-cuda12x",
)  # fmt: skip
_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16", "fma", "neon", "asimd", "sve")
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def _load() -> list[float] | None:
    return [round(value, 2) for value in os.getloadavg()] if hasattr(os, "getloadavg") else None


_LOAD_BEFORE = _load()


def environment_stamp() -> dict[str, Any]:
    """Everything about this machine and process that may change a number, and nothing that names them."""
    return {
        **_processor(),
        **_limits(),
        "kernel": platform.release(),
        "libc": " ".join(platform.libc_ver()),
        "python": platform.python_version(),
        "packages": _packages(),
        "threads": {name: os.environ[name] for name in _THREAD_VARIABLES if name in os.environ},
        "load_before": _LOAD_BEFORE,
        "load_after": _load(),
        "gpu": _gpu(),
        "git_commit": os.environ.get("STREAMRL_BENCH_COMMIT") or _git("rev-parse", "HEAD") or None,
        # What a benchmark writes is not a change of what it measures.
        "git_dirty": bool(_git("status", "--porcelain", "--", ".", ":!bench/results")),
        **_loaded_libraries(),
    }


def _processor() -> dict[str, Any]:
    info: dict[str, str] = {}
    for line in _read("/proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        info.setdefault(key.strip(), value.strip())
    flags = set((info.get("flags") or info.get("Features") or "").split())
    caches = Path("/sys/devices/system/cpu/cpu0/cache")
    return {
        "cpu_model": info.get("model name") or platform.machine(),
        "cpu_physical": int(info["cpu cores"]) if "cpu cores" in info else None,
        "cpu_visible": os.cpu_count(),
        "affinity": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "isa": [flag for flag in _FLAGS if flag in flags],
        "caches": [
            f"L{_read(entry / 'level')} {_read(entry / 'type')} {_read(entry / 'size')}"
            for entry in sorted(caches.glob("index*"))
        ],
        "virtualized": "hypervisor" in flags,
    }


def _limits() -> dict[str, Any]:
    lines = _read("/proc/meminfo").splitlines()
    memory = next((line.split()[1] for line in lines if line.startswith("MemTotal")), None)
    return {
        "memory_kib": int(memory) if memory else None,
        "cgroup_cpu": _read("/sys/fs/cgroup/cpu.max") or None,
        "cgroup_memory": _read("/sys/fs/cgroup/memory.max") or None,
    }


def _packages() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _loaded_libraries() -> dict[str, Any]:
    """Facts of libraries that this process has loaded anyway; none is loaded for the stamp."""
    stamp: dict[str, Any] = {}
    if (zmq := sys.modules.get("zmq")) is not None:
        stamp["libzmq"] = zmq.zmq_version()
    if (torch := sys.modules.get("torch")) is not None:
        stamp["torch_threads"] = {"intra": torch.get_num_threads(), "inter": torch.get_num_interop_threads()}
        stamp["cuda"] = torch.version.cuda
        if torch.cuda.is_available():
            stamp["cudnn"] = torch.backends.cudnn.version()
            stamp["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    if (cupy_nccl := sys.modules.get("cupy.cuda.nccl")) is not None:
        stamp["nccl_of_cupy"] = cupy_nccl.get_version()
    return stamp


def _gpu() -> list[str] | None:
    query = "--query-gpu=name,memory.total,driver_version,power.limit"
    lines = _output(["nvidia-smi", query, "--format=csv,noheader"]).splitlines()
    return lines or None


def _git(*words: str) -> str:
    return _output(["git", "-C", str(Path(__file__).parent.parent), *words])


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
