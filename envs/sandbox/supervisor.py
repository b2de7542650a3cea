"""Runs inside the sandbox, as the text of `python -c`: takes one request, runs its program once for each input.

    parent --request--> supervisor --fork--> program          one supervisor serves one request, then it ends
           <-answer---             --kill--> all descendants

With a `command` in its settings it is no sandbox: it runs that command line, as this user, until it or standard input
ends, kills all that descends from it, and answers with its status and the end of what it wrote.

Standard library only, and nothing of ours: inside a sandbox there is no streamrl. Answers go out through a descriptor
that programs do not have. The supervisor is not dumpable, so that a program of the same user can neither trace it nor
open its descriptors.
"""

import atexit
import ctypes
import fcntl
import json
import os
import resource
import select
import signal
import site
import struct
import sys
import time

MEMORY_CHECK_S = 0.05
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 36, 38
COMPILE_ERROR, RUNTIME_ERROR = b"c", b"r"
_libc = ctypes.CDLL(None, use_errno=True)


def main():
    settings = json.loads(sys.argv[1])
    if "command" in settings:
        os.write(1, json.dumps(run_command(settings["command"], settings["tail_bytes"])).encode())
        return
    answers = os.dup(1)
    requests = os.dup(0)
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.close(null)
    confine(settings["uid"])
    write_frame(answers, {"ready": True})
    request = read_frame(requests)
    os.close(requests)
    for number, case in enumerate(request["cases"]):
        write_frame(answers, run_case(request, case, settings["work"], number))


def confine(uid):
    """Give up every privilege, for good; die with the parent; adopt what programs leave behind."""
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # after setresuid, which clears it
    prctl(PR_SET_DUMPABLE, 0)
    prctl(PR_SET_CHILD_SUBREAPER, 1)


def prctl(option, value):
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def run_case(request, case, work, number):
    limits = request["limits"]
    directory = os.path.join(work, str(number))
    os.mkdir(directory, 0o700)
    stdin = in_memory("stdin", case.get("stdin", "").encode())
    value = in_memory("value", b"")
    out_read, out_write = os.pipe()
    err_read, err_write = os.pipe()
    status_read, status_write = os.pipe()
    start = time.monotonic()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        kept = [fcntl.fcntl(fd, fcntl.F_DUPFD, 64) for fd in (stdin, out_write, err_write, status_write, value)]
        for place, fd in enumerate(kept):
            os.dup2(fd, place)
        os.closerange(len(kept), 1 << 12)
        run_program(request["program"], case.get("call"), directory, limits)
    for fd in (out_write, err_write, status_write, stdin):
        os.close(fd)
    texts, ended = collect(pid, out_read, err_read, start + limits["timeout_s"], limits)
    exit_status = kill_all(pid)
    answer = {
        "status": outcome(ended, exit_status, os.read(status_read, 1)),
        "stdout": texts[out_read].decode(errors="replace"),
        "stderr": texts[err_read].decode(errors="replace"),
        "exit_status": exit_status,
        "seconds": time.monotonic() - start,
        "value": os.pread(value, limits["output_bytes"], 0).decode(errors="replace") or None,
    }
    for fd in (out_read, err_read, status_read, value):
        os.close(fd)
    return answer


def run_command(words, tail_bytes):
    """Run a command line; its standard input is empty, and the end of this one's ends it."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    texts = {}
    (out_read, out_write), (err_read, err_write) = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()  # what it does to its own group is not done to this process
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            for place, fd in enumerate((os.open(os.devnull, os.O_RDONLY), out_write, err_write)):
                os.dup2(fd, place)
            for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them
                signal.signal(number, signal.SIG_DFL)
            os.execvp(words[0], words)
        except OSError as error:
            os.write(2, str(error).encode())
        finally:
            os._exit(127)
    os.close(out_write)
    os.close(err_write)
    exited, poller = os.pidfd_open(pid), select.poll()
    for fd in (exited, 0, out_read, err_read):
        poller.register(fd, select.POLLIN)
    for fd in (out_read, err_read):
        texts[fd] = b""
        os.set_blocking(fd, False)
    ready = set()
    while not ready & {exited, 0}:
        ready = {fd for fd, _ in poller.poll()}
        for fd in ready & set(texts):
            if not read_tail(fd, texts, tail_bytes):
                poller.unregister(fd)
    status = kill_all(pid)
    while any([read_tail(fd, texts, tail_bytes) for fd in texts]):
        pass  # what its pipes still hold
    return {"status": status, "out": texts[out_read].decode(errors="replace"),
            "err": texts[err_read].decode(errors="replace")}


def read_tail(fd, texts, tail_bytes):
    """Read once, and keep the end of all that was read; False if nothing is there."""
    try:
        chunk = os.read(fd, 1 << 16)
    except BlockingIOError:
        return False
    texts[fd] = (texts[fd] + chunk)[-tail_bytes:]
    return bool(chunk)


def outcome(ended, exit_status, word):
    if ended != "ok":
        return ended
    if word == COMPILE_ERROR:
        return "compile_error"
    return "error" if word == RUNTIME_ERROR or exit_status != 0 else "ok"


def run_program(program, call, directory, limits):
    """Run the program in the forked process: never returns."""
    status, names = 0, {}
    try:
        os.chdir(directory)
        apply(limits)
        if hasattr(sys, "set_int_max_str_digits"):  # of Python 3.11; the time limit holds for long numbers, too
            sys.set_int_max_str_digits(0)
        prctl(PR_SET_DUMPABLE, 1)  # so that the supervisor may read how much memory it takes
        for number in (signal.SIGPIPE, signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        sys.stdin = sys.__stdin__ = os.fdopen(0)
        sys.stdout = sys.__stdout__ = os.fdopen(1, "w")
        sys.stderr = sys.__stderr__ = os.fdopen(2, "w")
        sys.argv = ["program.py"]
        site.setquit()  # -S leaves exit() and quit() out
        module = sys.modules["__main__"] = type(sys)("__main__")  # where pickle and multiprocessing look names up
        names = module.__dict__
        names.update(__file__="program.py", __builtins__=__builtins__)
        try:
            code = compile(program, "program.py", "exec")
        except (SyntaxError, ValueError) as error:
            os.write(3, COMPILE_ERROR)
            sys.stderr.write(f"{type(error).__name__}: {error}\n")
            raise SystemExit(1) from None
        exec(code, names)
        if call is not None:
            result = target(names, call["name"])(*map(json_or_text, call["arguments"]))
            write_all(4, json.dumps(result).encode())
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        status = 1  # first: the program may have closed descriptor 3
        os.write(3, RUNTIME_ERROR)
        import traceback

        traceback.print_exc(limit=-3)
    finally:
        try:
            end_as_python_does(names)
        except BaseException:
            status = status or 1
        os._exit(status & 0xFF)


def end_as_python_does(names):
    """Wait for the program's threads, call what it has left to the end, and write what its files still hold."""
    if "threading" in sys.modules:
        sys.modules["threading"]._shutdown()
    atexit._run_exitfuncs()
    flush(sys.stdout, sys.stderr)
    names.clear()  # only now, for their code reads names: a file that nobody else holds is closed
    flush(sys.__stdout__, sys.__stderr__)


def flush(*files):
    for file in files:
        if file is not None and not getattr(file, "closed", False):
            file.flush()


def json_or_text(text):
    try:
        return json.loads(text)
    except ValueError:
        return text


def target(names, name):
    if name in names:
        return names[name]
    return getattr(names["Solution"](), name)


def apply(limits):
    seconds = int(limits["timeout_s"]) + 2
    for kind, value in (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_AS, limits["memory_bytes"]),
        (resource.RLIMIT_FSIZE, limits["file_bytes"]),
        (resource.RLIMIT_NOFILE, limits["num_files"]),
        (resource.RLIMIT_NPROC, limits["num_processes"]),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def collect(pid, out_read, err_read, deadline, limits):
    """Read both pipes until the program ended, its time is over, or it printed, took or started too much."""
    texts, limit, check_at = {out_read: b"", err_read: b""}, limits["output_bytes"], time.monotonic() + MEMORY_CHECK_S
    exited = os.pidfd_open(pid)
    poller = select.poll()
    poller.register(exited, select.POLLIN)
    for fd in texts:
        os.set_blocking(fd, False)
        poller.register(fd, select.POLLIN)
    ended = ""
    while not ended:
        now = time.monotonic()
        left = deadline - now
        ready = [fd for fd, _ in poller.poll(max(0, min(left, check_at - now) * 1000))]
        if exited in ready:
            ended = "ok"
        elif left <= 0:
            ended = "timeout"
        elif now >= check_at:
            check_at = now + MEMORY_CHECK_S
            under = descendants()
            if len(under) > limits["num_processes"]:  # the kernel's own limit does not hold for processes of root
                ended = "process_limit"
            elif sum(map(memory_of, under)) > limits["memory_bytes"]:
                ended = "memory_limit"
        for fd in texts:
            if (fd in ready or ended) and not read_some(fd, texts, limit):
                poller.register(fd, 0)  # closed on the other side
        if sum(map(len, texts.values())) > limit:
            ended = "output_limit"
    os.close(exited)
    return {fd: text[:limit] for fd, text in texts.items()}, ended


def read_some(fd, texts, limit):
    """Take what is there, a little more than the limit at most; False at the end of the pipe."""
    while sum(map(len, texts.values())) <= limit:
        try:
            chunk = os.read(fd, 1 << 16)
        except BlockingIOError:
            return True
        if not chunk:
            return False
        texts[fd] += chunk
    return True


def kill_all(pid):
    """End the program and everything that descends from it; returns the program's exit status.

    A descendant whose parent died becomes a child of this process (it is the subreaper). All are stopped before any is
    killed, because each place that a fork bomb loses would be taken by the next fork.
    """
    exit_status, deadline = 0, time.monotonic() + 1.0
    while time.monotonic() < deadline:
        stopped = set()
        while new := descendants() - stopped:
            signal_all(new, signal.SIGSTOP)
            stopped |= new
        signal_all(stopped, signal.SIGKILL)
        try:
            reaped, status = os.waitpid(-1, 0)
            while reaped:
                if reaped == pid:
                    exit_status = os.waitstatus_to_exitcode(status)
                reaped, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return exit_status
    os._exit(1)  # the parent ends what is left together with this sandbox


def signal_all(pids, number):
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass


def descendants():
    """Processes under this one; those that ended meanwhile may be missing."""
    found, waiting = set(), [os.getpid()]
    while waiting:
        pid = waiting.pop()
        try:
            for thread in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{thread}/children") as file:
                    waiting += [int(word) for word in file.read().split()]
        except OSError:
            continue
        found.add(pid)
    return found - {os.getpid()}


def memory_of(pid):
    """Bytes of memory that a process takes; what it shares with others is divided by them."""
    try:
        with open(f"/proc/{pid}/smaps_rollup") as file:
            return next(int(line.split()[1]) << 10 for line in file if line.startswith("Pss:"))
    except (OSError, StopIteration):
        return 0  # it has ended


def in_memory(name, data):
    fd = os.memfd_create(name)
    write_all(fd, data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def write_frame(fd, message):
    data = json.dumps(message).encode()
    write_all(fd, struct.pack("<I", len(data)) + data)


def write_all(fd, data):
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def read_frame(fd):
    (size,) = struct.unpack("<I", read_exactly(fd, 4))
    return json.loads(read_exactly(fd, size))


def read_exactly(fd, size):
    data = b""
    while len(data) < size:
        chunk = os.read(fd, size - len(data))
        if not chunk:
            os._exit(0)
        data += chunk
    return data


if __name__ == "__main__":
    main()
