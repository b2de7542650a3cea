"""Small programs in place of `streamrl learner` and `streamrl actor`, for tests of what starts them.

Programs are started by module name, so packages of these names in the first directory of PYTHONPATH are started
instead. Files in the working directory tell them what to do.
"""

from __future__ import annotations

from pathlib import Path

LEARNER = """
import os, signal, sys, time
from pathlib import Path

if sys.argv[1:2] == ["--check"]:
    sys.exit(0)
here = Path.cwd()
rank = int(os.environ.get("RANK", "0"))
(here / f"learner-{rank}").write_text(" ".join(sys.argv[1:]))
if (here / "stubborn").exists():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.kill(os.getppid(), signal.SIGINT)
    time.sleep(6)  # ended by force long before, or not at all
    (here / "survived").touch()
if (here / "hub-please").exists() and rank == 0:
    run = Path(next(word for word in sys.argv if word.startswith("run.dir=")).removeprefix("run.dir="))
    draft = here / "hub.draft"
    draft.write_text('{"connect": "tcp://127.0.0.1:1"}')
    draft.rename(run / "hub.json")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    if (here / "patient").exists():
        time.sleep(1.0)
    wanted = int((here / "hub-please").read_text())
    deadline = time.monotonic() + 30
    while len(list(here.glob("actor-*"))) < wanted and time.monotonic() < deadline:
        time.sleep(0.02)
"""
ACTORS = """
import os, sys
from pathlib import Path

here = Path.cwd()
draft = here / f"draft-{os.getpid()}"
draft.write_text(" ".join(sys.argv[1:]))
draft.rename(here / f"actor-{os.getpid()}")
if (here / "mortal").exists():
    print("RuntimeError: the reason of the death", file=sys.stderr)
    sys.exit(int((here / "mortal").read_text() or "1"))
sys.stdin.read()
"""


def write_programs(directory: Path) -> None:
    """Put both packages into the directory."""
    for name, program in (("learner", LEARNER), ("actors", ACTORS)):
        (directory / name).mkdir()
        (directory / name / "__init__.py").touch()  # a package without it yields to the real one on PYTHONPATH
        (directory / name / "__main__.py").write_text(program)
