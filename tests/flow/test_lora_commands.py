"""Every command that takes a run, at a real run that trains an adapter: answers are those of the merged weights."""

import json

import torch
from safetensors.torch import load_file

import streamrl
from actors.local_policy import find_model
from tests.flow.processes import RunHarness


def command(harness: RunHarness, *words: str, said: str = "") -> str:
    """Its output; it must succeed without a traceback."""
    done = harness.command(*words, said=said)
    assert done.returncode == 0 and "Traceback" not in done.stderr, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_every_command_reads_a_run_with_an_adapter(harness: RunHarness):
    words = ("policy.lora.rank=4", "trainer.num_steps=2", "checkpoint.every_steps=1", "launch.num_actors=1")
    first = harness.launch(*words)
    assert harness.finish(first, 400) == 0, harness.logs()
    run = str(harness.run_dir)

    exported = load_file(harness.run_dir / "model" / "model.safetensors")
    model = find_model(f"{run}@2")
    with model.files() as files:
        saved = model.tensors(files, torch.float32)
    assert saved.keys() == exported.keys() and all(torch.equal(saved[name], exported[name]) for name in saved)

    greedy = ("eval.num_samples=4", "actors.num_threads=1")
    for source in (run, f"{run}@2", f"{run}@1"):
        command(harness, "eval", source, *greedy)
    of_model, of_version, of_first = (
        sorted(json.loads(line)["text"] for line in path.read_text().splitlines())
        for path in sorted((harness.run_dir / "evals").glob("*.jsonl"))
    )
    assert of_version == of_model and len(of_first) == 4
    said = "abc\n/new\nabcd\n"
    assert command(harness, "chat", run, said=said) == command(harness, "chat", run, "--version", "2", said=said)

    assert "report.html" in command(harness, "report", run)
    assert "prompt" in command(harness, "samples", run)
    assert "finished at version 2" in command(harness, "status", run)
    assert streamrl.load_run(run).config.policy.lora.rank == 4
    command(harness, "resume", run, "trainer.num_steps=3")
    assert "finished at version 3" in command(harness, "status", run)
    assert harness.leftovers() == []
