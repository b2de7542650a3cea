"""Commands look at their words and paths before they load libraries that take seconds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import os, runpy, sys
os.execv = lambda path, command: sys.exit(f"it became {command}")
try:
    runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
finally:
    print("torch" in sys.modules or "transformers" in sys.modules)
"""


@pytest.mark.parametrize(("module", "words", "said"), [
    ("learner.replay.verify", ["none.tar"], "none.tar: no such file, give one that  streamrl bundle RUN"),
    ("learner.replay.verify", ["a_run"], "a_run is a directory: make the bundle of a run with  streamrl bundle a_run"),
    ("learner.replay.verify", ["records.jsonl"], "records.jsonl is no bundle: name a file that  streamrl bundle RUN"),
    ("learner.replay.verify", ["x.tar", "--level", "most"], "--level most: choose from hash"),
    ("learner.fit", ["./none"], "./none: no configuration of a model can be read there"),
    ("learner.fit", ["records.jsonl"], "records.jsonl: no configuration of a model can be read there"),
    ("learner.fit", ["qwen3-8b", "learner.num_minibatch=2"], "did you mean `learner.num_minibatches`"),
    ("learner.fit", ["qwen3-8b", "--gpus", "0"], "'0' must be a number above 0"),
    ("streamrl.cli", ["eval", "none"], "none: no such folder"),
    ("streamrl.cli", ["serve", "none@9"], "none@9: no such folder"),
    ("streamrl.cli", ["chat", "a_folder"], "a_folder holds no config.json"),
])
def test_a_mistake_is_told_before_anything_is_loaded(module, words, said, tmp_path):
    (tmp_path / "a_run").mkdir()
    (tmp_path / "a_folder").mkdir()
    (tmp_path / "a_run" / "run.json").write_text("{}")
    (tmp_path / "records.jsonl").write_text('{"prompt": "a", "answer": 1}\n')
    (tmp_path / "x.tar").write_bytes(b"")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, module, *words], cwd=tmp_path, capture_output=True, text=True, timeout=60,
        env={"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip

    assert done.returncode == 2 and said in done.stderr, done.stderr
    assert done.stdout.endswith("False\n") and "Traceback" not in done.stderr, done.stdout
