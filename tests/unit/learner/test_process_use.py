"""What a learner rank uses, as the operating system sees it."""

import os

import psutil
import pytest
import torch

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
