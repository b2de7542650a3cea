"""The presets of scripts of RL2, rl4llm, ColossalAI and RLite, and `one_gpu`: each trains two steps of a tiny model."""

import json
import re
import string
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from learner.model.tiny import make_tiny_model
from streamrl.metrics.run_record import read_metrics
from tests.flow.forked_process import ForkedPopen
from tests.flow.processes import finished

SMALL = (
    "policy.model_path=model", "policy.optimizer.name=adamw", "trainer.num_steps=2", "trainer.num_epochs=null",
    "rollout.num_prompts_per_step=2", "learner.mesh.context=1", "run.device=cpu", "run.dir=run",
)
"""Settings that let one machine without a GPU train a model of two layers; everything else is the preset's."""
RL = (
    "launch.num_learner_ranks=1", "launch.num_actors=1", "rollout.train.sampling.max_new_tokens=4",
    "rollout.max_prompt_tokens=1000", "filter={zero_std: false, accuracy_range: null}", "eval.every_steps=0",
)
"""The same for RL; no group is filtered out, for random weights answer nothing right."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory, fork_server) -> Path:
    """A tiny model, a reward model of its size, and records of every form that the presets read."""
    folder = tmp_path_factory.mktemp("presets")
    characters = "".join(sorted(set(string.printable) - set("\r\x0b\x0c")))
    size = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "max_positions": 16384}
    make_tiny_model(folder / "model", characters=characters, **size)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    reward = AutoModelForSequenceClassification.from_pretrained(folder / "model", num_labels=1)
    reward.config.pad_token_id = tokenizer.pad_token_id
    torch.nn.init.normal_(reward.score.weight)
    reward.save_pretrained(folder / "reward-model")
    tokenizer.save_pretrained(folder / "reward-model")
    sums = [(f"{a}+{b}=", str(a + b)) for a in range(8) for b in range(8)]
    write(folder / "answers.jsonl", [{"prompt": question, "completion": answer} for question, answer in sums])
    write(folder / "pairs.jsonl", [{"prompt": one, "chosen": answer, "rejected": "0?"} for one, answer in sums])
    write(folder / "sums.jsonl", [{"question": question, "answer": answer} for question, answer in sums])
    write(folder / "one.jsonl", [{"question": "5+8=", "answer": "13"}])
    write(folder / "wiki.jsonl", [{"title": "Oslo", "contents": "Oslo is the capital of Norway."}])
    return folder


def write(path: Path, records: list[dict]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.mark.parametrize("typed", [
    "sft experiment=limo_sft data.path=answers.jsonl",
    "train-reward-model experiment=skywork_rm data.path=pairs.jsonl",
    "dpo experiment=ultrafeedback_dpo data.path=pairs.jsonl",
    "launch experiment=orz data.path=sums.jsonl",
    "launch experiment=orz algorithm=ppo kl.mode=off critic.kind=model data.path=sums.jsonl",
    "launch experiment=countdown",
    "launch experiment=one_gpu",
    "launch experiment=one_gpu env.name=gsm8k env.options={} data.path=sums.jsonl",
    "launch experiment=searchr1 env.name=search.questions env.tool_use.documents=wiki.jsonl data.path=sums.jsonl",
    "launch experiment=colossal_grpo data.path=sums.jsonl",
    "launch experiment=colossal_grpo algorithm=dapo data.path=sums.jsonl",
    "launch experiment=colossal_ppo data.path=sums.jsonl reward.model.path=reward-model critic.model_path=reward-model",
    "launch experiment=explore_grpo data.path=sums.jsonl",
    "launch experiment=one_shot_rlvr data.path=one.jsonl data.test_ratio=0 eval.datasets.math_500.path=sums.jsonl",
], ids=lambda typed: "-".join(word.partition("=")[2] for word in typed.split() if word.startswith(("exp", "alg"))))
def test_a_preset_trains_two_steps(folder: Path, tmp_path: Path, typed: str) -> None:
    for path in folder.iterdir():
        (tmp_path / path.name).symlink_to(path)
    kind, *words = typed.split()
    more = [*SMALL, *(RL if kind == "launch" else ()), *([] if "one_shot" in typed else ["eval.num_samples=2"])]
    done = finished([sys.executable, "-m", "streamrl.cli", kind, *words, *more], tmp_path, ForkedPopen, deadline_s=150)

    assert done.returncode == 0, done.stdout + done.stderr
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows if "policy/grad_norm" in row] == [1, 2]
    if "one_gpu" in typed:
        told = r"\d+ CPU cores: \S+ tokens/s generated, \S+ trained; .+ from \S+ to \S+ in \S+; peak memory \S+"
        assert re.search(f"in one line +model on {told} GiB of the host", done.stdout)
