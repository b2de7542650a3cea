"""Four ranks over gloo, in each layout of the mesh, must do what one process does."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from learner.ranks.mesh import Ranks
from tests.unit.learner import four_ranks, two_ranks
from tests.unit.learner.learner_factories import tiny_checkpoint
from tests.unit.learner.test_two_ranks import HERE, assert_same, assert_same_weights, launch_script, result

LAYOUTS = {"copies": ("replicate=2", "shard=2")}
FOLDERS = ("run", "resumed", "own", "lora", "lora-resumed", "muon", "minibatches", "valued", "back")
FAMILIES = four_ranks.FAMILIES
pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """One process has trained each family into one/."""
    folder = tmp_path_factory.mktemp("ranks")
    for family in FAMILIES:
        tiny_checkpoint(folder / family / "model", family, tied=family == "qwen3")
        for name in FOLDERS:
            (folder / family / "one" / name).mkdir(parents=True)
    four_ranks.run(folder, "one", Ranks())
    return folder


@pytest.fixture(scope="module", params=LAYOUTS)
def layout(one, request):
    """Four ranks have trained each family into a directory of the name that is returned."""
    for family in FAMILIES:
        for name in FOLDERS:
            (one / family / request.param / name).mkdir(parents=True)
    launch_script(4, HERE / "four_ranks.py", one, request.param, *LAYOUTS[request.param])
    return request.param


@pytest.mark.shows("learner.mesh.replicate", "learner.mesh.shard")
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_gradients_statistics_and_weights_are_those_of_one_process(one, layout, family):
    assert_same(one / family / "one", one / family / layout)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_adapter_is_trained_as_one_process_does(one, layout, family):
    assert_same(one / family / "one" / "lora", one / family / layout / "lora")


@pytest.mark.parametrize("name", ["minibatches", "valued"])
def test_steps_of_a_batch_and_a_critic_are_those_of_one_process(one, layout, name):
    assert_same(one / FAMILIES[0] / "one" / name, one / FAMILIES[0] / layout / name)


def test_an_optimizer_of_whole_matrices_does_the_same(one, layout):
    """It orthogonalizes in bfloat16, so sums in another order differ by a percent of a step of 1e-3."""
    (mine, _), (theirs, _) = (result(one / FAMILIES[0] / where / "muon") for where in (layout, "one"))
    for name in [key for key in mine if key.startswith("weights/")]:
        torch.testing.assert_close(mine[name], theirs[name], atol=1e-4, rtol=0, msg=name)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_checkpoints_of_either_resume_on_the_other(one, layout, family):
    assert_same_weights(one / family / layout / "resumed", one / family / "one")
    assert_same_weights(one / family / layout / "own", one / family / layout)
    assert_same_weights(one / family / layout / "lora-resumed", one / family / "one" / "lora")
    back = one / family / layout / "back"
    two_ranks.resume(one / family, back, Ranks(), run=one / family / layout / "run")
    assert_same_weights(back, one / family / layout)


@pytest.mark.parametrize("family", FAMILIES)
def test_whole_tensors_are_published_and_exported(one, layout, family):
    mine, theirs = one / family / layout, one / family / "one"
    assert (mine / "digests").read_text() == (theirs / "digests").read_text()
    exported, trained = load_file(mine / "exported" / "model.safetensors"), result(mine)[0]
    assert all(torch.equal(tensor, trained[f"weights/model.{name}"]) for name, tensor in exported.items())


def test_no_part_of_a_checkpoint_is_written_twice(one, layout):
    files = list((one / "qwen3" / layout / "run").glob("ckpt-*/rank-*.safetensors"))
    held = [tensor.numel() for file in files for key, tensor in load_file(file).items() if key.startswith("model/")]
    trained, _ = result(one / "qwen3" / "one")
    weights = [tensor.numel() for name, tensor in trained.items() if name.startswith("weights/")]
    assert len(files) == 4 and sum(held) == sum(weights)
