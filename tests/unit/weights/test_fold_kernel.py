"""The digest's Triton kernel against numpy, in the interpreter that `make kernels` unpacks."""

import json
import logging
import os
import random
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from streamrl.weights.gpu import device_document
from streamrl.weights.gpu.device_document import DocumentFold, fold128
from streamrl.weights.manifest import bucket_ranges, make_layout
from tests.unit.learner.test_logprob_kernel import PACKAGES
from tests.unit.weights.fold_reference import fold128_numpy

KINDS = ("float64", "int64", "float32", "bfloat16", "float16", "int32", "int8", "uint8")


@pytest.mark.skipif(not PACKAGES.exists(), reason="needs the package triton, which CPU builds lack: make kernels")
@pytest.mark.timeout(240)
def test_the_kernel_gives_the_digests_of_the_reference(python_env):
    path = f"{python_env['PYTHONPATH']}{os.pathsep}{PACKAGES}"
    done = subprocess.run(  # Triton reads the variable as it is imported
        [sys.executable, "-m", __name__], env={**python_env, "PYTHONPATH": path, "TRITON_INTERPRET": "1"},
        cwd=Path(__file__).parents[3], capture_output=True, text=True, timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout)["calls"] > 100, done.stdout


def test_without_a_kernel_that_runs_tensor_operations_give_the_digest(monkeypatch, caplog):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(device_document, "find_spec", lambda name: None)
    device_document._kernel_on.cache_clear()
    data = torch.arange(1003, dtype=torch.int32).view(torch.uint8)[:-1]
    assert fold128(data) == fold128_numpy(data.numpy()) and not caplog.records

    device_document._kernel_on.cache_clear()
    monkeypatch.setattr(device_document, "find_spec", lambda name: name)
    broken = mock.Mock(add=mock.Mock(side_effect=RuntimeError("no compiler")))
    monkeypatch.setitem(sys.modules, "streamrl.weights.gpu.fold_kernel", broken)
    with caplog.at_level(logging.WARNING):
        assert fold128(data) == fold128_numpy(data.numpy())
    assert "without their Triton kernel" in caplog.text and "no compiler" in caplog.text
    device_document._kernel_on.cache_clear()


def main() -> None:
    """Random buckets, and documents in pieces of every type; prints how often the kernel ran."""
    kernel = device_document._kernel_on(torch.device("cpu"))
    assert kernel is not None, "Triton's interpreter does not run here"
    with mock.patch.object(kernel, "add", wraps=kernel.add) as calls:
        for seed in range(120):
            chosen = random.Random(seed)
            size = chosen.choice([0, 1, 3, 4, 5, chosen.randrange(100), chosen.randrange(70_000), 4 * 4096])
            data = bytes([0xFF]) * size if seed % 7 == 0 else chosen.randbytes(size)
            whole = torch.frombuffer(bytearray(b"ab" + data), dtype=torch.uint8)[2:]  # not at a word's address
            assert fold128(whole) == fold128_numpy(data), (seed, size)
        for seed in range(40):
            chosen = random.Random(seed)
            tensors = [
                torch.randint(0, 100, (chosen.randrange(1, 5000),)).to(getattr(torch, kind))
                for kind in chosen.choices(KINDS, k=3)
            ]
            layout = make_layout(
                ((f"t{i}", str(one.dtype).removeprefix("torch."), one.shape) for i, one in enumerate(tensors)),
                chosen.randrange(1000, 9000),
            )
            fold, raw = DocumentFold(layout, "cpu"), [one.view(torch.uint8) for one in tensors]
            for one in raw:
                fold.append(one)
            body = torch.cat(raw).numpy()
            assert fold.digests() == [fold128_numpy(body[start:end]) for start, end in bucket_ranges(layout)], seed
    print(json.dumps({"calls": calls.call_count}))


if __name__ == "__main__":
    main()
