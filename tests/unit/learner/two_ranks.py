"""What one learner does in the two-rank tests; under torchrun, or called in the test's own process for one rank.

    train(work, folder)     three optimizer steps, a checkpoint before the last, the result, the exported model; also
                            with an adapter, moments in 8 bits, or moments of rows and columns
    resume(work, folder)    from a checkpoint, the last step; the result
    muon(work, folder)      two steps with another optimizer, the result
    minibatches(...)        a batch of four optimizer steps, the result; also with gradients that are added up once a
                            step, or with weights that stay gathered; and the number of reductions and gathers
    measured(...)           a step with trajectories that have no backward pass, the result
    valued(...)             three batches with a critic, whose normalization moves; its weights are in the result
    fail(work, folder)      rank 1 cannot write its shard
    refuse(folder)          a record of rank 1's share that cannot be rendered, in supervised training
    apart(work, folder)     two machines that share no directory: rank 0's holds all, and a restart takes all from it
"""

import json
import sys
from dataclasses import dataclass
from dataclasses import replace as replace_row
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
from msgspec.structs import replace
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._python_dispatch import TorchDispatchMode

from learner.checkpoint.checkpoint import ResumeState, find_checkpoint, save_checkpoint
from learner.data.packing import LeaveOut, equalize, pack
from learner.model.adapter.lora import FrozenAdapter, add_adapter
from learner.model.critic import build_critic
from learner.model.gradients import optimizer_step
from learner.model.networks import FrozenPolicy, Networks, sync_if_due
from learner.model.optimizer import Schedule, make_optimizer
from learner.model.policy import Policy, load_policy
from learner.objective.objective import Objective
from learner.objective.regularizers import LossWeights, Regularizers
from learner.publish.export import export_critic, export_model
from learner.ranks.mesh import Ranks, local_part
from learner.setup.shadows import make_shadows
from learner.setup.trainer import load_networks
from learner.supervised.run import Run as SupervisedRun
from learner.trainer import Trainer, TrainerSettings
from streamrl.config.load import load_config
from streamrl.config.schema import (
    AdvantageConfig,
    Config,
    ConstraintConfig,
    CriticConfig,
    EntropyConfig,
    KlConfig,
    LoraConfig,
    LossConfig,
    OptimizerConfig,
)
from streamrl.errors import CheckpointError, TaskError
from tests.kit.learning import OneBatch, batch, make_objective, plan_of

SCHEDULE = Schedule("linear", 1e-3, 5)
LOSS = LossConfig(surrogate="m2po", clip_low=0.1, clip_high=0.1, entropy_coef=0.01)
KL = KlConfig(mode="reward_k1", coef=0.5, controller="doubling")
CONSTRAINT = ConstraintConfig(kl_limit=1e-6, options={"lr": 100})
SYNC_EVERY = 2
BY_ROWS = "tests.unit.learner.two_ranks:by_rows"
LORA = LoraConfig(rank=3, alpha=12.0)  # a rank that two ranks cannot share evenly


class ByRows(torch.optim.Optimizer):
    """A user's own optimizer with a moment of each row and of each column, as Adafactor has."""

    @torch.no_grad()
    def step(self, closure=None):
        for weight in self.param_groups[0]["params"]:
            if weight.dim() < 2:
                continue
            squares, state = weight.grad.square(), self.state[weight]
            found = {"rows": squares.mean(-1), "columns": squares.mean(0, keepdim=True)}
            for name, moment in found.items():
                if isinstance(moment, DTensor) and name == "columns":
                    moment = moment.redistribute(placements=[Replicate()] * moment.device_mesh.ndim)
                state[name] = state.get(name, moment).lerp(moment, 0.1)
            size = state["rows"].sqrt().unsqueeze(-1) + state["columns"].sqrt() + 1e-3
            weight.sub_(weight.grad / size, alpha=self.param_groups[0]["lr"])


def by_rows(module, *, lr, weight_decay):
    return ByRows(list(module.parameters()), {"lr": lr})


@dataclass
class Kit:
    """What a learner carries from step to step."""

    policy: Policy
    optimizer: torch.optim.Optimizer
    reference: FrozenPolicy
    controls: LossWeights


def train_step(kit: Kit, ranks: Ranks, *, step: int) -> tuple[float, float, dict, dict]:
    """(loss, gradient norm, whole gradients, statistics) of one step on a batch that depends on the step alone."""
    policy, rows = kit.policy, batch(5, 3, seed=step)
    plan = plan_of(rows, world=ranks.mesh.dp_size)
    mine = [row for row in rows if row.group_id % ranks.mesh.dp_size == ranks.dp_rank]
    pulls = Regularizers(KL, CONSTRAINT, LOSS, kit.controls)
    objective = make_objective(AdvantageConfig(scale="batch_std"), LOSS, regularizers=pulls)
    one = OneBatch(objective, mine, plan, version=5, ranks=ranks)
    micro_batches = equalize(pack(mine, 40), ranks)
    one.score(policy, micro_batches, frozen={"reference": kit.reference})
    loss = sum(float(one.forward_backward(policy, micro)) for micro in micro_batches)
    gradients = {name: whole(p.grad) for name, p in policy.named_parameters() if p.requires_grad}
    result = optimizer_step(policy, kit.optimizer, SCHEDULE, step=step, max_grad_norm=0.5, ranks=ranks)
    meter = one.finish()
    kit.controls.update(meter, num_steps=step + 1)
    sync_if_due(kit.reference, policy, every=SYNC_EVERY, step=step + 1)
    return ranks.all_reduce([loss])[0], result.grad_norm, gradients, meter.flush(step)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def write(folder: Path, policy, ranks: Ranks, first: tuple) -> None:
    weights = {f"weights/{name}": whole(p) for name, p in policy.named_parameters()}
    loss, norm, gradients, stats = first
    if ranks.rank == 0:
        save_file({**weights, **{f"grads/{k}": v for k, v in gradients.items()}}, folder / "result.safetensors")
        (folder / "result.json").write_text(json.dumps({"loss": loss, "norm": norm, "stats": stats}))


def start(work: Path, ranks: Ranks, name: str = "adamw", lora: LoraConfig | None = None) -> Kit:
    # Two ranks also recompute activations: the results must not know.
    policy = load_policy(
        work / "model", ranks=ranks, chunk_tokens=7, gradient_checkpointing=ranks.mesh.world > 1,
        adapt=None if lora is None else partial(add_adapter, config=lora, seed=7),
    )
    # Moments in 8 bits lie in host memory on two ranks: the results must not know.
    away = name == "adam8bit" and ranks.mesh.world > 1
    optimizer = make_optimizer(policy, OptimizerConfig(name=name, lr=1e-3, weight_decay=0.1, offload=away))
    if lora is not None:
        reference: FrozenPolicy = FrozenAdapter(policy, name="reference", off=True)
    else:
        reference = FrozenPolicy(load_policy(work / "model", ranks=ranks), name="reference")
    return Kit(policy, optimizer, reference, LossWeights(KL, EntropyConfig(), CONSTRAINT, LOSS))


def train(work: Path, folder: Path, ranks: Ranks, lora: LoraConfig | None = None, name: str = "adamw") -> None:
    kit = start(work, ranks, name, lora)
    first = train_step(kit, ranks, step=0)
    train_step(kit, ranks, step=1)
    save_checkpoint(
        folder / "run", 2, kit.policy, kit.optimizer, ranks, extra={"note": "x", "controls": kit.controls.to_plain()},
        blobs={"ledger": b"state"}, num_keep=2, also=kit.reference.tensors(),
    )
    train_step(kit, ranks, step=2)
    write(folder, kit.policy, ranks, first)
    export_model(kit.policy, work / "model", folder / "exported", ranks, lora=lora)
    export_model(kit.policy, work / "model", folder / "half" / "exported", ranks, lora=lora, dtype=torch.bfloat16)


def resume(
    work: Path, folder: Path, ranks: Ranks, *, run: Path, lora: LoraConfig | None = None, name: str = "adamw"
) -> None:
    kit = start(work, ranks, name, lora)
    found = find_checkpoint(run, ranks)
    found.restore(kit.policy, kit.optimizer, ranks)
    assert kit.reference.restore(found.shards())
    kit.controls.restore(found.extra["controls"])
    assert (found.version, found.blobs["ledger"], found.extra["note"]) == (2, b"state", "x")
    write(folder, kit.policy, ranks, train_step(kit, ranks, step=2))


def muon(work: Path, folder: Path, ranks: Ranks) -> None:
    """Two steps of the optimizer that needs whole matrices, which are sharded by rows here."""
    kit = start(work, ranks, "muon")
    first = train_step(kit, ranks, step=0)
    train_step(kit, ranks, step=1)
    write(folder, kit.policy, ranks, first)


class Collectives(TorchDispatchMode):
    """Counts the collectives that add gradients up, and those that gather weights."""

    def __init__(self) -> None:
        super().__init__()
        self.reductions = self.gathers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.reductions += "reduce_scatter" in func.__name__
        self.gathers += "_allgather_base" in func.__name__
        return func(*args, **(kwargs or {}))


def minibatches(work: Path, folder: Path, ranks: Ranks, *, once: bool = False, keep: bool = False) -> None:
    """Two minibatches and two epochs with a frozen anchor; one rank has more of a minibatch than the other."""
    if keep:
        config = load_config([f"policy.model_path={work / 'model'}", "learner.reshard_after_forward=false",
                              "learner.logprob_chunk_tokens=7", "policy.dtype=float32"])
        policy = load_networks(config, work / "model", ResumeState("alone"), ranks, with_critic=False,
                               with_reference=False).policy
    else:
        policy = load_policy(work / "model", ranks=ranks, chunk_tokens=7)
    loss = LossConfig(surrogate="decoupled_ppo", anchor="recomputed", dual_clip=None)
    objective = Objective(AdvantageConfig(scale="std"), loss, max_new_tokens=16, max_lag=9, steps_per_batch=4)
    rows = batch(6, 3, seed=4)
    plan = [replace(row, minibatch=row.group_id // 3) for row in plan_of(rows, world=ranks.mesh.dp_size)]
    settings = TrainerSettings(max_tokens=40, num_minibatches=2, num_epochs=2, reduce_once=once)
    with Collectives() as collectives:
        trained = train_batch(policy, objective, settings, rows, plan, ranks)
    write(folder, policy, ranks, (0.0, trained.result.grad_norm, {}, trained.measured.flush(1)))
    if ranks.rank == 0:
        (folder / "reductions").write_text(str(collectives.reductions))
        (folder / "gathers").write_text(str(collectives.gathers))


def measured(work: Path, folder: Path, ranks: Ranks) -> None:
    """Trajectories without a gradient are measured alone; one rank has all of them, and the other all the rest.

    Shadow algorithms read both.
    """
    policy = load_policy(work / "model", ranks=ranks, chunk_tokens=7)
    objective = Objective(
        AdvantageConfig(estimator="group"), LossConfig(), max_new_tokens=16, max_lag=9, leave_out=LeaveOut.BACKWARD
    )
    rows = [replace_row(row, reward=1.0) if row.group_id % 2 else row for row in batch(6, 3, seed=4)]
    plan = plan_of(rows, world=ranks.mesh.dp_size)
    names = ("grpo", "extreme_lag", "reinforce_pp")  # the last two fit to the whole batch
    shadows = make_shadows(names, objective, KlConfig(), ConstraintConfig(), max_lag=9, num_minibatches=1)
    trained = train_batch(policy, objective, TrainerSettings(max_tokens=40), rows, plan, ranks, shadows)
    write(folder, policy, ranks, (0.0, trained.result.grad_norm, {}, trained.measured.flush(1)))


def valued(work: Path, folder: Path, ranks: Ranks) -> None:
    """Three batches with a critic of actions, whose last layer two ranks cannot share evenly."""
    policy, steady = load_policy(work / "model", ranks=ranks, chunk_tokens=7), OptimizerConfig(lr=3e-3, eps=1e-3)
    objective = Objective(
        AdvantageConfig(estimator="retrace_q", baseline="none"), LossConfig(), max_new_tokens=16, max_lag=9
    )
    torch.manual_seed(0)
    critic = build_critic(
        CriticConfig(num_steps=3, optimizer=steady), "retrace_q", policy, work / "model", num_steps=5,
        dtype=torch.float32, ranks=ranks,
    )
    networks = Networks(policy, make_optimizer(policy, steady), critic)
    trainer = Trainer(networks, SCHEDULE, objective, TrainerSettings(max_tokens=40), ranks, version=5)
    for seed, size in ((1, 1.0), (2, 5.0), (3, 0.2)):
        rows = batch(6, 3, seed=seed)
        rows = [replace_row(row, reward=size * row.reward, rewards=size * row.rewards) for row in rows]
        mine = [row for row in rows if row.group_id % ranks.mesh.dp_size == ranks.dp_rank]
        trained = trainer.train_batch(mine, plan_of(rows, world=ranks.mesh.dp_size))
    export_critic(critic, work / "model", folder / "critic", ranks)
    write(folder, critic.module, ranks, (trained.critic.loss, trained.critic.grad_norm, {}, {
        "explained": trained.critic.explained_variance, "of_returns": trained.critic.return_explained_variance}))


def train_batch(policy: Policy, objective: Objective, settings: TrainerSettings, rows, plan, ranks: Ranks, shadows=()):
    """What training on this rank's share of a batch did, from version 5 on."""
    networks = Networks(policy, make_optimizer(policy, OptimizerConfig(lr=1e-2)))
    trainer = Trainer(networks, SCHEDULE, objective, settings, ranks, version=5, shadows=shadows)
    return trainer.train_batch([row for row in rows if row.group_id % ranks.mesh.dp_size == ranks.dp_rank], plan)


def fail(work: Path, folder: Path, ranks: Ranks) -> None:
    """A full disk under one rank must be every rank's error, and leave nothing that looks like a checkpoint."""
    import learner.checkpoint.checkpoint as module

    def no_room(*_):
        raise OSError(28, "No space left on device")

    written = module.write_shards
    module.write_shards = no_room if ranks.rank == 1 else written
    try:
        kit = start(work, ranks)
        save_checkpoint(folder / "broken", 1, kit.policy, kit.optimizer, ranks, extra={}, blobs={}, num_keep=1)
    except CheckpointError as error:
        (folder / f"refused-{ranks.rank}").write_text(str(error))
    finally:
        module.write_shards = written
    assert find_checkpoint(folder / "broken", ranks) is None


def refuse(folder: Path, ranks: Ranks) -> None:
    """Rank 1 alone has a record that its template refuses: every rank ends by it, in its words."""
    def row(place: int, record: str) -> None:
        if record == "bad":
            raise TaskError("the template refuses it")

    fake = SimpleNamespace(config=Config(), ranks=ranks, method=SimpleNamespace(row=row))
    assert SupervisedRun.rows(fake, ["good"] * 6, range(6), "training") == [] and fake.num_dropped == 3
    try:
        SupervisedRun.rows(fake, [*["good"] * 3, "bad", "good"], range(5), "training")
    except TaskError as error:
        (folder / f"untrained-{ranks.rank}").write_text(str(error))


def apart(work: Path, folder: Path, ranks: Ranks) -> None:
    """Each rank has a run directory of its own, and rank 1's holds an older checkpoint of the same name."""
    kit, mine = start(work, ranks), folder / f"apart-{ranks.rank}"
    if ranks.rank:
        (mine / "ckpt-00000001").mkdir(parents=True)
        (mine / "ckpt-00000001" / "manifest.json").write_text("of a history that a restart has left")
    save_checkpoint(mine, 1, kit.policy, kit.optimizer, ranks, extra={}, blobs={"ledger": b"state"}, num_keep=1)
    shards = sorted(path.name for path in (mine / "ckpt-00000001").glob("*.safetensors"))
    assert len(shards) == (0 if ranks.rank else 2), shards
    train_step(kit, ranks, step=0)
    found = find_checkpoint(mine, ranks)
    assert found is not None and found.path.parent == mine and found.blobs["ledger"] == b"state"
    found.restore(kit.policy, kit.optimizer, ranks)
    before, after = start(work, ranks).policy.model.parameters(), kit.policy.model.parameters()
    assert all(torch.equal(local_part(one), local_part(two)) for one, two in zip(before, after, strict=True))
    assert not list(mine.glob("ckpt.tmp-*")) and not list(mine.glob("*/*.tmp-*"))


def main(work: Path, folder: Path, other_run: Path) -> None:
    """All of it, in one process group."""
    torch.set_num_threads(1)
    ranks = Ranks.start("cpu", timeout_s=60)
    train(work, folder, ranks)
    train(work, folder / "lora", ranks, LORA)
    resume(work, folder / "lora-resumed", ranks, run=other_run.parent / "lora" / "run", lora=LORA)
    train(work, folder / "eight", ranks, name="adam8bit")
    resume(work, folder / "eight-resumed", ranks, run=other_run.parent / "eight" / "run", name="adam8bit")
    train(work, folder / "rows", ranks, name=BY_ROWS)
    resume(work, folder / "rows-resumed", ranks, run=other_run.parent / "rows" / "run", name=BY_ROWS)
    minibatches(work, folder / "minibatches", ranks)
    measured(work, folder / "measured", ranks)
    valued(work, folder / "valued", ranks)
    minibatches(work, folder / "once", ranks, once=True)
    minibatches(work, folder / "kept", ranks, keep=True)
    fail(work, folder, ranks)
    refuse(folder, ranks)
    apart(work, folder, ranks)
    ranks.close()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]))
