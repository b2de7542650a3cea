"""The wheel, installed in an empty environment, trains from an empty directory: `make package-test`.

Nothing of the checkout is on the import path. The second directory holds folders with the names of our packages, as a
user's project may: none may shadow ours, neither in a command nor in a script.
"""

import os
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

from tests.package.build import ROOT, build

SCRIPT = """
import streamrl

summary = streamrl.train(experiment="quickstart", overrides={words})
run = streamrl.load_run(summary.extra["run_dir"])
print("steps", summary.steps, "score", run.evaluations[-1]["score"])
"""
SHORT = ["trainer.num_steps=5"]
SHORTER = ["trainer.num_steps=2", "eval.num_samples=8", "policy.tiny.num_warm_start_steps=20"]


def environment(folder: Path) -> dict[str, str]:
    """A user's: the new environment first on the path, nothing of ours in it."""
    kept = {key: value for key, value in os.environ.items()
            if not key.startswith(("PYTHON", "MAKE", "STREAMRL", "VIRTUAL_ENV"))}
    return {**kept, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def shell(words: list[str], where: Path, variables: dict[str, str], timeout_s: float = 600) -> str:
    """Run it, show its end and time, and return what it printed."""
    started = time.monotonic()
    print(f"$ {' '.join(words)}", flush=True)
    done = subprocess.run(words, cwd=where, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          timeout=timeout_s, stdin=subprocess.DEVNULL)
    print("".join(f"    {line}\n" for line in done.stdout.splitlines()[-12:]), end="")
    print(f"    status {done.returncode} after {time.monotonic() - started:.1f} s", flush=True)
    if done.returncode:
        raise SystemExit(f"failed: {' '.join(words)}")
    return done.stdout


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="streamrl-package-test-") as scratch:
        folder = Path(scratch)
        made = build(folder / "build", isolated=True)
        print(f"{made.wheel.name}: {len(made.wheel_files())} files, {made.sdist.name}: {len(made.sdist_files())} files")
        venv.create(folder / "venv", with_pip=True)
        variables = environment(folder / "venv")
        constraints = ["-c", str(ROOT / "constraints/cpu.txt")]
        install = ["python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *constraints]
        shell([*install, str(made.wheel)], folder, variables)

        empty = folder / "empty"
        empty.mkdir()
        shell(["streamrl", "launch", "experiment=quickstart", *SHORT], empty, variables)
        assert sorted(path.name for path in empty.iterdir()) == ["models", "runs"], list(empty.iterdir())
        assert (empty / "runs/quickstart-001/report.html").stat().st_size > 0

        mine = folder / "mine"
        for name in ("actors", "configs", "envs", "learner"):
            (mine / name).mkdir(parents=True)
            (mine / name / "__init__.py").write_text("raise SystemExit('a folder of the user shadows the package')\n")
        shell(["streamrl", "launch", "experiment=quickstart", *SHORTER], mine, variables)
        (mine / "train.py").write_text(SCRIPT.format(words=SHORTER))
        assert "steps 2 score" in shell(["python", "train.py"], mine, variables)
        shell(["streamrl", "launch", "-m", "experiment=quickstart", "staleness.eta=0,1", *SHORTER], mine, variables)
    print("package-test: passed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
