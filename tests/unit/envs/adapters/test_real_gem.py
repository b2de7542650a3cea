"""Environments of the real package gem-llm train: `make gem` unpacks it, with ours in the place of what it pins."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGES = Path(os.environ.get("STREAMRL_GEM", Path(__file__).parents[4] / ".venv-gem"))
POOLED = '''
"""In the form of RL2's gem.py: environments of a pool, each of which plays one episode at a time."""
import asyncio

import gem
from gem.wrappers.wrapper_factory import get_wrapper_fns
from omegaconf import OmegaConf
from RL2.datasets import Sample, add_env_response, add_llm_response, initialize_state_dict
from RL2.utils.communication import async_request

POOL = [gem.make(env_id="rg:letter_counting", seed=233 + number) for number in range(4)]
POOL = [wrapper(env) for env in POOL for wrapper in get_wrapper_fns("episode_tracking", tokenizer=None)]
FREE, PLACES = list(range(4)), asyncio.Semaphore(4)


async def generate(config, tokenizer, router_url: str, sample: Sample):
    await PLACES.acquire()
    env = POOL[number := FREE.pop()]
    question, _ = env.reset()
    sample.state_text = f"Question: {question}"
    sample.state_dict = initialize_state_dict(tokenizer, sample.state_text)
    while sample.status != Sample.Status.DONE:
        params = OmegaConf.to_container(config.sampling_params)
        wanted = {"input_ids": sample.state_dict["states"], "sampling_params": params}
        add_llm_response(sample, await async_request(router_url, "generate", json=wanted))
        text, reward, terminated, truncated, _ = env.step("\\\\boxed{1}")
        done = terminated or truncated
        add_env_response(tokenizer, sample, {"next_state": text, "done": done, "reward": 0.5 + reward})
    FREE.append(number)
    PLACES.release()
'''


@pytest.mark.skipif(not PACKAGES.exists(), reason="needs the package gem-llm: make gem")
@pytest.mark.timeout(240)
@pytest.mark.parametrize("task", [
    ["env.name=gem", "env.options.id=game:GuessTheNumber-v0-easy", "env.max_turns=3"], ["env.path=gem.py"],
], ids=["by id", "a pool in the form of RL2"])
def test_environments_of_the_package_train(tmp_path, python_env, task):
    (tmp_path / "gem.py").write_text(POOLED)  # a name that must not hide the package
    done = subprocess.run(
        [sys.executable, "-m", "streamrl.cli", "launch", "experiment=quickstart", *task, "run.dir=run",
         "trainer.num_steps=2", "rollout.num_prompts_per_step=4", "rollout.num_responses_per_prompt=2",
         "launch.num_actors=1", "policy.tiny.num_warm_start_steps=0", "eval.num_samples=4",
         "rollout.max_prompt_tokens=1200", "learner.max_tokens_per_device=8192"],
        env={**python_env, "PYTHONPATH": f"{python_env['PYTHONPATH']}{os.pathsep}{PACKAGES}"}, cwd=tmp_path,
        capture_output=True, text=True, timeout=200,
    )
    logs = "".join(path.read_text()[-2000:] for path in (tmp_path / "run").rglob("*.log"))
    assert done.returncode == 0, done.stderr[-2000:] + logs
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert (rows[-1]["step"], rows[-1]["hub/num_episodes_failed"]) == (2, 0), logs
    rewards = [row["reward/mean"] for row in rows if row.get("reward/mean") is not None]
    assert rewards and (task != ["env.path=gem.py"] or min(rewards) >= 0.5)  # the file's, and the package's own
