"""vLLM actors in real runs: alone under `streamrl launch`, played by agents, and in a mixed fleet that loses one."""

import signal
from importlib.util import find_spec
from pathlib import Path

import pytest

from actors.engines.vllm.reaper import MARK
from tests.flow.processes import SLOW, RunHarness, wait_until
from tests.flow.test_turns import WORDS as TURNS
from tests.flow.test_turns import check_run
from tests.flow.turns import FOLDER, KILLS

pytestmark = [
    pytest.mark.flow, pytest.mark.vllm, pytest.mark.timeout(900),
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: run `make vllm`"),
]
VLLM = ("actors.engine=vllm", "actors.device=cpu")
HEADS = "policy.tiny.num_heads=2"  # of 32 each, the least that vLLM has an attention for on a CPU
START_S = 420  # three processes that import vLLM; seconds on quiet cores, minutes on busy ones


@pytest.fixture(autouse=True)
def every_install_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMRL_LOG", "DEBUG")


def test_a_launched_run_with_a_vllm_actor_trains_and_leaves_nothing_behind(harness: RunHarness):
    launch = harness.launch(*VLLM, HEADS, "trainer.num_steps=6", "launch.num_actors=1", "publish.probe_every=2",
                            "hub.heartbeat_s=0.2", "rollout.train.sampling.top_p=0.9")

    assert harness.finish(launch, START_S + 120) == 0, harness.logs()
    harness.check_metric_keys()
    summary, rows = harness.summary(), harness.metrics()
    assert summary["num_groups_trained"] == 48 and summary["num_lag_violations"] == 0
    steps = [row for row in rows if "policy/loss" in row]
    assert [row["step"] for row in steps] == [1, 2, 3, 4, 5, 6]
    assert steps[0]["ratio/max"] == pytest.approx(1.0, abs=1e-3), "of the first version, over the ids that top_p left"
    assert steps[0]["rollout/set_size"] >= 1
    log = (harness.run_dir / "logs" / "actor-0.log").read_text()
    assert "installed version 1:6" in log and "paused" in log, harness.logs()
    assert last(rows, "hub/num_probes") >= 2 and last(rows, "hub/num_probe_failures") == 0
    assert harness.leftovers() == [] and orphans() == []


def test_a_mixed_fleet_loses_a_member_gains_one_and_trains_what_it_should(harness: RunHarness):
    # No end of its own: how many steps pass while actors start depends on the machine. One that is told to leave does.
    learner = harness.learner("trainer.num_steps=100000", "staleness.eta=2", "hub.dead_after_s=3", "eval.num_samples=0",
                            "publish.probe_every=3", "checkpoint.every_steps=1000", HEADS, *SLOW)
    fleet = {name: harness.actor(name, *VLLM) for name in ("v0", "v1")}
    fleet["n0"] = harness.actor("n0")
    for name in fleet:
        harness.wait_for_actor(name, START_S)
    owner = fleet["v1"].pid
    assert engine_processes()[owner] and fleet["v0"].pid in engine_processes()
    harness.wait_for_version(harness.status()["version"] + 2)

    fleet.pop("v1").send_signal(signal.SIGKILL)
    harness.wait_for_eviction("v1")
    wait_until(lambda: owner not in engine_processes(), 30, "the end of the killed actor's engine", harness.logs)
    fleet["n1"] = harness.actor("n1")
    harness.wait_for_actor("n1", START_S)
    harness.wait_for_version(harness.status()["version"] + 6)

    for process in fleet.values():
        process.send_signal(signal.SIGTERM)
    for process in fleet.values():
        assert harness.finish(process, 60) == 0, harness.logs()
    learner.send_signal(signal.SIGTERM)
    assert harness.finish(learner, 60) == 0, harness.logs()
    rows = [row for row in harness.metrics() if "policy/loss" in row]
    assert [row["run/version"] for row in rows] == list(range(1, len(rows) + 1))
    summary = harness.summary()  # a step's row is written before the hub counts that step's groups: the summary has all
    assert summary["num_lag_violations"] == 0 and summary["num_groups_trained"] == 8 * len(rows)
    # Every engine computed with what was published: roots by heartbeat, log-probs by the probe.
    assert last(rows, "hub/num_probes") >= 6 and last(rows, "hub/num_probe_failures") == 0
    log = (harness.path / "learner.log").read_text()
    assert "published was" not in log and "QUARANTINE" not in log
    assert all(max(versions(harness, name)) >= len(rows) - 3 for name in fleet), harness.logs()
    harness.close()
    assert harness.leftovers() == [] and orphans() == []


def test_vllm_takes_turns_and_an_actor_killed_asleep_or_while_it_wakes_costs_nothing(harness: RunHarness, monkeypatch):
    kills = ("released:actor", "waking:actor")
    monkeypatch.setenv(FOLDER, str(harness.path))
    monkeypatch.setenv(KILLS, ",".join(kills))
    launch = harness.launch(
        *TURNS, HEADS, "trainer.num_steps=6", "actors.engine=tests.flow.turns:KillingVllm", "actors.device=cpu",
        "hub.heartbeat_s=0.2",
    )
    assert harness.finish(launch, START_S + 240) == 0, harness.logs()
    assert len(list(harness.path.glob("kill-*"))) == len(kills), harness.logs()
    releases = check_run(harness, 6)
    assert all(before - after >= weights for _, before, after, weights in releases), releases
    rows = harness.metrics()
    assert max(row.get("hub/actor_given_back_bytes", 0) for row in rows) >= releases[0][3]
    assert last(rows, "hub/num_probes") >= 6 and last(rows, "hub/num_probe_failures") == 0
    assert orphans() == []


AGENT = """
import httpx

async def run(record, base_url, api_key):
    async with httpx.AsyncClient(headers={"x-api-key": api_key}, timeout=60) as http:
        async def post(path, body):
            response = await http.post(path, json=body)
            response.raise_for_status()
            return response

        messages = [{"role": "user", "content": record["prompt"]}]
        asked = {"messages": messages, "return_token_ids": True, "logprobs": True}
        chat = (await post(base_url + "/chat/completions", asked)).json()
        ids = chat["choices"][0]["token_ids"]
        assert len(chat["choices"][0]["logprobs"]["content"]) == len(ids)
        messages += [chat["choices"][0]["message"], {"role": "user", "content": "a"}]
        streamed = (await post(base_url + "/responses", {"input": messages, "stream": True})).text
        assert "response.completed" in streamed
        said = (await post(base_url + "/messages", {"messages": messages, "max_tokens": 4})).json()
        raw = {"token_ids": chat["prompt_token_ids"], "sampling_params": {"max_tokens": 4}}
        tokens = (await post(base_url.removesuffix("/v1") + "/inference/v1/generate", raw)).json()
        assert len(tokens["choices"][0]["token_ids"]) <= 4
        return {"reward": float("a" in said["content"][0]["text"]), "ids": len(ids)}
"""


def test_agents_call_a_vllm_actor_in_every_form_of_its_endpoint(harness: RunHarness):
    (harness.path / "agent.py").write_text(AGENT)
    launch = harness.launch(*VLLM, HEADS, f"env.agent={harness.path}/agent.py:run", "env.max_turns=4",
                            "rollout.max_prompt_tokens=48", "trainer.num_steps=4", "launch.num_actors=1",
                            "filter.zero_std=false", "actors.on_install=recompute")

    assert harness.finish(launch, START_S + 120) == 0, harness.logs()
    assert harness.summary()["steps"] == 4 and harness.summary()["num_lag_violations"] == 0
    rows = [row for row in harness.metrics() if "policy/loss" in row]
    assert all(row["rollout/num_turns/train"] == 4 and row["reward/ids"] > 0 for row in rows)
    mismatches = [row["drift/mismatch"] for row in rows if "drift/mismatch" in row]
    assert mismatches and max(mismatches) < 1e-3**2  # nats squared: every token scored again at its own version
    assert harness.leftovers() == [] and orphans() == []


def versions(harness: RunHarness, name: str) -> set[int]:
    """Versions that an actor reports as installed."""
    lines = (harness.path / f"{name}.log").read_text().splitlines()
    words = [line.split("installed version ", 1)[1] for line in lines if "installed version " in line]
    return {int(word.split(" ", 1)[0].partition(":")[2]) for word in words}


def last(rows: list[dict], key: str) -> float:
    return next(row[key] for row in reversed(rows) if key in row)


def engine_processes() -> dict[int, list[int]]:
    """Processes of vLLM by the process id of the actor that started them."""
    found: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            environment, words = (entry / "environ").read_bytes(), (entry / "cmdline").read_bytes()
        except OSError:
            continue  # it ended meanwhile
        mark = next((part for part in environment.split(b"\0") if part.startswith(f"{MARK}=".encode())), b"")
        if mark and words and b"resource_tracker" not in words:
            found.setdefault(int(mark.partition(b"=")[2].partition(b"-")[0]), []).append(int(entry.name))
    return found


def orphans() -> list[int]:
    return [owner for owner in engine_processes() if not Path(f"/proc/{owner}").exists()]
