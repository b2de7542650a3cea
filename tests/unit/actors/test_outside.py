"""Episodes that programs outside play: opened under the administration key, each a lease until it is ended."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from types import SimpleNamespace

import httpx
import pytest

from actors.endpoint.endpoint import Endpoint
from actors.rollout import run_group
from actors.settings import make_endpoint
from envs.registry import task_of
from streamrl.errors import ConfigError
from streamrl.messages import MemberStatus, Outcome
from tests.unit.actors.fakes import JumpingLoop, installed_engine, jump, lease, make_runner, run, until
from tests.unit.actors.test_agents import Q, settings
from tests.unit.actors.test_rewritten_history import TOKENIZER, Renderer, replies, sequences
from tests.unit.envs.adapters.test_interaction_loops import RECORD, START, member_of

ADMIN = "sk-admin"
OUTSIDE = ["env.agent=outside", "actors.endpoint.admin_key_env=MY_KEY"]


@asynccontextmanager
async def offering(*texts: str, members: int = 1):
    """A lease that waits for programs outside, and an HTTP client under the administration key."""
    engine = await installed_engine(replies(*texts))
    task = task_of(settings(*OUTSIDE))
    runner = make_runner(task, engine, renderer=Renderer(TOKENIZER), max_prompt_tokens=40, max_new_tokens=40,
                         max_turns=5)
    runner.endpoint = Endpoint(admin_key=ADMIN)
    root = (await runner.endpoint.base_url()).removesuffix("/v1")
    moves: list = []
    played = asyncio.ensure_future(run_group(
        lease(members=members, prompt=json.dumps(RECORD).encode()), runner, on_progress=lambda: moves.append(1)
    ))
    async with httpx.AsyncClient(base_url=root, headers={"Authorization": f"Bearer {ADMIN}"}) as admin:
        offers = runner.endpoint._sessions._offers._waiting
        yield SimpleNamespace(played=played, admin=admin, moves=moves, waits=lambda: len(offers) == members)
        played.cancel()
        await runner.close()


async def opened(admin: httpx.AsyncClient, **body) -> dict:
    response = await admin.post("/sessions", json={"wait_s": 10, **body})
    assert response.status_code == 201, response.text
    return response.json()


@pytest.mark.shows("actors.endpoint.admin_key_env")
def test_a_program_outside_plays_a_lease_and_says_its_reward():
    async def work():
        async with offering("x<end>", "7<end>") as one:
            await until(one.waits)
            await jump(100.0)  # longer than env.step_timeout_s: no program plays yet
            await until(lambda: one.moves)  # the lease lives
            told = await opened(one.admin)
            assert told["record"] == RECORD and told["num_turns_left"] == 5
            name = told["id"]
            # By its key, by its name in the path, and in a header.
            async with httpx.AsyncClient(base_url=told["base_url"], headers={"x-api-key": told["api_key"]}) as own:
                first = (await own.post("/chat/completions", json={"messages": [Q]})).json()
            messages = [Q, first["choices"][0]["message"], {"role": "user", "content": "u"}]
            for path, headers in (
                (f"/sessions/{name}/v1/models", {}), ("/v1/models", {"X-Session-ID": name}),
                (f"/sessions/{name}", {}),
            ):
                assert (await one.admin.get(path, headers=headers)).status_code == 200
            await one.admin.post(f"/sessions/{name}/v1/chat/completions", json={"messages": messages})
            (traced,) = (await one.admin.get(f"/sessions/{name}/trace")).json()["sequences"]
            bad = await one.admin.post(f"/sessions/{name}/reward", json={"reward": "much"})
            assert bad.status_code == 400 and bad.json()["error"]["code"] == "invalid_reward"
            assert (await one.admin.post(f"/sessions/{name}/reward", json={"reward": 0.5})).status_code == 200
            assert (await one.admin.get(f"/sessions/{name}")).json()["reward"] == {"reward": 0.5}
            assert (await one.admin.delete(f"/sessions/{name}")).status_code == 200
            member = member_of(await one.played)
            assert member.reward == 0.5
            assert sequences(member) == [f"{START}|x<end><start>u:u<end><start>a:7<end>"]
            assert traced["token_ids"] == TOKENIZER.encode(
                "x<end><start>u:u<end><start>a:7<end>", add_special_tokens=False
            )
            assert [turn["end"] - turn["start"] for turn in traced["turns"]] == [2, 2]
            assert {span["version"] for span in traced["versions"]} == {1} and len(traced["logprobs"]) > 4
            late = await one.admin.post(f"/sessions/{name}/v1/chat/completions", json={"messages": [Q]})
            assert late.status_code == 410 and late.json()["error"]["code"] == "session_over"

    run(work, loop_factory=JumpingLoop)


def test_a_session_that_failed_costs_its_own_trajectory():
    async def work():
        async with offering("x", "x", "x", members=3) as one:
            told = [await opened(one.admin) for _ in range(3)]
            assert len({session["id"] for session in told}) == 3
            none = await one.admin.post("/sessions", json={"wait_s": 0})
            assert none.status_code == 503 and none.json()["error"]["code"] == "no_session"
            for session in told:
                await one.admin.post(f"/sessions/{session['id']}/v1/chat/completions", json={"messages": [Q]})
            failed = {"failed": "no disk"}
            await one.admin.request("DELETE", f"/sessions/{told[0]['id']}", json=failed)
            for session in told[1:]:
                await one.admin.post(f"/sessions/{session['id']}/reward", json={"reward": 1})
                await one.admin.delete(f"/sessions/{session['id']}")
            group = await one.played
            assert "no disk" in group.detail
            assert sorted(member.status for member in group.members) == [
                MemberStatus.FINISHED, MemberStatus.FINISHED, MemberStatus.ABORTED
            ]

    run(work)


def test_a_session_that_is_opened_and_left_alone_is_lost():
    async def work():
        async with offering("x") as one:
            await opened(one.admin)
            await jump(100.0)
            group = await one.played
            assert group.outcome == Outcome.RETURNED and "ran for more than env.step_timeout_s" in group.detail

    run(work, loop_factory=JumpingLoop)


def test_a_revoked_lease_is_no_longer_offered_and_ends_its_session():
    async def work():
        async with offering("x", members=2) as one:
            await until(one.waits)
            told = await opened(one.admin)
            one.played.cancel()
            await asyncio.wait({one.played})
            gone = await one.admin.get(f"/sessions/{told['id']}")
            assert gone.status_code == 410 and gone.json()["error"]["code"] == "session_over"
            assert (await one.admin.post("/sessions", json={"wait_s": 0})).status_code == 503

    run(work)


def test_keys_open_what_is_theirs():
    async def work():
        async with offering("x", "y", members=2) as one:
            first, second = await opened(one.admin), await opened(one.admin)
            own = {"Authorization": f"Bearer {first['api_key']}"}
            for method, path, headers, status, code in (
                ("POST", "/sessions", own, 401, "invalid_api_key"),
                ("POST", "/sessions", {"Authorization": ""}, 401, "invalid_api_key"),
                ("GET", f"/sessions/{first['id']}", {"Authorization": "Bearer sk-wrong"}, 401, "invalid_api_key"),
                ("GET", f"/sessions/{second['id']}/trace", own, 403, "foreign_session"),
                ("GET", "/v1/models", {**own, "X-Session-ID": second["id"]}, 403, "foreign_session"),
                ("GET", "/v1/models", {**own, "X-Session-ID": "of-a-harness"}, 200, ""),
                ("GET", "/v1/models", {}, 404, "unknown_session"),
                ("DELETE", "/sessions/unknown", {}, 404, "unknown_session"),
            ):
                response = await one.admin.request(method, path, headers=headers)
                assert response.status_code == status, (method, path, headers, response.text)
                assert status == 200 or response.json()["error"]["code"] == code
            wrong = await one.admin.post("/sessions", json={"wait_s": -1})
            assert wrong.status_code == 400 and "seconds from 0" in wrong.json()["error"]["message"]

    run(work)


def test_no_key_is_no_way_in(monkeypatch):
    with pytest.raises(ConfigError, match="admin_key_env=STREAMRL_ADMIN_KEY"):
        settings(OUTSIDE[0])
    monkeypatch.delenv("MY_KEY", raising=False)
    with pytest.raises(ConfigError, match="MY_KEY, but this variable is not set"):
        make_endpoint(settings(*OUTSIDE))
    monkeypatch.setenv("MY_KEY", ADMIN)
    assert make_endpoint(settings(*OUTSIDE))._sessions.is_admin(ADMIN)
    assert not make_endpoint(settings())._sessions.is_admin("")
