"""Agents over HTTP: a session and a key each, recorded as sampled, answered once where a client asks twice."""

import asyncio
import json
import resource
import shlex
import socket
from collections.abc import Awaitable, Callable
from types import SimpleNamespace

import httpx
import pytest

from actors.endpoint.access import BODY_S
from actors.endpoint.endpoint import Endpoint
from actors.endpoint.server import serve
from actors.endpoint.sessions import Sessions
from actors.rollout import run_group, sendable
from actors.settings import make_endpoint
from envs.agents.task import function_agent
from envs.json_service import listening
from envs.registry import task_of
from streamrl.config.load import load_config, to_plain
from streamrl.environment import AgentSession
from streamrl.errors import ConfigError, EngineError, TaskError
from streamrl.messages import MemberStatus, ReturnReason
from streamrl.messages.codec import unpack_ids
from streamrl.named_code import check_allowed
from tests.kit.loops import jump, jumping, run, until
from tests.unit.actors.fakes import installed_engine, lease, make_runner
from tests.unit.actors.test_rewritten_history import TOKENIZER, Renderer, replies, sequences
from tests.unit.envs.adapters.test_interaction_loops import LIMITS, RECORD, START, member_of

Q = {"role": "user", "content": "q"}


class AgentLoop:
    """A task whose episode is this function of the session and an HTTP client of it."""

    name = "agents"

    def __init__(self, agent: Callable[[AgentSession, httpx.AsyncClient], Awaitable[object]]) -> None:
        self._agent = agent

    def env(self):
        async def rollout(record, client):
            from envs.reward_values import as_step

            async with client.session() as session, http(session) as asks:
                return as_step(await self._agent(session, asks), "agent")

        return SimpleNamespace(rollout=rollout)


def http(session: AgentSession, **headers: str) -> httpx.AsyncClient:
    headers = {"Authorization": f"Bearer {session.api_key}", **headers}
    return httpx.AsyncClient(base_url=session.base_url, headers=headers)


async def ask(asks: httpx.AsyncClient, *messages: dict, headers: dict | None = None, **options) -> httpx.Response:
    body = {"model": "policy", "messages": list(messages), **options}
    return await asks.post("/chat/completions", json=body, headers=headers)


def play(task, *texts, members=1, record=RECORD, reply=None, **rules):
    """The group of a lease that this task's agent played, and the requests that its engine got."""
    found = []

    async def work():
        engine = await installed_engine(reply or replies(*texts))
        options = {"max_prompt_tokens": 40, "max_new_tokens": 40, "max_turns": 5, **rules}
        runner = make_runner(task, engine, renderer=Renderer(TOKENIZER), **options)
        one = lease(members=members, prompt=json.dumps(record).encode())
        try:
            group = await run_group(one, runner)
            assert sendable(group, one, LIMITS) is group
        finally:
            await runner.close()
        found.extend([group, engine.requests])

    run(work)
    return found


# --- chat completions ------------------------------------------------------------------------------------------------


def test_a_conversation_over_http_is_recorded_token_by_token():
    async def agent(session, asks):
        first = (await ask(asks, Q, return_token_ids=True, logprobs=True, top_logprobs=0)).json()
        (choice,) = first["choices"]
        told = choice["message"]
        second = (await ask(asks, Q, told, {"role": "user", "content": "u"}, return_token_ids=True)).json()
        answers.extend([first, second])
        return 1.0

    answers = []
    group, requests = play(AgentLoop(agent), "x<end>", "7<end>")
    member = member_of(group)

    assert sequences(member) == [f"{START}|x<end><start>u:u<end><start>a:7<end>"] and member.reward == 1.0
    assert [one["prompt_token_ids"] for one in answers] == [list(request.prompt_ids) for request in requests]
    (choice,) = answers[0]["choices"]
    assert choice["token_ids"] == list(unpack_ids(member.token_ids))[:2] and choice["finish_reason"] == "stop"
    assert [one["token"] for one in choice["logprobs"]["content"]] == ["x", "<end>"]
    assert answers[1]["usage"] == {"prompt_tokens": len(requests[1].prompt_ids), "completion_tokens": 2,
                                   "total_tokens": len(requests[1].prompt_ids) + 2}
    assert answers[1]["choices"][0]["logprobs"] is None


def test_who_asks_for_a_stream_gets_one():
    async def agent(session, asks):
        response = await ask(asks, Q, stream=True, stream_options={"include_usage": True}, return_token_ids=True)
        assert response.headers["content-type"].startswith("text/event-stream")
        found.extend(line.removeprefix("data: ") for line in response.text.splitlines() if line)
        return 1.0

    found: list[str] = []
    play(AgentLoop(agent), "x<end>")
    *events, done = found
    events = [json.loads(event) for event in events]
    assert done == "[DONE]" and [one["object"] for one in events] == ["chat.completion.chunk"] * 3
    assert events[0]["choices"][0]["delta"]["content"] == "x" and len(events[0]["prompt_token_ids"]) > 3
    assert events[1]["choices"][0]["finish_reason"] == "stop" and events[2]["usage"]["completion_tokens"] == 2


def test_the_runs_sampling_wins_and_the_answer_says_so():
    async def agent(session, asks):
        told.append((await ask(asks, Q, temperature=0.2, top_p=1.0, max_tokens=500)).headers["x-streamrl-sampling"])
        told.append((await ask(asks, Q, temperature=1.0, max_tokens=1)).headers.get("x-streamrl-sampling"))
        return 1.0

    told: list = []
    _, requests = play(AgentLoop(agent), "x", "y")
    assert told == ["temperature=1.0, max_tokens=40", None]
    assert [(one.sampling.temperature, one.max_new_tokens) for one in requests] == [(1.0, 40), (1.0, 1)]


@pytest.mark.parametrize(("options", "says"), [
    ({"n": 2}, "n=2: here it can only be 1"),
    ({"tool_choice": "required"}, 'tool_choice="required": here it can only be auto or none'),
    ({"response_format": {"type": "json_object"}}, "does not take response_format"),
    ({"top_logprobs": 5}, "top_logprobs=5: here it can only be 0"),
    ({"messages": "hello"}, "give a list of messages"),
    ({"messages": []}, "give a list of messages"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "give system, developer, user, assistant or tool"),
    ({"max_tokens": 0}, "positive integer"),
])
def test_what_is_not_served_is_refused_by_name_and_the_agent_goes_on(options, says):
    async def agent(session, asks):
        response = await asks.post("/chat/completions", json={"messages": [Q], **options})
        assert response.status_code == 400 and says in response.json()["error"]["message"], response.text
        return float((await ask(asks, Q)).status_code == 200)

    assert member_of(play(AgentLoop(agent), "x")[0]).reward == 1.0


def test_bodies_that_are_none_and_unknown_paths_have_an_answer_too():
    async def agent(session, asks):
        for content in (b"{", b"[]", b"\xff"):
            response = await asks.post("/chat/completions", content=content)
            assert response.status_code == 400 and response.json()["error"]["code"] == "invalid_request"
        response = await asks.post("/chat/completions", content=b"x" * (17 << 20))
        assert response.status_code == 413 and "error" in response.json()
        assert (await asks.get("/elsewhere")).json()["error"]["message"].startswith("GET /v1/elsewhere: Not Found")
        assert (await asks.get("/models")).json()["data"][0]["max_model_len"] > 40
        return float((await ask(asks, Q)).status_code == 200)

    assert member_of(play(AgentLoop(agent), "x")[0]).reward == 1.0


# --- keys and sessions -----------------------------------------------------------------------------------------------


async def test_a_key_serves_its_own_episode_until_it_is_over():
    async def agent(session, asks):
        sessions.append(session)
        async with http(session, Authorization="Bearer sk-wrong") as other:
            refused = await ask(other, Q)
            assert refused.status_code == 401 and refused.json()["error"]["code"] == "invalid_api_key"
        async with http(session, Authorization="", **{"x-api-key": session.api_key}) as other:
            assert (await ask(other, Q)).status_code == 200
        if len(sessions) == 2:  # the other one's, which has ended
            async with http(sessions[0]) as late:
                gone = await ask(late, Q)
                assert gone.status_code == 410 and gone.json()["error"]["code"] == "session_over"
        else:
            return 1.0
        return 2.0

    sessions: list[AgentSession] = []

    engine = await installed_engine(replies("x", "y"))
    runner = make_runner(AgentLoop(agent), engine, renderer=Renderer(TOKENIZER), max_turns=2, max_prompt_tokens=40)
    groups = [await run_group(lease(prompt=json.dumps(RECORD).encode()), runner) for _ in range(2)]
    await runner.close()
    assert [member_of(group).reward for group in groups] == [1.0, 2.0]
    assert len({session.api_key for session in sessions}) == 2


def test_members_of_a_group_have_a_session_each_and_a_dead_agent_costs_its_own():
    async def agent(session, asks):
        keys.append(session.api_key)
        if len(keys) == 2:
            raise ConnectionError("the sandbox is gone")
        await ask(asks, Q)
        return 1.0

    keys: list[str] = []
    group, _ = play(AgentLoop(agent), members=3, reply=lambda *_: TOKENIZER.encode("x", add_special_tokens=False))
    assert len(set(keys)) == 3 and "the sandbox is gone" in group.detail
    assert sorted(member.status for member in group.members) == [
        MemberStatus.FINISHED, MemberStatus.FINISHED, MemberStatus.ABORTED
    ]


async def test_a_revoked_lease_ends_its_session_and_the_call_that_runs():
    async def agent(session, asks):
        sessions.append(session)
        await asyncio.Event().wait()

    sessions: list[AgentSession] = []

    engine = await installed_engine(replies("x"), gate=asyncio.Event())
    runner = make_runner(AgentLoop(agent), engine, renderer=Renderer(TOKENIZER), max_prompt_tokens=40)
    played = asyncio.ensure_future(run_group(lease(prompt=json.dumps(RECORD).encode()), runner))
    await until(lambda: sessions)
    async with http(sessions[0]) as asks:
        call = asyncio.ensure_future(ask(asks, Q))
        await until(lambda: engine.requests)
        played.cancel()
        assert (await call).status_code == 410
    await runner.close()


def test_a_call_without_room_is_told_and_the_trajectory_is_cut_there():
    task = task_of(settings("env.agent=tests.unit.actors.test_agents:talkative"))
    group, _ = play(task, "x", "y", max_turns=1)
    member = member_of(group)
    assert member.status == MemberStatus.TRUNCATED and member.finish == "env" and len(member.turns) == 1


def test_a_prompt_that_is_too_long_returns_the_lease():
    async def agent(session, asks):
        told.append((await ask(asks, {"role": "user", "content": "q" * 50})).json()["error"]["code"])
        return 1.0

    told: list[str] = []
    group, _ = play(AgentLoop(agent))
    assert told == ["context_length_exceeded"] and group.reason == ReturnReason.TOO_LONG


# --- calls that are repeated -----------------------------------------------------------------------------------------


def test_a_call_that_is_repeated_is_generated_once():
    async def agent(session, asks):
        first = await ask(asks, Q)
        again = await ask(asks, Q, headers={"x-stainless-retry-count": "1"})
        assert first.json() == again.json()
        other = await ask(asks, Q)  # delivered, and not marked: another call
        assert other.json() != first.json()
        return 1.0

    member = member_of(play(AgentLoop(agent), "x", "y")[0])
    assert sequences(member) == [f"{START}|x", f"{START}|y"]


async def test_a_client_that_hung_up_and_asks_again_gets_the_same_answer():
    gate = asyncio.Event()
    engine = await installed_engine(replies("x", "y"), gate=gate)

    async def agent(session, asks):
        with pytest.raises(httpx.ReadTimeout):
            async with http(session) as hasty:
                await hasty.post("/chat/completions", json={"messages": [Q]}, timeout=httpx.Timeout(5, read=0.05))
        again = asyncio.ensure_future(asks.post("/chat/completions", json={"messages": [Q]}))
        await asyncio.sleep(0)
        gate.set()
        return float((await again).json()["choices"][0]["message"]["content"] == "x")

    runner = make_runner(AgentLoop(agent), engine, renderer=Renderer(TOKENIZER), max_turns=5, max_prompt_tokens=40)
    group = await run_group(lease(prompt=json.dumps(RECORD).encode()), runner)
    await runner.close()
    member = member_of(group)
    assert member.reward == 1.0 and sequences(member) == [f"{START}|x"] and len(engine.requests) == 1


@pytest.mark.parametrize("num", [2, 5])
async def test_equal_calls_whose_clients_hung_up_get_an_answer_each_and_end_with_their_session(num):
    """Like n samples of one prompt that all ran into their client's time limit."""
    gate = asyncio.Event()
    engine = await installed_engine(replies(*map(str, range(num + 2))), gate=gate)

    async def hasty(session):
        async with http(session) as asks:
            with pytest.raises(httpx.ReadTimeout):
                await asks.post("/chat/completions", json=body, timeout=httpx.Timeout(5, read=0.05))

    async def agent(session, asks):
        await asyncio.gather(*(hasty(session) for _ in range(num)))
        retry = {"x-stainless-retry-count": "1"}
        again = [asyncio.ensure_future(asks.post("/chat/completions", json=body, headers=retry)) for _ in range(num)]
        await until(lambda: not any(one.gone() for (calls,) in [session.asked.values()] for one in calls))
        gate.set()
        said = [(await one).json()["choices"][0]["message"]["content"] for one in again]
        gate.clear()
        left.extend(asyncio.ensure_future(ask(asks, Q)) for _ in range(2))
        await until(lambda: len(engine.requests) == num + 2)
        return float(sorted(said) == list(map(str, range(num))))

    body, left = {"messages": [Q]}, []
    runner = make_runner(AgentLoop(agent), engine, renderer=Renderer(TOKENIZER), max_turns=9, max_prompt_tokens=40)
    member = member_of(await run_group(lease(prompt=json.dumps(RECORD).encode()), runner))
    await until(lambda: not engine.stats().running)
    await asyncio.gather(*left, return_exceptions=True)
    await runner.close()
    assert member.reward == 1.0 and len(sequences(member)) == num


@pytest.mark.parametrize("form", ["Bearer {}", "bearer {}", "BEARER  {}", "{}"])
def test_the_scheme_of_a_key_is_written_in_any_way(form):
    async def agent(session, asks):
        headers = {"Authorization": form.format(session.api_key)}
        async with httpx.AsyncClient(base_url=session.base_url, headers=headers) as other:
            told.append((await other.get("/models")).status_code)
        return float((await ask(asks, Q)).status_code == 200)

    told: list[int] = []
    assert member_of(play(AgentLoop(agent), "x")[0]).reward == 1.0 and told == [200]


# --- env.agent and env.agent_command ---------------------------------------------------------------------------------


def settings(*words: str):
    return load_config(["experiment=quickstart", *words])


async def talkative(record, base_url, api_key):
    async with http(AgentSession(base_url, api_key)) as asks:
        for _ in range(2):
            (await ask(asks, Q)).raise_for_status()


async def silent(record, base_url, api_key):
    """Gives no reward: the task scores the last answer."""
    async with http(AgentSession(base_url, api_key)) as asks:
        await ask(asks, Q)


async def posting(record, base_url, api_key):
    async with http(AgentSession(base_url, api_key)) as asks:
        await ask(asks, Q)
        assert (await asks.post("/reward", json={"reward": "much"})).status_code == 400
        (await asks.post("/reward", json={"reward": 0.5, "brief": 1.0})).raise_for_status()


async def sdk(record, client):
    """An unchanged agent of the package openai."""
    messages = [Q]
    for said in ("u", None):
        completion = await client.chat.completions.create(model="any", messages=messages)
        messages.append(completion.choices[0].message)
        if said is None:
            return float(completion.choices[0].message.content == record["answer"])
        messages.append({"role": "user", "content": said})


@pytest.mark.shows("env.agent")
def test_the_agent_plays_the_records_and_without_its_reward_the_task_scores(tmp_path):
    data = tmp_path / "q.jsonl"
    data.write_text("".join(json.dumps(RECORD) + "\n" for _ in range(30)))
    words = [f"data.path={data}", "reward.type=exact"]
    here = "env.agent=tests.unit.actors.test_agents"
    plain = member_of(play(task_of(settings(*words)), "7")[0])
    judged = member_of(play(task_of(settings(*words, f"{here}:silent")), "7")[0])
    posted = member_of(play(task_of(settings(*words, f"{here}:posting")), "7")[0])

    assert (plain.reward, judged.reward, posted.reward) == (1.0, 1.0, 0.5)
    assert posted.scores == {"score": 0.5, "brief": 1.0}
    nothing, _ = play(task_of(settings(words[0], f"{here}:silent")), "7")
    assert "the agent gave no reward" in nothing.detail


def test_an_agent_of_the_package_openai_is_not_changed(tmp_path):
    whole = "openai.resources.chat.completions"  # without jiter, which it needs, the package itself can be imported
    pytest.importorskip(whole, exc_type=ImportError, reason="issue 24: the extra `dev` brings it")
    task = task_of(settings("env.agent=tests.unit.actors.test_agents:sdk"))
    member = member_of(play(task, "x<end>", "7<end>")[0])
    assert sequences(member) == [f"{START}|x<end><start>u:u<end><start>a:7<end>"] and member.reward == 1.0


async def sdk_once(record, client):
    completion = await client.chat.completions.create(model="any", messages=[Q])
    return float(completion.choices[0].message.content == "7")


CONNECTIONS = []


async def connected(client, record):
    await client.chat.completions.create(model="any", messages=[Q])
    CONNECTIONS.append(client._client)
    return 1.0


def test_agents_that_follow_each_other_share_their_connections():
    """Connections that are garbage collected with a task leave their event loop deaf to the next ones."""

    async def agent(session, asks):
        for _ in range(2):
            await function_agent("tests.unit.actors.test_agents:connected")(RECORD, session)
        return 1.0

    CONNECTIONS.clear()
    play(AgentLoop(agent), "7<end>", "7<end>")
    assert len(CONNECTIONS) == 2 and CONNECTIONS[0] is CONNECTIONS[1]


async def anthropic(record, anthropic):
    said = await anthropic.messages.create(model="any", max_tokens=4, messages=[Q])
    return float(said.content[0].text == "7")


async def own_client(record, base_url, api_key):
    async with http(AgentSession(base_url, api_key)) as asks:
        return float((await ask(asks, Q)).status_code == 200)


@pytest.mark.parametrize(("word", "says"), [
    ("env.agent=a:b env.agent_command=c", "env.agent and env.agent_command each decide"),
    ("env.agent=a:b env.tools=[calculator] env.max_turns=4", "env.agent and env.tools each decide"),
    ("env.agent=nowhere.py:run", "no such file"),
    ("env.agent=tests.unit.actors.test_agents:nothing", "has no 'nothing'"),
    ("env.agent=tests.unit.actors.test_agents:settings", "is not an async function"),
    ("env.agent=tests.unit.actors.test_agents:ask", "must take the record and any of client"),
    ("""env.agent_command='"python -c \\"x"'""", "quote its words"),
    ("env.agent_command=\"' '\"", "is empty"),
])
def test_an_agent_that_is_none_is_refused_by_name(word, says):
    with pytest.raises(TaskError, match=says):
        task_of(settings(*shlex.split(word)))


@pytest.mark.parametrize(("name", "says"), [
    ("", "names no function of mine.py: write env.agent=.*mine.py:run. It has play, run.$"),
    (":rum", "Did you mean run"), (":zz", "It has play, run.$"), (":helper", "is not an async function"),
])
def test_a_file_without_the_name_of_a_function_is_told_which_it_has(tmp_path, name, says):
    file = tmp_path / "mine.py"
    file.write_text("async def play(record, client): ...\nasync def run(record, client): ...\ndef helper(): ...\n")
    with pytest.raises(TaskError, match=says):
        task_of(settings(f"env.agent={file}{name}"))


@pytest.mark.parametrize(("words", "says"), [
    (["actors.endpoint.bind=here"], "must look like 127.0.0.1:0"),
    (["actors.endpoint.bind=0.0.0.0:0"], "add actors.endpoint.advertise=NAME"),
])
def test_settings_that_contradict_each_other_are_refused(words, says):
    with pytest.raises(ConfigError, match=says):
        settings(*words)


@pytest.mark.shows("actors.endpoint.bind", "actors.endpoint.advertise")
async def test_sessions_have_the_address_that_is_set():
    with socket.socket() as taken:
        taken.bind(("127.0.0.2", 0))
        port = taken.getsockname()[1]
    bind = f"actors.endpoint.bind=127.0.0.2:{port}"
    for words, url in (
        ([bind], f"http://127.0.0.2:{port}/v1"),
        ([bind, "actors.endpoint.advertise=gateway"], f"http://gateway:{port}/v1"),
        (["actors.endpoint.advertise=https://proxy/a"], "https://proxy/a/v1"),
    ):
        endpoint: Endpoint = make_endpoint(settings(*words))
        async with endpoint.session(SimpleNamespace(full="", max_tokens=9)) as session:
            assert session.base_url == url
            if bind in words:
                with pytest.raises(EngineError, match="cannot be had"):
                    await make_endpoint(settings(bind)).session(SimpleNamespace(full="")).__aenter__()
        await endpoint.close()


@pytest.mark.parametrize(("host", "port"), [("127.0.0.1", 70_000), ("127.0.0.1", -1), ("..", 0), ("é" * 80, 0)])
async def test_an_address_that_is_none_cannot_be_had(host, port):
    with pytest.raises(OSError, match="port must be|label"):
        await serve(Sessions(), host, port)
    with pytest.raises(OSError, match="port must be|label"):
        async with listening(None, host, port, max_bytes=9):
            pass


def test_a_hub_may_not_name_an_agent_that_the_actor_does_not_allow():
    for word in ("env.agent=agent.py:run", "env.agent_command='rm -r x'"):
        given = to_plain(settings(word))
        with pytest.raises(ConfigError, match="code or a secret of this machine"):
            check_allowed(given, to_plain(settings()))
        check_allowed(given, given)


@jumping
async def test_a_thousand_idle_connections_and_clients_that_hang_do_not_keep_an_agent_waiting(descriptor_limit):
    async def agent(session, asks):
        host, port = session.base_url.removeprefix("http://").removesuffix("/v1").split(":")
        held.extend([await asyncio.open_connection(host, int(port)) for _ in range(1000)])
        begun = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {session.api_key}\r\n"
        held[0][1].write(begun.encode())  # and no more
        held[1][1].write(f"{begun}Content-Length: 9999\r\n\r\n{{".encode())
        first = await ask(asks, Q)
        await jump(BODY_S + 1)
        late = (await held[1][0].readuntil(b"}}")).decode()
        assert late.startswith("HTTP/1.1 408 ") and '"code": "request_timeout"' in late
        return float(first.status_code == 200 == (await ask(asks, Q)).status_code)

    held: list = []
    runner = make_runner(AgentLoop(agent), await installed_engine(replies("x", "y")), max_turns=5,
                         renderer=Renderer(TOKENIZER), max_prompt_tokens=40, step_timeout_s=1000.0)
    member = member_of(await run_group(lease(prompt=json.dumps(RECORD).encode()), runner))
    assert member.reward == 1.0 and sequences(member) == [f"{START}|x", f"{START}|y"]
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 2000
    await runner.close()
    for _, writer in held:
        writer.close()


@pytest.fixture
def descriptor_limit():
    """A limit that 1,000 connections would go beyond, as on many machines."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 4000:
        pytest.skip(f"this machine allows {hard} descriptors, both ends of 1,000 connections are 2,000")
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 1024), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
