"""What a learner rank uses, as the operating system sees it."""

import json
import os
import threading
from itertools import chain, repeat

import numpy as np
import psutil
import pytest
import torch

from learner.ranks.mesh import Ranks
from learner.record import memory
from learner.record.process_use import ProcessUse
from streamrl.metrics.names import METRICS
from tests.kit.system import until


def test_a_sample_has_memory_and_processor_of_this_process():
    use = ProcessUse(torch.device("cpu"))
    block = torch.ones(16 << 20)  # 64 MB that are really touched
    work = sum(x * x for x in range(300_000))
    found = use.sample()

    assert found.keys() <= METRICS.keys() and work > 0
    assert found["system/rss_bytes"] == pytest.approx(psutil.Process().memory_info().rss, rel=0.2)
    assert found["system/rss_bytes"] > block.nbytes
    assert found["system/memory_percent"] == pytest.approx(psutil.virtual_memory().percent, abs=10)
    assert found["system/learner_cpu_percent"] > 0 and 0 < found["system/cpu_percent"] <= 100


def test_the_operating_system_is_asked_twice_a_second_at_most():
    now = [100.0]
    use = ProcessUse(torch.device("cpu"), lambda: now[0])
    first = use.sample()
    block = torch.ones(16 << 20)  # perhaps less than other tests leave to be freed meanwhile
    now[0] += 0.4
    assert use.sample() == first and block.nbytes
    now[0] += 0.1
    assert use.sample() != first


def test_on_a_gpu_its_memory_and_its_use_by_a_fake_driver_are_there_too(monkeypatch, tmp_path):
    fake = tmp_path / "nvidia-smi"
    fake.write_text(r"""#!/bin/sh
case $1 in --id=1) printf '70, 9\n';; --id=*) printf '20, 9\n';; *) printf '0, GPU-a, 1, 1\n1, GPU-b, 1, 1\n';; esac
""")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    peaks, now = [5], [2]
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: max(peaks))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: peaks.__setitem__(slice(None), now))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 7)

    use = ProcessUse(torch.device("cuda", 1))
    found = use.sample()
    until(lambda: use.sample()["system/gpu_percent"] > 0)
    assert use.sample()["system/gpu_percent"] == 70.0, "of the GPU of this rank"

    assert use.sample()["system/gpu_allocated_bytes"] == 2.0, "the peak of a step that is over does not count again"
    assert (found["system/gpu_allocated_bytes"], found["system/gpu_reserved_bytes"]) == (5.0, 7.0)


def test_a_thread_samples_memory_and_leaves_its_spread_as_a_file(tmp_path, monkeypatch):
    now, taken = memory.memory_now(torch.device("cpu")), threading.Semaphore(0)
    assert now["rss_bytes"] == pytest.approx(psutil.Process().memory_info().rss, rel=0.2)
    assert 0 < now["rss_percent"] < 100 and now["gpu_allocated_bytes"] == now["gpu_peak_bytes"] == 0.0
    values = chain([2.0, 9.0, 4.0], repeat(5.0))

    def one(device):
        taken.release()
        return {"rss_bytes": next(values)}

    monkeypatch.setattr(memory, "memory_now", one)
    with pytest.raises(MemoryError), memory.memory_profiled(0.001, tmp_path, Ranks()):
        assert all(taken.acquire(timeout=30) for _ in range(4))
        raise MemoryError
    found = json.loads((tmp_path / "profile" / "memory-rank-0.json").read_text())
    expected = [2.0, 9.0, 4.0] + [5.0] * (found["num_samples"] - 3)
    assert found["rss_bytes"] == pytest.approx(
        {"min": 2.0, "max": 9.0, "avg": np.mean(expected), "std": np.std(expected)})
    with memory.memory_profiled(None, tmp_path / "off", Ranks()):
        assert not (tmp_path / "off").exists()
