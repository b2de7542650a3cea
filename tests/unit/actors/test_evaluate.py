"""`streamrl eval` and `streamrl chat` on a real tiny checkpoint, as processes and in this one."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
from io import BytesIO, StringIO, TextIOWrapper
from pathlib import Path

import pytest
import torch
import xxhash
from safetensors.torch import save_file

from actors.chat import _read, answer, with_version
from actors.chat import main as chat
from actors.evaluate import Progress, evaluate, main, summary, text_of
from actors.local_policy import find_model, local_config, open_policy
from envs.registry import task_of
from envs.rewards.extract import stated_answer
from learner.checkpoint.checkpoint import save_checkpoint
from learner.model.optimizer import make_optimizer
from learner.model.policy import load_policy
from learner.model.tiny import prepare_tiny_model
from learner.ranks.mesh import Ranks
from streamrl import cli
from streamrl.config.eval_sets import EvalSet
from streamrl.config.load import load_config, to_yaml
from streamrl.config.rules import eval_sampling
from streamrl.config.schema import OptimizerConfig
from streamrl.environment import ChatMessage
from streamrl.errors import CheckpointError, ConfigError
from streamrl.weights.assets import pack_assets
from streamrl.weights.saved import read_version, saved_versions
from tests.unit.stream.test_rebuilt import write_evaluations

ROOT = Path(__file__).parents[3]
WORDS = ["experiment=quickstart", "eval.num_samples=3", "actors.num_threads=1"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """A tiny random model that knows the letters of the quickstart."""
    folder = tmp_path_factory.mktemp("models")
    return prepare_tiny_model(
        folder, task_of(load_config(["experiment=quickstart"])), hidden_size=16, num_layers=1, num_heads=2,
        num_warm_start_steps=0, warm_start_lr=1e-3, stop_at=0.5, seed=0, num_threads=1, progress=print,
        max_positions=1024,
    )  # fmt: skip


@pytest.fixture(scope="module")
def trained(checkpoint, tmp_path_factory) -> Path:
    """A run that has no exported model yet, and checkpoints of versions 2 and 4."""
    run = tmp_path_factory.mktemp("runs") / "mine"
    run.mkdir()
    (run / "config.yaml").write_text(to_yaml(load_config([*WORDS, f"run.dir={run}"])))
    (run / "assets.msgpack").write_bytes(pack_assets(checkpoint))
    policy = load_policy(checkpoint)
    for version in (2, 4):
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(version))
        optimizer = make_optimizer(policy, OptimizerConfig())
        save_checkpoint(run, version, policy, optimizer, Ranks(), extra={}, blobs={}, num_keep=5)
    return run


def answers_of(checkpoint: Path, tmp_path: Path, *words: str, task=None):
    """(answers, their lines in the file, the summary)."""
    config = local_config(str(checkpoint), [*WORDS, *words])
    task = task or task_of(config)

    async def run():
        policy = await open_policy(config)
        try:
            with (tmp_path / "out.jsonl").open("w") as out:
                return await evaluate(EvalSet("", config), policy, task, out, Progress(3))
        finally:
            await policy.engine.close()

    answers = asyncio.run(run())
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    return answers, lines, summary(EvalSet("", config), task, answers)


def test_every_prompt_is_answered_as_often_as_asked_and_written(checkpoint, tmp_path):
    words = ("eval.num_responses=2", "rollout.test.sampling.temperature=1")
    answers, lines, result = answers_of(checkpoint, tmp_path, *words)
    places = sorted((line["prompt_index"], line["response"]) for line in lines)
    assert places == [(i, r) for i in range(3) for r in (0, 1)]
    by_prompt = {line["prompt_index"]: line["record"]["prompt"] for line in lines}
    assert by_prompt == {i: task_of(load_config(WORDS)).record("test", i)["prompt"] for i in range(3)}
    assert set(result["estimates"]) == {"avg@2", "pass@1", "pass@2", "maj@2"}
    assert result["estimates"]["avg@2"][0] == pytest.approx(sum(line["score"] for line in lines) / 6)
    assert all(line["answer"] == stated_answer(line["text"]) for line in lines)
    assert "3 prompts, 2 answers each" in text_of(result, tmp_path / "out.jsonl")
    again = answers_of(checkpoint, tmp_path, *words)[1]
    assert sorted(line["text"] for line in again) == sorted(line["text"] for line in lines)  # the same seeds


@pytest.mark.shows("eval.solved_score")
def test_what_counts_as_solved_is_set(checkpoint, tmp_path):
    words = ("eval.num_responses=2", "rollout.test.sampling.temperature=1")
    assert answers_of(checkpoint, tmp_path, *words, "eval.solved_score=0")[2]["estimates"]["pass@2"][0] == 1.0
    assert answers_of(checkpoint, tmp_path, *words, "eval.solved_score=2")[2]["estimates"]["pass@2"][0] == 0.0


def test_failing_rewards_are_counted_and_named(checkpoint, tmp_path):
    config = load_config(WORDS)
    task = task_of(config)
    task.reward = lambda record, completion: 1 / 0
    answers, lines, result = answers_of(checkpoint, tmp_path, task=task)
    assert (answers.num_failed, answers.rewards) == (3, [])
    assert "ZeroDivisionError" in lines[0]["failure"] and "ZeroDivisionError" in text_of(result, tmp_path)


def test_several_greedy_answers_are_refused(checkpoint):
    with pytest.raises(ConfigError, match="rollout.test.sampling.temperature"):
        local_config(str(checkpoint), [*WORDS, "eval.num_responses=2"])


# --- a version of a run -----------------------------------------------------------------------------------------------


def test_a_saved_version_is_read_as_the_learner_wrote_it(trained, checkpoint):
    policy = load_policy(checkpoint)
    names = {name for name, _ in policy.model.named_parameters()}
    older, newer = (dict(read_version(trained, version)) for version in saved_versions(trained))
    assert older.keys() == newer.keys() == names
    assert all(not torch.equal(older[name], newer[name]) for name in names)
    policy.model.load_state_dict(newer, strict=False)
    assert all(torch.equal(tensor, newer[name]) for name, tensor in policy.model.named_parameters())


def test_blocks_of_several_ranks_make_one_tensor(tmp_path):
    folder = tmp_path / "ckpt-00000007"
    folder.mkdir()
    whole, entries = torch.arange(12.0).reshape(4, 3), {}
    for rank, rows in enumerate((slice(0, 3), slice(3, 4))):
        path = folder / f"rank-{rank:05d}-of-00002.safetensors"
        boxes = {"model/model.w": {"offset": [rows.start, 0], "whole": [4, 3]}}
        save_file({"model/model.w": whole[rows].clone()}, path, metadata={"boxes": json.dumps(boxes)})
        entries[path.name] = {"xxh3_128": xxhash.xxh3_128_hexdigest(path.read_bytes())}
    (folder / "manifest.json").write_text(json.dumps({"body": {"files": entries}}))

    assert torch.equal(dict(read_version(tmp_path, 7))["w"], whole)
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointError, match="missing or damaged"):
        dict(read_version(tmp_path, 7))


def test_a_version_that_is_not_there_names_those_that_are(trained):
    with pytest.raises(ConfigError, match=r"no checkpoint of version 3, and no log.*Saved versions: 2, 4, as .*mine@4"):
        find_model(f"{trained}@3")
    with pytest.raises(ConfigError, match=r"no exported model.*Saved versions: 2, 4"):
        find_model(str(trained))


def test_versions_of_a_run_talk_differently_and_are_evaluated(trained, tmp_path, monkeypatch, capsys):
    greedy = "rollout.test.sampling.temperature=0"

    async def says(version: int) -> str:
        config = local_config(f"{trained}@{version}", [greedy])
        policy, user = await open_policy(config), [ChatMessage("user", "abc")]
        try:
            return "\n".join([await answer(eval_sampling(config), policy, user, seed) for seed in range(3)])
        finally:
            await policy.engine.close()

    older, newer = asyncio.run(says(2)), asyncio.run(says(4))
    assert older != newer
    said = streamrl("chat", str(trained), "--version", "4", greedy, cwd=tmp_path, stdin="abc\n/new\nabc\n/new\nabc\n")
    assert (said.returncode, said.stdout.rstrip("\n")) == (0, newer), said.stderr
    assert "greedy (temperature 0) as in evaluations (rollout.test.sampling)" in said.stderr
    monkeypatch.setattr("sys.stdin", StringIO())
    assert chat([f"{trained}@4", "rollout.test.sampling.temperature=0.5"]) == 0
    assert "temperature 0.5 as in evaluations" in capsys.readouterr().err
    write_evaluations(trained, [(0, "", 0.1), (2, "", 0.3), (4, "", 0.9)])
    result = answers_of(f"{trained}@best", tmp_path)[2]
    assert result["model"] == f"{trained}@4" and result["num_prompts"] == 3


def test_a_line_in_another_encoding_is_read(monkeypatch):
    heard = []

    async def run(source, words):
        heard.append(_read())
        return 0

    monkeypatch.setattr("actors.chat.run", run)
    monkeypatch.setattr("sys.stdin", TextIOWrapper(BytesIO("é\n".encode("latin-1")), "utf-8"))
    assert chat(["model"]) == 0 and heard == ["\ufffd"]


@pytest.mark.parametrize("words", [["run", "--version"], ["run", "--version", "new"], ["--version", "4"]])
def test_a_version_without_its_number_or_its_run_is_refused(words):
    with pytest.raises(ConfigError, match="write streamrl chat RUN --version 40"):
        with_version(words)
    assert with_version(["run", "--version=4", "a=b"]) == ["run@4", "a=b"]
    assert with_version(["run", "--version", "best:hard"]) == ["run@best:hard"]


# --- several sets -----------------------------------------------------------------------------------------------------


def test_every_set_is_evaluated_with_its_own_prompts_and_a_file_of_answers(checkpoint, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hard.jsonl").write_text('{"question": "abc", "answer": "cba"}\n{"question": "ab", "answer": "ba"}\n')
    words = (
        "eval.datasets.hard.path=hard.jsonl", "eval.datasets.hard.reward.type=exact",
        "eval.datasets.hard.sampling.temperature=1", "eval.datasets.hard.num_responses=2",
    )
    assert main([str(checkpoint), *WORDS, *words]) == 0
    printed = capsys.readouterr().out
    assert "avg@1" in printed and "maj@2" in printed and "set             hard" in printed
    own, hard = (json.loads((tmp_path / f"evals/{name}-001.json").read_text()) for name in ("string.reverse", "hard"))
    assert (own["set"], own["num_prompts"], hard["set"], hard["num_prompts"]) == ("", 3, "hard", 2)
    lines = [json.loads(line) for line in (tmp_path / "evals/hard-001.jsonl").read_text().splitlines()]
    assert sorted({line["record"]["question"] for line in lines}) == ["ab", "abc"] and len(lines) == 4
    assert main([str(checkpoint), *WORDS, "eval.datasets.hard={path: no.jsonl, reward: {type: exact}}"]) == 2
    assert "error: eval.datasets.hard: data.path=no.jsonl" in capsys.readouterr().err


def test_a_folder_may_have_any_name(checkpoint, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "execv", lambda path, words: print(words[-1]))
    for name in ("epoch=3/model", "lr=1e-5,seed=2", "a,b", "[x]", "{x}", "+x=1", "1e5", "null", "it's"):
        Path(name).parent.mkdir(exist_ok=True)
        shutil.copytree(checkpoint, name)
        assert local_config(name, WORDS).policy.model_path == name
        for command in ("eval", "chat", "serve"):
            monkeypatch.setattr(sys, "argv", ["streamrl", command, name])
            cli.main()
            assert capsys.readouterr() == (f"{name}\n", "")


@pytest.mark.parametrize("open_model", [main, chat])
def test_a_setting_in_place_of_the_model_is_an_error(open_model, capsys):
    assert open_model(["eval.num_samples=3"]) == 2
    assert capsys.readouterr().err.startswith("error: eval.num_samples=3: no such folder. Give a run, such as runs/")


def test_what_is_no_model_says_what_it_is(tmp_path):
    with pytest.raises(ConfigError, match="no such folder"):
        find_model(str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="no config.json"):
        find_model(str(tmp_path))
    (tmp_path / "config.yaml").write_text("{}")
    with pytest.raises(ConfigError, match="no exported model.*checkpoint.resume=true"):
        find_model(str(tmp_path))
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    with pytest.raises(ConfigError, match="no weights"):
        find_model(str(tmp_path))


@pytest.fixture(autouse=True)
def logging_stays(monkeypatch):
    """`main` disables it in its process, which here is that of other tests too."""
    monkeypatch.setattr("logging.disable", lambda level: None)


def streamrl(*words: str, cwd: Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "streamrl.cli", *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, input=stdin, timeout=100)


def test_the_commands_run_from_any_folder(checkpoint, tmp_path, monkeypatch, capsys):
    done = streamrl("eval", str(checkpoint), *WORDS, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "avg@1" in done.stdout and (tmp_path / "evals/string.reverse-001.jsonl").exists()
    monkeypatch.chdir(tmp_path)  # as a process it chats above
    monkeypatch.setattr("sys.stdin", StringIO("abc\n/new\nab\n/quit\n"))
    assert chat([str(checkpoint), *WORDS]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert main(["nowhere"]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: nowhere")
