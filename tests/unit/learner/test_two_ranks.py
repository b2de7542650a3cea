"""Two FSDP2 ranks over gloo must do what one process does: same loss, gradients, weights, statistics, checkpoints."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from learner.ranks.mesh import Ranks
from tests.flow.forked_process import ForkedPopen
from tests.flow.processes import finished
from tests.kit.learning import tiny_checkpoint
from tests.unit.learner import two_ranks

pytestmark = pytest.mark.timeout(300)  # two ranks train all that the tests read
ROOT = Path(__file__).parents[3]


def torchrun(world: int, *words: Path | str) -> list[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}", "--max-restarts=0"]
    return [sys.executable, *launcher, *map(str, words)]


def launch_script(world: int, script: Path, *arguments: Path | str, timeout_s: float = 250) -> str:
    """Run a script with that many ranks, with a deadline; what they printed."""
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
        "MALLOC_MMAP_THRESHOLD_": str(1 << 18),  # freed memory goes back at once, for scripts that count it
    }
    command = torchrun(world, script, *arguments)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def launch(world: int, program: ModuleType, *arguments: Path | str, timeout_s: float = 250) -> None:
    """Run a module with that many ranks, forked where a fork server runs."""
    command = torchrun(world, "-m", program.__name__, *arguments)
    done = finished(command, ROOT, ForkedPopen, deadline_s=timeout_s)
    assert done.returncode == 0, done.stderr[-4000:]


def result(folder: Path) -> tuple[dict[str, torch.Tensor], dict]:
    return load_file(folder / "result.safetensors"), json.loads((folder / "result.json").read_text())


def assert_same(one: Path, two: Path) -> None:
    (tensors, numbers), (their_tensors, their_numbers) = result(one), result(two)
    assert tensors.keys() == their_tensors.keys()
    for name, tensor in tensors.items():
        torch.testing.assert_close(tensor, their_tensors[name], atol=1e-5, rtol=1e-4, msg=name)
    assert numbers["loss"] == pytest.approx(their_numbers["loss"], abs=1e-6)
    assert numbers["norm"] == pytest.approx(their_numbers["norm"], rel=1e-5)
    stats, theirs = numbers["stats"], their_numbers["stats"]
    assert stats.keys() == theirs.keys()
    for key in stats.keys() - {"policy/num_microbatches"}:
        assert stats[key] == pytest.approx(theirs[key], rel=1e-4, abs=1e-6), key


def assert_same_weights(resumed: Path, uninterrupted: Path) -> None:
    (mine, _), (theirs, _) = result(resumed), result(uninterrupted)
    for name in [key for key in mine if key.startswith("weights/")]:
        torch.testing.assert_close(mine[name], theirs[name], atol=1e-6, rtol=1e-5, msg=name)


@pytest.fixture(scope="module")
def work(tmp_path_factory, fork_server):
    """One process has trained into one/, two ranks into two/. `test_four_ranks` has what all layouts share."""
    folder = tmp_path_factory.mktemp("ranks")
    tiny_checkpoint(folder / "model", "qwen3", tied=True)
    (folder / "model" / "tokenizer_config.json").write_text("{}")
    folders = ("one", "one/lora", "one/eight", "one/minibatches", "one/measured", "one/valued", "two", "two/lora",
               "two/lora-resumed", "two/eight", "two/eight-resumed", "two/minibatches", "two/measured", "two/valued",
               "two/once", "two/kept", "one/rows", "two/rows", "two/rows-resumed", "two/rows-back")
    for name in folders:
        (folder / name).mkdir()
    two_ranks.train(folder, folder / "one", Ranks())
    two_ranks.train(folder, folder / "one" / "lora", Ranks(), two_ranks.LORA)
    two_ranks.train(folder, folder / "one" / "eight", Ranks(), name="adam8bit")
    two_ranks.train(folder, folder / "one" / "rows", Ranks(), name=two_ranks.BY_ROWS)
    two_ranks.minibatches(folder, folder / "one" / "minibatches", Ranks())
    two_ranks.measured(folder, folder / "one" / "measured", Ranks())
    two_ranks.valued(folder, folder / "one" / "valued", Ranks())
    launch(2, two_ranks, folder, folder / "two", folder / "one" / "run")
    return folder


def test_two_ranks_have_the_loss_gradients_statistics_and_weights_of_one_process(work):
    assert_same(work / "one", work / "two")


def test_trajectories_without_a_backward_pass_may_all_be_on_one_rank(work):
    assert_same(work / "one" / "measured", work / "two" / "measured")
    _, numbers = result(work / "two" / "measured")
    assert all(numbers["stats"][f"shadow/{name}/grad_norm"] > 0 for name in ("grpo", "extreme_lag", "reinforce_pp"))


def test_a_critic_and_its_normalization_are_the_same_over_two_ranks(work):
    assert_same(work / "one" / "valued", work / "two" / "valued")
    weights, _ = result(work / "two" / "valued")
    exported = load_file(work / "two" / "valued" / "critic" / "value_head.safetensors")
    assert exported.pop("targets")[0] > 0
    assert {f"weights/{name}" for name in exported} == weights.keys()
    assert all(torch.equal(tensor, weights[f"weights/{name}"]) for name, tensor in exported.items())


@pytest.mark.shows("learner.reduce_once")
def test_gradients_that_are_added_up_once_a_step_are_the_same(work):
    for name in ("minibatches", "once"):
        assert_same(work / "one" / "minibatches", work / "two" / name)
        assert result(work / "two" / name)[1]["stats"]["policy/clip_fraction"] > 0.1
    every, once = (int((work / "two" / name / "reductions").read_text()) for name in ("minibatches", "once"))
    assert once == 4 * 3 < every  # of four optimizer steps, two layers and the rest


@pytest.mark.shows("learner.reshard_after_forward")
def test_layers_that_stay_gathered_to_their_backward_pass_train_the_same_with_fewer_gathers(work):
    assert_same(work / "one" / "minibatches", work / "two" / "kept")
    freed, kept = (int((work / "two" / name / "gathers").read_text()) for name in ("minibatches", "kept"))
    assert 0 < kept < 0.7 * freed, (kept, freed)


def test_two_ranks_train_an_adapter_as_one_process_does_and_resume_it(work):
    assert_same(work / "one" / "lora", work / "two" / "lora")
    assert_same_weights(work / "two" / "lora-resumed", work / "one" / "lora")
    trained, _ = result(work / "two" / "lora")
    assert {name.split(".")[-3] for name in trained if name.startswith("grads/")} == {"lora_A", "lora_B"}
    one, two = (load_file(work / name / "lora" / "adapter" / "adapter_model.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys() and len(one) == 2 * 2 * 7
    for name, factor in one.items():
        torch.testing.assert_close(factor, two[name], atol=1e-5, rtol=1e-4, msg=name)
    files = list((work / "two" / "lora" / "run").glob("ckpt-*/rank-*.safetensors"))
    saved = [key for file in files for key in load_file(file) if not key.startswith("rng/")]
    assert saved and all(".lora_" in key for key in saved), "a checkpoint holds the adapter and its moments alone"


def test_moments_in_eight_bits_are_sharded_and_resumed_by_another_number_of_ranks(work):
    """Sums in another order may round a moment to its other neighbor: a few percent of a step of 1e-3."""
    (one, _), (two, _), (resumed, _) = (result(work / name) for name in ("one/eight", "two/eight", "two/eight-resumed"))
    for name in [key for key in one if key.startswith("weights/")]:
        torch.testing.assert_close(two[name], one[name], atol=1e-4, rtol=0, msg=name)
        torch.testing.assert_close(resumed[name], one[name], atol=1e-4, rtol=0, msg=name)
    for file in (work / "two" / "eight" / "run").glob("ckpt-*/rank-*.safetensors"):
        saved = load_file(file)
        quantized = [key for key, part in saved.items() if key.startswith("optim/") and part.dtype == torch.uint8]
        assert len(quantized) > 10
        for _, state, name in (key.split("/") for key in quantized):
            assert len(saved[f"optim/{state}_top/{name}"]) == len(saved[f"model/{name}"]), "this rank's rows alone"


def test_moments_of_rows_and_of_columns_are_resumed_by_another_number_of_ranks(work):
    assert_same(work / "one" / "rows", work / "two" / "rows")
    assert_same_weights(work / "two" / "rows-resumed", work / "one" / "rows")
    run, back = work / "two" / "rows" / "run", work / "two" / "rows-back"
    two_ranks.resume(work, back, Ranks(), run=run, name=two_ranks.BY_ROWS)
    assert_same_weights(back, work / "two" / "rows")


def test_two_ranks_export_one_whole_model_with_its_tokenizer_and_ties(work):
    weights, _ = result(work / "two")
    exported = AutoModelForCausalLM.from_pretrained(work / "two" / "exported")

    assert (work / "two" / "exported" / "tokenizer_config.json").read_text() == "{}"
    for name, parameter in exported.named_parameters():
        assert torch.equal(parameter, weights[f"weights/model.{name}"])
    assert exported.lm_head.weight.data_ptr() == exported.model.embed_tokens.weight.data_ptr()
    for folder in ("half", "lora/half"):  # the type in which versions are published
        whole = load_file(work / "two" / folder.replace("half", "exported") / "model.safetensors")
        half = load_file(work / "two" / folder / "exported" / "model.safetensors")
        assert whole.keys() == half.keys()
        assert all(torch.equal(half[name], tensor.to(torch.bfloat16)) for name, tensor in whole.items())
        assert json.loads((work / "two" / folder / "exported" / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_rank_that_cannot_write_its_shard_is_an_error_of_all_ranks(work):
    assert "No space left on device" in (work / "two" / "refused-1").read_text()
    assert "another rank could not write" in (work / "two" / "refused-0").read_text()


def test_a_record_that_one_rank_cannot_train_on_is_an_error_of_all_ranks_in_its_words(work):
    told = {(work / "two" / f"untrained-{rank}").read_text() for rank in range(2)}
    assert told == {"training record 3: the template refuses it; or set data.on_bad_record=skip"}
