"""A confined process computes and reads; the kernel refuses it everything that would leave a mark. Real processes."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

WORKER = """
import sys
from envs.sandbox.confined import serve

def prepare(question):
    if question == "broken":
        raise ValueError("no such question")
    return lambda: eval(question)

serve(prepare, 1.0)
"""

Ask = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="module")
def worker() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        yield process
        process.kill()


@pytest.fixture
def ask(worker: subprocess.Popen[str]) -> Ask:
    def one(question: str) -> dict[str, Any]:
        assert worker.stdin is not None and worker.stdout is not None
        worker.stdin.write(json.dumps(question) + "\n")
        worker.stdin.flush()
        return json.loads(worker.stdout.readline())

    return one


@pytest.mark.parametrize(
    "call",
    [
        "open({mark!r}, 'w')", "open({mark!r}, 'x')", "open({kept!r}, 'a')", "open({kept!r}, 'r+')",
        "__import__('os').open({mark!r}, 64)", "__import__('os').mkdir({mark!r})", "__import__('os').unlink({kept!r})",
        "__import__('os').rename({kept!r}, {mark!r})", "__import__('os').symlink({kept!r}, {mark!r})",
        "__import__('os').link({kept!r}, {mark!r})", "__import__('os').truncate({kept!r}, 0)",
        "__import__('os').chmod({kept!r}, 0)", "__import__('os').utime({kept!r})", "__import__('os').mkfifo({mark!r})",
        "__import__('os').setxattr({kept!r}, 'user.a', b'1')", "__import__('os').fork()",
        "__import__('os').posix_spawn('/bin/true', ['true'], {{}})", "__import__('os').execv('/bin/true', ['true'])",
        "__import__('os').kill({pid}, 0)", "__import__('os').pidfd_open({pid})", "__import__('os').nice(1)",
        "__import__('socket').socket()", "__import__('socket').socketpair()", "__import__('os').chdir('/')",
        "__import__('os').memfd_create('a')", "__import__('threading').Thread(target=print).start()",
        "__import__('resource').prlimit({pid}, 7)", "__import__('signal').setitimer(0, 1)",
    ],
)  # fmt: skip
def test_what_would_leave_a_mark_is_refused(
    call: str, ask: Ask, worker: subprocess.Popen[str], tmp_path: Path
) -> None:
    kept, mark = tmp_path / "kept", tmp_path / "mark"
    kept.write_text("as it was")
    before = kept.stat()

    answer = ask(call.format(mark=str(mark), kept=str(kept), pid=worker.pid))

    assert "not permitted" in answer["failed"] or "can't start new thread" in answer["failed"], answer
    assert kept.read_text() == "as it was" and not mark.exists()
    assert (kept.stat().st_mode, kept.stat().st_mtime_ns) == (before.st_mode, before.st_mtime_ns)


def test_it_computes_and_reads(ask: Ask, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    assert ask("6 * 7") == {"value": 42}
    assert ask(f"open({str(tmp_path / 'file')!r}).read()") == {"value": "text"}
    assert ask("__import__('colorsys').__name__") == {"value": "colorsys"}


@pytest.mark.parametrize(
    ("question", "why"),
    [
        ("9**9**9**9", "longer than 1 s"), ("[0] * 10**10", "MemoryError"), ("exit()", "SystemExit"),
        ("__import__('os')._exit(0)", "ended its process"), ("__import__('ctypes').string_at(0)", "ended its process"),
        ("'x' * 10**8", "ended its process"), ("1 / 0", "ZeroDivisionError"), ("(" * 9000, "Error"),
        ("object()", "ended its process"),
    ],
)  # fmt: skip
def test_what_ends_or_holds_up_a_grader_costs_its_own_answer_only(ask: Ask, question: str, why: str) -> None:
    assert why in ask(question)["failed"]
    assert ask("6 * 7") == {"value": 42}


def test_a_question_that_cannot_be_prepared_is_no_fault_of_the_answer(ask: Ask) -> None:
    assert ask("broken") == {"broken": "ValueError: no such question"}


def test_a_grader_dies_with_its_worker(worker: subprocess.Popen[str], ask: Ask) -> None:
    """The last test: it ends the worker."""
    assert ask("1") == {"value": 1}
    (grader,) = psutil.Process(worker.pid).children()
    worker.kill()
    grader.wait(20)
