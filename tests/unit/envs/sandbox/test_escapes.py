"""Every attempt to get out, at each level that promises to stop it, with real processes."""

import os
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

from envs.sandbox import Limits, SandboxPool
from envs.sandbox import pool as pool_module
from envs.sandbox.isolation import Isolation, base_python
from envs.sandbox.pool import find_isolation, why_not
from tests.flow.processes import wait_until
from tests.unit.envs.sandbox.bubblewrap import bwrap
from tests.unit.envs.sandbox.programs import ATTEMPTS, Attempt

LIMITS = Limits(timeout_s=1.0, memory_bytes=512 << 20)
ABSTRACT = f"streamrl-sandbox-test-{os.getpid()}"


ISOLATIONS = {
    "level 1": lambda: find_isolation("1"),  # works everywhere
    "level 2": lambda: Isolation(base_python(), bubblewrap=bwrap()),
    "level 2, namespaces made by root": lambda: Isolation(base_python(), drops_root=True, bubblewrap=bwrap()),
}


@pytest.fixture(scope="module", params=ISOLATIONS)
def pool(request: pytest.FixtureRequest) -> Iterator[SandboxPool]:
    isolation = ISOLATIONS[request.param]()
    if isolation.drops_root and os.getuid() != 0:
        pytest.skip("only root can make namespaces without one for users")
    if reason := why_not(isolation):
        pytest.skip(f"NOT TESTED, escapes from {request.param}: {reason}")
    os.environ["SANDBOX_TEST_SECRET"] = "secret"
    try:
        with patch.object(pool_module, "find_isolation", lambda level: isolation):
            made = SandboxPool(num_workers=1, limits=LIMITS)
        with made:
            yield made
    finally:
        del os.environ["SANDBOX_TEST_SECRET"]


@pytest.fixture(scope="module")
def places() -> Iterator[dict[str, object]]:
    # Not below pytest's own folder, which another pytest closes again: the sandbox runs as another user.
    with (
        tempfile.TemporaryDirectory() as made, socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_UNIX) as unix,
    ):
        folder, secret = Path(made), Path(made) / "secret.txt"
        folder.chmod(0o777)
        secret.write_text("secret")
        unix.bind("\0" + ABSTRACT)
        unix.listen()
        yield {
            "port": tcp.getsockname()[1],
            "secret_file": secret,
            "secret_dir": folder,
            "pid": os.getpid(),
            "abstract": ABSTRACT,
        }


@pytest.mark.parametrize("attempt", ATTEMPTS, ids=lambda attempt: attempt.name)
def test_an_attempt_gets_nothing(attempt: Attempt, pool: SandboxPool, places: dict[str, object]) -> None:
    if pool.level not in attempt.levels:
        pytest.skip(f"level {pool.level} does not promise this")
    outcome = pool.run(_filled(attempt.program, places))[0]
    assert "ESCAPED" not in outcome.stdout, outcome
    assert not (Path(str(places["secret_dir"])) / "escaped_file").exists()
    assert _answer_of_the_next(pool) == "next\n"  # nothing of it reaches the next program


def test_at_least_thirty_attempts_meet_level_two() -> None:
    assert sum(2 in attempt.levels for attempt in ATTEMPTS) >= 30
    assert len({attempt.name for attempt in ATTEMPTS}) == len(ATTEMPTS)


DAEMON = """
import os, sys, time
for _ in range(3):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execv("/bin/sleep", ["{mark}", "{seconds}"])
        os._exit(0)
print("left")
"""


def test_what_a_program_leaves_behind_is_ended(pool: SandboxPool) -> None:
    seconds = f"{3000 + pool.level}.{os.getpid()}"
    program = DAEMON.replace("{mark}", "sleep").replace("{seconds}", seconds)
    assert pool.run(program)[0].stdout == "left\n"
    assert seconds not in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout


BOMB = """
import os
while True:
    try:
        os.fork()
    except OSError:
        pass
"""


def test_a_fork_bomb_is_ended_with_all_of_it(pool: SandboxPool) -> None:
    assert _answer_of_the_next(pool) == "next\n"
    before = _num_supervisors()
    assert pool.run(BOMB)[0].status in ("timeout", "process_limit", "lost")
    assert _answer_of_the_next(pool) == "next\n"
    # The bomb makes 64 copies of one, which the kernel ends after the answer; the pool itself keeps a few ready.
    wait_until(lambda: _num_supervisors() < before + 8, 30.0, "the copies are gone")


CROWD = """
import os, time
for _ in range(200):
    if os.fork() == 0:
        time.sleep(0.5)
        break
else:
    time.sleep(0.5)
print("all there")
"""


def test_no_level_has_room_for_a_crowd(pool: SandboxPool) -> None:
    outcome = pool.run(CROWD, case_timeout_s=60.0)[0]
    assert outcome.status in ("error", "process_limit") and "all there" not in outcome.stdout, outcome


def _answer_of_the_next(pool: SandboxPool) -> str:
    """Its time limit is long: a busy machine may take a second over a print, and this is not about speed."""
    return pool.run("print('next')", case_timeout_s=60.0)[0].stdout


def _num_supervisors() -> int:
    """Forks keep their supervisor's command line."""
    lines = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout.splitlines()
    return sum("Runs inside the sandbox" in line for line in lines)


def test_level_one_does_not_promise_what_it_cannot_hold(places: dict[str, object]) -> None:
    """The attempts are real: where nothing stops them, they get through."""
    with SandboxPool("1", num_workers=1, limits=LIMITS) as pool:
        for name in ("tcp_loopback", "abstract_socket", "read_host_file", "read_passwd", "write_host", "symlink_out"):
            (attempt,) = [attempt for attempt in ATTEMPTS if attempt.name == name]
            assert "ESCAPED" in pool.run(_filled(attempt.program, places))[0].stdout, name
    (Path(str(places["secret_dir"])) / "escaped_file").unlink()


def _filled(program: str, places: dict[str, object]) -> str:
    for name, value in places.items():
        program = program.replace("{" + name + "}", str(value))
    return program


def test_a_program_that_ends_its_supervisor_is_lost_and_the_pool_goes_on(pool: SandboxPool) -> None:
    outcome = pool.run("import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\nprint('done')", total_s=20)[0]
    assert outcome.status == "lost", outcome
    assert pool.run("print(1)")[0].stdout == "1\n"
