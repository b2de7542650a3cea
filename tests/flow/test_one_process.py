"""A run in one process: whole, stopped and resumed, and under the hands of somebody in a debugger."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.flow.processes import ROOT, RunHarness, wait_until

DEADLINE_S = 300
HERE = ("launch.in_process=true", "launch.num_actors=1")
REWARD = """
calls = 0

def reward_fn(completions, **kwargs):
    global calls
    calls += 1
    if calls == 1:
        breakpoint()
    if calls == 2:
        raise ValueError("the second group")
    return [len(str(one)) / 100 for one in completions]
"""


@pytest.mark.shows("launch.in_process")
def test_a_run_in_one_process_writes_and_replays_as_any_other(harness: RunHarness):
    launch = harness.launch(*HERE, "trainer.num_steps=3")

    assert harness.finish(launch, DEADLINE_S) == 0, harness.logs()
    assert json.loads((harness.run_dir / "hub.json").read_text())["pid"] == launch.pid
    harness.check_metric_keys()
    summary = harness.summary()
    assert (summary["steps"], summary["num_lag_violations"], summary["failed"]) == (3, 0, "")
    log = (harness.run_dir / "logs" / "learner.log").read_text()
    assert {line.split()[1] for line in log.splitlines() if re.match(r"\d\d:", line)} == {"learner", "hub", "actor"}
    replayed = harness.command("replay", str(harness.run_dir))
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert harness.leftovers() == []


def test_ctrl_c_saves_a_run_in_one_process_and_it_is_resumed_there(harness: RunHarness):
    launch = harness.launch(*HERE, "trainer.num_steps=1000")
    harness.wait_for_version(1, DEADLINE_S)
    launch.send_signal(signal.SIGINT)

    assert harness.finish(launch, DEADLINE_S) == 130, harness.logs()
    stopped = harness.summary()
    assert stopped["stopped"] == "stopped: SIGINT" and 1 <= stopped["steps"] < 1000
    assert "Resume with:\n  streamrl resume" in (harness.path / "launch.log").read_text()
    last = stopped["steps"] + 2
    resumed = harness.launch(*HERE, f"trainer.num_steps={last}", "checkpoint.resume=true")
    assert harness.finish(resumed, DEADLINE_S) == 0, harness.logs()
    assert harness.summary()["steps"] == last and harness.leftovers() == []


def test_what_fails_in_one_process_is_told_as_by_a_launcher(harness: RunHarness):
    task = harness.path / "judged.py"
    task.write_text("""
def record(split, index):
    return {'prompt': 'x'}

def reward(record, completion):
    if completion != 'probe':
        raise RuntimeError('the judge is away')
    return 0.0
""")
    launch = harness.launch(*HERE, f"env.path={task}", "policy.tiny.num_warm_start_steps=0")

    assert harness.finish(launch, DEADLINE_S) == 1, harness.logs()
    printed = (harness.path / "launch.log").read_text()
    assert "The run failed after 0 steps" in printed and "RuntimeError: the judge is away" in printed
    assert "Traceback" not in printed and harness.summary()["failed"] and harness.leftovers() == []


class Terminal:
    """`streamrl debug` on a terminal of its own, at which a person types."""

    def __init__(self, harness: RunHarness, *words: str) -> None:
        reward, data = harness.path / "reward.py", harness.path / "train.jsonl"
        reward.write_text(REWARD)
        data.write_text("".join(json.dumps({"question": f"{n} + 1", "answer": str(n + 1)}) + "\n" for n in range(9)))
        command = [sys.executable, "-m", "streamrl.cli", "debug", *harness.words(
            f"env.path={reward}", f"data.path={data}", "policy.tiny.num_warm_start_steps=0", *words
        )]
        self._keys, screen = pty.openpty()
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "TERM": "dumb"}
        self.process = subprocess.Popen(
            command, stdin=screen, stdout=screen, stderr=screen, cwd=ROOT, env=environment, start_new_session=True
        )
        harness.processes.append(self.process)
        os.close(screen)
        self.shown = ""

    def type(self, line: str) -> None:
        self.shown = ""
        os.write(self._keys, f"{line}\n".encode())

    def wait_for(self, text: str) -> str:
        """Text shown since the last line typed, once this is part of it."""
        deadline = time.monotonic() + DEADLINE_S
        while text not in self.shown:
            assert self.read(deadline), f"ended without {text!r}:\n{self.shown}"
        return self.shown

    def end(self) -> tuple[int, str]:
        """Exit status, and what was shown."""
        while self.read(time.monotonic() + DEADLINE_S):
            pass
        return self.process.wait(DEADLINE_S), self.shown

    def read(self, deadline: float) -> bool:
        """Read more; False at the end."""
        ready, _, _ = select.select([self._keys], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, f"nothing more is shown:\n{self.shown}"
        try:
            data = os.read(self._keys, 1 << 16)
        except OSError:  # the last process with this terminal has ended
            return False
        self.shown += data.decode(errors="replace")
        return bool(data)


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[RunHarness]:
    harness = RunHarness(tmp_path)
    yield harness
    harness.close()


@pytest.mark.shows("launch.debug")
def test_a_reward_stands_in_the_debugger_for_as_long_as_somebody_looks(fresh: RunHarness):
    terminal = Terminal(fresh, "trainer.num_steps=2", "hub.dead_after_s=0.5", "hub.heartbeat_s=0.1")
    terminal.wait_for("(Pdb)")
    status, seen = fresh.run_dir / "status.json", set()
    wait_until(lambda: seen.add(status.stat().st_mtime_ns) or len(seen) > 3, 60, "a hub that goes on", fresh.logs)
    assert [row[1] for row in fresh.status()["actors"]] == ["running"], "not presumed dead"
    terminal.type("p len(completions)")
    assert "\n4" in terminal.wait_for("(Pdb) ").replace("\r", "")

    terminal.type("c")
    assert "continue goes on" in terminal.wait_for("(Pdb)") and "ValueError: the second group" in terminal.shown
    terminal.type("p calls")
    assert "\n2" in terminal.wait_for("(Pdb) ").replace("\r", "")
    terminal.type("c")

    code, shown = terminal.end()
    assert code == 0, shown + fresh.logs()
    summary = fresh.summary()
    assert (summary["steps"], summary["failed"], summary["stopped"]) == (2, "", "")
    assert summary["num_episodes_failed"] == 4 and fresh.leftovers() == []


def test_quitting_the_debugger_ends_the_run(fresh: RunHarness):
    terminal = Terminal(fresh)
    terminal.wait_for("(Pdb)")
    terminal.type("q")

    code, shown = terminal.end()
    assert code == 130 and "Stopped. Resume with:" in shown and "Traceback" not in shown, shown
    assert fresh.summary()["stopped"] == "stopped: the debugger was left" and fresh.leftovers() == []
