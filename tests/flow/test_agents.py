"""Runs whose episodes agents play over HTTP: a parent and its subagent, agents that die, and programs outside."""

import math
import resource
import socket
import sys
import threading
from contextlib import ExitStack
from typing import Any

import httpx
import pyarrow.parquet as pq
import pytest

from tests.flow.processes import RunHarness, free_port, wait_until
from tests.flow.test_lora_commands import command

AGENT = """
import httpx, random

async def run(record, base_url, api_key):
    async with httpx.AsyncClient(base_url=base_url, headers={"x-api-key": api_key}) as http:
        async def ask(messages):
            response = await http.post("/chat/completions", json={"messages": messages})
            response.raise_for_status()
            messages.append(response.json()["choices"][0]["message"])

        parent = [{"role": "user", "content": record["prompt"]}]
        child = [{"role": "user", "content": record["prompt"][::-1] + "ab"}]
        await ask(child)
        await ask(parent)
        if random.random() < 0.05:
            raise ConnectionError("the sandbox is gone")
        for messages in (child, parent):
            messages.append({"role": "user", "content": "a"})
            await ask(messages)
        # No reward: the task scores the parent's last answer.
"""


def test_a_parent_and_its_subagent_train_exactly_once_and_token_by_token(harness: RunHarness):
    (harness.path / "agent.py").write_text(AGENT)
    launched = harness.launch(
        f"env.agent={harness.path}/agent.py:run", "env.max_turns=4", "rollout.max_prompt_tokens=48",
        "trainer.num_steps=12", "launch.num_actors=2", "rollout.num_prompts_per_step=2",
        "actors.on_install=recompute",  # else a token's cache may be of an older version than the token
    )
    assert harness.finish(launched, 240) == 0, harness.logs()
    rows, summary = harness.metrics(), harness.summary()

    # Four turns in two sequences, though their calls alternate.
    steps = [row for row in rows if "rollout/num_turns/train" in row]
    assert len(steps) == 12 and summary["steps"] == 12
    assert all(row["rollout/num_turns/train"] == 4 for row in steps)
    assert all(row["rollout/sequences_per_trajectory"] == 2 for row in steps)
    # The learner's log-prob of every token at its own version is the actor's, where a batch has such tokens.
    mismatches = [row["drift/mismatch"] for row in steps if "drift/mismatch" in row]
    assert mismatches and max(mismatches) < 1e-3**2
    # Trained exactly once, and again from the log alone, bit by bit.
    run = str(harness.run_dir)
    assert _trained(harness)
    answers = _accepted(harness)
    assert {(one["num_turns"], one["num_sequences"]) for one in answers} == {(4, 2)}
    versions = {version for one in answers for version in one["versions"]} - {-1}
    assert min(versions) == 0 and max(versions) >= 11 - 3 and len(versions) > 5  # the lag is at most 3
    assert "12 of 12 versions equal" in command(harness, "replay", run, "--from", "0", "--to", "12")
    assert not harness.leftovers()


TWO = """
import httpx

async def run(record, base_url, api_key):
    async with httpx.AsyncClient(base_url=base_url, headers={"x-api-key": api_key}) as http:
        async def share(letter):
            asked = {"messages": [{"role": "user", "content": letter + record["prompt"]}]}
            response = await http.post("/chat/completions", json=asked, headers={"X-Agent-ID": letter})
            response.raise_for_status()
            said = response.json()["choices"][0]["message"]["content"]
            return said.count(letter) / max(1, len(said))

        a, b = await share("a"), await share("b")
        return {"agents": {"a": a - b, "b": b - a}, "good": (a + b) / 2}
"""


def test_two_agents_whose_rewards_cancel_learn_what_each_is_paid_for(harness: RunHarness):
    (harness.path / "two.py").write_text(TWO)
    launched = harness.launch(
        f"env.agent={harness.path}/two.py:run", "env.max_turns=2", "advantage.by=agent", "trainer.num_steps=25",
        "policy.tiny.num_warm_start_steps=0", "policy.optimizer.lr=1e-2", "rollout.train.sampling.max_new_tokens=4",
        "launch.num_actors=1", "eval.num_samples=0", "rollout.num_prompts_per_step=4",
    )
    assert harness.finish(launched, 240) == 0, harness.logs()
    rows = [row for row in harness.metrics() if "reward/good" in row]
    assert rows[0]["reward/good"] < 0.3 and rows[-1]["reward/good"] > 0.9, rows[-1]
    assert {abs(row["reward/trained"]) < 1e-6 for row in rows} == {True}
    run = str(harness.run_dir)
    assert "4 of 4 versions equal" in command(harness, "replay", run, "--from", "0", "--to", "4")
    assert not harness.leftovers()


def test_programs_outside_play_every_episode_and_are_paid_exactly_once(harness: RunHarness, monkeypatch):
    address = f"127.0.0.1:{free_port()}"
    monkeypatch.setenv("ADMIN", "sk-admin")
    launched = harness.launch(
        "env.agent=outside", "actors.endpoint.admin_key_env=ADMIN", f"actors.endpoint.bind={address}",
        "launch.num_actors=1", "trainer.num_steps=2", "eval.num_samples=0", "rollout.num_prompts_per_step=2",
        "rollout.num_responses_per_prompt=2", "filter.zero_std=false",
    )
    paid: list[str] = []
    ended = threading.Event()

    def play() -> None:
        """Ends every session; one in four fails, the others earn a number of their own."""
        with httpx.Client(base_url=f"http://{address}", headers={"x-api-key": "sk-admin"}, timeout=60) as admin:
            while not ended.is_set():
                try:
                    opened = admin.post("/sessions", json={"wait_s": 1})
                    if opened.status_code != 201:
                        continue
                    session = opened.json()
                    path = "/sessions/" + session["id"]
                    said = admin.post(f"{path}/v1/messages", json={
                        "max_tokens": 20, "messages": [{"role": "user", "content": session["record"]["prompt"]}],
                    })
                    if said.status_code != 200:
                        continue
                    paid.append(session["id"])
                    failed = {"failed": "one in four"} if len(paid) % 4 == 0 else {}
                    admin.post(f"{path}/reward", json={"reward": 1.0 + len(paid) / 1024})
                    admin.request("DELETE", path, json=failed)
                except httpx.HTTPError:  # the actor is not there yet, or not any more
                    ended.wait(0.2)

    player = threading.Thread(target=play)
    player.start()
    try:
        assert harness.finish(launched, 240) == 0, harness.logs()
    finally:
        ended.set()
        player.join()
    rewards = [one["reward"] for one in _accepted(harness)]
    assert harness.summary()["steps"] == 2 and len(rewards) >= 8
    numbers = {round((reward - 1) * 1024) for reward in rewards}
    assert len(numbers) == len(rewards) and not any(number % 4 == 0 for number in numbers)


BY_OPENAI = """
import json, os
import openai

record = json.load(open(os.environ["STREAMRL_RECORD"]))
client = openai.OpenAI()
messages = [{"role": "user", "content": record["prompt"]}]
for _ in range(2):
    completion = client.chat.completions.create(model="gpt-5", messages=messages, temperature=0.2)
    messages.append(completion.choices[0].message)
    messages.append({"role": "user", "content": "a"})
print(completion.choices[0].message.content)
"""
BY_ANTHROPIC = """
import json, os
import anthropic

record = json.load(open(os.environ["STREAMRL_RECORD"]))
client = anthropic.Anthropic()
messages = [{"role": "user", "content": record["prompt"]}]
for _ in range(2):
    with client.messages.stream(model="claude-opus-5", max_tokens=64, messages=messages) as stream:
        said = stream.get_final_message()
    messages += [{"role": "assistant", "content": said.content}, {"role": "user", "content": "a"}]
print(json.dumps({"reward": len(said.content[0].text) / 64, "calls": 2.0}))
"""


@pytest.mark.parametrize("script", [BY_OPENAI, BY_ANTHROPIC], ids=["openai", "anthropic"])
def test_a_script_of_an_sdk_trains_unchanged(harness: RunHarness, script: str, request):
    pytest.importorskip(request.node.callspec.id)
    (harness.path / "agent.py").write_text(script)
    launched = harness.launch(
        f"env.agent_command='{sys.executable} {harness.path}/agent.py'", "env.max_turns=2",
        "rollout.max_prompt_tokens=48", "trainer.num_steps=3", "launch.num_actors=2", "eval.num_samples=0",
        "filter.zero_std=false", "rollout.num_prompts_per_step=2", "rollout.num_responses_per_prompt=2",
        "actors.num_concurrent=4", "env.step_timeout_s=120",  # eight processes at once import the SDK
    )
    assert harness.finish(launched, 240) == 0, harness.logs()
    rows, summary = harness.metrics(), harness.summary()
    steps = [row for row in rows if "rollout/num_turns/train" in row]
    assert summary["steps"] == len(steps) == 3
    assert all(math.isfinite(row["reward/trained"]) for row in steps)
    assert all(row["rollout/num_turns/train"] == 2 and row["rollout/sequences_per_trajectory"] == 1 for row in steps)
    assert rows[-1]["hub/num_episodes_failed"] == 0, summary["first_failure"]
    assert rows[-1]["hub/num_leases_lost"] == 0
    assert len(_trained(harness)) == 3 * 2 * 2
    assert not harness.leftovers()


HANGING = """
import asyncio, httpx, json, pathlib
held = []

async def hang(url, head, body):
    host, port = url.removeprefix("http://").removesuffix("/v1").split(":")
    held.append(await asyncio.open_connection(host, int(port)))
    held[-1][1].write(f"POST /v1/chat/completions HTTP/1.1\\r\\nHost: x\\r\\n{head}\\r\\n{body}".encode())

async def run(record, base_url, api_key):
    body = {"messages": [{"role": "user", "content": record["prompt"]}]}
    while not pathlib.Path("CONNECTED").exists():
        await asyncio.sleep(0.05)
    key = f"x-api-key: {api_key}\\r\\n"
    await hang(base_url, f"{key}Content-Length: 9999\\r\\n", "{")          # the rest never comes
    await hang(base_url, f"{key}Content-Length: {len(json.dumps(body))}\\r\\n", json.dumps(body))  # never read
    async with httpx.AsyncClient(base_url=base_url, headers={"x-api-key": api_key}, timeout=60) as http:
        (await http.post("/chat/completions", json=body | {"max_tokens": 9})).raise_for_status()
"""


def test_a_thousand_idle_connections_and_clients_that_hang_lose_nothing(harness: RunHarness):
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit < 2000:
        pytest.skip(f"this machine allows {limit} descriptors, and the test opens 1,000")
    (harness.path / "agent.py").write_text(HANGING.replace("CONNECTED", str(harness.path / "connected")))
    port = free_port()
    launched = harness.launch(
        f"env.agent={harness.path}/agent.py:run", f"actors.endpoint.bind=127.0.0.1:{port}", "launch.num_actors=1",
        "env.max_turns=2", "trainer.num_steps=4", "eval.num_samples=0", "filter.zero_std=false",
    )
    with ExitStack() as idle:
        wait_until(lambda: _connected(port, idle), 120, "the endpoint", harness.logs)
        for _ in range(999):
            assert _connected(port, idle)
        (harness.path / "connected").touch()
        assert harness.finish(launched, 240) == 0, harness.logs()
    last = harness.metrics()[-1]
    assert harness.summary()["steps"] == 4
    assert last["hub/num_episodes_failed"] == last["hub/num_leases_lost"] == 0
    assert len(_trained(harness)) == 4 * 8 * 4
    assert not harness.leftovers()


def _connected(port: int, idle: ExitStack) -> bool:
    try:
        idle.enter_context(socket.create_connection(("127.0.0.1", port), 10))
    except ConnectionError:
        return False
    return True


def _accepted(harness: RunHarness) -> list[dict[str, Any]]:
    """Every accepted trajectory of the run's log."""
    command(harness, "stream", str(harness.run_dir), "--outcome", "accepted", "--export", "answers.parquet")
    return pq.read_table(harness.path / "answers.parquet").to_pylist()


def _trained(harness: RunHarness) -> set[tuple[int, int]]:
    """Trajectories by group and member; each was trained once."""
    trained = [(one["group_id"], one["member"]) for one in _accepted(harness) if one["trained_at"] is not None]
    assert len(trained) == len(set(trained))
    return set(trained)
