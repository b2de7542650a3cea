"""`python -m tests.fakes.child HOW WORDS`: tells as JSON what kind of process it is, then ends as HOW says."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path


def facts() -> dict[str, object]:
    return {
        "name": __name__, "words": sys.argv[1:], "folder": os.getcwd(), "path": sys.path,
        "environment": dict(os.environ), "parent": os.getppid(),
        "shown": sorted(Path("/proc/self/environ").read_text().rstrip("\0").split("\0")),
        "leads": os.getsid(0) == os.getpid(), "command": Path("/proc/self/cmdline").read_bytes().rstrip(b"\0").decode(),
        "read": sys.stdin.read(), "wakes": signal.set_wakeup_fd(-1), "children": repr(signal.getsignal(signal.SIGCHLD)),
        "threads": len(os.listdir("/proc/self/task")),
    }


def main() -> int:
    how = sys.argv[1]
    print(json.dumps(facts()), flush=True)
    print("its error output", file=sys.stderr)
    if how == "raise":
        raise LookupError("by an exception")
    if how == "killed":
        os.kill(os.getpid(), signal.SIGTERM)
    if how == "child":
        return subprocess.Popen([sys.executable, "-m", "tests.fakes.child", "3"], stdin=subprocess.DEVNULL).wait()
    return int(how)


if __name__ == "__main__":
    sys.exit(main())
