"""An environment behind the real server of OpenEnv trains: `make openenv` installs it, in an environment of its own."""

import os
from pathlib import Path
from urllib.request import urlopen

import pyarrow.parquet as pq
import pytest

from tests.flow.processes import ROOT, RunHarness, free_port, wait_until
from tests.flow.test_lora_commands import command

PYTHON = Path(os.environ.get("STREAMRL_OPENENV_PYTHON", ROOT / ".venv-openenv/bin/python"))
SERVER = """
import sys
import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_app

class Say(Action):
    text: str

class Shown(Observation):
    letter: str = ""

class Repeat(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **options):
        self.letter, self.turn = "ab"[seed % 2], 0
        return Shown(letter=self.letter, done=False)

    def step(self, action, timeout_s=None, **options):
        self.turn += 1
        share = action.text.count(self.letter) / max(1, len(action.text))
        return Shown(letter=self.letter, reward=share / 2, done=self.turn == 2)

    @property
    def state(self):
        return State()

uvicorn.run(create_app(Repeat, Say, Shown, max_concurrent_envs=8), port=int(sys.argv[1]), log_level="warning")
"""


@pytest.mark.skipif(not PYTHON.exists(), reason="needs the package openenv: make openenv")
def test_an_environment_of_twenty_lines_trains_and_its_rewards_are_those_of_each_turn(harness: RunHarness):
    (harness.path / "repeat.py").write_text(SERVER)
    port = free_port()
    server = harness.start("server", [str(PYTHON), str(harness.path / "repeat.py"), str(port)])
    url = f"http://127.0.0.1:{port}"
    wait_until(lambda: _answers(url), 60, "the server", harness.logs)

    launched = harness.launch(
        f"env.name=openenv:{url}", "env.max_turns=3", "policy.tiny.num_warm_start_steps=0", "trainer.num_steps=60",
        "policy.optimizer.lr=3e-3", "launch.num_actors=1", "eval.num_samples=32", "eval.every_steps=20",
        "filter.zero_std=false", "env.step_timeout_s=60", "rollout.train.sampling.max_new_tokens=4",
    )
    assert harness.finish(launched, 300) == 0, harness.logs()
    scores = [row["eval/score"] for row in harness.metrics() if "eval/score" in row]
    assert scores[-1] > 0.9 > 0.6 > scores[0], scores
    command(harness, "stream", str(harness.run_dir), "--outcome", "accepted", "--export", "answers.parquet")
    rows = [row for row in pq.read_table(harness.path / "answers.parquet").to_pylist() if row["trained_at"] is not None]
    assert len(rows) == 60 * 8 * 4 and {row["num_turns"] for row in rows} == {2}
    assert harness.metrics()[-1]["hub/num_episodes_failed"] == 0
    server.terminate()
    server.wait(30)
    assert not harness.leftovers()


def _answers(url: str) -> bool:
    try:
        with urlopen(f"{url}/health", timeout=1) as answer:
            return answer.status == 200
    except OSError:
        return False
