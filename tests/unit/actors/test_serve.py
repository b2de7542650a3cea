"""`streamrl serve`: a model behind the endpoint of agents, as a process that is asked over HTTP."""

import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from types import SimpleNamespace

import httpx
import pytest

from actors.engines.base import EngineSpec
from actors.engines.native.engine import NativeEngine
from actors.serve.__main__ import ServedSessions, main
from tests.unit.actors.test_agent_forms import form_of
from tests.unit.actors.test_evaluate import WORDS, checkpoint, logging_stays, trained  # noqa: F401, the fixtures

Q = [{"role": "user", "content": "abc"}]


@contextmanager
def serving(*words: str, **variables: str):
    """The base URL of the process, and what it printed before."""
    command = [sys.executable, "-m", "streamrl.cli", "serve", *words, "--port", "0", *WORDS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **variables}) as process:
        try:
            assert process.stdout is not None
            said = [next(process.stdout)]
            while not said[-1].startswith("serving "):
                said.append(next(process.stdout))
            yield said[-1].split()[-1], said
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0
        finally:
            process.kill()


def test_a_version_of_a_run_is_served_in_every_form_under_its_key(trained):  # noqa: F811
    with serving(f"{trained}@2", STREAMRL_API_KEY="sk-mine") as (url, _):
        with httpx.Client(base_url=url, timeout=60) as keyless:
            assert keyless.get("/models").status_code == 401
        with httpx.Client(base_url=url, timeout=60, headers={"Authorization": "Bearer sk-mine"}) as asks:
            (model,) = asks.get("/models").json()["data"]
            first = asks.post("/chat/completions", json={"messages": Q, "temperature": 0, "return_token_ids": True})
            again = asks.post("/chat/completions", json={"messages": Q, "temperature": 0, "return_token_ids": True})
            (choice,) = first.json()["choices"]
            assert choice["token_ids"] == again.json()["choices"][0]["token_ids"]
            assert "x-streamrl-sampling" not in first.headers  # the request's own sampling
            read = first.json()["prompt_token_ids"]
            tokens = asks.post(url.removesuffix("/v1") + "/inference/v1/generate", json={
                "token_ids": read, "sampling_params": {"temperature": 0.0, "max_tokens": len(choice["token_ids"])},
            }).json()["choices"][0]
            assert tokens["token_ids"] == choice["token_ids"]
            assert len(tokens["logprobs"]["content"]) == len(tokens["token_ids"])
            count = asks.post("/messages/count_tokens", json={"messages": Q}).json()
            assert count == {"input_tokens": len(read)}

            room = model["max_model_len"] - len(read)
            long = asks.post("/responses", json={"input": "abc", "max_output_tokens": room + 1, "temperature": 2.0})
            assert long.headers.get("x-streamrl-sampling") is None and long.json()["usage"]["output_tokens"] <= room
            over = asks.post("/messages", json={"max_tokens": 1, "messages": [{"role": "user", "content": "a" * 999}]})
            assert over.status_code == 400 and over.json()["error"]["code"] == "context_length_exceeded"
            assert asks.post("/reward", json={"reward": 1}).status_code == 404

        form_of("openai.resources.chat.completions")
        import openai

        client = openai.OpenAI(base_url=url, api_key="sk-mine")
        one = client.chat.completions.create(model="policy", messages=Q, max_completion_tokens=3, seed=1)
        assert one.usage is not None and 1 <= one.usage.completion_tokens <= 3
        two = client.responses.create(model="policy", input="abc", temperature=0.0)
        three = client.responses.create(model="policy", input="b", previous_response_id=two.id)
        assert three.usage.input_tokens > two.usage.input_tokens


def test_without_a_key_any_is_taken_and_other_machines_need_one(monkeypatch, capsys):
    session = SimpleNamespace()
    assert ServedSessions(session, None).get("") is ServedSessions(session, None).get("any") is session
    assert ServedSessions(session, "sk-mine").get("\udcff") is None

    async def run(*given):
        keys.append(given[-1])
        return 0

    keys: list = []
    monkeypatch.setattr("actors.serve.__main__.run", run)
    for words in (["m"], ["m", "--host", "0.0.0.0"], ["m", "--host", "0.0.0.0", "--api-key", "sk-mine"]):
        assert main(words) == 0
    assert keys[0] is None and keys[2] == "sk-mine" and len(keys[1]) > 30
    assert capsys.readouterr().out == f"api key: {keys[1]}\n"


def dying(spec: EngineSpec) -> NativeEngine:
    """An engine whose model fails with the first sequence, and without it."""
    engine = NativeEngine.from_spec(spec)

    def fail(*_):
        raise RuntimeError("the device is gone")

    engine._scheduler._launch = engine._scheduler.forward.score = fail
    return engine


def test_a_dead_engine_ends_the_server_with_a_status_and_says_why(checkpoint, tmp_path):  # noqa: F811
    command = [sys.executable, "-m", "streamrl.cli", "serve", str(checkpoint), "--port", "0", *WORDS]
    command.append(f"actors.engine={__name__}:dying")
    with (
        (tmp_path / "said").open("w") as said,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said, text=True) as process,
    ):
        try:
            assert process.stdout is not None
            url = next(line for line in process.stdout if line.startswith("serving ")).split()[-1]
            answer = httpx.post(f"{url}/chat/completions", json={"messages": Q}, timeout=60)
            assert answer.status_code == 503 and answer.json()["error"]["code"] == "engine_error"
            assert process.wait(30) == 2
        finally:
            process.kill()
    assert "error: the engine died: RuntimeError: the device is gone" in (tmp_path / "said").read_text()


@pytest.mark.parametrize(("words", "says"), [
    (["nowhere"], "error: nowhere: no such folder"),
    (["nowhere", "--port", "here"], "invalid int value"),
])
def test_what_cannot_be_served_is_one_sentence(words, says, capsys):
    try:
        code = main(words)
    except SystemExit as ended:
        code = ended.code
    assert code == 2 and says in capsys.readouterr().err
