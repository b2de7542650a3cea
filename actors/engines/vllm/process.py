"""vLLM's processes: their environment, arguments and GPUs, and a process group that cannot outlive the actor."""

from __future__ import annotations

import difflib
import fcntl
import hashlib
import logging
import mmap
import os
import secrets
import shutil
import signal
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from actors.engines.vllm.reaper import MARK, kill_group
from streamrl.architectures.rope import has_dynamic_rope
from streamrl.config.devices import num_vllm_gpus
from streamrl.config.rules import SMALLEST_VLLM_CPU_HEAD
from streamrl.errors import EngineError
from streamrl.gpus import Gpu, gpu_of
from streamrl.parent_watch import program
from streamrl.processes import Child
from streamrl.transport.sockets import socket_root

log = logging.getLogger("streamrl.actor")

GIB = 1 << 30
USUAL_UTILIZATION = 0.92
"""vLLM's own; never more."""
SLACK_BYTES = 4 * GIB
"""Left free beside other processes: contexts, and what a reload needs of one layer."""
ALONE = 0.95
"""With so much of the memory free, no other process of size is there."""


def gpu_arguments(
    device: str, extra: Mapping[str, Any], *, half: bool, document_nbytes: int, num_documents: int,
    share: float | None, gpu: Gpu | None, sleeps: bool = False,
) -> dict[str, Any]:
    """Engine arguments on a GPU, under the user's.

    Args:
        device: "cuda" or "cuda:N", as torch counts.
        half: whether the model computes in half precision. Log-probs are taken from float32 logits as the learner does.
        document_nbytes, num_documents: what the actor keeps on the GPU beside the engine.
        share: part of the GPU's memory that is the engine's; None is what is free.
        gpu: its memory now; None where the driver does not tell.
        sleeps: whether vLLM will be asked to sleep, for which it allocates weights and cache in another way.
    Raises:
        EngineError: too little memory is free.
    """
    found: dict[str, Any] = {"enable_sleep_mode": True} if sleeps else {}
    if ":" in device:
        first = int(device.partition(":")[2])
        found["device_ids"] = list(range(first, first + num_vllm_gpus(extra)))
    if half and isinstance(given := extra.get("hf_overrides", {}), Mapping):
        found["hf_overrides"] = {"head_dtype": "float32", **given}
    if sleeps and share is None:
        share = 1.0  # with slack: less may be free when it wakes than now
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
            f"take {max(part, 0.0) * gpu.total_bytes / GIB:.1f} for a model of {model_nbytes / GIB:.1f} (plus "
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


WORKER_EXTENSION = "actors.engines.vllm.worker.DocumentLoader"
OURS = frozenset({
    "model", "tokenizer", "load_format", "logprobs_mode", "max_logprobs", "max_model_len", "max_num_seqs",
    "generation_config", "worker_extension_cls", "trust_remote_code", "disable_log_stats", "dtype",
})
"""Engine arguments that follow from other settings, or that streamrl cannot do without."""

_ONE_WINDOW = frozenset({"qwen2", "qwen2_moe", "qwen3"})
_OTHERWISE_ON_A_CPU = frozenset({"cohere2", "ernie4_5_moe", "gpt_oss"})
"""Beside latent attention, as `bench.families` measured; a reload never reaches the experts of gpt_oss."""

_ALIGNMENT = 64
_BLOCK_TOKENS = 128  # vLLM's cache block on a CPU


def engine_arguments(
    *, max_num_seqs: int, max_tokens: int, device: str, dtype: str, extra: Mapping[str, Any], kv_bytes_per_token: int
) -> dict[str, Any]:
    """Arguments of AsyncEngineArgs but the model: ours, and `extra` over our defaults; EngineError for ours in it."""
    taken = sorted(OURS & extra.keys())
    if taken:
        raise EngineError(
            f"actors.vllm.{taken[0]} is not yours to set: it follows from the model and from actors.num_concurrent, "
            "actors.dtype, rollout.max_prompt_tokens and rollout.*.sampling.max_new_tokens"
        )
    defaults: dict[str, Any] = {"enable_prefix_caching": True, "seed": 0}
    if device == "cpu":
        # Compiling takes longer than most runs on a CPU; without it vLLM cannot measure the cache's size.
        defaults["enforce_eager"] = True
        # A seeded sequence whose prompt is read in parts sets its generator back, which none on a CPU can.
        defaults["enable_chunked_prefill"] = False
        if extra.get("tensor_parallel_size", 1) == extra.get("pipeline_parallel_size", 1) == 1:
            defaults["distributed_executor_backend"] = "uni"  # the model in the core's own process
        if "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
            defaults["kv_cache_memory_bytes"] = cache_bytes(max_num_seqs, max_tokens, kv_bytes_per_token)
    ours = {
        "dtype": dtype, "max_model_len": max_tokens,
        "max_num_seqs": max_num_seqs + 1,  # the probe's place: it must not wait for sequences to end
        # Random until the first install; a model's own sampling defaults must not change what was asked for.
        "load_format": "dummy", "generation_config": "vllm", "trust_remote_code": False,
        "logprobs_mode": "processed_logprobs", "worker_extension_cls": WORKER_EXTENSION, "disable_log_stats": True,
    }
    return {**defaults, **extra, **ours}


def check_model(config: Any, device: str) -> None:
    """Raise EngineError for a model that vLLM would refuse much later or compute incorrectly."""
    if not config.architectures:
        raise EngineError("the model's config.json names no `architectures`, and vLLM finds its code by them")
    text = config.get_text_config()
    if has_dynamic_rope(text):
        raise EngineError(
            "vLLM scales the rotary frequencies of dynamic NTK for its longest context in every sequence, the learner "
            "only beyond the original length: take actors.engine=native, or another rope_type in config.json"
        )
    if text.model_type in _ONE_WINDOW and len(set(getattr(text, "layer_types", None) or ())) > 1:
        raise EngineError(
            f"vLLM has no {text.model_type} with a window in some layers alone: take actors.engine=native, or set "
            "use_sliding_window to false in config.json"
        )
    if device == "cpu" and (text.model_type in _OTHERWISE_ON_A_CPU or getattr(text, "kv_lora_rank", None)):
        raise EngineError(
            f"vLLM on a CPU does not compute {text.model_type} as the learner does: take actors.engine=native"
        )
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    if device == "cpu" and head < SMALLEST_VLLM_CPU_HEAD:
        raise EngineError(
            f"vLLM on a CPU has no attention for heads of {head}: the model needs at least {SMALLEST_VLLM_CPU_HEAD} "
            "(a tiny one: policy.tiny.num_heads=2)"
        )


def cache_bytes(max_num_seqs: int, max_tokens: int, bytes_per_token: int) -> int:
    """Room for the longest sequence in every place, and as much again for prompts that may come again."""
    blocks = -(-max_tokens // _BLOCK_TOKENS) * max_num_seqs
    return (2 * blocks + 8) * _BLOCK_TOKENS * bytes_per_token


def kv_bytes_per_token(config: Any, element_bytes: int) -> int:
    """Keys and values of one token over all layers, from a model's text configuration."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * head_dim * element_bytes


@contextmanager
def environment(mark: str, device: str, num_threads: int | None, eager: bool) -> Iterator[None]:
    """Environment variables for vLLM and its children, restored afterwards; one that the user has set wins."""
    values = {
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # this process has threads and sockets that a fork must not copy
        "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR" if device == "cpu" else "WARNING",
        # V1 draws tokens of seeded requests one row after the other. V2 needs Triton, which has no release for CPUs.
        "VLLM_USE_V2_MODEL_RUNNER": "0" if device == "cpu" else "1",
        "VLLM_RPC_BASE_PATH": socket_root(),
        "SPT_NOENV": "1",  # process titles must not overwrite the mark
    }
    if device == "cpu":
        # No binding: several actors on one host would bind to the same cores. The number of threads is enough.
        values["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        # Or vLLM gives every model a process of its own, for the sake of that binding.
        values["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        if eager:
            values["TORCHDYNAMO_DISABLE"] = "1"  # or the sampler's helpers compile for 20 s
    changed = {name: value for name, value in values.items() if name not in os.environ}
    if device == "cpu" and num_threads:
        changed["OMP_NUM_THREADS"] = str(num_threads)  # the variable is torch's here, the setting is the engine's
    changed[MARK] = mark
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def block_interrupts() -> Iterator[None]:
    """Children started inside ignore Ctrl-C, which goes to the whole terminal group: the actor decides."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def check_argument_names(given: Mapping[str, Any], arguments_class: type, version: str) -> None:
    """Raise EngineError for an `actors.vllm.*` that this vLLM does not have, naming the nearest one."""
    known = {item.name for item in fields(arguments_class)}
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean actors.vllm.{close[0]}?" if close else "see the engine arguments in vLLM's own pages"
            raise EngineError(f"actors.vllm.{name}: vLLM {version} has no such engine argument; {hint}")


class EngineProcessGroup:
    """The processes of one engine: a mark, a folder with the model's files, and a reaper for when this process dies."""

    def __init__(self, model_dir: str | Path) -> None:
        self.mark = f"{os.getpid()}-{secrets.token_hex(8)}"
        self.folder = tempfile.mkdtemp(prefix="streamrl-vllm-")
        _copy_files(model_dir, self.folder)
        self._reaper = Child([*program("actors.engines.vllm.reaper"), str(os.getpid()), self.mark, self.folder])

    def terminate_all(self) -> None:
        """Kill every process of the engine, whatever its state."""
        kill_group(self.mark)

    def close(self) -> None:
        """Leave no process and no folder; may be called twice."""
        self.terminate_all()
        self._reaper.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


def _copy_files(model_dir: str | Path, folder: str | Path) -> None:
    shutil.copytree(model_dir, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors"))


def lasting_folder(model_dir: str | Path, root: str | Path | None = None) -> str:
    """A folder with the model's files whose path follows from their content, for every actor and every start.

    vLLM's compilation cache has the model's path in its key: with a fresh folder every start would compile.
    """
    files = sorted(path for path in Path(model_dir).rglob("*") if path.is_file() and path.suffix != ".safetensors")
    digest = hashlib.blake2b(digest_size=16)
    for path in files:
        content = path.read_bytes()
        digest.update(f"{path.relative_to(model_dir)}\0{len(content)}\0".encode() + content)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = Path(root or cache / "streamrl" / "models") / digest.hexdigest()
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft = tempfile.mkdtemp(prefix="draft-", dir=folder.parent)
        _copy_files(model_dir, draft)
        try:
            os.rename(draft, folder)
        except OSError:  # another actor was faster
            shutil.rmtree(draft)
    return str(folder)


class StagedDocument:
    """A document's tensors in memory that other processes map by `path`; freed with the last of them.

    One that is a mapped file already is that file, and nothing is copied.
    """

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        file = getattr(tensors, "file", None)
        self._held, self._fd = file, -1
        offsets = tensors.offsets if file is not None else _packed(tensors)
        self.entries: list[tuple[str, str, list[int], int]] = [
            (name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), offsets[name])
            for name, tensor in tensors.items()
        ]
        if file is not None:
            self.path = file.path
            return
        self._fd = os.memfd_create("streamrl-weights")
        self.path = f"/proc/{os.getpid()}/fd/{self._fd}"
        try:
            size = sum(-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors.values())
            os.ftruncate(self._fd, max(size, 1))
            mapping = mmap.mmap(self._fd, 0)
            for tensor, (_, _, _, start) in zip(tensors.values(), self.entries, strict=True):
                if tensor.numel():
                    target = torch.frombuffer(mapping, dtype=tensor.dtype, count=tensor.numel(), offset=start)
                    target.copy_(tensor.detach().reshape(-1))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._held = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _packed(tensors: Mapping[str, Any]) -> dict[str, int]:
    """The aligned byte offset of each tensor in a packed file."""
    offsets, offset = {}, 0
    for name, tensor in tensors.items():
        offsets[name] = offset
        offset += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    return offsets
