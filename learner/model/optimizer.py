"""Optimizers by name, and the learning rate as a pure function of the step: nothing about the schedule needs saving.

A builder takes the network and, as keywords, exactly the settings that it reads: `lr`, `beta1`, `beta2`, `eps` and
`weight_decay` stand beside the name, every other keyword is a constant of its own in `options`. A setting that it does
not read is refused. An entry of `OPTIMIZERS` adds a builder; a user's own needs none.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from learner.model.moments import AdamW8bit, CombinedOptimizer, OffloadedOptimizer
from streamrl.config.schema import OptimizerConfig, ScheduleConfig
from streamrl.errors import ConfigError, describe
from streamrl.extension import import_attribute, resolve_function


def constant(optimizer: Optimizer) -> LambdaLR:
    """The rate stays; transformers' own costs every start the import of its trainer."""
    return LambdaLR(optimizer, lambda step: 1.0)


SCHEDULES: dict[str, str | Callable[..., LambdaLR]] = {
    "constant": constant,
    "linear": "transformers:get_linear_schedule_with_warmup",
    "cosine_with_min_lr": "transformers:get_cosine_schedule_with_warmup",
    "cosine_with_restarts": "transformers:get_cosine_with_hard_restarts_schedule_with_warmup",
    "polynomial": "transformers:get_polynomial_decay_schedule_with_warmup",
    "inverse_sqrt": "transformers:get_inverse_sqrt_schedule",
    "warmup_stable_decay": "transformers:get_wsd_schedule",
}
"""Name -> a function of transformers that makes a schedule for an optimizer; a user's own is called as these are."""


NUM_TRIED = 1000
"""Steps at which a schedule is tried before the run."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """Learning rate of every step: a linear rise, then the named schedule's share of the way to `min_lr`."""

    name: str
    lr: float  # peak, reached when the warm-up ends
    num_steps: int  # of the whole run; later steps keep the last rate
    num_warmup_steps: int = 0  # linear rise; step 0 already moves, at lr / (num_warmup_steps + 1)
    min_lr: float = 0.0  # what the rate falls to
    num_decay_steps: int = 0  # at the end, of warmup_stable_decay
    options: Mapping[str, Any] = field(default_factory=dict)  # more of its keywords
    setting: str = "policy.scheduler"  # the section, for messages
    first_step: int = 0  # of the run; the schedule begins there, and counts from it
    _share: Callable[[int], float] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 0.0 <= self.min_lr <= self.lr:
            raise ConfigError(f"{self.setting}.min_lr={self.min_lr} must lie between 0 and the peak {self.lr}.")
        make, name = _maker(self.name, self.setting), f"{self.setting}.name={self.name}"
        sizes = {"num_warmup_steps": self.num_warmup_steps, "num_training_steps": self.num_steps,
                 "num_decay_steps": self.num_decay_steps}
        known = _parameters(make, name).parameters
        arguments = {key: sizes[key] for key in sizes if key in known} | self.options
        try:
            made = make(torch.optim.SGD([torch.zeros(1)], lr=1.0), **arguments)
        except Exception as error:
            told = describe(error) if ":" in self.name else error
            raise ConfigError(f"{name} cannot take {self.setting}.options={dict(self.options)}: {told}.") from error
        if not isinstance(made, LambdaLR):
            raise ConfigError(f"{name} gave {made!r:.60}: return a torch.optim.lr_scheduler.LambdaLR.")
        object.__setattr__(self, "_share", made.lr_lambdas[0])
        for step in {*range(self.num_warmup_steps, self.num_steps, 1 + self.num_steps // NUM_TRIED), self.num_steps}:
            self.lr_at(self.first_step + step)

    def lr_at(self, step: int) -> float:
        """The rate of the update that turns version `step` into `step + 1`."""
        step = max(0, step - self.first_step)
        if step < self.num_warmup_steps:
            return self.lr * (step + 1) / (self.num_warmup_steps + 1)
        try:
            rate = float(self.min_lr + (self.lr - self.min_lr) * self._share(min(step, self.num_steps)))
        except Exception as error:
            raise ConfigError(
                f"{self.setting}.name={self.name} fails at step {step}, see its code and {self.setting}.options="
                f"{dict(self.options)}: {describe(error)}"
            ) from error
        if not (math.isfinite(rate) and rate >= 0.0):  # else every weight would be that, too
            raise ConfigError(
                f"{self.setting}.name={self.name} with {self.setting}.options={dict(self.options)} makes a rate of "
                f"{rate} at step {step}: it must be finite and not negative."
            )
        return rate


def _maker(name: str, setting: str) -> Callable[..., LambdaLR]:
    make = resolve_function(name, SCHEDULES, setting=f"{setting}.name")
    return import_attribute(make, setting=f"{setting}.name") if isinstance(make, str) else make


def _parameters(function: Callable[..., Any], what: str) -> inspect.Signature:
    """The signature of a user's function. Raises ConfigError: it has none, as some that are built into Python."""
    try:
        return inspect.signature(function)
    except ValueError as error:
        raise ConfigError(f"{what} shows no arguments, so give a function that is written in Python.") from error


def make_schedule(
    optimizer: OptimizerConfig, scheduler: ScheduleConfig, *, num_steps: int, steps_per_batch: int = 1,
    lr_scale: float = 1.0, num_frozen_steps: int = 0, setting: str = "policy.scheduler",
) -> Schedule:
    """The schedule that the settings describe, over `num_steps` batches, with all its rates times `lr_scale`.

    Args:
        steps_per_batch: optimizer steps of each batch.
        num_frozen_steps: batches at the start in which these weights are not trained; the schedule begins after them.
        setting: the section that `scheduler` is, for messages.
    """
    make = _maker(scheduler.name, setting)
    sizes = _parameters(make, f"{setting}.name={scheduler.name}").parameters
    reads = {
        "min_lr": make is not constant,
        "decay_ratio": "num_decay_steps" in sizes,
    }
    for name in (name for name in reads if not reads[name]):
        value, usual = getattr(scheduler, name), getattr(ScheduleConfig(), name)
        if value != usual:
            raise ConfigError(
                f"{setting}.{name}={value} does nothing with {setting}.name={scheduler.name}: set it to {usual}, or "
                "choose another schedule."
            )
    total = max(1, num_steps - num_frozen_steps) * steps_per_batch
    warmup = (scheduler.num_warmup_steps or 0) * steps_per_batch
    if scheduler.num_warmup_steps is None:
        warmup = math.ceil(scheduler.warmup_ratio * total)
    elif scheduler.warmup_ratio:
        raise ConfigError(
            f"{setting}.warmup_ratio={scheduler.warmup_ratio} and num_warmup_steps={scheduler.num_warmup_steps} are "
            "two lengths of one warm-up: leave one of them out."
        )
    return Schedule(
        scheduler.name, optimizer.lr * lr_scale, total, warmup, scheduler.min_lr * lr_scale,
        min(math.ceil(scheduler.decay_ratio * total), max(0, total - warmup)), scheduler.options, setting,
        num_frozen_steps * steps_per_batch,
    )


def adamw(module: nn.Module, *, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float) -> Optimizer:
    """AdamW (Loshchilov & Hutter 2019)."""
    groups = _decay_groups(_trained(module), weight_decay)
    return torch.optim.AdamW(groups, lr=lr, betas=(beta1, beta2), eps=eps, fused=True)


def sgd(
    module: nn.Module, *, lr: float, weight_decay: float, momentum: float = 0.0, nesterov: bool = False
) -> Optimizer:
    """Gradient descent; its weight decay is part of the gradient."""
    return torch.optim.SGD(_decay_groups(_trained(module), weight_decay), lr=lr, momentum=momentum, nesterov=nesterov)


def muon(
    module: nn.Module, *, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float,
    momentum: float = 0.95, nesterov: bool = True, ns_steps: int = 5,
) -> Optimizer:
    """Muon (Jordan et al. 2024) for the matrices of hidden layers; AdamW for embeddings, head, norms and biases."""
    hidden = _hidden_matrices(module)
    matrices = {id(parameter) for parameter in hidden}
    others = [parameter for parameter in _trained(module) if id(parameter) not in matrices]
    # Updates are scaled to the root mean square of AdamW's (Liu et al. 2025), so that one rate serves both.
    members: list[Optimizer] = [torch.optim.Muon(
        hidden, lr=lr, weight_decay=weight_decay, momentum=momentum, nesterov=nesterov, ns_steps=ns_steps,
        adjust_lr_fn="match_rms_adamw",
    )]
    if others:
        groups = _decay_groups(others, weight_decay)
        members.append(torch.optim.AdamW(groups, lr=lr, betas=(beta1, beta2), eps=eps, fused=True))
    return CombinedOptimizer(members)


def adam8bit(module: nn.Module, *, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float) -> Optimizer:
    """AdamW with moments in 8 bits."""
    return AdamW8bit(_decay_groups(_trained(module), weight_decay), lr=lr, betas=(beta1, beta2), eps=eps)


OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {"adamw": adamw, "sgd": sgd, "muon": muon, "adam8bit": adam8bit}


def make_optimizer(module: nn.Module, config: OptimizerConfig, *, setting: str = "policy.optimizer") -> Optimizer:
    """The optimizer that the settings name, over all trained parameters of `module`.

    Args:
        setting: the section that `config` is, for messages.
    Raises:
        ConfigError: an unknown name, a missing package, a value out of range, or a setting that would do nothing.
    """
    build = resolve_function(config.name, OPTIMIZERS, setting=f"{setting}.name")
    arguments = _arguments(build, config, setting)
    try:
        optimizer = build(module, **arguments)
    except Exception as error:
        told = error if config.name in OPTIMIZERS else describe(error)
        raise ConfigError(f"{setting}.name={config.name} refuses these settings: {told}") from error
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(f"{setting}.name={config.name} gave {optimizer!r:.60}: return a torch.optim.Optimizer.")
    if config.offload:
        return OffloadedOptimizer(getattr(optimizer, "members", [optimizer]))
    return optimizer


@torch.no_grad()
def allocate_moments(optimizer: Optimizer) -> None:
    """Take the memory of gradients and moments now instead of in the first step; no later step differs for it.

    A step at a rate of zero, whose state is then forgotten: torch's allocator keeps the memory for the process.
    """
    if optimizer.state:
        return  # restored from a checkpoint
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)  # not zeros: some rules divide by a norm of them
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    optimizer.state.clear()


def check_optimizer(config: OptimizerConfig, *, setting: str) -> None:
    """Refuse settings as `make_optimizer` would, before any network is loaded: our own are tried on a small layer."""
    _arguments(resolve_function(config.name, OPTIMIZERS, setting=f"{setting}.name"), config, setting)
    if config.name in OPTIMIZERS:
        with torch.random.fork_rng(devices=[]):  # the seed of the run is set already
            layer = nn.Linear(2, 2)
        make_optimizer(layer, config, setting=setting)


def _arguments(build: Callable[..., Optimizer], config: OptimizerConfig, setting: str) -> dict[str, Any]:
    """Keywords for a builder, from the settings that its signature names."""
    shared = {name: getattr(config, name) for name in ("lr", "beta1", "beta2", "eps", "weight_decay")}
    if isinstance(build, type) and issubclass(build, Optimizer):
        raise ConfigError(
            f"{setting}.name={config.name} is a class, which takes parameters and not a network: write a function, "
            f"such as `def mine(module, *, lr): return {build.__name__}(module.parameters(), lr=lr)`, and name that."
        )
    signature = _parameters(build, f"{setting}.name={config.name}")
    keywords = list(signature.parameters.values())[1:]
    if any(keyword.kind is keyword.VAR_KEYWORD for keyword in signature.parameters.values()):
        return _accepted(signature, {**shared, **config.options}, config, setting)
    read, usual = {keyword.name for keyword in keywords}, OptimizerConfig()
    for name, value in shared.items():
        if name not in read and name != "lr" and value != getattr(usual, name):
            raise ConfigError(f"{setting}.{name}={value} does nothing with {setting}.name={config.name}.")
    unknown = sorted(set(config.options) - (read - shared.keys()))
    if unknown:
        known = ", ".join(sorted(read - shared.keys())) or "none"
        raise ConfigError(f"{setting}.options holds {unknown}, which {config.name} does not have; it has: {known}.")
    read_here = {name: value for name, value in shared.items() if name in read}
    return _accepted(signature, {**read_here, **config.options}, config, setting)


def _accepted(
    signature: inspect.Signature, arguments: dict[str, Any], config: OptimizerConfig, setting: str
) -> dict[str, Any]:
    try:
        signature.bind(None, **arguments)
    except TypeError as error:
        raise ConfigError(
            f"{setting}.name={config.name} cannot be called with a network and {', '.join(arguments) or 'no more'}: "
            f"{error}. Take the network first, and give what no setting has a default, or {setting}.options."
        ) from error
    return arguments


def _trained(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def _decay_groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Weight decay spares vectors (norms and biases). What is divided over other axes gets groups of its own, as an
    operator over several tensors takes those of one mesh."""
    groups: dict[tuple[bool, Any], list[nn.Parameter]] = {}
    for parameter in parameters:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups.setdefault((parameter.dim() <= 1, mesh), []).append(parameter)
    ordered = sorted(groups.items(), key=lambda item: item[0][0])
    return [{"params": held, "weight_decay": 0.0 if spared else weight_decay} for (spared, _), held in ordered]


def _hidden_matrices(module: nn.Module) -> list[nn.Parameter]:
    """Matrices that are neither an embedding's nor an output layer's (a network names its own as `output_layer`)."""
    outside: set[int] = set()
    for part in module.modules():
        ends = [part] if isinstance(part, nn.Embedding) else [getattr(part, "output_layer", None)]
        outside |= {id(parameter) for end in ends if end is not None for parameter in end.parameters()}
    return [parameter for parameter in _trained(module) if parameter.dim() == 2 and id(parameter) not in outside]
