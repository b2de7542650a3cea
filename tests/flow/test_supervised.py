"""Trainers beside RL as processes: a run directory as of RL, exact resuming, stopping, and models that load."""

import fcntl
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from actors.reward_model.scorer import RewardScorer
from learner.model.tiny import make_tiny_model
from streamrl.metrics.run_record import read_metrics
from tests.flow.forked_process import ForkedPopen
from tests.flow.processes import finished

COMMON = [
    "policy.optimizer.lr=3e-3", "rollout.num_prompts_per_step=16", "run.device=cpu", "run.num_threads=1",
    "eval.every_steps=10",
]

NUM_STEPS = 100
"""Steps of a run that a signal ends after its eighth: more than have lines in `PIPE_BYTES`."""
PIPE_BYTES = 4096
"""Room of a pipe, the least there is: a run waits for its reader, however late that is."""

OF_RL = (
    "lag of the tokens", "learner waited", "Bottleneck", ">Idle<", "with group advantages", ">groups<", ">publish<",
)
"""Words of a report of RL, which has none of it to tell here."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory, fork_server) -> Path:
    """A tiny model, and records: the answer is the prompt again, and a worse one something else."""
    folder, rng = tmp_path_factory.mktemp("supervised"), random.Random(0)
    make_tiny_model(folder / "model", characters="abcdef", hidden_size=32, num_heads=2)
    words = ["".join(rng.choices("abcdef", k=4)) for _ in range(301)]
    write(folder / "answers.jsonl", [{"prompt": one, "completion": one} for one in words[1:]])
    write(folder / "pairs.jsonl", [
        {"prompt": one, "chosen": one, "rejected": other}
        for one, other in zip(words[1:], words, strict=False) if one != other
    ])
    return folder


def write(path: Path, records: list[dict]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def command(kind: str, *words: str, ranks: int = 1) -> list[str]:
    if ranks > 1:
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        return [sys.executable, *torchrun, "-m", "learner.supervised", kind, *words]
    return [sys.executable, "-m", "streamrl.cli", kind, *words]


def run(folder: Path, kind: str, *words: str, ranks: int = 1, code: int = 0, printed: list[str] | None = None) -> str:
    """Its standard error, once it has ended with this exit status; what it `printed` is added to the list."""
    done = finished(command(kind, *words, ranks=ranks), folder, ForkedPopen, deadline_s=120)
    assert done.returncode == code, done.stderr
    if printed is not None:
        printed.append(done.stdout)
    return done.stderr


def words_for(data: str, run_dir: str, num_steps: int, *more: str) -> list[str]:
    return [*COMMON, "policy.model_path=model", f"data.path={data}.jsonl", f"run.dir={run_dir}",
            f"trainer.num_steps={num_steps}", *more]


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(run_dir / "model").state_dict()


def same_weights(one: Path, other: Path) -> bool:
    first, second = weights(one), weights(other)
    return all(torch.equal(first[name], second[name]) for name in first.keys() | second.keys())


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_records_that_leave_nothing_to_train_on_end_a_run(folder, kind):
    records = [{"prompt": "a" * 40, "completion": "b", "chosen": "b", "rejected": "c"} for _ in range(40)]
    write(folder / "long.jsonl", records)

    said = run(folder, kind, *words_for("long", f"long-{kind}", 9, "data.max_tokens=20", "data.test_ratio=0"), code=2)

    assert "the last 64 records leave nothing to train on: their prompts fill the 20 tokens" in said
    rows = read_metrics(folder / f"long-{kind}" / "metrics.jsonl")
    assert rows and not any("loss" in key or "accuracy" in key for row in rows for key in row)


def test_a_stopped_and_a_killed_run_go_on_to_the_same_bits(folder):
    schedule = ("policy.scheduler.name=warmup_stable_decay", "policy.scheduler.num_warmup_steps=12")
    run(folder, "sft", *words_for("answers", "whole", NUM_STEPS, *schedule))
    for number, run_dir in ((signal.SIGINT, "stopped"), (signal.SIGKILL, "killed")):
        words = words_for("answers", run_dir, NUM_STEPS, "checkpoint.every_steps=5", *schedule)
        child = ForkedPopen(command("sft", *words), cwd=folder, stderr=subprocess.PIPE, text=True)
        fcntl.fcntl(child.stderr, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        said = b""
        while b"step 8/" not in said:
            assert (more := os.read(child.stderr.fileno(), 1)), said
            said += more
        child.send_signal(number)
        rest = child.stderr.read()
        assert child.wait(60) == (0 if number == signal.SIGINT else -signal.SIGKILL)
        reached = (folder / run_dir / "LATEST").read_text().strip()
        assert reached < f"ckpt-{NUM_STEPS:08}"
        if number == signal.SIGINT:
            assert f"streamrl resume {run_dir}" in rest and reached >= "ckpt-00000008"
        run(folder, "resume", run_dir)

        assert same_weights(folder / "whole", folder / run_dir)
        rows = {row["step"]: row["supervised/loss"] for row in read_metrics(folder / run_dir / "metrics.jsonl")
                if "supervised/loss" in row}
        whole = read_metrics(folder / "whole" / "metrics.jsonl")
        rates = {row["step"]: row["policy/lr"] for row in whole if "policy/lr" in row}
        assert 12.9 < rates[13] / rates[1] < 13.1 and rates[NUM_STEPS] < rates[NUM_STEPS // 2] == rates[13]
        assert rows == {row["step"]: row["supervised/loss"] for row in whole if "supervised/loss" in row}


@pytest.mark.shows("checkpoint.directory")
def test_checkpoints_go_to_another_disk_and_the_run_goes_on_from_them(folder):
    run(folder, "sft", *words_for("answers", "elsewhere", 2, "checkpoint.directory=disk"))
    run(folder, "resume", "elsewhere", "trainer.num_steps=3")

    home = folder / "disk" / (folder / "elsewhere" / "run_id").read_text()
    assert [path.name for path in sorted(home.iterdir())] == ["ckpt-00000002", "ckpt-00000003"]
    assert (folder / "elsewhere" / "ckpt-00000003").resolve() == home / "ckpt-00000003"
    assert [row["step"] for row in read_metrics(folder / "elsewhere" / "metrics.jsonl")] == [0, 1, 2, 3]


def test_the_starting_model_may_go_without_a_held_out_loss(folder):
    run(folder, "sft", *words_for("answers", "late", 2, "eval.at_start=false"))

    assert [row["step"] for row in read_metrics(folder / "late" / "metrics.jsonl")] == [1, 2]


def test_the_held_out_loss_falls_and_the_run_directory_has_record_and_report(folder):
    printed: list[str] = []
    run(folder, "sft", *words_for("answers", "sft", 40), printed=printed)
    rows = [row for row in read_metrics(folder / "sft" / "metrics.jsonl")]
    held_out = {row["step"]: row["supervised/held_out_loss"] for row in rows if "supervised/held_out_loss" in row}

    assert list(held_out) == [0, 10, 20, 30, 40] and held_out[40] < 0.7 * held_out[0]
    assert not [key for key in rows[-1] if key.startswith(("hub/", "dropped/", "reward/"))]
    summary, report = (folder / "sft" / name for name in ("summary.json", "report.html"))
    assert json.loads(summary.read_text())["steps"] == 40
    assert json.loads(summary.read_text())["held_out_loss_last"] == held_out[40]
    page = report.read_text()
    assert "held out" in page and "answers.jsonl · model · SFT · " in page
    assert "<dt>held-out loss</dt>" in page and not [word for word in OF_RL if word in page]
    block = [line.split("  ")[0] for line in printed[0].splitlines()]
    assert [word for word in ("run", "trainer", "loss", "held-out loss", "steps", "device") if word in block] == [
        "run", "trainer", "loss", "held-out loss", "steps", "device"
    ]


def test_two_ranks_train_what_one_does(folder):
    words = ["policy.optimizer.name=sgd", "rollout.max_prompt_tokens=16", "learner.max_tokens_per_device=80"]
    run(folder, "sft", *words_for("answers", "one", 4, *words))
    run(folder, "sft", *words_for("answers", "two", 4, *words), ranks=2)
    one, two, start = weights(folder / "one"), weights(folder / "two"), weights(folder)

    assert all(torch.allclose(one[name], two[name], atol=1e-6) for name in one)
    assert any(not torch.allclose(one[name], start[name], atol=1e-4) for name in one)


@pytest.mark.parametrize("lora", [[], ["policy.lora.rank=4"]])
def test_dpo_prefers_the_chosen_answers(folder, lora):
    run_dir = f"dpo{len(lora)}"
    run(folder, "dpo", *words_for("pairs", run_dir, 20, *lora))
    rows = read_metrics(folder / run_dir / "metrics.jsonl")
    first, last = (next(row for row in order if "supervised/margin" in row) for order in (rows, rows[::-1]))

    assert first["supervised/loss"] == pytest.approx(0.693147, abs=1e-5)  # the policy is its reference
    assert last["supervised/margin"] > first["supervised/margin"] and last["supervised/loss"] < 0.68
    assert (folder / run_dir / "adapter").is_dir() == bool(lora)
    page = (folder / run_dir / "report.html").read_text()
    assert "· DPO ·" in page and "Pairs in the right order" in page and "<dt>held-out accuracy</dt>" in page


def test_a_reward_model_is_served_with_the_scores_that_it_learned(folder):
    run(folder, "train-reward-model", *words_for("pairs", "scores", 40))
    held_out = [row["supervised/held_out_accuracy"] for row in read_metrics(folder / "scores" / "metrics.jsonl")
                if "supervised/held_out_accuracy" in row]
    model = AutoModelForSequenceClassification.from_pretrained(folder / "scores" / "model")
    scorer = RewardScorer(str(folder / "scores" / "model"), "cpu")
    records = [json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()]

    def scores(key: str) -> list[float]:
        return scorer.score([
            [{"role": "user", "content": one["prompt"]}, {"role": "assistant", "content": one[key]}] for one in records
        ])

    right = sum(better > worse for better, worse in zip(scores("chosen"), scores("rejected"), strict=True))
    assert model.config.num_labels == 1
    assert held_out[-1] > held_out[0] and right / len(records) > 0.7


def test_a_bad_record_is_named_with_its_number_or_passed_over(folder):
    records = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    write(folder / "bad.jsonl", [*records[:2], {"prompt": "ab"}, *records[3:]])

    said = run(folder, "sft", *words_for("bad", "bad", 2), code=2)
    assert "bad.jsonl, record 3" in said and "data.answer_key" in said and "data.on_bad_record=skip" in said
    run(folder, "sft", *words_for("bad", "skipped", 2, "data.on_bad_record=skip"))
    assert "needs data.path=" in run(folder, "sft", "policy.model_path=model", "run.dir=none", code=2)


@pytest.mark.parametrize("kind, data", [("sft", "answers"), ("train-reward-model", "pairs")])
def test_the_exported_model_has_the_chat_template_of_the_settings(folder, kind, data):
    template = "{% for m in messages %}<{{ m['content'] }}>{% endfor %}"
    (folder / "template.jinja").write_text(template)
    said = run(folder, kind, *words_for(data, f"with-template-{kind}", 1, "data.chat_template=template.jinja"))
    assert AutoTokenizer.from_pretrained(folder / f"with-template-{kind}" / "model").chat_template == template
    assert "data.chat_template in the place of its own" in said


@pytest.mark.parametrize(("kind", "records", "said"), [
    ("sft", [{"question": "ab"}] * 40, "data.answer_key"),
    ("sft", [{"question": "ab", "answer": 4}] * 4, "4 training records"),
    ("dpo", [{"question": "ab", "answer": 4}] * 40, "data.chosen_key"),
    ("train-reward-model", [{"prompt": "ab", "chosen": "ab"}] * 40, "data.rejected_key"),
    ("sft", [{"prompt": "ab", "completion": {
        "role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": {}}]}}] * 40, "tool_calls"),
    ("sft", None, "no such file"),
])
def test_what_is_wrong_with_the_data_is_said_before_there_is_a_run_directory(folder, kind, records, said):
    if records is not None:
        write(folder / "wrong.jsonl", records)
    words = words_for("wrong" if records is not None else "gone", "never", 2, "data.test_ratio=0")

    assert said in run(folder, kind, *words, code=2)
    assert not (folder / "never").exists()
