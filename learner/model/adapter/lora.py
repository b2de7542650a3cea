"""LoRA: peft's low-rank layers inside the policy, and the policy's tensors apart as base and adapter.

Everything but the factors is frozen, so gradients, optimizer states, checkpoints and published versions hold the
factors alone. Names are those of the checkpoint: peft puts `.base_layer` behind an adapted layer's name, and
`base_tensors` takes it away again. peft is imported where it is used: that takes two seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from learner.model.adapter.quantize import Dequantized, dequantized, quantize
from learner.model.parameters import policy_parameters, policy_tensors
from learner.model.policy import Policy
from streamrl.config.schema import LoraBase, LoraConfig, LoraInit
from streamrl.errors import ConfigError
from streamrl.extension import did_you_mean
from streamrl.weights.adapter import adapted_layers

if TYPE_CHECKING:
    from peft import LoraConfig as PeftConfig

ADAPTER = "default"  # peft's name for the only one
UP_FACTOR = f".lora_B.{ADAPTER}."  # in the names of the factors that are 0 at the start
_FACTOR = f".{ADAPTER}.weight"


def scale_of(config: LoraConfig) -> float:
    """The factor of the low-rank product."""
    assert config.rank is not None
    return config.alpha / config.rank


def peft_config(config: LoraConfig, targets: Sequence[str], *, model_path: str | None = None) -> PeftConfig:
    """The settings as peft has them, with an adapter for these names of layers.

    Args:
        model_path: written into an exported adapter.
    """
    from peft import LoraConfig as PeftConfig
    from peft import TaskType

    return PeftConfig(
        r=config.rank, lora_alpha=config.alpha, lora_dropout=0.0, target_modules=list(targets),
        exclude_modules=list(config.exclude) or None,
        init_lora_weights="gaussian" if config.init is LoraInit.gaussian else True,
        task_type=TaskType.CAUSAL_LM, base_model_name_or_path=model_path,
    )


def add_adapter(policy: Policy, config: LoraConfig, *, seed: int, dtype: torch.dtype = torch.float32) -> None:
    """Freeze the policy and give its layers factors, the same on every rank; before it is sharded.

    Args:
        dtype: of the computation.
    Raises:
        ConfigError: names that are no layers of this model, or layers that the scoring does not call.
    """
    from peft import inject_adapter_in_model

    policy.requires_grad_(False)
    if config.base_quantization is not LoraBase.none:
        quantize(policy, config.base_quantization, dtype)
    names = [f"model.{name}" for name in chosen_layers(policy.model, config)]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        # Into the policy: for a mixture of transformers peft would read names of layers as those of its experts.
        inject_adapter_in_model(peft_config(replace(config, exclude=[]), names), policy, adapter_name=ADAPTER)
    for parameter in policy.parameters():
        if not parameter.requires_grad and parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)  # FSDP2 would cast it in every pass: masters serve no update


def chosen_layers(model: Any, config: LoraConfig) -> list[str]:
    """Names of the layers that get an adapter: linear ones, but for the output layer.

    The experts of a mixture are one tensor a layer, and its router is no linear layer: they stay frozen.

    Raises:
        ConfigError: a name that is no such layer's, or none is left.
    """
    head = model.get_output_embeddings()
    modules = {name: module for name, module in model.named_modules() if name}
    # A class of the architecture's own, as of a router, may compute more than a product; some routers read a layer's
    # weight without calling it.
    plain = [
        name for name, module in modules.items()
        if isinstance(module, nn.Linear) and module is not head
        and not type(module).__module__.startswith("transformers.")
        and "Router" not in type(model.get_submodule(name.rpartition(".")[0])).__name__
    ]
    if not plain:
        kinds = sorted({type(module).__name__ for module in modules.values() if hasattr(module, "weight")})
        raise ConfigError(
            "policy.lora.rank: this model has no linear layer beside the output layer, and actors add adapters to no "
            f"other ({', '.join(kinds)}): leave policy.lora.rank=null to train every weight."
        )
    everything = config.target_modules == ["all-linear"]
    for one in () if everything else config.target_modules:
        if not any(_ends_with(name, one) for name in plain):
            raise _no_such_layer("target_modules", one, model, modules, plain)
    for one in config.exclude:
        around = [name for name in modules if _ends_with(name, one)]
        holds = any(name.startswith(f"{other}.") for name in plain for other in around)
        if not any(_ends_with(name, one) for name in plain) and (holds or not around):
            raise _no_such_layer("exclude", one, model, modules, plain)  # what holds none has no adapter anyway
    chosen = [
        name for name in plain
        if (everything or any(_ends_with(name, one) for one in config.target_modules))
        and not any(_ends_with(name, one) for one in config.exclude)
    ]
    if not chosen:
        raise ConfigError(
            f"policy.lora.exclude={config.exclude} leaves no layer of policy.lora.target_modules="
            f"{config.target_modules}: remove a name of it."
        )
    return chosen


def _no_such_layer(
    setting: str, given: str, model: Any, modules: Mapping[str, nn.Module], plain: Sequence[str]
) -> ConfigError:
    """The error about a name that chooses no layer, with those that do."""
    found = next((module for name, module in modules.items() if _ends_with(name, given)), None)
    what = "no layer" if found is None else f"no linear layer ({type(found).__name__})"
    if found is not None and found in (model.get_input_embeddings(), model.get_output_embeddings()):
        what = "the embedding or the output layer"
    ends = sorted({name.rpartition(".")[2] for name in plain})
    return ConfigError(
        f"policy.lora.{setting}: {given!r} is {what} of this model: use ends of its linear layers' names, which are "
        f"{', '.join(ends)}.{did_you_mean(given, ends)}{_of_experts(modules)}"
    )


def _ends_with(name: str, end: str) -> bool:
    return name == end or name.endswith(f".{end}")


def _of_experts(modules: Mapping[str, nn.Module]) -> str:
    """A sentence on a mixture's experts, if the model has any."""
    has = any(name.endswith(".experts") and not isinstance(one, nn.ModuleList) for name, one in modules.items())
    return " The experts are one tensor a layer and stay frozen: train every weight to train them." if has else ""


def adapter_layers(module: nn.Module) -> list[Any]:
    """peft's layers with an adapter."""
    from peft.tuners.lora import LoraLayer

    return [part for part in module.modules() if isinstance(part, LoraLayer)]


def adapter_parameters(policy: Policy) -> list[tuple[str, nn.Parameter]]:
    """(name in a published version, parameter) of every factor, in module order."""
    return [
        (name.removesuffix(_FACTOR) + ".weight", parameter)
        for name, parameter in policy_parameters(policy.model) if parameter.requires_grad
    ]


def base_tensors(policy: Policy) -> Iterator[tuple[str, Tensor | Dequantized]]:
    """(checkpoint name, tensor) of every frozen weight, in module order, of tied ones the first; and saved buffers."""
    known = dequantized(policy)
    for name, tensor in policy_tensors(policy.model):
        if not tensor.requires_grad:
            yield name.replace(".base_layer.", "."), known.get(id(tensor), tensor)


def save_adapter(adapter: Mapping[str, Tensor], config: LoraConfig, folder: Path, *, model_path: str) -> None:
    """An adapter as `peft.PeftModel.from_pretrained` reads it."""
    # "all-linear" would be the experts too, for peft and a mixture of transformers.
    ends = sorted({layer.rpartition(".")[2] for layer in adapted_layers(adapter)})
    targets = ends if config.target_modules == ["all-linear"] else config.target_modules
    peft_config(config, targets, model_path=model_path).save_pretrained(str(folder))
    tensors = {f"base_model.model.{name}": factor for name, factor in adapter.items()}
    save_file(tensors, folder / "adapter_model.safetensors")


def describe(policy: Policy, config: LoraConfig, lr: float) -> str:
    """One line for the log."""
    count = {trained: sum(p.numel() for p in policy.parameters() if p.requires_grad is trained)
             for trained in (True, False)}
    experts = _of_experts(dict(policy.model.named_modules()))
    share = count[True] / max(1, sum(count.values()))
    return (
        f"LoRA: rank {config.rank} on {len(adapter_layers(policy))} layers, {count[True]:,} trained weights "
        f"({share:.2%} of all), learning rate {lr * config.lr_scale:g} = {config.lr_scale:g} x policy.optimizer.lr"
        f"{'.' * bool(experts)}{experts}"
    )

