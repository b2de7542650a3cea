"""Four ranks over gloo, in each layout of the mesh, must do what one process does."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from learner.fit.step import fake_ranks
from learner.model.policy import assemble
from learner.ranks.mesh import Mesh, Ranks
from streamrl.errors import ConfigError
from tests.kit.learning import tiny_checkpoint
from tests.unit.learner import four_ranks, two_ranks
from tests.unit.learner.test_two_ranks import assert_same, assert_same_weights, launch, result

LAYOUTS = {"copies": ("replicate=2", "shard=2"), "tensor": ("tensor=2", "shard=2"),
           "context": ("context=2", "shard=2"), "context and tensor": ("context=2", "tensor=2")}
SIZES = dict(
    vocab_size=53, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=256, sliding_window=6, pad_token_id=0, bos_token_id=1,
    eos_token_id=2, initializer_range=0.3, dtype="float32",
)
FOLDERS = ("run", "resumed", "own", "lora", "lora-resumed", "muon", "eight", "eight-resumed", "minibatches", "valued",
           "back")
FAMILIES = four_ranks.FAMILIES
WHOLE = [(layout, family) for layout, axes in LAYOUTS.items()
         for family in four_ranks.families([axis.partition("=")[0] for axis in axes])]
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """One process has trained each family into one/."""
    folder = tmp_path_factory.mktemp("ranks")
    for family in FAMILIES:
        tiny_checkpoint(folder / family / "model", family, tied=family == "qwen3")
        for name in FOLDERS:
            (folder / family / "one" / name).mkdir(parents=True)
    for family in four_ranks.MORE:
        config = AutoConfig.for_model(family, **SIZES)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            AutoModelForCausalLM.from_config(config).save_pretrained(folder / family / "model")
        for where in ("one", *LAYOUTS):
            (folder / family / where / "lora").mkdir(parents=True)
    four_ranks.run(folder, "one", Ranks())
    four_ranks.steps(folder, "one", Ranks())
    return folder


@pytest.fixture(scope="module", params=LAYOUTS)
def layout(one, request, fork_server):
    """Four ranks have trained each family into a directory of the name that is returned."""
    if not (one / FAMILIES[0] / request.param).exists():  # tests of some families may come later
        for family in FAMILIES:
            for name in FOLDERS:
                (one / family / request.param / name).mkdir(parents=True)
        launch(4, four_ranks, one, request.param, *LAYOUTS[request.param], timeout_s=550)
    return request.param


@pytest.mark.shows("learner.mesh.replicate", "learner.mesh.shard", "learner.mesh.tensor", "learner.mesh.context")
@pytest.mark.parametrize(("layout", "family"), WHOLE, indirect=["layout"])
def test_loss_gradients_statistics_and_weights_are_those_of_one_process(one, layout, family):
    assert_same(one / family / "one", one / family / layout)


@pytest.mark.parametrize(("layout", "family"), WHOLE, indirect=["layout"])
def test_an_adapter_is_trained_as_one_process_does(one, layout, family):
    assert_same(one / family / "one" / "lora", one / family / layout / "lora")


@pytest.mark.parametrize("name", ["minibatches", "valued", "muon"])
def test_steps_of_a_batch_a_critic_and_an_optimizer_of_matrices_are_those_of_one_process(one, layout, name):
    assert_same(one / FAMILIES[0] / "one" / name, one / FAMILIES[0] / layout / name)


@pytest.mark.parametrize(("layout", "family"), WHOLE, indirect=["layout"])
def test_the_checkpoints_of_either_resume_on_the_other(one, layout, family):
    assert_same_weights(one / family / layout / "resumed", one / family / "one")
    assert_same_weights(one / family / layout / "own", one / family / layout)
    assert_same_weights(one / family / layout / "lora-resumed", one / family / "one" / "lora")
    back = one / family / layout / "back"
    two_ranks.resume(one / family, back, Ranks(), run=one / family / layout / "run")
    assert_same_weights(back, one / family / layout)


def test_moments_in_eight_bits_are_kept_and_resumed_in_any_layout(one, layout):
    """Sums in another order may round a moment to its other neighbor: a few percent of a step of 1e-3."""
    ours, theirs = one / FAMILIES[0] / layout, one / FAMILIES[0] / "one"
    exact, found, resumed = (result(folder)[0] for folder in (theirs / "eight", ours / "eight", ours / "eight-resumed"))
    for name in [key for key in exact if key.startswith("weights/")]:
        torch.testing.assert_close(found[name], exact[name], rtol=0, atol=1e-4, msg=name)
        torch.testing.assert_close(resumed[name], exact[name], rtol=0, atol=1e-4, msg=name)
    files = [load_file(file) for file in (ours / "eight" / "run").glob("ckpt-*/rank-*.safetensors")]
    assert sum(part.dtype == torch.uint8 for file in files for part in file.values()) > 10, "second moments in bytes"


@pytest.mark.parametrize(("layout", "family"), WHOLE, indirect=["layout"])
def test_whole_tensors_are_published_and_exported(one, layout, family):
    mine, theirs = one / family / layout, one / family / "one"
    assert (mine / "digests").read_text() == (theirs / "digests").read_text()
    exported, trained = load_file(mine / "exported" / "model.safetensors"), result(mine)[0]
    assert all(torch.equal(tensor, trained[f"weights/model.{name}"]) for name, tensor in exported.items())


@pytest.mark.parametrize("layout", ["context and tensor"], indirect=True)
@pytest.mark.parametrize("family", four_ranks.MORE)
def test_other_masks_and_styles_of_a_plan_do_the_same(one, layout, family):
    for name in ("", "lora"):
        assert_same(one / family / "one" / name, one / family / layout / name)


@pytest.mark.parametrize(
    ("family", "tensor", "sizes", "error"),
    [
        ("gpt2", 2, {}, "tensor=2: a model of type gpt2 has no plan"),
        ("llama", 4, {}, "type llama has 2 heads at layers.0.self_attn.k_proj, which 4 ranks cannot share evenly"),
        ("llama", 2, {"intermediate_size": 49}, "49 rows at layers.0.mlp.gate_proj"),
        ("mixtral", 2, {}, "mixtral is split by moe_tp_experts, packed_colwise, which is not known: use learner.mesh"),
    ],
)
def test_a_model_that_cannot_be_divided_is_refused_by_name(family, tensor, sizes, error):
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**SIZES, **sizes}))
    mesh = Mesh.from_world_size(4, tensor=tensor)
    with fake_ranks(mesh, sharded=True) as ranks, pytest.raises(ConfigError, match=error):
        assemble(model, ranks, dtype=torch.float32)


def test_a_layer_with_a_weight_of_another_form_is_not_divided():
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SIZES))
    model.model.layers[0].self_attn.q_proj.__class__ = type("Linear4bit", (torch.nn.Linear,), {})
    mesh = Mesh.from_world_size(2, tensor=2)
    with fake_ranks(mesh, sharded=True) as ranks, pytest.raises(ConfigError, match="a Linear4bit at"):
        assemble(model, ranks, dtype=torch.float32)


def test_compiled_layers_are_not_divided():
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SIZES))
    mesh = Mesh.from_world_size(2, tensor=2)
    with fake_ranks(mesh, sharded=True) as ranks, pytest.raises(ConfigError, match="leave one of them"):
        assemble(model, ranks, dtype=torch.float32, compile_with="eager")


def test_no_part_of_a_checkpoint_is_written_twice(one, layout):
    files = list((one / "qwen3" / layout / "run").glob("ckpt-*/rank-*.safetensors"))
    held = [tensor.numel() for file in files for key, tensor in load_file(file).items() if key.startswith("model/")]
    trained, _ = result(one / "qwen3" / "one")
    weights = [tensor.numel() for name, tensor in trained.items() if name.startswith("weights/")]
    assert len(files) == 4 and sum(held) == sum(weights)
