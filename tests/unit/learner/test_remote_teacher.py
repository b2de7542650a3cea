"""A teacher behind a server: the same scores as its checkpoint's, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web
from transformers import AutoModelForCausalLM, AutoTokenizer

import streamrl
from envs.json_service import listening
from learner.data.packing import pack
from learner.model.policy import load_policy
from learner.model.reference import FrozenPolicy
from learner.model.teacher import RemoteTeacher
from learner.model.tiny import make_tiny_model
from learner.setup.preflight import check_models
from streamrl.config.load import load_config
from streamrl.errors import ConfigError, StreamrlError
from tests.fakes.service import in_thread
from tests.unit.learner.learner_factories import batch
from tests.unit.learner.objective.test_distill import groups_of

pytestmark = pytest.mark.timeout(120)
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVW"  # with four special tokens the ids of `batch`


@contextmanager
def small_server(model_dir: Path, *, tells: bool = True) -> Iterator[str]:
    """The part of vLLM's server that a teacher needs, over a real model; one that does not tell logs nothing."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(model_dir)

    async def answer(request: web.Request, body: Any) -> tuple[int, Any]:
        return 200, {"data": [{"id": "served"}]} if request.method == "GET" else told(request.path, body)

    @torch.no_grad()
    def told(path: str, asked: dict[str, Any]) -> dict[str, Any]:
        assert asked["model"] == "served"
        if path == "/tokenize":
            return {"tokens": tokenizer.encode(asked["prompt"], add_special_tokens=asked["add_special_tokens"])}
        assert path == "/v1/completions" and asked["prompt_logprobs"] == 0
        if not tells:
            return {"choices": [{"text": "a"}]}
        ids = torch.tensor(asked["prompt"])
        logprobs = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0].tolist()
        tokens = [{str(one): {"logprob": value}} for one, value in zip(asked["prompt"][1:], logprobs, strict=True)]
        return {"choices": [{"prompt_logprobs": [None, *tokens]}]}

    with in_thread(listening(answer, "127.0.0.1", 0, max_bytes=1 << 20)) as (_, port):
        yield f"http://127.0.0.1:{port}/v1"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return (
        make_tiny_model(folder / "student", characters=LETTERS, hidden_size=16, num_heads=2, seed=1),
        make_tiny_model(folder / "teacher", characters=LETTERS, hidden_size=32, num_heads=2, seed=2),
    )


@pytest.mark.parametrize("max_tokens", [40, 10_000])
def test_its_scores_are_those_of_the_checkpoint(models, max_tokens):
    student, teacher = models
    here = FrozenPolicy(load_policy(teacher), name="teacher")
    with small_server(teacher) as url:
        there = RemoteTeacher(url, student)
        assert not there.shares_prompts
        for micro in pack(batch(3, 3, seed=4), max_tokens):
            torch.testing.assert_close(there.score(micro), here.score(micro), atol=1e-4, rtol=1e-4)


def test_training_with_a_server_is_training_with_its_checkpoint(models):
    student, teacher = models
    settings = {"algorithm": "distill", "policy__optimizer__lr": 3e-3, "rollout__max_prompt_tokens": 16}
    with small_server(teacher) as url:
        trainers = [streamrl.Trainer(student, distill__teacher=where, **settings) for where in (teacher, url)]
        rows = [[trainer.train(groups_of(trainer, number)) for number in range(2)] for trainer in trainers]

    for here, there in zip(*rows, strict=True):
        for key in ("distill/kl", "policy/grad_norm", "advantage/std"):
            assert there[key] == pytest.approx(here[key], rel=1e-4)


def test_what_cannot_be_a_teacher_is_refused_with_what_to_do(models, tmp_path):
    student, teacher = models
    other = make_tiny_model(tmp_path / "other", characters=LETTERS[::-1], hidden_size=16, num_heads=2)

    def check(url: str, *words: str) -> None:
        check_models(
            load_config([f"policy.model_path={student}", f"distill.teacher={url}", *words]), notify=pytest.fail
        )

    with small_server(teacher) as url, small_server(other) as strange, small_server(teacher, tells=False) as silent:
        check(url)
        with pytest.raises(ConfigError, match="served, which has another tokenizer than the policy"):
            check(strange)
        with pytest.raises(ConfigError, match="temperature 1 only; sample at 1"):
            check(url, "rollout.train.sampling.temperature=0.7")
        with pytest.raises(StreamrlError, match="gave no log-probs of a prompt .KeyError: 'prompt_logprobs'"):
            RemoteTeacher(silent, student).score(pack(batch(1, 1), 1000)[0])
    with pytest.raises(ConfigError, match="no model is served there .ConnectError.*vllm serve MODEL"):
        check(url)
