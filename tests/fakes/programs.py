"""Small programs in place of `streamrl learner` and `streamrl actor`, for tests of what starts them.

Programs are started by module name, so packages of these names in the first directory of PYTHONPATH are started
instead. Files in the working directory tell them what to do.
"""

from pathlib import Path

LEARNER = """
import os, signal, sys, time
from pathlib import Path

if sys.argv[1:2] == ["--check"]:
    sys.exit(0)
here = Path.cwd()
if sys.argv[1:2] == ["--standby"]:
    (here / "stands-by").touch()
    if not sys.stdin.read(1):
        sys.exit(0)
rank = int(os.environ.get("RANK", "0"))
(here / f"learner-{rank}").write_text(" ".join([*sys.argv[1:], f"GPUS={os.environ.get('CUDA_VISIBLE_DEVICES')}"]))
(here / f"openmp-{os.getpid()}").write_text(os.environ.get("OMP_WAIT_POLICY", ""))
if (here / "stubborn").exists():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    run = Path(next(word for word in sys.argv if word.startswith("run.dir=")).removeprefix("run.dir="))
    if has_hub := (here / "hub-runs").exists():
        (run / "hub.json").write_text('{"connect": "tcp://127.0.0.1:1", "pid": %d}' % os.getpid())
    os.kill(os.getppid(), signal.SIGINT)
    time.sleep(2 if has_hub else 6)  # ended by force long before, or not at all
    (here / "survived").touch()
if (here / "hub-please").exists() and rank == 0:
    run = Path(next(word for word in sys.argv if word.startswith("run.dir=")).removeprefix("run.dir="))
    draft, life = here / "hub.draft", len(list(here.glob("life-*")))
    moved = life if (here / "moves").exists() else 0
    draft.write_text('{"connect": "tcp://127.0.0.1:%d"}' % (1 + moved))
    draft.rename(run / "hub.json")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    if (here / "patient").exists():
        time.sleep(1.0)
    wanted = int((here / "hub-please").read_text()) + moved
    deadline = time.monotonic() + 30
    while (here / "awaits-standby").exists() and not (here / "stands-by").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    while len(list(here.glob("actor-*"))) < wanted and time.monotonic() < deadline:
        time.sleep(0.02)
    (here / f"life-{life}").write_text(" ".join(sys.argv[1:]))
    if (here / "saves").exists():
        (run / "LATEST").write_text(f"ckpt-{life}")
    if (here / "lethal").exists() and life < int((here / "lethal").read_text()):
        os.kill(os.getpid(), signal.SIGKILL)
"""
SCORED_LEARNER = """
import json, os, signal, sys, time
from pathlib import Path

from streamrl.metrics.run_record import read_metrics
from streamrl.metrics.summary import summarize

words = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
score = float(words["policy.optimizer.lr"])
if sys.argv[1:2] == ["--check"]:
    sys.exit(0)
if score == 13.0:
    (Path(words["run.dir"]) / "LATEST").touch()  # as if it had saved a checkpoint
    print("RuntimeError: the reason of the failure")
    sys.exit(1)
run = Path(words["run.dir"])
stopped = []
signal.signal(signal.SIGTERM, lambda *_: stopped.append("stopped: SIGTERM"))
(run / "EPOCH").write_text("1")
(run / "environment.json").write_text(json.dumps({
    name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
}))
with open(run / "metrics.jsonl", "w") as rows:
    for step in (10, 20):
        print(json.dumps({"step": step, "eval/score": score * step, "eval/version": step}), file=rows, flush=True)
holds = Path("hold-below")
deadline = time.monotonic() + 60
while holds.exists() and score < float(holds.read_text()) and not stopped and time.monotonic() < deadline:
    time.sleep(0.05)
summarize(read_metrics(run / "metrics.jsonl"), run_id="id", run=run.name, max_lag_bound=3, device="cpu",
          dtype="float32", seed=1, stopped=" ".join(stopped)).write(run / "summary.json")
"""
"""Its evaluations are `policy.optimizer.lr` times 10 and 20. A rate below the number in the file `hold-below` makes the
run go on until it is stopped; a rate of 13 makes it fail."""

ACTORS = """
import os, signal, sys
from pathlib import Path

here = Path.cwd()
draft = here / f"draft-{os.getpid()}"
draft.write_text(" ".join([*sys.argv[1:], f"GPUS={os.environ.get('CUDA_VISIBLE_DEVICES')}"]))
(here / f"openmp-{os.getpid()}").write_text(os.environ.get("OMP_WAIT_POLICY", ""))
draft.rename(here / f"actor-{os.getpid()}")
if (here / "mortal").exists():
    print("RuntimeError: the reason of the death", file=sys.stderr)
    sys.exit(int((here / "mortal").read_text() or "1"))
sys.stdin.read()
"""


def write_programs(directory: Path, learner: str = LEARNER) -> None:
    """Put both packages into the directory."""
    for name, program in (("learner", learner), ("actors", ACTORS)):
        (directory / name).mkdir()
        (directory / name / "__init__.py").touch()  # a package without it yields to the real one on PYTHONPATH
        (directory / name / "__main__.py").write_text(program)
