"""`python -m tests.flow.fork_server DESCRIPTOR PADDING`: forks our own programs from a process that has imported them.

A run of two actors imports torch and transformers four times, which takes most of the processor time of a short one.
The parent imports them once, before there is any thread, socket of ZeroMQ or thread pool of torch, and each program
begins in a fork of it as if it were a new Python: `runpy` runs its module, in the requested environment and folder,
with the requested streams. It ends as any Python does. What is different: its parent process.
"""

import ast
import ctypes
import gc
import importlib.util
import json
import logging
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.flow.forked_process import MAX_REQUEST_BYTES, ForkedPopen, module_and_words

ROOT = Path(__file__).parents[2]
PROGRAMS = (
    "learner", "learner.hub", "learner.broadcaster", "learner.supervised", "learner.fit", "learner.replay",
    "learner.replay.at", "learner.replay.what_if", "learner.replay.verify", "learner.replay.blame",
    "learner.replay.bisect", "actors", "actors.evaluate", "actors.recorded", "actors.chat", "actors.serve",
    "actors.reward_model", "envs.catalog", "streamrl.cli", "streamrl.supervise.torchrun", "torch.distributed.run",
    "tests.fakes.lying_actor", "tests.fakes.command_line",
    "tests.unit.learner.two_ranks", "tests.unit.learner.four_ranks", "tests.unit.learner.checkpoint_forms",
)
BECOME = ("streamrl.cli", "learner.replay", "learner.replay.at", "learner.replay.what_if")
"""Programs that become another one before they have done anything."""
TORCHRUN_STARTS_BY = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"
PADDING = "." * (1 << 16)
"""An argument and a variable of the server: the room for the command lines and environments of its children."""


@contextmanager
def running(folder: Path) -> Iterator[None]:
    """Run a server that `ForkedPopen` uses; it imports meanwhile, and logs into `folder`."""
    path = folder / "fork_server.socket"
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "PADDING": PADDING,
        "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE",  # libgomp reads them once, here
    }
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener, (folder / "fork_server.log").open("wb") as log
    ):
        listener.bind(str(path))
        listener.listen(64)
        server = subprocess.Popen(
            [sys.executable, "-P", "-m", "tests.flow.fork_server", str(listener.fileno()), PADDING],
            stdin=subprocess.PIPE, stdout=log, stderr=log, pass_fds=[listener.fileno()], env=environment, cwd=ROOT,
            start_new_session=True,  # Ctrl-C is for the tests, which end it
        )
    ForkedPopen.server, ForkedPopen.programs = str(path), PROGRAMS
    try:
        yield
    finally:
        ForkedPopen.server, ForkedPopen.programs = "", ()
        server.communicate(timeout=60)


def import_programs() -> None:
    """Import what the programs' main modules import, inside functions too. They themselves are run later."""
    mains = [main_module(program) for program in PROGRAMS]
    for main in mains:
        source = importlib.util.find_spec(main).origin
        for node in ast.walk(ast.parse(Path(source).read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                importlib.import_module(node.module)
    for main in mains:  # some of them import another
        sys.modules.pop(main, None)
    sys.modules["streamrl.config.load"].load_config(["experiment=quickstart"])  # fills the tables of the words' parser
    gc.collect()
    gc.freeze()  # a collection in a child would copy every page of it


def main_module(program: str) -> str:
    """Name the module that `python -m PROGRAM` runs."""
    is_package = importlib.util.find_spec(program).submodule_search_locations is not None
    return f"{program}.__main__" if is_package else program


def serve(listener: socket.socket) -> dict[str, Any] | None:
    """Fork a child for each request and tell its exit status; returns None once standard input ends, in the children
    their request.
    """
    wake, woken = socket.socketpair()
    for end in (wake, woken):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake.fileno())
    waiting: dict[int, socket.socket] = {}
    with selectors.DefaultSelector() as selector:
        for readable in (listener, woken, sys.stdin):
            selector.register(readable, selectors.EVENT_READ)
        while True:
            ready = [key.fileobj for key, _ in selector.select()]
            if sys.stdin in ready:
                return None
            if woken in ready:
                woken.recv(4096)
                report_ended(waiting)
            if listener not in ready:
                continue
            client = listener.accept()[0]
            data, streams, _, _ = socket.recv_fds(client, MAX_REQUEST_BYTES, 3)
            if not data:  # killed meanwhile
                client.close()
                continue
            num_threads = len(os.listdir("/proc/self/task"))
            assert num_threads == 1, f"{num_threads} threads: a fork of this process could meet a lock of another one"
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for inherited in (listener, client, wake, woken, *waiting.values()):
                    inherited.close()
                return {**json.loads(data), "streams": streams}
            for stream in streams:
                os.close(stream)
            client.send(json.dumps({"pid": pid}).encode())
            waiting[pid] = client


def report_ended(waiting: dict[int, socket.socket]) -> None:
    """Tell who started it how a child ended."""
    while waiting:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        client = waiting.pop(pid)
        with suppress(OSError):  # killed, or it has forgotten its child
            client.send(json.dumps({"code": os.waitstatus_to_exitcode(status)}).encode())
        client.close()


def become(request: dict[str, Any]) -> None:
    """Make of this process what a new one would have been given."""
    if request["new_session"]:
        os.setsid()
    for number, stream in enumerate(request["streams"]):
        os.dup2(stream, number)
        os.close(stream)
    # Ours know that they wrote to a file, and would look for its end in a pipe.
    sys.stdout = open(1, "w", closefd=False)
    sys.stderr = open(2, "w", closefd=False, errors="backslashreplace", buffering=1)
    os.chdir(request["folder"])
    had = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ.clear()
    os.environ.update(request["environment"])
    now = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [path for path in now if path and path not in had]
    write_command_line(request["command"])
    write_environment(request["environment"])
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # Python's own generator does so by itself
    sys.modules["torch"].set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0))))
    ForkedPopen.server, ForkedPopen.programs = request["server"], tuple(request["programs"])
    subprocess.Popen = sys.modules[TORCHRUN_STARTS_BY].Popen = ForkedPopen
    sys.argv = [request["module"], *request["words"]]
    if request["module"] in BECOME:
        os.execv = become_program


def become_program(path: str, command: Sequence[str], *, execute: Any = os.execv) -> None:
    """Run the program that a command of `streamrl` becomes here; so far that has only begun to log."""
    os.execv, program = execute, module_and_words(command)
    if program is None:
        execute(path, command)
    module, words = program
    if module in BECOME:
        os.execv = become_program
    for name in (None, "streamrl"):
        logging.getLogger(name).handlers.clear()
    write_command_line(command)
    sys.argv = [module, *words]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    sys.exit(0)


def write_command_line(command: Sequence[str]) -> None:
    """Show this command in /proc/PID/cmdline, by which tests find processes."""
    _write(command, 45)  # arg_start and arg_end of proc(5)


def write_environment(environment: Mapping[str, str]) -> None:
    """Show these variables in /proc/PID/environ, by which some find a rank or what a killed process left."""
    _write([f"{name}={value}" for name, value in environment.items()], 47)  # env_start and env_end


def _write(words: Sequence[str], field: int) -> None:
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(fields[field]), int(fields[field + 1])
    line = b"".join(word.encode(errors="surrogateescape") + b"\0" for word in words)
    assert len(line) < end - begin, f"{len(line)} bytes of words, the fork server has room for {end - begin}"
    ctypes.memset(begin, 0, end - begin)
    ctypes.memmove(begin, line, len(line))


def main() -> None:
    listener = socket.socket(fileno=int(sys.argv[1]))
    write_command_line([sys.executable, "-m", "tests.flow.fork_server"])
    import_programs()
    request = serve(listener)
    if request is not None:
        become(request)
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
