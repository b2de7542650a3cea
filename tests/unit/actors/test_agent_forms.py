"""The other forms in which agents call the model: Anthropic's messages, OpenAI's responses, token ids."""

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
from streamrl.messages import MemberStatus, Outcome, ReturnReason
from tests.kit.loops import jump, jumping, until
from tests.unit.actors.fakes import installed_engine, lease, make_runner
from tests.unit.actors.test_agents import AgentLoop, Q, ask, http, play, settings
from tests.unit.actors.test_rewritten_history import TOKENIZER, Renderer, ids, replies, sequences
from tests.unit.envs.adapters.test_interaction_loops import RECORD, START, member_of

CALL = '<tool_call>{"name": "add", "arguments": {"b": 2}}</tool_call>'
SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}}}
ROOM = {"max_prompt_tokens": 200, "max_new_tokens": 100}
WHOLE = f"{START}|I do {CALL}<end><start>t:4<end><start>a:7<end>"
"""A turn that calls a tool, its result, an answer: one sequence, in whichever form the agent sends it back."""


def form_of(package: str):
    """The package, or a skipped test where the extra `agents` is not installed."""
    return pytest.importorskip(package, exc_type=ImportError, reason=f"needs {package}, which the extra `dev` brings")


def here(name: str):
    return task_of(settings(f"env.agent=tests.unit.actors.test_agent_forms:{name}"))


# --- the packages themselves -----------------------------------------------------------------------------------------

async def claude(record, anthropic):
    """A tool loop, as the documentation of the package has it."""
    tools = [{"name": "add", "description": "adds", "input_schema": SCHEMA}]
    messages, fixed = [Q], {"model": "policy", "max_tokens": 100, "tools": tools}
    count = await anthropic.messages.count_tokens(model="policy", messages=messages)
    first = await anthropic.messages.create(messages=messages, **fixed)
    said, call = first.content
    assert (said.text, call.name, call.input, first.stop_reason) == ("I do ", "add", {"b": 2}, "tool_use")
    assert count.input_tokens == first.usage.input_tokens and first.usage.output_tokens > 40
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "4"}]}
    messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    async with anthropic.messages.stream(messages=messages, **fixed) as stream:
        texts = [text async for text in stream.text_stream]
        last = await stream.get_final_message()
    assert texts == ["7"] and last.stop_reason == "end_turn" and last.usage.output_tokens == 2
    return float(last.content[0].text == record["answer"])


async def responses(record, client):
    tools = [{"type": "function", "name": "add", "parameters": SCHEMA, "strict": False}]
    items = [{"role": "user", "content": [{"type": "input_text", "text": "q"}]}]
    first = await client.responses.create(model="policy", input=items, tools=tools)
    said, call = first.output
    assert first.output_text == "I do " and (call.name, call.arguments) == ("add", '{"b": 2}')
    items += [*first.output, {"type": "function_call_output", "call_id": call.call_id, "output": "4"}]
    async with client.responses.stream(model="policy", input=items, tools=tools) as stream:
        kinds = [event.type async for event in stream]
        last = await stream.get_final_response()
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
    assert last.usage.input_tokens > first.usage.total_tokens
    return float(last.output_text == record["answer"])


async def named(record, client):
    """Goes on from a response by its id."""
    first = await client.responses.create(model="policy", input="q", instructions="")
    tools = [{"type": "function", "name": "add", "parameters": SCHEMA, "strict": False}]
    second = await client.responses.create(model="policy", input="u", previous_response_id=first.id, tools=tools)
    call = second.output[-1]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "4"}
    last = await client.responses.create(model="policy", input=[result], previous_response_id=second.id)
    return float(last.output_text == "7")


@pytest.mark.parametrize(("agent", "package"), [
    ("claude", "anthropic"), ("responses", "openai.resources.chat.completions"),
])
def test_a_tool_loop_of_the_package_is_one_sequence(agent, package):
    form_of(package)
    member = member_of(play(here(agent), f"I do {CALL}<end>", "7<end>", **ROOM)[0])
    assert sequences(member) == [WHOLE] and member.reward == 1.0 and len(member.turns) == 2


def test_a_response_goes_on_by_its_name():
    form_of("openai.resources.chat.completions")
    member = member_of(play(here("named"), "x<end>", f"{CALL}<end>", "7<end>", **ROOM)[0])
    assert sequences(member) == [
        f"{START}|x<end><start>u:u<end><start>a:{CALL}<end><start>t:4<end><start>a:7<end>"
    ] and member.reward == 1.0


PROGRAM = """
import anthropic
client = anthropic.Anthropic()
message = client.messages.create(model="policy", max_tokens=9, messages=[{"role": "user", "content": "q"}])
print(float(message.content[0].text == "7"))
"""


def test_a_program_of_the_package_anthropic_is_not_changed(tmp_path):
    form_of("anthropic")
    from tests.unit.actors.test_agent_programs import command

    member = member_of(play(command(tmp_path, PROGRAM), "7<end>")[0])
    assert sequences(member) == [f"{START}|7<end>"] and member.reward == 1.0


# --- the wire --------------------------------------------------------------------------------------------------------

def asked(*texts, path: str, body: dict, **rules):
    """The answer to one call, and the group's only member."""
    async def agent(session, asks):
        found.append(await asks.post(path.replace("ROOT", session.base_url.removesuffix("/v1")), json=body))
        return 1.0

    found: list = []
    member = member_of(play(AgentLoop(agent), *texts, **{**ROOM, **rules})[0])
    return found[0], member


def test_a_system_prompt_a_stop_and_the_runs_sampling_in_anthropics_form():
    response, member = asked("xyz", path="/messages", body={
        "max_tokens": 500, "system": [{"type": "text", "text": "s"}], "messages": [Q], "stop_sequences": ["z"],
        "temperature": 0.5,
    })
    said = response.json()
    assert response.headers["x-streamrl-sampling"] == "temperature=1.0, max_tokens=100"
    assert (said["stop_reason"], said["stop_sequence"]) == ("stop_sequence", "z")
    assert sequences(member) == ["<start>s:s<end><start>u:q<end><start>a:|xyz"]


def test_tokens_go_in_and_come_out():
    read = ids("<start>u:q<end><start>a:")
    body = {"token_ids": read, "cache_salt": "1", "stream": False, "sampling_params": {
        "max_tokens": 5, "temperature": 1.0, "logprobs": 1, "skip_special_tokens": False,
        "stop_token_ids": [TOKENIZER.eos_token_id],
    }}
    response, member = asked("7<end>", path="ROOT/inference/v1/generate", body=body)
    (choice,) = response.json()["choices"]
    assert choice["token_ids"] == ids("7<end>") and choice["finish_reason"] == "stop"
    assert [one["token"] for one in choice["logprobs"]["content"]] == [f"token_id:{one}" for one in ids("7<end>")]
    assert sequences(member) == ["<start>u:q<end><start>a:|7<end>"]


REFUSED = (
    ("/messages", {"messages": [Q], "tool_choice": {"type": "any"}}, "can only be auto"),
    ("/messages", {"messages": [Q], "tools": [{"type": "web_search_20250305", "name": "w"}]}, "web_search_20250305"),
    ("/messages", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "type 'image'"),
    ("/messages", {"messages": [Q], "container": "c"}, "does not take container"),
    ("/messages", {"messages": [Q], "output_config": {"format": {}}}, "output_config.format"),
    ("/messages", {"messages": ["q"]}, "see the form of this API"),
    ("/messages/count_tokens", {"messages": "q"}, "give a list of messages"),
    ("/responses", {"input": []}, "a text or a list of items"),
    ("/responses", {"input": "q", "previous_response_id": "r"}, "names no response"),
    ("/responses", {"input": "q", "background": True}, "does not take background"),
    ("/responses", {"input": "q", "tools": [{"type": "web_search"}]}, "web_search"),
    ("/responses", {"input": "q", "text": {"format": {"type": "json_schema"}}}, "text.format=json_schema"),
    ("/responses", {"input": [{"type": "item_reference", "id": "x"}]}, "item_reference"),
    ("ROOT/inference/v1/generate", {"token_ids": [1 << 20]}, "give a list of ids"),
    ("ROOT/inference/v1/generate", {"token_ids": [3], "stream": True}, "does not take stream=true"),
    ("ROOT/inference/v1/generate", {"token_ids": [3], "sampling_params": {"logit_bias": {"5": 1.0}}}, "logit_bias"),
    ("ROOT/inference/v1/generate", {"token_ids": [3], "sampling_params": {"n": 2}}, "n=2"),
)


def test_what_is_not_served_is_refused_in_the_form_of_the_api():
    async def agent(session, asks):
        for path, body, says in REFUSED:
            response = await asks.post(path.replace("ROOT", session.base_url.removesuffix("/v1")), json=body)
            said = response.json()
            assert response.status_code == 400 and says in said["error"]["message"], response.text
            assert said["error"]["type"] == "invalid_request_error"
            assert said.get("type") == ("error" if "messages" in path else None)
        async with http(session, Authorization="", **{"x-api-key": "sk-wrong"}) as other:
            response = await other.post("/messages", json={"messages": [Q]})
        assert response.status_code == 401 and response.json()["error"]["type"] == "authentication_error"
        return float((await ask(asks, Q)).status_code == 200)

    member = member_of(play(AgentLoop(agent), "x")[0])
    assert sequences(member) == [f"{START}|x"] and member.reward == 1.0


def test_a_prompt_that_is_too_long_is_told_in_anthropics_form():
    async def agent(session, asks):
        message = {"role": "user", "content": "q" * 50}
        told.append((await asks.post("/messages", json={"max_tokens": 9, "messages": [message]})).json())

    told: list = []
    assert play(AgentLoop(agent))[0].reason == ReturnReason.TOO_LONG
    assert told[0]["type"] == "error" and told[0]["error"]["code"] == "context_length_exceeded"


def test_an_answer_that_was_cut_is_incomplete_in_both_streams():
    async def agent(session, asks):
        for path, body in (("/messages", {"messages": [Q], "max_tokens": 2}),
                           ("/responses", {"input": "q", "max_output_tokens": 2})):
            text = (await asks.post(path, json={**body, "stream": True})).text
            events.append([json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")])
        return 1.0

    events: list = []
    play(AgentLoop(agent), "xy", "xy", **ROOM)
    messages, responses = events
    assert [one["type"] for one in messages] == [
        "message_start", "content_block_start", "content_block_delta", "content_block_stop", "message_delta",
        "message_stop",
    ] and messages[4]["delta"]["stop_reason"] == "max_tokens"
    assert [one["sequence_number"] for one in responses] == list(range(len(responses)))
    assert responses[-1]["type"] == "response.incomplete"


# --- Episodes that programs outside play: opened under the administration key, each a lease until it is ended

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
@jumping
async def test_a_program_outside_plays_a_lease_and_says_its_reward():
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


async def test_a_session_that_failed_costs_its_own_trajectory():
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


@jumping
async def test_a_session_that_is_opened_and_left_alone_is_lost():
    async with offering("x") as one:
        await opened(one.admin)
        await jump(100.0)
        group = await one.played
        assert group.outcome == Outcome.RETURNED and "ran for more than env.step_timeout_s" in group.detail


async def test_a_revoked_lease_is_no_longer_offered_and_ends_its_session():
    async with offering("x", members=2) as one:
        await until(one.waits)
        told = await opened(one.admin)
        one.played.cancel()
        await asyncio.wait({one.played})
        gone = await one.admin.get(f"/sessions/{told['id']}")
        assert gone.status_code == 410 and gone.json()["error"]["code"] == "session_over"
        assert (await one.admin.post("/sessions", json={"wait_s": 0})).status_code == 503


async def test_keys_open_what_is_theirs():
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


def test_no_key_is_no_way_in(monkeypatch):
    with pytest.raises(ConfigError, match="admin_key_env=STREAMRL_ADMIN_KEY"):
        settings(OUTSIDE[0])
    monkeypatch.delenv("MY_KEY", raising=False)
    with pytest.raises(ConfigError, match="MY_KEY, but this variable is not set"):
        make_endpoint(settings(*OUTSIDE))
    monkeypatch.setenv("MY_KEY", ADMIN)
    assert make_endpoint(settings(*OUTSIDE))._sessions.is_admin(ADMIN)
    assert not make_endpoint(settings())._sessions.is_admin("")
