"""FakeSleepLoader: the half of `fake_vllm_sleep.py` that vLLM's core imports; replaces a worker's sleep and wake_up."""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from vllm.v1.worker.cpu_worker import CPUWorker

from actors.engines.vllm.worker import DocumentLoader
from streamrl.process_memory import return_freed_memory

TAGS = ("weights", "kv_cache")


class FakeSleepLoader(DocumentLoader):
    """Tells of the calls to its worker, and fails at one of them if told so."""

    streamrl_calls: Sequence[str] = ()
    streamrl_fails_at = ""
    streamrl_sizes: Mapping[int, int] = MappingProxyType({})
    streamrl_kept: Mapping[int, torch.Tensor] = MappingProxyType({})

    def streamrl_told(self, fails_at: str) -> tuple[list[str], int]:
        calls, self.streamrl_calls, self.streamrl_fails_at = [*self.streamrl_calls], (), fails_at
        return calls, sum(one.nbytes() for tag in TAGS for _, one in storages(self, tag))

    def streamrl_load(self, *args: Any) -> float:
        note(self, "load")
        return super().streamrl_load(*args)


def tensors(worker: Any, tag: str) -> Iterator[torch.Tensor]:
    """Tensors that vLLM allocates under this tag, but for buffers, which it saves at every level by itself."""
    if tag == "kv_cache":
        yield from worker.model_runner.kv_caches
        return
    model = worker.model_runner.get_model()
    yield from model.parameters()
    for module in model.modules():  # the places of adapters
        for name, value in vars(module).items():
            if name.startswith("lora_") and isinstance(value, tuple | list):
                yield from (one for one in value if isinstance(one, torch.Tensor))


def storages(worker: Any, tag: str) -> list[tuple[int, torch.UntypedStorage]]:
    found = {one.untyped_storage()._cdata: one.untyped_storage() for one in tensors(worker, tag)}
    return list(found.items())


def note(worker: Any, call: str) -> None:
    worker.streamrl_calls = (*worker.streamrl_calls, call)
    if call == worker.streamrl_fails_at:
        raise torch.OutOfMemoryError(f"CUDA out of memory, says FakeSleepLoader at {call}")


def fake_sleep(worker: Any, level: int = 1) -> None:
    note(worker, f"sleep {level}")
    sizes, kept = dict(worker.streamrl_sizes), dict(worker.streamrl_kept)
    for tag in TAGS:
        for key, storage in storages(worker, tag):
            if not storage.nbytes():
                continue  # it sleeps already
            sizes[key] = storage.nbytes()
            if level == 1 and tag == "weights":
                kept[key] = torch.tensor([], dtype=torch.uint8).set_(storage).clone()
            storage.resize_(0)
    worker.streamrl_sizes, worker.streamrl_kept = sizes, kept
    return_freed_memory()


def fake_wake_up(worker: Any, tags: Sequence[str] | None = None) -> None:
    for tag in tags or TAGS:
        note(worker, f"wake {tag}")
        for key, storage in storages(worker, tag):
            if key not in worker.streamrl_sizes:
                continue  # it never had any
            storage.resize_(worker.streamrl_sizes[key])
            whole = torch.tensor([], dtype=torch.uint8).set_(storage)
            if key in worker.streamrl_kept:
                whole.copy_(worker.streamrl_kept[key])
            else:
                whole.fill_(0xFF if tag == "weights" else 0)  # not a number in every float type


CPUWorker.sleep, CPUWorker.wake_up = fake_sleep, fake_wake_up
