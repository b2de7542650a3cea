"""The answers of a pool: outputs, errors, values, limits, many at once."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from envs.sandbox import Call, Case, Limits, SandboxPool
from envs.sandbox.pool import find_isolation
from streamrl.errors import TaskError


def _supervisors() -> set[int]:
    me = psutil.Process()
    return {child.pid for child in me.children(recursive=True) if child.status() != psutil.STATUS_ZOMBIE}


def test_a_closed_pool_says_so_and_leaves_no_process() -> None:
    before = _supervisors()
    made = SandboxPool("1", num_workers=1)
    made.run("print(1)")
    made.close()
    with pytest.raises(TaskError, match="closed"):
        made.run("print(1)")
    assert not _supervisors() - before


@pytest.fixture(scope="module")
def pool() -> Iterator[SandboxPool]:
    with SandboxPool("auto", num_workers=2, limits=Limits(timeout_s=2.0, output_bytes=4096)) as made:
        yield made


def test_each_case_reads_its_own_input(pool: SandboxPool) -> None:
    outcomes = pool.run("print(int(input()) * 2)", [Case("3"), Case("x"), Case("5")])
    assert [outcome.stdout for outcome in outcomes] == ["6\n", "", "10\n"]
    assert [outcome.status for outcome in outcomes] == ["ok", "error", "ok"]
    assert "ValueError" in outcomes[1].stderr


def test_a_function_or_a_method_of_solution_is_called(pool: SandboxPool) -> None:
    by_name = pool.run("def add(a, b):\n    return [a + b]", [Case(call=Call("add", ("1", "2")))])[0]
    of_class = pool.run("class Solution:\n    def f(self, x): return x * 2", [Case(call=Call("f", ("ab",)))])[0]
    missing = pool.run("x = 1", [Case(call=Call("f"))])[0]
    assert json.loads(by_name.value or "") == [3]
    assert json.loads(of_class.value or "") == "abab"
    assert missing.status == "error" and missing.value is None


@pytest.mark.parametrize("program", [
    "print(42)\nexit()", "def f():\n    print(42)\n    quit(0)\nf()",
    "import threading as t\nt.Thread(target=lambda: t.main_thread().join() or print(42)).start()",
    "import threading as t\nt.Thread(target=t.Event().wait, daemon=True).start()\nprint(42)",
    "import atexit\natexit.register(print, 42)",
    "import atexit, io, sys\nsys.stdout = held = io.StringIO()\n"
    "atexit.register(lambda: sys.__stdout__.write(held.getvalue()))\nprint(42)",
    "import io, os, sys\nclass Fast(io.StringIO):\n    def flush(self): os.write(1, self.getvalue().encode())\n"
    "sys.stdout = Fast()\nprint(42)",
    "out = open(1, 'w')\nout.write('42\\n')", "import sys\nsys.__stdout__.write('42\\n')",
    "print(42)\nimport sys\nsys.stdout.close()", "class A:\n    def __del__(self): print(42)\na = A()",
    "def f(x): return x + 1\nfrom multiprocessing import Pool\nprint(*Pool(1).map(f, [41]))",
    "import pickle\nclass A: x = 42\nprint(pickle.loads(pickle.dumps(A())).x)",
    "import os\nprint(42 if os.path.basename(__file__) == 'program.py' else 0)",
])
def test_a_program_ends_as_one_of_python_does(pool: SandboxPool, program: str) -> None:
    outcome = pool.run(program)[0]
    assert (outcome.status, outcome.stdout) == ("ok", "42\n"), outcome.stderr


@pytest.mark.parametrize(
    ("program", "status"),
    [
        ("def f(:", "compile_error"),
        ("x\0y", "compile_error"),
        ("1 / 0", "error"),
        ("import os\nos.closerange(3, 9)\n1 / 0", "error"),
        ("exit('why')", "error"),
        ("raise SystemExit(3)", "error"),
        ("raise SystemExit", "ok"),
        ("import os; os._exit(7)", "error"),
        ("import os; os.abort()", "error"),
        ("while True: pass", "timeout"),
        ("print('x' * 100_000)", "output_limit"),
        ("import ctypes; ctypes.string_at(0)", "error"),
        ("import sys; sys.stdout.buffer.write(b'\\xff')", "ok"),
        ("import os; os.close(0); os.close(2)", "ok"),
    ],
)
def test_status_of(pool: SandboxPool, program: str, status: str) -> None:
    assert pool.run(program)[0].status == status


def test_cases_share_nothing(pool: SandboxPool) -> None:
    program = "import os\nprint(os.path.exists('f'), len(os.listdir('.')))\nopen('f', 'w').write('x')"
    assert [outcome.stdout for outcome in pool.run(program, [Case(), Case()])] == ["False 0\n", "False 0\n"]


def test_the_total_time_ends_a_program_between_its_cases(pool: SandboxPool) -> None:
    outcomes = pool.run("import time; time.sleep(0.6)", [Case()] * 50, total_s=1.0)
    assert 1 <= len(outcomes) < 4
    assert outcomes[-1].status == "timeout"


def test_programs_of_many_threads_run_and_their_answers_are_theirs(pool: SandboxPool) -> None:
    with ThreadPoolExecutor(8) as callers:
        texts = list(callers.map(lambda n: pool.run(f"print({n})")[0].stdout, range(24)))
    assert texts == [f"{n}\n" for n in range(24)]


def test_a_level_that_is_none_is_refused() -> None:
    with pytest.raises(TaskError, match="auto, 1, 2"):
        SandboxPool("3")


def test_without_bubblewrap_level_two_is_refused_and_auto_is_level_one(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    find = find_isolation.__wrapped__  # without its memory of what was found with another path
    with pytest.raises(TaskError, match="bwrap is not installed. Level 2 needs the package bubblewrap"):
        find("2")
    assert find("auto").level == 1


def test_a_bubblewrap_that_may_not_make_namespaces_is_refused_with_its_own_words(monkeypatch, tmp_path) -> None:
    bwrap = tmp_path / "bwrap"
    bwrap.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    bwrap.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    find = find_isolation.__wrapped__
    with pytest.raises(TaskError, match="level 2: bwrap: No permissions to create new namespace"):
        find("2")
    assert find("auto").level == 1
