"""Trainers beside RL that go on with other settings: the records that they read, and what they compare with."""

import json
import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from learner.model.tiny import make_tiny_model
from learner.ranks.mesh import Ranks
from learner.supervised.run import Run, build_run, check_start, open_records
from streamrl.config.load import load_config
from streamrl.errors import ConfigError
from tests.unit.learner.test_exact_run import FakeStop

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", characters="ab", hidden_size=16, num_heads=2)


def trained(monkeypatch, kind: str, model: Path, run_dir: Path, *words: str) -> tuple[Run, list[list[int]]]:
    """A run of 30 records to its end, and the records that each step read."""
    read, rows = [], Run.rows

    def reading(run, records, places, what):
        if what == "training":
            read.append(list(places))
        return rows(run, records, places, what)

    monkeypatch.setattr(Run, "rows", reading)
    line = json.dumps({"prompt": "ab", "completion": "ba", "chosen": "ba", "rejected": "ab"})
    file = run_dir.parent / "records.jsonl"
    file.write_text(30 * f"{line}\n")
    config = load_config([
        f"policy.model_path={model}", f"data.path={file}", "data.test_ratio=0", f"run.dir={run_dir}", "run.device=cpu",
        "checkpoint.export_hf=false", *words,
    ])
    run_dir.mkdir(exist_ok=True)
    with ExitStack() as resources:
        check_start(config, kind)
        run = build_run(config, kind, open_records(config, kind), run_dir, FakeStop(), Ranks(), resources)
        run.finish(completed=run.train())
    monkeypatch.setattr(Run, "rows", rows)
    return run, read


@pytest.mark.parametrize("sizes", [(4, 8), (8, 3), (5, 5, 7), (2, 13, 4)])
def test_a_resumed_run_with_batches_of_another_size_reads_on_where_it_was(monkeypatch, model_dir, tmp_path, sizes):
    done = []
    for place, size in enumerate(sizes):
        words = [f"rollout.num_prompts_per_step={size}", "checkpoint.resume=true"]
        last = place == len(sizes) - 1
        words += ["trainer.num_epochs=2"] if last else [f"trainer.num_steps={len(done) + 2}"]
        run, read = trained(monkeypatch, "sft", model_dir, tmp_path / "run", *words[: 1 if not place else 2], words[2])
        done += read
    assert run.step == run.config.trainer.num_steps == len(done)
    passes, at = [[], []], 0
    for batch in done:
        at += len(passes[at]) + len(batch) > 30
        passes[at] += batch
    for one in passes:
        assert len(one) == len({*one}) > 30 - sizes[-1], "each record once, but for less than a batch"
    assert trained(monkeypatch, "sft", model_dir, tmp_path / "run", *words)[1] == []


def test_the_reference_of_a_resumed_dpo_is_the_model_that_the_run_began_with(monkeypatch, model_dir, tmp_path):
    words = ["rollout.num_prompts_per_step=4", "checkpoint.resume=true"]
    trained(monkeypatch, "dpo", model_dir, tmp_path / "run", words[0], "trainer.num_steps=1")
    moved, other = (shutil.copytree(model_dir, tmp_path / name) for name in ("moved", "other"))
    tensors = load_file(other / "model.safetensors")
    save_file({name: one + 0.1 for name, one in tensors.items()}, other / "model.safetensors", {"format": "pt"})

    with pytest.raises(ConfigError, match="they would become the reference"):
        trained(monkeypatch, "dpo", other, tmp_path / "run", *words, "trainer.num_steps=2")
    for number, model in enumerate((moved, model_dir), start=2):
        run, _ = trained(monkeypatch, "dpo", model, tmp_path / "run", *words, f"trainer.num_steps={number}")
        assert run.step == number
