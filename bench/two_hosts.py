"""python -m bench.two_hosts [--partition-s 30] [--rate ""] [key=value ...]    two machines on one

Two network namespaces with a /dev/shm and directories of their own, joined by one virtual cable: the learner and an
actor on one side, an actor on the other, keys on. The cable is pulled for a while once the other side delivers, and the
time from its return to the other actor's HELLO is measured. `--rate` (as "20mbit") slows what leaves the learner
by tc. Needs `unshare` with user namespaces, `ip` and `tc`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LEARNER, OTHER, PORT = "10.77.0.1", "10.77.0.2", 5601
PATIENCE_S = 180.0
SHAPED = "tbf rate {rate} burst 64kb latency 400ms"
NAMESPACES = ["unshare", "--user", "--map-root-user", "--net", "--mount", "--fork", "--kill-child"]


def missing() -> str:
    """Why this machine cannot be two; "" if it can."""
    for tool in ("unshare", "nsenter", "ip", "tc"):
        if shutil.which(tool) is None:
            return f"there is no {tool} here"
    needed = "mount -t tmpfs tmpfs /dev/shm && ip link add name a0 type veth peer name a1 && tc qdisc add dev a0 root"
    tried = subprocess.run(
        [*NAMESPACES, "sh", "-c", f"{needed} {SHAPED.format(rate='1mbit')}"],
        capture_output=True, text=True, timeout=30,
    )
    return f"namespaces are not allowed here: {tried.stderr.strip()}" if tried.returncode else ""


class Hosts:
    """Inside the first namespace, which is the learner's host; makes the second."""

    def __init__(self, home: Path, words: list[str]) -> None:
        self.here, self.there = home / "learner", home / "other"
        self.run_dir = self.here / "run"
        for folder in (self.here, self.there):
            folder.mkdir()
        self._words = words
        self.processes: list[subprocess.Popen[bytes]] = []
        _do("mount -t tmpfs tmpfs /dev/shm")
        _do("ip link set lo up")
        ready = self.there / "ready"
        inside = f"mount -t tmpfs tmpfs /dev/shm; ip link set lo up; touch {ready}; exec sleep infinity"
        self._anchor = self._start(["unshare", "--net", "--mount", "sh", "-c", inside], self.there, "anchor")
        _until(ready.exists, "the second namespace")
        _do(f"ip link add name cable type veth peer name end netns {self._anchor.pid}")
        _do(f"ip addr add {LEARNER}/24 dev cable")
        self._there("ip", "addr", "add", f"{OTHER}/24", "dev", "end")
        self._there("ip", "link", "set", "end", "up")
        self.cable(up=True)

    def _start(self, command: list[str], folder: Path, name: str) -> subprocess.Popen[bytes]:
        with (folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=subprocess.STDOUT)
        self.processes.append(process)
        return process

    def _enter(self, *command: str) -> list[str]:
        return ["nsenter", f"--target={self._anchor.pid}", "--net", "--mount", f"--wd={self.there}", *command]

    def _there(self, *command: str) -> None:
        subprocess.run(self._enter(*command), check=True, timeout=30)

    def cable(self, *, up: bool) -> None:
        _do(f"ip link set cable {'up' if up else 'down'}")

    def slow(self, rate: str) -> None:
        """Limit what leaves the learner's host, weights above all; "" is no limit."""
        if rate:
            _do(f"tc qdisc add dev cable root {SHAPED.format(rate=rate)}")

    def start(self) -> None:
        """Keys, the learner with one actor, and the other host's actor."""
        program = [sys.executable, "-P", "-m"]
        keys = self.here / "keys"
        for words in (["new", str(keys)], ["add", str(keys), "other"]):
            command = [*program, "streamrl.cli", "keys", *words]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=60)
        key = self.there / "other.key"
        shutil.move(keys / "actors" / "other.key", key)
        self.learner = self._start([
            *program, "streamrl.cli", "launch", *self._words, f"run.dir={self.run_dir}", "launch.num_actors=1",
            f"hub.bind=tcp://{LEARNER}:{PORT}", f"hub.weights_port={PORT + 1}", f"hub.keys={keys}",
        ], self.here, "launch")
        self.actor = self._start(self._enter(
            *program, "streamrl.cli", "join", f"tcp://{LEARNER}:{PORT}", f"key={key}", "actors.actor_id=other-0",
        ), self.there, "actor")

    def status(self) -> dict[str, Any]:
        try:
            return json.loads((self.run_dir / "status.json").read_text())
        except FileNotFoundError:
            return {"actors": [], "version": -1}

    def other(self) -> tuple[str, float] | None:
        """State and tokens per second of the other host's actor, as the hub sees it."""
        return next(((state, rate) for name, state, _, rate, _ in self.status()["actors"] if name == "other-0"), None)

    def num_joins(self) -> int:
        return (self.there / "actor.log").read_text(errors="replace").count("joined run")

    def wait(self, condition: Callable[[], Any], what: str) -> float:
        """Seconds until the condition holds."""
        def look() -> Any:
            assert self.learner.poll() is None, f"the learner ended while {what} was waited for:\n{self.logs()}"
            return condition()

        return _until(look, what, self.logs)

    def logs(self) -> str:
        paths = [*self.here.glob("*.log"), *self.there.glob("*.log"), *self.run_dir.glob("logs/*.log")]
        ends = ["\n".join(path.read_text(errors="replace").splitlines()[-15:]) for path in paths]
        return "\n".join(f"--- {path}\n{end}" for path, end in zip(paths, ends, strict=True))

    def close(self) -> None:
        for process in reversed(self.processes):
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in reversed(self.processes):
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def _do(command: str) -> None:
    subprocess.run(command.split(), check=True, timeout=30)


def _until(condition: Callable[[], Any], what: str, logs: Callable[[], str] = str) -> float:
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < PATIENCE_S, f"no {what} within {PATIENCE_S:g} s\n{logs()}"
        time.sleep(0.02)
    return time.monotonic() - began


def partition(
    home: Path, words: list[str], *, partition_s: float, to_the_end: bool, rate: str
) -> dict[str, Any]:
    """One run with one partition; inside the namespaces.

    Args:
        partition_s: how long the cable is out; 0 is until the hub has given the other actor up.
    """
    hosts = Hosts(home, words)
    try:
        hosts.slow(rate)
        hosts.start()
        hosts.wait(lambda: (hosts.other() or ("", 0.0))[1] > 0, "tokens from the other host")
        before, joins = hosts.status()["version"], hosts.num_joins()
        shm = {str(path) for path in Path("/dev/shm").iterdir()}
        hosts.cable(up=False)
        began = time.monotonic()
        noticed_s = hosts.wait(lambda: hosts.other() is None, "eviction of the actor behind the cable")
        while time.monotonic() - began < partition_s:
            time.sleep(0.05)
        during = hosts.status()["version"] - before
        hosts.cable(up=True)
        out_s = time.monotonic() - began
        joined_s = hosts.wait(lambda: hosts.num_joins() > joins, "HELLO after the partition")
        hosts.wait(lambda: (hosts.other() or ("", 0.0))[1] > 0, "tokens after the partition")
        found = {
            "partition_s": round(out_s, 2), "noticed_s": round(noticed_s, 2), "joined_again_s": round(joined_s, 2),
            "steps_meanwhile": during, "shared_memory_of_the_learner": bool(shm),
        }
        if to_the_end:
            code = hosts.learner.wait(600)
            summary = json.loads((hosts.run_dir / "summary.json").read_text())
            found |= {"exit": code, "eval_score_last": summary.get("eval_score_last"), "steps": summary.get("steps"),
                      "other_exit": hosts.actor.wait(60)}
        return {**found, "evictions": hosts.status()["counters"]["num_evictions"]}
    finally:
        hosts.close()


def run(words: list[str], **options: Any) -> dict[str, Any]:
    """`partition` in namespaces of its own. Raises RuntimeError with its output if it fails."""
    command = [*NAMESPACES, sys.executable, "-m", "bench.two_hosts", "--inside", json.dumps([words, options])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    if done.returncode:
        raise RuntimeError(f"{done.stdout}\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--partition-s", type=float, default=30.0)
    parser.add_argument("--rate", default="")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    parser.add_argument("words", nargs="*", metavar="key=value")
    chosen = parser.parse_args()
    if chosen.inside is not None:
        words, options = json.loads(chosen.inside)
        with tempfile.TemporaryDirectory(prefix="two-hosts-") as home:
            print(json.dumps(partition(Path(home), words, **options)))
        return
    if why := missing():
        sys.exit(why)
    words = ["experiment=quickstart", *chosen.words]
    found = run(words, partition_s=chosen.partition_s, to_the_end=True, rate=chosen.rate)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
