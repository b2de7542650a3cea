"""Requests of every sort: what is illegal is the request's fault by name, and never another client's problem."""

import asyncio
import json
import logging
import threading
from contextlib import asynccontextmanager
from random import Random

import httpx
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.endpoint import access, fields
from actors.endpoint.reading import MAX_INSIDE, checked, table
from actors.endpoint.server import serve
from actors.local_policy import LocalPolicy
from actors.render import SHORT_TOKEN_CHARS, Renderer
from actors.rollout import run_group
from actors.serve.__main__ import served
from actors.trajectory import chat_form
from actors.trajectory.client import SMALL
from actors.trajectory.rules import EpisodeRules
from bench.requests import drive
from streamrl.config.schema import SamplingConfig
from streamrl.environment import Step
from streamrl.errors import RequestError
from streamrl.messages import MemberStatus, ReturnReason
from tests.contract.endpoint_fields import page
from tests.fakes.drawn_requests import ILLEGAL, ROUTES, draw_body
from tests.unit.actors.fakes import TOKENIZER as PLAIN
from tests.unit.actors.fakes import TableTask, installed_engine, lease, make_runner, says, tokenizer
from tests.unit.actors.test_agent_forms import CALL, SCHEMA
from tests.unit.actors.test_agents import AgentLoop, ask, play
from tests.unit.actors.test_rewritten_history import TOKENIZER, sequences
from tests.unit.engines.tiny_models import engine_for, qwen3
from tests.unit.envs.adapters.test_interaction_loops import RECORD, START, member_of

Q = [{"role": "user", "content": "abc"}]
TABLES = {name: one for name, one in ROUTES.items() if "count" not in name}
LEAST = {
    "/v1/chat/completions": {"messages": Q}, "/v1/responses": {"input": "abc"}, "/v1/messages": {"messages": Q},
    "/v1/messages/count_tokens": {"messages": Q}, "/inference/v1/generate": {"token_ids": [3]},
}


@asynccontextmanager
async def serving(engine, *, max_tokens=200, key="sk-mine", renderer=None, **headers):
    """A client of a server of this engine, as `streamrl serve` makes one, and its session."""
    rules = EpisodeRules(max_prompt_tokens=max_tokens, max_new_tokens=8, max_turns=1)
    policy = LocalPolicy(engine, PLAIN, frozenset(), renderer or Renderer(PLAIN))
    sessions = served(policy, SamplingConfig(temperature=0.0, max_new_tokens=8), rules, max_tokens, key)
    runner, port = await serve(sessions, "127.0.0.1", 0, keyless=key is None)
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json", **headers}
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=60) as asks:
            yield asks, sessions.get(key or "")
    finally:
        await runner.cleanup()


@asynccontextmanager
async def server(**options):
    """A client and a session of a server whose engine says "ok"."""
    async with serving(await installed_engine(says("ok")), **options) as both:
        yield both


# --- the tables ------------------------------------------------------------------------------------------------------


def fields_of(struct, inside=""):
    for name, one in table(struct).items():
        if one.get("use"):
            yield f"{inside}{name}", one
        if one["struct"] is fields.SamplingParams:
            yield from fields_of(one["struct"], "sampling_params.")


@pytest.mark.parametrize("path", TABLES)
def test_every_field_has_a_range_and_what_is_outside_is_refused_by_its_name(path):
    for name, one in fields_of(TABLES[path]):
        assert one["description"] and one["use"] in (fields.USED, fields.NO_EFFECT, fields.DEFAULT)
        *inside, last = name.split(".")
        for value in ([[[]]], 2**70, {"": [None]}):
            body = {**LEAST[path], **({inside[0]: {last: value}} if inside else {last: value})}
            raw = json.dumps(body).encode()
            try:
                given, _ = checked(raw, TABLES[path], "POST")
            except RequestError as error:
                assert last in str(error), (name, value, str(error))
            else:
                assert one["description"] == "anything" or isinstance(value, dict), (name, value)


def test_the_page_names_every_field():
    names, shown = {name.rpartition(".")[2] for table_ in TABLES.values() for name, _ in fields_of(table_)}, page()
    assert len(names) > 70 and not [name for name in names if f"`{name}`" not in shown]


RANGES = (
    ("temperature", (0, 0.0, 1e-320, 2, 100), (-1e-320, 100.5, "1", True)),
    ("top_p", (1e-320, 0.5, 1), (0, 1.0001, -1)),
    ("top_k", (-1, 0, 1, (1 << 31) - 1), (-2, 1 << 31, 1 << 63, 2**70, 1.5)),
    ("min_p", (0, 1), (-0.1, 1.1)),
    ("max_tokens", (1, (1 << 63) - 1), (0, -1, 1 << 63, 1.0, True, "1")),
    ("stop", ("", [""], [], "abc", ["a"] * 64), (1, [1], ["a"] * 65, "a" * 1025, [None], {})),
    ("n", (1,), (0, 2, 1.0, True)), ("frequency_penalty", (0, 0.0), (0.1, -1)), ("presence_penalty", (0,), (1,)),
    ("logit_bias", ({},), ({"1": 0},)), ("tool_choice", ("auto", "none"), ("required", {}, 1)),
    ("response_format", ({"type": "text"},), ({"type": "json_object"}, {}, "text")),
    ("stream", (True, False), (1, "true")), ("logprobs", (True, False), (1,)), ("top_logprobs", (0,), (1, 20)),
    ("seed", (1, -1, (1 << 63)), (2**70,)), ("user", ("x", 5, {}), ()), ("store", (False,), ()),
)


@pytest.mark.parametrize(("name", "legal", "illegal"), RANGES)
def test_the_ends_of_a_range_are_taken_and_what_is_beyond_is_not(name, legal, illegal):
    for value in legal:
        given, unknown = checked(json.dumps({"messages": Q, name: value}).encode(), fields.ChatFields, "POST")
        assert given[name] == value and not unknown
    for value in illegal:
        with pytest.raises(RequestError, match=rf"{name}|{name}\["):
            checked(json.dumps({"messages": Q, name: value}).encode(), fields.ChatFields, "POST")
    given, _ = checked(json.dumps({"messages": Q, name: None}).encode(), fields.ChatFields, "POST")
    assert name not in given


@pytest.mark.parametrize("role", ["x" * 100_000, "x - at `$.n`" * 9_000, "\n" * 100_000])
def test_a_refusal_does_not_repeat_a_value_of_any_length(role):
    with pytest.raises(RequestError) as caught:
        checked(json.dumps({"messages": [{"role": role, "content": "a"}]}).encode(), fields.ChatFields, "POST")
    assert len(str(caught.value)) < 500


@settings(deadline=None, max_examples=200)
@given(st.randoms(use_true_random=False), st.sampled_from(list(TABLES)))
def test_any_body_is_read_or_refused_in_a_sentence(random, path):
    body = draw_body(random, TABLES[path])
    try:
        given, unknown = checked(body, TABLES[path], "POST")
    except RequestError as error:
        assert 10 < len(str(error)) < 500
    else:
        assert set(given) <= set(TABLES[path].__struct_fields__) and not set(unknown) & set(given)


# --- a server under all of it ----------------------------------------------------------------------------------------


@pytest.mark.timeout(120)
def test_no_request_of_many_clients_harms_the_server_or_another_client():
    async def work():
        async with engine_for(qwen3(), PLAIN, max_num_seqs=8) as engine, serving(engine, key=None) as (asks, _):
            found = await drive(str(asks.base_url), psutil.Process(), 200, 8, seed=0)
            assert not found["failures"], found["failures"][:3]
            assert found["canaries"] == 20 and found["statuses"]["200"] > 20 and found["statuses"]["400"] > 60
            assert engine.stats().extra["dead"] == 0.0 == engine.stats().running

    asyncio.run(work())


def test_no_request_of_an_agent_costs_its_lease():
    async def agent(session, asks):
        random = Random(0)
        root = session.base_url.removesuffix("/v1")
        for _ in range(150):
            path = random.choice(list(ROUTES))
            answer = await asks.post(root + path, content=draw_body(random, ROUTES[path]))
            assert answer.status_code in (200, 400), answer.text
        for value in ILLEGAL:
            answer = await asks.post("/reward", content=json.dumps({"reward": value}))
            assert answer.status_code in (200, 400), answer.text
        return float((await ask(asks, {"role": "user", "content": "q"})).status_code == 200)

    async def work():
        engine = await installed_engine(says("ok"))
        runner = make_runner(AgentLoop(agent), engine, renderer=Renderer(TOKENIZER), max_turns=500,
                             max_prompt_tokens=4000, max_new_tokens=2)
        group = await run_group(lease(prompt=json.dumps(RECORD).encode()), runner)
        assert member_of(group).reward == 1.0 and len(engine.requests) > 20
        await runner.close()

    asyncio.run(work())


async def test_a_request_that_no_engine_can_serve_fails_its_episode_and_not_the_lease():
    async def refuse(request):
        raise RequestError("a prompt token lies outside the vocabulary of 3")

    engine = await installed_engine(says("ok"))
    engine.generate = refuse
    runner = make_runner(TableTask(lambda action: Step(1.0)), engine)
    group = await run_group(lease(), runner)
    assert group.reason == ReturnReason.ENV_ERROR and "outside the vocabulary" in group.detail
    await runner.close()


def test_counting_a_prompt_that_is_too_long_does_not_cut_the_episode():
    async def agent(session, asks):
        body = {"messages": [{"role": "user", "content": "q" * 90_000}]}
        answer = await asks.post("/messages/count_tokens", json=body)
        assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded"
        return float((await ask(asks, {"role": "user", "content": "q"})).status_code == 200)

    member = member_of(play(AgentLoop(agent), "x", max_tokens=500)[0])
    assert member.reward == 1.0 and member.status == MemberStatus.FINISHED


@pytest.mark.parametrize(("path", "more"), [
    ("/v1/chat/completions", {"stop": ""}), ("/v1/chat/completions", {"stop": ["", ""]}),
    ("/v1/messages", {"stop_sequences": [""]}), ("/v1/chat/completions", {"temperature": 1e-320}),
    ("/inference/v1/generate", {"sampling_params": {"stop": "", "temperature": 0.001, "top_p": 1e-320}}),
])
async def test_empty_stops_and_the_lowest_temperatures_are_served(path, more):
    async with engine_for(qwen3(), PLAIN) as engine, serving(engine) as (asks, _):
        plain = await asks.post(path, json={**LEAST[path], "max_tokens": 8})
        answer = await asks.post(path, json={**LEAST[path], "max_tokens": 8, **more})
        assert (answer.status_code, plain.status_code) == (200, 200), answer.text
        assert _said(answer) == _said(plain)


def _said(answer):
    body = answer.json()
    return [{key: one.get(key) for key in ("message", "token_ids", "text")} for one in
            body.get("choices") or body.get("content")]


@pytest.mark.parametrize("raw", [
    b'{"messages": ' + b"[" * 150_000, b'{"messages": [{}], "x": [' + b"[1]," * 150_000 + b"0]}",
    b'{"a":' * 150_000, b"[" * 60 + b"]" * 60, b"", b"[" * (MAX_INSIDE + 1) + b'"' + rb'\"' * 200_000,
    b'{"messages": "q", "stop": ' + b"[" * 950 + b"]" * 950 + b"}",
])
async def test_json_that_cannot_be_read_is_refused_as_json(raw):
    async with server() as (asks, session):
        for path in (*ROUTES, "/v1/reward"):
            answer = await asks.post(path, content=raw)
            code = 404 if path == "/v1/reward" and not raw else 400
            assert answer.status_code in (400, code) and answer.json()["error"]["message"], answer.text


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "unknown"])
async def test_a_body_that_is_not_in_its_encoding_is_refused(encoding):
    async with server() as (asks, session):
        headers = {"Content-Encoding": encoding}
        answer = await asks.post("/v1/chat/completions", content=b"no such bytes", headers=headers)
        assert answer.status_code == 400, answer.text


def test_brackets_in_a_text_are_no_lists():
    text = '[{"' * (MAX_INSIDE + 1)
    body = json.dumps({"messages": [{"role": "user", "content": text}]}).encode()
    given, _ = checked(body, fields.ChatFields, "POST")
    assert given["messages"][0]["content"] == text


async def test_fields_that_no_table_has_are_named_in_a_header():
    async with server() as (asks, session):
        answer = await asks.post("/v1/chat/completions", json={"messages": Q, "x\r\ny": 1, "verbosity": "low"})
        assert answer.status_code == 200 and answer.headers["x-streamrl-ignored"] == "verbosity, x??y"


# --- size ------------------------------------------------------------------------------------------------------------


class Holding(Renderer):
    """Renders a long prompt only when the test says so, and tells on which thread."""

    def __init__(self, tokenizer):
        super().__init__(tokenizer)
        self.go, self.threads = threading.Event(), []

    def input_text(self, messages, tools=()):
        text = super().input_text(messages, tools)
        if len(text) > SMALL:
            self.threads.append(threading.current_thread().name)
            assert self.go.wait(20)
        return text


async def test_a_long_prompt_is_rendered_while_others_are_answered():
    renderer = Holding(PLAIN)

    async with server(renderer=renderer, max_tokens=1000) as (asks, session):
        long = asyncio.ensure_future(asks.post("/v1/chat/completions", json={"messages": [
            {"role": "user", "content": "a" * (SMALL + 1)}
        ]}))
        while not renderer.threads:
            await asyncio.sleep(0.001)
        assert (await asks.post("/v1/chat/completions", json={"messages": Q})).status_code == 200
        renderer.go.set()
        assert (await long).json()["error"]["code"] == "context_length_exceeded"
        assert all(name.startswith("large-request") for name in renderer.threads)


@pytest.mark.parametrize("body", [
    {"messages": [{"role": "user", "content": "a"}] * 20_000},
    {"messages": [{"role": "user", "content": "a" * 900_000}]},
    {"messages": Q, "tools": [{"function": {"name": "f", "parameters": {"x": ["a" * 90] * 9000}}}]},
])
async def test_what_is_too_long_is_refused_before_all_of_it_is_tokenized(body):
    counted = []

    class Counting(Renderer):
        def encode(self, text):
            counted.append(len(text))
            return super().encode(text)

    template = "{{ tools | tojson }}{% for m in messages %}{{ m.content }}{% endfor %}"
    async with server(renderer=Counting(tokenizer(), chat_template=template), max_tokens=500) as (asks, session):
        answer = await asks.post("/v1/chat/completions", json=body)
        assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded", answer.text
        assert sum(counted) <= 2 * SHORT_TOKEN_CHARS * 500


@settings(deadline=None, max_examples=50)
@given(st.lists(st.sampled_from(["abc", " ", "hello hello", "?!", "9"]), max_size=400), st.integers(1, 200))
def test_no_text_that_fits_is_taken_for_too_long(words, limit):
    renderer, text = Renderer(PLAIN), "".join(words)
    if renderer.surely_over(text, limit):
        assert len(renderer.encode(text)) > limit


async def test_a_body_is_bounded_by_the_tokens_of_the_longest_prompt():
    async with server() as (asks, session):
        limit = access.max_body_bytes(session.client.max_tokens)
        assert limit == access.SMALLEST_LIMIT + access.BYTES_PER_TOKEN * 200 < access.max_body_bytes(100_000)
        assert access.max_body_bytes(1 << 40) == access.MAX_BODY_BYTES
        for size, status in ((limit - 100, 400), (limit + 1, 413)):
            answer = await asks.post("/v1/chat/completions", content=b" " * (size - 2) + b"{}")
            assert answer.status_code == status, answer.text


# --- what is kept ----------------------------------------------------------------------------------------------------


async def test_refused_calls_leave_nothing_and_answers_are_kept_up_to_a_size():
    async with server() as (asks, session):
        for _ in range(20):
            long = {"messages": [{"role": "user", "content": "a" * 100_000}]}
            assert (await asks.post("/v1/chat/completions", json=long)).status_code == 400
        assert not session.asked and len(session.answers) == 0 == session.answers.num_bytes
        for number in range(30):
            await asks.post("/v1/responses", json={"input": "abc" * (number + 1)})
        assert not session.asked and 0 < len(session.answers) <= 30
        assert session.answers.num_bytes <= chat_form.MAX_BYTES and len(session.conversations) == 30


@settings(max_examples=100)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 40))))
def test_what_is_kept_is_the_newest_that_fits(entries):
    one = chat_form.Kept(max_bytes=100)
    for key, size in entries:
        one.put(key, size, size)
        assert one.num_bytes == sum(one) <= 100
    if entries:
        assert entries[-1][0] in one


# --- who may ask -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("headers", "status"), [
    ({}, 200), ({"Host": "localhost:1"}, 200), ({"Host": "[::1]:80"}, 200), ({"Origin": "http://127.0.0.1:3000"}, 200),
    ({"Host": "evil.example"}, 403), ({"Host": "127.0.0.1.evil.example:80"}, 403), ({"Host": ""}, 403),
    ({"Origin": "https://evil.example"}, 403), ({"Origin": "null"}, 403),
    ({"Origin": "http://["}, 403), ({"Content-Type": "text/plain"}, 415),
    ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
])
async def test_without_a_key_a_page_of_another_site_is_not_answered(headers, status):
    async with server(key=None) as (asks, session):
        answer = await asks.post("/v1/chat/completions", content=json.dumps({"messages": Q}), headers=headers)
        assert answer.status_code == status, answer.text
        if status != 415:
            assert (await asks.get("/v1/models", headers=headers)).status_code == status


async def test_under_a_key_any_host_may_ask():
    async with server() as (asks, session):
        headers = {"Host": "gateway", "Origin": "https://other", "Content-Type": "text/plain"}
        answer = await asks.post("/v1/chat/completions", content=json.dumps({"messages": Q}), headers=headers)
        assert answer.status_code == 200


async def test_what_is_no_http_is_logged_a_few_times_in_a_line(caplog):
    with caplog.at_level(logging.WARNING):
        async with server() as (asks, _):
            for _ in range(40):
                reader, writer = await asyncio.open_connection(asks.base_url.host, asks.base_url.port)
                writer.write(b"GET / HTTP/1.1\r\nno header\r\n\r\n")
                assert b"400" in await reader.read(100)
                writer.close()

    lines = [one for one in caplog.records if "HTTP failure" in one.getMessage()]
    assert 1 <= len(lines) <= 7 and all(one.exc_info is None for one in lines)


# --- tokens and calls ------------------------------------------------------------------------------------------------


async def test_ids_of_a_padded_vocabulary_go_in_again():
    engine = await installed_engine(says("ok"))
    engine.vocab_size = 100
    async with serving(engine) as (asks, _):
        for token, status in ((len(PLAIN) + 5, 200), (99, 200), (100, 400)):
            answer = await asks.post("/inference/v1/generate", json={"token_ids": [3, token]})
            assert answer.status_code == status, answer.text


@pytest.mark.parametrize("back", ["same", "other", "none"])
@pytest.mark.parametrize("before", ["I do ", ""])
def test_a_call_that_comes_back_under_another_id_stands_once(back, before):
    async def agent(session, asks):
        tools = [{"type": "function", "function": {"name": "add", "parameters": SCHEMA}}]
        user = {"role": "user", "content": "q"}
        told = (await ask(asks, user, tools=tools)).json()["choices"][0]["message"]
        for call in told["tool_calls"]:
            call["id"] = {"same": call["id"], "other": "chatcmpl9x", "none": None}[back]
            call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]), indent=1)
        await ask(asks, user, told, {"role": "tool", "content": "4"}, tools=tools)
        return 1.0

    rules = {"max_prompt_tokens": 200, "max_new_tokens": 100}
    member = member_of(play(AgentLoop(agent), f"{before}{CALL}<end>", "7<end>", **rules)[0])
    assert sequences(member) == [f"{START}|{before}{CALL}<end><start>t:4<end><start>a:7<end>"]


def test_a_call_of_another_model_stands_once_in_its_text():
    async def agent(session, asks):
        call = {"id": "x", "type": "function", "function": {"name": "add", "arguments": '{"b": 2}'}}
        for content in (f"so {CALL}", "so", None):
            told = {"role": "assistant", "content": content, "tool_calls": [call]}
            answer = await ask(asks, {"role": "user", "content": "q"}, told, train=False, return_token_ids=True)
            read.append(TOKENIZER.decode(answer.json()["prompt_token_ids"]))
        return 0.0

    read: list[str] = []
    play(AgentLoop(agent), "x", "x", "x", max_prompt_tokens=200, max_tokens=400)
    assert len(read) == 3 and all(text.count("<tool_call>") == 1 for text in read)


def test_a_choice_of_no_tool_calls_none():
    async def agent(session, asks):
        tools = [{"type": "function", "function": {"name": "add", "parameters": SCHEMA}}]
        for choice in ("none", "auto"):
            answer = await ask(asks, {"role": "user", "content": "q"}, tools=tools, tool_choice=choice)
            found.append(answer.json()["choices"][0])
        return 1.0

    found: list = []
    play(AgentLoop(agent), CALL, CALL, max_prompt_tokens=200, max_new_tokens=100)
    assert [(one["finish_reason"], bool(one["message"]["tool_calls"])) for one in found] == [
        ("stop", False), ("tool_calls", True),
    ]


async def test_defaults_that_frameworks_write_out_are_taken():
    body = {
        "n": 1, "response_format": {"type": "text"}, "tool_choice": "none", "logit_bias": {}, "frequency_penalty": 0,
        "presence_penalty": 0.0, "top_logprobs": 0, "logprobs": False, "stop": None, "stream": False, "tools": [],
        "functions": [], "modalities": ["text"], "messages": [
            {"role": "user", "content": [{"type": "text", "text": "ab"}, {"type": "text", "text": "c"}]}
        ],
    }

    async with server() as (asks, session):
        one = await asks.post("/v1/chat/completions", json={**body, "return_token_ids": True})
        two = await asks.post("/v1/chat/completions", json={"messages": Q, "return_token_ids": True})
        assert one.status_code == 200, one.text
        assert one.json()["prompt_token_ids"] == two.json()["prompt_token_ids"]


async def test_a_client_of_the_loop_names_what_is_wrong_with_a_call():
    async with engine_for(qwen3(), PLAIN) as engine, serving(engine) as (_, session):
        for options, says_ in (
            ({"top_k": 2**70}, "top_k"), ({"temperature": "hot"}, "temperature"),
            ({"temperature": 10**400}, "temperature"), ({"stop": [1]}, "stop"), ({"stop": 5}, "stop"),
            ({"top_p": float("nan")}, "top_p"), ({"max_new_tokens": 2.0**70}, "max_new_tokens"),
            ({"min_p": 2}, "min_p"),
        ):
            with pytest.raises(RequestError, match=says_):
                await session.client.generate("abc", train=False, **options)
        assert (await session.client.generate("abc", train=False, stop=[""], max_new_tokens=3)).token_ids
