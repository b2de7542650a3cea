"""Optimizers by name: what each does to the weights, what it reads, and that a run resumes with it exactly."""

import sys
from itertools import combinations

import pytest
import torch

from learner.checkpoint.checkpoint import find_checkpoint, save_checkpoint
from learner.model import moments as adam8bit
from learner.model import moments as offload
from learner.model import optimizer as optimizers
from learner.model.critic import build_critic
from learner.model.gradients import optimizer_step
from learner.model.moments import AdamW8bit, block_of
from learner.model.optimizer import OPTIMIZERS, Schedule, allocate_moments, check_optimizer, make_optimizer
from learner.model.policy import load_policy
from learner.ranks.mesh import Ranks
from streamrl.config.schema import CriticConfig, OptimizerConfig
from streamrl.errors import CheckpointError, ConfigError
from tests.unit.learner.test_checkpoint import Training, equal

OWN = "tests.unit.learner.test_optimizers:sign_descent"
NAMES = (*OPTIMIZERS, OWN)


class SignDescent(torch.optim.Optimizer):
    """A user's own optimizer, which counts with a Python integer."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["count"] = int(state.get("count", 0)) + 1
                parameter -= group["lr"] / state["count"] ** group["power"] * parameter.grad.sign()


def sign_descent(module, *, lr, power=0.5):
    return SignDescent(list(module.parameters()), {"lr": lr, "power": power})


def of_torch(module, *, lr, kind, amsgrad=None):
    more = {} if amsgrad is None else {"amsgrad": amsgrad}
    return getattr(torch.optim, kind)(list(module.parameters()), lr=lr, **more)


def trained(checkpoint, name, **settings):
    """The policy's weights after three steps on random gradients, the same for every optimizer."""
    policy = load_policy(checkpoint)
    optimizer = make_optimizer(policy, OptimizerConfig(name=name, lr=1e-3, **settings))
    generator = torch.Generator().manual_seed(0)
    for step in range(3):
        for parameter in policy.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer_step(
            policy, optimizer, Schedule("constant", 1e-3, 3), step=step, max_grad_norm=1e9, ranks=Ranks()
        )
    return torch.cat([p.detach().flatten() for p in policy.parameters()])


@pytest.mark.shows("policy.optimizer.name")
def test_every_optimizer_moves_the_weights_in_its_own_way(checkpoints):
    start = torch.cat([p.detach().flatten() for p in load_policy(checkpoints["qwen3"]).parameters()])
    ends = {name: trained(checkpoints["qwen3"], name) for name in NAMES}

    for name, end in ends.items():
        assert float((end - start).abs().max()) > 1e-5, name
    for one, other in combinations(NAMES, 2):
        assert not torch.allclose(ends[one], ends[other], rtol=0, atol=1e-6), (one, other)


@pytest.mark.shows("policy.optimizer.options")
@pytest.mark.parametrize(
    ("name", "options"),
    [("sgd", {"momentum": 0.9}), ("sgd", {"momentum": 0.9, "nesterov": True}), ("muon", {"momentum": 0.5}),
     ("muon", {"ns_steps": 2}), ("muon", {"nesterov": False}), (OWN, {"power": 2.0})],
)
def test_the_constants_of_an_optimizer_reach_it(checkpoints, name, options):
    fewer = dict(list(options.items())[:-1])

    assert not torch.equal(trained(checkpoints["qwen3"], name, options=options),
                           trained(checkpoints["qwen3"], name, options=fewer))


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_weight_decay_is_read_by_every_optimizer_of_ours(checkpoints, name):
    plain, decayed = (trained(checkpoints["qwen3"], name, weight_decay=decay) for decay in (0.0, 10.0))

    assert not torch.equal(plain, decayed)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3-tied", "gpt2"])
def test_muon_takes_the_matrices_of_hidden_layers_and_adamw_the_rest(checkpoints, kind):
    policy = load_policy(checkpoints[kind])
    optimizer = make_optimizer(policy, OptimizerConfig(name="muon"))
    for parameter in policy.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()

    by_muon = {name for name, p in policy.named_parameters() if "momentum_buffer" in optimizer.state[p]}
    layers = {name for name, p in policy.named_parameters() if p.dim() == 2 and (".layers." in name or ".h." in name)}
    assert by_muon == layers
    assert all("exp_avg" in optimizer.state[p] for name, p in policy.named_parameters() if name not in by_muon)


@pytest.mark.parametrize(("name", "options"), [*((name, {}) for name in NAMES), ("sgd", {"momentum": 0.9})])
def test_memory_taken_before_the_first_step_changes_no_later_one(checkpoints, name, options, monkeypatch):
    plain = trained(checkpoints["qwen3"], name, options=options)
    before = torch.cat([p.detach().flatten() for p in load_policy(checkpoints["qwen3"]).parameters()])

    def allocated(policy, config):
        optimizer = optimizers.make_optimizer(policy, config)
        allocate_moments(optimizer)
        assert torch.equal(torch.cat([p.detach().flatten() for p in policy.parameters()]), before)
        return optimizer

    monkeypatch.setattr("tests.unit.learner.test_optimizers.make_optimizer", allocated)
    assert torch.equal(trained(checkpoints["qwen3"], name, options=options), plain)


@pytest.mark.shows("policy.optimizer.offload")
@pytest.mark.parametrize("name", NAMES)
def test_moments_in_host_memory_change_no_number_and_are_copies_there(checkpoints, name, monkeypatch):
    monkeypatch.setattr(offload, "_NUMBERS_AT_ONCE", 500)
    copies, like = [], offload._like
    monkeypatch.setattr(offload, "_like", lambda *given, **more: copies.append(like(*given, **more)) or copies[-1])
    plain = trained(checkpoints["qwen3"], name)
    assert not copies
    assert torch.equal(trained(checkpoints["qwen3"], name, offload=True), plain)
    assert bool(copies) == (name in ("adamw", "muon", "adam8bit")), "the others hold no moments"


@pytest.mark.shows("critic.optimizer.offload")
@pytest.mark.parametrize("away", [False, True])
def test_a_critic_may_keep_its_moments_in_host_memory(checkpoints, away):
    config = CriticConfig(optimizer=OptimizerConfig(lr=1e-3, offload=away))
    critic = build_critic(
        config, "gae", load_policy(checkpoints["qwen3"]), checkpoints["qwen3"], num_steps=1, dtype=torch.float32,
        ranks=Ranks(),
    )
    assert isinstance(critic.optimizer, offload.OffloadedOptimizer) == away


def test_few_moments_are_on_the_device_at_a_time(monkeypatch):
    monkeypatch.setattr(offload, "_NUMBERS_AT_ONCE", 128)
    layers = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(9)))
    optimizer = make_optimizer(layers, OptimizerConfig(offload=True))
    stepped = []
    optimizer.members[0].register_step_pre_hook(
        lambda member, *_: stepped.append(sum(p.numel() for group in member.param_groups for p in group["params"]))
    )
    for parameter in layers.parameters():
        parameter.grad = torch.ones_like(parameter)
    for _ in range(2):
        optimizer.step()
    assert max(stepped) == 128 and sum(stepped) == 2 * 9 * 72
    assert [len(group["params"]) for group in optimizer.members[0].param_groups] == [9, 9]


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("name", [*NAMES, "sgd with momentum", "adamw offloaded", "adam8bit offloaded"])
def test_a_run_resumes_exactly_with_every_optimizer(checkpoints, tmp_path, name, sharded, monkeypatch):
    settings = {"name": name.partition(" ")[0], "options": {"momentum": 0.9} if "momentum" in name else {}}
    settings["offload"] = "offloaded" in name
    ranks = Ranks.start("cpu", sharded=True) if sharded else Ranks()
    monkeypatch.setattr("tests.unit.learner.test_checkpoint.ALONE", ranks)
    monkeypatch.setattr("tests.unit.learner.test_checkpoint.load_policy", lambda path: load_policy(path, ranks=ranks))
    try:
        training = Training(checkpoints["qwen3"], **settings)
        training.step(2).save(tmp_path)
        uninterrupted = training.step(2).state()

        resumed = Training(checkpoints["qwen3"], seed=99, **settings)
        resumed.load(tmp_path)
        assert equal(resumed.step(2).state(), uninterrupted)
    finally:
        ranks.close()


class ManyShapes(torch.optim.Optimizer):
    """A user's own optimizer with states of any shape, such as the rows and columns of Adafactor."""

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            size = parameter.shape
            shapes = ((), size, size[:-1], size[-1:], (1, *size[1:]), (*size[:-1], 1), (7,), (2, *size))
            self.state[parameter] = {f"of_{number}": torch.randn(shape) for number, shape in enumerate(shapes)}


@pytest.mark.parametrize("sharded", [False, True])
def test_states_of_any_shape_come_back_as_they_were(checkpoints, tmp_path, sharded):
    found, ranks = [], Ranks.start("cpu", sharded=True) if sharded else Ranks()
    for path in (tmp_path / "none", tmp_path):
        policy = load_policy(checkpoints["qwen3"], ranks=ranks)
        optimizer = ManyShapes(list(policy.parameters()), {})
        if checkpoint := find_checkpoint(path, ranks):
            checkpoint.restore(policy, optimizer, ranks)
        else:
            optimizer.step()
            save_checkpoint(tmp_path, 1, policy, optimizer, ranks, extra={}, blobs={}, num_keep=1)
        found.append([state for parameter in policy.parameters() for state in optimizer.state[parameter].values()])
    ranks.close()

    assert len(found[0]) > 80 and all(torch.equal(one, two) for one, two in zip(*found, strict=True))
    assert {type(state) for state in found[1]} == {torch.Tensor}, "beside divided weights, too"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "sgd", "beta1": 0.5}, r"policy.optimizer.beta1=0.5 does nothing with policy.optimizer.name=sgd"),
        ({"name": OWN, "weight_decay": 0.1}, r"policy.optimizer.weight_decay=0.1 does nothing"),
        ({"name": "adamw", "options": {"momentum": 0.9}}, r"holds \['momentum'\], which adamw does not have; .* none"),
        ({"name": "muon", "options": {"speed": 1}}, r"it has: momentum, nesterov, ns_steps"),
        ({"name": "sgd", "options": {"nesterov": True}}, r"sgd refuses these settings: Nesterov"),
        ({"name": "adam"}, r"policy.optimizer.name=adam is unknown. Did you mean"),
        ({"name": "tests.unit.learner.test_optimizers:sign"}, r"has no 'sign'"),
    ],
)
def test_a_setting_that_does_nothing_and_an_unknown_name_are_refused_before_loading(settings, message):
    with pytest.raises(ConfigError, match=message):
        check_optimizer(OptimizerConfig(**settings), setting="policy.optimizer")


def moments_of(layer, optimizer):
    return dict(optimizer.state[layer.weight])


def test_adam8bit_keeps_its_moments_in_bytes_and_moves_as_adamw_does():
    layers = {name: torch.nn.Linear(512, 64, bias=False) for name in ("adamw", "adam8bit")}
    start = layers["adamw"].weight.detach().clone()
    for name, layer in layers.items():
        layer.weight.data = start.clone()
        optimizer = make_optimizer(layer, OptimizerConfig(name=name, lr=1e-3, weight_decay=0.1))
        generator = torch.Generator().manual_seed(0)
        for _ in range(20):  # rows of very different size, as those of an embedding
            sizes = 10 ** torch.linspace(-6, 0, 64).unsqueeze(1)
            layer.weight.grad = sizes * (0.5 + torch.randn(64, 512, generator=generator))
            optimizer.step()

    moments = moments_of(layer, optimizer)
    assert {key: (value.dtype, tuple(value.shape)) for key, value in moments.items()} == {
        "step": (torch.float32, ()),
        "exp_avg": (torch.int8, (64, 512)), "exp_avg_top": (torch.int8, (64, 8)),
        "exp_avg_sq": (torch.uint8, (64, 512)), "exp_avg_sq_top": (torch.int8, (64, 8)),
    }
    moves = [(layer.weight.detach() - start) for layer in layers.values()]
    similar = torch.nn.functional.cosine_similarity(*moves, dim=1)
    assert float(similar.min()) > 0.98
    assert float((moves[1].norm(dim=1) / moves[0].norm(dim=1) - 1).abs().max()) < 0.05


def course(steps: int, generator: torch.Generator):
    """Gradients [12, 256] of very different size: four rows that stay, four that fall, four of noise that falls."""
    sizes = torch.randn(12, 256, generator=generator).exp() * torch.randn(12, 256, generator=generator).sign()
    for step in range(steps):
        share = torch.ones(12, 1)
        share[4:] = 0.25 if step >= steps // 2 else 1.0
        noise = torch.ones(12, 256)
        noise[8:] = torch.randn(4, 256, generator=generator)
        yield share * sizes * noise


@pytest.mark.parametrize(("beta1", "beta2"), [(0.9, 0.9), (0.9, 0.95), (0.9, 0.99), (0.9, 0.999), (0.99, 0.999)])
def test_adam8bit_moves_as_far_as_adamw_whatever_its_decays(beta1, beta2):
    weights = [torch.nn.Parameter(torch.zeros(12, 256)) for _ in range(2)]
    settings = dict(lr=1.0, betas=(beta1, beta2), eps=1e-12)
    both = [AdamW8bit([{"params": weights[:1]}], **settings),
            torch.optim.AdamW(weights[1:], **settings, weight_decay=0.0)]
    steps, generator = {0.9: 100, 0.95: 200, 0.99: 500, 0.999: 3000}[beta2], torch.Generator().manual_seed(0)
    lengths = []
    for gradient in course(steps, generator):
        before = [one.detach().clone() for one in weights]
        for one, optimizer in zip(weights, both, strict=True):
            one.grad = gradient.clone()
            optimizer.step()
        moves = torch.stack([(one.detach() - old).abs() for one, old in zip(weights, before, strict=True)])
        lengths.append(moves.unflatten(1, (3, 4)).sum((2, 3)))

    ours, exact = torch.stack(lengths).unflatten(0, (10, -1)).sum(1).unbind(1)  # of ten stretches of the way
    assert float((ours / exact - 1).abs().max()) < 0.03
    apart, far = (one.detach().unflatten(0, (3, 4)).norm(dim=(1, 2)) for one in (weights[0] - weights[1], weights[1]))
    assert float((apart / far).max()) < 0.15


def test_adam8bit_does_a_step_again_to_the_bit():
    layers = [torch.nn.Linear(64, 8) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    for seed, layer in enumerate(layers):
        torch.manual_seed(seed)  # the rounding does not depend on the random generator, nor changes it
        state, optimizer = torch.get_rng_state(), make_optimizer(layer, OptimizerConfig(name="adam8bit", lr=1e-2))
        for step in range(5):
            layer.weight.grad = torch.full_like(layer.weight, 0.3 + step)
            optimizer.step()
        assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(layers[0].weight, layers[1].weight)


def test_moments_in_the_form_of_an_earlier_release_are_refused():
    layer = torch.nn.Linear(64, 8, bias=False)
    optimizer = make_optimizer(layer, OptimizerConfig(name="adam8bit"))
    layer.weight.grad = torch.ones_like(layer.weight)
    optimizer.state[layer.weight] = {"step": torch.ones(()), "exp_avg": torch.ones(8, 64, dtype=torch.uint8),
                                     "exp_avg_scale": torch.ones(8, 1)}
    with pytest.raises(CheckpointError, match="earlier release: .*policy.model_path=RUN@N"):
        optimizer.step()


@pytest.mark.parametrize("after", OPTIMIZERS)
def test_a_run_goes_on_with_another_optimizer_whose_moments_begin_anew(checkpoints, tmp_path, after, caplog):
    """A moment of the other would end the first step, or be read as another number."""
    def start(name: str, seed: int = 1) -> Training:
        options = {"momentum": 0.9} if name == "sgd" else {}
        return Training(checkpoints["qwen3"], seed=seed, name=name, options=options)

    def kept(training: Training) -> dict[str, set[str]]:
        return {name: {*training.optimizer.state[weight]} for name, weight in training.policy.named_parameters()}

    expected = kept(start(after).step())
    for before in NAMES:
        start(before).step(2).save(tmp_path / before)
        resumed = start(after, seed=99)
        caplog.clear()
        resumed.load(tmp_path / before)
        same = before == after or (before, after) == ("adamw", "adam8bit")
        assert ("moments of another optimizer" in caplog.text) is not same, before
        assert kept(resumed.step()) == expected, before


@pytest.mark.parametrize("kind", ["AdamW", "Adam", "NAdam", "RAdam", "Adagrad", "Adamax", "ASGD", "RMSprop", "Rprop"])
def test_a_run_with_an_optimizer_of_torch_goes_on_with_all_its_moments(checkpoints, tmp_path, kind, caplog):
    def start(seed: int = 1, amsgrad: bool | None = True) -> Training:
        options = {"kind": kind} | ({"amsgrad": amsgrad} if kind in ("AdamW", "Adam") else {})
        return Training(checkpoints["qwen3"], seed=seed, name=f"{__name__}:of_torch", options=options)

    before = start().step(2)
    before.save(tmp_path / "one")
    expected = before.step().state()
    resumed = start(seed=99)
    resumed.load(tmp_path / "one")
    assert equal(resumed.step().state(), expected) and not caplog.text
    if kind in ("AdamW", "Adam"):
        start(amsgrad=False).step(2).save(tmp_path / "without")
        for name, now, anew in (("one", False, False), ("without", True, True)):
            other = start(seed=99, amsgrad=now)
            other.load(tmp_path / name)
            other.step()
            counts = {float(state["step"]) for state in other.optimizer.state.values()}
            assert counts == ({1.0} if anew else {3.0}) and ("begin anew" in caplog.text) is anew


@pytest.mark.parametrize("width", [96, 64, 576, 896, 4864, 4096, 2560])
def test_blocks_of_a_row_do_not_depend_on_how_many_ranks_divide_it(width):
    block = block_of((3, width))
    assert block >= 4 and all(width // ranks % block == 0 for ranks in (1, 2, 4, 8))


def test_rows_that_are_divided_within_a_block_are_refused(monkeypatch):
    monkeypatch.setattr(adam8bit, "local_part", lambda tensor: tensor[..., :6])  # as on one of sixteen ranks
    with pytest.raises(ConfigError, match=r"rows of 96 .* parts of 6.* blocks of 4 .*learner.mesh.tensor is at most 8"):
        make_optimizer(torch.nn.Linear(96, 8), OptimizerConfig(name="adam8bit"))


def test_adam8bit_never_divides_by_a_root_that_its_few_bits_made_nothing():
    layer = torch.nn.Linear(256, 1, bias=False)
    start = layer.weight.detach().clone()
    optimizer = make_optimizer(layer, OptimizerConfig(name="adam8bit", lr=1e-3, weight_decay=0.0))
    for large in (1.0, 0.0):  # the second gradient is small beside what the first left in the block
        layer.weight.grad = torch.full((1, 256), 1e-6)
        layer.weight.grad[0, 0] = large
        optimizer.step()

    assert float((layer.weight.detach() - start).abs().max()) < 3e-3


@pytest.mark.parametrize("width", [20, 96, 300])
def test_rows_without_even_blocks_keep_float32(width):
    layer = torch.nn.Linear(width, 8)
    optimizer = make_optimizer(layer, OptimizerConfig(name="adam8bit", lr=1e-3))
    for parameter in layer.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()

    quantized = moments_of(layer, optimizer)["exp_avg"].dtype == torch.int8
    assert quantized == (width == 96)
    assert optimizer.state[layer.bias]["exp_avg"].dtype == torch.float32


def test_a_function_that_takes_any_keyword_is_given_every_setting():
    given = {}

    def build(module, **settings):
        given.update(settings)
        return torch.optim.SGD(module.parameters(), lr=settings["lr"])

    sys.modules[__name__].build = build
    make_optimizer(torch.nn.Linear(2, 2), OptimizerConfig(name=f"{__name__}:build", lr=0.5, options={"extra": 7}))

    assert (given["lr"], given["beta2"], given["extra"]) == (0.5, 0.95, 7)
