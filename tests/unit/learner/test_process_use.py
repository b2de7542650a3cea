"""What a learner rank uses, as the operating system sees it."""

import psutil
import pytest
import torch

from learner.record.process_use import ProcessUse
from streamrl.metrics.names import METRICS


def test_a_sample_has_memory_and_processor_of_this_process():
    use = ProcessUse(torch.device("cpu"))
    block = torch.ones(16 << 20)  # 64 MB that are really touched
    work = sum(x * x for x in range(300_000))
    found = use.sample()

    assert found.keys() <= METRICS.keys() and work > 0
    assert found["system/rss_bytes"] == pytest.approx(psutil.Process().memory_info().rss, rel=0.2)
    assert found["system/rss_bytes"] > block.nbytes
    assert found["system/learner_cpu_percent"] > 0 and 0 < found["system/cpu_percent"] <= 100


def test_on_a_gpu_its_memory_is_there_too(monkeypatch):
    peaks, now = [5], [2]
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: max(peaks))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: peaks.__setitem__(slice(None), now))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 7)

    use = ProcessUse(torch.device("cuda", 0))
    found = use.sample()

    assert use.sample()["system/gpu_allocated_bytes"] == 2.0, "the peak of a step that is over does not count again"
    assert (found["system/gpu_allocated_bytes"], found["system/gpu_reserved_bytes"]) == (5.0, 7.0)
