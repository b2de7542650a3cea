import json
import subprocess
import sys

import pytest


@pytest.mark.timeout(300)
def test_hundreds_of_interrupted_publishes_never_serve_a_torn_or_mixed_version(python_env):
    """Real processes, really killed; `python -m bench.weights --interrupt 10000` does many more."""
    command = [sys.executable, "-m", "bench.interrupts", "--count", "300", "--seed", "3"]

    done = subprocess.run(command, env=python_env, capture_output=True, text=True, timeout=280)

    assert done.returncode in (0, 1), done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["broken"] == []
    for met in ("an unfinished file refused", "shm beside a writer whole", "zmq full from a dying server refused",
                "zmq delta from a dying server refused", "zmq full from a stumbling server whole",
                "a dying reader served nothing"):  # fmt: skip
        assert found["outcomes"].get(met, 0) > 0, f"no round ended with {met}: nothing was shown"
