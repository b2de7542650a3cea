"""python -m bench.two_hosts [--partition-s 30] [--one-sided] [--rate ""] [key=value ...]    two machines on one

Two network namespaces with a host name, a /dev/shm and directories of their own, joined by one virtual cable; neither
sees the other's run directory. Each has a learner rank (torchrun, FSDP2, gloo over the cable) and an actor, keys on;
with `--one-sided` the whole learner is on the first. The cable is pulled for a while once the other side delivers, and
the times from its return to the other actor's HELLO and to the next trained step are measured. `--rate` (as "20mbit")
slows what leaves the learner by tc. Needs `unshare` with user namespaces, `ip` and `tc`.
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
RENDEZVOUS_PORT = 29500
STEPS_BEFORE = 5
"""Trained before the cable is pulled."""
WAITS_FOR_A_RANK = "learner.rank_silent_s=35"
"""With less than the partition the group ends and starts again from its checkpoint."""
PATIENCE_S = 300.0
SHAPED = "tbf rate {rate} burst 64kb latency 400ms"
NAMESPACES = ["unshare", "--user", "--map-root-user", "--net", "--mount", "--uts", "--fork", "--kill-child"]


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
    """Runs inside the first namespace, the learner's host; makes the second."""

    def __init__(self, home: Path, words: list[str], *, one_sided: bool) -> None:
        self.here, self.there = home / "learner", home / "other"
        self.run_dir = self.here / "run"
        for folder in (self.here, self.there):
            folder.mkdir()
        self._words, self._one_sided = words, one_sided
        self.processes: list[subprocess.Popen[bytes]] = []
        _do("mount -t tmpfs tmpfs /dev/shm")
        _do("ip link set lo up")
        _do("hostname learner")
        ready = self.there / "ready"
        inside = (
            f"hostname other; mount -t tmpfs tmpfs /dev/shm; mount -t tmpfs tmpfs {self.here}; ip link set lo up; "
            f"touch {ready}; exec sleep infinity"
        )
        self._anchor = self._start(["unshare", "--net", "--mount", "--uts", "sh", "-c", inside], self.there, "anchor")
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
        spaces = ["--net", "--mount", "--uts", f"--wdns={self.there}"]
        return ["nsenter", f"--target={self._anchor.pid}", *spaces, *command]

    def _there(self, *command: str) -> None:
        subprocess.run(self._enter(*command), check=True, timeout=30)

    def cable(self, *, up: bool) -> None:
        _do(f"ip link set cable {'up' if up else 'down'}")

    def slow(self, rate: str) -> None:
        """Limit what leaves the learner's host, weights above all; "" is no limit."""
        if rate:
            _do(f"tc qdisc add dev cable root {SHAPED.format(rate=rate)}")

    def start(self) -> None:
        """Keys, the learner, and an actor on each host."""
        program = [sys.executable, "-P", "-m"]
        keys = self.here / "keys"
        for words in (["new", str(keys)], ["add", str(keys), "near"], ["add", str(keys), "other"]):
            command = [*program, "streamrl.cli", "keys", *words]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=60)
        key = self.there / "other.key"
        shutil.move(keys / "actors" / "other.key", key)
        join = [*program, "streamrl.cli", "join", f"tcp://{LEARNER}:{PORT}"]
        if self._one_sided:
            self.ranks = [self._start([*program, "streamrl.cli", "launch", *self._settings(), "launch.num_actors=0"],
                                      self.here, "launch")]
        else:
            self.ranks = [self._start(["env", "GLOO_SOCKET_IFNAME=cable", *self._torchrun(0)], self.here, "rank-0"),
                          self._start(self._enter("env", "GLOO_SOCKET_IFNAME=end", *self._torchrun(1)), self.there,
                                      "rank-1")]
        self.near = self._start(
            [*join, f"key={keys / 'actors' / 'near.key'}", "actors.actor_id=near-0"], self.here, "near"
        )
        self.actor = self._start(self._enter(*join, f"key={key}", "actors.actor_id=other-0"), self.there, "actor")

    def _torchrun(self, rank: int) -> list[str]:
        return [
            sys.executable, "-P", "-m", "torch.distributed.run", "--nnodes=2", f"--node_rank={rank}",
            "--nproc_per_node=1", f"--master_addr={LEARNER}", f"--master_port={RENDEZVOUS_PORT}", "-m", "learner",
            WAITS_FOR_A_RANK, *self._settings(),
        ]

    def _settings(self) -> list[str]:
        return [
            *self._words, f"run.dir={self.run_dir}", f"hub.bind=tcp://{LEARNER}:{PORT}",
            f"hub.weights_port={PORT + 1}", f"hub.keys={self.here / 'keys'}",
        ]

    def status(self) -> dict[str, Any]:
        try:
            return json.loads((self.run_dir / "status.json").read_text())
        except FileNotFoundError:
            return {"actors": [], "version": -1}

    def num_steps(self) -> int:
        """Rows of trained steps; a step is trained once both ranks have applied it."""
        metrics = self.run_dir / "metrics.jsonl"
        return metrics.read_text().count('"policy/loss"') if metrics.exists() else 0

    def other(self) -> tuple[str, float] | None:
        """State and tokens per second of the other host's actor, as the hub sees it."""
        return next(((state, rate) for name, state, _, rate, _ in self.status()["actors"] if name == "other-0"), None)

    def num_joins(self) -> int:
        return (self.there / "actor.log").read_text(errors="replace").count("joined run")

    def wait(self, condition: Callable[[], Any], what: str) -> float:
        """Seconds until the condition holds."""
        def look() -> Any:
            ended = any(one.poll() is not None for one in self.ranks)
            assert not ended, f"the learner ended while {what} was waited for:\n{self.logs()}"
            return condition()

        return _until(look, what, self.logs)

    def logs(self) -> str:
        paths = [*self.here.glob("*.log"), *self.there.glob("*.log"), *self.run_dir.glob("logs/*.log")]
        ends = ["\n".join(path.read_text(errors="replace").splitlines()[-60:]) for path in paths]
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
    home: Path, words: list[str], *, partition_s: float, to_the_end: bool, rate: str, one_sided: bool
) -> dict[str, Any]:
    """One run with one partition; inside the namespaces.

    Args:
        partition_s: how long the cable is out; 0 is until the hub has given the other actor up.
    """
    hosts = Hosts(home, words, one_sided=one_sided)
    try:
        hosts.slow(rate)
        hosts.start()
        hosts.wait(lambda: (hosts.other() or ("", 0.0))[1] > 0, "tokens from the other host")
        hosts.wait(lambda: hosts.num_steps() >= STEPS_BEFORE, "the first steps")
        before, joins = hosts.num_steps(), hosts.num_joins()
        shm = {str(path) for path in Path("/dev/shm").iterdir()}
        hosts.cable(up=False)
        began = time.monotonic()
        noticed_s = hosts.wait(lambda: hosts.other() is None, "eviction of the actor behind the cable")
        while time.monotonic() - began < partition_s:
            time.sleep(0.05)
        done, evictions = hosts.num_steps(), hosts.status()["counters"]["num_evictions"]
        hosts.cable(up=True)
        found = {
            "learner_hosts": len(hosts.ranks), "partition_s": round(time.monotonic() - began, 2),
            "noticed_s": round(noticed_s, 2), "steps_meanwhile": done - before, "evictions": evictions,
            "shared_memory_of_the_learner": bool(shm), **healed(hosts, done, joins),
        }
        return {**found, **(ended(hosts) if to_the_end else {})}
    finally:
        hosts.close()


def healed(hosts: Hosts, done: int, joins: int) -> dict[str, float]:
    """Seconds from the return of the cable, as from the call, until each part goes on."""
    began, seconds = time.monotonic(), dict[str, float]()
    waits = {
        "trained_again_s": lambda: hosts.num_steps() > done,
        "joined_again_s": lambda: hosts.num_joins() > joins,
        "delivers_again_s": lambda: (hosts.other() or ("", 0.0))[1] > 0,
    }

    def look() -> bool:
        for name, holds in waits.items():
            if name not in seconds and holds():
                seconds[name] = round(time.monotonic() - began, 2)
        return len(seconds) == len(waits)

    hosts.wait(look, "steps and tokens after the partition")
    return seconds


def ended(hosts: Hosts) -> dict[str, Any]:
    """Exit codes of learner and actors, and what the run reached."""
    codes = [one.wait(600) for one in hosts.ranks]
    summary = json.loads((hosts.run_dir / "summary.json").read_text())
    return {
        "exits": codes, "eval_score_last": summary.get("eval_score_last"), "steps": summary.get("steps"),
        "lag_violations": summary.get("num_lag_violations"), "actor_exits": [hosts.near.wait(60), hosts.actor.wait(60)],
    }


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
    parser.add_argument("--one-sided", action="store_true")
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
    found = run(words, partition_s=chosen.partition_s, to_the_end=True, rate=chosen.rate, one_sided=chosen.one_sided)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
